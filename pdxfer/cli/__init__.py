"""The command line: ``main.py`` is the shell, every other module one command that it imports when asked for."""
