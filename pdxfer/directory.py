"""Directory: a private place for one Unix socket, gone with its owner, or swept by the next one if that was killed.

In come a prefix and a file name; out comes a path that only this user can enter. It is locked for as long as we live:
a sweep removes what is not locked, and in it only the file that belongs there.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import tempfile
from contextlib import suppress

from pdxfer.errors import MisuseError

__all__ = ["PrivateDirectory", "clear_stale_socket", "remove_socket"]

_ATTEMPTS = 10


class PrivateDirectory:
    """A fresh directory with mode 0700, for one file.

    Args:
        prefix: of its name, which tells whose it is: those with the same prefix sweep each other's leftovers.
        file: the name of the one file (a socket) that will lie in it.
        base: where to make it; "" is the system's temporary directory.

    Attributes:
        path: of the directory. file_path: of the file.

    Raises:
        OSError: no directory can be made there.
    """

    def __init__(self, prefix: str, file: str, base: str = "") -> None:
        base = base or tempfile.gettempdir()
        _sweep(base, prefix, file)
        self.path, self._lock = _make(base, prefix)
        self.file_path = os.path.join(self.path, file)
        self._closed = False

    def close(self) -> None:
        """Remove it. Idempotent."""
        if not self._closed:
            self._closed = True
            _remove(self.file_path, self._lock)


def _make(base: str, prefix: str) -> tuple[str, int]:
    for _ in range(_ATTEMPTS):
        path = tempfile.mkdtemp(prefix=prefix, dir=base)
        try:
            lock = _try_lock(path)
        except OSError:
            os.rmdir(path)
            raise
        if lock is not None:
            return path, lock
        # Another owner's sweep took it for a dead one's, between the two lines above.
    raise OSError(0, "every one is swept at once")


def _try_lock(path: str) -> int | None:
    """Lock a directory that still has its name; None when it is locked, gone or not ours to open.

    Raises:
        OSError: no descriptor is left.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_nlink:
            return fd
    except OSError:
        pass
    os.close(fd)
    return None


def _remove(file_path: str, lock: int) -> None:
    with suppress(OSError):
        os.unlink(file_path)
    with suppress(OSError):  # somebody put something else there; it is theirs
        os.rmdir(os.path.dirname(file_path))
    os.close(lock)


def _sweep(base: str, prefix: str, file: str) -> None:
    """Remove what killed owners of this user left behind."""
    with os.scandir(base) as entries:
        leftovers = [entry.path for entry in entries if entry.name.startswith(prefix)]
    for path in leftovers:
        with suppress(OSError):
            if os.lstat(path).st_uid == os.geteuid() and (lock := _try_lock(path)) is not None:
                _remove(os.path.join(path, file), lock)


def clear_stale_socket(path: str) -> None:
    """Remove what a dead server left; refuse when a living one answers, or when it is not a socket (MisuseError)."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise MisuseError(f"{path!r} exists and is not a socket", hint="choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except OSError as error:
            raise MisuseError(f"can't tell whether a server listens at {path!r}: {error}") from error
    raise MisuseError(f"another server listens at {path!r}", hint="stop it or choose another path")


def remove_socket(path: str, inode: int) -> None:
    """Unlink our own socket, never one that somebody has put there since."""
    with suppress(OSError):
        if os.stat(path).st_ino == inode:
            os.unlink(path)
