"""Reads files of an `Encoder`. Files may be untrusted: no text of them becomes code.

Only names in `_CLASSES` and `_DTYPES` and names of operations become Python objects. Sizes are checked before memory
is allocated. Every invalid content raises ValueError; reading a file may raise other errors.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from paged.tools.recorded_calls.encoder import FORMAT, MAX_HEADER_BYTES, Json, as_stored, each_once

# Storages up to this size in bytes are filled with NaN before a call is repeated, to expose reads of blocks that the
# call should not reach. Larger storages are cache pools, whose untouched pages take no memory.
_MAX_FILLED = 64 << 20
# Limit in bytes for all elements of an expanded tensor, which takes less memory than its elements.
_MAX_REPEATED = 256 << 20
# A file may take the memory divided by this number, and its storages as much. Call and reference need several times as
# much memory.
_MEMORY_SHARE = 4
_MAX_DIMS = 8
_MAX_DEPTH = 4  # nesting of lists and classes
# Classes allowed in arguments and results.
_CLASSES = (
    "AttentionPlan",
    "LoraBatch",
    "LoraWeights",
    "MoeAlignment",
    "Penalties",
    "QuantizedWeight",
    "RecurrentBatch",
    "RecurrentState",
    "Routing",
)
_DTYPES = (
    "bfloat16", "bits4x2", "bits8", "bool", "float16", "float32", "float4_e2m1fn_x2", "float64", "float8_e4m3fn",
    "float8_e5m2", "float8_e8m0fnu", "int16", "int32", "int64", "int8", "uint16", "uint32", "uint64", "uint8",
)  # fmt: skip
_TEXT, _TEXT_OR_NONE = (str,), (str, type(None))
# Fields of a file and their types, besides `PARTS`, which hold the call itself.
_ABOUT: dict[str, tuple[type, ...]] = {
    "format": (int,),
    "operation": _TEXT,
    "number": (int,),
    "error": _TEXT_OR_NONE,
    "versions": (dict,),
    "git": _TEXT_OR_NONE,
    "machine": _TEXT,
    "backend": (dict,),
    "device": _TEXT,
    "date": _TEXT,
}
PARTS = ("arguments", "returned", "written")


def operation_named(name: str) -> Callable[..., Any] | None:
    """Return the public operation of this name, or None."""
    import paged

    module = paged._MODULE_OF.get(name, "")
    if not module.startswith("paged.kernels."):
        return None
    # Take the function from its module, because `paged` may export another object under this name.
    function = getattr(importlib.import_module(module), name)
    if not hasattr(function, "bind"):  # a class or a function that is no operation
        return None
    return function  # type: ignore[no-any-return]


def read_file(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return a file's description, with the parts of the call as JSON, and its tensors."""
    from safetensors import safe_open

    if not path.is_file():
        raise ValueError("no regular file")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        header_size = int.from_bytes(file.read(8), "little")
    if header_size > min(size, MAX_HEADER_BYTES):
        raise ValueError(f"a header of {header_size} bytes, expected at most {MAX_HEADER_BYTES}")
    if size > _memory(torch.device("cpu")) // _MEMORY_SHARE:
        raise ValueError(f"{size} bytes, more than a quarter of this machine's memory")
    with safe_open(path, framework="pt") as opened:  # type: ignore[no-untyped-call]
        about = json.loads((opened.metadata() or {}).get("paged_call", "null"))
        _check_about(about)
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
    return about, tensors


def _check_about(about: Any) -> None:
    if not isinstance(about, dict):
        raise ValueError("its metadata has no paged_call")
    if about.get("format") != FORMAT:
        raise ValueError(f"format {about.get('format')!r}, expected {FORMAT}")
    differing = about.keys() ^ {*_ABOUT, *PARTS}
    if differing:
        raise ValueError(f"{', '.join(sorted(differing))}: expected {', '.join([*_ABOUT, *PARTS])}")
    for name, kinds in _ABOUT.items():
        if type(about[name]) not in kinds:
            raise ValueError(f"{name}: {type(about[name]).__name__}, expected {kinds[0].__name__}")
    for name, version in about["versions"].items():
        if not isinstance(version, str):
            raise ValueError(f"versions: {name} is no text")
    for name in PARTS:
        if not isinstance(about[name], dict) or about[name].keys() != {"value", "storages"}:
            raise ValueError(f"{name}: expected value and storages")


def checked_extents(storages: Mapping[str, Json], device: torch.device) -> dict[str, list[tuple[int, int]]]:
    """Return first and last byte of each storage by part, after checking that all parts fit the device's memory."""
    extents: dict[str, list[tuple[int, int]]] = {}
    num_bytes = 0
    for part, part_storages in storages.items():
        if not isinstance(part_storages, list):
            raise ValueError("storages: expected a list")
        extents[part] = []
        for extent in part_storages:
            first, last = _sizes("storages", extent, 2)
            if first > last:
                raise ValueError(f"a storage from byte {first} to {last}")
            extents[part].append((first, last))
            num_bytes += last - first
    if num_bytes > _memory(device) // _MEMORY_SHARE:
        raise ValueError(f"storages of {num_bytes} bytes, more than a quarter of the memory of {device}")
    return extents


class Decoder:
    """Decodes the values of one part. Tensors that shared a storage share it again, with NaN between them.

    Args:
        tensors: tensors of the file.
        extents: first and last byte of each storage, from `checked_extents`.
        device: device of the decoded tensors.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], extents: list[tuple[int, int]], device: torch.device
    ) -> None:
        self._tensors, self._device = tensors, device
        self._storages: list[tuple[int, torch.Tensor]] = []
        num_bytes = sum(last - first for first, last in extents)
        for first, last in extents:
            content = torch.empty(last - first, dtype=torch.uint8, device=device)
            if num_bytes <= _MAX_FILLED:
                content.fill_(255)
            self._storages.append((first, content))

    def arguments(self, value: Json, signature: inspect.Signature) -> dict[str, Any]:
        """Return arguments by name; every name must be in the signature."""
        if not isinstance(value, dict) or value.keys() != {"dict"} or not isinstance(value["dict"], dict):
            raise ValueError("arguments: expected them by name")
        named = {}
        for name, item in value["dict"].items():
            if name not in signature.parameters:
                raise ValueError(f"{name}: no argument, expected {', '.join(signature.parameters)}")
            named[name] = self.value(item, str(signature.parameters[name].annotation))
        return named

    def value(self, value: Json, annotation: str, depth: int = 0) -> Any:
        """Decode a number, flag, None, tensor, list or tuple; a text or a class only if the annotation allows it."""
        if value is None or isinstance(value, bool | float):
            return value
        words = re.findall(r"\w+", annotation)
        if isinstance(value, str):
            if "str" not in words:
                raise ValueError(f"a text, expected {annotation}")
            return value
        if isinstance(value, int):
            if abs(value) >= 2**63:
                raise ValueError("a whole number of more than 64 bits")
            return value
        if not isinstance(value, dict) or depth > _MAX_DEPTH:
            raise ValueError(f"a {type(value).__name__} where none can be, expected {annotation}")
        if "unknown" in value:
            raise ValueError(f"an argument that was not recorded: {value['unknown']}")
        if "tensor" in value:
            return self._tensor(value)
        if value.keys() == {"object", "fields"}:
            return self._object(value["object"], value["fields"], words, depth)
        for kind in (tuple, list):
            if value.keys() == {kind.__name__} and isinstance(value[kind.__name__], list):
                return kind(self.value(item, annotation, depth + 1) for item in value[kind.__name__])
        raise ValueError(f"{', '.join(map(str, value))}: expected {annotation}")

    def _object(self, path: Json, fields: Json, words: list[str], depth: int) -> Any:
        """Return an object of the class with this path, if the annotation has the class's name."""
        import paged

        for name in _CLASSES:
            if name in words and path == f"{paged._MODULE_OF[name]}:{name}":
                break
        else:
            raise ValueError(f"an object of {path}, expected {' or '.join(words)}")
        constructor: Callable[..., Any] = getattr(paged, name)
        parameters = inspect.signature(constructor).parameters
        if not isinstance(fields, dict) or not fields.keys() <= parameters.keys():
            raise ValueError(f"{name}: expected {', '.join(parameters)}")
        values = {}
        for field, item in fields.items():
            values[field] = self.value(item, str(parameters[field].annotation), depth + 1)
        try:
            return constructor(**values)
        except Exception as error:  # validation in constructors raises various errors
            raise ValueError(f"{name}: {error}") from error

    def _tensor(self, about: dict[str, Json]) -> torch.Tensor:
        """Return a tensor as a view of its storage, filled with the values of the file."""
        expected = {"tensor", "shape", "stride", "dtype", "storage", "offset"}
        if about.keys() - {"blocks"} != expected:
            raise ValueError(f"a tensor with {', '.join(about)}, expected {', '.join(sorted(expected))}")
        shape = _sizes("shape", about["shape"])
        stride = _sizes("stride", about["stride"], len(shape))
        storage, offset = _sizes("storage, offset", [about["storage"], about["offset"]])
        if len(shape) > _MAX_DIMS or about["dtype"] not in _DTYPES or storage >= len(self._storages):
            raise ValueError(f"a tensor of {len(shape)} dimensions of {about['dtype']} in storage {storage}")
        dtype: torch.dtype = getattr(torch, about["dtype"])
        first, content = self._storages[storage]
        begin, remainder = divmod(offset - first, dtype.itemsize)
        num_elements = math.prod(shape)
        reach = 0
        if num_elements:
            reach = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        if remainder or begin < 0 or (begin + reach) * dtype.itemsize > len(content):
            raise ValueError(f"a tensor of shape {shape}, strides {stride} at byte {offset}: outside of its storage")
        # Empty dimensions count as one, because a loop over the other dimensions takes as long.
        if math.prod(max(size, 1) for size in shape) * dtype.itemsize > max(len(content), _MAX_REPEATED):
            raise ValueError(f"a tensor of shape {shape} in a storage of {len(content)} bytes")
        flat = content[: len(content) // dtype.itemsize * dtype.itemsize].view(dtype)
        tensor: torch.Tensor = flat.as_strided(shape, stride, begin)
        self._fill(tensor, about)
        return tensor

    def _fill(self, tensor: torch.Tensor, about: dict[str, Json]) -> None:
        """Write the values of the file to a tensor, or to the blocks that the file has."""
        key = about["tensor"]
        if not isinstance(key, str) or key not in self._tensors:
            raise ValueError(f"tensor {key!r}: the file has none of this name")
        values, target = self._tensors[key], as_stored(each_once(tensor))
        shape = list(target.shape)
        if "blocks" in about:
            blocks = _sizes("blocks", about["blocks"])
            shape[:1] = [len(blocks)]
            if not target.dim() or sorted(set(blocks)) != blocks or (blocks and blocks[-1] >= len(target)):
                raise ValueError(f"blocks: expected some of {len(tensor)}, in order, each once")
        if list(values.shape) != shape or values.dtype != target.dtype:
            raise ValueError(
                f"tensor {key}: {values.dtype} of shape {list(values.shape)}, expected {target.dtype} of {shape}"
            )
        values = values.to(self._device)
        if "blocks" not in about:
            target.copy_(values)
            return
        for index, block in enumerate(blocks):  # one by one, because float8 has no index_copy_
            target[block].copy_(values[index])


def _sizes(name: str, values: Json, count: int | None = None) -> list[int]:
    """Return a list of integers from 0 to 2^62; raise ValueError for anything else."""
    if not isinstance(values, list) or count not in (None, len(values)):
        raise ValueError(f"{name}: expected a list of {count or 'some'} whole numbers")
    for value in values:
        if type(value) is not int or not 0 <= value <= 2**62:
            raise ValueError(f"{name}: expected whole numbers from 0 to 2^62")
    return values


def _memory(device: torch.device) -> int:
    """Return the size of a device's memory in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
