"""The gated delta rule of Gated DeltaNet: in chunks for prompts, token by token with a ring for decodes."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..core.checks import check_eps, check_is_tensor
from ..core.custom_ops import in_fields
from ..core.errors import InvalidInputError, as_float, as_int, shown
from ..core.operation import Run, by_definition, operation
from . import definition
from .launches import bind_scan
from .metadata import RecurrentBatch, RecurrentState, check_scan, check_weights, like_values


@operation(
    like_values,
    mutates=("state", "ring_k", "ring_u", "ring_g", "state_scale"),
    **in_fields(state=RecurrentState, batch=RecurrentBatch),
)
def gated_delta_rule(
    mixed: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor | None,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: RecurrentState,
    batch: RecurrentBatch,
    *,
    num_k_heads: int,
    beta_scale: float = 1.0,
    eps: float = 1e-6,
    lower_bound: float | None = None,
    erase_read: torch.Tensor | None = None,
    erase_write: torch.Tensor | None = None,
) -> Run[torch.Tensor]:
    """Apply the gated delta rule (Yang et al., 2024) to each value head: update S by k and v, then out = S q.

    S <- S exp(g); u = beta (v - S k); S <- S + u k^T. q and k are divided by sqrt(sum of squares + eps), q also by
    sqrt(K). g = -exp(A_log) softplus(a + dt_bias), or lower_bound sigmoid(exp(A_log) (a + dt_bias)), and beta =
    beta_scale sigmoid(b). Value head h uses key head h // (HV / HK). States, gates and sums are float32. Products of a
    scan take operands in the dtype of mixed.

    Each head has one g, or one for each channel of K (Kimi Team, 2025): the shape of a decides.

    With erase vectors (Peng et al., 2025, RWKV-7), S <- S exp(g) + (S erase_read) erase_write^T + v k^T: S is read
    before its decay, there is no beta, and q and k are used as they are.

    Args:
        mixed: [num_tokens, 2 HK K + HV V], q, k and v after the convolution, float32, float16 or bfloat16, last
            dimension contiguous.
        a: [num_tokens, HV], last dimension contiguous, or [num_tokens, HV, K], each token contiguous; any of the dtypes
            of mixed.
        b: [num_tokens, HV], any of the dtypes of mixed, last dimension contiguous; None with erase vectors.
        A_log: [HV], any of the dtypes of mixed.
        dt_bias: [HV], or [HV, K] if a has a channel dimension; any of the dtypes of mixed.
        state: slots that are read and written, see `kernels.recurrent.metadata`; its `conv` is not used. `ring_g` has a
            dimension of K if a has; with erase vectors, `ring_k` and `ring_u` have two entries a token.
        batch: the sequences of mixed. Its values are checked on a CPU.
        num_k_heads: HK, which divides HV.
        beta_scale: 2.0 allows negative eigenvalues (Grazzi et al., 2024).
        eps: added to the sums of squares; at least 0.
        lower_bound: smallest g, below 0; None for the gate by softplus, which has none.
        erase_read, erase_write: [num_tokens, HV, K], any of the dtypes of mixed, each token contiguous; both or none.
            They need a decay for each channel and HK = HV.

    Returns:
        [num_tokens, HV, V] in the dtype of mixed.

    Raises:
        InvalidInputError: a shape, dtype, device, stride or number does not fit.
        UnsupportedError: an argument requires a gradient.
    """
    num_k_heads, eps = as_int("num_k_heads", num_k_heads, 1), check_eps(eps)
    beta_scale = as_float("beta_scale", beta_scale, 0.0)
    if lower_bound is not None:
        lower_bound = as_float("lower_bound", lower_bound, high=0.0)
    check_is_tensor("a", a)
    gates, channel_gates, rank = _gates(a, b, erase_read, erase_write, num_k_heads)
    rings = check_scan(mixed, gates, state, batch, num_k_heads, channel_gates, rank)
    check_weights(mixed.device, a.shape[1:2], A_log=A_log)
    check_weights(mixed.device, a.shape[1:], dt_bias=dt_bias)

    numbers: dict[str, float | None] = {"beta_scale": beta_scale, "least": 0.0, "most": math.inf, "eps": eps}
    numbers |= {"lower_bound": lower_bound, "scale": rings.state.shape[-1] ** -0.5}
    bound = bind_scan(mixed, _pointers(a, b, erase_read, erase_write), rings, batch, numbers)
    if bound is None:
        options: dict[str, Any] = {"beta_scale": beta_scale, "eps": eps, "lower_bound": lower_bound}
        return by_definition(definition.gated_delta_rule, mixed.dtype, num_k_heads=num_k_heads, **options)

    def run(
        mixed: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor | None,
        A_log: torch.Tensor,
        dt_bias: torch.Tensor,
        state: RecurrentState,
        batch: RecurrentBatch,
        *,
        erase_read: torch.Tensor | None = None,
        erase_write: torch.Tensor | None = None,
        **_: object,
    ) -> torch.Tensor:
        weights = {"A_log_ptr": A_log, "dt_bias_ptr": dt_bias}
        return bound(mixed, state, batch, _pointers(a, b, erase_read, erase_write), weights)

    return run


def _gates(
    a: torch.Tensor,
    b: torch.Tensor | None,
    erase_read: torch.Tensor | None,
    erase_write: torch.Tensor | None,
    num_k_heads: int,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int]:
    """Return the gates of heads and of channels by name, as `check_scan` takes them, and the rank."""
    if (erase_read is None) != (erase_write is None):
        raise InvalidInputError("erase_read, erase_write: one of them, expected both or None")
    if (b is None) != (erase_read is not None):
        raise InvalidInputError(f"b: {shown(b)}, expected a tensor, or None with erase vectors")
    if erase_read is None or erase_write is None:
        assert b is not None
        if a.dim() == 3:
            return {"b": b}, {"a": a}, 1
        return {"a": a, "b": b}, {}, 1
    if a.dim() != 3:
        raise InvalidInputError(f"a: shape {list(a.shape)}, expected [num_tokens, HV, K] with erase vectors")
    if a.shape[1] != num_k_heads:
        raise InvalidInputError(f"num_k_heads: {num_k_heads}, expected {a.shape[1]}, all heads, with erase vectors")
    return {}, {"a": a, "erase_read": erase_read, "erase_write": erase_write}, 2


def _pointers(
    a: torch.Tensor, b: torch.Tensor | None, erase_read: torch.Tensor | None, erase_write: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Return the tensors of tokens by the kernels' names, without those that are None."""
    pointers = {"gate_ptr": a, "b_ptr": b, "erase_read_ptr": erase_read, "erase_write_ptr": erase_write}
    return {name: tensor for name, tensor in pointers.items() if tensor is not None}
