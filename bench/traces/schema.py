"""Trace sets in the format of FlashInfer-Bench 0.1.2: definitions, workloads and solutions as JSON in a folder.

    definitions/<op_type>/<name>.json    inputs, outputs and axes of a kernel, and a reference in Python
    workloads/<op_type>/<name>.jsonl     a line for each call: values of variable axes, and where its inputs come from
    solutions/<op_type>/<name>/*.json    sources of a kernel for a definition
    blob/workloads/...                   safetensors files with inputs

The format: https://bench.flashinfer.ai/docs/flashinfer-trace. A set may come from a stranger: reading it runs none of
its code, and reads no file outside of it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import torch

from paged.errors import InvalidInputError, UnsupportedError
from paged.tools.printable import one_line

T = TypeVar("T")
Inputs = dict[str, Any]
"""Tensors and numbers of a call, by the names of a definition."""
_DTYPE = re.compile(r"(bool|b?float|int)[0-9a-z_]*")
_PYTHON = ("python", "triton")
# Largest number of elements of a random input, so that a file cannot ask for all memory.
_MAX_ELEMENTS = 1 << 31


@dataclass(frozen=True)
class Spec:
    """An input or output. shape: names of axes; None for a number. dtype: as in the format."""

    shape: tuple[str, ...] | None
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return PyTorch's dtype; raise UnsupportedError if it has none."""
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise UnsupportedError(f"dtype {self.dtype}: PyTorch has none of this name")
        return dtype


@dataclass(frozen=True)
class Definition:
    """A kernel's interface and meaning. axes: sizes; None for those that a workload chooses."""

    name: str
    op_type: str
    axes: Mapping[str, int | None]
    inputs: Mapping[str, Spec]
    outputs: Mapping[str, Spec]
    reference: str
    description: str = ""
    constraints: tuple[str, ...] = ()

    def shape(self, spec: Spec, sizes: Mapping[str, int]) -> list[int]:
        """Return the shape of an input or output. sizes: of variable axes."""
        shape = []
        for axis in spec.shape or ():
            size = self.axes[axis]
            if size is None:
                size = sizes[axis]
            shape.append(size)
        return shape

    def sizes(self, inputs: Inputs) -> dict[str, int]:
        """Return the sizes of variable axes, from inputs."""
        sizes: dict[str, int] = {}
        for name, spec in self.inputs.items():
            if spec.shape is not None:
                sizes.update(zip(spec.shape, inputs[name].shape, strict=True))
        return sizes

    def as_json(self) -> dict[str, Any]:
        """Return the content of a definition's file."""
        axes: dict[str, dict[str, Any]] = {}
        for name, size in self.axes.items():
            axes[name] = {"type": "const", "value": size}
            if size is None:
                axes[name] = {"type": "var"}
        return {
            "name": self.name,
            "op_type": self.op_type,
            "description": self.description,
            "axes": axes,
            "constraints": list(self.constraints),
            "inputs": {name: {"shape": spec.shape, "dtype": spec.dtype} for name, spec in self.inputs.items()},
            "outputs": {name: {"shape": spec.shape, "dtype": spec.dtype} for name, spec in self.outputs.items()},
            "reference": self.reference,
        }


@dataclass(frozen=True)
class Workload:
    """A call of a definition. inputs: where each comes from, as in the format. root: folder of the set."""

    definition: str
    uuid: str
    axes: Mapping[str, int]
    inputs: Mapping[str, Mapping[str, Any]]
    root: Path

    def as_json(self) -> dict[str, Any]:
        """Return the content of a workload's line."""
        workload = {"axes": dict(self.axes), "inputs": dict(self.inputs), "uuid": self.uuid}
        return {"definition": self.definition, "workload": workload, "solution": None, "evaluation": None}

    def read(self, definition: Definition, device: torch.device) -> Inputs:
        """Return the inputs on a device; random ones are normal, from PyTorch's generator.

        Raises:
            InvalidInputError: an input is missing, lies outside of the set, or is not as defined.
        """
        missing = [axis for axis, size in definition.axes.items() if size is None and axis not in self.axes]
        if missing:
            raise InvalidInputError(f"{self.definition}, workload {self.uuid}: no axis {', '.join(missing)}")
        inputs: Inputs = {}
        for name, spec in definition.inputs.items():
            if spec.shape is None:
                inputs[name] = self._number(name)
            else:
                inputs[name] = self._input(definition, name, spec).to(device)
        return inputs

    def _number(self, name: str) -> int | float | bool:
        source = self.inputs.get(name, {})
        if source.get("type") == "safetensors":
            return self._stored(name, source).item()
        value = source.get("value")
        if not isinstance(value, bool | int | float):
            raise InvalidInputError(f"{self.definition}, workload {self.uuid}: {name}: expected a number")
        return value

    def _input(self, definition: Definition, name: str, spec: Spec) -> torch.Tensor:
        where = f"{self.definition}, workload {self.uuid}: {name}"
        shape, dtype = definition.shape(spec, self.axes), spec.torch_dtype
        source = self.inputs.get(name, {"type": "random"})
        if source.get("type") == "random":
            if not dtype.is_floating_point:
                raise InvalidInputError(f"{where}: random whole numbers, expected a safetensors file")
            if math.prod(shape) > _MAX_ELEMENTS:
                raise InvalidInputError(f"{where}: shape {shape}, expected at most {_MAX_ELEMENTS} elements")
            return torch.randn(shape).to(dtype)
        if source.get("type") != "safetensors":
            raise InvalidInputError(f"{where}: type {source.get('type')!r}, expected random or safetensors")
        tensor = self._stored(name, source)
        if list(tensor.shape) != shape or tensor.dtype != dtype:
            raise InvalidInputError(
                f"{where}: {list(tensor.shape)}, {tensor.dtype}, the definition says {shape}, {dtype}"
            )
        return tensor

    def _stored(self, name: str, source: Mapping[str, Any]) -> torch.Tensor:
        from safetensors import SafetensorError, safe_open

        where = f"{self.definition}, workload {self.uuid}: {name}"
        path = (self.root / str(source.get("path"))).resolve()
        if not path.is_relative_to(self.root.resolve()):
            raise InvalidInputError(f"{where}: {source.get('path')}, expected a file of the set")
        try:
            with safe_open(path, framework="pt") as file:  # type: ignore[no-untyped-call]
                tensor: torch.Tensor = file.get_tensor(str(source.get("tensor_key")))
        except (OSError, SafetensorError) as error:
            raise InvalidInputError(f"{where}: {path}: {one_line(error)}") from error
        return tensor


@dataclass(frozen=True)
class Solution:
    """Another's kernel for a definition.

    entry_point: "file::function". in_place: the function takes outputs behind the inputs, and writes them. sources:
    path -> content.
    """

    name: str
    definition: str
    language: str
    entry_point: str
    in_place: bool
    sources: Mapping[str, str]

    @property
    def refusal(self) -> str | None:
        """Why it cannot be called here; None if it can."""
        if self.language not in _PYTHON:
            return f"written in {self.language}, expected {' or '.join(_PYTHON)}"
        return None

    def write(self, package: Path) -> str:
        """Write the sources as a package; return "module:function" for a process that finds the package's folder."""
        for path, content in self.sources.items():
            target = package / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(content)
        file, _, function = self.entry_point.partition("::")
        return f"{'.'.join((package.name, *PurePosixPath(file).with_suffix('').parts))}:{function}"


@dataclass(frozen=True)
class TraceSet:
    """A set in memory."""

    definitions: Mapping[str, Definition]
    workloads: Sequence[Workload]
    solutions: Sequence[Solution]


def read_set(path: Path) -> TraceSet:
    """Read a set. path: its folder, or one file of workloads in it.

    Raises:
        InvalidInputError: there is no such set, or a file is not in the format.
    """
    root, files = path, sorted((path / "workloads").rglob("*.jsonl"))
    if path.is_file():
        files = [path]
        for folder in path.resolve().parents:
            if (folder / "definitions").is_dir():
                root = folder
                break
    if not (root / "definitions").is_dir():
        raise InvalidInputError(f"{path}: expected a trace set with definitions/, or a file of workloads in one")
    definitions = {}
    for file in sorted((root / "definitions").rglob("*.json")):
        definition = _parsed(file, _content(file), parse_definition)
        definitions[definition.name] = definition
    solutions = []
    for file in sorted((root / "solutions").rglob("*.json")):
        solutions.append(_parsed(file, _content(file), _solution))
    return TraceSet(definitions, list(_workloads(root, files)), solutions)


def write_set(root: Path, definitions: Mapping[str, Definition], workloads: Sequence[Workload]) -> None:
    """Write definitions, and workloads behind those that files have already. The inputs' files are the caller's."""
    for definition in definitions.values():
        file = root / "definitions" / definition.op_type / f"{definition.name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(definition.as_json(), indent=2) + "\n")
    for workload in workloads:
        op_type = definitions[workload.definition].op_type
        file = root / "workloads" / op_type / f"{workload.definition}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as stream:
            stream.write(json.dumps(workload.as_json()) + "\n")


def _workloads(root: Path, files: Sequence[Path]) -> Iterator[Workload]:
    for file in files:
        for line in _content(file).splitlines():
            if line.strip():
                yield _parsed(file, line, lambda content: _workload(content, root))


def _content(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{file}: cannot be read: {one_line(error)}") from error


def _parsed(file: Path, text: str, parse: Callable[[Any], T]) -> T:
    try:
        return parse(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = one_line(f"{type(error).__name__}: {error}", 200)
        raise InvalidInputError(f"{file}: not in the format of FlashInfer-Bench: {reason}") from error


def parse_definition(content: Any) -> Definition:
    """Return a definition from its JSON; raise ValueError, KeyError or TypeError if it is none."""
    axes: dict[str, int | None] = {}
    for name, axis in content["axes"].items():
        kind = axis.get("type", "const" if "value" in axis else "var")  # the format's default
        if kind not in ("const", "var"):
            raise ValueError(f"axis {name} of type {kind!r}, expected const or var")
        axes[name] = None
        if kind == "const":
            axes[name] = _size(name, axis["value"])
    return Definition(
        _text(content["name"]),
        _text(content["op_type"]),
        axes,
        {name: _spec(spec, axes) for name, spec in content["inputs"].items()},
        {name: _spec(spec, axes) for name, spec in content["outputs"].items()},
        _text(content["reference"]),
    )


def _spec(content: Any, axes: Mapping[str, int | None]) -> Spec:
    shape = content["shape"]
    if shape is not None:
        shape = tuple(shape)
        unknown = set(shape) - axes.keys()
        if unknown:
            raise ValueError(f"no axis {', '.join(sorted(map(str, unknown)))}")
    if _DTYPE.fullmatch(content["dtype"]) is None:
        raise ValueError(f"dtype {content['dtype']}")
    return Spec(shape, content["dtype"])


def _workload(content: Any, root: Path) -> Workload:
    workload = content["workload"]
    axes = {name: _size(name, size) for name, size in workload["axes"].items()}
    inputs = {name: dict(source) for name, source in workload["inputs"].items()}
    return Workload(_text(content["definition"]), _text(workload["uuid"]), axes, inputs, root)


def _solution(content: Any) -> Solution:
    spec = content["spec"]
    sources = {}
    for source in content["sources"]:
        path = PurePosixPath(_text(source["path"]))
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"source {path}")
        if str(path) in sources:
            raise ValueError(f"two sources {path}")
        sources[str(path)] = _text(source["content"])
    entry_point = _text(spec["entry_point"])
    file, _, function = entry_point.partition("::")
    if str(PurePosixPath(file)) not in sources or not function:
        raise ValueError(f"entry point {entry_point}, expected file::function with a file of sources")
    in_place = spec.get("destination_passing_style", True)
    return Solution(
        _text(content["name"]),
        _text(content["definition"]),
        _text(spec["language"]),
        entry_point,
        bool(in_place),
        sources,
    )


def _size(axis: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"axis {axis}: {value!r}, expected a whole number of at least 0")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r}, expected a text")
    return value
