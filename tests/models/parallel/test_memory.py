"""What a rank takes of memory while it loads its part: that part, and little beside it for a moment."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from paged.kernels.quantization.weight import FP8_BLOCK
from paged.models.families.llama import Llama
from paged.models.network_loader import load_network
from paged.models.parallel.ranks import Ranks
from paged.models.parallel.share import Part, Share
from paged.models.quantization import packed_weights
from paged.models.registry import read_model_config
from tests.models.families import FAMILIES, save_checkpoint
from tests.models.quantization.checkpoints import CONFIG, write

PLAIN = ["llama", "phi3", "gpt_oss", "qwen3_moe", "minimax_m2"]
EIGHT_BIT = ["fp8 static", "int-quantized rows"]
FOUR_BIT = ["pack-quantized", "gptq", "awq"]
# Bytes of an unpacked code, see `packed_weights`, whose codes at once are made as few as there may be.
CODE_BYTES = 15
WIDE = type(CONFIG).from_dict(CONFIG.to_dict() | {"intermediate_size": 1024})


def _checkpoint(name: str, folder: Path) -> Path:
    if name in PLAIN:
        save_checkpoint(FAMILIES[name], folder)
        return folder
    save_checkpoint(WIDE, folder / "base")
    return write(name, folder / "base", folder).packed


def _load(folder: Path, share: Share) -> tuple[int, Llama]:
    """Bytes that tensors have at the most, without the file's own pages, which are the system's; and the network."""
    network_class, config = read_model_config(folder)
    options: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu"), "has_fp8_cache": False}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        network = load_network(network_class, config, folder, ranks=Ranks(share), **options)
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    mapped = (folder / "model.safetensors").stat().st_size
    assert mapped in [event.nbytes() for event in events]
    return max(accumulate(one.nbytes() for one in sorted(events, key=lambda one: one.start_ns()))) - mapped, network


def _is_little(folder: Path, share: Share, beside: int = 0) -> bool:
    """Whether it takes no more than what it holds, one tensor that is read and the one before it."""
    peak, network = _load(folder, share)
    held = sum(parameter.nbytes for parameter in network.parameters())
    assert peak >= held
    largest = max(slot.shape.numel() * slot.dtype.itemsize for slot in network.weight_slots().values())
    return peak <= held + 2 * largest + beside


@pytest.mark.parametrize("name", [*PLAIN, *EIGHT_BIT])
def test_a_part_and_one_tensor(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _checkpoint(name, tmp_path)
    shares = [Share(1, 4), Share(1, 4, expert_parallel=True)]
    assert all(_is_little(folder, share) for share in shares)
    read = Part.read

    def read_all(part: Part, tensors: Any, tensor: str, slot: Any) -> torch.Tensor:
        whole = tensors.get_tensor(tensor).clone()
        own = read(part, tensors, tensor, slot)
        del whole
        return own

    monkeypatch.setattr(Part, "read", read_all)
    assert not _is_little(folder, shares[0])


@pytest.mark.parametrize("name", FOUR_BIT)
def test_codes_are_unpacked_a_few_at_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, share = _checkpoint(name, tmp_path), Share(1, 2)
    few = CODE_BYTES * FP8_BLOCK * WIDE.intermediate_size // 2
    assert not _is_little(folder, share, few)
    monkeypatch.setattr(packed_weights, "_MOST_CODES", 1)
    assert _is_little(folder, share, few)
