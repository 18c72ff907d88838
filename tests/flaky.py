"""A proxy in user space between two ends of TCP connections, which does to their bytes what networks do."""

from __future__ import annotations

import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

__all__ = ["FAULTS", "FlakyProxy"]

_SLICE = 1 << 16


@dataclass(eq=False)
class _Pipe:
    """One direction of one connection, with what the fault needs to remember."""

    source: socket.socket
    target: socket.socket
    passed: int = 0
    hit: bool = False
    due: list[tuple[float, bytes]] = field(default_factory=list)


class FlakyProxy:
    """Listens at ``address``, passes every connection on to ``target``; the fault hits once ``at`` bytes have passed.

    Only the direction towards the connecting end is hit, and of it every connection: so that a second try fails, too.

    Args:
        fault: one of FAULTS, or "" for none; it may be exchanged at any time.
    """

    def __init__(self, address: tuple[str, int], target: tuple[str, int]) -> None:
        self.fault, self.at, self.hits = "", 0, 0
        self._target, self._pipes = target, list[_Pipe]()
        self._selector, self._stop = selectors.DefaultSelector(), threading.Event()
        self._listener = socket.create_server(address)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def set(self, fault: str, at: int = 0) -> None:
        """From here on connections, old ones too, have this fault, ``at`` bytes from now."""
        self.fault, self.at, self.hits = fault, at, 0
        for pipe in list(self._pipes):
            pipe.passed, pipe.hit = 0, False

    def close(self) -> None:
        """End it and all connections."""
        self._stop.set()
        self._thread.join()
        for pipe in list(self._pipes):
            self._end(pipe)
        self._listener.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            for key, _ in self._selector.select(0.01):
                if key.data is None:
                    self._accept()
                elif key.data in self._pipes:
                    with suppress(OSError):
                        self._pass(key.data)
            now_s = time.monotonic()
            for pipe in list(self._pipes):
                while pipe.due and pipe.due[0][0] <= now_s:
                    self._send(pipe, pipe.due.pop(0)[1])

    def _accept(self) -> None:
        near = self._listener.accept()[0]
        try:
            far = socket.create_connection(self._target)
        except OSError:
            near.close()
            return
        for source, target in ((near, far), (far, near)):
            pipe = _Pipe(source, target)
            self._pipes.append(pipe)
            self._selector.register(source, selectors.EVENT_READ, pipe)

    def _pass(self, pipe: _Pipe) -> None:
        fault = FAULTS.get(self.fault) if self._towards_connecting(pipe) else None
        data = pipe.source.recv(1 if fault is _trickle and pipe.hit else _SLICE)
        if not data:
            self._end(pipe)
            return
        before, pipe.passed = pipe.passed, pipe.passed + len(data)
        if fault is None or pipe.passed <= self.at:
            self._send(pipe, data)
            return
        self.hits += not pipe.hit
        fault(self, pipe, data, max(0, self.at - before))
        pipe.hit = True

    def _towards_connecting(self, pipe: _Pipe) -> bool:
        return self._pipes.index(pipe) % 2 == 1

    def _send(self, pipe: _Pipe, data: bytes) -> None:
        try:
            pipe.target.sendall(data)
        except OSError:
            self._end(pipe)

    def _end(self, pipe: _Pipe) -> None:
        if pipe not in self._pipes:
            return
        pair = self._pipes.index(pipe) // 2 * 2
        for one in self._pipes[pair : pair + 2]:
            with suppress(KeyError):
                self._selector.unregister(one.source)
            one.source.close()
        del self._pipes[pair : pair + 2]


def _cut(proxy: FlakyProxy, pipe: _Pipe, data: bytes, at: int) -> None:
    proxy._send(pipe, data[:at])
    proxy._end(pipe)


def _reset(proxy: FlakyProxy, pipe: _Pipe, data: bytes, at: int) -> None:
    proxy._send(pipe, data[:at])
    with suppress(OSError):
        pipe.target.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    proxy._end(pipe)


def _half_open(proxy: FlakyProxy, pipe: _Pipe, data: bytes, at: int) -> None:
    """Nothing comes any more, and nobody says so."""
    if not pipe.hit:
        proxy._send(pipe, data[:at])


def _trickle(proxy: FlakyProxy, pipe: _Pipe, data: bytes, at: int) -> None:
    """One byte a second."""
    at = at if not pipe.hit else 0
    proxy._send(pipe, data[:at])
    start_s = max(time.monotonic(), pipe.due[-1][0] if pipe.due else 0.0)
    pipe.due += [(start_s + i + 1, data[at + i : at + i + 1]) for i in range(len(data) - at)]


def _flip(proxy: FlakyProxy, pipe: _Pipe, data: bytes, at: int) -> None:
    """One bit of one byte, of each connection."""
    if not pipe.hit:
        data = data[:at] + bytes([data[at] ^ 1 << proxy.at % 8]) + data[at + 1 :]
    proxy._send(pipe, data)


def _delay(proxy: FlakyProxy, pipe: _Pipe, data: bytes, at: int) -> None:
    """Everything comes 200 ms late."""
    pipe.due.append((time.monotonic() + 0.2, data))


FAULTS: dict[str, Callable[[FlakyProxy, _Pipe, bytes, int], None]] = {
    "cut": _cut,
    "half-open": _half_open,
    "trickle": _trickle,
    "reset": _reset,
    "flip": _flip,
    "delay": _delay,
}
