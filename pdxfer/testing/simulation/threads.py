"""Stand-ins for ``threading``, ``time`` and ``secrets``, put into production's modules while a world runs.

In come production's modules, as they are; out they come blocking in virtual time, so that not a line of them is written
twice. What is bound when a class is made (default factories of dataclasses) is replaced, too.
"""

from __future__ import annotations

import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import is_dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

from pdxfer.testing.simulation.virtual import Task, World

__all__ = ["installed"]

_MODULES = (
    "pdxfer.agent",
    "pdxfer.driver",
    "pdxfer.keys",
    "pdxfer.transfer",
    "pdxfer.transport.base",
    "pdxfer.transport.memory",
)

_world: World  # the one that is installed


class _RLock:
    """Both kinds of lock; ``Lock`` refuses to be taken twice by letting its owner wait forever."""

    reentrant = True

    def __init__(self) -> None:
        self._owner: Task | None = None
        self._depth = 0
        self._waiting: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        world = _world
        world.preempt()
        me = world.current
        until_s = world.now_s + timeout
        while self._owner is not None and not (self.reentrant and self._owner is me):
            if not blocking:
                return False
            assert me is not None
            self._waiting.append(me)
            if not world.park(None if timeout < 0 else until_s - world.now_s):
                if me in self._waiting:
                    self._waiting.remove(me)
                return False
        self._owner = me
        self._depth += 1
        return True

    def release(self) -> None:
        if self._owner is not _world.current:
            return  # of a task that was killed while it waited
        self._depth -= 1
        if not self._depth:
            self._owner = None
            _world.wake_all(self._waiting)

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def release_all(self) -> int:
        depth, self._depth = self._depth, 1
        self.release()
        return depth

    def restore(self, depth: int) -> None:
        self.acquire()
        self._depth = depth


class _Lock(_RLock):
    reentrant = False


class _Condition:
    def __init__(self, lock: _RLock | None = None) -> None:
        self._lock = lock or _RLock()
        self._waiting: deque[Task] = deque()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        me = _world.current
        assert me is not None
        self._waiting.append(me)
        depth = self._lock.release_all()
        woken = _world.park(timeout)
        if me in self._waiting:
            self._waiting.remove(me)
        self._lock.restore(depth)
        return woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        until_s = None if timeout is None else _world.now_s + timeout
        result = predicate()
        while not result:
            left_s = None if until_s is None else until_s - _world.now_s
            if left_s is not None and left_s <= 0:
                break
            self.wait(left_s)
            result = predicate()
        return result

    def notify(self, n: int = 1) -> None:
        for _ in range(min(n, len(self._waiting))):
            _world.wake(self._waiting.popleft())

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class _Event:
    def __init__(self) -> None:
        self._set = False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        _world.preempt()
        return self._set

    def set(self) -> None:
        self._set = True
        _world.wake_all(self._waiting)

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        until_s = None if timeout is None else _world.now_s + timeout
        while not self._set:
            me = _world.current
            assert me is not None
            self._waiting.append(me)
            woken = _world.park(None if until_s is None else until_s - _world.now_s)
            if me in self._waiting:
                self._waiting.remove(me)
            if not woken:
                break
        return self._set


class _Thread:
    def __init__(
        self,
        *,
        target: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        name: str = "",
        daemon: bool | None = None,
    ) -> None:
        self.name, self.daemon = name, daemon
        self._run = lambda: target(*args, **(kwargs or {}))
        self._task: Task | None = None

    def start(self) -> None:
        assert _world.current is not None
        self._task = _world.spawn(_world.current.process, self._run, name=self.name)
        _world.preempt()

    def join(self, timeout: float | None = None) -> None:
        assert self._task is not None
        _world.join(self._task, timeout)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done


def _monotonic() -> float:
    _world.preempt()
    return _world.now_s


@contextmanager
def _defaults(module: Any, stands: dict[Any, Any]) -> Iterator[None]:
    """Replace default factories of dataclasses of ``module``: they sit in cells of ``__init__``."""
    found = [
        (cell, cell.cell_contents)
        for kind in vars(module).values()
        if isinstance(kind, type) and is_dataclass(kind) and kind.__module__ == module.__name__
        for cell in getattr(kind.__init__, "__closure__", None) or ()
        if cell.cell_contents.__hash__ and cell.cell_contents in stands
    ]
    for cell, real in found:
        cell.cell_contents = stands[real]
    try:
        yield
    finally:
        for cell, real in found:
            cell.cell_contents = real


@contextmanager
def installed(world: World, **more: Any) -> Iterator[None]:
    """Run production code in ``world`` while inside.

    Args:
        more: stand-ins by dotted name with ``__`` for the dots behind ``pdxfer``: for what lies beyond the process.
    """
    global _world
    _world = world
    stands = {
        threading: SimpleNamespace(
            Thread=_Thread, Lock=_Lock, RLock=_RLock, Condition=_Condition, Event=_Event,
            TIMEOUT_MAX=threading.TIMEOUT_MAX,
        ),
        time: SimpleNamespace(
            monotonic=_monotonic, perf_counter=lambda: world.now_s, sleep=world.sleep,
            time=lambda: world.now_s + world.wall_s,
        ),
        secrets: SimpleNamespace(
            token_bytes=world.random.randbytes, token_hex=lambda n: world.random.randbytes(n).hex()
        ),
    }  # fmt: skip
    bound = {getattr(real, name): new for real, stand in stands.items() for name, new in vars(stand).items()}
    with ExitStack() as stack:
        for name, value in more.items():
            stack.enter_context(mock.patch(f"pdxfer.{name.replace('__', '.')}", value))
        for module in [module for name, module in sys.modules.items() if name.startswith(_MODULES)]:
            stack.enter_context(_defaults(module, bound))
            for real, stand in stands.items():
                if vars(module).get(real.__name__) is real:
                    stack.enter_context(mock.patch.object(module, real.__name__, stand))
        yield
