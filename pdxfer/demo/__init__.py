"""The demo: real tiny hybrid models, real tensor parallelism, real processes, one request moved between them.

``models.py`` makes the models, ``tp.py`` cuts them over ranks, ``worker.py`` is one rank's process,
``run.py`` starts two workers and compares, ``report.py`` prints. Everything here stands on the public
API of the package; the package does not import it.
"""
