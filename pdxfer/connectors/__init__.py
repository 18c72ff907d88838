"""Connectors: what an engine needs to offer and fetch requests. Each module imports only its own engine.

``hf.py`` is the reference, and the example to read before writing another.
"""
