"""moe_align_block_size against its definition, exactly, on both backends."""

from __future__ import annotations

import pytest
import torch

from paged import InvalidInputError, moe_align_block_size
from paged.kernels.moe import reference
from paged.kernels.moe.alignment import MoeAlignment


def assert_exact(topk_ids: torch.Tensor, block_size: int, num_experts: int) -> None:
    aligned = moe_align_block_size(topk_ids, block_size, num_experts)
    assert_aligned(aligned, topk_ids, block_size, num_experts)


def assert_aligned(aligned: MoeAlignment, topk_ids: torch.Tensor, block_size: int, num_experts: int) -> None:
    """Every element of every result, the unused tails included, is what the definition says."""
    blocks, experts, padded = reference.moe_align_block_size(topk_ids, block_size, num_experts)
    sorted_token_ids, expert_ids, num_tokens_post_padded = aligned
    assert num_tokens_post_padded.tolist() == [padded]
    assert sorted_token_ids.dtype == expert_ids.dtype == num_tokens_post_padded.dtype == torch.int32
    assert sorted_token_ids.numel() == expert_ids.numel() * block_size
    entries = [entry for block in blocks for entry in block]
    assert sorted_token_ids.tolist() == entries + [topk_ids.numel()] * (sorted_token_ids.numel() - padded)
    assert expert_ids.tolist() == experts + [-1] * (expert_ids.numel() - len(experts))


def draw(num_tokens: int, top_k: int, num_experts: int, device: torch.device) -> torch.Tensor:
    return torch.randint(num_experts, (num_tokens, top_k), device=device, dtype=torch.int32)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "block_size"),
    [
        (1, 1, 257, 16),
        (1, 32, 257, 128),
        (3, 8, 257, 16),
        (3, 2, 8, 64),
        (40, 1, 257, 64),
        (3, 16, 160, 32),
        # One chunk of entries, then several: a whole number of tiles, and not.
        (256, 8, 20, 16),
        (256, 32, 9, 128),
        (2256, 1, 8, 16),
        (2256, 32, 5, 64),
    ],
)
def test_matches_definition(
    num_tokens: int, top_k: int, num_experts: int, block_size: int, device: torch.device
) -> None:
    assert_exact(draw(num_tokens, top_k, num_experts, device), block_size, num_experts)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("block_size", [1, 24])
def test_ids_of_no_expert_appear_in_no_block(block_size: int, device: torch.device) -> None:
    topk_ids = torch.randint(-3, 40, (70, 3), device=device, dtype=torch.int32)
    assert (topk_ids < 0).any()
    assert (topk_ids >= 10).any()
    assert_exact(topk_ids, block_size, 10)
    assert_exact(torch.full((4, 2), -1, device=device, dtype=torch.int32), block_size, 10)


@pytest.mark.usefixtures("backend")
def test_expert_map(device: torch.device) -> None:
    """Experts of a rank, in an order of its own; ids outside of the map and experts elsewhere appear in no block."""
    expert_map = torch.tensor([2, -1, 0, -1, 1, 7], device=device, dtype=torch.int32)
    topk_ids = torch.randint(-2, 9, (90, 3), device=device, dtype=torch.int32)
    rows = torch.tensor([[expert_map[i] if 0 <= i < 6 else -1 for i in row] for row in topk_ids.tolist()])
    assert_aligned(moe_align_block_size(topk_ids, 16, 3, expert_map=expert_map), rows, 16, 3)
    with pytest.raises(InvalidInputError, match="expert_map: dtype"):
        moe_align_block_size(topk_ids, 16, 3, expert_map=expert_map.long())
    with pytest.raises(InvalidInputError, match="expert_map: strides"):
        moe_align_block_size(topk_ids, 16, 3, expert_map=expert_map[::2])


@pytest.mark.usefixtures("backend")
def test_all_entries_to_one_expert(device: torch.device) -> None:
    assert_exact(torch.full((2100, 2), 6, device=device, dtype=torch.int32), 16, 7)


@pytest.mark.usefixtures("backend")
def test_the_worst_spread_fills_the_results(device: torch.device) -> None:
    """One entry for each of five experts, then block_size + 1 for each: no slot may be missing."""
    once = torch.arange(5, device=device, dtype=torch.int32)
    assert moe_align_block_size(once, 16, 100)[0].numel() == 5 * 16
    assert_exact(once, 16, 100)
    assert_exact(once.repeat(17), 16, 5)


@pytest.mark.usefixtures("backend")
def test_no_tokens(device: torch.device) -> None:
    assert_exact(torch.empty(0, 2, device=device, dtype=torch.int32), 16, 4)


def test_rejects_what_does_not_fit(device: torch.device) -> None:
    topk_ids = draw(4, 2, 8, device)
    moe_align_block_size(topk_ids, 1, 8)
    with pytest.raises(InvalidInputError, match="topk_ids: dtype"):
        moe_align_block_size(topk_ids.long(), 16, 8)
    with pytest.raises(InvalidInputError, match="topk_ids: strides"):
        moe_align_block_size(topk_ids.T, 16, 8)
    with pytest.raises(InvalidInputError, match="block_size, num_experts: 0, 8"):
        moe_align_block_size(topk_ids, 0, 8)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="minutes in the interpreter")
@pytest.mark.parametrize("num_tokens", [1, 3, 256, 2256, 4096])
@pytest.mark.parametrize("num_experts", [32, 160, 256, 257])
@pytest.mark.parametrize("top_k", [1, 2, 16, 32])
def test_the_peers_matrix(num_tokens: int, num_experts: int, top_k: int, device: torch.device) -> None:
    topk_ids = draw(num_tokens, top_k, num_experts, device)
    for block_size in (16, 32, 64, 128):
        assert_exact(topk_ids, block_size, num_experts)
