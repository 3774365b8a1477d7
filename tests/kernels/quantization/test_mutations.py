"""Copies of the kernels with one fault each must turn the checks red."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import paged.kernels.common.packed.decode
import paged.kernels.common.packed.product
import paged.kernels.quantization.gemm
import paged.kernels.quantization.gemm_kernel
import paged.kernels.quantization.partials
import paged.kernels.quantization.quantize_rows
from tests.kernels.faulty import planted
from tests.kernels.quantization.problem import Problem

MODULES = {
    "decode": paged.kernels.common.packed.decode,
    "product": paged.kernels.common.packed.product,
    "gemm_kernel": paged.kernels.quantization.gemm_kernel,
    "partials": paged.kernels.quantization.partials,
    "quantize_rows": paged.kernels.quantization.quantize_rows,
}
# Fault -> the file, text of it, and what the faulty copy has in its place.
MUTATIONS = {
    "no fault": ("gemm_kernel", "", ""),
    "nibbles are swapped": ("decode", "tl.join(low, high)", "tl.join(high, low)"),
    "the next run's nibble": ("decode", "(words >> 4 * RUN) & 0x", "(words >> 4 * (3 - RUN)) & 0x"),
    "the sign is lost": ("decode", "& -0x7FFF8000", "& 0"),
    "the neighbour's scale": ("product", "stride_scale_group, step + 1,", "stride_scale_group, step + 2,"),
    "the first group's scale for all runs": ("product", "(first + RUN) // GROUP_K", "first // GROUP_K"),
    "the first half's scale for a whole run": ("product", "groups + per_run", "groups"),
    "the zero point is one off": ("decode", "zero = zero_point.to(half) + ", "zero = zero_point.to(half) + 1 + "),
    "the neighbour's zero point": ("product", "zeros[run if BY_RUN else 0]", "next_zeros[run if BY_RUN else 0]"),
    "the int8 zero point is added": ("decode", "values.to(dtype) - zero", "values.to(dtype) + zero"),
    "the grid of blocks is transposed": (
        "gemm_kernel",
        "scale_ptr + scale_rows.to(tl.int64) * stride_scale_row",
        "scale_ptr + scale_rows.to(tl.int64) * stride_scale_group",
    ),
    "another row's activation scale": (
        "gemm_kernel",
        "x_scale_ptr + x_rows * num_x_groups",
        "x_scale_ptr + x_rows * 0",
    ),
    "a step is dropped": (
        "product",
        "for step in range(first_step, end_step)",
        "for step in range(first_step, end_step - 1)",
    ),
    "a split is dropped": (
        "partials",
        "for split in tl.static_range(NUM_SPLITS):",
        "for split in tl.static_range(1, NUM_SPLITS):",
    ),
    "no bias": ("partials", "if bias_ptr is not None:", "if False:"),
    "no scale for all": ("partials", "acc *= tl.load(tensor_scale_ptr)", "acc *= 1.0"),
    "activations are cut off": ("quantize_rows", "round_to_int8(x)", "x.to(tl.int8)"),
    "activations beyond the largest code": ("quantize_rows", "largest / LARGEST", "largest / (LARGEST + 64)"),
}
PROBLEMS = (
    ("int4 g128 zeros", {"size": (20, 512)}),
    ("int4 g32", {"size": (20, 256), "dtype": torch.float16}),
    ("int8 channel zeros", {"size": (20, 256)}),
    ("mxfp4", {"size": (20, 256)}),
    ("nvfp4", {"size": (20, 256), "biased": True}),
    ("e4m3 block", {"size": (300, 640)}),
    ("int8 channel", {"size": (20, 256), "biased": True}),
)


def _first_failure(device: torch.device) -> str | None:
    for name, sizes in PROBLEMS:
        try:
            Problem.make(device, name, **sizes).check()  # type: ignore[arg-type]
        except AssertionError:
            return name
    return None


@pytest.mark.parametrize("fault", MUTATIONS)
def test_checks_see_the_fault(fault: str, tmp_path: Path, device: torch.device) -> None:
    name, *change = MUTATIONS[fault]
    with planted([MODULES[name]], [*MODULES.values(), paged.kernels.quantization.gemm], tmp_path, *change):
        failed = _first_failure(device)
    assert (failed is None) == (fault == "no fault"), failed
