"""Two engines, one transfer: transformers prefills, a vLLM server decodes. Both read the same checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
from pdxfer.ticket import Ticket
from tests.conftest import require
from tests.vllm.compare import Record, first_difference, read_record
from tests.vllm.conftest import Fleet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

torch = require("torch")
transformers = require("transformers")

TOKENS = 32


@contextmanager
def engine(checkpoint: Path) -> Iterator[tuple[Any, Agent, PagedCaches]]:
    """The checkpoint in transformers, and an agent over its pages."""
    config = transformers.AutoConfig.from_pretrained(checkpoint)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    layout = hf.layout_for_model(config, 1, Storage(page_tokens=16, pages=256), dtype="bfloat16")
    with Agent(AgentConfig(worker="transformers", call_s=30, stall_s=30)) as agent:
        regions = agent.allocate(layout.ranks[0])
        agent.attach(layout, regions)
        agent.start()
        yield model, agent, PagedCaches(layout, 0, [region.view for region in regions])


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
    tokens = len(prompt) - 1
    with engine(server.config.model) as (model, agent, paged):
        cache = hf.new_cache(model.config)
        with torch.inference_mode():
            hf.forward(model, torch.tensor([prompt[:-1]]), cache)
        tables = paged.allocate(tokens)
        hf.write_cache(paged, tables, cache, tokens)
        pages = {table: numbers.tolist() for table, numbers in tables.items()}
        part = agent.offer("across", pages, kv_tokens=tokens, context=prompt_context(prompt[:-1]))
        params = {"do_remote_prefill": True, TICKET_KEY: Ticket.join([part]).encode()}
        answer = server.complete(prompt, TOKENS, request_id=f"across{decode}", kv_transfer_params=params)
        assert agent.counters["offers_completed"] == 1
        received = read_record(fleet.spied(name), "received", f"cmpl-across{decode}-")
        assert first_difference(shaped_like(record(paged, tables, tokens), received), received) == ""
    assert answer["choices"][0]["token_ids"] == fleet.own_answer(name, prompt, TOKENS)


def shaped_like(mine: Record, theirs: Record) -> Record:
    """S as vLLM's view has it: its axes are called V, K, but the CPU kernels keep K, V there, of equal sizes."""
    assert mine.arrays.keys() == theirs.arrays.keys()
    arrays = {
        name: array.reshape(theirs.arrays[name].shape) if name.endswith("/S") else array
        for name, array in mine.arrays.items()
    }
    assert all(isinstance(array, np.ndarray) for array in arrays.values())
    return Record(tokens=mine.tokens, first_token=mine.first_token, arrays=arrays)
