"""Peer: the other process of a bench, and how the first one talks to it.

One JSON object a line, each way, over the child's standard input and output; nothing else is shared but what the
transports share. The child ends when its input ends, so it can't outlive its parent.
"""

from __future__ import annotations

import json
import subprocess
import sys
from types import TracebackType
from typing import Any

from pdxfer.errors import PeerError

__all__ = ["Child", "answer", "questions"]

_END_S = 20.0


class Child:
    """A process that runs ``python -m module``; a context manager that ends it."""

    def __init__(self, module: str, **options: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **question: Any) -> dict[str, Any]:
        """Send one question and wait for its answer; raises PeerError when the child has ended."""
        self.tell(**question)
        return self.hear()

    def tell(self, **question: Any) -> None:
        """Send something that needs no answer; raises PeerError when the child has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise PeerError("the bench's other process has ended") from error

    def hear(self) -> dict[str, Any]:
        """Wait for what the child says; raises PeerError when it has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerError("the bench's other process has ended", hint="its own error is above")
        said: dict[str, Any] = json.loads(line)
        return said

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(_END_S)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
            self._process.wait()
        finally:
            self._process.stdout.close()


def answer(**said: Any) -> None:
    """In the child: say something to the parent."""
    print(json.dumps(said), flush=True)


def questions() -> Any:
    """In the child: what the parent asks, until it has no more."""
    for line in sys.stdin:
        yield json.loads(line)
