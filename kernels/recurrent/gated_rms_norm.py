"""RMS normalisation with a gate, before or after it."""

from __future__ import annotations

import torch

from ..core.checks import FLOAT_DTYPES, check_eps, check_tensor
from ..core.compat import tl, triton
from ..core.device import takes_numba, use_triton
from ..core.errors import InvalidInputError, as_bool, as_int, shown
from ..core.launch import Compute, Launch, nothing, num_warps, strides, wait_for_inputs
from ..core.operation import Run, by_definition, like_the_first, operation
from . import definition
from .row_functions import silu

ACTIVATIONS = ("silu", "sigmoid")


# Fewest elements of a program. Groups with fewer elements share a program.
TILE_SIZE = 1024


@triton.jit(do_not_specialize=["num_groups"])
def _gated_rms_norm_kernel(
    x_ptr,  # [num_tokens, HEADS, V]
    z_ptr,  # [num_tokens, HEADS, V]
    weight_ptr,  # [WEIGHT_SIZE]
    out_ptr,  # [num_tokens, HEADS, V], contiguous
    num_groups,
    eps,
    stride_x_token,
    stride_x_head,
    stride_x_dim,
    stride_z_token,
    stride_z_head,
    stride_z_dim,
    HEADS: tl.constexpr,
    V: tl.constexpr,
    WEIGHT_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    SILU: tl.constexpr,  # else the sigmoid
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Normalise BLOCK_GROUPS groups a program. Token i has groups from i HEADS V / GROUP on."""
    wait_for_inputs()
    groups = tl.program_id(0).to(tl.int64) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    offs = tl.arange(0, BLOCK_SIZE)
    mask = (groups < num_groups)[:, None] & (offs < GROUP)[None, :]
    tokens = (groups // (HEADS * V // GROUP))[:, None]
    places = ((groups % (HEADS * V // GROUP)) * GROUP)[:, None] + offs[None, :]
    heads, dims = places // V, places % V
    x_ptrs = x_ptr + tokens * stride_x_token + heads * stride_x_head + dims * stride_x_dim
    z_ptrs = z_ptr + tokens * stride_z_token + heads * stride_z_head + dims * stride_z_dim
    x = tl.load(x_ptrs, mask, other=0.0).to(tl.float32)
    z = tl.load(z_ptrs, mask, other=0.0).to(tl.float32)
    gate = silu(z) if SILU else 1.0 / (1.0 + tl.exp(-z))
    if not NORM_FIRST:
        x *= gate
    x /= tl.sqrt(tl.sum(x * x, axis=1) / GROUP + eps)[:, None]
    x *= tl.load(weight_ptr + places % WEIGHT_SIZE, mask, other=0.0).to(tl.float32)
    if NORM_FIRST:
        x *= gate
    tl.store(out_ptr + tokens * (HEADS * V) + places, x.to(out_ptr.dtype.element_ty), mask)


def norm_tile(group: int) -> dict[str, int]:
    """Return the number of groups of a program, and their padded size."""
    size = triton.next_power_of_2(group)
    return {"BLOCK_GROUPS": max(TILE_SIZE // size, 1), "BLOCK_SIZE": size}


@operation(like_the_first)
def gated_rms_norm(
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    norm_first: bool,
    group_size: int | None = None,
    activation: str = "silu",
) -> Run[torch.Tensor]:
    """Return weight * rms(x) * act(z) if norm_first (Gated DeltaNet), else weight * rms(x * act(z)) (Mamba-2).

    rms(x) = x / sqrt(mean(x^2) + eps) over groups of a token's elements. The result is computed in float32 and rounded
    once.

    Args:
        x: [num_tokens, heads, V], float32, float16 or bfloat16, any strides.
        z: like x, in its dtype, any strides.
        weight: [V], shared by all heads, or [heads * V]; any of the dtypes of x.
        eps: added to the mean square; at least 0.
        norm_first: whether the gate is applied after the norm.
        group_size: number of elements that share a mean, which divides heads * V; None for V.
        activation: "silu" or "sigmoid".

    Returns:
        Like x, contiguous.

    Raises:
        InvalidInputError: a shape, dtype, device or number does not fit.
        UnsupportedError: an argument requires a gradient.
    """
    eps, norm_first = check_eps(eps), as_bool("norm_first", norm_first)
    check_tensor("x", x, ("num_tokens", "heads", "V"), FLOAT_DTYPES)
    check_tensor("z", z, x.shape, (x.dtype,), x.device)
    _, heads, size = x.shape
    check_tensor("weight", weight, ("size",), FLOAT_DTYPES, x.device)
    if weight.numel() not in (size, heads * size):
        raise InvalidInputError(f"weight: shape {list(weight.shape)}, expected [{size}] or [{heads * size}]")
    group = size if group_size is None else as_int("group_size", group_size, 1)
    if heads * size % max(group, 1):
        raise InvalidInputError(f"group_size: {group}, expected a divisor of {heads * size}")
    if activation not in ACTIVATIONS:
        raise InvalidInputError(f"activation: {shown(activation)}, expected 'silu' or 'sigmoid'")
    is_silu = activation == "silu"
    if use_triton(x):
        return _run(_launch(x, z, weight, group, {"NORM_FIRST": norm_first, "SILU": is_silu}, eps))
    if takes_numba(x, z, weights=(weight,)) and x.numel():
        from ..cpu.recurrent import gated_rms_norm as numba_norm

        launch = numba_norm.launch_for(x, z, weight, group, eps, norm_first=norm_first, has_silu=is_silu)
        if launch is not None:
            return _run(launch)
    return by_definition(definition.gated_rms_norm, x.dtype, group_size=group)


def _launch(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, group: int, flags: dict[str, bool], eps: float
) -> Compute:
    tile, num_groups = norm_tile(group), x.numel() // group
    arguments = {
        "num_groups": num_groups,
        "eps": eps,
        **strides("token head dim", x=x, z=z),
        "HEADS": x.shape[1],
        "V": x.shape[2],
        "WEIGHT_SIZE": weight.numel(),
        "GROUP": group,
        **flags,
        **tile,
    }
    grid = (triton.cdiv(num_groups, tile["BLOCK_GROUPS"]),)
    warps = num_warps(tile["BLOCK_GROUPS"] * tile["BLOCK_SIZE"])
    return Launch(_gated_rms_norm_kernel, grid, arguments, num_warps=warps) if x.numel() else nothing


def _run(compute: Compute) -> Run[torch.Tensor]:
    def run(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        out = like_the_first(x)
        compute({"x_ptr": x, "z_ptr": z, "weight_ptr": weight.contiguous(), "out_ptr": out})
        return out

    return run
