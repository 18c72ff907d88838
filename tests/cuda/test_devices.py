"""Hand-offs between workers whose caches are tensors: on the host everywhere, on GPUs where there are some.

    tests/run -m cuda tests/cuda        with one GPU or more; what needs two says so where there is one

The bodies are the same: only the devices differ. Prefill ranks take the even GPUs and decode ranks the odd ones. No GPU
has run this yet.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from pdxfer.agent import Agent, AgentConfig
from pdxfer.builders import Parallel
from pdxfer.errors import MisuseError
from pdxfer.layout import Layout
from pdxfer.testing.oracle import Memory, Oracle, random_memory
from pdxfer.ticket import Ticket
from pdxfer.transport import create_transport
from tests.conftest import require
from tests.workers import layouts

torch = require("torch")

TOKENS = 70
KINDS = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
ARRANGEMENTS = {"4 to 2": (4, 2), "2 to 4": (2, 4), "4 to 6": (4, 6), "1 to 1": (1, 1)}
SCHEMES = ["shm", "tcp", "nixl", "ucx", "gloo", "nccl"]
ELSEWHERE = {"nccl": "it moves device memory only", "ucx": "tests/ucx_suite.py has it, in a process without NIXL"}


def devices(kind: str, *, apart: bool) -> tuple[list[str], list[str]]:
    """Devices of the two workers; skips where there are not enough."""
    if kind == "cpu":
        return ["cpu"], ["cpu"]
    count = torch.cuda.device_count()
    if count < 1 + apart:
        pytest.skip(f"{count} GPUs are here, {1 + apart} are needed")
    names = [f"cuda:{i}" for i in range(count)]
    return (names[::2], names[1::2]) if apart else (names[:1], names[:1])


class Ranks:
    """Agents of all ranks of a worker over tensors, rank r on the r-th of the devices."""

    def __init__(self, stack: ExitStack, memory: Memory, names: Sequence[str], **config) -> None:
        self.memory, self.agents, self.tensors = memory, list[Agent](), []
        self.fences = []
        for rank, buffers in enumerate(memory.buffers):
            device = torch.device(names[rank % len(names)])
            self.tensors.append([torch.from_numpy(buffer).clone().to(device) for buffer in buffers])
            self.fences.append(self._fence(device))
            of_agent = AgentConfig(rank=rank, arena_bytes=1 << 20, chunk_bytes=64 << 10, **config)
            agent = stack.enter_context(Agent(of_agent))
            agent.attach(memory.layout, self.tensors[-1])
            agent.start()
            self.agents.append(agent)
        for agent in self.agents:
            agent.siblings.update({other.config.rank: other.address for other in self.agents})

    @staticmethod
    def _fence(device) -> object:
        """Waits for an event on the device's stream, as an engine's connector does; nothing on the host."""
        if device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return event.synchronize

    def offer(self, key: str) -> str:
        parts = [
            agent.offer(key, tables, kv_tokens=TOKENS, fence=fence)
            for agent, tables, fence in zip(self.agents, self.memory.tables, self.fences, strict=True)
        ]
        return Ticket.join(parts).encode()

    def fetch(self, ticket: str) -> set[str]:
        """Fetch on every rank; returns the modes that were used."""
        started = [a.start_fetch(ticket, t) for a, t in zip(self.agents, self.memory.tables, strict=True)]
        received = [fetch.wait() for fetch in started]
        for done in received:
            done.release()
        return {edge.mode for done in received for edge in done.edges}

    def host(self) -> Memory:
        """What lies in the tensors now."""
        return replace(self.memory, buffers=tuple(tuple(t.cpu().numpy() for t in rank) for rank in self.tensors))


def hand_over(pair: tuple[Layout, Layout], places: tuple[list[str], list[str]], **config) -> set[str]:
    have, want = (random_memory(layout, TOKENS, np.random.default_rng(seed)) for seed, layout in enumerate(pair))
    oracle = Oracle.of(pair[0], key="one", tokens=TOKENS)
    oracle.put(have)
    with ExitStack() as stack:
        source = Ranks(stack, have, places[0], worker="P", **config)
        target = Ranks(stack, want, places[1], worker="D", **config)
        before = target.host().copy()
        modes = target.fetch(source.offer("one"))
        oracle.check(target.host(), before)
        for agent in (*source.agents, *target.agents):
            agent.check_integrity()
    return modes


def tp(source: int, target: int) -> tuple[Layout, Layout]:
    return layouts(Parallel(tp=source), Parallel(tp=target))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_unequal_tp_between_two_sets_of_devices(kind, name):
    places = devices(kind, apart=True)
    assert hand_over(tp(*ARRANGEMENTS[name]), places, transports=("shm",)) <= {"packed", "direct"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_transport_carries_what_lies_on_a_device(kind, scheme):
    if kind == "cpu" and scheme in ELSEWHERE:
        pytest.skip(ELSEWHERE[scheme])
    places = devices(kind, apart=True)
    try:
        create_transport(scheme).close()
    except MisuseError as error:
        if os.environ.get("PDXFER_REQUIRE_OPTIONAL") == "1":
            raise
        pytest.skip(str(error))
    hand_over(tp(2, 1), places, transports=(scheme,), mode="packed")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kernel", ["torch", "triton"])
@pytest.mark.parametrize("digests", [True, False])
def test_one_device_is_enough_for_both_workers(kind, kernel, digests):
    if kernel == "triton" and kind == "cuda":
        require("triton")
    places = devices(kind, apart=False)
    hand_over(tp(2, 1), places, transports=("tcp",), kernel=kernel, digests=digests)


@pytest.mark.cuda
def test_memory_of_a_device_is_never_read_directly():
    places = devices("cuda", apart=False)
    assert hand_over(tp(2, 1), places, transports=("shm",)) == {"packed"}
