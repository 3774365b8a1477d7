"""RMS normalisation with a gate, before or after it."""

from __future__ import annotations

import torch

from paged.kernels.common.checks import FLOAT_DTYPES, check_eps, check_tensor
from paged.kernels.common.errors import InvalidInputError
from paged.kernels.common.operation import Arguments, Run, like_the_first, operation
from paged.kernels.common.scalars import as_bool, as_int, shown
from paged.kernels.recurrent.torch_ops import gated_rms_norm as torch_op

ACTIVATIONS = ("silu", "sigmoid")


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

    rms(x) = x / sqrt(mean(x^2) + eps) over groups of a token's elements. Computed in float32 and rounded once.

    Args:
        x: [num_tokens, heads, V], float32, float16 or bfloat16, any strides.
        z: like x, in its dtype, any strides.
        weight: [V], one for all heads, or [heads * V]; any of these dtypes.
        eps: added to the mean square; at least 0.
        norm_first: whether the gate is applied after the norm.
        group_size: elements a mean is of, which divides heads * V; None for V.
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

    def run(given: Arguments) -> torch.Tensor:
        x, z, weight, *_ = given.values()
        return torch_op.gated_rms_norm(
            x, z, weight, eps=eps, norm_first=norm_first, group_size=group, activation=activation
        )

    return run
