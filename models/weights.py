"""Streams a checkpoint's tensors into the parameter slices they belong to. Only safetensors; nothing is unpickled."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from paged.errors import CheckpointError

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
# Scales of an 8-bit KV cache as compressed-tensors, ModelOpt and Quark name them.
_KV_SCALE = re.compile(r"model\.layers\.(\d+)\.self_attn\.(?:([kv])_scale|([kv])_proj\.(?:\3_scale|output_scale))")
_FLOATING = ("F64", "F32", "F16", "BF16")


class Slot(Protocol):
    """Where a tensor of a checkpoint goes: a parameter or a slice of one, or what makes one of the tensor.

    dtype: uint8 where the tensor holds packed numbers, else any floating point.
    """

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def copy_(self, stored: torch.Tensor, /) -> object: ...


# Checkpoint name of a tensor -> where it goes.
WeightSlots = dict[str, Slot]


def load_weights(folder: Path, slots: Mapping[str, Slot], *, tied_head: bool) -> None:
    """Fill every slot, converting to its dtype and device, with the tensor of its name.

    Tensors without a slot are errors, but for the `rotary_emb.inv_freq` buffers of old files, scales of the KV cache
    (see `load_kv_scales`) and, with tied_head, an lm_head.weight that repeats the embedding.

    Raises:
        CheckpointError: a tensor is missing, unexpected, there twice, misshapen or of another dtype, or a file is
            missing, unreadable, truncated or outside of the folder; the slots then hold anything.
    """
    pending = dict(slots)
    for file, promised in _files(folder).items():
        with open_tensors(file) as tensors:
            names = sorted(tensors.keys())
            if absent := sorted(promised - set(names)):
                raise CheckpointError(f"{absent[0]}: not in {file}, where the index says it is")
            for name in names:
                if name.endswith("rotary_emb.inv_freq") or (tied_head and name == "lm_head.weight"):
                    continue
                if _KV_SCALE.fullmatch(name):
                    continue
                if name not in pending:
                    problem = "there twice, again in" if name in slots else "unexpected tensor in"
                    raise CheckpointError(f"{name}: {problem} {file}")
                _fill(pending.pop(name), name, tensors, file)
    if pending:
        raise CheckpointError(f"{min(pending)}: missing in {folder} ({len(pending)} of {len(slots)} tensors are)")


def load_kv_scales(
    folder: Path, num_layers: int, num_kv_heads: int, device: torch.device
) -> list[dict[str, torch.Tensor]]:
    """`k_scale` and `v_scale` of every layer that has them, float32, [1] or [num_kv_heads]: value = stored * scale.

    Raises:
        CheckpointError: a scale is there twice, of a layer that is not, of another size, no floating point number, or
            not finite and above 0; or as `load_weights` for the files.
    """
    scales: list[dict[str, torch.Tensor]] = [{} for _ in range(num_layers)]
    for file in _files(folder):
        with open_tensors(file) as tensors:
            for name in sorted(tensors.keys()):
                match = _KV_SCALE.fullmatch(name)
                if match is None:
                    continue
                layer, kind = int(match[1]), f"{match[2] or match[3]}_scale"
                if layer >= num_layers or kind in scales[layer]:
                    problem = "unexpected tensor in" if layer >= num_layers else f"a second {kind}, again in"
                    raise CheckpointError(f"{name}: {problem} {file}")
                check_floating(name, tensors, file)
                scale = tensors.get_tensor(name).float().flatten()
                if scale.numel() not in (1, num_kv_heads) or not (scale.isfinite() & (scale > 0)).all():
                    raise CheckpointError(f"{name}: {scale.tolist()} in {file}, expected 1 or {num_kv_heads} above 0")
                scales[layer][kind] = scale.to(device)
    return scales


@contextmanager
def open_tensors(file: Path) -> Iterator[Any]:
    """A safetensors file.

    Raises:
        CheckpointError: it is missing, unreadable or truncated.
    """
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: missing, unreadable or truncated ({error})") from error


def _fill(slot: Slot, name: str, tensors: Any, file: Path) -> None:
    shape = tensors.get_slice(name).get_shape()
    if shape != list(slot.shape):
        raise CheckpointError(f"{name}: shape {shape} in {file}, expected {list(slot.shape)}")
    _check_dtype(name, tensors, file, ("U8",) if slot.dtype == torch.uint8 else _FLOATING)
    slot.copy_(tensors.get_tensor(name))


def check_floating(name: str, tensors: Any, file: Path) -> None:
    """Raise CheckpointError unless a tensor of an open file is floating point."""
    _check_dtype(name, tensors, file, _FLOATING)


def _check_dtype(name: str, tensors: Any, file: Path, expected: tuple[str, ...]) -> None:
    dtype = tensors.get_slice(name).get_dtype()
    if dtype not in expected:
        raise CheckpointError(f"{name}: dtype {dtype} in {file}, expected {', '.join(expected)}")


def _files(folder: Path) -> dict[Path, set[str]]:
    """The files of a checkpoint, each with the tensors an index promises there."""
    if (folder / _SINGLE).is_file():
        return {folder / _SINGLE: set()}
    index = folder / _INDEX
    if not index.is_file():
        pickled = sorted(file.name for file in folder.glob("*.bin"))
        reason = f"only {pickled[0]}, and pickled weights are never loaded" if pickled else "neither is there"
        raise CheckpointError(f"{folder}: expected {_SINGLE} or {_INDEX}; {reason}")
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: unreadable, or without a weight_map object ({error!r})") from error
    files: dict[Path, set[str]] = {}
    for name, entry in weight_map:
        files.setdefault(_inside(folder, name, entry, index), set()).add(name)
    return files


def _inside(folder: Path, name: str, entry: Any, index: Path) -> Path:
    """The file an index entry names. A plain name may be a symlink, as the Hub's cache makes them."""
    if not isinstance(entry, str) or "\0" in entry or Path(entry).is_absolute():
        raise CheckpointError(f"{name}: {entry!r} in {index} is no relative file name")
    file = folder / entry
    if Path(entry).name != entry and not file.resolve().is_relative_to(folder.resolve()):
        raise CheckpointError(f"{name}: {entry!r} in {index} lies outside of the folder")
    return file
