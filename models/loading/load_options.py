"""Options of model loading, checked by name before any file is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paged.errors import InvalidInputError
from paged.folder_path import as_folder
from paged.kernels.core.device import default_device
from paged.kernels.core.dtypes import KV_KINDS
from paged.kernels.core.errors import as_bool, as_float, as_int, shown
from paged.token_ids import as_token_ids

# Limit of block ids and positions, which are 32-bit integers on the device.
_LARGEST = 2**31 - 1
# Limit of the number of step sizes with graphs, because the graphs of each size take memory.
_MAX_GRAPHS = 1024
_MAX_DRAFTS = 63

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
KV_ROTATIONS = ("hadamard", "hadamard_keys")
# Name -> KV cache dtype, for dtypes other than the weights'.
KV_CACHE_DTYPES = {name: dtype for dtype, kind in KV_KINDS.items() for name in kind.spellings}


def as_device(name: str, value: object) -> torch.device:
    """Return the device "cpu", "cuda" or "cuda:1", given as text or torch.device. None takes CUDA if it is available.

    Raises:
        InvalidInputError: the value is no such device, or the device does not exist.
    """
    if value is None:
        return default_device()
    try:
        device = torch.device(value) if isinstance(value, (str, torch.device)) else None
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise InvalidInputError(f"{name}: {shown(value)}, expected 'cpu', 'cuda', 'cuda:1' and so on, or None")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidInputError(f"{name}: {shown(value)}, but there are {torch.cuda.device_count()} CUDA devices")
    return device


def as_dtype(name: str, value: object, more_dtypes: Mapping[str, torch.dtype] | None = None) -> torch.dtype | None:
    """Return float32, float16, bfloat16 or one of `more_dtypes`, from a dtype or its name; None for None and "auto".

    Raises:
        InvalidInputError: the value is something else.
    """
    if value is None or (isinstance(value, str) and value == "auto"):
        return None
    known = {**DTYPES, **(more_dtypes or {})}
    dtype = value
    if isinstance(value, str):
        dtype = known.get(value.removeprefix("torch."))
    if not isinstance(dtype, torch.dtype) or dtype not in known.values():
        raise InvalidInputError(f"{name}: {shown(value)}, expected {', '.join(known)}, 'auto' or None")
    return dtype


CacheDtype = torch.dtype | tuple[torch.dtype | None, torch.dtype | None] | None
"""Dtype of a KV cache, or those of its keys and values; None for the dtype of the weights."""


def as_cache_dtype(name: str, value: object) -> CacheDtype:
    """Return the dtype of a cache, given as in `LoadOptions`.

    Raises:
        InvalidInputError: the value is something else.
    """
    parts = value
    if isinstance(value, str) and "," in value:
        parts = tuple(part.strip() for part in value.split(","))
    if not isinstance(parts, tuple):
        return as_dtype(name, value, KV_CACHE_DTYPES)
    if len(parts) != 2:
        raise InvalidInputError(f"{name}: {shown(value)}, expected one dtype, or one of keys and one of values")
    return as_dtype(name, parts[0], KV_CACHE_DTYPES), as_dtype(name, parts[1], KV_CACHE_DTYPES)


def keys_and_values(kv_cache_dtype: CacheDtype, dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of keys and values in the cache of a model in `dtype`."""
    if not isinstance(kv_cache_dtype, tuple):
        kv_cache_dtype = kv_cache_dtype, kv_cache_dtype
    k_dtype, v_dtype = kv_cache_dtype
    return k_dtype or dtype, v_dtype or dtype


def as_layers(name: str, value: object) -> tuple[int, ...]:
    """Return layer indices, given as integers or as text such as "0,1,27".

    Raises:
        InvalidInputError: the value is something else.
    """
    if not isinstance(value, str):
        return tuple(as_token_ids(name, value))
    if not value:
        return ()
    if not all(part.strip().isdecimal() for part in value.split(",")):
        raise InvalidInputError(f"{name}: {shown(value)}, expected layers such as '0,1,27'")
    return tuple(int(part) for part in value.split(","))


def as_graphs(name: str, value: object) -> bool | tuple[int, ...] | None:
    """Return numbers of tokens for CUDA graphs, True for the default, False for no graphs, or None.

    Raises:
        InvalidInputError: the value is something else.
    """
    if value is None or isinstance(value, bool):
        return value
    return tuple(_as_size(name, size) for size in as_token_ids(name, value, max_length=_MAX_GRAPHS))


def as_rotation(name: str, value: object) -> str | None:
    """Return "hadamard", "hadamard_keys" or None for None and "none".

    Raises:
        InvalidInputError: the value is something else.
    """
    if value is None or value == "none":
        return None
    if value not in KV_ROTATIONS:
        raise InvalidInputError(f"{name}: {shown(value)}, expected {', '.join(KV_ROTATIONS)}, 'none' or None")
    return str(value)


_as_size = partial(as_int, low=1, high=_LARGEST)


def as_state_dtype(name: str, value: object) -> torch.dtype:
    """Return float32, bfloat16 or int8, from a dtype or its name; float32 for None and "auto".

    Raises:
        InvalidInputError: the value is something else.
    """
    if value in ("int8", torch.int8):
        return torch.int8
    expected = f"{name}: {shown(value)}, expected float32, bfloat16, int8, 'auto' or None"
    try:
        dtype = as_dtype(name, value) or torch.float32
    except InvalidInputError as error:
        raise InvalidInputError(expected) from error
    if dtype == torch.float16:
        raise InvalidInputError(expected)
    return dtype


def _as_quantization(name: str, value: object) -> str | None:
    if value is None:
        return None
    if value not in ("int4", "int8"):
        raise InvalidInputError(f"{name}: {shown(value)}, expected 'int4', 'int8' or None")
    return str(value)


def _as_implementation(name: str, value: object) -> str:
    if value not in ("auto", "native", "transformers"):
        raise InvalidInputError(f"{name}: {shown(value)}, expected 'auto', 'native' or 'transformers'")
    return str(value)


def _as_optional_size(name: str, value: object, low: int = 1, high: int | None = _LARGEST) -> int | None:
    if value is None:
        return None
    return as_int(name, value, low, high)


def _as_optional_folder(name: str, value: Any) -> Path | None:
    if value is None:
        return None
    return as_folder(name, value)


@dataclass(frozen=True)
class LoadOptions:
    """Options of `load_model` and `LlmExecutor.from_pretrained`.

    Attributes:
        device: "cpu", "cuda" or "cuda:1", as text or torch.device; None for CUDA if there is one, else the CPU.
        dtype: float32, float16 or bfloat16 for weights and activations, as torch.dtype or name; None or "auto" for the
            checkpoint's dtype.
        num_blocks: blocks of the KV cache. None takes 90 % of the GPU's memory left after the weights. On a CPU, None
            takes enough for four sequences of full length, at most 1 GiB.
        block_size: tokens in a block. None takes 64 on sm_90, sm_100 and sm_103, whose copy engine fetches such a block
            in one box, and 16 elsewhere.
        max_seq_len: longest sequence in tokens; None for the model's own limit.
        num_swap_blocks: blocks of host memory for swapped sequences. If layers have several block tables, this and
            num_blocks count blocks of each table.
        host_cache_bytes: host memory for prefixes that the KV cache evicts, see `PagedKvCacheConfig`; 0 for none. Each
            rank takes this much.
        cache_folder: folder that keeps evicted prefixes for other processes and restarts; None for no folder. Each rank
            has its own files there. Loading then reads the weights twice, to identify them by every byte.
        cache_folder_bytes: largest size of all files in cache_folder; None for no limit.
        enable_prefix_cache: whether prompts share the K/V of equal prefixes.
        max_pinned_fraction: share of the KV cache that pinned prefixes may keep, below 1, see `PagedKvCacheConfig`.
        kv_cache_dtype: None or "auto" for the dtype of the weights. Otherwise a dtype of 8 or 4 bits, as torch.dtype or
            a name in KV_CACHE_DTYPES: an 8-bit float with the checkpoint's scales (1 if it has none), int8 with a scale
            for each head and token (fp8_per_token_head likewise), int4 with a scale for 32 numbers of a head, or nvfp4
            with one for 16. Latents take float8_e4m3fn, those of 512 + 64 and rows of DeepSeek-V4 and V4.1 also nvfp4.
            "int8,int4" is int8 for keys and int4 for values.
        kv_cache_keep_layers: indices of layers whose K/V keep the dtype of the weights, such as (0, 1) or "0,1".
        kv_cache_rotation: rotation of heads before they are cached, with which int4 and int8 lose less if some channels
            are large: "hadamard" for keys and values, "hadamard_keys" for keys alone, None for none. Values are rotated
            by the weights around attention, so these must be plain.
        max_loras: number of adapters that can be loaded at once.
        max_lora_rank: largest rank of an adapter. The first adapter of a layer allocates memory for max_loras of this
            rank.
        cuda_graphs: numbers of tokens up to which steps are padded and replayed from CUDA graphs, see `graph_shapes`.
            True for 1 to 256 in 23 sizes, False for no graphs. `warmup` of the executor or `prepare` of the model
            captures the graphs. None is True on a GPU; on a CPU with numba kernels it records decode steps, see
            `RECORDED_SIZES`. Steps that cannot be recorded run without a recording.
        draft: "mtp" to draft with the multi-token head or the drafter of blocks in the checkpoint, or the folder of an
            EAGLE-3 head; see `HeadProposer`. None for no draft head.
        quantization: "int8" or "int4" to round the projections of a plain checkpoint while loading, on a CPU without
            Triton; None to keep the weights. Embeddings, head and routers stay plain. int8 also rounds the activations
            of each token; int4 has groups of 128 columns, or of 64 or 32.
        num_state_slots: states of recurrent layers that the cache has memory for: two for each running sequence, and
            one for each snapshot. None takes up to half of the cache's memory on a GPU, and 32 on a CPU. With swap
            blocks, the host has as many states, but no more than swap blocks. For a model with compressed entries:
            slots for rows of open pools; None takes up to a quarter of the memory on a GPU.
        state_dtype: dtype of the states of recurrent layers: float32, bfloat16 for half the memory, or int8 for about a
            quarter; None or "auto" for float32. Without such layers, other dtypes are refused. Rows of convolutions
            have the dtype of the weights, rings are float32.
        snapshot_interval: also keep the state of prompts every so many tokens, a multiple of block_size. None keeps
            states only at the ends of prompts and where prompts diverge.
        max_drafts: most drafts that a step verifies for a sequence with recurrent layers.
        model_impl: "native" for a family of this package, "transformers" for transformers' own module over the paged
            cache, "auto" for the family if there is one.
        trust_remote_code: whether transformers' module may be the checkpoint's own Python code, which then runs with
            all rights of this process.

    Raises:
        InvalidInputError: a value has another type or is out of range, or the device does not exist.
    """

    device: torch.device = field(default_factory=partial(as_device, "device", None))
    dtype: torch.dtype | None = None
    num_blocks: int | None = None
    block_size: int | None = None
    max_seq_len: int | None = None
    num_swap_blocks: int = 0
    host_cache_bytes: int = 0
    cache_folder: Path | None = None
    cache_folder_bytes: int | None = None
    enable_prefix_cache: bool = True
    max_pinned_fraction: float = 0.0
    kv_cache_dtype: CacheDtype = None
    kv_cache_keep_layers: tuple[int, ...] = ()
    kv_cache_rotation: str | None = None
    max_loras: int = 8
    max_lora_rank: int = 64
    cuda_graphs: bool | tuple[int, ...] | None = None
    draft: Path | None = None
    quantization: str | None = None
    num_state_slots: int | None = None
    state_dtype: torch.dtype = torch.float32
    snapshot_interval: int | None = None
    max_drafts: int = 7
    model_impl: str = "auto"
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        for name, convert in _CONVERSIONS.items():
            object.__setattr__(self, name, convert(name, getattr(self, name)))


_CONVERSIONS: dict[str, Callable[[str, Any], object]] = {
    "device": as_device,
    "dtype": as_dtype,
    "num_blocks": _as_optional_size,
    "block_size": _as_optional_size,
    "max_seq_len": partial(_as_optional_size, low=-_LARGEST),  # the load checks the model's limit
    "num_swap_blocks": partial(as_int, high=_LARGEST),
    "host_cache_bytes": as_int,
    "cache_folder": _as_optional_folder,
    "cache_folder_bytes": partial(_as_optional_size, low=0, high=None),
    "enable_prefix_cache": as_bool,
    "max_pinned_fraction": partial(as_float, low=0.0, high=1.0),
    "kv_cache_dtype": as_cache_dtype,
    "kv_cache_keep_layers": as_layers,
    "kv_cache_rotation": as_rotation,
    "max_loras": _as_size,
    "max_lora_rank": _as_size,
    "cuda_graphs": as_graphs,
    "draft": _as_optional_folder,
    "quantization": _as_quantization,
    "num_state_slots": partial(_as_optional_size, low=2),
    "state_dtype": as_state_dtype,
    "snapshot_interval": _as_optional_size,
    "max_drafts": partial(as_int, low=0, high=_MAX_DRAFTS),
    "model_impl": _as_implementation,
    "trust_remote_code": as_bool,
}
