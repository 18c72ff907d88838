"""What a model's caches cost: bytes by component, crossover lengths, one GPU's memory ledger, unified pages.

In come a ``CacheSpec`` and ``Assumptions`` (TP size, dtypes, draft tokens); out come frozen reports whose
fields are bytes, tokens and seconds. Pure arithmetic: this file knows no torch, no network and no live worker;
what an engine really stores is its layout's affair.

Three meanings of "bytes of one request" must not be mixed::

    unique    each value once, however many ranks hold it: what has to be moved
    rank      what one rank of the TP group holds; replicated parts don't shrink with TP, and extended
              parts (KV heads, one Mamba group) stop shrinking when every rank has a single unit
    resident  rank, plus what speculation keeps beside the running state: ``spec_tokens`` more convolution
              rows, and one more S per draft token (the engines' rule; only the running state is moved)
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any

from pdxfer.errors import MisuseError
from pdxfer.spec import DTYPE_BYTES, CacheSpec, Component, Growth

__all__ = [
    "Assumptions",
    "ComponentSize",
    "Crossover",
    "MemoryLedger",
    "PageReport",
    "SizeReport",
    "Transfer",
    "crossover",
    "memory_ledger",
    "page_report",
    "parse_bytes",
    "parse_dtype",
    "size_report",
    "unify_pages",
]

SCHEMA_VERSION = 1

_DTYPE_ALIASES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8": "float8_e4m3fn", "half": "float16"}
_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
          "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}  # fmt: skip
_QUANTITY = re.compile(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([a-zA-Z]*)\s*", re.ASCII)
#: Step in which vLLM grows the attention page: its kernels' least block.
_ALIGNMENT_TOKENS, _ALIGNMENT_TOKENS_MLA = 16, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What a size depends on besides the model.

    Attributes:
        tp: tensor-parallel size; each rank is one GPU.
        kv_dtype, conv_dtype, state_dtype: what is stored; "" is the spec's suggestion. ``kv_dtype`` holds for
            everything that grows with tokens, ``state_dtype`` for S.
        spec_tokens: draft tokens per step, 0 without speculation.
    """

    tp: int = 1
    kv_dtype: str = ""
    conv_dtype: str = ""
    state_dtype: str = ""
    spec_tokens: int = 0

    def __post_init__(self) -> None:
        if self.tp < 1 or self.spec_tokens < 0:
            raise MisuseError(f"tp {self.tp} must be at least 1 and spec_tokens {self.spec_tokens} at least 0")
        for name in ("kv_dtype", "conv_dtype", "state_dtype"):
            if getattr(self, name):
                object.__setattr__(self, name, parse_dtype(getattr(self, name)))

    def dtype(self, component: Component) -> str:
        """The dtype that ``component`` is stored in."""
        if component.growth is not Growth.PER_REQUEST:
            return self.kv_dtype or component.dtype
        return (self.state_dtype if component.name == "S" else self.conv_dtype) or component.dtype

    def row_bytes(self, component: Component) -> int:
        """Unique bytes of one row in one layer."""
        return component.row_elems * DTYPE_BYTES[self.dtype(component)]

    def rank_row_bytes(self, component: Component) -> int:
        """Bytes of one row in one layer on one rank; every rank holds the same amount."""
        axis = component.ownership.axis
        if not axis:
            return self.row_bytes(component)
        extent = component.axis(axis).extent
        first, stop = component.ownership.interval(extent, 0, self.tp)
        return self.row_bytes(component) // extent * (stop - first)

    def resident_row_bytes(self, component: Component) -> int:
        """``rank_row_bytes`` with what speculation keeps beside it."""
        held = self.rank_row_bytes(component)
        if component.growth is not Growth.PER_REQUEST:
            return held
        if component.name == "S":
            return held * (1 + self.spec_tokens)
        return self._conv_row_bytes(component)

    def state_page_bytes(self, components: Iterable[Component]) -> int:
        """One layer's convolution (with its speculative rows) and one S: what a state page holds."""
        return sum(self.rank_row_bytes(c) if c.name == "S" else self._conv_row_bytes(c) for c in components)

    def _conv_row_bytes(self, component: Component) -> int:
        taps = component.axis("taps").extent
        return self.rank_row_bytes(component) // taps * (taps + self.spec_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentSize:
    """One component over all its layers. A row pooled over several tokens counts by its fraction per token.

    ``bytes_per_token`` is 0 for what doesn't grow for ever (state, windows).
    """

    name: str
    layers: int
    growth: str
    dtype: str
    bytes_per_token: float
    bytes_per_request: int
    rank_bytes_per_token: float
    rank_bytes_per_request: int
    rank_resident_bytes_per_request: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossover:
    """From how many tokens on the linear-attention state is the smaller cache, on one rank.

    Attributes:
        state_dtype: how S is stored; empty when the model has none.
        layer_tokens: one state layer against one full-attention layer, rounded up to whole tokens.
        model_tokens: all state layers against all full-attention layers, from the exact ratio.
    """

    state_dtype: str
    layer_tokens: int
    model_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PageReport:
    """One page size for attention and state on one rank; paddings are what the smaller of the two wastes per page."""

    alignment_tokens: int
    attention_bytes_per_token: int
    attention_page_bytes: int
    state_page_bytes: int
    page_tokens: int
    page_bytes: int
    attention_padding_bytes: int
    state_padding_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLedger:
    """One GPU's memory, in bytes, and what fits into what is left.

    Attributes:
        state_bytes, window_bytes: reserved for ``max_num_seqs`` requests, used or not.
        free_bytes: left for caches that grow with tokens; negative when the reserved parts don't fit.
        tokens: how many tokens of such caches fit; None when the model has none.
        requests: how many requests of ``tokens_per_request`` tokens fit, at most ``max_num_seqs``.
        requests_max: how many would fit if exactly as many had been reserved.
    """

    gpu_bytes: int
    weights_bytes: int
    overhead_bytes: int
    max_num_seqs: int
    state_bytes: int
    window_bytes: int
    free_bytes: int
    tokens_per_request: int
    tokens: int | None
    requests: int
    requests_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Seconds to move unique bytes over one link, without any protocol's cost."""

    link_bytes_per_s: float
    request_s: float
    concurrent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeReport:
    """Everything ``pdxfer size`` shows; ``to_json`` is its stable form."""

    model_type: str
    assumptions: Assumptions
    tokens: int
    concurrency: int
    components: tuple[ComponentSize, ...]
    crossovers: tuple[Crossover, ...]
    pages: PageReport | None
    memory: MemoryLedger | None
    transfer: Transfer | None

    def total(self, field: str) -> float:
        """Sum of one byte field over the components."""
        total: float = sum(getattr(c, field) for c in self.components)
        return total

    def to_json(self) -> dict[str, Any]:
        """Plain values; ``schema_version`` changes when a field changes its meaning or goes."""
        fields = (f for f in ComponentSize.__dataclass_fields__ if "bytes" in f)
        totals = {field: _plain(self.total(field)) for field in fields}
        concurrent = {
            f"concurrent_{field}": totals[f"{field}_per_request"] * self.concurrency
            for field in ("bytes", "rank_bytes", "rank_resident_bytes")
        }
        return {
            "schema_version": SCHEMA_VERSION,
            "model_type": self.model_type,
            **asdict(self.assumptions),
            "tokens": self.tokens,
            "concurrency": self.concurrency,
            "components": [{k: _plain(v) for k, v in asdict(c).items()} for c in self.components],
            "totals": {**totals, **concurrent},
            "crossover": [asdict(c) for c in self.crossovers],
            "pages": asdict(self.pages) if self.pages else None,
            "memory": asdict(self.memory) if self.memory else None,
            "transfer": asdict(self.transfer) if self.transfer else None,
        }


def size_report(
    spec: CacheSpec,
    assumptions: Assumptions,
    *,
    tokens: int,
    concurrency: int = 1,
    alignment_tokens: int = 0,
    memory: MemoryLedger | None = None,
    link_bytes_per_s: float = 0,
) -> SizeReport:
    """Size one model under ``assumptions`` for ``concurrency`` requests of ``tokens`` tokens each.

    Args:
        alignment_tokens: step of the unified page, 0 for the engines' default.
        link_bytes_per_s: 0 for no transfer times.

    Raises:
        MisuseError: the model can't be cut into ``tp`` ranks, or a count is not positive.
    """
    check_tp(spec, assumptions.tp)
    if min(tokens, concurrency) < 1 or alignment_tokens < 0:
        raise MisuseError(f"tokens {tokens} and concurrency {concurrency} must be at least 1, and no size negative")
    if not 0 <= link_bytes_per_s < math.inf:
        raise MisuseError(f"a link can't carry {link_bytes_per_s:g} B/s")
    components = tuple(_component_size(c, assumptions, tokens) for c in spec.components)
    unique = sum(c.bytes_per_request for c in components)
    transfer = None
    if link_bytes_per_s:
        one = unique / link_bytes_per_s
        transfer = Transfer(link_bytes_per_s=link_bytes_per_s, request_s=one, concurrent_s=one * concurrency)
    return SizeReport(
        model_type=spec.model, assumptions=assumptions, tokens=tokens, concurrency=concurrency, components=components,
        crossovers=_crossovers(spec, assumptions), pages=page_report(spec, assumptions, alignment_tokens),
        memory=memory, transfer=transfer,
    )  # fmt: skip


def check_tp(spec: CacheSpec, tp: int) -> None:
    """Raise MisuseError when the model can't be cut into ``tp`` ranks; the hint lists sizes that work."""
    why = spec.why_not_tp(tp)
    if why is not None:
        sizes = ", ".join(map(str, spec.tp_sizes(range(1, 65))))
        raise MisuseError(f"TP {tp} is impossible for this model: {why}", hint=f"possible up to 64: {sizes}")


def _component_size(component: Component, assumptions: Assumptions, tokens: int) -> ComponentSize:
    first, stop = component.rows(tokens)
    rows = (stop - first) * len(component.layers)
    row, rank_row = assumptions.row_bytes(component), assumptions.rank_row_bytes(component)
    per_token = len(component.layers) / component.tokens_per_row if component.growth is Growth.PER_TOKEN else 0
    return ComponentSize(
        name=component.name,
        layers=len(component.layers),
        growth=component.growth.value,
        dtype=assumptions.dtype(component),
        bytes_per_token=row * per_token,
        bytes_per_request=row * rows,
        rank_bytes_per_token=rank_row * per_token,
        rank_bytes_per_request=rank_row * rows,
        rank_resident_bytes_per_request=assumptions.resident_row_bytes(component) * rows,
    )


def _state(spec: CacheSpec) -> list[Component]:
    return [c for c in spec.components if c.growth is Growth.PER_REQUEST]


def _attention(spec: CacheSpec) -> list[Component]:
    """Full attention's own caches, without index keys: what linear attention is an alternative to."""
    return [c for c in spec.components if c.growth is Growth.PER_TOKEN and c.name != "index_k"]


def crossover(spec: CacheSpec, assumptions: Assumptions) -> Crossover | None:
    """Compare a rank's resident state with its full-attention caches; None when the model lacks one of them."""
    state, attention = _state(spec), _attention(spec)
    if not state or not attention:
        return None

    def ratio(state_layers: int, attention_layers: int) -> int:
        held = sum(assumptions.resident_row_bytes(c) for c in state) * state_layers
        return math.ceil(Fraction(held, sum(assumptions.rank_row_bytes(c) for c in attention) * attention_layers))

    return Crossover(
        state_dtype=assumptions.dtype(spec["S"]) if "S" in spec else "",
        layer_tokens=ratio(1, 1),
        model_tokens=ratio(len(state[0].layers), len(attention[0].layers)),
    )


def _crossovers(spec: CacheSpec, assumptions: Assumptions) -> tuple[Crossover, ...]:
    """The crossover as assumed first, then with S in the other usual dtype: engines differ by default."""
    dtypes = [assumptions.state_dtype]
    if "S" in spec:
        mine = assumptions.dtype(spec["S"])
        dtypes = [mine, *(d for d in ("bfloat16", "float32") if d != mine)]
    found = (crossover(spec, replace(assumptions, state_dtype=dtype)) for dtype in dtypes)
    return tuple(c for c in found if c is not None)


def page_report(spec: CacheSpec, assumptions: Assumptions, alignment_tokens: int = 0) -> PageReport | None:
    """One page size for both kinds of cache, grown the way vLLM's hybrid allocator does it.

    Args:
        alignment_tokens: the step; 0 is 16 tokens, or 128 with MLA.

    Returns:
        None when the model has only one kind. Models whose attention is all windows use the window's row.
    """
    state = _state(spec)
    attention = _attention(spec) or [c for c in spec.components if c.growth is Growth.PER_WINDOW]
    if not state or not attention:
        return None
    step = alignment_tokens or (_ALIGNMENT_TOKENS_MLA if "latent" in spec else _ALIGNMENT_TOKENS)
    return unify_pages(sum(assumptions.rank_row_bytes(c) for c in attention), assumptions.state_page_bytes(state), step)


def unify_pages(
    attention_bytes_per_token: int, state_bytes: int, alignment_tokens: int = _ALIGNMENT_TOKENS
) -> PageReport:
    """Grow the attention page in steps until it covers the state page, then pad the smaller one.

    With a state that is none (0 B) the page is one step. This is how vLLM's hybrid allocator gets pages of
    1,056 tokens for Qwen3-Next at TP 1 and 272 at TP 8.
    """
    tokens = alignment_tokens * max(1, math.ceil(state_bytes / (attention_bytes_per_token * alignment_tokens)))
    attention_bytes = tokens * attention_bytes_per_token
    page_bytes = max(attention_bytes, state_bytes)
    return PageReport(
        alignment_tokens=alignment_tokens, attention_bytes_per_token=attention_bytes_per_token,
        attention_page_bytes=attention_bytes, state_page_bytes=state_bytes, page_tokens=tokens, page_bytes=page_bytes,
        attention_padding_bytes=page_bytes - attention_bytes, state_padding_bytes=page_bytes - state_bytes,
    )  # fmt: skip


def memory_ledger(
    spec: CacheSpec,
    assumptions: Assumptions,
    *,
    gpu_bytes: int,
    weights_bytes: int,
    overhead_bytes: int,
    max_num_seqs: int,
    tokens_per_request: int,
) -> MemoryLedger:
    """Divide one GPU's memory: weights, overhead, bounded caches of every reserved request, the rest for tokens.

    Pages' rounding is not counted. ``free_bytes`` below zero means nothing fits.

    Raises:
        MisuseError: a negative size, or a count below 1.
    """
    if min(gpu_bytes, weights_bytes, overhead_bytes) < 0 or min(max_num_seqs, tokens_per_request) < 1:
        raise MisuseError("memory sizes must not be negative; max_num_seqs and tokens must be at least 1")
    check_tp(spec, assumptions.tp)
    held = dict.fromkeys(Growth, 0)
    per_token = Fraction(0)
    for c in spec.components:
        first, stop = c.rows(c.window or tokens_per_request)
        size = assumptions.resident_row_bytes(c) * len(c.layers)
        held[c.growth] += size * (stop - first)
        per_token += Fraction(size, c.tokens_per_row) if c.growth is Growth.PER_TOKEN else 0
    available = gpu_bytes - weights_bytes - overhead_bytes
    state_bytes, window_bytes = (held[g] * max_num_seqs for g in (Growth.PER_REQUEST, Growth.PER_WINDOW))
    free = available - state_bytes - window_bytes
    growing = held[Growth.PER_TOKEN]
    fits = 0 if free < 0 else min(max_num_seqs, free // growing) if growing else max_num_seqs
    return MemoryLedger(
        gpu_bytes=gpu_bytes,
        weights_bytes=weights_bytes,
        overhead_bytes=overhead_bytes,
        max_num_seqs=max_num_seqs,
        state_bytes=state_bytes,
        window_bytes=window_bytes,
        free_bytes=free,
        tokens_per_request=tokens_per_request,
        tokens=math.floor(max(free, 0) / per_token) if per_token else None,
        requests=fits,
        requests_max=max(available, 0) // sum(held.values()),
    )


def parse_dtype(text: str) -> str:
    """A dtype's name, or a usual short form of it (bf16, fp8); raises MisuseError listing the known ones."""
    name = _DTYPE_ALIASES.get(text, text)
    if name not in DTYPE_BYTES:
        known = ", ".join([*sorted(DTYPE_BYTES), *sorted(_DTYPE_ALIASES)])
        raise MisuseError(f"dtype {text!r} is unknown", hint=f"known are {known}")
    return name


def parse_bytes(text: str) -> int:
    """A size such as ``80GiB``, ``500MB``, ``1.5 GiB`` or a bare number of bytes; decimal and binary units differ.

    Raises:
        MisuseError: not a size, an unknown unit, or so much that it can't be meant.
    """
    match = _QUANTITY.fullmatch(text)
    unit = match[2].lower() or "b" if match else ""
    if match is None or unit not in _UNITS:
        raise MisuseError(f"{text!r} is not a size", hint="write a number and B, kB, MB, GB, TB, KiB, MiB, GiB or TiB")
    size = Fraction(match[1]) * _UNITS[unit]
    if size > 1 << 60:
        raise MisuseError(f"{text!r} is more than any machine has")
    return math.floor(size)


def _plain(value: Any) -> Any:
    """Whole floats as integers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
