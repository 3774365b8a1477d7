"""Faults of the kernel for Hadamard transforms that the bounds must see."""

from pathlib import Path

import pytest
import torch

import paged.kernels.cache.ordered_heads
from paged.bench.cards.cards import CARDS
from tests.kernels.cache.test_qk_norm_rope_and_cache import BLOCK_SIZE, NUM_BLOCKS, draw_signs, make_inputs
from tests.kernels.faulty import exceeds_no_bound_twice, planted, turns_red

# fault -> (text of the kernel, what the faulty copy has instead)
MUTATIONS = {
    "no fault": ("", ""),
    "the sign of a neighbour": ("signs_ptr + dims", "signs_ptr + (dims ^ 1)"),
    "queries are not transformed": ("q_weight_ptr, cos_sin_ptr, signs_ptr,", "q_weight_ptr, cos_sin_ptr, None,"),
    "a stage is missing": ("tl.static_range(STAGES)", "tl.static_range(STAGES - 1)"),
    "differences before sums": ("tl.join(a + b, a - b)", "tl.join(a - b, a + b)"),
    "the transform is not orthogonal": ('"HADAMARD_SCALE": size**-0.5', '"HADAMARD_SCALE": 1.0'),
    "the partner of another pair": ("dims // 2, dims ^ 1,", "dims // 2, dims,"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("fault", MUTATIONS)
def test_bounds_see_the_fault_of_a_transform(fault: str, tmp_path: Path, device: torch.device) -> None:
    inputs = make_inputs((5, 3, 80, 80, 48, True), torch.float32, device)
    inputs |= {"hadamard_signs": draw_signs(80, device), "interleaved": fault == "the partner of another pair"}
    inputs["k_cache"], inputs["v_cache"] = torch.zeros(2, NUM_BLOCKS, BLOCK_SIZE, 3, 80, device=device)
    with planted([paged.kernels.cache.ordered_heads], [], tmp_path, *MUTATIONS[fault]):
        is_red = turns_red(exceeds_no_bound_twice, CARDS["qk_norm_rope_and_cache"], inputs)
        assert is_red == bool(MUTATIONS[fault][0])
