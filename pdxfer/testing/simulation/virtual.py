"""Virtual time and threads: production code, written with threads and blocking calls, run one step at a time.

In come ordinary functions; out comes their execution as greenlets of one thread, of which exactly one runs until it
blocks or is preempted. A seeded generator picks who runs next; time moves only when nobody can run.

A *process* here is a set of tasks (threads) that ``kill`` ends at once, wherever they stand: they unwind, which may
change nothing but their own memory, since every primitive refuses to block for, or start anything in, a dead process.
"""

from __future__ import annotations

import heapq
import traceback
from collections.abc import Callable
from random import Random
from typing import Any

from pdxfer.errors import MisuseError

__all__ = ["Killed", "Process", "Task", "World"]

_PREEMPT_EVERY = 12  # calls of a primitive, on average
_TICK_S = 1e-6  # the shortest wait: sums of floats must not stand still
_SPIN = 200_000  # steps at one moment that no honest load takes


def _greenlets() -> Any:
    try:
        import greenlet
    except ImportError as error:
        raise MisuseError("the simulator needs greenlet", hint="pip install 'pdxfer[simulation]'") from error
    return greenlet


class Killed(BaseException):
    """Raised in every task of a process that has died."""


class Process:
    """A set of tasks that live and die together."""

    def __init__(self, name: str) -> None:
        self.name, self.alive = name, True
        self.tasks: dict[Task, None] = {}


class Task:
    """One thread."""

    def __init__(self, process: Process, made: Any, name: str, number: int) -> None:
        self.process, self.name, self.number = process, name, number
        self.done = self.killed = self.parked = self.woken = False
        self.token = 0
        self.joiners: list[Task] = []
        self.greenlet = made


class World:
    """The scheduler: every task, the clock, and the only source of randomness.

    Attributes:
        now_s: the monotonic clock. lost_s: time that stalls and jumps took, which no deadline can be blamed for.
        trace: a digest of who ran when; equal for equal runs.
        stall: probability that a preempted task is left aside for a while.
    """

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)  # noqa: S311 - to be repeated, not to be secret
        self.now_s, self.lost_s, self.steps, self.trace = 1000.0, 0.0, 0, 0
        self.stall, self.stall_s, self.wall_s = 0.0, 0.0, 0.0
        self.stopping = False
        self.current: Task | None = None
        self.outside = Process("outside")
        self.errors: list[str] = []
        self._ready: list[Task] = []
        self._timers: list[tuple[float, int, Task, int]] = []
        self._numbers = 0
        self._until_preempted = _PREEMPT_EVERY
        self._idle_steps = 0
        self._greenlets = _greenlets()
        self._hub = self._greenlets.getcurrent()

    # -- for whoever runs it -----------------------------------------------------------------------

    def run(self, target: Callable[[], None]) -> None:
        """Run ``target`` as a task of its own until it ends, or ``stopping`` is set; then end all others."""
        main = self.spawn(self.outside, target, name="main")
        started = [self.outside]
        while not (main.done or self.stopping):
            if not self._ready and not self._advance():
                self.errors.append("deadlock: no task can run, and no timer is set")
                break
            ready, index = self._ready, int(self.random.random() * len(self._ready))
            ready[index], ready[-1] = ready[-1], ready[index]
            task = ready.pop()
            if task.done:
                continue
            self.steps += 1
            self._idle_steps += 1
            if self._idle_steps > _SPIN:
                self.errors.append(f"livelock: {task.name} of {task.process.name} spins, and time stands still")
                break
            self.trace = (self.trace * 1000003 ^ task.number) & 0xFFFFFFFFFFFFFFFF
            self.current = task
            task.greenlet.switch()
            self.current = None
        started += [task.process for _, _, task, _ in self._timers] + [task.process for task in self._ready]
        for process in dict.fromkeys(started):
            self.kill(process)

    def spawn(self, process: Process, target: Callable[..., Any], *args: Any, name: str = "") -> Task:
        """Start a task; raises Killed for a dead process."""
        if not process.alive:
            raise Killed

        def run() -> None:
            try:
                target(*args)
            except Killed:
                pass
            except BaseException as error:  # noqa: BLE001 - a thread of production that dies so is a finding
                where = traceback.extract_tb(error.__traceback__)[-1]
                what = f"{type(error).__name__}: {error} ({where.name}, line {where.lineno})"
                self.stopping = True
                self.errors.append(f"thread {name!r} of {process.name} died of {what}")
            finally:
                task.done = True
                process.tasks.pop(task, None)
                for joiner in task.joiners:
                    self.wake(joiner)

        self._numbers += 1
        task = Task(process, self._greenlets.greenlet(run, self._hub), name, self._numbers)
        process.tasks[task] = None
        self._ready.append(task)
        return task

    def kill(self, process: Process) -> None:
        """End a process now, wherever its tasks stand. Never called by one of them."""
        process.alive = False
        before = self.current
        for task in list(process.tasks):
            task.killed = True
            self.current = task
            if task.greenlet:
                task.greenlet.parent = self._greenlets.getcurrent()
                task.greenlet.throw(Killed)
            task.done = True
            process.tasks.pop(task, None)
            for joiner in task.joiners:
                self.wake(joiner)
        self.current = before

    def jump(self, seconds: float) -> None:
        """All clocks leap ahead, as when a machine was suspended; wall clocks may leap anywhere."""
        self.wall_s = self.random.uniform(-3600.0, 3600.0)
        self.now_s += seconds
        self.lost_s += seconds

    # -- for primitives ----------------------------------------------------------------------------

    def park(self, timeout_s: float | None = None) -> bool:
        """Wait to be woken; False when the time is over."""
        task = self.current
        assert task is not None, "only a task can wait"
        if task.killed:
            raise Killed
        task.parked, task.token = True, task.token + 1
        if timeout_s is not None:
            self._numbers += 1
            heapq.heappush(self._timers, (self.now_s + max(_TICK_S, timeout_s), self._numbers, task, task.token))
        self._hub.switch()
        return task.woken

    def wake(self, task: Task) -> None:
        """Let a parked task run."""
        if task.parked:
            task.parked, task.woken = False, True
            self._ready.append(task)

    def wake_all(self, tasks: list[Task]) -> None:
        """Let all of them run and empty the list."""
        for task in tasks:
            self.wake(task)
        tasks.clear()

    def preempt(self) -> None:
        """Maybe let others run first."""
        self._until_preempted -= 1
        task = self.current
        if self._until_preempted > 0 or task is None or task.killed:
            return
        self._until_preempted = int(self.random.random() * 2 * _PREEMPT_EVERY) + 1
        if self.stall and task.process is not self.outside and self.random.random() < self.stall:
            seconds = self.random.random() * self.stall_s
            self.lost_s += seconds
            self.sleep(seconds)
            return
        self._ready.append(task)
        self._hub.switch()

    def sleep(self, seconds: float) -> None:
        """Let time pass for the current task."""
        until_s = self.now_s + seconds
        while self.park(until_s - self.now_s):
            pass

    def join(self, task: Task, timeout_s: float | None = None) -> bool:
        """Wait for the end of a task; False when the time is over."""
        if not task.done and self.current is not None:
            task.joiners.append(self.current)
            until_s = None if timeout_s is None else self.now_s + timeout_s
            while not task.done:
                if not self.park(None if until_s is None else until_s - self.now_s):
                    break
        return task.done

    def _advance(self) -> bool:
        """Move the clock to the next timer that somebody waits for."""
        while self._timers and not self._ready:
            when_s, _, task, token = heapq.heappop(self._timers)
            if task.parked and task.token == token and not task.done:
                if when_s > self.now_s:
                    self.now_s, self._idle_steps = when_s, 0
                task.parked, task.woken = False, False
                self._ready.append(task)
                while self._timers and self._timers[0][0] <= self.now_s:
                    _, _, other, token = heapq.heappop(self._timers)
                    if other.parked and other.token == token and not other.done:
                        other.parked, other.woken = False, False
                        self._ready.append(other)
        return bool(self._ready)
