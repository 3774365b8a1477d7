"""Stream a checkpoint's tensors into parameter slices. Only safetensors are read; nothing is unpickled."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import nn

from paged.errors import CheckpointError, InvalidInputError
from paged.kernels.core.device import use_triton
from paged.kernels.core.errors import shown
from paged.models.loading.checkpoint_files import is_there, other_kind, read_json
from paged.models.loading.given_tensors import GivenTensors
from paged.models.loading.tensor_file import TensorFile

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATING = ("F64", "F32", "F16", "BF16")
# Dtypes of packed weights and of their scales and zero points -> safetensors' names.
PACKED = {
    torch.uint8: ("U8", "I8", "F8_E8M0"),  # bytes
    torch.int8: ("I8",),
    torch.int32: ("I32",),
    torch.int64: ("I64", "I32"),
    torch.float8_e4m3fn: ("F8_E4M3",),
    torch.float8_e8m0fnu: ("F8_E8M0",),
}
_MAX_SHOWN = 200
_MEMORY = Path("/proc/meminfo")
# Bytes of memory that must stay free on the machine if weights are unpacked.
_RESERVE = 1 << 30
# Limits of the number of files and of a file name's characters. The largest published checkpoints have 200 files.
_MOST_FILES, _MAX_NAME = 4096, 1024


class Destination(Protocol):
    """Destination of a checkpoint's tensor: a parameter, a slice of one, or an object that converts it.

    dtype: exact for packed weights, their scales and zero points. Others accept any floating dtype of 16 bits or
    more.
    """

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def copy_(self, stored: torch.Tensor, /) -> object: ...


class ConvertedDestination(NamedTuple):
    """A destination whose `copy_` converts its tensor.

    is_loose: whether the tensor may have additional trailing dimensions of size 1, because files store one number per
    row both ways. `shape` leaves these dimensions out.
    """

    shape: torch.Size
    dtype: torch.dtype
    copy_: Callable[[torch.Tensor], object]
    is_loose: bool = False


Tensors = TensorFile | GivenTensors
# Reads the part of a tensor that a destination takes, from an open file, by the tensor's name in the file.
Read = Callable[[Tensors, str, Destination], torch.Tensor]
# Iterates over work and may show progress. `desc` names the work, `unit` the counted unit, and `size` the number of
# units of an item, 1 by default.
Track = Callable[..., Iterable[Any]]
# Checkpoint name of a tensor -> its destination.
Destinations = dict[str, Destination]


class Loaded(Protocol):
    """A module that tells its tensors in a checkpoint, whose names begin with `prefix`."""

    def destinations(self, prefix: str) -> Destinations: ...


def join_destinations(prefix: str, *beside: Loaded | None, **parts: Loaded | torch.Tensor | None) -> Destinations:
    """Return the tensors of a module by the names of its parts in a checkpoint; None has no tensors.

    beside: parts whose tensors have the module's own prefix.
    """
    destinations: Destinations = {}
    for module in beside:
        if module is not None:
            destinations |= module.destinations(prefix)
    for name, part in parts.items():
        if isinstance(part, torch.Tensor):
            destinations[f"{prefix}.{name}"] = part
        elif part is not None:
            destinations |= part.destinations(f"{prefix}.{name}")
    return destinations


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file's header, or in `source`; dtype as safetensors names it. stamp: see `TensorFile`."""

    name: str
    file: Path
    shape: list[int]
    dtype: str
    stamp: tuple[int, ...] = ()
    source: GivenTensors | None = None

    def opened(self) -> AbstractContextManager[Tensors]:
        """Return an object to read the tensor from.

        Raises:
            CheckpointError: as `open_tensors`.
        """
        if self.source is not None:
            return nullcontext(self.source)
        return open_tensors(self.file, self.stamp)


# Name in the file, or the family's name -> tensor.
StoredTensors = dict[str, StoredTensor]


def untracked(items: Iterable[Any], **_: object) -> Iterable[Any]:
    """Return the items without showing progress; a `Track`."""
    return items


def read_headers(folder: Path | GivenTensors) -> StoredTensors:
    """Read every tensor's description from the headers of a checkpoint's files, or from given tensors.

    Raises:
        CheckpointError: a tensor occurs twice or is not in the file that the index names; or a file is missing,
            unreadable, truncated or outside of the folder.
    """
    stored: StoredTensors = {}
    if isinstance(folder, GivenTensors):
        file = Path(str(folder))
        for name, (dtype, shape) in folder.tensors.items():
            stored[name] = StoredTensor(name, file, shape, dtype, source=folder)
        return stored
    for file, promised in _files(folder).items():
        header = read_header(file)
        if absent := sorted(promised - header.keys()):
            raise CheckpointError(f"{plain(absent[0])}: not in {file}, which the index names for it")
        if repeated := sorted(header.keys() & stored.keys()):
            raise CheckpointError(f"{plain(repeated[0])}: stored twice, again in {file}")
        stored |= header
    return stored


def read_header(file: Path) -> StoredTensors:
    """Read the header of one file.

    Raises:
        CheckpointError: the file is missing, unreadable or truncated.
    """
    stored: StoredTensors = {}
    with open_tensors(file) as tensors:
        for name, (dtype, shape, *_) in tensors.tensors.items():
            stored[name] = StoredTensor(name, file, shape, dtype, tensors.stamp)
    return stored


def check_weights(
    stored: StoredTensors,
    destinations: Mapping[str, Destination],
    *,
    tied_head: bool,
    folder: str | Path | GivenTensors,
) -> None:
    """Check that every destination has a tensor of its name, shape and dtype, and every tensor has a destination.

    Two kinds of tensors need no destination: `rotary_emb.inv_freq` buffers of old files and, with tied_head,
    lm_head.weight.

    Raises:
        CheckpointError: a tensor is missing or unexpected, or has another shape or dtype.
    """
    for name, tensor in sorted(stored.items()):
        if name in destinations:
            destination = destinations[name]
            shaped = tensor
            if isinstance(destination, ConvertedDestination) and destination.is_loose:
                shaped = replace(tensor, shape=without_ones(tensor.shape))
            check_shape(name, shaped, list(destination.shape))
            check_dtype(name, tensor, PACKED.get(destination.dtype, FLOATING))
        elif not (name.endswith("rotary_emb.inv_freq") or (tied_head and name == "lm_head.weight")):
            raise CheckpointError(f"{plain(tensor.name)}: unexpected tensor in {tensor.file}")
    if missing := destinations.keys() - stored.keys():
        num_missing = f"{len(missing)} of {len(destinations)} tensors are missing"
        raise CheckpointError(f"{min(missing)}: missing in {folder} ({num_missing})")


def load_weights(
    stored: StoredTensors,
    destinations: Mapping[str, Destination],
    parts: Mapping[str, Read] = MappingProxyType({}),
    track: Track = untracked,
    tick: Callable[[], object] = lambda: None,
) -> None:
    """Fill every destination with the tensor of its name, converted to the destination's dtype and device.

    stored: checked by `check_weights`. parts: readers of tensors that this rank reads in part. track: iterates over
    the names and may show progress in bytes. tick: called after every tensor.

    Raises:
        CheckpointError: a file became unreadable, or packed tensors contradict each other. The contents of the
            destinations are then undefined.
    """
    ordered = sorted(destinations, key=lambda name: (stored[name].file, name))
    sizes: dict[str, int] = {}
    for name, destination in destinations.items():
        sizes[name] = math.prod(destination.shape) * destination.dtype.itemsize
    read = track(ordered, desc="weights", unit="B", size=sizes.__getitem__)
    for file, names in groupby(read, lambda name: stored[name].file):
        first = next(names)
        with stored[first].opened() as tensors:
            for name in chain((first,), names):
                source, destination, part = stored[name].name, destinations[name], parts.get(name)
                try:
                    if part is not None:
                        destination.copy_(part(tensors, source, destination))
                    elif isinstance(destination, torch.Tensor):
                        tensors.fill(source, destination)
                    else:
                        destination.copy_(tensors.get_tensor(source))
                except InvalidInputError as error:
                    raise CheckpointError(f"{name}: in {file}, cannot build the projection: {error}") from error
                tick()


def read_tensor(stored: StoredTensors, name: str) -> torch.Tensor:
    """Read one tensor into CPU memory.

    Raises:
        CheckpointError: its file became unreadable.
    """
    with stored[name].opened() as tensors:
        return tensors.get_tensor(stored[name].name)


@contextmanager
def open_tensors(file: Path, stamp: tuple[int, ...] = ()) -> Iterator[TensorFile]:
    """Open a safetensors file; with a stamp, check that the file has not changed since.

    Raises:
        CheckpointError: the file is missing, not regular, unreadable, truncated or changed.
    """
    try:
        with closing(TensorFile(file)) as tensors:
            if stamp and tensors.stamp != stamp:
                raise tensors.wrong("the file changed after its header was read")
            yield tensors
    except (OSError, MemoryError) as error:
        raise CheckpointError(f"{file}: missing, unreadable or truncated ({plain(str(error))})") from error


def check_shape(name: str, tensor: StoredTensor, expected: list[int]) -> None:
    """Raise CheckpointError unless a tensor has this shape."""
    if tensor.shape != expected:
        raise CheckpointError(f"{name}: shape {shown(tensor.shape)} in {tensor.file}, expected {expected}")


def check_dtype(name: str, tensor: StoredTensor, expected: tuple[str, ...]) -> None:
    """Raise CheckpointError unless a tensor has one of these dtypes."""
    if tensor.dtype not in expected:
        raise CheckpointError(f"{name}: dtype {tensor.dtype} in {tensor.file}, expected {', '.join(expected)}")


def plain(text: str) -> str:
    """Return text from a file for a message: shortened, and as its repr if it could control a terminal."""
    if len(text) <= _MAX_SHOWN and text.isprintable():
        return text
    return shown(text)


def without_ones(shape: Sequence[int]) -> list[int]:
    """Return the shape without trailing dimensions of size 1."""
    end = len(shape)
    while end and shape[end - 1] == 1:
        end -= 1
    return list(shape[:end])


class PackedModule(nn.Module):
    """Holds packed weights: each row of `values` stands for in_features weights."""

    values: nn.Parameter
    in_features: int

    def num_weights(self) -> int:
        """Return the number of weights, without scales and zero points."""
        return self.values[..., 0].numel() * self.in_features

    def weight_tensors(self) -> list[torch.Tensor]:
        """Return the weights, scales and zero points as they are held."""
        return list(self.parameters(recurse=False))

    @property
    def nbytes(self) -> int:
        """Memory of the weights, with scales and zero points."""
        return sum(tensor.nbytes for tensor in self.weight_tensors())

    def bytes_to_pack(self, dtype: torch.dtype) -> int:
        """Return the bytes that a CPU would hold in another order.

        Return 0 where Triton kernels read them, or if memory to unpack them in `dtype` is short.
        """
        if use_triton(next(self.parameters(recurse=False))) or not _has_memory(self.num_weights() * dtype.itemsize):
            return 0
        return self.nbytes

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Move to another device. The dtypes stay if the network's dtype changes."""

        def keeping_type(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            if moved.dtype != tensor.dtype:
                return tensor
            return moved

        super()._apply(keeping_type, recurse)
        return self


def _has_memory(num_bytes: int) -> bool:
    """Return whether this much memory is free beside the reserve; True where Linux does not tell."""
    if not _MEMORY.exists():
        return True
    available = re.search(r"MemAvailable:\s*(\d+) kB", _MEMORY.read_text())
    return available is None or num_bytes + _RESERVE <= int(available[1]) << 10


def num_weights(network: nn.Module) -> int:
    """Return the number of weights and biases; a tied head counts once, scales and zero points do not."""
    count = 0
    for module in network.modules():
        if isinstance(module, PackedModule):
            count += module.num_weights()
        else:
            count += sum(parameter.numel() for parameter in module.parameters(recurse=False))
    return count


def _files(folder: Path) -> dict[Path, set[str]]:
    """Return a checkpoint's files, each with the tensors that the index places in it."""
    if is_there(folder / _SINGLE):
        return {folder / _SINGLE: set()}
    index = folder / _INDEX
    if not is_there(index):
        pickled = sorted(file.name for file in folder.glob("*.bin"))
        reason = f"there is neither{other_kind(folder)}"
        if pickled:
            reason = f"only {pickled[0]}, and pickled weights are never loaded"
        raise CheckpointError(f"{folder}: expected {_SINGLE} or {_INDEX}; {reason}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index}: no weight_map object")
    files: dict[Path, set[str]] = {}
    paths: dict[str, Path] = {}
    for name, entry in weight_map.items():
        # Only a string can be a name. Each name is looked up in the file system once.
        if not isinstance(entry, str) or entry not in paths:
            paths[entry] = _inside(folder, name, entry, index)
        file = paths[entry]
        if len(paths) > _MOST_FILES:
            raise CheckpointError(f"{index}: more than {_MOST_FILES} files, which no checkpoint has")
        files.setdefault(file, set()).add(name)
    return files


def _inside(folder: Path, name: str, entry: Any, index: Path) -> Path:
    """Return the file that an index entry names; a plain name may be a symlink, as in the Hub's cache."""
    name = plain(name)
    # Messages show the file's name, so it must not control a terminal.
    if not isinstance(entry, str) or not entry.isprintable() or len(entry) > _MAX_NAME or Path(entry).is_absolute():
        raise CheckpointError(f"{name}: {shown(entry)} in {index} is not a relative file name")
    file = folder / entry
    if Path(entry).name != entry:
        try:
            is_inside = file.resolve().is_relative_to(folder.resolve())
        except (OSError, RuntimeError) as error:  # RuntimeError: a cycle of links, before Python 3.13
            raise CheckpointError(f"{name}: {shown(entry)} in {index} cannot be resolved ({error})") from error
        if not is_inside:
            raise CheckpointError(f"{name}: {shown(entry)} in {index} lies outside of the folder")
    return file
