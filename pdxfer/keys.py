"""Keys: the secrets that a worker seals tickets with, and how any secret comes from a file.

In comes a path, a file descriptor, or nothing (a random key that dies with the process); out come one or two active
keys: the first signs, both verify. Secrets never come by environment or command line, and never appear in a repr.

A key file has one key a line, 64 or more hexadecimal digits; empty lines and ``#`` comments don't count. To rotate,
write the new key above the old one, and drop the old one when the last ticket under it is too old (``hold_max_s``).
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import stat
import time
from dataclasses import dataclass, field
from functools import lru_cache

from pdxfer.errors import MisuseError, TicketError

__all__ = ["TicketKeys", "check_key", "key_id", "parse_keys", "read_secret"]

_KEY_BYTES = 32
_ACTIVE_MAX = 2
_FILE_BYTES_MAX = 64 << 10
_LOOK_EVERY_S = 1.0
_log = logging.getLogger(__name__)


def check_key(key: bytes) -> bytes:
    """Return ``key``; raises TicketError when it is empty or shorter than 32 bytes."""
    if len(key) < _KEY_BYTES:
        raise TicketError(f"the ticket key has {len(key)} bytes; at least {_KEY_BYTES} are needed")
    return key


@lru_cache(maxsize=_ACTIVE_MAX)
def key_id(key: bytes) -> bytes:
    """Name of a key, 8 bytes, which says nothing about it."""
    return hmac.digest(check_key(key), b"pdxfer key id", "sha256")[:8]


def read_secret(path: str, *, nbytes_max: int = _FILE_BYTES_MAX) -> bytes:
    """Read a file (or ``fd:N``, an open descriptor) that nobody else can read; raises MisuseError."""
    try:
        fd = os.dup(int(path[3:])) if path.startswith("fd:") else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, ValueError, OverflowError) as error:
        raise MisuseError(f"the secret {path!r} can't be opened: {error}") from error
    try:
        found = os.fstat(fd)
        regular, mode = stat.S_ISREG(found.st_mode), stat.S_IMODE(found.st_mode)
        if regular and (mode & 0o007 or found.st_uid not in (0, os.geteuid())):
            raise MisuseError(
                f"the secret {path!r} has mode {mode:04o} and owner {found.st_uid}: others can read or change it",
                hint="chmod 0600, with this process's user as owner",
            )
        data = b""
        while len(data) <= nbytes_max and (more := os.read(fd, nbytes_max + 1 - len(data))):
            data += more
    except OSError as error:
        raise MisuseError(f"the secret {path!r} can't be read: {error.strerror}") from error
    finally:
        os.close(fd)
    if not data.strip() or len(data) > nbytes_max:
        raise MisuseError(f"the secret {path!r} is {'empty' if not data.strip() else f'over {nbytes_max} bytes'}")
    return data


@dataclass(slots=True)
class TicketKeys:
    """The active keys of one worker, newest first. Thread-safe, and may be sent to the worker's own other processes.

    A file that changed is read again, at most once a second; one that can't be used any more changes nothing and is
    reported in the log.
    """

    keys: tuple[bytes, ...] = field(repr=False)
    path: str = ""
    _seen: tuple[int, int, int] = (0, 0, 0)
    _looked_s: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= len(self.keys) <= _ACTIVE_MAX:
            raise TicketError(f"there are {len(self.keys)} ticket keys; one or two can be active")
        for key in self.keys:
            check_key(key)

    @classmethod
    def create(cls, source: str = "") -> TicketKeys:
        """Keys from a path or ``fd:N``, or one random key for ``""``; raises MisuseError (TicketError for bad keys)."""
        if not source:
            return cls((secrets.token_bytes(_KEY_BYTES),))
        seen = _look(source)
        return cls(parse_keys(read_secret(source), source), "" if source.startswith("fd:") else source, seen)

    def active(self) -> tuple[bytes, ...]:
        """The keys that verify now; the first one signs."""
        now_s = time.monotonic()
        if self.path and now_s - self._looked_s > _LOOK_EVERY_S:
            self._looked_s = now_s
            seen = _look(self.path)
            if seen != self._seen:
                try:
                    self.keys = parse_keys(read_secret(self.path), self.path)
                    self._seen = seen
                except MisuseError as error:
                    _log.error("the old ticket keys stay: %s", error.message)
        return self.keys


def _look(path: str) -> tuple[int, int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return found.st_mtime_ns, found.st_size, found.st_ino


def parse_keys(data: bytes, source: str) -> tuple[bytes, ...]:
    """The keys in a key file's bytes; raises TicketError. ``source``: its name, for the message."""
    lines = [line.partition(b"#")[0].strip() for line in data.splitlines()]
    try:
        keys = tuple(bytes.fromhex(line.decode("ascii")) for line in lines if line)
    except ValueError:
        hint = "one key a line, as from: openssl rand -hex 32"
        raise TicketError(f"the key file {source!r} has a line that is no hexadecimal key", hint=hint) from None
    return TicketKeys(keys).keys
