"""Two engines, one transfer: transformers prefills, a vLLM server decodes. Both read the same checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdxfer.agent import Agent, AgentConfig
from pdxfer.builders import Storage
from pdxfer.connectors import hf
from pdxfer.connectors.context import prompt_context
from pdxfer.connectors.paged import PagedCaches, PageTables
from pdxfer.connectors.vllm_scheduler import TICKET_KEY
from pdxfer.errors import PeerError
from pdxfer.ticket import Ticket
from tests.conftest import require
from tests.vllm.compare import Record, first_difference, read_record
from tests.vllm.conftest import Fleet
from tests.vllm.hand_off import failures, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

torch = require("torch")
transformers = require("transformers")

TOKENS = 32


@contextmanager
def engine(checkpoint: Path, **storage: Any) -> Iterator[tuple[Any, Agent, PagedCaches]]:
    """The checkpoint in transformers, and an agent over its pages; ``storage`` as ``Storage`` has it."""
    config = transformers.AutoConfig.from_pretrained(checkpoint)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    layout = hf.layout_for_model(config, 1, Storage(page_tokens=16, pages=256, **storage), dtype="bfloat16")
    with Agent(AgentConfig(worker="transformers", call_s=30, stall_s=30)) as agent:
        regions = agent.allocate(layout.ranks[0])
        agent.attach(layout, regions)
        agent.start()
        yield model, agent, PagedCaches(layout, 0, [region.view for region in regions])


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """A prompt that transformers has prefilled: what its pages hold, and what a router would carry."""

    prompt: list[int]
    held: Record
    params: dict[str, Any]


@contextmanager
def offered(checkpoint: Path, prompt: list[int], **storage: Any) -> Iterator[tuple[Agent, Offered]]:
    """Prefill all but the last token, and offer it while this lasts. S is rounded to the storage's dtype."""
    tokens = len(prompt) - 1
    with engine(checkpoint, **storage) as (model, agent, paged):
        cache = hf.new_cache(model.config)
        with torch.inference_mode():
            hf.forward(model, torch.tensor([prompt[:-1]]), cache)
        if "state_dtype" in storage:
            for layer in cache.layers:
                states = getattr(layer, "recurrent_states", {})
                states.update({i: s.to(getattr(torch, storage["state_dtype"])) for i, s in states.items()})
        tables = paged.allocate(tokens)
        hf.write_cache(paged, tables, cache, tokens)
        pages = {table: numbers.tolist() for table, numbers in tables.items()}
        part = agent.offer("across", pages, kv_tokens=tokens, context=prompt_context(prompt[:-1]))
        params = {"do_remote_prefill": True, TICKET_KEY: Ticket.join([part]).encode()}
        yield agent, Offered(prompt=prompt, held=record(paged, tables, tokens), params=params)


def record(paged: PagedCaches, tables: PageTables, tokens: int) -> Record:
    """What the pages hold, as the spy of a vLLM server would write it down."""
    arrays = {}
    for layer, component in paged.components():
        bits = paged.read(component.name, layer, tables, tokens)
        if component.name.startswith("kv."):
            arrays[f"model.layers.{layer}.self_attn.attn/{component.name[-1]}"] = bits
        else:
            bits = bits[0].T if component.name.startswith("conv.") else bits[0]
            arrays[f"model.layers.{layer}.linear_attn/{component.name}"] = bits
    return Record(tokens=tokens, first_token=0, arrays=arrays)


@pytest.mark.parametrize("decode", ["a", "b", "c"])
def test_transformers_prefills_and_vllm_decodes(fleet: Fleet, prompts, decode: str) -> None:
    name = f"qwen3-next {decode}"
    (server,) = fleet.servers(name)
    prompt = prompts["qwen3-next"][2]
    with offered(server.config.model, prompt) as (agent, given):
        answer = server.complete(prompt, TOKENS, request_id=f"across{decode}", kv_transfer_params=given.params)
        assert agent.counters["offers_completed"] == 1
        received = read_record(fleet.spied(name), "received", f"cmpl-across{decode}-")
        assert first_difference(shaped_like(given.held, received), received) == ""
    assert answer["choices"][0]["token_ids"] == fleet.own_answer(name, prompt, TOKENS)


@pytest.mark.parametrize("decode", ["a", "c"])
def test_states_of_another_dtype_with_rows_for_speculation(fleet: Fleet, prompts, decode: str) -> None:
    """The source keeps S in bfloat16 and three conv rows for speculative tokens; the server, float32 and none."""
    name = f"qwen3-next {decode}"
    (server,) = fleet.servers(name)
    prompt = prompts["qwen3-next"][1]
    kept = {"state_dtype": "bfloat16", "accepts": ("float32",), "taps_after": 3}
    with offered(server.config.model, prompt, **kept) as (_, given):
        answer = server.complete(prompt, 1, request_id=f"round{decode}", kv_transfer_params=given.params)
    received = read_record(fleet.spied(name), "received", f"cmpl-round{decode}-")
    wider = {name: widened(bits) if name.endswith("/S") else bits for name, bits in given.held.arrays.items()}
    held = Record(tokens=given.held.tokens, first_token=0, arrays=wider)
    assert first_difference(shaped_like(held, received), received) == ""
    assert answer["choices"][0]["token_ids"] == fleet.own_answer(name, prompt, TOKENS)[:1]


def test_states_of_another_dtype_are_refused_by_name(fleet: Fleet, prompts) -> None:
    """Where one side has not opted in."""
    (server,) = fleet.servers("qwen3-next a")
    before = failures(server)
    with (
        offered(server.config.model, prompts["qwen3-next"][1], state_dtype="bfloat16") as (agent, given),
        pytest.raises(PeerError, match="answered 500"),
    ):
        server.complete(given.prompt, 1, kv_transfer_params=given.params)
    wait_for(lambda: failures(server) == before + 1, "the server counts the failure")
    assert "offers_completed" not in agent.counters
    said = server.log.read_text()
    assert re.search(r"S.*dtype.*bfloat16.*float32", said) or re.search(r"S.*dtype.*float32.*bfloat16", said)


def widened(bits: np.ndarray) -> np.ndarray:
    """bfloat16 as float32, bit for bit."""
    wide: np.ndarray = bits.view(np.uint16).astype(np.uint32) << 16
    return wide.view(np.int32)


def shaped_like(mine: Record, theirs: Record) -> Record:
    """S as vLLM's view has it: its axes are called V, K, but the CPU kernels keep K, V there, of equal sizes."""
    assert mine.arrays.keys() == theirs.arrays.keys()
    arrays = {
        name: array.reshape(theirs.arrays[name].shape) if name.endswith("/S") else array
        for name, array in mine.arrays.items()
    }
    assert all(isinstance(array, np.ndarray) for array in arrays.values())
    return Record(tokens=mine.tokens, first_token=mine.first_token, arrays=arrays)
