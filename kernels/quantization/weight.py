"""The packed weights of one linear layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..core.checks import check_contiguous, check_dtype, check_is_tensor, check_shape, check_tensor
from ..core.errors import InvalidInputError, UnsupportedError, as_bool, as_int
from .packing import check_scales, format_of, group_of, num_words


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """Packed weights [out_features, in_features] of a linear layer: (code - zero_point) * scale * tensor_scale.

    Attributes:
        values: the codes, contiguous. float8_e4m3fn or int8 [out_features, in_features]; or int32 [out_features, 16 *
            ceil(in_features / 128)], words of eight 4-bit codes in the order of `packing.pack_codes`.
        scale: one scale [], one per row [out_features], or one per group, see below; any strides. Reads are fastest if
            the rows of a group are neighbours in memory.
        in_features: number of columns. Later columns, which fill the last words, hold any code.
        zero_point: int8 in the shape of `scale`, the code of 0. None for 0 (int8) or 8 (codes 0 to 15 of int4); other
            formats take none.
        tensor_scale: float32 [], a factor for all weights; None for 1.
        quantizes_input: whether activations are rounded to the type of the weights, e4m3 or int8, before the product.
        input_scale: float32 [], the value of one unit of a rounded activation. None scales the largest value of each
            token to the largest of the type (448 or 127), with e4m3 blocks each 128 values of a token.
        input_order: int32 [in_features], contiguous: the column of x that each column of the weights multiplies; None
            if the order is the same. GPTQ's desc_act needs it after columns are sorted by group.

    Scales by format; if `values` are int32, the dtype of the scale decides the format:

    - e4m3: float32; groups are blocks of 128 x 128, [ceil(out_features / 128), ceil(in_features / 128)].
    - int8 and int4: float32, float16 or bfloat16; groups are a multiple of 32 columns that divides the row,
      [out_features, in_features / group].
    - MXFP4 (E2M1, Open Compute Project, 2023): uint8 or float8_e8m0fnu [out_features, in_features / 32], 2^(byte -
      127). The largest is 1 (byte 127), because scales are applied in the dtype of x; `repack.from_mxfp4` ensures this.
    - NVFP4: float8_e4m3fn [out_features, in_features / 16], none negative.

    Raises:
        InvalidInputError: a shape, dtype, device or stride does not fit.
        UnsupportedError: a group is not a multiple of 32 columns, or quantizes_input is set for grouped int8, int8 with
            zero points, or 4-bit weights, or input_scale for e4m3 blocks.
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
        """Whether each word of `values` holds eight codes."""
        return self.values.dtype == torch.int32

    @property
    def format(self) -> str:
        """The format of the codes: "e4m3", "int8", "int4", "mxfp4" or "nvfp4"."""
        return format_of(self.values, self.scale)

    @property
    def out_features(self) -> int:
        return self.values.shape[0]

    @property
    def group(self) -> tuple[int, int]:
        """Numbers of rows and columns that share a scale; 0 for all of them."""
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
