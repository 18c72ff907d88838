"""Bad references through the reference connector and real agents, the rows of vllm#52234: an error and a recompute.

There each gave an answer from wrong state, or the previous prompt's, with success. Here decode's tokens after the error
are those of its own prefill, its pages are as they were, and a counter has moved.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from pdxfer.agent import Agent, AgentConfig
from pdxfer.connectors import hf
from pdxfer.connectors.paged import PagedCaches
from pdxfer.demo import models
from pdxfer.errors import MisuseError, PeerError, StaleError, TicketError
from pdxfer.ticket import Ticket
from tests.conftest import require
from tests.pairs import Ends

torch = require("torch")
require("transformers")

torch.set_num_threads(1)

TOKENS, STEPS = 37, 4


@dataclass
class Engine:
    """One worker of one rank: model, agent, paged caches."""

    model: Any
    agent: Agent
    paged: PagedCaches

    def prefill(self, seed: int) -> Any:
        ids = torch.randint(0, models.VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(seed))
        cache = hf.new_cache(self.model.config)
        with torch.inference_mode():
            hf.forward(self.model, ids, cache)
        return cache

    def decode(self, cache: Any) -> Any:
        with torch.inference_mode():
            logits = [hf.forward(self.model, torch.tensor([[7 * i + 1]]), cache)[0, -1] for i in range(STEPS)]
        return torch.stack(logits)

    def offer(self, key: str, seed: int, tables: Any, ends: Ends) -> str:
        hf.write_cache(self.paged, tables, self.prefill(seed), TOKENS)
        return Ticket.join([self.agent.offer(key, tables, kv_tokens=TOKENS, on_end=ends)]).encode()

    def answer(self, ticket: str, tables: Any, seed: int) -> tuple[str, Any]:
        """What an engine does: continue from what came, or prefill itself; which, and the logits."""
        try:
            received = self.agent.fetch(ticket, tables, timeout_s=10.0)
        except (MisuseError, PeerError) as error:
            return type(error).__name__, self.decode(self.prefill(seed))
        logits = self.decode(hf.read_cache(self.paged, tables, self.model.config, TOKENS))
        received.release()
        return "fetched", logits

    def bytes(self) -> bytes:
        return b"".join(bytes(region.view) for region in self.agent.memory.regions.values())

    def failures(self) -> int:
        counts = self.agent.journal.counts
        return sum(n for key, n in counts.items() if key[0] == "transfer_failures")


@contextmanager
def engine(model: Any, worker: str):
    layout = hf.layout_for_model(model.config, 1)
    with Agent(AgentConfig(worker=worker, transports=("shm",), arena_bytes=1 << 20, chunk_bytes=1 << 16)) as agent:
        regions = agent.allocate(layout.ranks[0])
        agent.attach(layout, regions)
        agent.start()
        yield Engine(model, agent, PagedCaches(layout, 0, [region.view for region in regions]))
        agent.check_integrity()


@pytest.fixture(scope="module")
def model():
    return models.build_model(models.demo_config("qwen3-next"))


@pytest.mark.parametrize("row", ["out of range", "used twice", "stale after reuse", "dead producer", "unknown", "none"])
def test_a_bad_reference_is_an_error_and_decode_answers_by_itself(model, row):
    with engine(model, "P") as source, engine(model, "D") as target:
        ends, theirs, mine = Ends(), source.paged.allocate(TOKENS), target.paged.allocate(TOKENS)
        ticket = source.offer("one", 1, theirs, ends)
        own = target.decode(target.prefill(1))
        if row == "out of range":
            for table in mine.values():
                table[-1] += 1 << 20
        elif row == "used twice":
            assert target.answer(ticket, mine, 1)[0] == "fetched"
        elif row == "stale after reuse":  # the very same pages hold another prompt's caches by now
            source.agent.withdraw("one")
            ends.wait(1)
            other = source.offer("two", 2, theirs, ends)
            assert Ticket.decode(other).transfer == "two"
        elif row == "dead producer":
            source.agent.close()
        elif row == "unknown":
            source.agent.withdraw("one")
            ends.wait(1)
        before, failed = target.bytes(), target.failures()
        outcome, logits = target.answer(ticket, mine, 1)
        assert torch.equal(logits, own)
        if row == "none":
            assert outcome == "fetched"
            return
        expected = {"out of range": MisuseError, "dead producer": PeerError}.get(row, StaleError)
        assert outcome in {expected.__name__, TicketError.__name__}
        assert target.bytes() == before
        assert row == "out of range" or target.failures() == failed + 1
