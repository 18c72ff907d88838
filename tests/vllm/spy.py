"""A connector that writes down what every request's caches hold: at its offer, and when it was received.

vLLM loads it in our connector's place. It shares nothing with the code it checks: which bytes are K, V, conv or S it
learns from the model's own layers, and how a page is packed from vLLM's own kernel, which writes numbered elements
into a scratch page. One file per event and rank, ``{offered|received}-{request id}-{rank}.npz``: arrays named
``layer/part``, as this rank holds them, tokens first; ``compare`` joins the ranks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

from pdxfer.connectors.vllm import PdxferConnector

__all__ = ["SpyConnector"]


class SpyConnector(PdxferConnector):
    """Writes to the directory that SPY_DIRECTORY names."""

    def __init__(self, vllm_config, role, kv_cache_config) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._first_tokens: dict[str, int] = {}
        self._places: dict[torch.Size, torch.Tensor] = {}

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._first_tokens.update({load.request: load.first_token for load in self._step.loads})
        super().start_load_kv(forward_context, **kwargs)

    def watch(self, what: str, request_id: str, blocks: tuple[tuple[int, ...], ...], tokens: int) -> None:
        rank, directory = get_tp_group().rank_in_group, Path(os.environ["SPY_DIRECTORY"])
        arrays = dict(self._arrays(blocks, tokens))
        config = self._vllm_config.model_config.hf_config
        facts = {
            "tokens": tokens,
            "first_token": self._first_tokens.pop(request_id, 0),
            "ranks": get_tp_group().world_size,
            "kv_heads": config.num_key_value_heads,
            "key_width": getattr(config, "linear_num_key_heads", 0) * getattr(config, "linear_key_head_dim", 0),
            "value_width": getattr(config, "linear_num_value_heads", 0) * getattr(config, "linear_value_head_dim", 0),
        }
        arrays["facts"] = np.frombuffer(json.dumps(facts).encode(), np.uint8)
        path = directory / f"{what}-{request_id}-{rank}.npz"
        with path.with_suffix(".part").open("wb") as file:
            np.savez(file, **arrays)
        path.with_suffix(".part").rename(path)

    def _arrays(self, blocks: tuple[tuple[int, ...], ...], tokens: int) -> Iterator[tuple[str, np.ndarray]]:
        layers = self._vllm_config.compilation_config.static_forward_context
        for group, ids in zip(self._kv_cache_config.kv_cache_groups, blocks, strict=True):
            size = group.kv_cache_spec.block_size
            for name in group.layer_names:
                cache = layers[name].kv_cache
                if isinstance(cache, list | tuple):
                    # With prefix caching there is a block per ``size`` tokens, of which the newest holds the state.
                    running = ids[0] if len(ids) == 1 else ids[-(-tokens // size) - 1]
                    yield from _state(name, cache, running, layers[name].conv_kernel_size - 1)
                else:
                    pages = [
                        block * (size // cache.shape[-2]) + i for block in ids for i in range(size // cache.shape[-2])
                    ]
                    rows = self._rows(layers[name], cache, pages)
                    yield from ((f"{name}/{part}", bits[:tokens]) for part, bits in rows.items())

    def _rows(self, layer: Any, cache: torch.Tensor, pages: list[int]) -> dict[str, np.ndarray]:
        """Rows of a layer that has a row per token, in token order."""
        held = cache[pages]
        if hasattr(layer, "kv_lora_rank"):
            return {"latent": _bits(held.reshape(-1, held.shape[-1]))}
        if cache.shape not in self._places:
            self._places[cache.shape] = _packing(layer, cache)
        unpacked = held.reshape(len(pages), -1)[:, self._places[cache.shape]]  # page, K or V, token, head, element
        return {part: _bits(unpacked[:, i].flatten(0, 1)) for i, part in enumerate(("k", "v"))}


def _state(name: str, cache: Any, block: int, taps: int) -> Iterator[tuple[str, np.ndarray]]:
    conv, recurrent = (tensor[block] for tensor in cache)
    yield f"{name}/conv", _bits((conv.T if is_conv_state_dim_first() else conv)[:taps])  # taps, channels
    yield f"{name}/S", _bits(recurrent)  # heads, ...


def _packing(layer: Any, cache: torch.Tensor) -> torch.Tensor:
    """Where in a page (K or V, token, head, element) lies, found by letting vLLM write numbers that say so."""
    heads, rows, width = cache.shape[1:]
    numbers = torch.arange(2 * rows * heads * width // 2).view(2, rows, heads, width // 2)
    found = torch.zeros(numbers.numel(), dtype=torch.int64)
    for byte in range(3):  # bfloat16 holds whole numbers up to 256
        page = torch.zeros((1, *cache.shape[1:]), dtype=cache.dtype)
        key, value = ((numbers >> 8 * byte) % 256).to(cache.dtype)
        layer.impl.do_kv_cache_update(layer, key, value, page, torch.arange(rows))
        found += page.flatten().to(torch.int64) << 8 * byte
    places = torch.empty_like(found)
    places[found] = torch.arange(len(found))
    assert bool((found[places] == torch.arange(len(found))).all()), "some element lies nowhere in the page"
    return places.view(numbers.shape)


def _bits(tensor: torch.Tensor) -> np.ndarray:
    integers = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.contiguous().view(integers).numpy().copy()
