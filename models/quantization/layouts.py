"""Storage formats of packed projections, one class each, and the choice of a projection's format."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from paged.errors import CheckpointError, InvalidInputError, UnsupportedError
from paged.kernels.quantization.packing import E2M1_GROUPS, FP8_BLOCK
from paged.kernels.quantization.repack import from_awq, from_compressed_tensors, from_gptq, from_mxfp4, from_nvfp4
from paged.kernels.quantization.weight import QuantizedWeight
from paged.models.quantization.name_patterns import NamePattern

Tensors = Mapping[str, torch.Tensor]
# Rows and columns of e4m3 weights that share a scale in `Widened`.
WIDENED_BLOCK = 32


class Stored(NamedTuple):
    """A stored tensor of a projection, without trailing dimensions of 1.

    dtype: float32 stands for any floating dtype of 16 bits or more. row_dim: dimension of the output features, None if
    there is none. rows_each: number of features that an entry of this dimension holds.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    row_dim: int | None = None
    rows_each: int = 1


@dataclass(frozen=True, kw_only=True)
class Layout(ABC):
    """How a checkpoint stores a projection, and its conversion to a `QuantizedWeight`.

    Attributes:
        form: format of the codes, as in `QuantizedWeight.format`.
        group_size: columns that share a scale; 0 for the whole row. For e4m3, 128 means blocks of 128 x 128.
        scale_dtype: dtype that scales of integer formats have on the device.
        in_words: dimension, "rows" or "columns", whose size must be a multiple of the codes in a word.
    """

    form: str
    group_size: int = 0
    scale_dtype: torch.dtype = torch.float32
    has_zero_points: bool = False
    has_order: bool = False
    quantizes_input: bool = False
    has_input_scale: bool = False
    in_words: ClassVar[tuple[str, ...]] = ()

    @property
    def has_tensor_scale(self) -> bool:
        return self.form in E2M1_GROUPS

    @property
    def in_blocks(self) -> bool:
        """Whether 128 rows share a scale."""
        return self.form == "e4m3" and self.group_size == FP8_BLOCK

    @property
    def num_bits(self) -> int:
        """Bits of an integer code."""
        return 4 if self.form == "int4" else 8

    @property
    def per_word(self) -> int:
        """Number of integer codes in 32 bits."""
        return 32 // self.num_bits

    def scale_rows(self, rows: int) -> int:
        """Return the number of scale rows for this many weight rows."""
        if self.in_blocks:
            return -(-rows // FP8_BLOCK)
        return rows

    def num_groups(self, columns: int) -> int:
        """Return the number of scales per row."""
        if not self.group_size:
            return 1
        return -(-columns // self.group_size)

    def check(self, name: str, rows: int, columns: int) -> None:
        """Check that this format can store a projection of this size.

        Raises:
            CheckpointError: the sizes are not multiples of groups or words.
        """
        if self.group_size and not self.in_blocks and columns % self.group_size:
            raise CheckpointError(f"{name}: {columns} columns, expected a multiple of the group size {self.group_size}")
        for dimension, size in (("rows", rows), ("columns", columns)):
            if dimension in self.in_words and size % self.per_word:
                raise CheckpointError(f"{name}: {size} {dimension}, expected a multiple of {self.per_word}")

    @abstractmethod
    def stored(self, rows: int, columns: int) -> dict[str, Stored]:
        """Return the stored tensors by name suffix."""

    @abstractmethod
    def pack(self, tensors: Tensors, columns: int) -> QuantizedWeight:
        """Return some rows of the weights; MXFP4 needs all rows in one call, because its largest exponent counts.

        Raises:
            InvalidInputError: the tensors contradict each other.
        """


@dataclass(frozen=True, kw_only=True)
class EightBit(Layout):
    """`weight` in its own dtype, e4m3 or int8, and scales: weight = code * scale.

    one_scale: one scale for all weights; otherwise one per row, or one per e4m3 block if group_size is 128. scale_name,
    input_scale_name: name suffixes of the scales. scale_code: dtype of stored scales, float32 or float8_e8m0fnu.
    """

    one_scale: bool = False
    scale_name: str = "weight_scale"
    scale_code: torch.dtype = torch.float32
    input_scale_name: str = "input_scale"

    def stored(self, rows: int, columns: int) -> dict[str, Stored]:
        code = torch.int8 if self.form == "int8" else torch.float8_e4m3fn
        if self.one_scale:
            scale = Stored((), self.scale_code)
        elif self.in_blocks:
            scale = Stored((self.scale_rows(rows), self.num_groups(columns)), self.scale_code, 0, self.group_size)
        else:
            scale = Stored((rows,), self.scale_code, 0)
        stored = {"weight": Stored((rows, columns), code, 0), self.scale_name: scale}
        if self.has_input_scale:
            stored[self.input_scale_name] = Stored((), torch.float32)
        return stored

    def pack(self, tensors: Tensors, columns: int) -> QuantizedWeight:
        weight, scale = tensors["weight"], tensors[self.scale_name].float()
        if self.one_scale:
            scale = scale.expand(len(weight))
        input_scale: torch.Tensor | None = None
        if self.has_input_scale:
            input_scale = tensors[self.input_scale_name].float()
        return QuantizedWeight(weight, scale, columns, quantizes_input=self.quantizes_input, input_scale=input_scale)


@dataclass(frozen=True, kw_only=True)
class Widened(EightBit):
    """e4m3 in blocks of 32 x 32 with a scale each, which become plain weights as they are read.

    No kernel multiplies such blocks. A code times a power of two is exact in 16 bits. In DeepSeek-V4.1-Flash the
    projections then take 14 GB in place of 7 of 310 GB.
    """

    form: str = "e4m3"
    group_size: int = WIDENED_BLOCK

    def stored(self, rows: int, columns: int) -> dict[str, Stored]:
        block = self.group_size
        scale = Stored((-(-rows // block), -(-columns // block)), self.scale_code, 0, block)
        return {"weight": Stored((rows, columns), torch.float8_e4m3fn, 0), self.scale_name: scale}

    def check(self, name: str, rows: int, columns: int) -> None:
        """Accept all sizes: the last blocks may be smaller."""

    def numbers(self, tensors: Tensors) -> torch.Tensor:
        """Return the weights, float32 [rows, columns]."""
        weight, block = tensors["weight"], self.group_size
        scale = tensors[self.scale_name].float().repeat_interleave(block, 0).repeat_interleave(block, 1)
        return weight.float() * scale[: len(weight), : weight.shape[1]]


@dataclass(frozen=True, kw_only=True)
class PackQuantized(Layout):
    """Integers in compressed-tensors' layout, see `from_compressed_tensors`."""

    def stored(self, rows: int, columns: int) -> dict[str, Stored]:
        groups, per_word = self.num_groups(columns), self.per_word
        stored = {
            "weight_packed": Stored((rows, -(-columns // per_word)), torch.int32, 0),
            "weight_scale": Stored((rows, groups), torch.float32, 0),
            "weight_shape": Stored((2,), torch.int64),
        }
        if self.has_zero_points:
            stored["weight_zero_point"] = Stored((-(-rows // per_word), groups), torch.int32, 0, per_word)
        if self.has_order:
            stored["weight_g_idx"] = Stored((columns,), torch.int32)
        return stored

    def pack(self, tensors: Tensors, columns: int) -> QuantizedWeight:
        weights = dict(tensors)
        shape = weights.pop("weight_shape").tolist()
        if shape[1] != columns:
            raise InvalidInputError(f"weight_shape: {shape}, expected {columns} columns")
        return from_compressed_tensors(**weights, in_features=columns, num_bits=self.num_bits)


@dataclass(frozen=True, kw_only=True)
class Gptq(Layout):
    """GPTQ (Frantar et al., 2023), see `from_gptq`; in symmetric files all zero points are the middle code."""

    version: int
    in_words: ClassVar[tuple[str, ...]] = ("rows", "columns")

    def stored(self, rows: int, columns: int) -> dict[str, Stored]:
        groups, per_word = self.num_groups(columns), self.per_word
        return {
            "qweight": Stored((columns // per_word, rows), torch.int32, 1),
            "qzeros": Stored((groups, rows // per_word), torch.int32, 1, per_word),
            "scales": Stored((groups, rows), torch.float32, 1),
            "g_idx": Stored((columns,), torch.int32),
        }

    def pack(self, tensors: Tensors, columns: int) -> QuantizedWeight:
        weights: dict[str, Any] = dict(tensors)
        if not self.has_zero_points:
            # Every position of an int32 holds the middle code. Version 1 stores the code minus 1.
            code = 2 ** (self.num_bits - 1) - (2 - self.version)
            if self.num_bits == 4:
                code *= 17  # repeat the 4 bits, because a byte holds two codes
            middle = int.from_bytes(bytes([code] * 4), "little", signed=True)
            if (tensors["qzeros"] != middle).any():
                raise InvalidInputError(f"qzeros: not all {middle}, which the configuration's sym = true requires")
            weights["qzeros"] = None
        return from_gptq(**weights, num_bits=self.num_bits, format_version=self.version)


@dataclass(frozen=True, kw_only=True)
class Awq(Layout):
    """AWQ (Lin et al., 2024) in its "gemm" layout, see `from_awq`."""

    form: str = "int4"
    has_zero_points: bool = True
    in_words: ClassVar[tuple[str, ...]] = ("rows",)

    def stored(self, rows: int, columns: int) -> dict[str, Stored]:
        groups = self.num_groups(columns)
        return {
            "qweight": Stored((columns, rows // 8), torch.int32, 1, 8),
            "scales": Stored((groups, rows), torch.float32, 1),
            "qzeros": Stored((groups, rows // 8), torch.int32, 1, 8),
        }

    def pack(self, tensors: Tensors, columns: int) -> QuantizedWeight:
        return from_awq(**tensors)


@dataclass(frozen=True, kw_only=True)
class Fp4(Layout):
    """NVFP4 or MXFP4 as compressed-tensors, ModelOpt or DeepSeek store them; the names are name suffixes.

    global_scale: scale of all weights, only in NVFP4. ignored: scale of NVFP4 activations. It is unused, because
    unrounded activations are more exact. in_experts: whether scales of MXFP4 are kept, as `fused_moe` takes them.
    """

    weight: str = "weight_packed"
    scale: str = "weight_scale"
    global_scale: str | None = None
    ignored: str | None = None
    in_experts: bool = False

    @property
    def has_tensor_scale(self) -> bool:
        return self.form == "nvfp4" or not self.in_experts

    def stored(self, rows: int, columns: int) -> dict[str, Stored]:
        code = torch.float8_e4m3fn if self.global_scale else torch.uint8
        stored = {
            self.weight: Stored((rows, columns // 2), torch.uint8, 0),
            self.scale: Stored((rows, columns // self.group_size), code, 0),
        }
        for name in (self.global_scale, self.ignored):
            if name is not None:
                stored[name] = Stored((), torch.float32)
        return stored

    def pack(self, tensors: Tensors, columns: int) -> QuantizedWeight:
        weight, scale = tensors[self.weight].view(torch.uint8), tensors[self.scale]
        if self.global_scale is None:
            return from_mxfp4(weight, scale, shifts=not self.in_experts)
        return from_nvfp4(weight, scale, **{self.global_scale: tensors[self.global_scale].float()})


# A pattern of projections' names and their format; None for plain weights.
Rule = tuple[NamePattern, Layout | None]
# Routers are always plain. A configuration for module classes does not cover them, because their class differs.
ROUTER = re.compile(r".*(?:gate|router)\Z")


@dataclass(frozen=True)
class Quantization:
    """Rules for packed projections; the first match counts. Without a match, and in routers, weights are plain.

    plain: projections that the file stores as floating point, whatever the rules say; None if no file is read.
    """

    rules: tuple[Rule, ...]
    plain: frozenset[str] | None = None

    def layout(self, name: str) -> Layout | None:
        """Return the format of a projection, None for plain weights.

        name: such as `model.layers.0.mlp.down_proj`. Patterns may also match the projection's name in a multimodal
        model, or in files that call experts `block_sparse_moe`.
        """
        if ROUTER.match(name) or name in (self.plain or ()):
            return None
        published = name.replace(".mlp.", ".block_sparse_moe.", 1)
        names = (
            *(name, f"language_model.{name}", name.replace("model.", "model.language_model.", 1)),
            *(published, f"language_model.{published}"),
        )
        for pattern, layout in self.rules:
            if any(pattern.match(alias) for alias in names):
                return layout
        return None

    def common_layout(self, names: Iterable[str]) -> Layout | None:
        """Return the layout of projections that run as one product.

        Raises:
            UnsupportedError: the formats of the projections differ.
        """
        layouts = {name: self.layout(name) for name in names}
        first = next(iter(layouts))
        for name, layout in layouts.items():
            if layout != layouts[first]:
                raise UnsupportedError(
                    f"{first}, {name}: quantised in two ways, expected one for projections of the same input"
                )
        return layouts[first]
