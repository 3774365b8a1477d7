"""The short causal convolution before a recurrent layer's scan, with the inputs before a step in a slot."""

from __future__ import annotations

import torch

from paged.kernels.common.checks import FLOAT_DTYPES, check_last_dim_contiguous, check_tensor
from paged.kernels.common.errors import InvalidInputError
from paged.kernels.common.operation import Arguments, Run, in_fields, like_the_first, operation
from paged.kernels.common.scalars import shown
from paged.kernels.recurrent.metadata import RecurrentBatch, RecurrentState, check_step, check_weights
from paged.kernels.recurrent.torch_ops import causal_conv1d as torch_op


@operation(like_the_first, mutates=("conv",), **in_fields(state=RecurrentState, batch=RecurrentBatch))
def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: RecurrentState,
    batch: RecurrentBatch,
    *,
    activation: str | None = "silu",
) -> Run[torch.Tensor]:
    """Convolve each channel of each sequence with its own W taps: out[t] = sum_j weight[:, j] x[t - W + 1 + j] + bias.

    Inputs before the step come from `state.conv` of the read slot, and are 0 for a sequence without one. The step's
    inputs go to the written slot, see `kernels.recurrent.metadata`. Computed in float32 and rounded once.

    Args:
        x: [num_tokens, channels], float32, float16 or bfloat16, last dimension contiguous.
        weight: [channels, W], any of these dtypes; the last tap is the token's own.
        bias: [channels] or None.
        state: of which `conv` is read and written, in the dtype of x.
        batch: the sequences of x. Its values are checked on a CPU.
        activation: "silu" or None.

    Returns:
        Like x, contiguous.

    Raises:
        InvalidInputError: a shape, dtype, device, stride or number does not fit.
        UnsupportedError: an argument requires a gradient.
    """
    check_step(state, batch, x)
    check_tensor("x", x, ("num_tokens", "channels"), FLOAT_DTYPES)
    check_last_dim_contiguous("x", x)
    check_tensor("weight", weight, (x.shape[1], "W"), FLOAT_DTYPES, x.device)
    check_weights(x.device, (x.shape[1],), bias=bias)
    if activation not in ("silu", None):
        raise InvalidInputError(f"activation: {shown(activation)}, expected 'silu' or None")
    batch.check(x.shape[0], state.conv.shape[0], state.check_conv(x, weight.shape[1]))

    def run(given: Arguments) -> torch.Tensor:
        x, weight, bias, state, batch, _ = given.values()
        return torch_op.causal_conv1d(x, weight, bias, state.conv, batch, activation)

    return run
