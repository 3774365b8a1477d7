"""Recordings of calls of operations: one file holds all that another machine needs to make the call again.

`PAGED_RECORD=DIR`, or `paged.record(DIR)`, writes a safetensors file for each chosen call: tensors with their strides
and dtypes, all other arguments, what the call returned and wrote, and the versions, device and git state. Of caches
only the blocks that the call reaches are kept. `paged verify --replay FILE` checks the call,
`paged bench --replay FILE` times it.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import math
import os
import platform
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from paged.errors import CheckpointError, InvalidInputError
from paged.kernels.common.attention.plan import AttentionPlan
from paged.kernels.common.device import backend
from paged.kernels.common.numba_ops.recording import recording
from paged.kernels.common.operation import Call, watch_calls

Json = Any
_FORMAT = 2  # of the file; others are refused
# Arguments whose first dimension counts the blocks of a cache.
_CACHES = ("k_cache", "v_cache", "kv_cache", "key_cache", "caches")
_ROW_SCALES = ("k_scale", "v_scale")
# Arguments of up to this many bytes lie in storages filled with NaN before a call is made again, so that a read of a
# block that it does not reach shows. Larger ones are pools, whose untouched pages take no memory.
_MAX_FILLED = 64 << 20


class RecordedCall(NamedTuple):
    """A call read from a file.

    Attributes:
        operation: name of the operation.
        arguments: by name, with the strides, and the offsets modulo 16 bytes, that they had.
        returned: what the call returned, None if it raised.
        written: arguments that the call writes to, as it left them.
        about: error, backend, versions, device, git state and date.
    """

    operation: str
    arguments: dict[str, Any]
    returned: Any
    written: dict[str, Any]
    about: dict[str, Any]


@contextmanager
def record(
    folder: str | os.PathLike[str],
    operations: Sequence[str] = (),
    *,
    every: int = 1,
    failed: bool = False,
    max_files: int = 100,
) -> Iterator[Path]:
    """Write calls of operations to files in a folder while the context is open, for all threads of the process.

    Steps run without graphs meanwhile, and each recorded call waits for the device. Calls in compiled graphs are
    recorded, too. One recorder is active at a time: a second one takes the place of the first until it ends.

    Args:
        folder: made if it is not there. Files are named by operation, process and number.
        operations: names of those to record; all by default.
        every: records each call whose number, counted by operation from 0, is a multiple of this.
        failed: records only calls that raise, or that return NaN or infinity.
        max_files: after so many files nothing more is recorded.

    Raises:
        InvalidInputError: a name is no operation, or a number is not at least 1.
    """
    recorder = _Recorder(Path(folder), operations, every, failed, max_files)
    before = watch_calls(recorder)
    try:
        yield recorder.folder
    finally:
        watch_calls(before)


def record_as_environment_says() -> None:
    """Record for the rest of the process. PAGED_RECORD is the folder, PAGED_RECORD_OPS the names with commas between,
    PAGED_RECORD_EVERY a number, and PAGED_RECORD_FAILED=1 leaves out calls that succeed.

    Raises:
        InvalidInputError: a value does not fit.
    """
    names = [name for name in os.environ.get("PAGED_RECORD_OPS", "").split(",") if name]
    every = os.environ.get("PAGED_RECORD_EVERY", "1")
    if not every.isdecimal():
        raise InvalidInputError(f"PAGED_RECORD_EVERY={every!r}: expected a whole number of at least 1")
    failed = os.environ.get("PAGED_RECORD_FAILED", "") not in ("", "0")
    watch_calls(_Recorder(Path(os.environ["PAGED_RECORD"]), names, int(every), failed, 100))


def read_call(path: str | os.PathLike[str], device: torch.device) -> RecordedCall:
    """Read a recorded call, with its tensors on a device.

    Raises:
        CheckpointError: the file is not there or holds no recorded call.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:  # type: ignore[no-untyped-call]
            about = json.loads((file.metadata() or {})["paged_call"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: holds no recorded call: {error}") from error
    if about["format"] != _FORMAT:
        raise CheckpointError(f"{path}: format {about['format']}, expected {_FORMAT}")
    parts = {}
    for part in ("arguments", "returned", "written"):
        content = about.pop(part)
        parts[part] = _Decoder(tensors, content["storages"], device).decode(content["value"])
    return RecordedCall(about.pop("operation"), about=about, **parts)


class _Recorder:
    """The `Watch` of a recording."""

    def __init__(self, folder: Path, operations: Sequence[str], every: int, failed: bool, max_files: int) -> None:
        import paged

        for name in operations:
            module = paged._MODULE_OF.get(name, "")
            if not module.startswith("paged.kernels.") or not name.islower():
                raise InvalidInputError(f"operations: {name!r} is no operation")
        for argument, number in (("every", every), ("max_files", max_files)):
            if number < 1:
                raise InvalidInputError(f"{argument}: {number}, expected at least 1")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._operations, self._every, self._failed = frozenset(operations), every, failed
        self._num_left = max_files
        self._counts: dict[str, Iterator[int]] = {}
        self._lock = threading.Lock()
        self._about = {"format": _FORMAT, "versions": _versions(), "git": _git_state(), "machine": platform.platform()}

    def __call__(self, call: Call, run: Callable[[], Any]) -> Any:
        number = self._number(call.operation)
        if number is None or _is_hidden():
            return run()
        arguments = dict(call.signature.bind(*call.args, **call.kwargs).arguments)
        encoder = _Encoder(_reached(arguments))
        about = {**self._about, "operation": call.operation, "number": number, "error": None}
        about |= {"arguments": encoder.part(arguments), "returned": encoder.part(None), "written": encoder.part({})}
        try:
            returned = run()
        except Exception as error:
            about["error"] = f"{type(error).__name__}: {error}"
            self._write(about, encoder, number)
            raise
        if self._failed and _is_finite(returned):
            return returned
        about["returned"] = encoder.part(returned)
        written = {name: value for name, value in arguments.items() if _is_written(name, value, call.mutates)}
        about["written"] = encoder.part(written)
        self._write(about, encoder, number)
        return returned

    def _number(self, operation: str) -> int | None:
        """Return the call's number if it is to be recorded."""
        if self._operations and operation not in self._operations:
            return None
        with self._lock:
            number = next(self._counts.setdefault(operation, itertools.count()))
            if number % self._every or self._num_left == 0:
                return None
        return number

    def _write(self, about: dict[str, Any], encoder: _Encoder, number: int) -> None:
        from safetensors.torch import save_file

        with self._lock:
            if self._num_left == 0:
                return
            self._num_left -= 1
        about["backend"] = backend()._asdict()
        about["device"] = encoder.device
        about["date"] = datetime.now(UTC).isoformat(timespec="seconds")
        path = self.folder / f"{about['operation']}-{os.getpid()}-{number:06}.safetensors"
        draft = path.with_suffix(".part")
        save_file(encoder.tensors, draft, {"paged_call": json.dumps(about)})
        os.replace(draft, path)


def _is_hidden() -> bool:
    """Return whether a graph is being captured, or a step recorded, in which nothing may be read."""
    is_capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return is_capturing or recording() is not None


def _is_written(name: str, value: Any, mutates: Sequence[str]) -> bool:
    if dataclasses.is_dataclass(value):
        return any(field.name in mutates for field in dataclasses.fields(value))
    return name in mutates


def _is_finite(returned: Any) -> bool:
    """Return whether tensors hold neither NaN nor infinity; -inf is the log-sum-exp of no key."""
    if isinstance(returned, tuple | list):
        return all(_is_finite(item) for item in returned)
    if not isinstance(returned, torch.Tensor) or not returned.is_floating_point():
        return True
    values = returned.float()
    return bool((values.isfinite() | (values == -math.inf)).all())


def _reached(arguments: dict[str, Any]) -> torch.Tensor | None:
    """Return the blocks of caches that a call reads or writes, int64 on the CPU; None if nothing names them."""
    reached = []
    cache = None
    for name in _CACHES:
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


def _field_names(value: Any) -> Sequence[str] | None:
    """Return the names of the arguments that make an object again; None for other values."""
    if isinstance(value, AttentionPlan):
        return "cu_seqlens_q", "seq_lens", "max_seqlen_q", "max_seqlen_k"
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value) if field.init]
    if isinstance(value, tuple):
        return getattr(value, "_fields", None)
    return None


class _Encoder:
    """Turns values into JSON, with copies of their tensors beside it. block_ids: blocks of caches to keep."""

    def __init__(self, block_ids: torch.Tensor | None) -> None:
        self._block_ids = block_ids
        self._extents: dict[int, tuple[int, int]] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.device = "cpu"

    def part(self, value: Any) -> Json:
        """Return the value, and of each storage that it lies in the first and the last byte that it takes."""
        self._extents = {}
        encoded = self._encode(value)
        return {"value": encoded, "storages": list(self._extents.values())}

    def _encode(self, value: Any, name: str = "") -> Json:
        """name: of the argument that the value belongs to."""
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value, name)
        names = _field_names(value)
        if names is not None:
            fields = {field: self._encode(getattr(value, field), field) for field in names}
            return {"object": _path(value), "fields": fields}
        if isinstance(value, dict):
            return {"dict": {key: self._encode(item, key) for key, item in value.items()}}
        if isinstance(value, tuple | list):
            return {type(value).__name__: [self._encode(item, name) for item in value]}
        if hasattr(value, "item"):  # a number of NumPy's
            return value.item()
        return {"unknown": repr(value)[:200]}

    def _tensor(self, tensor: torch.Tensor, name: str) -> Json:
        """The blocks that are reached, of a cache and of scales a row; otherwise each element once."""
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
        values = _each_once(tensor.detach())
        is_cache = name in _CACHES or (name in _ROW_SCALES and tensor.dim() == 3)
        if is_cache and self._block_ids is not None:
            values = values[self._block_ids.to(values.device)]
            about["blocks"] = self._block_ids.tolist()
        self.tensors[key] = values.to("cpu", copy=True).contiguous()
        return about

    def _take(self, tensor: torch.Tensor) -> int:
        """Extend the bytes of the tensor's storage, from the first, or up to 15 before it; return its number."""
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


class _Decoder:
    """Makes the values again that an `_Encoder` has written: tensors of one storage share one, NaN between them."""

    def __init__(self, tensors: dict[str, torch.Tensor], storages: list[tuple[int, int]], device: torch.device) -> None:
        self._tensors, self._device = tensors, device
        self._storages = []
        num_bytes = sum(last - first for first, last in storages)
        for first, last in storages:
            content = torch.zeros(last - first, dtype=torch.uint8, device=device)
            if num_bytes <= _MAX_FILLED:
                content.fill_(255)
            self._storages.append((first, content))

    def decode(self, value: Json) -> Any:
        """Raise CheckpointError for a value that could not be recorded, or a class that is none of ours."""
        if not isinstance(value, dict):
            return value
        if "tensor" in value:
            return self._tensor(value)
        if "object" in value:
            module, _, name = value["object"].partition(":")
            if not module.startswith("paged."):
                raise CheckpointError(f"a recorded {value['object']}, expected a class of paged")
            fields = {key: self.decode(item) for key, item in value["fields"].items()}
            return getattr(importlib.import_module(module), name)(**fields)
        if "dict" in value:
            return {key: self.decode(item) for key, item in value["dict"].items()}
        for kind in (tuple, list):
            if kind.__name__ in value:
                return kind(self.decode(item) for item in value[kind.__name__])
        raise CheckpointError(f"an argument that was not recorded: {value.get('unknown')}")

    def _tensor(self, about: dict[str, Any]) -> torch.Tensor:
        first, content = self._storages[about["storage"]]
        dtype: torch.dtype = getattr(torch, about["dtype"])
        flat = content[: len(content) // dtype.itemsize * dtype.itemsize].view(dtype)
        offset = (about["offset"] - first) // dtype.itemsize
        tensor: torch.Tensor = flat.as_strided(about["shape"], about["stride"], offset)
        values = self._tensors[about["tensor"]].to(self._device)
        if "blocks" in about:
            for index, block in enumerate(about["blocks"]):  # float8 has no index_copy_
                tensor[block].copy_(values[index])
        else:
            _each_once(tensor).copy_(values)
        return tensor


def _each_once(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view in which expanded dimensions have one element."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _path(value: Any) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


def _versions() -> dict[str, str]:
    import paged

    # paged may not be installed; torch's metadata may not name the build
    versions = {"python": platform.python_version(), "paged": paged.__version__, "torch": torch.__version__}
    for package in ("triton", "numba", "numpy"):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def _git_state() -> str | None:
    """Return the commit of the sources and the files that differ from it; None outside of a checkout."""
    git = ["git", "-C", str(Path(__file__).resolve().parent)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10)
        changed = subprocess.run([*git, "status", "--short", "--untracked-files=no"], capture_output=True, text=True,
                                 check=True, timeout=10)  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return "\n".join([commit.stdout.strip(), *changed.stdout.splitlines()])
