"""What a demo run found: the comparison of states, logits and tokens, and the figures of the transfer.

In come plain values that the ranks reported; out goes a frozen ``Outcome`` that a report prints. Pure functions: no
process, no clock, no tensor library.

Bytes are compared in *logical coordinates*: each rank says which box of which component it holds and what lies in it,
read from its pages by its own layout. A target element is right when it equals, bit for bit, that element at a source
rank which holds it::

    source rank 0 of 3   [======)                        heads 0..4
    source rank 1              [======)                  heads 4..8
    source rank 2                    [======)            heads 8..12
    target rank 0 of 2   [=========)                     compared with ranks 0 and 1, element by element
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pdxfer.spec import CacheSpec

__all__ = ["LOGIT_LIMIT", "STAGES", "Held", "Kind", "Outcome", "Round", "compare_states", "kinds", "timing"]

#: Greatest difference of a logit from the single-process run: fp32 sums in another order, nothing more.
LOGIT_LIMIT = 1e-5

#: Kind of component, for tables: the first whose prefix fits.
_KINDS = (("kv.", "K/V"), ("window.", "K/V window"), ("latent", "MLA"), ("rope", "MLA"), ("S", "S"), ("conv.", "Conv"))

#: In the order in which a transfer goes through them.
STAGES = ("negotiate", "plan", "pack", "move", "unpack", "verify")


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What one rank holds of one component of one layer: bits ``[rows, *box]`` of box ``[starts, stops)``."""

    component: str
    layer: int
    starts: tuple[int, ...]
    stops: tuple[int, ...]
    bits: npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of component. Bytes: ``unique`` of one whole copy, ``held`` by all target ranks together, ``moved``
    from source to target worker, ``relayed`` between target ranks of one host.
    """

    name: str
    unique_bytes: int = 0
    held_bytes: int = 0
    moved_bytes: int = 0
    relayed_bytes: int = 0
    messages: int = 0

    @property
    def dedup(self) -> float:
        """How many bytes target ranks got per byte that left the source; 1 without replicas."""
        return self.held_bytes / self.moved_bytes if self.moved_bytes else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Seconds of one hand-off: ``transfer_s`` from fetch to READY on the slowest target rank; ``stages`` by name, each
    of its own slowest rank (edges of a rank run at the same time, so stages can add up to more than the whole).
    """

    transfer_s: float
    stages: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run of the demo.

    Attributes:
        compared_bytes, wrong_bytes: of the target ranks' states against the source ranks'; wrong_where: names of
            components with wrong bytes.
        logit_error: greatest difference from the single-process run over prefill and decode; nan counts as inf.
        tokens, reference_tokens: greedy tokens, the first sampled by prefill.
        kinds, messages: of one hand-off. rounds: times of each, the first with agents that had never met.
        transport, mode: what moved the bytes.
        copy_bytes_per_s: one-pass memcpy of this machine, measured in the same run.
        total_s: of the whole run, processes and models included; prefill_s: of the prompt.
    """

    model: str
    prefill_tp: int
    decode_tp: int
    prompt_tokens: int
    prefill_page_tokens: int
    decode_page_tokens: int
    transport: str
    mode: str
    compared_bytes: int
    wrong_bytes: int
    wrong_where: tuple[str, ...]
    logit_error: float
    tokens: tuple[int, ...]
    reference_tokens: tuple[int, ...]
    kinds: tuple[Kind, ...]
    messages: int
    rounds: tuple[Round, ...]
    prefill_s: float
    total_s: float
    copy_bytes_per_s: float

    @property
    def state_ok(self) -> bool:
        """Every byte of every target rank's state is the source's."""
        return self.wrong_bytes == 0 and self.compared_bytes > 0

    @property
    def logits_ok(self) -> bool:
        """Every logit is the single-process run's within ``LOGIT_LIMIT``."""
        return self.logit_error < LOGIT_LIMIT

    @property
    def tokens_ok(self) -> bool:
        """Every token is the single-process run's."""
        return self.tokens == self.reference_tokens

    @property
    def ok(self) -> bool:
        """Nothing is off."""
        return self.state_ok and self.logits_ok and self.tokens_ok

    @property
    def moved_bytes(self) -> int:
        """Bytes that left the source worker."""
        return sum(kind.moved_bytes for kind in self.kinds)

    def to_json(self) -> dict[str, Any]:
        """Plain values, with what the properties say."""
        from dataclasses import asdict

        verdict = {"ok": self.ok, "state_ok": self.state_ok, "logits_ok": self.logits_ok, "tokens_ok": self.tokens_ok}
        kinds = [{**asdict(kind), "dedup": kind.dedup} for kind in self.kinds]
        return {
            "schema_version": 1,
            **asdict(self),
            **verdict,
            "kinds": kinds,
            "moved_bytes": self.moved_bytes,
            "logit_limit": LOGIT_LIMIT,
        }


def compare_states(source: Iterable[Held], target: Iterable[Held]) -> tuple[int, int, tuple[str, ...]]:
    """Compare all target ranks' states with all source ranks'.

    Returns:
        Bytes compared, bytes of wrong elements (an element that no source rank holds is wrong), and where they are.
    """
    by_place: dict[tuple[str, int], list[Held]] = {}
    for held in source:
        by_place.setdefault((held.component, held.layer), []).append(held)
    compared = wrong = 0
    where: dict[str, None] = {}
    for mine in target:
        right = np.zeros(mine.bits.shape, dtype=bool)
        for theirs in by_place.get((mine.component, mine.layer), ()):
            _mark_equal(right, mine, theirs)
        bad = int(right.size - right.sum()) * mine.bits.itemsize
        compared += mine.bits.nbytes
        wrong += bad
        if bad:
            where[f"{mine.component} of layer {mine.layer}"] = None
    return compared, wrong, tuple(where)


def _mark_equal(right: npt.NDArray[np.bool_], mine: Held, theirs: Held) -> None:
    """Set ``right`` where the two hold the same element with the same bits."""
    starts, stops = np.maximum(mine.starts, theirs.starts), np.minimum(mine.stops, theirs.stops)
    same_kind = mine.bits.dtype == theirs.bits.dtype and len(mine.bits) == len(theirs.bits)
    if not same_kind or (starts >= stops).any():
        return
    here = (slice(None), *map(slice, starts - mine.starts, stops - mine.starts))
    there = (slice(None), *map(slice, starts - theirs.starts, stops - theirs.starts))
    right[here] |= mine.bits[here] == theirs.bits[there]


def _kind_name(component: str) -> str:
    return next((name for prefix, name in _KINDS if component.startswith(prefix)), component)


def kinds(
    spec: CacheSpec,
    tokens: int,
    itemsize: Mapping[str, int],
    target: Iterable[Held],
    edges: Sequence[Mapping[str, Any]],
) -> tuple[Kind, ...]:
    """Bytes and messages by kind of component, in the order in which components are sent.

    Args:
        itemsize: bytes per element by component, as stored by the source.
        edges: figures of all edges of all target ranks.
    """
    sums: dict[str, dict[str, int]] = {}

    def add(component: str, field: str, value: int) -> None:
        fields = sums.setdefault(_kind_name(component), {})
        fields[field] = fields.get(field, 0) + value

    for component in spec.components:
        first, stop = component.rows(tokens)
        elements = len(component.layers) * (stop - first) * component.row_elems
        add(component.name, "unique_bytes", elements * itemsize[component.name])
    for held in target:
        add(held.component, "held_bytes", held.bits.nbytes)
    for edge in edges:
        for component_name, nbytes in edge["component_bytes"].items():
            add(component_name, "relayed_bytes" if edge["relay"] else "moved_bytes", nbytes)
        for carried in edge["carried"] if not edge["relay"] else ():
            for name in {_kind_name(component_name) for component_name in carried}:
                sums[name]["messages"] = sums[name].get("messages", 0) + 1
    return tuple(Kind(name=name, **fields) for name, fields in sums.items())


def timing(ranks: Sequence[Mapping[str, Any]]) -> Round:
    """Times of one hand-off from the figures of every target rank."""
    per_rank = [
        {name: r["seconds"].get(name, 0.0) + sum(e["seconds"].get(name, 0.0) for e in r["edges"]) for name in STAGES}
        for r in ranks
    ]
    return Round(
        transfer_s=max(r["seconds"]["total"] for r in ranks),
        stages={name: max(r[name] for r in per_rank) for name in STAGES},
    )
