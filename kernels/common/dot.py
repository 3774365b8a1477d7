"""The one matrix product that all kernels use, and the order in which programs take its blocks."""

from __future__ import annotations

from .compat import tl, triton


@triton.jit
def locate_block(program, num_blocks_m, num_blocks_n, GROUP_M: tl.constexpr):
    """The block of rows and of columns of a program: GROUP_M blocks of rows take a column before the next."""
    first_m = program // (GROUP_M * num_blocks_n) * GROUP_M
    group_size = min(num_blocks_m - first_m, GROUP_M)
    in_group = program % (GROUP_M * num_blocks_n)
    return first_m + in_group % group_size, in_group // group_size


@triton.jit
def dot(a, b, acc):
    """acc + a @ b, accumulated in float32; float32 operands are multiplied as such, never as tf32."""
    return tl.dot(a, b, acc, input_precision="ieee")
