"""Weights of all experts' projections, their formats, and the arguments of a fused MoE call."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..core.checks import (
    FLOAT_DTYPES,
    check_contiguous,
    check_device,
    check_dtype,
    check_is_tensor,
    check_last_dim_contiguous,
    check_shape,
    check_tensor,
)
from ..core.errors import InvalidInputError
from ..layers.activation import PLAIN_ACTIVATIONS
from ..quantization.packing import check_scales, format_of, group_of, num_words

_QUANTIZED = (torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int32)


class ExpertLinear(NamedTuple):
    """One of the two projections of all experts. Quantised weights are (code - zeros) * scale * tensor_scale.

    Attributes:
        w: [num_experts, out_features, in_features]; or in_features / 2 bytes of two 4-bit codes; or 16 *
            ceil(in_features / 128) int32 words of `pack_codes`.
        bias: [num_experts, out_features], contiguous, or None.
        scale, zeros, tensor_scale: see `fused_moe`.
    """

    w: torch.Tensor
    bias: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    tensor_scale: torch.Tensor | None = None

    @property
    def format(self) -> str:
        """Format of the codes, "e4m3", "int8", "int4", "mxfp4" or "nvfp4"; "" for plain weights."""
        return "" if self.scale is None else format_of(self.w, self.scale)

    @property
    def is_packed(self) -> bool:
        """Whether each word of `w` holds eight codes."""
        return self.scale is not None and self.w.dtype == torch.int32

    @property
    def columns(self) -> int:
        """in_features; for words, it includes the columns that fill the last words."""
        codes = 1 if self.scale is None else {torch.uint8: 2, torch.int32: 8}.get(self.w.dtype, 1)
        return self.w.shape[2] * codes

    def options(self, name: str) -> dict[str, torch.Tensor | None]:
        """Return keywords of `fused_moe` for all fields except `w`; name is "w1" or "w2"."""
        return {f"{name}_{field}": tensor for field, tensor in self._asdict().items() if field != "w"}

    def group(self, in_features: int) -> tuple[int, int]:
        """Return the numbers of rows and columns that share a scale; 0 for all of them."""
        assert self.scale is not None
        return group_of(self.format, self.scale.shape[1:], in_features)


class MoeCall(NamedTuple):
    """Arguments of `kernels.moe.fused_moe.fused_moe`, checked, with defaults filled in."""

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
    def intermediate_size(self) -> int:
        if self.activation in PLAIN_ACTIVATIONS:
            return self.gate_up.w.shape[1]
        return self.gate_up.w.shape[1] // 2


def check_operands(
    hidden_states: torch.Tensor,
    gate_up: ExpertLinear,
    down: ExpertLinear,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    is_gated: bool,
) -> None:
    """Raise unless the arguments of `fused_moe` fit together.

    Raises:
        InvalidInputError, UnsupportedError: see `fused_moe`.
    """
    for name, tensor in (("hidden_states", hidden_states), ("w1", gate_up.w), ("w2", down.w)):
        check_is_tensor(name, tensor)
    device, dtype = hidden_states.device, hidden_states.dtype
    check_tensor("hidden_states", hidden_states, ("num_tokens", "hidden_size"), FLOAT_DTYPES, device)
    num_tokens, hidden_size = hidden_states.shape
    rows, factor = "intermediate_size", 1
    if is_gated:
        rows, factor = "2 * intermediate_size", 2
    check_shape("w1", gate_up.w, ("num_experts", rows, "hidden_size"))
    if down.is_packed:  # words do not say how many columns they hold
        intermediate_size = gate_up.w.shape[1] // factor
        _check_weights("w2", down, ("num_experts", hidden_size, intermediate_size), dtype, device)
    else:
        _check_weights("w2", down, ("num_experts", hidden_size, "intermediate_size"), dtype, device)
        intermediate_size = down.columns
    _check_weights("w1", gate_up, (len(down.w), factor * intermediate_size, hidden_size), dtype, device)
    if gate_up.is_packed != down.is_packed:
        raise InvalidInputError(f"w1, w2: {gate_up.w.dtype} and {down.w.dtype}, expected int32 of both or of none")
    check_tensor("topk_ids", topk_ids, (num_tokens, "top_k"), (torch.int32,), device)
    check_tensor("topk_weights", topk_weights, topk_ids.shape, (torch.float32,), device)
    check_last_dim_contiguous("hidden_states", hidden_states)
    check_contiguous("topk_weights", topk_weights)
    check_contiguous("topk_ids", topk_ids)


def _check_weights(
    name: str, linear: ExpertLinear, expected: tuple[int | str, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Check a projection's weights against the expected shape, and its bias, scales and zero points against them."""
    w, bias = linear.w, linear.bias
    if linear.scale is None:
        check_dtype(name, w, dtype)
    else:
        check_dtype(name, w, *_QUANTIZED)
    check_device(name, w, device)
    *rows, columns = expected
    in_features = columns if isinstance(columns, int) else linear.columns
    if isinstance(columns, int) and linear.scale is not None:
        columns = {torch.uint8: columns // 2, torch.int32: num_words(columns)}.get(w.dtype, columns)
    check_shape(name, w, (*rows, columns))
    check_last_dim_contiguous(name, w)
    if bias is not None:
        check_tensor(f"{name}_bias", bias, w.shape[:2], (dtype, torch.float32), device)
        check_contiguous(f"{name}_bias", bias)
    if linear.scale is not None:
        names = f"{name}_scale", f"{name}_zeros", f"{name}_tensor_scale"
        check_scales(names, w, in_features, linear.scale, linear.zeros, linear.tensor_scale)
        return
    for kind, tensor in (("zeros", linear.zeros), ("tensor_scale", linear.tensor_scale)):
        if tensor is not None:
            raise InvalidInputError(f"{name}_{kind}: given with plain weights, expected None")
