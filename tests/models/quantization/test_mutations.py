"""A reader with one fault each gives other logits, and the test of all formats sees it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from paged.kernels.quantization import repack
from paged.models.quantization import layouts
from paged.models.quantization.layouts import EightBit
from tests.models.edits import Tensors
from tests.models.quantization.checkpoints import Folders, assert_as_unpacked

Patch = Callable[[pytest.MonkeyPatch], None]


def _changed(owner: Any, name: str, change: Callable[..., Any]) -> Patch:
    """The function `name` with what it returns, or its arguments, changed: `change` gets it and them."""
    original = getattr(owner, name)
    return lambda patch: patch.setattr(owner, name, lambda *args, **named: change(original, *args, **named))


def _transposed_blocks(original: Any, layout: EightBit, tensors: Tensors, columns: int) -> Any:
    scale = tensors[layout.scale_name]
    return original(layout, {**tensors, layout.scale_name: scale.T.reshape(scale.shape)}, columns)


def _with(**changes: Callable[[torch.Tensor], Any]) -> Callable[..., Any]:
    """Named arguments become other ones."""
    return lambda original, *args, **named: original(
        *args, **{name: changes[name](value) if name in changes else value for name, value in named.items()}
    )


SWAPPED = _changed(repack, "_unpack", lambda read, *args: read(*args).unflatten(-1, (-1, 2)).flip(-1).flatten(-2))
SWAPPED_BYTES = _changed(repack, "_e2m1_codes", lambda read, name, codes: read(name, (codes << 4) | (codes >> 4)))
NEIGHBOUR = _changed(repack, "_from_codes", lambda make, codes, scale, *rest: make(codes, scale.roll(1, 1), *rest))
ZEROS = _changed(repack, "_from_codes", lambda make, codes, scale, zeros, *rest: make(codes, scale, zeros + 1, *rest))
NVFP4, MXFP4 = (
    _changed(
        layouts,
        name,
        lambda make, codes, scale, **rest: make(codes, scale.view(torch.uint8).roll(1, 1).view(scale.dtype), **rest),
    )
    for name in ("from_nvfp4", "from_mxfp4")
)
VERSION = _changed(layouts, "from_gptq", _with(format_version=lambda version: 3 - version))
ORDER = _changed(layouts, "from_compressed_tensors", _with(weight_g_idx=lambda groups: groups.roll(1)))
BLOCKS = _changed(EightBit, "pack", _transposed_blocks)
INPUTS = _changed(layouts, "QuantizedWeight", _with(input_scale=lambda scale: scale * 3))
FAULTS: list[tuple[str, Patch, list[str]]] = [
    ("swapped nibbles", SWAPPED, ["pack-quantized", "gptq", "awq"]),
    ("swapped nibbles", SWAPPED_BYTES, ["modelopt NVFP4", "mxfp4-pack-quantized"]),
    ("neighbour's scale", NEIGHBOUR, ["pack-quantized", "awq"]),
    ("neighbour's scale", NVFP4, ["nvfp4-pack-quantized"]),
    ("neighbour's scale", MXFP4, ["mxfp4-pack-quantized"]),
    ("zeros off by one", ZEROS, ["gptq_v2 8 bits", "awq", "pack-quantized zeros, order"]),
    ("the other version", VERSION, ["gptq zeros, order"]),
    ("another order", ORDER, ["pack-quantized zeros, order"]),
    ("transposed blocks", BLOCKS, ["fp8 blocks", "float-quantized blocks"]),
    ("thrice the input's scale", INPUTS, ["fp8 static", "int-quantized static"]),
]


@pytest.mark.parametrize(
    ("folders", "fault"),
    [pytest.param(name, fault, id=f"{what}, {name}") for what, fault, names in FAULTS for name in names],
    indirect=["folders"],
)
def test_a_fault_is_seen(folders: Folders, fault: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="largest error"):
        assert_as_unpacked(folders)
