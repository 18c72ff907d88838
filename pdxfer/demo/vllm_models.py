"""Tiny checkpoints that vLLM serves on a CPU: one hybrid, one GQA and one MLA model, seeded, in bfloat16.

In come a name of ``VLLM_MODELS`` and a directory; out comes a checkpoint there, as transformers saves it. Nothing
here knows servers, caches or transfers.

===========  =============================  ============================
name         caches                         TP sizes
===========  =============================  ============================
deepseek-v3  MLA latent, replicated         1 2 4 8
llama        GQA, two KV heads              1 2 4 8
qwen3-next   GDN states, one GQA layer      1 2 4
===========  =============================  ============================

Random weights, but of a size that makes a wrong cache show in the next tokens:

- Attention is sharp (scores have a deviation of 3). Near uniform attention would average a thousand wrong rows away.
- Half of the linear attention's heads forget in some 25 tokens, half in some 500: states written early still show.
- Every token uses every expert: a near tie of the router must not decide a token, as TP sizes round differently.

bfloat16 moves the difference of the two best logits by some 0.05, at most 0.13, between TP sizes. Of random prompts,
one in ten never comes near a tie in 32 tokens; ``demo_prompts`` gives those: a token that differs is then a fault.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdxfer.errors import MisuseError

if TYPE_CHECKING:
    from torch import Generator, Tensor
    from transformers import PreTrainedModel

__all__ = ["NEAR_TIE", "SERVER_ARGUMENTS", "VLLM_MODELS", "VOCABULARY", "demo_prompts", "save_vllm_model"]

VOCABULARY = 128

#: A lead of the best token, in log probability, that rounding may turn round: most logits here have steps of 1/16.
NEAR_TIE = 0.2

_HIDDEN = 256
_SHARP = 3.0**0.5  # deviation of queries and of keys, so that scores have 3

_DEVIATIONS = {
    "self_attn.q_proj": _SHARP,
    "self_attn.k_proj": _SHARP,
    "kv_a_proj_with_mqa": 1.0,
    "kv_b_proj": 1.0,
    "lm_head": 4.0,
}

_COMMON: dict[str, Any] = {
    "hidden_size": _HIDDEN,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}

_QWEN3_NEXT: dict[str, Any] = {
    "head_dim": 64,
    "full_attention_interval": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}

# vLLM's MLA takes rows of 512 + 64 elements only.
_DEEPSEEK_V3: dict[str, Any] = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 128,
}

_FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v3": ("deepseek_v3", _DEEPSEEK_V3),
    "llama": ("llama", {"head_dim": 64}),
    "qwen3-next": ("qwen3_next", _QWEN3_NEXT),
}

#: vLLM reads these from config.json, transformers' config class doesn't have them.
_ONLY_VLLM: dict[str, dict[str, Any]] = {"deepseek-v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}}

#: Options that ``vllm serve`` needs to compute a model as it is. The rotary embedding kernel of vLLM 0.32 for CPUs
#: reads MLA's queries and keys with wrong strides: what it makes of a token depends on the tokens beside it. S is
#: float32 in so many words: where the CPU has AVX512-BF16, vLLM makes it that by itself; elsewhere, the model's dtype.
SERVER_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "deepseek-v3": ("--compilation-config", '{"custom_ops": ["-rotary_embedding"]}'),
    "llama": (),
    "qwen3-next": ("--mamba-ssm-cache-dtype", "float32"),
}

#: (tokens, of which shared with other prompts, seed of the rest): in greedy answers of 32 tokens to these, by
#: the model, the best logit is 0.12 or more above the next, and the last 16 tokens are at least six different ones.
_PROMPTS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "deepseek-v3": (
        *((17, 0, 40), (33, 0, 28), (100, 0, 4), (384, 0, 2), (385, 0, 2), (513, 0, 35)),
        *((700, 600, 5), (900, 768, 11), (1200, 800, 1), (1500, 900, 2)),
    ),
    "llama": (
        *((17, 0, 67), (33, 0, 1), (100, 0, 22), (384, 0, 12), (385, 0, 7), (513, 0, 44)),
        *((700, 600, 39), (900, 768, 27), (1200, 800, 32), (1500, 900, 6)),
    ),
    "qwen3-next": (
        *((17, 0, 37), (33, 0, 34), (100, 0, 41), (384, 0, 3), (385, 0, 19), (513, 0, 31)),
        *((700, 600, 57), (900, 768, 46), (1200, 800, 61), (1500, 900, 6)),
    ),
}

#: Names that ``save_vllm_model`` takes.
VLLM_MODELS: tuple[str, ...] = tuple(sorted(_FIELDS))


def save_vllm_model(name: str, directory: Path) -> Path:
    """Write the checkpoint of model ``name`` to ``directory`` and return it; the same bytes each time.

    Raises:
        MisuseError: unknown name.
    """
    import torch

    if name not in _FIELDS:
        raise MisuseError(f"there is no vLLM demo model {name!r}", hint=f"choose one of {', '.join(VLLM_MODELS)}")
    model = _build(name)
    model.to(torch.bfloat16).save_pretrained(directory)
    path = directory / "config.json"
    config = json.loads(path.read_text()) | _ONLY_VLLM.get(name, {})
    path.write_text(json.dumps(config, indent=2))
    return directory


def demo_prompts(name: str) -> list[list[int]]:
    """Prompts of 17 to 1,500 tokens for model ``name``, without near ties; the last four begin alike."""
    return [_stream(0, shared) + _stream(seed, tokens - shared) for tokens, shared, seed in _PROMPTS[name]]


def _stream(seed: int, tokens: int) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=tokens)  # noqa: S311 # nothing here is a secret


def _build(name: str) -> PreTrainedModel:
    """The model in fp32, with weights that depend on its parameters' names only."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, fields = _FIELDS[name]
    config = AutoConfig.for_model(model_type, **{**_COMMON, **fields})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in sorted(model.named_parameters()):
            parameter.copy_(_weights(key, parameter, generator))
    return model.eval()


def _weights(name: str, parameter: Tensor, generator: Generator) -> Tensor:
    """Normal values of the parameter's shape, shifted or scaled where the role of the parameter asks for it."""
    import torch

    noise = torch.randn(parameter.shape, generator=generator)
    if name.endswith("A_log"):
        slow = torch.arange(len(noise)) % 2
        return noise * 0.1 - 3 - 3 * slow
    if name.endswith("conv1d.weight"):
        return noise * 0.5  # four taps only: with less the state of the convolution would hardly show
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return noise * 0.1 + _SHARP - 1  # the module multiplies by 1 + weight
    if "norm" in name:
        return noise * 0.1 + parameter  # ones, or zeros where the module computes 1 + weight
    if name.endswith("embed_tokens.weight"):
        return noise
    return noise * _scale(name, parameter.shape[-1])


def _scale(name: str, inputs: int) -> float:
    """Deviation of a projection's weights: what it makes of normed rows has 0.6, unless it is special."""
    special = (deviation for suffix, deviation in _DEVIATIONS.items() if name.endswith(f"{suffix}.weight"))
    return next(special, 0.6) / float(inputs**0.5)
