"""The weights of all experts' projections, the formats that they come in, and a call of the fused MoE."""

from __future__ import annotations

from typing import NamedTuple

import torch

from paged.kernels.common.checks import (
    FLOAT_DTYPES,
    check_contiguous,
    check_device,
    check_dtype,
    check_is_tensor,
    check_last_dim_contiguous,
    check_shape,
    check_tensor,
)
from paged.kernels.common.errors import InvalidInputError, UnsupportedError
from paged.kernels.common.packed.packing import E2M1_GROUPS, E8M0, FP8_BLOCK, format_of_words, num_words

_FORMATS = {torch.float8_e4m3fn: "e4m3", torch.int8: "int8", torch.uint8: "int4"}
_QUANTIZED = (*_FORMATS, torch.int32)
_E2M1_SCALES = (*E8M0, torch.float8_e4m3fn)


class ExpertLinear(NamedTuple):
    """One of the two projections of all experts; weight = (code - zeros) * scale * tensor_scale where quantised.

    w: [num_experts, out_features, in_features]; or two 4-bit codes a byte in in_features / 2; or 16 *
    ceil(in_features / 128) int32 words of `pack_codes`. bias: [num_experts, out_features], contiguous, or None. scale,
    zeros, tensor_scale: see `fused_moe`.
    """

    w: torch.Tensor
    bias: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    tensor_scale: torch.Tensor | None = None

    @property
    def format(self) -> str:
        """ "" for weights that are not quantised, "e4m3", "int8", "int4", "mxfp4" or "nvfp4"."""
        if self.scale is None:
            return ""
        return format_of_words(self.scale) if self.is_packed else _FORMATS[self.w.dtype]

    @property
    def is_packed(self) -> bool:
        """Whether a word of `w` holds eight codes."""
        return self.scale is not None and self.w.dtype == torch.int32

    @property
    def columns(self) -> int:
        """in_features, of words with the columns that fill the last ones."""
        codes = 1 if self.scale is None else {torch.uint8: 2, torch.int32: 8}.get(self.w.dtype, 1)
        return self.w.shape[2] * codes

    def group(self, in_features: int) -> tuple[int, int]:
        """Rows and columns of the weights that share a scale."""
        assert self.scale is not None
        if self.scale.dim() < 3:
            return self.w.shape[1] if self.scale.dim() == 1 else 1, in_features
        if self.format == "e4m3":
            return FP8_BLOCK, FP8_BLOCK
        return 1, E2M1_GROUPS.get(self.format) or in_features // self.scale.shape[2]


class MoeCall(NamedTuple):
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

    @property
    def intermediate_size(self) -> int:
        return self.gate_up.w.shape[1] // 2


def check_operands(
    hidden_states: torch.Tensor,
    gate_up: ExpertLinear,
    down: ExpertLinear,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
) -> None:
    """Raise unless what `fused_moe` multiplies, and where it goes, fit each other.

    Raises:
        InvalidInputError, UnsupportedError: see `fused_moe`.
    """
    for name, tensor in (("hidden_states", hidden_states), ("w1", gate_up.w), ("w2", down.w)):
        check_is_tensor(name, tensor)
    device, dtype = hidden_states.device, hidden_states.dtype
    check_tensor("hidden_states", hidden_states, ("num_tokens", "hidden_size"), FLOAT_DTYPES, device)
    num_tokens, hidden_size = hidden_states.shape
    check_shape("w1", gate_up.w, ("num_experts", "2 * intermediate_size", "hidden_size"))
    # Words do not say how many columns they hold.
    intermediate_size: int | str = gate_up.w.shape[1] // 2 if down.is_packed else "intermediate_size"
    _check_weights("w2", down, ("num_experts", hidden_size, intermediate_size), dtype, device)
    num_rows = 2 * (intermediate_size if isinstance(intermediate_size, int) else down.columns)
    _check_weights("w1", gate_up, (len(down.w), num_rows, hidden_size), dtype, device)
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
    """A projection's weights have the expected shape, and its bias, scales and zero points fit them."""
    w, bias = linear.w, linear.bias
    check_dtype(name, w, *((dtype,) if linear.scale is None else _QUANTIZED))
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
    _check_scales(name, linear, in_features)


def _check_scales(name: str, linear: ExpertLinear, in_features: int) -> None:
    (num_experts, num_rows, _), device, form = linear.w.shape, linear.w.device, linear.format
    scale, zeros, tensor_scale = linear.scale, linear.zeros, linear.tensor_scale
    if zeros is not None and form not in ("int8", "int4"):
        raise InvalidInputError(f"{name}_zeros: given with {form or 'plain'} weights, expected None")
    if scale is None:
        if tensor_scale is not None:
            raise InvalidInputError(f"{name}_tensor_scale: given without {name}_scale, expected None")
        return
    expected: tuple[int | str, ...] = (num_experts, num_rows)[: max(scale.dim(), 1)]
    if form in E2M1_GROUPS:
        expected = num_experts, num_rows, -(-in_features // E2M1_GROUPS[form])
    elif scale.dim() > 2:
        blocks = tuple(-(-size // FP8_BLOCK) for size in (num_rows, in_features))
        expected = (num_experts, *blocks) if form == "e4m3" else (num_experts, num_rows, "groups")
    # Those of words say what the words are.
    dtypes = (torch.float32,) if form == "e4m3" else (*FLOAT_DTYPES, *_E2M1_SCALES * linear.is_packed)
    check_tensor(f"{name}_scale", scale, expected, dtypes, device)
    if expected[-1] == "groups":
        num_groups = scale.shape[2]
        if num_groups == 0 or in_features % num_groups:
            groups = f"{num_groups} groups, expected a divisor of {in_features} columns"
            raise InvalidInputError(f"{name}_scale: {groups}")
        if (size := in_features // num_groups) % 32:
            raise UnsupportedError(f"{name}_scale: groups of {size} columns, expected a multiple of 32")
    if zeros is not None:
        check_tensor(f"{name}_zeros", zeros, scale.shape, (torch.int8,), device)
    if tensor_scale is not None:
        check_tensor(f"{name}_tensor_scale", tensor_scale, (num_experts,), (torch.float32,), device)
