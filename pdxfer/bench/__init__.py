"""Bench: what copies, plans and hand-offs cost here, always beside what this machine can do at best in the same run.

``cli.py`` is the command; ``plan.py``, ``copy.py`` and ``handoff.py`` each measure one thing and return plain rows;
``measure.py`` has clocks, statistics and the facts of the machine; ``peer.py`` is the other process.
"""
