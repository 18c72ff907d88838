"""The workers' half of the vLLM connector: real agents and memory, driven step by step as vLLM's model runner does."""

from __future__ import annotations

import json
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from pdxfer.agent import AgentConfig
from pdxfer.agent.config import DaemonConfig
from pdxfer.agent.daemon import Daemon
from pdxfer.builders import Parallel, Storage, build_layout
from pdxfer.cli.main import main
from pdxfer.connectors.vllm_settings import Settings
from pdxfer.connectors.vllm_stats import PdxferStats
from pdxfer.connectors.vllm_step import Load, Offer, Step
from pdxfer.connectors.vllm_tensors import GroupTable, RankTensors
from pdxfer.connectors.vllm_worker import Ranks, WorkerSide
from pdxfer.layout import Layout
from pdxfer.testing.oracle import Memory, Oracle
from pdxfer.ticket import issue_ticket
from tests.conftest import require
from tests.workers import hybrid_spec

torch = require("torch")

SPEC = hybrid_spec()
TOKENS, NONCE = 37, bytes(range(16))
EXTRA = {"lease_s": 5.0, "timeout_s": 20, "arena_bytes": 1 << 20, "chunk_bytes": 1 << 16}


MODE = {"sidecar": ""}


@pytest.fixture(autouse=True, params=["embedded", "sidecar"])
def mode(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test runs with agents in the ranks' processes, and behind a daemon."""
    with tempfile.TemporaryDirectory(prefix="v-") as directory:
        MODE["sidecar"] = directory if request.param == "sidecar" else ""
        yield


class Gather:
    """What a gloo group does for ranks that are threads here."""

    def __init__(self, size: int) -> None:
        self._said: list[bytes] = [b""] * size
        self._all = threading.Barrier(size)

    def of(self, rank: int) -> Callable[[bytes], list[bytes]]:
        def gather(data: bytes) -> list[bytes]:
            self._said[rank] = data
            self._all.wait(20)
            said = list(self._said)
            self._all.wait(20)
            return said

        return gather


@dataclass
class Engine:
    """One vLLM worker: its ranks' sides, their memory, and who looked on."""

    layout: Layout
    sides: list[WorkerSide]
    storages: list[torch.Tensor]
    seen: list[tuple[str, str]] = field(default_factory=list)

    def step(self, step: Step) -> list[tuple[set[str], set[str], set[str]]]:
        """One engine step on every rank."""
        results = []
        for side in self.sides:
            side.before_forward(step)
            side.start(step)
            side.after_forward(step)
            results.append(side.results(step))
        return results

    def until(self, which: int, request: str) -> list[bool]:
        """Step until every rank reported ``request`` as sent (0) or received (1); returns which ranks' loads failed."""
        failed: dict[int, bool] = {}
        until_s = time.monotonic() + 30
        while len(failed) < len(self.sides):
            assert time.monotonic() < until_s, f"{request} was not reported by all ranks"
            for rank, result in enumerate(self.step(Step(idle=True))):
                if request in result[which]:
                    assert rank not in failed
                    failed[rank] = request in result[2]
        return [failed[rank] for rank in range(len(self.sides))]

    def tables(self, blocks: tuple[tuple[int, ...], ...], tokens: int = TOKENS) -> tuple[dict[str, Any], ...]:
        found = self.sides[0].tables(blocks, tokens)
        return tuple({name: np.array(pages) for name, pages in found.items()} for _ in self.sides)

    def memory(self, blocks: tuple[tuple[int, ...], ...]) -> Memory:
        buffers = tuple((storage.numpy(),) for storage in self.storages)
        return Memory(layout=self.layout, buffers=buffers, tables=self.tables(blocks))

    def stats(self) -> PdxferStats:
        total = PdxferStats()
        for side in self.sides:
            total.aggregate(side.take_stats() or PdxferStats())
        return total

    def ended(self, offers: int) -> dict[str, int]:
        """How that many offers ended: a daemon says so a moment after the step that ended them."""
        total = PdxferStats()
        until_s = time.monotonic() + 30
        while sum(total.data["offers"].values()) < offers:
            assert time.monotonic() < until_s, f"only {total.data['offers']} ended"
            total.aggregate(self.stats())
        return dict(total.data["offers"])

    def ticket(self, offer: Offer) -> str:
        issuers = [side.issuer for side in self.sides]
        facts = {"kv_tokens": offer.tokens, "state_tokens": offer.tokens, "context": offer.context}
        return issue_ticket([i for i in issuers if i], offer.transfer, nonce=offer.nonce, **facts).encode()


@contextmanager
def engine(name: str, tp: int, page_tokens: int, **extra: Any) -> Iterator[Engine]:
    """A worker of ``tp`` ranks with unified pages, as vLLM has them."""
    storage = Storage(page_tokens=page_tokens, alignment_tokens=page_tokens, pages=48)
    layout = build_layout(SPEC, Parallel(tp=tp), storage, "unified")
    stack = ExitStack()
    settings = settings_of(name, {**EXTRA, **extra}, stack)
    gather, seen = Gather(tp), []
    sides = [
        WorkerSide(
            settings, Ranks(rank=r, size=tp, gather=gather.of(r)), SPEC, lambda what, req, *_: seen.append((what, req))
        )
        for r in range(tp)
    ]
    storages = [torch.randint(0, 256, (layout.ranks[r].regions[0].nbytes,), dtype=torch.uint8) for r in range(tp)]
    threads = [
        threading.Thread(target=side.register, args=(tensors(layout, r, page_tokens), {0: storages[r]}))
        for r, side in enumerate(sides)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    made = Engine(layout, sides, storages, seen)
    try:
        yield made
        for side in sides:
            counts = side.agent.check_integrity() or side.agent.memory.ledger.counts()
            assert {state for state, n in counts.items() if n} == {"free"}
    finally:
        for side in sides:
            side.shutdown()
        stack.close()


def settings_of(name: str, extra: dict[str, Any], stack: ExitStack) -> Settings:
    """In sidecar mode what is an agent's is the config of a daemon, which ends with the stack."""
    if not MODE["sidecar"]:
        return Settings.parse(extra, name)
    path, timeout_s = f"{MODE['sidecar']}/{name}/s", extra.pop("timeout_s")
    daemon = Daemon(DaemonConfig(socket=path, agent=AgentConfig(worker=name, **extra)))
    stack.enter_context(daemon)
    return Settings.parse({"mode": "sidecar", "sidecar": path, "timeout_s": timeout_s}, name)


def tensors(layout: Layout, rank: int, page_tokens: int) -> RankTensors:
    tables = []
    for index, (name, holding) in enumerate(sorted(layout.ranks[rank].tables().items())):
        state = name.startswith("state")
        tables.append(
            GroupTable(
                name=name, group=index, kind="state" if state else "attention", page_rows=holding.page_rows,
                pages_per_block=1, block_tokens=page_tokens if state else holding.page_rows, mode="none",
            )
        )  # fmt: skip
    return RankTensors(rank=layout.ranks[rank], tables=tuple(tables), storages=(0,))


def blocks(side: Engine, start: int, tokens: int = TOKENS) -> tuple[tuple[int, ...], ...]:
    """Block ids of one request from ``start`` on, different in every group, as vLLM hands them out."""
    found, at = [], start
    for table in side.sides[0]._tables:
        n = 1 if table.kind == "state" else -(-tokens // table.block_tokens)
        found.append(tuple(range(at, at + n)))
        at += n
    return tuple(found)


def offer_of(request: str, where: tuple[tuple[int, ...], ...], transfer: str = "") -> Offer:
    return Offer(
        request=request, transfer=transfer or f"t-{request}", blocks=where, tokens=TOKENS, nonce=NONCE, context=b"c"
    )


def load_of(request: str, ticket: str, where: tuple[tuple[int, ...], ...], **changes: Any) -> Load:
    return Load(request=request, ticket=ticket, blocks=where, **{"tokens": TOKENS, "first_token": 0, **changes})


@pytest.mark.parametrize(("source_tp", "target_tp"), [(1, 1), (1, 2), (2, 1), (4, 2)])
def test_a_request_goes_from_blocks_to_blocks(source_tp: int, target_tp: int) -> None:
    with engine("p", source_tp, 16) as source, engine("d", target_tp, 6) as target:
        for number in range(2):  # the second time agents know each other
            request = f"r{number}"
            oracle = Oracle(SPEC, key=request, tokens=TOKENS)
            from_, to = blocks(source, 3 + 12 * number), blocks(target, 1 + 16 * number)
            oracle.put(source.memory(from_))
            offer = offer_of(request, from_)
            source.step(Step(offers=(offer,)))
            source.step(Step(handed=(request,)))
            before = target.memory(to).copy()
            target.step(Step(loads=(load_of(request, source.ticket(offer), to),)))
            assert target.until(1, request) == [False] * target_tp
            assert source.until(0, request) == [False] * source_tp
            # Only the rows behind the request were cleared; everything else is the request's, or as before.
            for rank, storage in enumerate(target.storages):
                changed = np.flatnonzero(storage.numpy() != before.buffers[rank][0])
                assert changed.size
            for layer in range(SPEC.num_layers):
                for component in SPEC.layer_components(layer):
                    found = oracle.read(target.memory(to), component.name, layer)
                    assert np.array_equal(found, oracle.tensor(component.name, layer)), (component.name, layer)
        assert source.seen == [("offered", r) for r in ("r0", "r1") for _ in range(source_tp)]
        assert source.ended(2 * source_tp) == {"completed": 2 * source_tp}
        stats = target.stats().data
        assert stats["transfers"] == {"received": 2 * target_tp}
        assert stats["bytes"] > 0
        assert len(stats["seconds"]) == 2 * target_tp


def test_rows_behind_the_request_are_cleared_and_rows_before_first_token_are_kept() -> None:
    with engine("p", 1, 16) as source, engine("d", 1, 6) as target:
        from_, to = blocks(source, 3), blocks(target, 1)
        oracle = Oracle(SPEC, key="x", tokens=TOKENS)
        oracle.put(source.memory(from_))
        target.storages[0].fill_(0xFF)  # NaN everywhere
        offer = offer_of("r", from_)
        source.step(Step(offers=(offer,), handed=("r",)))
        target.step(Step(loads=(load_of("r", source.ticket(offer), to, first_token=12),)))
        assert target.until(1, "r") == [False]
        assert source.until(0, "r") == [False]
        for holding in target.layout.ranks[0].holdings:
            if holding.page_rows == 1:
                continue
            table = target.tables(to)[0][holding.table]
            view = np.ndarray(
                (holding.pages, holding.page_rows, *holding.box.shape), np.uint16, target.storages[0].numpy().data,
                holding.offsets[0], (holding.page_stride, holding.row_stride, *holding.strides),
            )  # fmt: skip
            rows = view[table].reshape(-1, *holding.box.shape)
            assert (rows[:12] == 0xFFFF).all()
            assert (rows[12:TOKENS] != 0xFFFF).any()
            assert (rows[TOKENS:] == 0).all()


def test_a_withdrawn_offer_frees_its_pages_in_the_same_step() -> None:
    with engine("p", 1, 16) as source:
        where = blocks(source, 3)
        source.step(Step(offers=(offer_of("r", where),)))
        assert source.step(Step(withdrawn=("r",), offers=(offer_of("s", where),))) == [(set(), set(), set())]
        source.step(Step(withdrawn=("s",)))
        assert source.ended(2) == {"withdrawn": 2}


def test_an_offer_nobody_takes_is_reported_sent_when_its_lease_is_over() -> None:
    with engine("p", 2, 16, lease_s=0.2) as source:
        source.step(Step(offers=(offer_of("r", blocks(source, 3)),)))
        source.step(Step(handed=("r",)))
        assert source.until(0, "r") == [False, False]
        assert source.ended(2) == {"expired": 2}


def test_an_offer_that_can_t_be_made_keeps_no_block() -> None:
    with engine("p", 1, 16) as source:
        null = tuple((0,) * len(group) for group in blocks(source, 3))
        source.step(Step(offers=(offer_of("r", null),)))
        assert source.step(Step(handed=("r",))) == [({"r"}, set(), set())]
        assert source.ended(1) == {"MISUSE": 1}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"error": "TICKET_REJECTED: the ticket is of another prompt"}, "TICKET_REJECTED"),
        ({"ticket": "AAAA"}, "TICKET_REJECTED"),
        ({"blocks": ((0,), (0,), (0,), (0,))}, "MISUSE"),
    ],
)
def test_a_load_that_can_t_start_fails_in_its_own_step(change: dict[str, Any], reason: str) -> None:
    with engine("d", 1, 6) as target:
        load = load_of("r", "", blocks(target, 1))
        load = Load(**{**{name: getattr(load, name) for name in Load.__slots__}, **change})
        assert target.step(Step(loads=(load,))) == [(set(), {"r"}, {"r"})]
        assert target.stats().data["transfers"] == {reason: 1}


def test_a_used_ticket_fails_and_the_next_request_works() -> None:
    with engine("p", 1, 16) as source, engine("d", 2, 6) as target:
        offer = offer_of("r", blocks(source, 3))
        source.step(Step(offers=(offer,), handed=("r",)))
        ticket = source.ticket(offer)
        target.step(Step(loads=(load_of("r", ticket, blocks(target, 1)),)))
        assert target.until(1, "r") == [False, False]
        target.step(Step(loads=(load_of("again", ticket, blocks(target, 1)),)))
        assert target.until(1, "again") == [True, True]
        source.until(0, "r")
        offer = offer_of("s", blocks(source, 3))
        source.step(Step(offers=(offer,), handed=("s",)))
        target.step(Step(loads=(load_of("s", source.ticket(offer), blocks(target, 1)),)))
        assert target.until(1, "s") == [False, False]
        source.until(0, "s")


@pytest.mark.parametrize("row", ["out of range", "stale after reuse", "dead producer"])
def test_a_bad_reference_fails_its_load(row: str) -> None:
    """vllm#52234, where each of these was an answer from wrong state; "used twice" is the test above."""
    with engine("d", 1, 6) as target, ExitStack() as stack:
        source = stack.enter_context(engine("p", 1, 16))
        offer, where = offer_of("r", blocks(source, 3)), blocks(target, 1)
        source.step(Step(offers=(offer,), handed=("r",)))
        ticket = source.ticket(offer)
        if row == "out of range":
            where = tuple(tuple(block + 10_000 for block in group) for group in where)
        elif row == "stale after reuse":
            source.step(Step(withdrawn=("r",), offers=(offer_of("s", offer.blocks),)))
        else:
            source.step(Step(withdrawn=("r",)))  # so that it may be asked whether it holds something
            stack.close()
        found = target.step(Step(loads=(load_of("r", ticket, where),)))
        assert ("r" in found[0][2]) if row == "out of range" else (target.until(1, "r") == [True])
        assert len(target.stats().data["transfers"]) == 1
        if row != "dead producer":
            source.step(Step(withdrawn=("r", "s")))


def test_a_cancelled_load_ends_at_both_sides() -> None:
    with engine("p", 1, 16) as source, engine("d", 1, 6) as target:
        offer = offer_of("r", blocks(source, 3))
        source.step(Step(offers=(offer,), handed=("r",)))
        load = load_of("r", source.ticket(offer), blocks(target, 1))
        target.sides[0].start(Step(loads=(load,), cancelled=()))
        target.sides[0].start(Step(cancelled=("r",)))
        target.until(1, "r")  # it may have come in before; the engine frees the blocks either way
        assert source.until(0, "r") == [False]


def test_a_declined_ticket_is_freed_and_a_kept_one_stays() -> None:
    with engine("p", 1, 16, lease_s=1.5) as source, engine("d", 2, 6) as target:
        kept, declined = offer_of("k", blocks(source, 3)), offer_of("d", blocks(source, 20))
        source.step(Step(offers=(kept, declined), handed=("k", "d")))
        target.step(Step(keep=(source.ticket(kept),), declined=((source.ticket(declined), "not needed"),)))
        assert source.until(0, "d") == [False]
        time.sleep(3.0)  # two leases
        target.step(Step(loads=(load_of("k", source.ticket(kept), blocks(target, 1)),)))
        assert target.until(1, "k") == [False, False]
        assert source.until(0, "k") == [False]
        assert source.ended(2) == {"declined": 1, "completed": 1}


def test_every_rank_shows_itself_where_the_settings_say(capsys) -> None:
    if MODE["sidecar"]:
        pytest.skip("a daemon has an admin of its own")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    if port > 65_000:
        pytest.skip("the next ports are none")
    with engine("p0", 2, 16, admin=f"127.0.0.1:{port}"):
        for rank in range(2):
            assert main(["status", "--json", "--admin", f"127.0.0.1:{port + rank}"]) == 0
            (agent,) = json.loads(capsys.readouterr().out)["agents"]
            assert (agent["worker"], agent["rank"]) == ("p0", rank)
    assert main(["status", "--admin", f"127.0.0.1:{port}"]) == 5
