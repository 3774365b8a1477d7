"""A reader with one fault each gives other logits, and the test of all formats sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from paged.kernels.quantization import repack
from paged.models.quantization import compressed_tensors, eight_bit, four_bit_floats, gptq
from paged.models.quantization.eight_bit import EightBit
from tests.models.quantization.checkpoints import Folders, assert_as_unpacked

pytestmark = pytest.mark.usefixtures("_fast")
Patch = Callable[[pytest.MonkeyPatch], None]


def _changed(owner: Any, name: str, change: Callable[..., Any]) -> Patch:
    """The function `name` with what it returns, or its arguments, changed: `change` gets it and them."""
    original = getattr(owner, name)
    return lambda patch: patch.setattr(owner, name, lambda *args, **named: change(original, *args, **named))


def _swapped(original: Any, words: torch.Tensor, num_bits: int) -> torch.Tensor:
    codes: torch.Tensor = original(words, num_bits)
    return codes.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


def _swapped_bytes(original: Any, name: str, packed: torch.Tensor) -> Any:
    return original(name, (packed << 4) | (packed >> 4))


def _neighbours_scale(original: Any, codes: Any, scale: torch.Tensor, *rest: Any) -> Any:
    return original(codes, scale.roll(1, 1), *rest)


def _neighbours_scale_of_floats(original: Any, weight: Any, scale: torch.Tensor, **rest: Any) -> Any:
    return original(weight, scale.view(torch.uint8).roll(1, 1).view(scale.dtype), **rest)


def _zeros_off_by_one(original: Any, codes: Any, scale: Any, zeros: torch.Tensor, *rest: Any) -> Any:
    return original(codes, scale, zeros + 1, *rest)


def _other_version(original: Any, *args: Any, format_version: int, **rest: Any) -> Any:
    return original(*args, format_version=3 - format_version, **rest)


def _other_groups(original: Any, *args: Any, weight_g_idx: torch.Tensor, **rest: Any) -> Any:
    return original(*args, weight_g_idx=weight_g_idx.roll(1), **rest)


def _transposed_blocks(original: Any, layout: EightBit, tensors: dict[str, torch.Tensor], columns: int) -> Any:
    scale = tensors[layout.scale_name]
    return original(layout, {**tensors, layout.scale_name: scale.T.reshape(scale.shape)}, columns)


def _other_input_scale(original: Any, *args: Any, input_scale: torch.Tensor, **rest: Any) -> Any:
    return original(*args, input_scale=input_scale * 3, **rest)


FAULTS: list[tuple[str, str, Patch]] = [
    ("swapped nibbles", "pack-quantized", _changed(repack, "_unpack", _swapped)),
    ("swapped nibbles", "gptq", _changed(repack, "_unpack", _swapped)),
    ("swapped nibbles", "awq", _changed(repack, "_unpack", _swapped)),
    ("swapped nibbles", "modelopt NVFP4", _changed(repack, "_e2m1_codes", _swapped_bytes)),
    ("swapped nibbles", "mxfp4-pack-quantized", _changed(repack, "_e2m1_codes", _swapped_bytes)),
    ("neighbour's scale", "pack-quantized", _changed(repack, "_from_codes", _neighbours_scale)),
    ("neighbour's scale", "awq", _changed(repack, "_from_codes", _neighbours_scale)),
    ("neighbour's scale", "nvfp4-pack-quantized", _changed(four_bit_floats, "from_nvfp4", _neighbours_scale_of_floats)),
    ("neighbour's scale", "mxfp4-pack-quantized", _changed(four_bit_floats, "from_mxfp4", _neighbours_scale_of_floats)),
    ("zeros off by one", "gptq_v2 8 bits", _changed(repack, "_from_codes", _zeros_off_by_one)),
    ("zeros off by one", "awq", _changed(repack, "_from_codes", _zeros_off_by_one)),
    ("zeros off by one", "pack-quantized zeros, order", _changed(repack, "_from_codes", _zeros_off_by_one)),
    ("the other version", "gptq zeros, order", _changed(gptq, "from_gptq", _other_version)),
    (
        "another order",
        "pack-quantized zeros, order",
        _changed(compressed_tensors, "from_compressed_tensors", _other_groups),
    ),
    ("transposed blocks", "fp8 blocks", _changed(EightBit, "pack", _transposed_blocks)),
    ("transposed blocks", "float-quantized blocks", _changed(EightBit, "pack", _transposed_blocks)),
    ("thrice the input's scale", "fp8 static", _changed(eight_bit, "QuantizedWeight", _other_input_scale)),
    ("thrice the input's scale", "int-quantized static", _changed(eight_bit, "QuantizedWeight", _other_input_scale)),
]


@pytest.mark.parametrize(
    ("folders", "fault"),
    [pytest.param(name, fault, id=f"{what}, {name}") for what, name, fault in FAULTS],
    indirect=["folders"],
)
def test_a_fault_is_seen(folders: Folders, fault: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="largest error"):
        assert_as_unpacked(folders)
