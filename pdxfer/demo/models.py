"""Tiny hybrid models for the demo and for tests: the architectures of transformers, seeded random weights.

In come a name of ``MODELS`` and the TP sizes that must work; out go a transformers config and a model in
fp32. Nothing here knows ranks, caches or transfers.

Every model has two variants, since no single head count divides by 3 and has fewer KV heads than 4 ranks::

    variant   units   KV heads   TP sizes           shows
    eight     8       2          1 2 4 8            KV heads fewer than ranks: neighbours hold the same head
    twelve    12      12         1 2 3 4 6 12       TP sizes that don't divide each other (3 to 2, 4 to 3)

"Units" is the number of query heads, key heads, state heads and groups (value heads and Mamba heads are twice as
many where the architecture allows it), so one rule decides all of them. Decay is slow (about 0.97 per token), so
that state written early still shows in the logits; with the usual initial values an error in S all but vanishes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from pdxfer.errors import MisuseError

if TYPE_CHECKING:
    from torch import Generator, Tensor
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["MODELS", "VOCABULARY", "build_model", "demo_config", "tp_sizes", "variant"]

VOCABULARY = 128

_SIGMA = 0.08
_CONV_SIGMA = 0.5  # four taps only: with 0.08 the state of convolution would hardly reach the logits
_LOG_DECAY = -3.0

#: units -> KV heads
_VARIANTS = {8: 2, 12: 12}


def _common(units: int, **fields: Any) -> dict[str, Any]:
    shared = {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": units,
        "num_key_value_heads": _VARIANTS[units],
        "intermediate_size": 64,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 1 << 20,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return {**shared, **fields}


def _qwen3_next(units: int) -> dict[str, Any]:
    return _common(
        units,
        head_dim=16,
        full_attention_interval=4,
        linear_num_key_heads=units,
        linear_num_value_heads=2 * units,
        linear_key_head_dim=8,
        linear_value_head_dim=16,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )


def _kimi_linear(units: int) -> dict[str, Any]:
    return _common(
        units,
        num_key_value_heads=units,
        kv_lora_rank=32,
        q_lora_rank=None,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        linear_attn_config={
            "kda_layers": [1, 2, 3],
            "full_attn_layers": [4],
            "num_heads": units,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
        },
        num_local_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        n_group=1,
        topk_group=1,
    )


def _nemotron_h(units: int) -> dict[str, Any]:
    fields = _common(
        units,
        hybrid_override_pattern="M-M*",
        head_dim=16,
        mamba_num_heads=2 * units,
        mamba_head_dim=8,
        n_groups=units,
        ssm_state_size=16,
        conv_kernel=4,
        chunk_size=16,
    )
    del fields["num_hidden_layers"]  # the pattern's length
    return fields


def _falcon_h1(units: int) -> dict[str, Any]:
    return _common(
        units,
        num_hidden_layers=3,
        head_dim=16,
        mamba_n_heads=2 * units,
        mamba_d_head=8,
        mamba_d_ssm=16 * units,
        mamba_n_groups=1,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_chunk_size=16,
    )


_BUILDERS: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "falcon-h1": ("falcon_h1", _falcon_h1),
    "kimi-linear": ("kimi_linear", _kimi_linear),
    "nemotron-h": ("nemotron_h", _nemotron_h),
    "qwen3-next": ("qwen3_next", _qwen3_next),
}

#: Names that ``demo_config`` takes.
MODELS: tuple[str, ...] = tuple(sorted(_BUILDERS))


def _divisors(n: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, n + 1) if n % d == 0)


def tp_sizes(name: str) -> tuple[tuple[int, ...], ...]:
    """TP sizes of each variant of ``name``; a pair works when one variant has both. MisuseError: unknown name."""
    if name not in _BUILDERS:
        raise MisuseError(f"there is no demo model {name!r}", hint=f"choose one of {', '.join(MODELS)}")
    return tuple(_divisors(units) for units in _VARIANTS)


def variant(name: str, sizes: Iterable[int]) -> int:
    """Return the units of the variant of ``name`` that can be cut over every TP size in ``sizes``.

    Raises:
        MisuseError: unknown name, or no variant fits all sizes; the hint lists what works.
    """
    wanted = set(sizes)
    variants = tp_sizes(name)
    for units, fits in zip(_VARIANTS, variants, strict=True):
        if wanted <= set(fits):
            return units
    options = " or from ".join("{" + ", ".join(map(str, fits)) + "}" for fits in variants)
    message = f"{name} can't be cut over TP sizes {sorted(wanted)} at once"
    raise MisuseError(message, hint=f"take all sizes from {options}")


def demo_config(name: str, sizes: Iterable[int] = (1,)) -> PretrainedConfig:
    """Return a tiny config of architecture ``name`` that can be cut over every TP size in ``sizes``; see `variant`."""
    from transformers import AutoConfig

    units = variant(name, sizes)
    model_type, fields = _BUILDERS[name]
    return AutoConfig.for_model(model_type, **fields(units))


def build_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Return the causal language model of ``config`` in fp32 with weights that depend on ``seed`` and names only."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            parameter.copy_(_weights(name, parameter, generator))
    return model.eval()


def _weights(name: str, parameter: Tensor, generator: Generator) -> Tensor:
    """Normal values of the parameter's shape, shifted or scaled where the role of the parameter asks for it."""
    import torch

    noise = torch.randn(parameter.shape, generator=generator) * _SIGMA
    if name.endswith("A_log"):
        return noise + _LOG_DECAY
    if name.endswith("conv1d.weight"):
        return noise * (_CONV_SIGMA / _SIGMA)
    if "norm" in name:
        return noise + parameter  # ones, or zeros where the module computes 1 + weight
    return noise
