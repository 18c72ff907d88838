"""Page."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdxfer.observe.observer import Observer

__all__ = ["POLICY", "render"]

POLICY = "default-src 'none'"


def render(observer: Observer) -> str:
    """Later."""
    return ""
