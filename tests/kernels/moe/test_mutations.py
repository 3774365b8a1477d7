"""Copies of the kernel with one fault each in how it reads quantised weights must turn the checks red."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import paged.kernels.common.packed.decode
import paged.kernels.moe.gemm
import paged.kernels.moe.gemm_kernel
from paged import fused_moe
from paged.kernels.moe import reference
from tests.kernels.faulty import planted
from tests.kernels.moe.test_fused_moe_quantized import make_quantized
from tests.tolerance import assert_close

MODULES = {"decode": paged.kernels.common.packed.decode, "gemm_kernel": paged.kernels.moe.gemm_kernel}
# Fault -> the file, text of it, and what the faulty copy has in its place.
MUTATIONS = {
    "no fault": ("gemm_kernel", "", ""),
    "the first expert's scales": ("gemm_kernel", "expert * stride_scale_expert", "0 * stride_scale_expert"),
    "the first expert's zero points": ("gemm_kernel", "expert * stride_zeros_expert", "0 * stride_zeros_expert"),
    "the first expert's scale of all": ("gemm_kernel", "expert * stride_tensor_scale", "0 * stride_tensor_scale"),
    "the first row's scales": ("gemm_kernel", "groups_n * stride_scale_row", "groups_n * 0"),
    "the first row's zero points": ("gemm_kernel", "groups_n * stride_zeros_row", "groups_n * 0"),
    "the first group's scale": ("gemm_kernel", "start // GROUP_K * stride_scale_group", "0 * stride_scale_group"),
    "the first group's zero point": ("gemm_kernel", "start // GROUP_K * stride_zeros_group", "0 * stride_zeros_group"),
    "the columns behind the last whole step": ("gemm_kernel", "(K + BLOCK_K - 1) // BLOCK_K", "K // BLOCK_K"),
    "the other half of a byte": (
        "decode",
        "tl.join(values & 15, (values >> 4)",
        "tl.join((values >> 4) & 15, (values)",
    ),
    "8 is never subtracted": ("decode", "tl.full((1,), 8, tl.int8)", "tl.full((1,), 0, tl.int8)"),
}
LAYOUTS = ("nvfp4", "int4 words zeros", "int4 group zeros", "int4 group")


def _first_failure(device: torch.device) -> str | None:
    for layout in LAYOUTS:
        torch.manual_seed(0)
        sizes = {"hidden_size": 192, "intermediate_size": 96, "num_experts": 2, "top_k": 1}
        inputs, options = make_quantized(device, layout, 3, torch.float32, **sizes)
        try:
            assert_close(fused_moe(*inputs, **options), reference.fused_moe(*inputs, **options))
        except AssertionError:
            return layout
    return None


@pytest.mark.parametrize("fault", MUTATIONS)
def test_checks_see_the_fault(fault: str, tmp_path: Path, device: torch.device) -> None:
    name, *change = MUTATIONS[fault]
    users = [paged.kernels.moe.gemm_kernel, paged.kernels.moe.gemm]
    with planted([MODULES[name]], users, tmp_path, *change):
        failed = _first_failure(device)
    assert (failed is None) == (fault == "no fault"), failed
