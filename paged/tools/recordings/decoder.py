"""Reads what an `Encoder` has written. The file may come from a stranger, and none of its text becomes code.

Only the names in `_CLASSES` and `_DTYPES`, and names of operations, become Python objects. Sizes are checked before
memory is taken. Whatever is wrong is a ValueError, except for what reading a file may raise.
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

from paged.tools.recordings.encoder import FORMAT, MAX_HEADER_BYTES, Json, each_once

# Arguments of up to this many bytes lie in storages filled with NaN before a call is made again, so that a read of a
# block that it does not reach shows. Larger ones are pools, whose untouched pages take no memory.
_MAX_FILLED = 64 << 20
# Most bytes that the elements of a tensor stand for which takes less, as an expanded one does.
_MAX_REPEATED = 256 << 20
# A file, and the storages that it declares, take at most this part of the memory: the call and the reference need as
# much again, several times.
_MEMORY_SHARE = 4
_MAX_DIMS = 8
_MAX_DEPTH = 4  # of lists in lists, and classes in them
# Classes that arguments and results may be of.
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
    "bfloat16", "bool", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu",
    "int16", "int32", "int64", "int8", "uint16", "uint32", "uint64", "uint8",
)  # fmt: skip
_TEXT, _TEXT_OR_NONE = (str,), (str, type(None))
# What a file says about a call besides its parts, and of which types.
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
    """Return the public operation of this name; None if there is none."""
    import paged

    module = paged._MODULE_OF.get(name, "")
    if not module.startswith("paged.kernels."):
        return None
    function = getattr(importlib.import_module(module), name)  # whatever stands in its place in `paged`
    if not hasattr(function, "bind"):  # a class, or a function that is no operation
        return None
    return function  # type: ignore[no-any-return]


def read_file(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return what a file says about its call, with the parts as JSON, and its tensors."""
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
    """Return the first and last byte of each storage by part; all parts together have to fit the device's memory."""
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
    """Makes the values of one part again: tensors of one storage share one, NaN between them.

    Args:
        tensors: of the file.
        extents: first and last byte of each storage, from `checked_extents`.
        device: of the made tensors.
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
        """Return arguments by name, all of them a signature's."""
        if not isinstance(value, dict) or value.keys() != {"dict"} or not isinstance(value["dict"], dict):
            raise ValueError("arguments: expected them by name")
        named = {}
        for name, item in value["dict"].items():
            if name not in signature.parameters:
                raise ValueError(f"{name}: no argument, expected {', '.join(signature.parameters)}")
            named[name] = self.value(item, str(signature.parameters[name].annotation))
        return named

    def value(self, value: Json, annotation: str, depth: int = 0) -> Any:
        """Return a number, flag, None, tensor, or a list or tuple; a text or a class if the annotation has it."""
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
        """Return an object of the class that has this path, if the annotation has its name."""
        import paged

        for name in _CLASSES:
            if name in words and path == f"{paged._MODULE_OF[name]}:{name}":
                break
        else:
            raise ValueError(f"an object of {path}, expected {' or '.join(words)}")
        made: Callable[..., Any] = getattr(paged, name)
        parameters = inspect.signature(made).parameters
        if not isinstance(fields, dict) or not fields.keys() <= parameters.keys():
            raise ValueError(f"{name}: expected {', '.join(parameters)}")
        values = {}
        for field, item in fields.items():
            values[field] = self.value(item, str(parameters[field].annotation), depth + 1)
        try:
            return made(**values)
        except Exception as error:  # checks of values raise several kinds
            raise ValueError(f"{name}: {error}") from error

    def _tensor(self, about: dict[str, Json]) -> torch.Tensor:
        """Return a view of its storage that holds the values of the file."""
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
        begin, rest = divmod(offset - first, dtype.itemsize)
        num_elements = math.prod(shape)
        reach = 0
        if num_elements:
            reach = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        if rest or begin < 0 or (begin + reach) * dtype.itemsize > len(content):
            raise ValueError(f"a tensor of shape {shape}, strides {stride} at byte {offset}: outside of its storage")
        # Empty dimensions count as one: a loop over the others takes as long.
        if math.prod(max(size, 1) for size in shape) * dtype.itemsize > max(len(content), _MAX_REPEATED):
            raise ValueError(f"a tensor of shape {shape} in a storage of {len(content)} bytes")
        flat = content[: len(content) // dtype.itemsize * dtype.itemsize].view(dtype)
        tensor: torch.Tensor = flat.as_strided(shape, stride, begin)
        self._fill(tensor, about)
        return tensor

    def _fill(self, tensor: torch.Tensor, about: dict[str, Json]) -> None:
        """Write the values of the file to a tensor, or to the blocks of it that the file has."""
        key = about["tensor"]
        if not isinstance(key, str) or key not in self._tensors:
            raise ValueError(f"tensor {key!r}: the file has none of this name")
        values, target = self._tensors[key], each_once(tensor)
        shape = list(target.shape)
        if "blocks" in about:
            blocks = _sizes("blocks", about["blocks"])
            shape[:1] = [len(blocks)]
            if not target.dim() or sorted(set(blocks)) != blocks or (blocks and blocks[-1] >= len(target)):
                raise ValueError(f"blocks: expected some of {len(tensor)}, in order, each once")
        if list(values.shape) != shape or values.dtype != tensor.dtype:
            raise ValueError(
                f"tensor {key}: {values.dtype} of shape {list(values.shape)}, expected {tensor.dtype} of {shape}"
            )
        values = values.to(self._device)
        if "blocks" not in about:
            target.copy_(values)
            return
        for index, block in enumerate(blocks):  # float8 has no index_copy_
            target[block].copy_(values[index])


def _sizes(name: str, values: Json, count: int | None = None) -> list[int]:
    """Return a list of whole numbers from 0 to 2^62; raise ValueError for anything else."""
    if not isinstance(values, list) or count not in (None, len(values)):
        raise ValueError(f"{name}: expected a list of {count or 'some'} whole numbers")
    for value in values:
        if type(value) is not int or not 0 <= value <= 2**62:
            raise ValueError(f"{name}: expected whole numbers from 0 to 2^62")
    return values


def _memory(device: torch.device) -> int:
    """Return the bytes of a device's memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
