"""What pdxfer's own tests use and users may too: conformance suites, fault wrappers, strategies, an oracle.

Importing this package imports none of them; ``transport`` needs pytest, ``strategies`` hypothesis.
"""
