"""Encodes a call as JSON and tensors, for the file of a recorded call.

Tensors keep their strides, dtypes and shared storages. From caches, only the requested blocks are kept.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from paged.kernels.attention.plan import AttentionPlan

Json = Any
FORMAT = 2  # version of the file format; other versions are refused
MAX_HEADER_BYTES = 8 << 20
"""Limit for a file's header (the JSON) in bytes. Python needs up to 30 times as much memory to read it."""
CACHES = ("k_cache", "v_cache", "kv_cache", "key_cache", "caches")
"""Arguments with cache blocks along the first dimension."""
_ROW_SCALES = ("k_scale", "v_scale")
# Dtypes that PyTorch copies and views, but does not index, and that safetensors may not know: files have their bytes.
_BYTES = (torch.bits8, torch.bits4x2, torch.float4_e2m1fn_x2)


class Encoder:
    """Turns values into JSON and copies of their tensors. block_ids: blocks of caches to keep; None keeps all.

    Attributes:
        tensors: the copies, by their names in the JSON.
        device: device of the tensors.
    """

    def __init__(self, block_ids: torch.Tensor | None) -> None:
        self._block_ids = block_ids
        self._extents: dict[int, tuple[int, int]] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.device = "cpu"

    def part(self, value: Any) -> Json:
        """Return the encoded value, and the first and last byte that it uses in each storage."""
        self._extents = {}
        encoded = self._encode(value)
        return {"value": encoded, "storages": list(self._extents.values())}

    def write(self, path: Path, about: dict[str, Json]) -> None:
        """Write a file with the tensors and a description that contains the parts.

        Raises:
            ValueError: the description exceeds the reader's limit.
        """
        from safetensors.torch import save_file

        text = json.dumps(about)
        if len(text) > MAX_HEADER_BYTES // 2:
            raise ValueError(f"a description of {len(text)} bytes, expected at most {MAX_HEADER_BYTES // 2}")
        save_file(self.tensors, path, {"paged_call": text})

    def _encode(self, value: Any, name: str = "") -> Json:
        """name: name of the argument that the value belongs to."""
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value, name)
        names = _field_names(value)
        if names is not None:
            fields = {field: self._encode(getattr(value, field), field) for field in names}
            return {"object": f"{type(value).__module__}:{type(value).__qualname__}", "fields": fields}
        if isinstance(value, dict):
            return {"dict": {key: self._encode(item, key) for key, item in value.items()}}
        if isinstance(value, tuple | list):
            return {type(value).__name__: [self._encode(item, name) for item in value]}
        if hasattr(value, "item"):  # a NumPy number
            return value.item()
        return {"unknown": repr(value)[:200]}

    def _tensor(self, tensor: torch.Tensor, name: str) -> Json:
        """Encode a tensor: the kept blocks of a cache or of its scales, otherwise each element once."""
        key = str(len(self.tensors))
        if tensor.device.type != "cpu":
            self.device = f"{tensor.device}, {torch.cuda.get_device_name(tensor.device)}"
        about = {
            "tensor": key,
            "shape": list(tensor.shape),
            "stride": list(tensor.stride()),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "storage": self._take(tensor),
            "offset": tensor.storage_offset() * tensor.element_size(),
        }
        values = as_stored(each_once(tensor.detach()))
        if self._block_ids is not None and is_in_blocks(name, tensor):
            values = values[self._block_ids.to(values.device)]
            about["blocks"] = self._block_ids.tolist()
        self.tensors[key] = values.to("cpu", copy=True).contiguous()
        return about

    def _take(self, tensor: torch.Tensor) -> int:
        """Extend the used range of the tensor's storage, aligned down to 16 bytes; return the storage's number."""
        first = last = int(tensor.storage_offset()) * tensor.element_size()
        if tensor.numel():
            reach = 1
            for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
                reach += (size - 1) * int(stride)
            last += reach * tensor.element_size()
        address = tensor.untyped_storage().data_ptr()
        before, after = self._extents.get(address, (first, last))
        self._extents[address] = min(first // 16 * 16, before), max(last, after)
        return list(self._extents).index(address)


def is_in_blocks(name: str, tensor: torch.Tensor) -> bool:
    """Return whether an argument or field of this name has cache blocks along its first dimension."""
    return name in CACHES or (name in _ROW_SCALES and tensor.dim() == 3)


def reached_blocks(arguments: dict[str, Any]) -> torch.Tensor | None:
    """Return the cache blocks that a call reads or writes, int64 on the CPU; None if no argument names blocks."""
    reached = []
    cache = None
    for name in CACHES:
        if name in arguments:
            cache = arguments[name]
            break
    if isinstance(cache, list | tuple) and cache:
        cache = cache[0]
    if not isinstance(cache, torch.Tensor) or cache.dim() < 2:
        return None
    num_blocks, block_size = cache.shape[:2]
    table, seq_lens = arguments.get("block_table"), arguments.get("seq_lens")
    slots = arguments.get("slot_mapping")
    if isinstance(table, torch.Tensor) and isinstance(seq_lens, torch.Tensor) and table.dim() == 2 and block_size:
        columns = torch.arange(table.shape[1])
        is_used = columns[None] * block_size < seq_lens.cpu()[: len(table), None]
        reached.append(table.cpu()[: len(is_used)][is_used])
    if isinstance(slots, torch.Tensor) and block_size:
        reached.append(slots.cpu().flatten() // block_size)
    if "block_pairs" in arguments:
        reached.append(torch.as_tensor(arguments["block_pairs"]).cpu().flatten())
    if not reached:
        return None
    ids = torch.cat([part.long() for part in reached]).unique()
    reached_ids: torch.Tensor = ids[(ids >= 0) & (ids < num_blocks)]
    return reached_ids


def as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the dtype that files have."""
    if tensor.dtype in _BYTES:
        return tensor.view(torch.uint8)
    return tensor


def each_once(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view in which expanded dimensions have one element."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _field_names(value: Any) -> Sequence[str] | None:
    """Return the constructor arguments of an object; None for values without them."""
    if isinstance(value, AttentionPlan):
        return "cu_seqlens_q", "seq_lens", "max_seqlen_q", "max_seqlen_k"
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value) if field.init]
    if isinstance(value, tuple):
        return getattr(value, "_fields", None)
    return None


def tensors_in(name: str, value: Any) -> dict[str, torch.Tensor]:
    """Return the recordable tensors of a value by name, such as "state.conv" (field) or "caches[0]" (item)."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    parts: dict[str, Any] = {}
    names = _field_names(value)
    if names is not None:
        for field in names:
            parts[f"{name}.{field}"] = getattr(value, field)
    elif isinstance(value, dict):
        for key, item in value.items():
            parts[f"{name}.{key}".lstrip(".")] = item
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            parts[f"{name}[{index}]"] = item
    tensors: dict[str, torch.Tensor] = {}
    for part_name, part in parts.items():
        tensors |= tensors_in(part_name, part)
    return tensors
