"""What a rank takes of memory while it loads its part: that part, and little beside it for a moment."""

from pathlib import Path
from typing import Any

import pytest
import torch

from paged.kernels.quantization.packing import FP8_BLOCK
from paged.models.loading import tensor_file
from paged.models.parallel.share import Part, Share
from paged.models.quantization import packed_weights
from tests.models.allocations import recorded
from tests.models.families import FAMILIES, PACKABLE, save_checkpoint
from tests.models.parallel.parts import load_part
from tests.models.quantization.checkpoints import write

PLAIN = ["llama", "phi3", "gpt_oss", "qwen3_moe", "minimax_m2"]
EIGHT_BIT = ["fp8 static", "int-quantized rows"]
# Those that are unpacked, but for MXFP4; where all codes at once take much, also in columns in an order of their own,
# which stand in no part.
MUCH = ["pack-quantized", "pack-quantized zeros, rows", "gptq", "gptq_v2 8 bits", "awq"]
ORDERED = ["gptq zeros, order", "pack-quantized zeros, order"]
LITTLE = ["pack-quantized 8 bits", "nvfp4-pack-quantized", "mixed-precision", "modelopt NVFP4"]
# Bytes of an unpacked code, see `packed_weights`, whose codes at once are made as few as there may be.
CODE_BYTES = 15


def _checkpoint(name: str, folder: Path) -> Path:
    if name in PLAIN:
        save_checkpoint(FAMILIES[name], folder)
        return folder
    save_checkpoint(PACKABLE["wide"], folder / "base")
    return write(name, folder / "base", folder).packed


def _is_little(folder: Path, share: Share, beside: int = 0) -> bool:
    """Whether tensors take no more than what it holds, one tensor that is read and the one before it."""
    with recorded() as allocations:
        network = load_part(folder, share)
    held = sum(parameter.nbytes for parameter in network.parameters())
    assert allocations.most >= held
    destinations = network.destinations().values()
    largest = max(destination.shape.numel() * destination.dtype.itemsize for destination in destinations)
    return allocations.most <= held + 2 * largest + beside


def _thorough_but(fast: set[str], names: list[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in fast else pytest.mark.thorough) for name in names]


@pytest.mark.parametrize("name", _thorough_but({"gpt_oss", "fp8 static"}, [*PLAIN, *EIGHT_BIT]))
def test_a_part_and_one_tensor(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "_PIECE_BYTES", 1)
    folder = _checkpoint(name, tmp_path)
    shares = [Share(1, 4), Share(1, 4, expert_parallel=True)]
    assert all(_is_little(folder, share) for share in shares)
    read = Part.read

    def read_all(part: Part, tensors: Any, tensor: str, destination: Any) -> torch.Tensor:
        whole = tensors.get_tensor(tensor).clone()
        own = read(part, tensors, tensor, destination)
        del whole
        return own

    monkeypatch.setattr(Part, "read", read_all)
    assert not _is_little(folder, shares[0])


@pytest.mark.parametrize(
    "name",
    _thorough_but({"pack-quantized zeros, rows", "gptq zeros, order", "modelopt NVFP4"}, [*MUCH, *LITTLE, *ORDERED]),
)
def test_codes_are_unpacked_a_few_at_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    share = Share() if name in ORDERED else Share(1, 2)
    folder = _checkpoint(name, tmp_path)
    few = CODE_BYTES * FP8_BLOCK * PACKABLE["wide"].intermediate_size // share.size
    assert name in LITTLE or not _is_little(folder, share, few)
    monkeypatch.setattr(packed_weights, "_MOST_CODES", 1)
    assert _is_little(folder, share, few)
