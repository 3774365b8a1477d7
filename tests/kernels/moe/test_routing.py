"""Routing and alignment, and both in one, against their definitions, on both backends."""

import math
from typing import Any

import pytest
import torch

from paged import InvalidInputError, Routing, moe_align_block_size, route_and_align, route_tokens
from paged.kernels.moe import definition
from paged.kernels.moe.moe_align_block_size import MoeAlignment
from paged.kernels.moe.route_and_align import MAX_FUSED_TOKENS
from paged.kernels.moe.routing import SCORINGS
from tests.backends import BACKENDS
from tests.kernels.moe import loops
from tests.pairwise import pairwise
from tests.tolerance import DTYPES, assert_close

pytestmark = pytest.mark.usefixtures("backend")
by_numba_too = pytest.mark.parametrize("backend", BACKENDS, indirect=True)


def assert_routed(logits: torch.Tensor, top_k: int, **options: Any) -> torch.Tensor:
    """The definition's weights and ids; returns the ids."""
    weights, ids = route_tokens(logits, top_k, **options)
    want_weights, want_ids = definition.route_tokens(logits, top_k, **options)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    assert torch.equal(ids, want_ids)
    assert_close(weights, want_weights)
    return want_ids.cpu()


@pairwise(
    sizes=[(5, 128, 8), (131, 8, 2), (3, 257, 16), (2, 512, 10), (3, 512, 16), (4, 60, 60), (3, 1, 1), (0, 8, 2)],
    renormalize=[True, False],
    scoring=SCORINGS,
)
def test_matches_definition(sizes: tuple[int, int, int], renormalize: bool, scoring: str, device: torch.device) -> None:
    num_tokens, num_experts, top_k = sizes
    logits = torch.randn(num_tokens, num_experts, device=device) * 3
    assert assert_routed(logits, top_k, renormalize=renormalize, scoring=scoring).shape == (num_tokens, top_k)


@by_numba_too
@pairwise(
    # DeepSeek-V3's; groups that are no power of two; groups of one; as many experts as the groups hold; one group.
    sizes=[(256, 8, 8, 4), (60, 6, 5, 3), (6, 3, 6, 4), (12, 6, 4, 2), (16, 2, 1, 1)],
    biased=[True, False],
    scoring=SCORINGS,
)
def test_groups_and_bias(sizes: tuple[int, ...], biased: bool, scoring: str, device: torch.device) -> None:
    """The bias is as large as the scores it is added to, so that it changes what is chosen."""
    num_experts, top_k, num_groups, topk_groups = sizes
    logits = torch.randn(9, num_experts, device=device)
    logits[4, 1] = math.nan
    options = {
        "scoring": scoring,
        "correction_bias": torch.rand(num_experts, device=device) if biased else None,
        "num_expert_groups": num_groups,
        "topk_groups": topk_groups,
        "routed_scaling_factor": 2.5,
        "num_shared_experts": 2,
    }
    ids = assert_routed(logits, top_k, **options)
    if biased:
        assert not torch.equal(ids, definition.route_tokens(logits, top_k, **options | {"correction_bias": None})[1])


@by_numba_too
@pytest.mark.parametrize(
    ("logits", "top_k", "options", "expected"),
    [
        ([1.0, 3.0, 1.0, 3.0, 1.0], 4, {}, [1, 3, 0, 2]),
        ([0.0, -0.0, 0.0, -0.0, 0.0], 4, {}, [0, 1, 2, 3]),
        ([0.0, 2.0, 2.0, 0.0, 1.0, 2.0], 2, {"num_expert_groups": 3, "topk_groups": 2}, [1, 2]),
        ([0.0, 2.0, 2.0, 0.0, 1.0, 2.0], 4, {"num_expert_groups": 3, "topk_groups": 2}, [1, 2, 0, 3]),
        ([30.0, 40.0, 20.0], 2, {"scoring": "sigmoid"}, [1, 0]),
    ],
)
def test_ties_go_to_the_smaller_index(
    logits: list[float], top_k: int, options: dict[str, Any], expected: list[int], device: torch.device
) -> None:
    """Of experts and of groups; sigmoid(30) and sigmoid(40) are both 1 in float32, yet 40 is larger."""
    assert route_tokens(torch.tensor([logits], device=device), top_k, **options)[1].tolist() == [expected]


def test_forbidden_experts(device: torch.device) -> None:
    """-inf is chosen last and weighs nothing."""
    weights, ids = route_tokens(torch.tensor([[-math.inf, 2.0, -math.inf, -math.inf]], device=device), 3)
    assert ids.tolist() == [[1, 0, 2]]
    assert weights.tolist() == [[1.0, 0.0, 0.0]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_16_bit_and_strided_logits(dtype: torch.dtype, device: torch.device) -> None:
    assert_routed((torch.randn(40, 6, device=device) * 2).to(dtype).T[::2], 4)


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("column", [0, 9])
def test_nan_row_routes_nowhere_alone(scoring: str, column: int, device: torch.device) -> None:
    logits = torch.randn(3, 10, device=device)
    logits[1, column] = math.nan
    assert assert_routed(logits, 2, scoring=scoring)[1].tolist() == [-1, -1]


def assert_exact(topk_ids: torch.Tensor, block_size: int, num_experts: int) -> None:
    aligned = moe_align_block_size(topk_ids, block_size, num_experts)
    assert_aligned(aligned, topk_ids, block_size, num_experts)


def assert_aligned(aligned: MoeAlignment, topk_ids: torch.Tensor, block_size: int, num_experts: int) -> None:
    """Every element of every result, the unused tails included, is what the definition says."""
    blocks, experts, padded = loops.moe_align_block_size(topk_ids, block_size, num_experts)
    sorted_token_ids, expert_ids, num_tokens_post_padded = aligned
    assert num_tokens_post_padded.tolist() == [padded]
    assert sorted_token_ids.dtype == expert_ids.dtype == num_tokens_post_padded.dtype == torch.int32
    assert sorted_token_ids.numel() == expert_ids.numel() * block_size
    entries = [entry for block in blocks for entry in block]
    assert sorted_token_ids.tolist() == entries + [topk_ids.numel()] * (sorted_token_ids.numel() - padded)
    assert expert_ids.tolist() == experts + [-1] * (expert_ids.numel() - len(experts))


def draw(num_tokens: int, top_k: int, num_experts: int, device: torch.device) -> torch.Tensor:
    return torch.randint(num_experts, (num_tokens, top_k), device=device, dtype=torch.int32)


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "block_size"),
    [
        *((0, 2, 4, 16), (1, 1, 257, 16), (1, 32, 257, 128), (3, 2, 8, 64), (3, 16, 40, 32)),
        # One chunk of entries, then several: a whole number of tiles, and not, and several tiles a chunk.
        *((256, 8, 20, 16), (256, 32, 9, 128), (2256, 1, 8, 16), (1100, 32, 5, 64)),
    ],
)
def test_alignment_matches_its_definition(
    num_tokens: int, top_k: int, num_experts: int, block_size: int, device: torch.device
) -> None:
    assert_exact(draw(num_tokens, top_k, num_experts, device), block_size, num_experts)


@pytest.mark.parametrize("block_size", [1, 24])
def test_ids_of_no_expert_appear_in_no_block(block_size: int, device: torch.device) -> None:
    topk_ids = torch.randint(-3, 40, (70, 3), device=device, dtype=torch.int32)
    assert (topk_ids < 0).any()
    assert (topk_ids >= 10).any()
    assert_exact(topk_ids, block_size, 10)
    assert_exact(torch.full((4, 2), -1, device=device, dtype=torch.int32), block_size, 10)


def test_alignment_by_an_expert_map(device: torch.device) -> None:
    """Experts of a rank, in an order of its own; ids outside of the map and experts elsewhere appear in no block."""
    expert_map = torch.tensor([2, -1, 0, -1, 1, 7], device=device, dtype=torch.int32)
    topk_ids = torch.randint(-2, 9, (90, 3), device=device, dtype=torch.int32)
    rows = torch.tensor([[expert_map[i] if 0 <= i < 6 else -1 for i in row] for row in topk_ids.tolist()])
    assert_aligned(moe_align_block_size(topk_ids, 16, 3, expert_map=expert_map), rows, 16, 3)


def test_the_worst_spread_fills_the_results(device: torch.device) -> None:
    """One entry for each of five experts, then block_size + 1 for each: no slot may be missing. Then all for one."""
    once = torch.arange(5, device=device, dtype=torch.int32)
    assert moe_align_block_size(once, 16, 100)[0].numel() == 5 * 16
    assert_exact(once, 16, 100)
    assert_exact(once.repeat(17), 16, 5)
    assert_exact(torch.full((2100, 2), 6, device=device, dtype=torch.int32), 16, 7)


def assert_routed_and_aligned(
    logits: torch.Tensor, routing: Routing, block_size: int, ticket: torch.Tensor | None = None
) -> None:
    weights, ids, aligned = route_and_align(logits, routing, block_size, ticket=ticket)
    want_weights, want_ids = definition.route_tokens(logits, **vars(routing))
    assert torch.equal(ids, want_ids)
    assert_close(weights, want_weights)
    assert_aligned(aligned, ids, block_size, logits.shape[1] + routing.num_shared_experts)


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"),
    # One program; several, the last of them half empty; several tiles of the table of ranks; too many tokens for one.
    [(1, 128, 8), (50, 128, 8), (90, 257, 2), (20, 512, 16), (MAX_FUSED_TOKENS + 1, 8, 2)],
)
def test_matches_both_operations(num_tokens: int, num_experts: int, top_k: int, device: torch.device) -> None:
    ticket = torch.zeros(1, dtype=torch.int32, device=device)
    for block_size in (16, 64):
        logits = torch.randn(num_tokens, num_experts, device=device)
        assert_routed_and_aligned(logits, Routing(top_k), block_size, ticket)
        assert ticket.item() == 0


def test_every_option_and_a_nan_row(device: torch.device) -> None:
    """The row that routes nowhere takes no slot, not even with the shared experts."""
    logits = torch.randn(70, 60, device=device)
    logits[66, 3] = math.nan
    bias = torch.rand(60, device=device)
    assert_routed_and_aligned(logits, Routing(6, False, "sigmoid", bias, 5, 3, 2.5, 2), 16)


def test_no_tokens(device: torch.device) -> None:
    weights, ids, aligned = route_and_align(torch.empty(0, 8, device=device), Routing(2), 16)
    assert (*weights.shape, *ids.shape, int(aligned.num_tokens_post_padded)) == (0, 2, 0, 2, 0)


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


def test_rejects_what_does_not_fit(device: torch.device) -> None:
    logits, bias = torch.randn(2, 4, device=device), torch.zeros(8, device=device)
    ids, ticket, routing = draw(4, 2, 8, device), bias[:1].int(), Routing(4)
    assert route_tokens(logits, 4)[1].shape == (2, 4)
    assert route_tokens(logits, 2, num_expert_groups=2, correction_bias=bias[:4])[1].shape == (2, 2)
    moe_align_block_size(ids, 1, 8, expert_map=bias.int())
    route_and_align(logits, routing, 16, ticket=ticket)
    for operation, given, options, message in (
        (route_tokens, (logits, 0), {}, "top_k: 0, expected 1 to 4"),
        (route_tokens, (logits, 3), {"num_expert_groups": 2}, "top_k: 3, expected 1 to 2, the experts of 1 groups"),
        (route_tokens, (logits, 1), {"num_expert_groups": 3}, "num_expert_groups: 3, expected a divisor of 4"),
        (route_tokens, (logits, 1), {"num_expert_groups": 2, "topk_groups": 3}, "topk_groups: 3, expected 1 to 2"),
        (route_tokens, (logits, 1), {"num_shared_experts": -1}, "num_shared_experts: -1"),
        (route_tokens, (logits, 2), {"correction_bias": bias}, "correction_bias: shape"),
        (route_tokens, (logits, 2), {"scoring": "tanh"}, "scoring: 'tanh', expected 'softmax' or"),
        (route_tokens, (logits[0], 2), {}, "router_logits: shape"),
        (moe_align_block_size, (ids.long(), 16, 8), {}, "topk_ids: dtype"),
        (moe_align_block_size, (ids, 0, 8), {}, "block_size, num_experts: 0, 8"),
        (moe_align_block_size, (ids, 16, 3), {"expert_map": bias.long()}, "expert_map: dtype"),
        (route_and_align, (logits, routing, 0), {}, "block_size, num_local_experts: 0, 4"),
        (route_and_align, (logits, routing, 16), {"ticket": ticket.long()}, "ticket: dtype"),
        (route_and_align, (logits, routing, 16), {"expert_map": ticket.long()}, "expert_map: dtype"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            operation(*given, **options)
