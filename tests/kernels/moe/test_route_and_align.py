"""route_and_align against the two operations that it joins, on both backends."""

from __future__ import annotations

import math

import pytest
import torch

from paged import InvalidInputError, Routing, route_and_align
from paged.kernels.moe import reference
from paged.kernels.moe.route_and_align import MAX_FUSED_TOKENS
from tests.kernels.moe.test_moe_align_block_size import assert_aligned
from tests.tolerance import assert_close


def assert_routed_and_aligned(
    logits: torch.Tensor, routing: Routing, block_size: int, ticket: torch.Tensor | None = None
) -> None:
    weights, ids, aligned = route_and_align(logits, routing, block_size, ticket=ticket)
    want_weights, want_ids = reference.route_tokens(logits, **vars(routing))
    assert torch.equal(ids.cpu(), want_ids)
    assert_close(weights, want_weights)
    assert_aligned(aligned, ids, block_size, logits.shape[1] + routing.num_shared_experts)
    assert aligned.block_size == block_size


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"),
    # One program; several, the last of them half empty; several tiles of the table of ranks; too many tokens for one.
    [(1, 128, 8), (50, 128, 8), (90, 257, 2), (40, 512, 10), (20, 512, 16), (MAX_FUSED_TOKENS + 1, 8, 2)],
)
def test_matches_both_operations(num_tokens: int, num_experts: int, top_k: int, device: torch.device) -> None:
    ticket = torch.zeros(1, dtype=torch.int32, device=device)
    for block_size in (16, 64):
        logits = torch.randn(num_tokens, num_experts, device=device)
        assert_routed_and_aligned(logits, Routing(top_k), block_size, ticket)
        assert ticket.item() == 0


@pytest.mark.usefixtures("backend")
def test_every_option_and_a_nan_row(device: torch.device) -> None:
    """The row that routes nowhere takes no slot, not even with the shared experts."""
    logits = torch.randn(70, 60, device=device)
    logits[66, 3] = math.nan
    bias = torch.rand(60, device=device)
    assert_routed_and_aligned(logits, Routing(6, False, "sigmoid", bias, 5, 3, 2.5, 2), 16)


@pytest.mark.usefixtures("backend")
def test_all_tokens_to_one_expert(device: torch.device) -> None:
    """Its blocks are filled in more steps than any balanced batch would take; all other experts have none."""
    logits = torch.zeros(100, 20, device=device)
    logits[:, 7] = 1.0
    assert_routed_and_aligned(logits, Routing(1), 16)


@pytest.mark.usefixtures("backend")
def test_experts_of_a_rank(device: torch.device) -> None:
    """The blocks of each expert here, whatever their order, hold its entries."""
    logits = torch.randn(40, 8, device=device)
    expert_map = torch.tensor([1, -1, 2, -1, -1, 0, -1, -1], dtype=torch.int32, device=device)
    _, ids, aligned = route_and_align(logits, Routing(3), 16, expert_map=expert_map, num_local_experts=3)
    found: dict[int, list[int]] = {}
    for block, row in zip(aligned.sorted_token_ids.view(-1, 16).tolist(), aligned.expert_ids.tolist(), strict=True):
        found.setdefault(row, []).extend(entry for entry in block if entry < ids.numel())
    chosen = ids.flatten().tolist()
    assert found.pop(-1, []) == []
    assert found == {
        row: [entry for entry, expert in enumerate(chosen) if expert == owner]
        for owner, row in ((5, 0), (0, 1), (2, 2))
    }
    assert int(aligned.num_tokens_post_padded) == 16 * sum(-(-len(entries) // 16) for entries in found.values())


@pytest.mark.usefixtures("backend")
def test_no_tokens(device: torch.device) -> None:
    weights, ids, aligned = route_and_align(torch.empty(0, 8, device=device), Routing(2), 16)
    assert weights.shape == ids.shape == (0, 2)
    assert int(aligned.num_tokens_post_padded) == 0


def test_rejects_what_does_not_fit(device: torch.device) -> None:
    logits = torch.randn(2, 4, device=device)
    ticket = torch.zeros(1, dtype=torch.int32, device=device)
    route_and_align(logits, Routing(4), 16, ticket=ticket)
    with pytest.raises(InvalidInputError, match="top_k: 5, expected 1 to 4"):
        route_and_align(logits, Routing(5), 16)
    with pytest.raises(InvalidInputError, match="block_size, num_local_experts: 0, 4"):
        route_and_align(logits, Routing(4), 0)
    with pytest.raises(InvalidInputError, match="ticket: dtype"):
        route_and_align(logits, Routing(4), 16, ticket=ticket.long())
    with pytest.raises(InvalidInputError, match="expert_map: dtype"):
        route_and_align(logits, Routing(4), 16, expert_map=ticket.long())
