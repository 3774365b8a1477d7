"""Number formats of a KV cache: one table of kinds, and their conversions in PyTorch and in Triton.

A row is one head of one token. `KvKind.numbers`, `encode` and `decode` convert rows in PyTorch. Kernels take the name
of a kind: they write through `cast_to_cache` below, and paged attention reads in `online_softmax.py`.

8-bit floats follow Micikevicius et al., 2022. e4m3fn has 4 exponent bits, 3 mantissa bits and no infinity. e5m2 has 5
exponent bits and 2 mantissa bits, and is the upper byte of a float16.

int4 packs two neighbours in a byte, the first in its low bits: code + 8, for codes of -8 to 7. 32 numbers share a
bfloat16 scale. A scale has the sign that makes the number of largest magnitude -8 times the scale, as in llama.cpp's
q4_0. PyTorch's dtype for such bytes is `bits4x2`: it can be copied and viewed, but not indexed or computed with.

nvfp4 packs e2m1 numbers likewise: a sign, 2 exponent bits, 1 mantissa bit (OCP Microscaling Formats, 2023). 16 numbers
share an e4m3 scale, their largest magnitude / 6, and a table may have a float32 scale for all its numbers.

fp8_per_token_head is e4m3 with a float32 scale for each row, its largest magnitude / 448. PyTorch's dtype for such
codes is `bits8`, as `float8_e4m3fn` is a cache without scales of rows.

Kernels take 8-bit floats and two numbers a byte as bytes. Chips from sm_89 on convert two 8-bit floats in one
instruction. Everywhere else integer arithmetic gives the same bits, also in Triton's interpreter, whose own 8-bit types
cannot be trusted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .compat import tl, triton
from .device import device_of

# Smallest magnitude that sets a row's scale: below it, 127 / magnitude could be infinite.
SMALLEST = 2.0**-100


@dataclass(frozen=True)
class KvKind:
    """A number format of a KV cache. This base class is the format of plain floating point numbers.

    Attributes:
        dtype: dtype of the cache's tensors.
        name: KIND of the kernels; "" for plain numbers.
        spellings: names in options, as in vLLM and in PyTorch.
        is_bytes: whether kernels take the cache's tensors as uint8.
        numbers_per_element: numbers of a row in an element of the tensor. The width of a row is a multiple of it.
        group_size: numbers of a row that share a scale in the cache, 0 for the whole row. None if the cache has no
            scales; a call may then give one scale for all numbers or one for each head.
        scale_dtype: dtype of the scales in the cache.
        least_scale: smallest scale in the cache that `encode` of nvfp4 chooses.
        has_table_scale: whether a call may give one more scale, for all numbers of a cache with scales.
        fits_float16: whether float16 holds all numbers of a cache without the scales that a call gives.
    """

    dtype: torch.dtype
    name: str = ""
    spellings: tuple[str, ...] = ()
    is_bytes: bool = False
    numbers_per_element: int = 1
    group_size: int | None = None
    scale_dtype: torch.dtype = torch.float32
    least_scale: float = 0.0
    has_table_scale: bool = False
    fits_float16: bool = False

    @property
    def has_scales(self) -> bool:
        """Whether the cache holds scales, which `encode` chooses."""
        return self.group_size is not None

    @property
    def takes_scales(self) -> bool:
        """Whether a call may give a scale, such as a checkpoint's."""
        return self.has_table_scale or (self.is_bytes and not self.has_scales)

    def num_elements(self, width: int) -> int:
        """Return the elements of a row of `width` numbers."""
        return -(-width // self.numbers_per_element)

    def width(self, cache: torch.Tensor) -> int:
        """Return the numbers of a row of a cache [..., elements]."""
        return cache.shape[-1] * self.numbers_per_element

    def scales_shape(self, cache: torch.Tensor) -> tuple[int, ...]:
        """Return the shape of the scales of a cache [..., elements]: [...], and [..., groups] if rows have groups."""
        if self.group_size:
            return *cache.shape[:-1], self.num_scales(self.width(cache))
        return tuple(cache.shape[:-1])

    def num_scales(self, width: int) -> int:
        """Return the scales in the cache of a row of `width` numbers."""
        if self.group_size is None:
            return 0
        return -(-width // (self.group_size or width))

    def row_bytes(self, width: int) -> int:
        """Return the bytes of a row of `width` numbers with its scales in the cache."""
        return self.num_elements(width) * self.dtype.itemsize + self.num_scales(width) * self.scale_dtype.itemsize

    def numbers(self, rows: torch.Tensor, scale: torch.Tensor | None, compute: torch.dtype) -> torch.Tensor:
        """Return what `encode` rounds, rows / scale, in the dtype `compute`.

        rows: [..., num_kv_heads, width].
        scale: divides the rows, one value or [num_kv_heads]; None for 1. It is not one of the scales in the cache.
        """
        rows = rows.to(compute)
        if scale is None:
            return rows
        return rows * scale.to(compute).reciprocal().unsqueeze(-1)

    def encode(self, rows: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return rows as the cache stores them, and the scales that the cache stores, or None. See `numbers`."""
        compute = rows.dtype if scale is None else torch.float32
        return self.numbers(rows, scale, compute).to(self.dtype), None

    def decode(self, rows: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """Return rows of the cache in a float dtype, multiplied by the scales in the cache."""
        return rows.to(dtype)


class _Float8(KvKind):
    def numbers(self, rows: torch.Tensor, scale: torch.Tensor | None, compute: torch.dtype) -> torch.Tensor:
        """Return rows / scale; numbers beyond the largest become the largest."""
        largest = torch.finfo(self.dtype).max
        return super().numbers(rows, scale, compute).clamp(-largest, largest)


class _ScaledRows(KvKind):
    """Codes with a scale for each row, which is NaN if the row is not finite. largest_code: see `encode`."""

    largest_code = 127.0

    def numbers(self, rows: torch.Tensor, scale: torch.Tensor | None, compute: torch.dtype) -> torch.Tensor:
        """Return the codes times the scales of `encode` without its rounding: rows, or NaN if a row is not finite."""
        rows = rows.to(compute)
        return rows + (rows * 0.0).sum(-1, keepdim=True)

    def encode(self, rows: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Divide each row by its scale, its largest magnitude / `largest_code`: float32 [..., num_kv_heads].

        The scale is NaN if the row holds NaN or infinity, because codes need not express it.
        """
        wide = rows.float()
        largest, not_finite = wide.abs().amax(-1), (wide * 0.0).sum(-1)
        inverse = largest.new_tensor(self.largest_code) / largest.clamp(min=SMALLEST)  # number / tensor rounds twice
        codes = self._rounded((wide * inverse.unsqueeze(-1)).clamp(-self.largest_code, self.largest_code))
        return codes, largest / self.largest_code + not_finite

    def _rounded(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.round().to(self.dtype)

    def decode(self, rows: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        assert scales is not None
        return rows.to(dtype).mul_(scales.unsqueeze(-1))


class _ScaledFloat8(_ScaledRows):
    largest_code = 448.0

    def _rounded(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.to(torch.float8_e4m3fn).view(self.dtype)

    def decode(self, rows: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        return super().decode(rows.view(torch.float8_e4m3fn), scales, dtype)


class _Groups(KvKind):
    """Two numbers a byte, and a scale for `group_size` numbers of a row, which is NaN if one of them is not finite."""

    def _groups(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows [..., width] in groups that share a scale, [..., groups, group_size], padded with 0."""
        assert self.group_size
        width = rows.shape[-1]
        padding = self.num_scales(width) * self.group_size - width
        return torch.nn.functional.pad(rows, (0, padding)).unflatten(-1, (-1, self.group_size))

    def numbers(self, rows: torch.Tensor, scale: torch.Tensor | None, compute: torch.dtype) -> torch.Tensor:
        """Return the codes times the scales of `encode` without its rounding: rows, or NaN in groups not finite."""
        groups = self._groups(rows.to(compute))
        groups = groups + (groups * 0.0).sum(-1, keepdim=True)
        return groups.flatten(-2)[..., : rows.shape[-1]]

    def _packed(self, codes: torch.Tensor, width: int) -> torch.Tensor:
        """Return codes [..., groups, group_size] from 0 to 15 as rows of `width` numbers, two in each element."""
        codes = codes.to(torch.uint8).flatten(-2)[..., :width]
        packed = codes[..., 0::2] | codes[..., 1::2] << 4
        return packed.view(self.dtype)

    def _unpacked(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the codes of rows, uint8 [..., width]."""
        packed = rows.view(torch.uint8)
        return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)

    def _scaled(self, numbers: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        """Return numbers [..., width] times the scales of their groups."""
        assert scales is not None
        scaled = self._groups(numbers) * scales.to(numbers.dtype).unsqueeze(-1)
        return scaled.flatten(-2)[..., : numbers.shape[-1]]


class _Int4(_Groups):
    def encode(self, rows: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Divide each group by its scale, its number of largest magnitude / -8: bfloat16 [..., num_kv_heads, groups].

        A scale is rounded towards 0, so that no code times its scale overflows the dtype of the rows. It is NaN if the
        group holds NaN or infinity.
        """
        groups = self._groups(rows.float())
        largest, smallest = groups.amax(-1), groups.amin(-1)
        extreme = torch.where(largest > -smallest, largest, smallest) + (groups * 0.0).sum(-1)
        scales = ((extreme * -0.125).view(torch.int32) & -65536).view(torch.float32)
        inverse = torch.where(scales.abs() < SMALLEST, torch.inf, scales).reciprocal()
        codes = (groups * inverse.unsqueeze(-1)).round().clamp(-8, 7).nan_to_num(0.0)
        return self._packed(codes + 8, rows.shape[-1]), scales.to(self.scale_dtype)

    def decode(self, rows: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        return self._scaled(self._unpacked(rows).to(dtype).sub_(8), scales)


class _Nvfp4(_Groups):
    def numbers(self, rows: torch.Tensor, scale: torch.Tensor | None, compute: torch.dtype) -> torch.Tensor:
        """Return rows / scale, NaN in groups that are not finite. Larger magnitudes become 448 * 6."""
        return super().numbers(KvKind.numbers(self, rows, scale, compute), None, compute).clamp(-2688.0, 2688.0)

    def encode(self, rows: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Divide each group of rows / scale by the e4m3 number next to its largest magnitude / 6, or by 448.

        Groups whose e4m3 scale is 0 become 0.
        """
        groups = self._groups(KvKind.numbers(self, rows, scale, torch.float32))
        largest = groups.abs().amax(-1) * (1.0 / 6.0) + (groups * 0.0).sum(-1)
        scales = largest.clamp(self.least_scale, 448.0).to(self.scale_dtype)
        inverse = torch.where(scales.float() == 0, torch.inf, scales.float()).reciprocal()
        numbers = groups * inverse.unsqueeze(-1)
        # Codes rise with magnitudes, so the boundaries below a magnitude are its code. Ties go to even codes.
        boundaries = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=rows.device)
        boundaries[1::2] = boundaries[1::2].nextafter(boundaries.new_zeros(()))
        codes = torch.bucketize(numbers.abs(), boundaries) + 8 * numbers.signbit()
        return self._packed(codes, rows.shape[-1]), scales

    def decode(self, rows: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=dtype, device=rows.device)
        table = torch.cat([table, -table])
        packed = rows.view(torch.uint8)
        # Both numbers of each byte: one look-up takes a third of the time of two.
        pairs = torch.stack([table.repeat(16), table.repeat_interleave(16)], -1)  # [256, 2]
        numbers = pairs.index_select(0, packed.flatten().int()).view(*packed.shape[:-1], 2 * packed.shape[-1])
        return self._scaled(numbers, scales)


_ROWS = (
    _Float8(torch.float8_e4m3fn, "e4m3", ("fp8", "fp8_e4m3", "float8_e4m3fn"), is_bytes=True, fits_float16=True),
    _Float8(torch.float8_e5m2, "e5m2", ("fp8_e5m2", "float8_e5m2"), is_bytes=True, fits_float16=True),
    _ScaledRows(torch.int8, "int8", ("int8",), group_size=0),
    _ScaledFloat8(torch.bits8, "e4m3_rows", ("fp8_per_token_head",), is_bytes=True, group_size=0),
    _Int4(torch.bits4x2, "int4", ("int4",), True, numbers_per_element=2, group_size=32, scale_dtype=torch.bfloat16),
    _Nvfp4(
        torch.float4_e2m1fn_x2,
        "nvfp4",
        ("nvfp4",),
        is_bytes=True,
        numbers_per_element=2,
        group_size=16,
        scale_dtype=torch.float8_e4m3fn,
        has_table_scale=True,
        fits_float16=True,
    ),
)
# Kinds by dtype. Any other dtype holds plain numbers. To add a kind, see `docs/architecture.md`.
KV_KINDS: dict[torch.dtype, KvKind] = {kind.dtype: kind for kind in _ROWS}
_PLAIN_KINDS = {dtype: KvKind(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)}


def kv_kind(dtype: torch.dtype) -> KvKind:
    """Return the kind of a cache of this dtype."""
    return KV_KINDS.get(dtype) or _PLAIN_KINDS.get(dtype) or KvKind(dtype)


@triton.jit
def decode_e4m3(bits, NATIVE: tl.constexpr = False):
    """The float16 values of uint8 codes, exact. NATIVE: the chip converts, see `has_native_e4m3`.

    Without NATIVE, sign, exponent and mantissa move to their places in a float16. Its exponent bias is larger, so the
    result is 2^8 too small, also for subnormals. Adding 1 to the seven bits of a NaN carries into the highest exponent
    bit; for no other code does it. This bit keeps a NaN a NaN. See limits.md for instruction counts.
    """
    if NATIVE:
        return bits.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    # Clear the copy of the sign in the highest exponent bit.
    half = (bits.to(tl.int8, bitcast=True).to(tl.int16) << 7) & -0x4001
    half = half | ((half + 0x80) & 0x4000)
    return half.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def decode_e5m2(bits):
    """The float16 values of uint8 codes, exact, infinities and NaN included."""
    return (bits.to(tl.int16) << 8).to(tl.float16, bitcast=True)


@triton.jit
def encode_e4m3(x, NATIVE: tl.constexpr = False):
    """The uint8 codes of float32 values, rounded to nearest, ties to even. Larger values become 448, NaN stays NaN.

    See limits.md for instruction counts.
    """
    if NATIVE:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return _encode(x, 3, 7, 0x7E)


@triton.jit
def encode_e5m2(x, NATIVE: tl.constexpr = False):
    """The e5m2 codes, as `encode_e4m3`. Larger values and infinity become 57344, as in CUDA's saturating conversion."""
    if NATIVE:
        return x.to(tl.float8e5).to(tl.uint8, bitcast=True)
    return _encode(x, 2, 15, 0x7B)


@triton.jit
def _encode(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    SHIFT: tl.constexpr = 23 - MANTISSA
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Round to nearest, ties to even: add half a unit of the last kept bit, less one if this bit is even. Then replace
    # float32's exponent bias, which is 127.
    halfway: tl.constexpr = (1 << (SHIFT - 1)) - 1
    normal = ((magnitude + halfway + ((magnitude >> SHIFT) & 1)) >> SHIFT).to(tl.int32) - ((127 - BIAS) << MANTISSA)
    # Below 2^(1 - BIAS) all codes have the same step. Add a power of two at which float32 has this step: the last bits
    # of the sum are the code.
    power: tl.constexpr = (127 + 24 - BIAS - MANTISSA) << 23
    shifted = magnitude.to(tl.float32, bitcast=True) + 2.0 ** (24 - BIAS - MANTISSA)
    subnormal = shifted.to(tl.int32, bitcast=True) - power
    code = tl.where(magnitude < (128 - BIAS) << 23, subnormal, tl.minimum(normal, LARGEST))
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80).to(tl.int32)).to(tl.uint8)


def as_kernel_argument(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as kernels take it: 8-bit floats and two numbers a byte as bytes, with the same shape."""
    kind = KV_KINDS.get(tensor.dtype)
    if kind is not None and kind.is_bytes:
        return tensor.view(torch.uint8)
    return tensor


def scale_argument(scale: torch.Tensor | None) -> torch.Tensor | None:
    """Return the scales of a cache as kernels take them."""
    if scale is None:
        return None
    return as_kernel_argument(scale)


def has_native_e4m3(device: torch.device) -> bool:
    """Return whether the chip converts 8-bit floats by itself: NVIDIA's from sm_89 on."""
    arch = device_of(device).arch
    return arch.startswith("sm_") and int(arch.removeprefix("sm_")) >= 89


_SMALLEST = tl.constexpr(SMALLEST)
_ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: in a sum with it, float32 rounds to whole numbers, ties to even


@triton.jit
def round_to_int8(x):
    """Round float32 to int8, to nearest, ties to even. Values outside of -128 to 127 become the nearer limit."""
    x = tl.minimum(tl.maximum(x, -128.0), 127.0)
    return ((x + _ROUNDER) - _ROUNDER).to(tl.int8)


@triton.jit
def load_inverse_scale(scale_ptrs, mask):
    """1 / scale, or None if there is no scale. A correctly rounded division would spill registers on sm_100."""
    inverse = None
    if scale_ptrs is not None:
        inverse = 1.0 / tl.load(scale_ptrs, mask=mask, other=1.0)
    return inverse


@triton.jit
def store_row_scales(scale_ptrs, largest, not_finite, mask, KIND: tl.constexpr):
    """Store the scales of rows, largest / 127, or / 448 for e4m3, and return the factor that rows are multiplied by.

    largest: the largest magnitude of each row.
    not_finite: the sum of a row's values times 0. It is NaN if a value is infinite or NaN, and then makes the scale
    NaN, because int8 codes cannot express it.
    """
    LARGEST: tl.constexpr = 127.0 if KIND == "int8" else 448.0
    tl.store(scale_ptrs, largest / LARGEST + not_finite, mask=mask)
    return LARGEST / tl.maximum(largest, _SMALLEST)


@triton.jit
def encode_int4(x, scale_ptrs, row_mask, WIDTH: tl.constexpr):
    """The bytes [rows, dims / 2] of rows x [rows, dims] in float32, and stores the scales of their groups.

    x: 0 from column WIDTH on.
    scale_ptrs: [rows, 1], the first scale of each row.
    """
    GROUP: tl.constexpr = 32 if x.shape[1] > 32 else x.shape[1]
    NUM_GROUPS: tl.constexpr = x.shape[1] // GROUP
    groups = x.reshape(x.shape[0], NUM_GROUPS, GROUP)
    largest, smallest = tl.max(groups, axis=2), tl.min(groups, axis=2)
    extreme = tl.where(largest > -smallest, largest, smallest) + tl.sum(groups * 0.0, axis=2)
    scales = ((extreme * -0.125).to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    index = tl.arange(0, NUM_GROUPS)[None, :]
    tl.store(scale_ptrs + index, scales.to(tl.bfloat16), mask=row_mask & (index * GROUP < WIDTH))
    inverse = 1.0 / tl.where(tl.abs(scales) < _SMALLEST, float("inf"), scales)
    codes = groups * inverse[:, :, None]
    codes = (tl.minimum(tl.maximum(codes, -8.0), 7.0) + _ROUNDER) - _ROUNDER
    codes = (codes + 8.0).to(tl.int32).reshape(x.shape[0], x.shape[1] // 2, 2)
    first, second = tl.split(codes)
    return ((first & 15) | (second & 15) << 4).to(tl.uint8)


@triton.jit
def decode_int4(packed, scales):
    """The float32 numbers [rows, dims] of bytes [rows, dims / 2]. scales: bfloat16 [rows, groups]."""
    DIM: tl.constexpr = 2 * packed.shape[1]
    codes = tl.join(packed & 15, packed >> 4).reshape(packed.shape[0], DIM)
    groups = (codes.to(tl.float32) - 8.0).reshape(packed.shape[0], scales.shape[1], DIM // scales.shape[1])
    return (groups * scales.to(tl.float32)[:, :, None]).reshape(packed.shape[0], DIM)


@triton.jit
def encode_nvfp4(x, scale_ptrs, inverse_scale, row_mask, WIDTH: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """The bytes [rows, dims / 2] of rows x [rows, dims] in float32, and stores the e4m3 scales of their groups.

    x: 0 from column WIDTH on.
    scale_ptrs: [rows, 1], the first scale of each row, as bytes.
    inverse_scale: multiplies x; None for 1.
    """
    GROUP: tl.constexpr = 16 if x.shape[1] > 16 else x.shape[1]
    NUM_GROUPS: tl.constexpr = x.shape[1] // GROUP
    if inverse_scale is not None:
        x = x * inverse_scale
    groups = x.reshape(x.shape[0], NUM_GROUPS, GROUP)
    largest = tl.max(tl.abs(groups), axis=2) * (1.0 / 6.0) + tl.sum(groups * 0.0, axis=2)
    scale_codes = encode_e4m3(largest, NATIVE_FP8)
    index = tl.arange(0, NUM_GROUPS)[None, :]
    tl.store(scale_ptrs + index, scale_codes, mask=row_mask & (index * GROUP < WIDTH))
    scales = decode_e4m3(scale_codes, NATIVE_FP8).to(tl.float32)
    inverse = 1.0 / tl.where(scales == 0.0, float("inf"), scales)
    codes = _encode(groups * inverse[:, :, None], 1, 1, 7).to(tl.int32)
    codes = (codes & 7) | ((codes >> 4) & 8)  # the sign to the highest of four bits
    first, second = tl.split(codes.reshape(x.shape[0], x.shape[1] // 2, 2))
    return (first | second << 4).to(tl.uint8)


@triton.jit
def decode_nvfp4(packed, scale_codes, NATIVE_FP8: tl.constexpr):
    """The float16 numbers [rows, dims] of bytes [rows, dims / 2], exact. scale_codes: e4m3 as bytes [rows, groups].

    The three lowest bits of a code move to exponent and mantissa of a float16, also those of the subnormal 0.5. Its
    bias is larger by 14. A product has 6 bits, and is 2^-10 to 2688.
    """
    DIM: tl.constexpr = 2 * packed.shape[1]
    # Both numbers of a byte in one word: the second one's bits lie 16 higher.
    wide = packed.to(tl.uint32)
    wide = wide | (wide << 12)
    pairs = ((wide << 12) & 0x80008000) | ((wide << 9) & 0x0E000E00)
    first, second = pairs.to(tl.uint16), (pairs >> 16).to(tl.uint16)
    numbers = tl.join(first, second).reshape(packed.shape[0], DIM).to(tl.float16, bitcast=True) * 16384.0
    groups = numbers.reshape(packed.shape[0], scale_codes.shape[1], DIM // scale_codes.shape[1])
    return (groups * decode_e4m3(scale_codes, NATIVE_FP8)[:, :, None]).reshape(packed.shape[0], DIM)


@triton.jit
def cast_to_cache(x, inverse_scale, DTYPE: tl.constexpr, KIND: tl.constexpr, NATIVE_FP8: tl.constexpr = False):
    """x times inverse_scale, if there is one, in a cache's dtype and kind.

    The reciprocal is computed once a head, so that an element costs only a product.
    """
    if inverse_scale is not None:
        x = x.to(tl.float32) * inverse_scale
    if KIND == "e4m3" or KIND == "e4m3_rows":
        x = encode_e4m3(x.to(tl.float32), NATIVE_FP8)
    elif KIND == "e5m2":
        x = encode_e5m2(x.to(tl.float32), NATIVE_FP8)
    elif KIND == "int8":
        x = round_to_int8(x)
    else:
        x = x.to(DTYPE)
    return x
