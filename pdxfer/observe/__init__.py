"""Observe: what one process's agents are doing, as metrics, JSON, a page, health and traces (see ``observer.py``)."""

from __future__ import annotations

from pdxfer.observe.admin import DEFAULT_ADMIN, Admin
from pdxfer.observe.observer import Observer

__all__ = ["DEFAULT_ADMIN", "Admin", "Observer"]
