"""rms_norm and fused_add_rms_norm at the hidden sizes of the supported models."""

from __future__ import annotations

from paged.bench.compile import CompileCase
from paged.kernels.rms_norm import _rms_norm_kernel, num_warps


def cases() -> list[CompileCase]:
    """Hidden sizes 64 to 8,192, with and without the residual."""
    found = []
    for hidden_size in (64, 2048, 8192):
        for fused in (False, True):
            signature = dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "out_ptr"), "*bf16")
            signature |= {"eps": "fp32", "stride_x_row": "i32", "stride_residual_row": "i32", "stride_out_row": "i32"}
            constexprs: dict[str, int | None] = {"HIDDEN_SIZE": hidden_size, "BLOCK_SIZE": hidden_size}
            if not fused:
                signature["residual_ptr"] = "constexpr"
                constexprs["residual_ptr"] = None
            signature |= {"HIDDEN_SIZE": "constexpr", "BLOCK_SIZE": "constexpr"}
            found.append(
                CompileCase(
                    name=f"{'fused_add_' if fused else ''}rms_norm hidden={hidden_size}",
                    kernel=_rms_norm_kernel,
                    signature=signature,
                    constexprs=constexprs,
                    num_warps=num_warps(hidden_size),
                    divisible_by_16=("stride_x_row", "stride_residual_row", "stride_out_row"),
                )
            )
    return found
