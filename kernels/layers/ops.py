"""Norms, rotation and activations as custom ops."""

from __future__ import annotations

from typing import Any

import torch

from paged.kernels.common.custom_ops import define, like_the_first, ops, writes_only

__all__ = ["ops"]

_RMS_NORM = "paged.kernels.layers.rms_norm"
_SILU_AND_MUL = "paged.kernels.layers.silu_and_mul"

define("rms_norm", _RMS_NORM, "Tensor x, Tensor weight, float eps=1e-06", "Tensor")(like_the_first)
define("rms_norm_out", _RMS_NORM, "Tensor x, Tensor weight, Tensor(a!) out, float eps=1e-06", mutates=("out",))(
    writes_only
)
define(
    "fused_add_rms_norm",
    _RMS_NORM,
    "Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps=1e-06",
    mutates=("x", "residual"),
)(writes_only)
define(
    "rotary_embedding",
    "paged.kernels.layers.rotary_embedding",
    "Tensor positions, Tensor(a!) query, Tensor(b!)? key, Tensor cos_sin_cache, bool interleaved=False",
    mutates=("query", "key"),
)(writes_only)


@define("silu_and_mul", _SILU_AND_MUL, "Tensor x, str activation='silu'", "Tensor")
def _silu_and_mul(x: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    return torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)


define("silu_and_mul_out", _SILU_AND_MUL, "Tensor x, Tensor(a!) out, str activation='silu'", mutates=("out",))(
    writes_only
)
