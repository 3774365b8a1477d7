"""Layouts of latent caches (one row a token: latent and rotated dimensions) and of caches of indexer keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ..core.checks import MAX_HEAD_DIM, check_is_tensor, check_last_dim_contiguous, check_tensor
from ..core.dtypes import KV_KINDS, SMALLEST, kv_kind
from ..core.errors import InvalidInputError

# Sizes of rows in bytes, and of the groups of codes that share a scale.
# Rows of latents (FlashMLA; vLLM's "fp8_ds_mla" and "nvfp4_ds_mla") have latents as codes, then rotated numbers.
PACKED_BYTES, PACKED_GROUP = 656, 128
NVFP4_LATENT_BYTES = 352
LATENT_CODES, LATENT_ROPE = 512, 64
LATENT_DIM = LATENT_CODES + LATENT_ROPE
# Records of DeepSeek-V4 (vLLM, 2026) have codes, then rotated numbers.
RECORD_BYTES, RECORD_CODES, RECORD_ROPE, RECORD_GROUP = 584, 448, 64, 64
RECORD_DIM = RECORD_CODES + RECORD_ROPE
# Records of DeepSeek-V4.1 (vLLM, 2026) have codes alone, for the rotated numbers too.
MXFP8_BYTES, MXFP8_GROUP = 528, 32
# Records of DeepSeek-V4 in NVFP4 have the sizes of FlashInfer's pull request 4955.
NVFP4_BYTES, NVFP4_GROUP = 384, 16
# Largest latent, that of dots3-note's layers with a window.
MAX_LATENT = 1024


def latent_kind(kv_cache: torch.Tensor) -> str:
    """Return the kind of a latent cache: the name of a `KvKind`, or that of a `RecordForm`."""
    if kv_cache.dtype == torch.uint8:
        return RECORD_FORMS[kv_cache.shape[-1]].kind
    return kv_kind(kv_cache.dtype).name


class LatentParts(NamedTuple):
    """Views of a latent cache, [num_blocks, block_size, size] each. scales: None unless rows are records."""

    latent: torch.Tensor
    rope: torch.Tensor
    scales: torch.Tensor | None


def latent_parts(kv_cache: torch.Tensor, v_head_dim: int) -> LatentParts:
    """Return the parts of a cache that `check_latent_cache` accepts."""
    if kv_cache.dtype != torch.uint8:
        return LatentParts(kv_cache[..., :v_head_dim], kv_cache[..., v_head_dim:], None)
    codes, rope, scales = record_parts(kv_cache)
    assert rope is not None
    return LatentParts(codes, rope, scales)


def check_latent_cache(kv_cache: torch.Tensor, v_head_dim: int, dtype: torch.dtype) -> int:
    """Return the number of values in a row, latent and rotated dimensions together.

    Raises:
        InvalidInputError: the cache does not fit queries or latents of `dtype`.
    """
    allowed = (dtype, torch.float8_e4m3fn, torch.uint8)
    check_tensor("kv_cache", kv_cache, ("num_blocks", "block_size", "latent + rope"), allowed)
    check_last_dim_contiguous("kv_cache", kv_cache)
    if kv_cache.shape[1] == 0:
        raise InvalidInputError("kv_cache: block_size 0, expected at least 1")
    size = kv_cache.shape[2]
    if kv_cache.dtype == torch.uint8:
        if v_head_dim != LATENT_CODES or record_form(kv_cache, LATENT_DIM) is None:
            raise InvalidInputError(
                f"kv_cache: {size} bytes a token and v_head_dim {v_head_dim}, expected {record_sizes(LATENT_DIM)} and "
                f"{LATENT_CODES} of a uint8 cache"
            )
        if kv_cache.data_ptr() % 4 or any(stride % 4 for stride in kv_cache.stride()[:2]):
            raise InvalidInputError(f"kv_cache: strides {kv_cache.stride()}, expected multiples of 4 bytes")
        return LATENT_DIM
    rope = size - v_head_dim
    if not 16 <= v_head_dim <= MAX_LATENT or v_head_dim % 16:
        raise InvalidInputError(f"v_head_dim: {v_head_dim}, expected a multiple of 16 from 16 to {MAX_LATENT}")
    if rope < 0 or rope % 16 or rope > MAX_HEAD_DIM:
        raise InvalidInputError(
            f"kv_cache: {size} numbers a token, expected v_head_dim {v_head_dim} and a multiple of 16 up to "
            f"{MAX_HEAD_DIM}"
        )
    return size


def check_latent_scale(name: str, scale: torch.Tensor | None, kv_cache: torch.Tensor) -> None:
    """Raise InvalidInputError unless `scale` is None, or one float32 number for an e4m3 cache."""
    if scale is None:
        return
    if kv_cache.dtype != torch.float8_e4m3fn:
        raise InvalidInputError(f"{name}: given, expected None for a cache of {kv_cache.dtype}")
    check_tensor(name, scale, scale.shape, (torch.float32,), kv_cache.device)
    if scale.numel() != 1:
        raise InvalidInputError(f"{name}: shape {list(scale.shape)}, expected [] or [1]")


def dequantized(rows: torch.Tensor, k_scale: torch.Tensor | None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return rows of a latent cache as numbers of a float dtype, [..., latent + rope]."""
    numbers = stored_rows(rows, dtype)
    if k_scale is None:
        return numbers
    return numbers * k_scale


@dataclass(frozen=True)
class RecordForm:
    """A form of rows in bytes: codes, then numbers without a scale, then a scale for each `group` of codes.

    This base class has e4m3 codes. Their scales are powers of two, exponents as bytes.

    Attributes:
        kind: its name in kernels.
        num_bytes: size of a record; bytes behind the last part are padding.
        num_codes: numbers that are codes, the first ones.
        num_numbers: all numbers of a row.
        codes_per_byte: 1, or 2 with the first code in the low bits.
        rope_dtype: dtype of the numbers without a scale.
        scale_dtype: of the scales' tensor.
        scales_first: whether scales come before the numbers without one.
    """

    kind: str
    num_bytes: int
    num_codes: int
    group: int
    num_numbers: int = RECORD_DIM
    codes_per_byte: int = 1
    rope_dtype: torch.dtype = torch.bfloat16
    scale_dtype: torch.dtype = torch.uint8
    scales_first: bool = False

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes."""
        return self.num_codes // self.codes_per_byte

    @property
    def rope_bytes(self) -> int:
        """Bytes of the numbers without a scale."""
        return (self.num_numbers - self.num_codes) * self.rope_dtype.itemsize

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales."""
        return self.num_codes // self.group * self.scale_dtype.itemsize

    def numbers(self, rows: torch.Tensor) -> torch.Tensor:
        """Return what `encode` rounds, [..., num_codes]: rows, or NaN in groups with a number that is not finite."""
        groups = self._groups(rows)
        return (groups + (groups * 0.0).sum(-1, keepdim=True)).flatten(-2)

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes of rows [..., num_numbers] as bytes, and the scales of their groups.

        A scale is the least power of two that is not below the group's largest magnitude / 448; NaN, exponent 255, if a
        number of the group is not finite.
        """
        groups = self._groups(rows.float())
        largest = groups.abs().amax(-1, keepdim=True).clamp(min=SMALLEST)
        mantissas, exponents = torch.frexp(largest / 448.0)  # a mantissa is at least 0.5 and below 1
        exponents = exponents - (mantissas == 0.5).int() + 127
        exponents = exponents.masked_fill(~groups.isfinite().all(-1, keepdim=True), 255)
        return _e4m3_bytes(groups / _powers(exponents)), exponents.squeeze(-1).to(torch.uint8)

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the numbers of codes and scales, [..., num_codes]."""
        numbers = codes.view(torch.float8_e4m3fn).to(dtype).unflatten(-1, (-1, self.group))  # [..., groups, group]
        return (numbers * self._factors(scales.unsqueeze(-1)).to(dtype)).flatten(-2)

    def _groups(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the numbers of rows that become codes, [..., groups, group]."""
        return rows[..., : self.num_codes].unflatten(-1, (-1, self.group))

    def _factors(self, scales: torch.Tensor) -> torch.Tensor:
        """Return scales as numbers."""
        return _powers(scales)


class _PackedForm(RecordForm):
    """e4m3 codes with float32 scales: a group's largest magnitude / 448, or NaN if a number is not finite."""

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        groups = self._groups(rows.float())
        largest = groups.abs().amax(-1, keepdim=True).clamp(min=SMALLEST)
        scales = (largest / 448.0).squeeze(-1) + (groups * 0.0).sum(-1)
        return _e4m3_bytes(groups * (448.0 / largest)), scales

    def _factors(self, scales: torch.Tensor) -> torch.Tensor:
        return scales


class _Nvfp4Form(RecordForm):
    """e2m1 codes with e4m3 scales, as an NVFP4 cache without the scale of a table has them.

    A norm bounds the numbers, so no scale of a table is needed, see docs/kv-cache-formats.md.
    """

    number_format = KV_KINDS[torch.float4_e2m1fn_x2]

    def numbers(self, rows: torch.Tensor) -> torch.Tensor:
        return self.number_format.numbers(rows[..., : self.num_codes], None, rows.dtype)

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = self.number_format.encode(rows[..., : self.num_codes], None)
        assert scales is not None
        return codes.view(torch.uint8), scales.view(torch.uint8)

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self.number_format.decode(codes, scales.view(torch.float8_e4m3fn), dtype)


class _Nvfp4LatentForm(_Nvfp4Form):
    """The same with scales of at least 2^-9, the smallest e4m3 number. That of group g is byte 8 (g % 4) + g // 4."""

    number_format = replace(KV_KINDS[torch.float4_e2m1fn_x2], least_scale=2.0**-9)

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = super().encode(rows)
        return codes, scales.unflatten(-1, (-1, 4)).transpose(-1, -2).flatten(-2)

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return super().decode(codes, scales.unflatten(-1, (4, -1)).transpose(-1, -2).flatten(-2), dtype)


_FORMS = (
    RecordForm("record", RECORD_BYTES, RECORD_CODES, RECORD_GROUP),
    RecordForm("mxfp8", MXFP8_BYTES, RECORD_DIM, MXFP8_GROUP),
    _Nvfp4Form("nvfp4_record", NVFP4_BYTES, RECORD_CODES, NVFP4_GROUP, codes_per_byte=2),
    _PackedForm(
        "packed",
        PACKED_BYTES,
        LATENT_CODES,
        PACKED_GROUP,
        num_numbers=LATENT_DIM,
        scale_dtype=torch.float32,
        scales_first=True,
    ),
    _Nvfp4LatentForm(
        "nvfp4_latent",
        NVFP4_LATENT_BYTES,
        LATENT_CODES,
        NVFP4_GROUP,
        num_numbers=LATENT_DIM,
        codes_per_byte=2,
        rope_dtype=torch.float8_e4m3fn,
    ),
)
RECORD_FORMS = {form.num_bytes: form for form in _FORMS}


def record_sizes(num_numbers: int) -> str:
    """Return the sizes of records with so many numbers, for messages of errors."""
    return " or ".join(str(form.num_bytes) for form in _FORMS if form.num_numbers == num_numbers)


def record_form(cache: torch.Tensor, num_numbers: int) -> RecordForm | None:
    """Return the form of a cache's rows of `num_numbers`; None if they are no records."""
    form = RECORD_FORMS.get(cache.shape[-1])
    if cache.dtype != torch.uint8 or form is None or form.num_numbers != num_numbers:
        return None
    return form


class RecordParts(NamedTuple):
    """Views of records: uint8 codes [..., code_bytes], the numbers without a scale, and a scale a group.

    rope: None if all numbers are codes.
    """

    codes: torch.Tensor
    rope: torch.Tensor | None
    scales: torch.Tensor


def record_parts(records: torch.Tensor) -> RecordParts:
    """Return the parts of records, uint8 [..., num_bytes]."""
    form = RECORD_FORMS[records.shape[-1]]
    first_rope = first_scale = form.code_bytes
    if form.scales_first:
        first_rope += form.scale_bytes
    else:
        first_scale += form.rope_bytes
    rope = None
    if form.rope_bytes:
        rope = records[..., first_rope : first_rope + form.rope_bytes].view(form.rope_dtype)
    scales = records[..., first_scale : first_scale + form.scale_bytes].view(form.scale_dtype)
    return RecordParts(records[..., : form.code_bytes], rope, scales)


def encode_records(rows: torch.Tensor, num_bytes: int = RECORD_BYTES) -> torch.Tensor:
    """Return rows [..., num_numbers] as records, uint8 [..., num_bytes]; see `RecordForm.encode`."""
    form = RECORD_FORMS[num_bytes]
    codes, scales = form.encode(rows)
    records = torch.zeros(*rows.shape[:-1], num_bytes, dtype=torch.uint8, device=rows.device)
    parts = record_parts(records)
    parts.codes.copy_(codes)
    if parts.rope is not None:
        rope = rows[..., form.num_codes :]
        if form.rope_dtype == torch.float8_e4m3fn:
            rope = rope.clamp(-448, 448)
        parts.rope.copy_(rope)
    parts.scales.copy_(scales)
    return records


def decode_records(records: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return records as numbers of a float dtype, [..., num_numbers]."""
    codes, rope, scales = record_parts(records)
    numbers = RECORD_FORMS[records.shape[-1]].decode(codes, scales, dtype)
    if rope is None:
        return numbers
    return torch.cat([numbers, rope.to(dtype)], -1)


def stored_rows(rows: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return rows of plain numbers, or records, as numbers of a float dtype."""
    if rows.dtype == torch.uint8:
        return decode_records(rows, dtype)
    return rows.to(dtype)


def check_rows(name: str, cache: torch.Tensor, q: torch.Tensor) -> None:
    """Raise InvalidInputError unless a cache holds rows that fit queries [.., head_dim]: numbers like q, or records."""
    head_dim = q.shape[-1]
    check_tensor(name, cache, ("num_blocks", "block_size", "size"), (q.dtype, torch.uint8), q.device)
    check_last_dim_contiguous(name, cache)
    if cache.shape[1] == 0:
        raise InvalidInputError(f"{name}: block_size 0, expected at least 1")
    if cache.dtype != torch.uint8:
        check_tensor(name, cache, (*cache.shape[:2], head_dim))
        return
    if record_form(cache, head_dim) is None:
        expected = f"{record_sizes(RECORD_DIM)}, and {RECORD_DIM}, of a uint8 cache"
        raise InvalidInputError(f"{name}: {cache.shape[2]} bytes a row and head_dim {head_dim}, expected {expected}")
    if cache.data_ptr() % 2 or any(stride % 8 for stride in cache.stride()[:2]):
        raise InvalidInputError(f"{name}: strides {cache.stride()}, expected multiples of 8 bytes")


def _e4m3_bytes(groups: torch.Tensor) -> torch.Tensor:
    """Return the e4m3 codes of groups [..., groups, group] as bytes, [..., groups * group]."""
    return groups.clamp(-448, 448).flatten(-2).to(torch.float8_e4m3fn).view(torch.uint8)


def _powers(exponents: torch.Tensor) -> torch.Tensor:
    """Return 2^(exponent - 127) in float32, NaN for 255. The range of exponents is that of float32's normal numbers."""
    exponents = exponents.int()
    powers = (exponents << 23).view(torch.float32)
    return powers.masked_fill(exponents == 255, torch.nan)


# Bytes of the float32 scale that follows the e4m3 values of an indexer key.
INDEX_SCALE_BYTES = 4


def index_parts(key_cache: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the values [..., head_dim] of a cache of indexer keys, and the scales [..., 1] of an e4m3 cache."""
    if key_cache.dtype != torch.uint8:
        return key_cache, None
    return key_cache[..., :head_dim], key_cache[..., head_dim:].view(torch.float32)


def index_cache_parts(key_cache: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return `index_parts` of a whole cache, [num_blocks, block_size, size], also of blocks that end with their scales.

    The cache is one that `check_index_cache` accepts.
    """
    if key_cache.dim() == 3:
        return index_parts(key_cache, head_dim)
    block_size = key_cache.shape[1] // (head_dim + INDEX_SCALE_BYTES)
    codes, scales = key_cache.split_with_sizes([block_size * head_dim, block_size * INDEX_SCALE_BYTES], 1)
    return codes.unflatten(1, (block_size, head_dim)), scales.view(torch.float32).unsqueeze(2)


def check_index_cache(key_cache: torch.Tensor, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise InvalidInputError unless a cache holds indexer keys of `head_dim` for queries of `dtype`."""
    size = head_dim
    check_is_tensor("key_cache", key_cache)
    if key_cache.dtype == torch.uint8:
        size += INDEX_SCALE_BYTES
        if key_cache.dim() == 2:
            _check_blocks_with_scales(key_cache, head_dim, device)
            return
    check_tensor("key_cache", key_cache, ("num_blocks", "block_size", size), (dtype, torch.uint8), device)
    check_last_dim_contiguous("key_cache", key_cache)
    if key_cache.shape[1] == 0:
        raise InvalidInputError("key_cache: block_size 0, expected at least 1")
    is_aligned = not any(number % 4 for number in (key_cache.data_ptr(), head_dim, *key_cache.stride()[:2]))
    if key_cache.dtype == torch.uint8 and not is_aligned:
        raise InvalidInputError(f"key_cache: strides {key_cache.stride()}, expected multiples of 4 bytes")


def _check_blocks_with_scales(key_cache: torch.Tensor, head_dim: int, device: torch.device) -> None:
    """Raise InvalidInputError unless blocks hold e4m3 keys, then their scales."""
    check_tensor("key_cache", key_cache, ("num_blocks", "bytes of a block"), (torch.uint8,), device)
    check_last_dim_contiguous("key_cache", key_cache)
    size, num_bytes = head_dim + INDEX_SCALE_BYTES, key_cache.shape[1]
    if num_bytes == 0 or num_bytes % size:
        raise InvalidInputError(f"key_cache: blocks of {num_bytes} bytes, expected a multiple of {size}")
    if any(number % 4 for number in (key_cache.data_ptr(), head_dim, key_cache.stride(0))):
        raise InvalidInputError(f"key_cache: strides {key_cache.stride()}, expected multiples of 4 bytes")


def index_keys(rows: torch.Tensor, head_dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return rows of a cache of indexer keys as numbers of a float dtype, [..., head_dim]."""
    return index_numbers(*index_parts(rows, head_dim), dtype)


def index_numbers(keys: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return the parts of indexer keys, see `index_parts`, as numbers of a float dtype, [..., head_dim]."""
    if scales is None:
        return keys.to(dtype)
    return keys.view(torch.float8_e4m3fn).to(dtype) * scales


def encode_index_keys(keys: torch.Tensor) -> torch.Tensor:
    """Return indexer keys [num_tokens, head_dim] as e4m3 codes and a float32 scale, uint8 [..., head_dim + 4]."""
    wide, head_dim = keys.float(), keys.shape[-1]
    rows = torch.empty(*keys.shape[:-1], head_dim + INDEX_SCALE_BYTES, dtype=torch.uint8, device=keys.device)
    codes, scales = index_parts(rows, head_dim)
    assert scales is not None
    scales.copy_(wide.abs().amax(-1, keepdim=True).clamp_(min=SMALLEST) / 448.0)
    codes.copy_((wide / scales).clamp_(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))
    return rows


def write_index_keys(keys: torch.Tensor, key_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write indexer keys [num_tokens, head_dim] to their slots of a cache, as `choose_keys` describes it.

    Negative slots are padding. Their keys go to block 0, which no sequence uses, so the host need not wait for the
    device.
    """
    head_dim = keys.shape[1]
    if key_cache.dtype == torch.uint8:
        keys = encode_index_keys(keys)
    slots = slot_mapping.clamp(min=0)
    if key_cache.dim() == 3:
        block_size = key_cache.shape[1]
        key_cache[slots // block_size, slots % block_size] = keys
        return
    targets = index_cache_parts(key_cache, head_dim)
    block_size = targets[0].shape[1]
    for target, part in zip(targets, index_parts(keys, head_dim), strict=True):
        assert target is not None
        assert part is not None
        target[slots // block_size, slots % block_size] = part
