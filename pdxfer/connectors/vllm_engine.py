"""Engine: everything that the connector asks vLLM's own modules: config, groups, processes, platform, fences.

In come vLLM's objects; out come the plain values that ``vllm_tensors.py`` and ``vllm_worker.py`` work with. What
vLLM may rename between releases is named here and in ``vllm.py`` only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pdxfer.connectors.vllm_tensors import CacheGroup, CacheView, RankTensors, read_layout
from pdxfer.connectors.vllm_worker import Ranks
from pdxfer.errors import MisuseError
from pdxfer.models import spec_from_config
from pdxfer.spec import CacheSpec

if TYPE_CHECKING:
    import torch

    from pdxfer.connectors.vllm_settings import Settings

__all__ = ["check_parallel", "ended_well", "fence", "ranks", "read_caches", "spec_of"]

_KINDS = {"FullAttentionSpec": "attention", "MLAAttentionSpec": "latent", "MambaSpec": "state"}


def check_parallel(vllm_config: Any) -> None:
    """Refuse ways of cutting the model that the layout reader doesn't describe yet; raises MisuseError by name."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size", "pipeline_parallel_size"):
        if (size := getattr(parallel, name, 1)) > 1:
            raise MisuseError(f"{name} {size} is not supported by PdxferConnector", hint="tensor parallelism is")
    if cache.cache_dtype not in ("auto", "bfloat16", "float16", "half", "float32", "float"):
        raise MisuseError(
            f"kv_cache_dtype {cache.cache_dtype!r} is not supported by PdxferConnector: its scales lie elsewhere",
            hint="use --kv-cache-dtype auto",
        )


def spec_of(vllm_config: Any) -> CacheSpec:
    """The caches of the model that vLLM runs, from its HF config."""
    return spec_from_config(vllm_config.model_config.hf_config.to_dict())


def ended_well(request: Any) -> bool:
    """Whether a request came to its end by itself."""
    from vllm.v1.request import RequestStatus

    return request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


def ranks() -> Ranks:
    """This process among the worker's ranks. Called in a worker, once its process groups are there."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    return Ranks(rank=group.rank_in_group, size=group.world_size, gather=lambda data: _gather(group, data))


def _gather(group: Any, data: bytes) -> list[bytes]:
    """All ranks' bytes, over the workers' own CPU process group; tensors, not objects, so nothing is unpickled."""
    import torch
    from torch import distributed

    if group.world_size == 1:
        return [data]
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(group.world_size)]
    distributed.all_gather(sizes, torch.tensor([len(data)]), group=group.cpu_group)
    room = max(int(size) for size in sizes)
    mine = torch.frombuffer(bytearray(data.ljust(room, b"\0")), dtype=torch.uint8)
    everyone = [torch.empty(room, dtype=torch.uint8) for _ in sizes]
    distributed.all_gather(everyone, mine, group=group.cpu_group)
    return [bytes(t[: int(n)].tolist()) for t, n in zip(everyone, sizes, strict=True)]


def fence() -> Callable[[], None] | None:
    """Waits until the device has done all that is launched by now; None where launching is doing."""
    import torch

    if not torch.cuda.is_available():
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event.synchronize


def read_caches(
    vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, Any], spec: CacheSpec, settings: Settings
) -> tuple[RankTensors, dict[int, torch.Tensor]]:
    """This rank's layout from the tensors that vLLM registers, and their memory as bytes by storage."""
    from vllm.distributed.parallel_state import get_tp_group
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout

    layers = vllm_config.compilation_config.static_forward_context
    groups = [_group(index, group, vllm_config, layers) for index, group in enumerate(kv_cache_config.kv_cache_groups)]
    tp = get_tp_group()
    tensors = read_layout(
        spec,
        groups,
        {name: _views(tensor) for name, tensor in kv_caches.items()},
        num_blocks=kv_cache_config.num_blocks,
        rank=tp.rank_in_group,
        tp_rank=tp.rank_in_group,
        tp_size=tp.world_size,
        conv_order=get_conv_state_layout(),
        accepts=settings.accept_state_dtypes,
    )
    flat = {t.untyped_storage().data_ptr(): t for name in kv_caches for t in _tensors(kv_caches[name])}
    return tensors, {pointer: _bytes_of(tensor) for pointer, tensor in flat.items()}


def _tensors(cache: Any) -> Sequence[Any]:
    return cache if isinstance(cache, (list, tuple)) else [cache]


def _views(cache: Any) -> list[CacheView]:
    return [_view(tensor) for tensor in _tensors(cache)]


def _view(tensor: torch.Tensor) -> CacheView:
    storage = tensor.untyped_storage()
    return CacheView(
        shape=tuple(tensor.shape),
        strides=tensor.stride(),
        dtype=str(tensor.dtype).removeprefix("torch."),
        storage=storage.data_ptr(),
        storage_bytes=storage.nbytes(),
        offset=tensor.data_ptr() - storage.data_ptr(),
    )


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _group(index: int, group: Any, vllm_config: Any, layers: Mapping[str, Any]) -> CacheGroup:
    spec = group.kv_cache_spec
    kind = _KINDS.get(type(spec).__name__, type(spec).__name__)
    facts: dict[str, Any] = {}
    if kind in ("attention", "latent"):
        facts = {
            "kv_heads": spec.num_kv_heads,
            "head_size": spec.head_size,
            "head_size_v": spec.head_size_v,
            "dtype": str(spec.dtype).removeprefix("torch."),
            "interior": _interior(layers, group.layer_names) if kind == "attention" else "row",
        }
    elif kind == "state":
        facts = {
            "state_shapes": tuple(tuple(shape) for shape in spec.shapes),
            "state_dtypes": tuple(str(dtype).removeprefix("torch.") for dtype in spec.dtypes),
            # On the CPU the kernels read S as [heads, K, V], whatever the view says; on GPUs it is [heads, V, K].
            "state_order": "KV" if vllm_config.device_config.device_type == "cpu" else "VK",
            "replicated": bool(getattr(spec, "tp_replicated", False)),
            "mode": spec.mamba_cache_mode,
        }
    return CacheGroup(
        index=index,
        layers=tuple(group.layer_names),
        kind=kind,
        block_tokens=spec.block_size,
        draft=bool(getattr(group, "is_eagle_group", False)),
        **facts,
    )


def _interior(layers: Mapping[str, Any], names: Sequence[str]) -> str:
    """How the attention backend packs K and V inside a page; see ``CacheGroup``."""
    found = {getattr(layers.get(name), "isa", "") for name in names}
    if found <= {""}:
        return "row"
    if found <= {"vec", "vec16"}:
        return "cpu"
    raise MisuseError(
        f"{names[0]}: CPU attention packs keys for {', '.join(sorted(found))}; that order is not supported",
        hint="only the vec and vec16 kernels' order is known; GPUs are not concerned",
    )
