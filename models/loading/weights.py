"""Stream a checkpoint's tensors into the parameter slices they belong to. Only safetensors; nothing is unpickled."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import nn

from paged.errors import CheckpointError, InvalidInputError
from paged.kernels.common.scalars import shown
from paged.models.loading.checkpoint_files import is_there, other_kind, read_json
from paged.models.loading.tensor_file import TensorFile

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
# Scales of an 8-bit KV cache as compressed-tensors, ModelOpt and Quark name them.
_KV_SCALE = re.compile(r"model\.layers\.(\d{1,9})\.self_attn\.(?:([kv])_scale|([kv])_proj\.(?:\3_scale|output_scale))")
FLOATING = ("F64", "F32", "F16", "BF16")
# Types of packed numbers and of what is stored beside them -> safetensors' names for them.
PACKED = {
    torch.uint8: ("U8",),
    torch.int8: ("I8",),
    torch.int32: ("I32",),
    torch.int64: ("I64",),
    torch.float8_e4m3fn: ("F8_E4M3",),
}
_MAX_SHOWN = 200
# The largest published checkpoints have 200.
_MOST_FILES, _MAX_NAME = 4096, 1024


class Slot(Protocol):
    """Destination of a checkpoint's tensor: a parameter, a slice of one, or an object that converts it.

    dtype: that of packed numbers and tensors that belong to them; for others any floating dtype of 16 bits or more is
    accepted.
    """

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def copy_(self, stored: torch.Tensor, /) -> object: ...


class ConvertedSlot(NamedTuple):
    """A slot whose `copy_` converts its tensor.

    is_loose: whether the tensor may have more dimensions of size 1 at its end, because a number for each row is stored
    both ways. `shape` is without them.
    """

    shape: torch.Size
    dtype: torch.dtype
    copy_: Callable[[torch.Tensor], object]
    is_loose: bool = False


# Reads what a slot takes of a tensor that holds more: from an opened file, by its name there.
Read = Callable[[TensorFile, str, Slot], torch.Tensor]
# Iterates over a sequence of work, named by `desc`, and may show how far it has come: `unit` is what is counted, and
# `size` how many of those an item is, one by default.
Track = Callable[..., Iterable[Any]]
# Checkpoint name of a tensor -> where it goes.
WeightSlots = dict[str, Slot]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a file's header describes it; dtype as safetensors names it. stamp: the file's, see `TensorFile`."""

    name: str
    file: Path
    shape: list[int]
    dtype: str
    stamp: tuple[int, ...] = ()


# Name -> where it is; the name is that in the file, or the one that a family has for it.
StoredTensors = dict[str, StoredTensor]


def untracked(items: Iterable[Any], **_: object) -> Iterable[Any]:
    """Show nothing; a `Track`."""
    return items


def read_headers(folder: Path) -> StoredTensors:
    """Read every tensor's description from the headers of a checkpoint's files.

    Raises:
        CheckpointError: a tensor is there twice or not where the index says; or a file is missing, unreadable,
            truncated or outside of the folder.
    """
    stored: StoredTensors = {}
    for file, promised in _files(folder).items():
        found = read_header(file)
        if absent := sorted(promised - found.keys()):
            raise CheckpointError(f"{plain(absent[0])}: not in {file}, where the index says it is")
        if repeated := sorted(found.keys() & stored.keys()):
            raise CheckpointError(f"{plain(repeated[0])}: there twice, again in {file}")
        stored |= found
    return stored


def read_header(file: Path) -> StoredTensors:
    """Read the header of one file.

    Raises:
        CheckpointError: it is missing, unreadable or truncated.
    """
    with open_tensors(file) as tensors:
        return {
            name: StoredTensor(name, file, shape, dtype, tensors.stamp)
            for name, (dtype, shape, *_) in tensors.tensors.items()
        }


def check_weights(stored: StoredTensors, slots: Mapping[str, Slot], *, tied_head: bool, folder: Path) -> None:
    """Check that every slot has a fitting tensor of its name, and every tensor a slot.

    Tensors without a slot are errors, with these exceptions: `rotary_emb.inv_freq` buffers of old files, scales of the
    KV cache (see `load_kv_scales`) and, with tied_head, an lm_head.weight.

    Raises:
        CheckpointError: a tensor is missing or unexpected, or has another shape or dtype.
    """
    for name, tensor in sorted(stored.items()):
        if name in slots:
            slot = slots[name]
            is_loose = isinstance(slot, ConvertedSlot) and slot.is_loose
            found = replace(tensor, shape=without_ones(tensor.shape)) if is_loose else tensor
            check_shape(name, found, list(slot.shape))
            check_dtype(name, tensor, PACKED.get(slot.dtype, FLOATING))
        elif not (
            name.endswith("rotary_emb.inv_freq")
            or _KV_SCALE.fullmatch(name)
            or (tied_head and name == "lm_head.weight")
        ):
            raise CheckpointError(f"{plain(name)}: unexpected tensor in {tensor.file}")
    if missing := slots.keys() - stored.keys():
        raise CheckpointError(f"{min(missing)}: missing in {folder} ({len(missing)} of {len(slots)} tensors are)")


def load_weights(
    stored: StoredTensors,
    slots: Mapping[str, Slot],
    parts: Mapping[str, Read] = MappingProxyType({}),
    track: Track = untracked,
    tick: Callable[[], object] = lambda: None,
) -> None:
    """Fill every slot with the tensor of its name, converted to the slot's dtype and device.

    stored: as `check_weights` accepted them. parts: how to read tensors of which a slot takes a part. track: iterates
    over the names, and may show progress in bytes. tick: called after every tensor.

    Raises:
        CheckpointError: a file became unreadable, or packed numbers contradict each other; the slots may then hold
            anything.
    """
    ordered = sorted(slots, key=lambda name: (stored[name].file, name))
    sizes = {name: math.prod(slot.shape) * slot.dtype.itemsize for name, slot in slots.items()}
    stamps = {stored[name].file: stored[name].stamp for name in ordered}
    read = track(ordered, desc="weights", unit="B", size=sizes.__getitem__)
    for file, names in groupby(read, lambda name: stored[name].file):
        with open_tensors(file, stamps[file]) as tensors:
            for name in names:
                source, slot, part = stored[name].name, slots[name], parts.get(name)
                try:
                    if part is None and isinstance(slot, torch.Tensor):
                        tensors.fill(source, slot)
                    else:
                        slot.copy_(tensors.get_tensor(source) if part is None else part(tensors, source, slot))
                except InvalidInputError as error:
                    raise CheckpointError(f"{name}: with it in {file} a projection is there, but {error}") from error
                tick()


def read_tensor(stored: StoredTensors, name: str) -> torch.Tensor:
    """Read one tensor to the CPU.

    Raises:
        CheckpointError: its file became unreadable.
    """
    with open_tensors(stored[name].file, stored[name].stamp) as tensors:
        return tensors.get_tensor(stored[name].name)


def load_kv_scales(
    stored: StoredTensors, num_kv_heads: Sequence[int], device: torch.device
) -> list[dict[str, torch.Tensor]]:
    """Return `k_scale` and `v_scale` of every layer that has them, float32, [1] or [num_kv_heads].

    A value is stored * scale. num_kv_heads: of each layer.

    Raises:
        CheckpointError: a scale is there twice, belongs to no layer, has another size or no floating dtype, or is not
            finite and above 0.
    """
    scales: list[dict[str, torch.Tensor]] = [{} for _ in num_kv_heads]
    for name, tensor in sorted(stored.items()):
        match = _KV_SCALE.fullmatch(name)
        if match is None:
            continue
        layer, kind = int(match[1]), f"{match[2] or match[3]}_scale"
        if layer >= len(scales) or kind in scales[layer]:
            problem = "unexpected tensor in" if layer >= len(scales) else f"a second {kind}, again in"
            raise CheckpointError(f"{name}: {problem} {tensor.file}")
        check_dtype(name, tensor, FLOATING)
        heads = num_kv_heads[layer]
        if math.prod(tensor.shape) not in (1, heads):
            raise CheckpointError(f"{name}: shape {tensor.shape} in {tensor.file}, expected 1 or {heads} values")
        scale = read_tensor(stored, name).float().flatten()
        if not (scale.isfinite() & (scale > 0)).all():
            raise CheckpointError(f"{name}: {scale.tolist()} in {tensor.file}, expected numbers above 0")
        scales[layer][kind] = scale.to(device)
    return scales


@contextmanager
def open_tensors(file: Path, stamp: tuple[int, ...] = ()) -> Iterator[TensorFile]:
    """Open a safetensors file; with a stamp, the same as before.

    Raises:
        CheckpointError: it is missing, no regular file, unreadable, truncated or changed.
    """
    try:
        with closing(TensorFile(file)) as tensors:
            if stamp and tensors.stamp != stamp:
                raise tensors.wrong("changed since its header was read")
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
    """Return text of a file for a message: cut short, and as its repr if it could affect a terminal."""
    return text if len(text) <= _MAX_SHOWN and text.isprintable() else shown(text)


def without_ones(shape: Sequence[int]) -> list[int]:
    """Return the shape without dimensions of size 1 at its end."""
    end = len(shape)
    while end and shape[end - 1] == 1:
        end -= 1
    return list(shape[:end])


class PackedModule(nn.Module):
    """Holds weights in fewer numbers: each row of `values` stands for in_features weights."""

    values: nn.Parameter
    in_features: int

    @property
    def num_weights(self) -> int:
        return self.values[..., 0].numel() * self.in_features

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Move to another device, but keep the dtypes if the network is given one."""

        def keeping_type(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor

        super()._apply(keeping_type, recurse)
        return self


def num_weights(network: nn.Module) -> int:
    """Return the number of weights and biases, a tied head once, without scales and zero points."""
    count = 0
    for module in network.modules():
        if isinstance(module, PackedModule):
            count += module.num_weights
        else:
            count += sum(parameter.numel() for parameter in module.parameters(recurse=False))
    return count


def _files(folder: Path) -> dict[Path, set[str]]:
    """Return the files of a checkpoint, each with the tensors that an index promises there."""
    if is_there(folder / _SINGLE):
        return {folder / _SINGLE: set()}
    index = folder / _INDEX
    if not is_there(index):
        pickled = sorted(file.name for file in folder.glob("*.bin"))
        reason = (
            f"only {pickled[0]}, and pickled weights are never loaded"
            if pickled
            else f"neither is there{other_kind(folder)}"
        )
        raise CheckpointError(f"{folder}: expected {_SINGLE} or {_INDEX}; {reason}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index}: without a weight_map object")
    files: dict[Path, set[str]] = {}
    found: dict[Any, Path] = {}
    for name, entry in weight_map.items():
        # Entries of other kinds are no keys; those of strings are looked up in the file system once each.
        file = found.get(entry) if isinstance(entry, str) else None
        if file is None:
            file = found[entry] = _inside(folder, name, entry, index)
        if len(found) > _MOST_FILES:
            raise CheckpointError(f"{index}: more than {_MOST_FILES} files, which no checkpoint has")
        files.setdefault(file, set()).add(name)
    return files


def _inside(folder: Path, name: str, entry: Any, index: Path) -> Path:
    """Return the file that an index entry names; a plain name may be a symlink, as in the Hub's cache."""
    name = plain(name)
    # What is not printable could do something to a terminal that shows a message with the file's name.
    if not isinstance(entry, str) or not entry.isprintable() or len(entry) > _MAX_NAME or Path(entry).is_absolute():
        raise CheckpointError(f"{name}: {shown(entry)} in {index} is no relative file name")
    file = folder / entry
    if Path(entry).name != entry:
        try:
            is_inside = file.resolve().is_relative_to(folder.resolve())
        except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle, before Python 3.13
            raise CheckpointError(f"{name}: {shown(entry)} in {index} leads nowhere ({error})") from error
        if not is_inside:
            raise CheckpointError(f"{name}: {shown(entry)} in {index} lies outside of the folder")
    return file
