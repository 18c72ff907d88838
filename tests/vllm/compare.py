"""Puts the records of all ranks of a server together, by the model's head order, and compares two servers' bits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

__all__ = ["Record", "first_difference", "read_record"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What one request's caches held, in the model's coordinates. Rows before ``first_token`` were not received."""

    tokens: int
    first_token: int
    arrays: dict[str, np.ndarray]


def read_record(directory: Path, what: str, request: str) -> Record:
    """The record of the only request whose id begins with ``request``; ``what`` is offered or received."""
    first = list(directory.glob(f"{what}-{request}*-0.npz"))
    assert len(first) == 1, f"{len(first)} records of {what} {request} in {directory}"
    ranks = [dict(np.load(first[0]))]
    facts = json.loads(ranks[0].pop("facts").tobytes())
    stem = first[0].name.removesuffix("-0.npz")
    ranks += [dict(np.load(directory / f"{stem}-{rank}.npz")) for rank in range(1, facts["ranks"])]
    joined = {}
    for name in ranks[0]:
        joined.update(_join(name, [rank[name] for rank in ranks], facts))
    return Record(tokens=facts["tokens"], first_token=facts["first_token"], arrays=joined)


def _join(name: str, ranks: Sequence[np.ndarray], facts: dict[str, int]) -> dict[str, np.ndarray]:
    layer, part = name.rsplit("/", 1)
    if part == "latent":  # every rank holds it whole
        assert all(np.array_equal(ranks[0], rank) for rank in ranks), f"{name}: ranks differ"
        return {name: ranks[0]}
    if part in ("k", "v"):
        copies = len(ranks) * ranks[0].shape[1] // facts["kv_heads"]  # neighbours hold the same head
        assert all(np.array_equal(ranks[r], ranks[r - r % copies]) for r in range(len(ranks))), f"{name}: ranks differ"
        return {name: np.concatenate(ranks[::copies], axis=1)}
    if part == "conv":  # a rank's channels are its part of q, of k and of v, one after the other
        key, value = facts["key_width"] // len(ranks), facts["value_width"] // len(ranks)
        assert ranks[0].shape[1] == 2 * key + value, f"{name}: {ranks[0].shape[1]} channels, not {2 * key + value}"
        cuts = [np.split(rank, [key, 2 * key], axis=1) for rank in ranks]
        return {f"{layer}/conv.{p}": np.concatenate([cut[i] for cut in cuts], axis=1) for i, p in enumerate("qkv")}
    assert part == "S", f"{name}: unknown part"
    return {name: np.concatenate(ranks, axis=0)}


def first_difference(source: Record, target: Record) -> str:
    """Where the two first differ: layer, component, index, both bits; empty if nowhere."""
    if source.tokens != target.tokens or source.arrays.keys() != target.arrays.keys():
        return f"{source.tokens} tokens of {sorted(source.arrays)}, {target.tokens} of {sorted(target.arrays)}"
    for name, there in source.arrays.items():
        here = target.arrays[name]
        if there.shape != here.shape or there.dtype != here.dtype:
            return f"{name}: {there.dtype}{there.shape} at the source, {here.dtype}{here.shape} at the target"
        start = target.first_token if name.endswith(("/k", "/v", "/latent")) else 0
        wrong = np.argwhere(there[start:] != here[start:])
        if len(wrong):
            at = (int(wrong[0][0]) + start, *map(int, wrong[0][1:]))
            return f"{name}: {len(wrong)} of {there.size} elements differ, first {at}: {there[at]:#x}, {here[at]:#x}"
    return ""
