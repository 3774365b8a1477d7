"""The gated delta rule of Gated DeltaNet, in chunks for prompts and token by token beside a ring for decodes."""

from __future__ import annotations

import math

import torch

from ..common.checks import check_eps
from ..common.operation import Run, in_fields, operation
from ..common.scalars import as_float, as_int
from .launches import bind_scan
from .metadata import RecurrentBatch, RecurrentState, check_scan, check_weights, like_values
from .torch_ops import scan as torch_op


@operation(
    like_values,
    mutates=("state", "ring_k", "ring_u", "ring_g"),
    **in_fields(state=RecurrentState, batch=RecurrentBatch),
)
def gated_delta_rule(
    mixed: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: RecurrentState,
    batch: RecurrentBatch,
    *,
    num_k_heads: int,
    beta_scale: float = 1.0,
    eps: float = 1e-6,
) -> Run[torch.Tensor]:
    """Apply the gated delta rule (Yang et al., 2024) to each value head: out = S q, after S has taken in k and v.

    S <- exp(g) S; u = beta (v - S k); S <- S + u k^T, with q and k divided by sqrt(sum of squares + eps), q also by
    sqrt(K), g = -exp(A_log) softplus(a + dt_bias) and beta = beta_scale sigmoid(b). Value head h has key head
    h // (HV / HK). States, gates and sums are float32. Products of a scan take operands of the dtype of mixed.

    Args:
        mixed: [num_tokens, 2 HK K + HV V], q, k and v after the convolution, float32, float16 or bfloat16, last
            dimension contiguous.
        a, b: [num_tokens, HV], any of these dtypes, last dimension contiguous.
        A_log, dt_bias: [HV], any of these dtypes.
        state: slots that are read and written, see `kernels.recurrent.metadata`; its `conv` is left alone.
        batch: the sequences of mixed. Its values are checked on a CPU.
        num_k_heads: HK, which divides HV.
        beta_scale: 2.0 allows negative eigenvalues (Grazzi et al., 2024).
        eps: added to the sums of squares; at least 0.

    Returns:
        [num_tokens, HV, V] in the dtype of mixed.

    Raises:
        InvalidInputError: a shape, dtype, device, stride or number does not fit.
        UnsupportedError: an argument requires a gradient.
    """
    num_k_heads, eps = as_int("num_k_heads", num_k_heads, 1), check_eps(eps)
    beta_scale = as_float("beta_scale", beta_scale, 0.0)
    rings = check_scan(mixed, {"a": a, "b": b}, state, batch, num_k_heads)
    check_weights(mixed.device, (a.shape[1],), A_log=A_log, dt_bias=dt_bias)

    numbers = {"beta_scale": beta_scale, "least": 0.0, "most": math.inf, "eps": eps}
    numbers["scale"] = rings.state.shape[-1] ** -0.5
    bound = bind_scan(mixed, {"gate_ptr": a, "b_ptr": b}, rings, batch, numbers)

    def run(
        mixed: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        A_log: torch.Tensor,
        dt_bias: torch.Tensor,
        state: RecurrentState,
        batch: RecurrentBatch,
        **_: object,
    ) -> torch.Tensor:
        if bound is not None:
            gates, weights = {"gate_ptr": a, "b_ptr": b}, {"A_log_ptr": A_log, "dt_bias_ptr": dt_bias}
            return bound(mixed, state, batch, gates, weights)
        options = {"beta_scale": beta_scale, "eps": eps}
        return torch_op.gated_delta_rule(mixed, a, b, A_log, dt_bias, state.rings(), batch, **options)

    return run
