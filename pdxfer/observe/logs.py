"""Logs: one JSON object a line, with the transfer's id, peer, epoch and trace, for collectors.

In come log records; out go lines with ``ts level logger event``, and where they are known ``transfer_id peer epoch
trace_id error``. House rule: a message about a transfer begins with ``transfer %s``, its id is the first argument, and
``extra`` has ``Timeline.about()``. The epoch is the source's: with the transfer's id it is one name at both ends.
"""

from __future__ import annotations

import json
import logging
import sys
import time

from pdxfer.trace import current

__all__ = ["JsonFormatter", "log_to_stderr"]


class JsonFormatter(logging.Formatter):
    """Formats records as above."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        found = {"ts": f"{stamp}.{int(record.msecs):03d}Z", "level": record.levelname.lower(), "logger": record.name}
        if str(record.msg).startswith("transfer %s") and isinstance(record.args, tuple):
            found["transfer_id"] = str(record.args[0])
        found |= {key: text for key in ("peer", "epoch") if (text := getattr(record, key, ""))}
        if trace := current.get() or getattr(record, "trace", ""):
            found["trace_id"] = trace.split("-")[1]
        found["event"] = record.getMessage()
        if record.exc_info:
            found["error"] = self.formatException(record.exc_info)
        return json.dumps(found)


def log_to_stderr(form: str, level: str) -> None:
    """Have this process log there. ``form``: ``json``, ``text``, or ``auto``: text on a terminal, else JSON."""
    text = form == "text" or (form == "auto" and sys.stderr.isatty())
    handler = logging.StreamHandler()
    line = "%(asctime)s %(levelname)s %(name)s %(message)s"
    handler.setFormatter(logging.Formatter(line) if text else JsonFormatter())
    logging.getLogger().addHandler(handler)
    logging.getLogger("pdxfer").setLevel(level.upper())
