"""Trace: the W3C traceparent that a transfer carries, so that prefill, transfer and decode are one trace.

In comes text from engines, tickets and peers; out comes a traceparent, or "". What is carried decides nothing: it is
outside the ticket's seal, and only spans (``observe/tracing.py``), logs and ``explain`` show it.
"""

from __future__ import annotations

import re
from contextvars import ContextVar

__all__ = ["HEADER", "current", "traceparent"]

HEADER = "traceparent"
_FORM = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")

#: Of the transfer that this thread works on: what control calls carry, and what a handler was called with.
current: ContextVar[str] = ContextVar("pdxfer_traceparent", default="")


def traceparent(text: object) -> str:
    """``text``, when it is a traceparent of the version that we know; else ""."""
    return text if isinstance(text, str) and len(text) == 55 and _FORM.fullmatch(text) else ""
