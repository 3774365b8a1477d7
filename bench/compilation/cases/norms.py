"""rms_norm and fused_add_rms_norm at the hidden sizes of the supported models."""

from __future__ import annotations

import triton

from paged.bench.compilation.case import CompileCase, kernel_case
from paged.kernels.common.launch import num_warps
from paged.kernels.layers.rms_norm import _rms_norm_kernel


def cases() -> list[CompileCase]:
    """Hidden sizes 64 to 8,192, with and without the residual; at that of Gemma-3-1B its float32 weights."""
    found = []
    for hidden_size, weight in ((64, "bf16"), (1152, "fp32"), (2048, "bf16"), (8192, "bf16")):
        block_size = triton.next_power_of_2(hidden_size)
        sizes = {"HIDDEN_SIZE": hidden_size, "BLOCK_SIZE": block_size}
        kinds = {"weight_ptr": f"*{weight}", "eps": "fp32"}
        for name, constexprs in (("rms_norm", {**sizes, "residual_ptr": None}), ("fused_add_rms_norm", sizes)):
            name = f"{name} hidden={hidden_size} {weight} weights"
            strides = ("stride_x_row", "stride_residual_row", "stride_out_row")
            warps = num_warps(block_size)
            found.append(kernel_case(name, _rms_norm_kernel, constexprs, kinds, aligned=strides, num_warps=warps))
    return found
