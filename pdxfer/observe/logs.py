"""Logs: one JSON object a line, with the transfer's id and trace, for collectors.

In come log records; out go lines with ``ts level event``, and where they are known ``transfer_id trace_id error``.
House rule: a message about a transfer begins with ``transfer %s``, and its id is the first argument.
"""

from __future__ import annotations

import json
import logging
import time

from pdxfer.trace import current

__all__ = ["JsonFormatter"]


class JsonFormatter(logging.Formatter):
    """Formats records as above."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        found = {"ts": f"{stamp}.{int(record.msecs):03d}Z", "level": record.levelname.lower(), "logger": record.name}
        if record.msg.startswith("transfer %s") and isinstance(record.args, tuple):
            found["transfer_id"] = str(record.args[0])
        if trace := current.get():
            found["trace_id"] = trace.split("-")[1]
        found["event"] = record.getMessage()
        if record.exc_info:
            found["error"] = self.formatException(record.exc_info)
        return json.dumps(found)
