"""rms_norm and fused_add_rms_norm at the hidden sizes of the supported models."""

from __future__ import annotations

import triton

from paged.bench.compilation.case import CompileCase
from paged.kernels.common.launch import num_warps
from paged.kernels.layers.rms_norm import _rms_norm_kernel


def cases() -> list[CompileCase]:
    """Hidden sizes 64 to 8,192, with and without the residual; at that of Gemma-3-1B its float32 weights."""
    found = []
    for hidden_size, weight in ((64, "bf16"), (1152, "fp32"), (2048, "bf16"), (8192, "bf16")):
        for fused in (False, True):
            signature = dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "out_ptr"), "*bf16")
            signature |= {
                "weight_ptr": f"*{weight}",
                "eps": "fp32",
                "stride_x_row": "i32",
                "stride_residual_row": "i32",
                "stride_out_row": "i32",
            }
            block_size = triton.next_power_of_2(hidden_size)
            constexprs: dict[str, int | None] = {"HIDDEN_SIZE": hidden_size, "BLOCK_SIZE": block_size}
            if not fused:
                signature["residual_ptr"] = "constexpr"
                constexprs["residual_ptr"] = None
            signature |= {"HIDDEN_SIZE": "constexpr", "BLOCK_SIZE": "constexpr"}
            found.append(
                CompileCase(
                    name=f"{'fused_add_' if fused else ''}rms_norm hidden={hidden_size} {weight} weights",
                    kernel=_rms_norm_kernel,
                    signature=signature,
                    constexprs=constexprs,
                    num_warps=num_warps(block_size),
                    divisible_by_16=("stride_x_row", "stride_residual_row", "stride_out_row"),
                )
            )
    return found
