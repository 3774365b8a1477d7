"""The weights of all experts' projections, the formats that they come in, and a call of the fused MoE."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paged.kernels.common.checks import (
    check_contiguous,
    check_device,
    check_dtype,
    check_last_dim_contiguous,
    check_shape,
    check_tensor,
)
from paged.kernels.common.errors import InvalidInputError, UnsupportedError

# Values of a token, and rows and columns of weights, that share a scale in 128 x 128 quantisation (DeepSeek-V3, 2024).
FP8_GROUP = 128
FORMATS = {torch.float8_e4m3fn: "e4m3", torch.int8: "int8", torch.uint8: "int4"}


@dataclass(frozen=True)
class ExpertLinear:
    """One of the two projections of all experts.

    w: [num_experts, out_features, in_features], or two values a byte in in_features / 2. bias: [num_experts,
    out_features], contiguous, or None. scale: what quantised weights are multiplied by, [num_experts], [num_experts,
    out_features] or [num_experts, out_features / group_n, in_features / group_k], float32, contiguous, or None.
    """

    w: torch.Tensor
    bias: torch.Tensor | None = None
    scale: torch.Tensor | None = None

    @property
    def format(self) -> str:
        """ "" for weights that are not quantised, "e4m3", "int8" or "int4"."""
        return "" if self.scale is None else FORMATS[self.w.dtype]

    @property
    def in_features(self) -> int:
        return self.w.shape[2] * (2 if self.format == "int4" else 1)

    @property
    def group(self) -> tuple[int, int]:
        """Rows and columns of the weights that share a scale."""
        assert self.scale is not None
        num_rows = self.w.shape[1]
        if self.scale.dim() < 3:
            return num_rows if self.scale.dim() == 1 else 1, self.in_features
        return (FP8_GROUP, FP8_GROUP) if self.format == "e4m3" else (1, self.in_features // self.scale.shape[2])


@dataclass(frozen=True)
class MoeCall:
    """Arguments of `kernels.moe.fused_moe.fused_moe`, checked and with their defaults filled in."""

    hidden_states: torch.Tensor
    gate_up: ExpertLinear
    down: ExpertLinear
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    expert_map: torch.Tensor | None
    out: torch.Tensor
    activation: str
    interleaved: bool

    @property
    def is_quantized(self) -> bool:
        return bool(self.gate_up.format or self.down.format)


def check_weights(
    name: str, linear: ExpertLinear, expected: tuple[int | str, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Raise unless a projection's weights have the expected shape, and its bias and scale fit them.

    Raises:
        InvalidInputError: a shape, dtype, device or stride does not fit.
        UnsupportedError: a group of columns is no multiple of 32, the shortest step of a matrix product.
    """
    w, bias, scale = linear.w, linear.bias, linear.scale
    check_dtype(name, w, *((dtype,) if scale is None else FORMATS))
    check_device(name, w, device)
    *rows, columns = expected
    if linear.format == "int4" and isinstance(columns, int):
        columns = columns // 2
    check_shape(name, w, (*rows, columns))
    check_last_dim_contiguous(name, w)
    if bias is not None:
        check_tensor(f"{name}_bias", bias, w.shape[:2], (dtype, torch.float32), device)
        check_contiguous(f"{name}_bias", bias)
    if scale is not None:
        _check_scale(f"{name}_scale", linear, scale)


def _check_scale(name: str, linear: ExpertLinear, scale: torch.Tensor) -> None:
    num_experts, num_rows, _ = linear.w.shape
    expected: tuple[int | str, ...] = (num_experts, num_rows)[: scale.dim()]
    if scale.dim() > 2:
        blocks = tuple(-(-size // FP8_GROUP) for size in (num_rows, linear.in_features))
        expected = (num_experts, *blocks) if linear.format == "e4m3" else (num_experts, num_rows, "groups")
    check_tensor(name, scale, expected, (torch.float32,), linear.w.device)
    check_contiguous(name, scale)
    if scale.dim() == 3 and linear.format != "e4m3":
        num_groups = scale.shape[2]
        if num_groups == 0 or linear.in_features % num_groups:
            raise InvalidInputError(f"{name}: {num_groups} groups, expected a divisor of {linear.in_features} columns")
        if linear.group[1] % 32:
            raise UnsupportedError(f"{name}: groups of {linear.group[1]} columns, expected a multiple of 32")
