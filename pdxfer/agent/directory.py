"""Directory: where one agent's control socket lies, gone with the agent, or swept by the next one if it was killed.

In comes nothing but the system's temporary directory; out comes a path that only this user can enter. It is locked
for as long as we live: a sweep removes what is not locked, and in it only what an agent puts there.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from contextlib import suppress

from pdxfer.errors import ExhaustedError

__all__ = ["PrivateDirectory"]

_PREFIX = "pdxfer-agent-"
_SOCKET = "control.sock"
_ATTEMPTS = 10


class PrivateDirectory:
    """A fresh directory with mode 0700.

    Attributes:
        path: of the directory. socket_path: where the agent's private control socket goes.

    Raises:
        ExhaustedError: no directory can be made in the system's temporary one.
    """

    def __init__(self) -> None:
        base = tempfile.gettempdir()
        try:
            _sweep(base)
            self.path, self._lock = _make(base)
        except OSError as error:
            raise ExhaustedError(f"no directory can be made in {base}: {error.strerror}", hint="set TMPDIR") from error
        self.socket_path = os.path.join(self.path, _SOCKET)
        self._closed = False

    def close(self) -> None:
        """Remove it. Idempotent."""
        if not self._closed:
            self._closed = True
            _remove(self.path, self._lock)


def _make(base: str) -> tuple[str, int]:
    for _ in range(_ATTEMPTS):
        path = tempfile.mkdtemp(prefix=_PREFIX, dir=base)
        lock = _try_lock(path)
        if lock is not None:
            return path, lock
        # Another agent's sweep took it for a dead one's, between the two lines above.
    raise OSError(0, "every one is swept at once")


def _try_lock(path: str) -> int | None:
    """Lock a directory that still has its name; None when it is locked, gone or not ours to open."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_nlink:
            return fd
    except OSError:
        pass
    os.close(fd)
    return None


def _remove(path: str, lock: int) -> None:
    with suppress(OSError):
        os.unlink(os.path.join(path, _SOCKET))
    with suppress(OSError):  # somebody put something else there; it is theirs
        os.rmdir(path)
    os.close(lock)


def _sweep(base: str) -> None:
    """Remove what killed agents of this user left behind."""
    with os.scandir(base) as entries:
        leftovers = [entry.path for entry in entries if entry.name.startswith(_PREFIX)]
    for path in leftovers:
        with suppress(OSError):
            if os.lstat(path).st_uid == os.geteuid() and (lock := _try_lock(path)) is not None:
                _remove(path, lock)
