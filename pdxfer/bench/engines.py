"""Engines: what others make of the same bytes, one descriptor per run: NIXL, and Mooncake's transfer engine.

In comes a case; out come seconds of one transfer, bytes compared afterwards. Each engine runs in two processes of its
own, one for each worker with all its ranks' memory, since NIXL may end a process by a segmentation fault. What can be
prepared ahead (registration, descriptor lists, the request) is not in the time.
"""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np

from pdxfer.bench.case import Case, End, check, fill
from pdxfer.bench.peer import Child, Clock, Line, main
from pdxfer.bench.runs import moves
from pdxfer.errors import DeadlineError, MisuseError, TransportError
from pdxfer.kernels import Offsets
from pdxfer.transport import create_transport

__all__ = ["ENGINES", "Engine", "Pair", "missing", "serve"]

_WAIT_S = 120.0
_QUIET = {"NIXL_LOG_LEVEL": "WARN", "MC_LOG_LEVEL": "WARNING"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One way in which another engine is used. ``modules``: any of these brings it."""

    name: str
    modules: tuple[str, ...]
    write: bool
    environ: Mapping[str, str] = field(default_factory=dict)


_NIXL = ("nixl._api", "nixl_cu12._api", "nixl_cu13._api")
ENGINES = (
    Engine(name="nixl WRITE", modules=_NIXL, write=True),
    Engine(name="nixl READ", modules=_NIXL, write=False),
    Engine(name="nixl WRITE, SGL", modules=_NIXL, write=True, environ={"NIXL_UCX_SGL_ENABLE": "1"}),
    Engine(name="mooncake tcp WRITE", modules=("mooncake.engine",), write=True, environ={"MC_FORCE_TCP": "1"}),
)


def missing(engine: Engine) -> str:
    """Why an engine can't be used here; empty when it can. Imports it."""
    return _find(engine.modules)[1]


def _find(modules: tuple[str, ...]) -> tuple[Any, str]:
    why = ""
    for name in modules:
        try:
            return import_module(name), ""
        except ImportError as error:
            why = why if why and not str(error).startswith("lib") else str(error)
    return None, why


class Pair(ExitStack):
    """The two processes of one engine, ready to move a case. A context manager."""

    def __init__(self, engine: Engine, case: Case, clock: Clock) -> None:
        super().__init__()
        ends: tuple[End, End] = ("prefill", "decode") if engine.write else ("decode", "prefill")
        asked: dict[str, Any] = {"engine": engine.name, "case": case.to_json()}
        environ = {**_QUIET, **engine.environ}
        try:
            self._lines = {e: self.enter_context(Child(serve, clock, environ=environ, end=e, **asked)) for e in ends}
            self._active, passive = (self._lines[end] for end in ends)
            self._active.hear()
            self.descriptors = int(self._active.ask(do="meet", **passive.hear())["descriptors"])
        except BaseException:
            self.close()
            raise

    def run(self) -> float:
        """Move everything once; returns seconds."""
        return float(self._active.ask(do="run")["seconds"])

    def check(self) -> int:
        """Clear the target, move everything once more and compare; returns bytes."""
        self._lines["decode"].ask(do="clear")
        self.run()
        return int(self._lines["decode"].ask(do="check")["nbytes"])


def serve(line: Line, *, engine: str, case: dict[str, Any], end: End) -> None:
    """One worker's process."""
    chosen = next(known for known in ENGINES if known.name == engine)
    made = Case.from_json(case)
    with create_transport("shm") as plane:  # memfds are what agents have, too
        memory = [
            [np.frombuffer(plane.allocate(r.nbytes, r.name).view, np.uint8) for r in rank.regions]
            for rank in made.layout(end).ranks
        ]
        for rank, buffers in enumerate(memory if end == "prefill" else ()):
            fill(made, end, rank, buffers)
        addresses = [[int(buffer.ctypes.data) for buffer in buffers] for buffers in memory]
        module, why = _find(chosen.modules)
        if module is None:
            raise MisuseError(f"{engine} can't be used: {why}")
        kind = _Mooncake if "mooncake" in engine else _Nixl
        side = kind(module, end, [buffer for buffers in memory for buffer in buffers], write=chosen.write)
        line.tell(peer=side.introduction(), addresses=addresses)
        for question in line.questions():
            if question["do"] == "meet":
                runs = _descriptors(made, end, addresses, question["addresses"])
                line.tell(descriptors=side.meet(question["peer"], *runs))
            elif question["do"] == "run":
                started = time.perf_counter()
                side.move()
                line.tell(seconds=time.perf_counter() - started)
            elif question["do"] == "clear":
                for buffers in memory:
                    for buffer in buffers:
                        buffer[:] = 0
                line.tell()
            else:
                line.tell(nbytes=sum(check(made, end, rank, buffers) for rank, buffers in enumerate(memory)))
        os._exit(0)  # with a UCX back-end, the interpreter's own end may be a crash


def _descriptors(
    case: Case, end: End, mine: list[list[int]], theirs: list[list[int]]
) -> tuple[Offsets, Offsets, Offsets]:
    """Addresses here and there, and lengths: without fan-out, as no such engine has it."""
    source, target = (mine, theirs) if end == "prefill" else (theirs, mine)
    here, there, lengths = [], [], []
    for move in moves(case, chunk_bytes=1 << 40, fan_out=False):
        for part in move.parts:
            at = part.at + source[move.edge.source][part.source_region]
            to = part.to + target[move.edge.target][part.target_region]
            here.append(at if end == "prefill" else to)
            there.append(to if end == "prefill" else at)
            lengths.append(part.lengths)
    return np.concatenate(here), np.concatenate(there), np.concatenate(lengths)


class _Nixl:
    def __init__(self, module: Any, end: End, buffers: list[Any], *, write: bool) -> None:
        self.operation = "WRITE" if write else "READ"
        self.agent = module.nixl_agent(f"bench-{end}", module.nixl_agent_config(backends=["UCX"]))
        self.agent.register_memory([(int(b.ctypes.data), b.nbytes, 0, "") for b in buffers], mem_type="DRAM")

    def introduction(self) -> str:
        """What the other end needs to know."""
        return base64.b64encode(self.agent.get_agent_metadata()).decode()

    def meet(self, peer: str, here: Offsets, there: Offsets, lengths: Offsets) -> int:
        """Prepare the transfer of all runs; returns the number of descriptors."""
        name = self.agent.add_remote_agent(base64.b64decode(peer))
        sides = []
        for whose, addresses in (("NIXL_INIT_AGENT", here), (name, there)):
            rows = np.stack([addresses, lengths, np.zeros_like(lengths)], axis=1).astype(np.uint64)
            sides.append(self.agent.prep_xfer_dlist(whose, rows, mem_type="DRAM"))
        every = np.arange(len(lengths), dtype=np.int32)
        self._handle = self.agent.make_prepped_xfer(self.operation, sides[0], every, sides[1], every)
        return len(lengths)

    def move(self) -> None:
        """Post everything and wait until it is done."""
        until_s = time.monotonic() + _WAIT_S
        state = self.agent.transfer(self._handle)
        while state != "DONE":
            if state == "ERR":
                raise TransportError(f"nixl says {state}")
            if time.monotonic() > until_s:
                raise DeadlineError("nixl did not finish in time")
            state = self.agent.check_xfer_state(self._handle)


class _Mooncake:
    def __init__(self, module: Any, end: End, buffers: list[Any], *, write: bool) -> None:
        del end, write
        self.engine = module.TransferEngine()
        if self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise TransportError("mooncake could not be initialised")
        for buffer in buffers:
            if self.engine.register_memory(int(buffer.ctypes.data), buffer.nbytes):
                raise TransportError("mooncake did not register the memory")

    def introduction(self) -> str:
        """Where the other end finds us."""
        return f"127.0.0.1:{self.engine.get_rpc_port()}"

    def meet(self, peer: str, here: Offsets, there: Offsets, lengths: Offsets) -> int:
        """Keep the lists; the engine has no preparation."""
        self._asked = peer, here.tolist(), there.tolist(), lengths.tolist()
        return len(lengths)

    def move(self) -> None:
        """Write everything."""
        if self.engine.batch_transfer_sync_write(*self._asked):
            raise TransportError("mooncake's transfer failed")


if __name__ == "__main__":
    main(serve)
