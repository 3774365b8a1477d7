"""route_tokens against float64, on both backends."""

from __future__ import annotations

import math

import pytest
import torch

from paged import InvalidInputError, route_tokens
from paged.kernels.moe import reference
from tests.tolerance import GPU_DTYPES, assert_close


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"),
    [(5, 128, 8), (131, 8, 2), (3, 257, 16), (2, 512, 10), (3, 512, 16), (4, 60, 60), (3, 1, 1)],
)
def test_matches_reference(
    num_tokens: int, num_experts: int, top_k: int, renormalize: bool, scoring: str, device: torch.device
) -> None:
    logits = torch.randn(num_tokens, num_experts, device=device) * 3
    weights, ids = route_tokens(logits, top_k, renormalize=renormalize, scoring=scoring)
    want_weights, want_ids = reference.route_tokens(logits, top_k, renormalize=renormalize, scoring=scoring)
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int32
    assert torch.equal(ids.cpu(), want_ids)
    assert_close(weights, want_weights)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    ("num_experts", "top_k", "num_expert_groups", "topk_groups"),
    # DeepSeek-V3's; groups that are no power of two; groups of one; as many experts as the groups hold; one group.
    [(256, 8, 8, 4), (60, 6, 5, 3), (6, 3, 6, 4), (12, 6, 4, 2), (16, 2, 1, 1)],
)
def test_groups_and_bias(
    num_experts: int,
    top_k: int,
    num_expert_groups: int,
    topk_groups: int,
    biased: bool,
    scoring: str,
    device: torch.device,
) -> None:
    """The bias is as large as the scores it is added to, so that it changes what is chosen."""
    logits = torch.randn(9, num_experts, device=device)
    logits[4, 1] = math.nan
    options = {
        "scoring": scoring,
        "correction_bias": torch.rand(num_experts, device=device) if biased else None,
        "num_expert_groups": num_expert_groups,
        "topk_groups": topk_groups,
        "routed_scaling_factor": 2.5,
        "num_shared_experts": 2,
    }
    weights, ids = route_tokens(logits, top_k, **options)
    want_weights, want_ids = reference.route_tokens(logits, top_k, **options)
    assert torch.equal(ids.cpu(), want_ids)
    assert_close(weights, want_weights)
    if biased:
        unbiased = reference.route_tokens(logits, top_k, **options | {"correction_bias": None})[1]
        assert not torch.equal(want_ids, unbiased)


@pytest.mark.usefixtures("backend")
def test_ties_between_groups_go_to_the_first(device: torch.device) -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 0.0, 1.0, 2.0]], device=device)
    assert route_tokens(logits, 2, num_expert_groups=3, topk_groups=2)[1].tolist() == [[1, 2]]
    assert route_tokens(logits, 4, num_expert_groups=3, topk_groups=2)[1].tolist() == [[1, 2, 0, 3]]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", GPU_DTYPES)
def test_16_bit_and_strided_logits(dtype: torch.dtype, device: torch.device) -> None:
    logits = (torch.randn(40, 6, device=device) * 2).to(dtype).T[::2]
    weights, ids = route_tokens(logits, 4)
    want_weights, want_ids = reference.route_tokens(logits, 4)
    assert torch.equal(ids.cpu(), want_ids)
    assert_close(weights, want_weights)


@pytest.mark.usefixtures("backend")
def test_ties_go_to_the_smaller_index(device: torch.device) -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 3.0, 1.0], [0.0, -0.0, 0.0, -0.0, 0.0]], device=device)
    assert route_tokens(logits, 4)[1].tolist() == [[1, 3, 0, 2], [0, 1, 2, 3]]


@pytest.mark.usefixtures("backend")
def test_forbidden_experts_and_scores_that_round_alike(device: torch.device) -> None:
    """-inf is chosen last and weighs nothing; sigmoid(30) and sigmoid(40) are both 1 in float32, yet 40 is larger."""
    forbidden = torch.tensor([[-math.inf, 2.0, -math.inf, -math.inf]], device=device)
    weights, ids = route_tokens(forbidden, 3)
    assert ids.tolist() == [[1, 0, 2]]
    assert weights.tolist() == [[1.0, 0.0, 0.0]]
    saturated = torch.tensor([[30.0, 40.0, 20.0]], device=device)
    assert route_tokens(saturated, 2, scoring="sigmoid")[1].tolist() == [[1, 0]]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("column", [0, 9])
def test_nan_row_routes_nowhere_alone(scoring: str, column: int, device: torch.device) -> None:
    logits = torch.randn(3, 10, device=device)
    logits[1, column] = math.nan
    weights, ids = route_tokens(logits, 2, scoring=scoring)
    want_weights, want_ids = reference.route_tokens(logits, 2, scoring=scoring)
    assert ids[1].tolist() == [-1, -1]
    assert torch.equal(ids.cpu(), want_ids)
    assert_close(weights, want_weights)


@pytest.mark.usefixtures("backend")
def test_no_tokens(device: torch.device) -> None:
    weights, ids = route_tokens(torch.empty(0, 8, device=device), 2)
    assert weights.shape == ids.shape == (0, 2)


def test_rejects_what_does_not_fit(device: torch.device) -> None:
    logits = torch.randn(2, 4, device=device)
    assert route_tokens(logits, 4)[1].shape == (2, 4)
    for top_k in (0, 5):
        with pytest.raises(InvalidInputError, match=rf"top_k: {top_k}, expected 1 to 4"):
            route_tokens(logits, top_k)
    assert route_tokens(logits, 2, num_expert_groups=2)[1].shape == (2, 2)
    with pytest.raises(InvalidInputError, match="top_k: 3, expected 1 to 2, the experts of 1 groups"):
        route_tokens(logits, 3, num_expert_groups=2)
    for groups in (0, 3):
        with pytest.raises(InvalidInputError, match=f"num_expert_groups: {groups}, expected a divisor of 4"):
            route_tokens(logits, 1, num_expert_groups=groups)
    for kept in (0, 3):
        with pytest.raises(InvalidInputError, match=f"topk_groups: {kept}, expected 1 to 2"):
            route_tokens(logits, 1, num_expert_groups=2, topk_groups=kept)
    with pytest.raises(InvalidInputError, match="num_shared_experts: -1"):
        route_tokens(logits, 1, num_shared_experts=-1)
    bias = torch.zeros(8, device=device)
    assert route_tokens(logits, 2, correction_bias=bias[:4])[1].shape == (2, 2)
    with pytest.raises(InvalidInputError, match="correction_bias: shape"):
        route_tokens(logits, 2, correction_bias=bias)
    with pytest.raises(InvalidInputError, match="correction_bias: strides"):
        route_tokens(logits, 2, correction_bias=bias[::2])
    with pytest.raises(InvalidInputError, match="scoring: 'tanh', expected 'softmax' or 'sigmoid'"):
        route_tokens(logits, 2, scoring="tanh")
    with pytest.raises(InvalidInputError, match="router_logits: shape"):
        route_tokens(logits[0], 2)
    with pytest.raises(InvalidInputError, match="router_logits: dtype"):
        route_tokens(logits.double(), 2)
