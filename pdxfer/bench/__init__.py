"""Bench: what hand-offs, links and plans cost here, always beside what this machine can do at best in the same run.

``cli.py`` is the command and ``show.py`` its tables. ``link.py`` sweeps raw transports; ``handoff.py`` measures whole
transfers of a ``case.py`` (``ranks.py`` are the agents, ``ceiling.py`` and ``engines.py`` what they are put beside,
``runs.py`` the same bytes as runs) and ``suite.py`` judges them; ``plan.py`` and ``vllm.py`` each measure one
thing. ``compare.py`` and ``report.py`` read what was saved; ``measure.py`` has statistics and the facts of the
machine; ``peer.py`` is how the ends talk.
"""
