"""Tensor parallelism for the demo's models: one rank's module, made of slices of the full weights.

In come the full state dict, the full config, a rank and a group; out goes a transformers model whose head
counts are the rank's and whose attention and state outputs are summed over the group. MLP, MoE, norms and
embeddings are whole on every rank. Nothing here knows caches or transfers: the caches that such a model fills
are, as in serving engines, this rank's share.

transformers' own ``tp_plan`` does not cut linear-attention layers (each rank then holds the whole state), so the
cuts are listed here. One weight is cut along one axis in *parts*, each by its own heads::

    in_proj of Mamba2     |  gate    |  x       | B    | C    | dt  |      H=4 heads, G=1 group, 2 ranks
    rank 0 holds          |#####     |#####     |######|######|###  |      B and C whole: one unit, every rank
    rank 1 holds          |     #####|     #####|######|######|  ###|
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pdxfer.errors import InternalError, MisuseError
from pdxfer.spec import Ownership, Rule

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["Cut", "init_gloo", "rank_config", "shard_model", "shard_weights"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How one weight is divided: along ``axis``, part by part, each part of (length, units).

    A part of fewer units than ranks is shared by neighbours (rank r of n holds unit r * units // n).
    """

    axis: int
    parts: tuple[tuple[int, int], ...]

    def apply(self, name: str, weight: Tensor, rank: int, size: int) -> Tensor:
        """Return this rank's slice of ``weight``, contiguous and with its own memory."""
        import torch

        if sum(length for length, _ in self.parts) != weight.shape[self.axis]:
            raise InternalError(
                f"{name} has shape {tuple(weight.shape)}, its parts on axis {self.axis} are {self.parts}"
            )
        pieces, begin = [], 0
        for length, units in self.parts:
            start, stop = Ownership(rule=Rule.EXTENDED, axis=name, units=units).interval(length, rank, size)
            pieces.append(weight.narrow(self.axis, begin + start, stop - start))
            begin += length
        return torch.cat(pieces, self.axis)


def _rows(length: int, units: int) -> Cut:
    return Cut(axis=0, parts=((length, units),))


def _columns(length: int, units: int) -> Cut:
    return Cut(axis=1, parts=((length, units),))


def _attention(c: Any, prefix: str, *, query_width: int) -> dict[str, Cut]:
    heads, kv, dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
    return {
        f"{prefix}.q_proj.weight": _rows(heads * query_width, heads),
        f"{prefix}.k_proj.weight": _rows(kv * dim, kv),
        f"{prefix}.v_proj.weight": _rows(kv * dim, kv),
        f"{prefix}.o_proj.weight": _columns(heads * dim, heads),
    }


def _mamba2(prefix: str, *, heads: int, width: int, groups: int, group_width: int) -> dict[str, Cut]:
    x, bc = (width, heads), (group_width, groups)
    conv = Cut(axis=0, parts=(x, bc, bc))
    per_head = _rows(heads, heads)
    return {
        f"{prefix}.in_proj.weight": Cut(axis=0, parts=(x, x, bc, bc, (heads, heads))),
        f"{prefix}.conv1d.weight": conv,
        f"{prefix}.conv1d.bias": conv,
        f"{prefix}.dt_bias": per_head,
        f"{prefix}.A_log": per_head,
        f"{prefix}.D": per_head,
        f"{prefix}.norm.weight": _rows(width, groups),
        f"{prefix}.out_proj.weight": _columns(width, heads),
    }


def _qwen3_next(c: Any, layer_type: str) -> dict[str, Cut]:
    if layer_type == "full_attention":
        return _attention(c, "self_attn", query_width=2 * c.head_dim)  # query and gate side by side, head by head
    hk, hv = c.linear_num_key_heads, c.linear_num_value_heads
    keys, values = hk * c.linear_key_head_dim, hv * c.linear_value_head_dim
    return {
        "linear_attn.in_proj_qkvz.weight": _rows(2 * keys + 2 * values, hk),  # rows are grouped by key head
        "linear_attn.in_proj_ba.weight": _rows(2 * hv, hk),
        "linear_attn.conv1d.weight": Cut(axis=0, parts=((keys, hk), (keys, hk), (values, hv))),
        "linear_attn.dt_bias": _rows(hv, hv),
        "linear_attn.A_log": _rows(hv, hv),
        "linear_attn.out_proj.weight": _columns(values, hv),
    }


def _kimi_linear(c: Any, layer_type: str) -> dict[str, Cut]:
    if layer_type == "full_attention":
        heads = c.num_attention_heads
        return {
            "self_attn.q_proj.weight": _rows(heads * (c.qk_nope_head_dim + c.qk_rope_head_dim), heads),
            "self_attn.kv_b_proj.weight": _rows(heads * (c.qk_nope_head_dim + c.v_head_dim), heads),
            "self_attn.o_proj.weight": _columns(heads * c.v_head_dim, heads),
        }
    heads, width = c.linear_num_heads, c.linear_num_heads * c.linear_head_dim
    by_head = _rows(width, heads)
    return {
        **{f"self_attn.{name}_proj.weight": by_head for name in ("q", "k", "v", "g_b")},
        "self_attn.forget_gate.f_b_proj.weight": by_head,
        "self_attn.forget_gate.dt_bias": by_head,
        "self_attn.forget_gate.A_log": Cut(axis=2, parts=((heads, heads),)),
        "self_attn.b_proj.weight": _rows(heads, heads),
        "self_attn.conv1d.weight": Cut(axis=0, parts=((width, heads),) * 3),
        "self_attn.o_proj.weight": _columns(width, heads),
    }


def _nemotron_h(c: Any, layer_type: str) -> dict[str, Cut]:
    if layer_type == "full_attention":
        return _attention(c, "mixer", query_width=c.head_dim)
    if layer_type != "linear_attention":
        return {}
    width, groups = c.mamba_num_heads * c.mamba_head_dim, c.n_groups
    return _mamba2("mixer", heads=c.mamba_num_heads, width=width, groups=groups, group_width=groups * c.ssm_state_size)


def _falcon_h1(c: Any, layer_type: str) -> dict[str, Cut]:
    heads, groups = c.mamba_n_heads, c.mamba_n_groups
    state = _mamba2("mamba", heads=heads, width=c.mamba_d_ssm, groups=groups, group_width=groups * c.mamba_d_state)
    return {**_attention(c, "self_attn", query_width=c.head_dim), **state}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """Config fields that count heads (``shared`` ones may be fewer than ranks), and how a layer's weights are cut."""

    sharded: tuple[str, ...]
    shared: tuple[str, ...]
    cuts: Callable[[Any, str], dict[str, Cut]]


_FAMILIES: dict[str, _Family] = {
    "falcon_h1": _Family(
        sharded=("num_attention_heads", "mamba_n_heads", "mamba_d_ssm"),
        shared=("num_key_value_heads", "mamba_n_groups"),
        cuts=_falcon_h1,
    ),
    "kimi_linear": _Family(
        sharded=("num_attention_heads", "num_key_value_heads", "linear_num_heads"),
        shared=(),
        cuts=_kimi_linear,
    ),
    "nemotron_h": _Family(
        sharded=("num_attention_heads", "mamba_num_heads", "n_groups"),  # its gated norm is per group
        shared=("num_key_value_heads",),
        cuts=_nemotron_h,
    ),
    "qwen3_next": _Family(
        sharded=("num_attention_heads", "linear_num_key_heads", "linear_num_value_heads"),
        shared=("num_key_value_heads",),
        cuts=_qwen3_next,
    ),
}


def _family(config: PretrainedConfig) -> _Family:
    if config.model_type not in _FAMILIES:
        message = f"no tensor-parallel cuts are known for {config.model_type!r}"
        raise MisuseError(message, hint=f"known are {sorted(_FAMILIES)}")
    if getattr(config, "mamba_rms_norm", False):
        raise MisuseError("a gated norm over all Mamba heads (mamba_rms_norm) can't be computed on one rank's heads")
    return _FAMILIES[config.model_type]


def rank_config(config: PretrainedConfig, size: int) -> PretrainedConfig:
    """Return ``config`` with the head counts of one rank of ``size``; all ranks have the same.

    Raises:
        MisuseError: a count can't be divided; the message names the field.
    """
    family = _family(config)
    mine = copy.deepcopy(config)
    for field in family.sharded + family.shared:
        count = getattr(config, field)
        if count % size and (field in family.sharded or size % count):
            raise MisuseError(f"{field} is {count}, which can't be divided over {size} ranks")
        setattr(mine, field, max(1, count // size))
    return mine


def shard_weights(full: Mapping[str, Tensor], config: PretrainedConfig, rank: int, size: int) -> dict[str, Tensor]:
    """Return rank ``rank``'s weights: slices where the family lists a cut, whole tensors elsewhere.

    Args:
        full: the state dict of the model of ``config`` (the full one).
        config: the full config.
    """
    cuts = _family(config).cuts
    tables = [cuts(config, layer_type) for layer_type in config.layer_types]
    mine = {}
    for name, weight in full.items():
        layer, _, suffix = name.partition("layers.")[2].partition(".")
        cut = tables[int(layer)].get(suffix) if layer.isdigit() else None
        mine[name] = cut.apply(name, weight, rank, size) if cut else weight
    return mine


def shard_model(
    full: Mapping[str, Tensor], config: PretrainedConfig, rank: int, size: int, group: ProcessGroup | None = None
) -> PreTrainedModel:
    """Return rank ``rank``'s model; with more than one rank its forward is collective over ``group``.

    Args:
        full: the full model's state dict, the same on every rank.
        config: the full config.
        group: the process group of exactly these ranks; None is the default group.

    Raises:
        MisuseError: the model's heads can't be divided over ``size`` ranks.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(rank_config(config, size), dtype=torch.float32)
    model.load_state_dict(shard_weights(full, config, rank, size))
    if size > 1:
        for name, module in model.named_modules():
            if name.endswith(("out_proj", "o_proj")):
                module.register_forward_hook(_sum_over(group))
    return model.eval()


def _sum_over(group: ProcessGroup | None) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        import torch.distributed as dist

        dist.all_reduce(output, group=group)
        return output

    return hook


def init_gloo(rank: int, size: int, store_path: str, *, timeout_s: float = 60.0) -> None:
    """Join the default gloo group of ``size`` ranks that meet at a file; blocks until all are there.

    No port is fixed: gloo listens where the system puts it and tells the others through the file. Ranks should leave
    by a barrier and ``os._exit``: gloo's threads sometimes abort an interpreter that ends by itself.

    Args:
        store_path: a file that does not exist yet, the same for all ranks and only for this group.
    """
    import datetime

    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the ranks of the demo share a machine; names may not resolve
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store_path, size),  # type: ignore[attr-defined] # public, but not in its __all__
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
