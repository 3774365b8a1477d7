"""The definition against loops in float64, and routing by infinite numbers on all backends."""

import itertools
import math
from typing import Any

import pytest
import torch

from paged import Routing, route_and_align, route_tokens
from paged.kernels.layers.activation import ACTIVATIONS
from paged.kernels.moe import definition
from paged.kernels.moe.routing import SCORINGS
from tests.backends import BACKENDS
from tests.kernels.moe import loops
from tests.kernels.moe.test_fused_moe import make_inputs, rounded_moe
from tests.tolerance import assert_close, assert_within

CPU = torch.device("cpu")
SPECIAL = (math.inf, -math.inf, math.nan)


def _some(numbers: torch.Tensor, share: float, values: tuple[float, ...], generator: torch.Generator) -> torch.Tensor:
    """Numbers, a share of which are replaced by one of the values."""
    chosen = torch.tensor(values)[torch.randint(len(values), numbers.shape, generator=generator)]
    return torch.where(torch.rand(numbers.shape, generator=generator) < share, chosen, numbers)


def routing_problem(seed: int) -> tuple[torch.Tensor, Routing]:
    """Logits and options of 6 tokens. Ties are common, and so are infinite numbers; NaN is rare."""
    generator = torch.Generator().manual_seed(seed)

    def choose(*values: Any) -> Any:
        return values[int(torch.randint(len(values), (), generator=generator))]

    num_groups, group_size = choose((1, 6), (2, 1), (3, 2), (4, 3), (4, 4), (6, 1))
    num_experts, topk_groups = num_groups * group_size, choose(*range(1, num_groups + 1))
    logits = (torch.randn(6, num_experts, generator=generator) * 4).round() / 2
    logits = _some(logits, choose(0.0, 0.3, 0.8), choose(SPECIAL[:2], SPECIAL[1:2]), generator)
    logits = _some(logits, choose(0.0, 0.0, 0.02), SPECIAL, generator)
    bias = None
    if choose(True, True, False):
        bias = torch.randint(-4, 5, (num_experts,), generator=generator) / 8
        bias = _some(bias, choose(0.0, 0.3, 0.8), choose(SPECIAL[:2], SPECIAL[1:2]), generator)
        bias = _some(bias, choose(0.0, 0.0, 0.0, 0.05), SPECIAL, generator)
    return logits, Routing(
        top_k=choose(*range(1, topk_groups * group_size + 1)),
        renormalize=choose(True, False),
        scoring=choose(*SCORINGS),
        correction_bias=bias,
        num_expert_groups=num_groups,
        topk_groups=topk_groups,
        routed_scaling_factor=choose(1.0, 2.5),
        num_shared_experts=choose(0, 2),
    )


@pytest.mark.parametrize("seed", range(200))
def test_sorts_are_the_rule(seed: int) -> None:
    logits, routing = routing_problem(seed)
    weights, ids = definition.route_tokens(logits, **vars(routing))
    want_weights, want_ids = loops.route_tokens(logits, routing)
    assert ids.tolist() == want_ids.tolist()
    assert_within(weights, want_weights, 1e-12)


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
@pytest.mark.usefixtures("backend")
def test_infinite_logits_and_biases(device: torch.device) -> None:
    """Every backend chooses by the same rule; two operations take the same experts."""
    for seed in range(60):
        logits, routing = routing_problem(seed)
        options = vars(routing)
        if routing.correction_bias is not None:
            options = options | {"correction_bias": routing.correction_bias.to(device)}
        want_weights, want_ids = loops.route_tokens(logits, routing)
        weights, ids = route_tokens(logits.to(device), **options)
        assert ids.tolist() == want_ids.tolist(), (seed, routing)
        assert_close(weights, want_weights)
        if seed % 10 == 0:
            _, ids, _ = route_and_align(logits.to(device), Routing(**options), 16)
            assert ids.tolist() == want_ids.tolist(), (seed, routing)


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("bias", "expected"),
    [
        ([0.9, -math.inf, 0.0, 0.0], [2, 3]),  # one expert is not two
        ([math.inf, -math.inf, 0.0, 0.0], [2, 3]),
        ([math.inf, 0.0, 0.0, 0.5], [0, 1]),
        ([-math.inf, -math.inf, 0.0, -math.inf], [0, 1]),  # the first of equal groups
    ],
)
def test_a_group_is_as_good_as_its_two_best(bias: list[float], expected: list[int], device: torch.device) -> None:
    options = {"scoring": "sigmoid", "num_expert_groups": 2, "topk_groups": 1}
    logits, correction_bias = torch.zeros(1, 4, device=device), torch.tensor(bias, device=device)
    assert route_tokens(logits, 2, correction_bias=correction_bias, **options)[1].tolist() == [expected]


@pytest.mark.parametrize("seed", range(40))
def test_alignment_is_the_rule(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_experts, block_size = 1 + seed % 7, (1, 3, 16)[seed % 3]
    topk_ids = torch.randint(-2, 9, (seed % 5, 3), generator=generator, dtype=torch.int32)
    expert_map = None
    if seed % 2:
        expert_map = torch.randint(-1, 8, (seed % 8,), generator=generator, dtype=torch.int32)
    aligned = definition.moe_align_block_size(topk_ids, block_size, num_experts, expert_map=expert_map)
    sorted_token_ids, expert_ids, num_padded = aligned
    blocks, experts, padded = loops.moe_align_block_size(topk_ids, block_size, num_experts, expert_map)
    assert num_padded.tolist() == [padded]
    entries = list(itertools.chain.from_iterable(blocks))
    assert sorted_token_ids.tolist() == entries + [topk_ids.numel()] * (len(sorted_token_ids) - padded)
    assert expert_ids.tolist() == experts + [-1] * (len(expert_ids) - len(experts))


@pytest.mark.parametrize("activation", [*ACTIVATIONS, "relu2"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_products_of_sorted_rows_are_the_sum_token_by_token(activation: str, interleaved: bool) -> None:
    """With experts elsewhere, whose entries count nothing, and a NaN weight, which is its row's alone."""
    x, w1, w2, weights, ids = make_inputs(CPU, num_tokens=9, num_experts=6, top_k=3, dtype=torch.float64)
    if activation == "relu2":
        w1 = w1[:, :40]
    options: dict[str, Any] = {"activation": activation, "interleaved": interleaved}
    options |= {"w1_bias": torch.randn(6, w1.shape[1]), "w2_bias": torch.randn(6, 48)}
    expert_map = torch.tensor([2, -1, 0, 1, 9, 3], dtype=torch.int32)
    experts = torch.tensor([loops.local_expert(i, 6, expert_map) for i in ids.flatten().tolist()]).view(ids.shape)
    here = weights * (experts >= 0)
    want = rounded_moe((x, w1, w2, here, experts.clamp(min=0)), "numba", options)
    weights[4, 1] = math.nan
    want[4] = math.nan
    out = definition.fused_moe(x, w1, w2, weights, ids, **options, expert_map=expert_map)
    assert_within(out, want, 1e-10)
