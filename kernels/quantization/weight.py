"""The packed weights of one linear layer, and what their numbers mean."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paged.kernels.common.checks import (
    check_contiguous,
    check_dtype,
    check_is_tensor,
    check_shape,
    check_tensor,
)
from paged.kernels.common.errors import InvalidInputError, UnsupportedError
from paged.kernels.common.packed.packing import check_scales, format_of, group_of, num_words
from paged.kernels.common.scalars import as_bool, as_int


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """Weights [out_features, in_features] as codes; weight = (code - zero_point) * scale * tensor_scale.

    values: the codes. float8_e4m3fn or int8 [out_features, in_features], contiguous; or int32 [out_features, 16 *
        ceil(in_features / 128)], contiguous, eight 4-bit codes a word in the order of `packing.pack_codes`.
    in_features: columns; those that fill the last words hold any code.
    scale: of e4m3 float32, for all weights [], a row [out_features], or a 128 x 128 block [ceil(out_features / 128),
        ceil(in_features / 128)]; of int8 and of whole 4-bit numbers float32, float16 or bfloat16, [], [out_features] or
        a group of columns [out_features, in_features / group], a multiple of 32; of MXFP4 (E2M1, Open Compute Project,
        2023) uint8 or float8_e8m0fnu [out_features, in_features / 32], 2^(byte - 127), of which the largest is 1 (byte
        127) as `repack.from_mxfp4` sees to, since scales are multiplied in the dtype of the activations; of NVFP4
        float8_e4m3fn [out_features, in_features / 16], none negative. Any strides: where a group's rows are neighbours,
        a step reads a line of them.
    zero_point: int8, the code that stands for 0, in the shape of `scale`; None for 0 of int8 and 8 of 4-bit codes 0 to
        15. Whole numbers alone have one.
    tensor_scale: float32 [], or None.
    quantizes_input: activations are rounded to the type of the weights, e4m3 or int8, before they are multiplied.
    input_scale: float32 [], what one unit of such an activation is. None: the largest value of a token, or beside
        blocks of weights of 128 values of it, becomes the largest of the type (448 or 127).
    input_order: int32 [in_features], the column of the activations that each column of the weights multiplies; None for
        their own order. What GPTQ's desc_act is once columns of a group stand side by side.

    Raises:
        InvalidInputError: shapes, dtypes, devices or strides do not fit.
        UnsupportedError: a group of columns is no multiple of 32, or activations of grouped int8 or 4-bit weights are
            to be quantised.
    """

    values: torch.Tensor
    scale: torch.Tensor
    in_features: int
    zero_point: torch.Tensor | None = None
    tensor_scale: torch.Tensor | None = None
    quantizes_input: bool = False
    input_scale: torch.Tensor | None = None
    input_order: torch.Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "in_features", as_int("in_features", self.in_features, 1))
        object.__setattr__(self, "quantizes_input", as_bool("quantizes_input", self.quantizes_input))
        check_dtype("values", self.values, torch.float8_e4m3fn, torch.int8, torch.int32)
        columns = num_words(self.in_features) if self.is_packed else self.in_features
        check_shape("values", self.values, ("out_features", columns))
        check_contiguous("values", self.values)
        check_is_tensor("scale", self.scale)
        names = "scale", "zero_point", "tensor_scale"
        check_scales(names, self.values, self.in_features, self.scale, self.zero_point, self.tensor_scale)
        device = self.values.device
        if self.input_scale is not None:
            check_tensor("input_scale", self.input_scale, (), (torch.float32,), device)
        if self.input_order is not None:
            check_tensor("input_order", self.input_order, (self.in_features,), (torch.int32,), device)
            check_contiguous("input_order", self.input_order)
        self._check_input()

    @property
    def is_packed(self) -> bool:
        """Whether a word of `values` holds eight codes."""
        return self.values.dtype == torch.int32

    @property
    def format(self) -> str:
        """What a code is: "e4m3", "int8", "int4", "mxfp4" or "nvfp4"."""
        return format_of(self.values, self.scale)

    @property
    def out_features(self) -> int:
        return self.values.shape[0]

    @property
    def group(self) -> tuple[int, int]:
        """Rows and columns that share a scale; 0 for all of them."""
        return group_of(self.format, self.scale.shape, self.in_features)

    def _check_input(self) -> None:
        if not self.quantizes_input:
            if self.input_scale is not None:
                raise InvalidInputError("input_scale: given without quantizes_input, expected None")
            return
        if self.is_packed or (self.format == "int8" and (self.scale.dim() == 2 or self.zero_point is not None)):
            raise UnsupportedError(
                f"quantizes_input: {self.format} weights with scales of shape {list(self.scale.shape)}, expected e4m3, "
                "or int8 with a scale for all or a row, without zero points"
            )
        if self.input_scale is not None and self.scale.dim() == 2:
            raise UnsupportedError("input_scale: given with scales of 128 x 128 blocks, expected None")
