"""What ``pdxfer plan`` shows, computed: bytes, messages and shares of one plan for one request.

In come two workers written as text (``tp=4,page=64``), a spec and a token count; out go layouts and a frozen
report. Nothing is printed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from pdxfer.builders import PLACEMENTS, Parallel, Storage, build_layout
from pdxfer.errors import MisuseError
from pdxfer.hf_config import did_you_mean
from pdxfer.layout import Layout
from pdxfer.packing import EdgeProgram
from pdxfer.pages import RequestShape
from pdxfer.plan import Plan, make_plan
from pdxfer.spec import DTYPE_BYTES, CacheSpec, Component, Growth

__all__ = ["SCHEMA_VERSION", "ComponentShare", "Pair", "PlanReport", "parse_worker", "plan_report"]

SCHEMA_VERSION = 1

_KEYS = {
    "tp": "tensor-parallel size",
    "pp": "pipeline stages: a count, or layers per stage as 30+34",
    "cp": "context-parallel size",
    "interleave": "consecutive rows per context-parallel owner",
    "page": "tokens per page",
    "placement": f"one of {', '.join(PLACEMENTS)}",
    "order": "nhd or hnd",
    "packed": "yes: K and V side by side",
    "conv": "ct (channels, taps) or tc",
    "state": "kv or vk",
    "kv_dtype": "stored dtype of what grows with tokens",
    "conv_dtype": "stored dtype of convolution state",
    "state_dtype": "stored dtype of S",
    "accepts": "dtypes of S at the other side to convert with, as float32+bfloat16",
    "before": "convolution columns stored in front of the taps that matter",
    "spec": "convolution columns for speculative tokens behind them",
    "hosts": "machines the ranks are spread over",
    "ranks_per_host": "ranks that share a machine",
}
_PARALLEL = {"tp": "tp", "cp": "cp", "interleave": "interleave", "ranks_per_host": "ranks_per_host"}
_STORAGE_NUMBERS = {"page": "page_tokens", "before": "taps_before", "spec": "taps_after"}
_STORAGE_WORDS = {"order": "kv_order", "conv": "conv_order", "state": "state_order"}
_DTYPES = ("kv_dtype", "conv_dtype", "state_dtype")
_RANKS_MAX = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """What one rank sends another; ``relay``: between two ranks of the target worker, on one host."""

    source: int
    target: int
    relay: bool
    nbytes: int
    messages: int
    components: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentShare:
    """One component's bytes for the request.

    Attributes:
        unique_bytes: the global tensor, once.
        network_bytes: sent between the workers; relayed_bytes: passed on inside target hosts.
        least_bytes_per_source, most_bytes_per_source: of what one source rank sends.
    """

    component: str
    unique_bytes: int
    network_bytes: int
    relayed_bytes: int
    least_bytes_per_source: int
    most_bytes_per_source: int

    @property
    def naive_bytes(self) -> int:
        """What would cross if every target rank fetched its own copy."""
        return self.network_bytes + self.relayed_bytes

    def to_json(self) -> dict[str, Any]:
        """Plain values with the two ratios; a request of 0 bytes has none."""
        return {
            **asdict(self),
            "naive_bytes": self.naive_bytes,
            "network_to_unique": _ratio(self.network_bytes, self.unique_bytes),
            "dedup_ratio": _ratio(self.naive_bytes, self.network_bytes),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """One plan applied to one request."""

    plan: Plan
    tokens: int
    first_token: int
    chunk_bytes: int
    pairs: tuple[Pair, ...]
    shares: tuple[ComponentShare, ...]

    def total(self, field: str) -> int:
        """Sum of a field of ``ComponentShare``."""
        return sum(getattr(share, field) for share in self.shares)

    @property
    def dedup_ratio(self) -> float:
        """Naive over sent bytes, all components."""
        return _ratio(self.total("naive_bytes"), self.total("network_bytes"))

    def messages(self, *, relay: bool = False) -> int:
        """Messages over the network, or on the hosts."""
        return sum(pair.messages for pair in self.pairs if pair.relay == relay)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        fields = ("unique_bytes", "network_bytes", "relayed_bytes", "naive_bytes")
        return {
            "schema_version": SCHEMA_VERSION,
            "digest": self.plan.digest,
            "tokens": self.tokens,
            "first_token": self.first_token,
            "chunk_bytes": self.chunk_bytes,
            "source": _worker_json(self.plan.source),
            "target": _worker_json(self.plan.target),
            "copy_items": len(self.plan.items),
            "totals": {
                **{field: self.total(field) for field in fields},
                "network_messages": self.messages(),
                "relay_messages": self.messages(relay=True),
                "dedup_ratio": self.dedup_ratio,
            },
            "components": [share.to_json() for share in self.shares],
            "pairs": [
                {"bytes" if name == "nbytes" else name: value for name, value in asdict(p).items()} for p in self.pairs
            ],
        }  # fmt: skip


def _worker_json(layout: Layout) -> dict[str, Any]:
    return {"ranks": len(layout), "hosts": len({r.host for r in layout.ranks}), "digest": layout.digest}


def _ratio(above: int, below: int) -> float:
    return above / below if below else 1.0


def parse_worker(text: str, spec: CacheSpec, tokens: int) -> Layout:
    """Lay ``spec`` out as a list ``key=value,...`` says, with pages for one request of ``tokens`` tokens.

    Raises:
        MisuseError: an unknown key, an impossible value, or a model that can't be cut so.
    """
    values = _split(text)
    numbers: dict[str, Any] = {field: _number(key, values[key]) for key, field in _PARALLEL.items() if key in values}
    parallel = Parallel(stages=_stages(values.get("pp", "1"), spec.num_layers), **numbers)
    ranks = parallel.tp * parallel.cp * max(1, len(parallel.stages))
    if ranks > _RANKS_MAX:
        raise MisuseError(f"{text!r} makes {ranks} ranks; at most {_RANKS_MAX} are planned here")
    if "hosts" in values:
        parallel = _spread(parallel, ranks, _number("hosts", values["hosts"]), values)
    placement = values.get("placement", "per_layer")
    return build_layout(spec, parallel, _storage(values, spec, tokens, placement), placement)


def _split(text: str) -> dict[str, str]:
    values: dict[str, str] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, equals, value = (x.strip() for x in part.partition("="))
        if not equals or not value:
            raise MisuseError(f"{part!r} is not key=value", hint="write e.g. tp=4,page=64")
        if key not in _KEYS:
            known = did_you_mean(key, tuple(_KEYS)) or f"known are {', '.join(_KEYS)}"
            raise MisuseError(f"a worker has no {key!r}", hint=known)
        if key in values:
            raise MisuseError(f"{key!r} is given twice in {text!r}")
        values[key] = value
    return values


def _number(key: str, value: str) -> int:
    if not value.isascii() or not value.isdigit() or len(value) > 9:
        raise MisuseError(f"{key}={value} is no whole number from 0 to 999999999", hint=f"{key} is the {_KEYS[key]}")
    return int(value)


def _choice(key: str, value: str, choices: tuple[str, ...]) -> str:
    if value.lower() not in choices:
        raise MisuseError(f"{key}={value} is unknown", hint=f"choose from {', '.join(choices)}")
    return value.lower()


def _stages(value: str, num_layers: int) -> tuple[int, ...]:
    if "+" in value:
        return tuple(_number("pp", part) for part in value.split("+"))
    count = _number("pp", value)
    if not 1 <= count <= num_layers:
        raise MisuseError(f"pp={count} stages can't share {num_layers} layers")
    return tuple(num_layers // count + (i < num_layers % count) for i in range(count)) if count > 1 else ()


def _spread(parallel: Parallel, ranks: int, hosts: int, values: Mapping[str, str]) -> Parallel:
    if "ranks_per_host" in values:
        raise MisuseError("hosts and ranks_per_host say the same thing", hint="give one of them")
    if hosts < 1 or ranks % hosts:
        raise MisuseError(f"{ranks} ranks can't be spread evenly over hosts={hosts}")
    return replace(parallel, ranks_per_host=ranks // hosts)


def _storage(values: Mapping[str, str], spec: CacheSpec, tokens: int, placement: str) -> Storage:
    chosen: dict[str, Any] = {field: _number(k, values[k]) for k, field in _STORAGE_NUMBERS.items() if k in values}
    choices = {"order": ("nhd", "hnd"), "conv": ("ct", "tc"), "state": ("kv", "vk")}
    for key, field in _STORAGE_WORDS.items():
        if key in values:
            chosen[field] = _choice(key, values[key], choices[key]).upper()
    for key in _DTYPES:
        if key in values:
            chosen[key] = _choice(key, values[key], tuple(DTYPE_BYTES))
    if "accepts" in values:
        chosen["accepts"] = tuple(_choice("accepts", v, tuple(DTYPE_BYTES)) for v in values["accepts"].split("+"))
    if "packed" in values:
        chosen["kv_packed"] = _choice("packed", values["packed"], ("yes", "no")) == "yes"
    page_tokens = chosen.get("page_tokens", Storage().page_tokens)
    return Storage(**chosen, pages=_pages(spec, tokens, page_tokens, placement))


def _pages(spec: CacheSpec, tokens: int, page_tokens: int, placement: str) -> int:
    """Pages that one request of ``tokens`` tokens needs from the pool at most; one extra for a started one."""
    pages = -(-tokens // max(1, page_tokens)) + 1
    if placement != "unified":
        return pages
    kinds = [len({x for c in spec.components if c.growth is g for x in c.layers}) for g in Growth]
    depth = min(n for n in kinds if n)
    return sum(-(-n // depth) for n in kinds) * pages


def plan_report(source: Layout, target: Layout, *, tokens: int, first_token: int = 0, chunk_bytes: int = 8 << 20,
                fan_out: bool = True) -> PlanReport:  # fmt: skip
    """Plan a pair, apply the plan to one request, and count.

    Raises:
        IncompatibleError: the pair can't be mapped. MisuseError: ``first_token`` is beyond ``tokens``.
    """
    plan = make_plan(source, target, fan_out=fan_out)
    shape = RequestShape(kv_tokens=tokens, first_token=first_token)
    programs = [EdgeProgram(plan, edge, shape, chunk_bytes=chunk_bytes) for edge in plan.edges]
    return PlanReport(
        plan=plan,
        tokens=tokens,
        first_token=first_token,
        chunk_bytes=chunk_bytes,
        pairs=tuple(_pair(program) for program in programs),
        shares=tuple(_share(c, plan, programs, shape) for c in plan.target.spec.components),
    )


def _pair(program: EdgeProgram) -> Pair:
    edge = program.edge
    return Pair(
        source=edge.source, target=edge.target, relay=edge.relay, nbytes=program.payload_bytes,
        messages=len(program.chunks), components=program.bytes_by_component(),
    )  # fmt: skip


def _share(component: Component, plan: Plan, programs: list[EdgeProgram], shape: RequestShape) -> ComponentShare:
    by_source = dict.fromkeys(range(len(plan.source)), 0)
    relayed = 0
    for program in programs:
        nbytes = program.bytes_by_component().get(component.name, 0)
        if program.edge.relay:
            relayed += nbytes
        else:
            by_source[program.edge.source] += nbytes
    first, stop = shape.rows(component)
    stored = next(h.dtype for r in plan.source.ranks for h in r.holdings if h.component == component.name)
    return ComponentShare(
        component=component.name,
        unique_bytes=len(component.layers) * (stop - first) * component.row_elems * DTYPE_BYTES[stored],
        network_bytes=sum(by_source.values()),
        relayed_bytes=relayed,
        least_bytes_per_source=min(by_source.values()),
        most_bytes_per_source=max(by_source.values()),
    )
