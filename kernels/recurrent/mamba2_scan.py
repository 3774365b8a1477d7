"""The scan of Mamba-2, with the slots and kernels of the gated delta rule."""

from __future__ import annotations

import math

import torch

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
def mamba2_scan(
    mixed: torch.Tensor,
    dt: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    D: torch.Tensor,
    state: RecurrentState,
    batch: RecurrentBatch,
    *,
    num_groups: int,
    dt_limits: tuple[float, float] | None = None,
) -> Run[torch.Tensor]:
    """Apply the scan of Mamba-2 (Dao and Gu, 2024) to each head: update S by B and x, then out = S C + D x.

    S <- exp(dt A) S + (dt x) B^T, with A = -exp(A_log) and dt = softplus(dt + dt_bias), clamped to dt_limits. Head h
    uses B and C of group h // (HV / num_groups). States, gates and sums are float32. Products of a scan take operands
    in the dtype of mixed.

    Args:
        mixed: [num_tokens, HV V + 2 num_groups K], x, B and C after the convolution, float32, float16 or bfloat16, last
            dimension contiguous.
        dt: [num_tokens, HV], any of the dtypes of mixed, last dimension contiguous.
        A_log, dt_bias, D: [HV], any of the dtypes of mixed.
        state: slots that are read and written, see `kernels.recurrent.metadata`, with HK = num_groups, k = B and u = dt
            x; its `conv` is not used.
        batch: the sequences of mixed. Its values are checked on a CPU.
        num_groups: divides HV.
        dt_limits: smallest and largest dt, which may be infinite; None for no limits.

    Returns:
        [num_tokens, HV, V] in the dtype of mixed.

    Raises:
        InvalidInputError: a shape, dtype, device, stride or number does not fit.
        UnsupportedError: an argument requires a gradient.
    """
    num_groups = as_int("num_groups", num_groups, 1)
    dt_min, dt_max = 0.0, math.inf
    try:
        if dt_limits is not None:
            dt_min, dt_max = dt_limits
    except (TypeError, ValueError):
        raise InvalidInputError(f"dt_limits: {shown(dt_limits)}, expected two numbers") from None
    dt_min = as_float("dt_limits[0]", dt_min, 0.0)
    dt_max = as_float("dt_limits[1]", dt_max, dt_min, math.inf)
    rings = check_scan(mixed, {"dt": dt}, state, batch, num_groups)
    check_weights(mixed.device, (dt.shape[1],), A_log=A_log, dt_bias=dt_bias, D=D)

    numbers = {"beta_scale": 0.0, "least": dt_min, "most": dt_max, "lower_bound": None, "eps": 0.0, "scale": 1.0}
    bound = bind_scan(mixed, {"gate_ptr": dt}, rings, batch, numbers, values_first=True)
    if bound is None:
        return by_definition(definition.mamba2_scan, mixed.dtype, num_groups=num_groups, dt_limits=(dt_min, dt_max))

    def run(
        mixed: torch.Tensor,
        dt: torch.Tensor,
        A_log: torch.Tensor,
        dt_bias: torch.Tensor,
        D: torch.Tensor,
        state: RecurrentState,
        batch: RecurrentBatch,
        **_: object,
    ) -> torch.Tensor:
        weights = {"A_log_ptr": A_log, "dt_bias_ptr": dt_bias, "D_ptr": D}
        return bound(mixed, state, batch, {"gate_ptr": dt}, weights)

    return run
