"""Recorded calls of operations: one file holds everything that another machine needs to repeat the call.

`PAGED_RECORD=DIR` or `paged.record(DIR)` writes a safetensors file for each chosen call. It holds tensors with strides
and dtypes, all other arguments, the results (returned and written), and versions, device and git state. From caches, it
holds only the blocks that the call reaches. `paged verify --replay FILE` checks the call, `paged bench --replay FILE`
times it.
"""

from __future__ import annotations

import atexit
import dataclasses
import inspect
import itertools
import logging
import math
import os
import platform
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from paged.errors import CheckpointError, InvalidInputError
from paged.kernels.core.device import backend
from paged.kernels.core.operation import Call, current_watch, watch_calls
from paged.kernels.cpu.recording import recording
from paged.tools.printable import one_line
from paged.tools.recorded_calls.decoder import PARTS, Decoder, checked_extents, operation_named, read_file
from paged.tools.recorded_calls.encoder import FORMAT, Encoder, reached_blocks

_LOG = logging.getLogger("paged")
# Held while a recorder starts or ends.
_CHANGES = threading.Lock()


class RecordedCall(NamedTuple):
    """A call read from a file.

    Attributes:
        operation: name of the operation.
        arguments: arguments by name, with their original strides and offsets modulo 16 bytes.
        returned: result of the call, None if it raised.
        written: final values of the arguments that the call writes to.
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
    """Write operation calls of all threads to files in a folder while the context is open.

    Meanwhile steps run without graphs, and each recorded call waits for the device. Calls in compiled graphs are also
    recorded. Recorders may overlap and end in any order. Each gets all calls that start while it is open. If a call
    cannot be recorded (for example, on a full disk), it runs normally. The first such call is logged; the total is
    logged when the recorder ends.

    Args:
        folder: target folder, created if missing. Files are named by operation, process and number.
        operations: names of the operations to record; None for all.
        every: record each call whose number, counted per operation from 0, is a multiple of this.
        failed: record only calls that raise or that return NaN or infinity.
        max_files: limit for the number of files.

    Raises:
        InvalidInputError: a name is no operation, a number is below 1, or the folder cannot be created.
    """
    recorder = _Recorder(Path(folder), operations, every, failed, max_files)
    _begin(recorder)
    try:
        yield recorder.folder
    finally:
        _end(recorder)


def record_as_environment_says() -> None:
    """Record for the rest of the process, as the environment variables say.

    PAGED_RECORD is the folder, PAGED_RECORD_OPS a comma-separated list of names, PAGED_RECORD_EVERY a number, and
    PAGED_RECORD_FAILED=1 skips calls that succeed.

    Raises:
        InvalidInputError: a value is invalid.
    """
    names = [name for name in os.environ.get("PAGED_RECORD_OPS", "").split(",") if name]
    every = os.environ.get("PAGED_RECORD_EVERY", "1")
    if not every.isdecimal():
        raise InvalidInputError(f"PAGED_RECORD_EVERY={every!r}: expected a whole number of at least 1")
    failed = os.environ.get("PAGED_RECORD_FAILED", "") not in ("", "0")
    recorder = _Recorder(Path(os.environ["PAGED_RECORD"]), names, int(every), failed, 100)
    _begin(recorder)
    atexit.register(_end, recorder)


def write_call(
    path: Path,
    operation: str,
    arguments: dict[str, Any],
    block_ids: torch.Tensor | None = None,
    returned: Any = None,
    written: dict[str, Any] | None = None,
) -> None:
    """Write a call for `read_call` in another process of this machine. block_ids: see `Encoder`."""
    encoder = Encoder(block_ids)
    about: dict[str, Any] = {"format": FORMAT, "operation": operation, "number": 0, "error": None, "versions": {}}
    about |= {"git": None, "machine": "", "backend": {}, "device": "", "date": ""}
    for part, value in (("arguments", arguments), ("returned", returned), ("written", written or {})):
        about[part] = encoder.part(value)
    encoder.write(path, about)


def read_call(path: str | os.PathLike[str], device: torch.device) -> RecordedCall:
    """Read a recorded call with its tensors on a device. Safe for untrusted files, because no code of them runs.

    Raises:
        CheckpointError: the file is missing, holds no recorded call of an operation, or needs more memory than the
            device has.
    """
    from safetensors import SafetensorError

    try:
        about, tensors = read_file(Path(path))
        operation = operation_named(about["operation"])
        if operation is None:
            raise ValueError(f"{about['operation']}: no operation")
        signature = inspect.signature(operation)
        contents = {part: about.pop(part) for part in PARTS}
        extents = checked_extents({part: contents[part]["storages"] for part in PARTS}, device)
        decoders = {part: Decoder(tensors, extents[part], device) for part in PARTS}
        arguments = decoders["arguments"].arguments(contents["arguments"]["value"], signature)
        returned = decoders["returned"].value(contents["returned"]["value"], str(signature.return_annotation))
        written = decoders["written"].arguments(contents["written"]["value"], signature)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError, MemoryError) as error:
        # RuntimeError: PyTorch lacks memory for a size, or the JSON is nested too deeply.
        raise CheckpointError(f"{path}: holds no recorded call: {one_line(error, 300)}") from error
    return RecordedCall(about.pop("operation"), arguments, returned, written, about)


class _Recorders:
    """The `Watch` of operations while recorders are open; passes every call to each of them."""

    def __init__(self, recorders: tuple[_Recorder, ...]) -> None:
        self.recorders = recorders

    def __call__(self, call: Call, run: Callable[[], Any]) -> Any:
        for recorder in self.recorders:
            run = partial(recorder, call, run)
        return run()


def _under_way() -> tuple[_Recorder, ...]:
    watch = current_watch()
    if isinstance(watch, _Recorders):
        return watch.recorders
    return ()


def _begin(recorder: _Recorder) -> None:
    with _CHANGES:
        watch_calls(_Recorders((*_under_way(), recorder)))


def _end(recorder: _Recorder) -> None:
    """End one recorder; the others continue."""
    with _CHANGES:
        recorders = _under_way()
        remaining = tuple(other for other in recorders if other is not recorder)
        if remaining:
            watch_calls(_Recorders(remaining))
        elif recorders:
            watch_calls(None)
    recorder.log_end()


class _Recorder:
    """The writer of one `record`. Its errors do not affect the calls that it records."""

    def __init__(self, folder: Path, operations: Sequence[str], every: int, failed: bool, max_files: int) -> None:
        for name in operations:
            if operation_named(name) is None:
                raise InvalidInputError(f"operations: {name!r} is no operation")
        for argument, number in (("every", every), ("max_files", max_files)):
            if number < 1:
                raise InvalidInputError(f"{argument}: {number}, expected at least 1")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInputError(f"{folder}: cannot be made: {error.strerror}, expected a folder") from error
        self.folder = folder
        self._operations, self._every, self._failed = frozenset(operations), every, failed
        self._num_left = max_files
        self._num_faults = 0
        self._counts: dict[str, Iterator[int]] = {}
        self._lock = threading.Lock()
        self._about = {"format": FORMAT, "versions": _versions(), "git": _git_state(), "machine": platform.platform()}

    def __call__(self, call: Call, run: Callable[[], Any]) -> Any:
        draft = self._try(call, self._drafted, call)
        try:
            returned = run()
        except Exception as error:
            if draft is not None:
                self._try(call, self._write_failed, draft, error)
            raise
        if draft is not None:
            self._try(call, self._write_returned, draft, returned)
        return returned

    def log_end(self) -> None:
        """Log the number of unrecorded calls, if there are more than the one logged before."""
        if self._num_faults > 1:
            _LOG.warning("recorder in %s: %d calls are not recorded", self.folder, self._num_faults)

    def _try(self, call: Call, step: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a recorder step, or None if it raises, so that its errors do not reach the call."""
        try:
            return step(*arguments)
        except Exception as error:
            with self._lock:
                self._num_faults += 1
                is_first = self._num_faults == 1
            if is_first:
                reason = one_line(f"{type(error).__name__}: {one_line(error)}")
                message = "recorder in %s: a call of %s is not recorded: %s; further ones are counted"
                _LOG.warning(message, self.folder, call.operation, reason)
        return None

    def _drafted(self, call: Call) -> _Draft | None:
        """Return a draft with the arguments before the call; None if the call is not recorded."""
        number = self._number(call.operation)
        if number is None or _is_hidden():
            return None
        arguments = dict(call.signature.bind(*call.args, **call.kwargs).arguments)
        encoder = Encoder(reached_blocks(arguments))
        about = {**self._about, "operation": call.operation, "number": number, "error": None}
        about |= {"arguments": encoder.part(arguments), "returned": encoder.part(None), "written": encoder.part({})}
        written = {name: value for name, value in arguments.items() if _is_written(name, value, call.mutates)}
        return _Draft(about, encoder, written)

    def _write_failed(self, draft: _Draft, error: Exception) -> None:
        draft.about["error"] = f"{type(error).__name__}: {error}"
        self._write(draft)

    def _write_returned(self, draft: _Draft, returned: Any) -> None:
        if self._failed and _is_finite(returned):
            return
        draft.about["returned"] = draft.encoder.part(returned)
        draft.about["written"] = draft.encoder.part(draft.written)
        self._write(draft)

    def _number(self, operation: str) -> int | None:
        """Return the call's number if it is recorded, else None."""
        if self._operations and operation not in self._operations:
            return None
        with self._lock:
            number = next(self._counts.setdefault(operation, itertools.count()))
            if number % self._every or self._num_left == 0:
                return None
        return number

    def _write(self, draft: _Draft) -> None:
        with self._lock:
            if self._num_left == 0:
                return
            self._num_left -= 1
        try:
            self._write_file(draft)
        except BaseException:
            with self._lock:
                self._num_left += 1
            raise

    def _write_file(self, draft: _Draft) -> None:
        """Write the whole file or no file."""
        about = draft.about
        about["backend"] = backend()._asdict()
        about["device"] = draft.encoder.device
        about["date"] = datetime.now(UTC).isoformat(timespec="seconds")
        part, path = _new_file(self.folder, f"{about['operation']}-{os.getpid()}-{about['number']:06}")
        try:
            draft.encoder.write(part, about)
            os.replace(part, path)
        except BaseException:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise


class _Draft(NamedTuple):
    """A call being recorded. written: arguments that the call writes to."""

    about: dict[str, Any]
    encoder: Encoder
    written: dict[str, Any]


def _new_file(folder: Path, name: str) -> tuple[Path, Path]:
    """Create an empty temporary file; return it and the unused path of the final file.

    The path must be checked, because another recorder may use the same folder and the same numbers.
    """
    stem = name
    copy = 0
    while True:
        part, path = folder / f"{stem}.part", folder / f"{stem}.safetensors"
        with suppress(FileExistsError):
            part.open("xb").close()
            if not path.exists():
                return part, path
            part.unlink()
        copy += 1
        stem = f"{name}-{copy}"


def _is_hidden() -> bool:
    """Return whether a graph or step is being captured, so that tensors cannot be read."""
    is_capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return is_capturing or recording() is not None


def _is_written(name: str, value: Any, mutates: Sequence[str]) -> bool:
    if dataclasses.is_dataclass(value):
        return any(field.name in mutates for field in dataclasses.fields(value))
    return name in mutates


def _is_finite(returned: Any) -> bool:
    """Return whether tensors hold neither NaN nor +inf; -inf is allowed, as the log-sum-exp of no key."""
    if isinstance(returned, tuple | list):
        return all(_is_finite(item) for item in returned)
    if not isinstance(returned, torch.Tensor) or not returned.is_floating_point():
        return True
    values = returned.float()
    return bool((values.isfinite() | (values == -math.inf)).all())


def _versions() -> dict[str, str]:
    import paged

    # importlib.metadata is not enough: paged may not be installed, and torch's metadata may lack the build
    versions = {"python": platform.python_version(), "paged": paged.__version__, "torch": torch.__version__}
    for package in ("triton", "numba", "numpy"):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def _git_state() -> str | None:
    """Return the commit of the sources and the changed files; None outside a checkout."""
    git = ["git", "-C", str(Path(__file__).resolve().parent)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10)
        changed = subprocess.run([*git, "status", "--short", "--untracked-files=no"], capture_output=True, text=True,
                                 check=True, timeout=10)  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return "\n".join([commit.stdout.strip(), *changed.stdout.splitlines()])
