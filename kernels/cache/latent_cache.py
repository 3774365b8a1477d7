"""Layouts of latent caches (one row a token: latent and rotated dimensions) and of caches of indexer keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..core.checks import MAX_HEAD_DIM, check_is_tensor, check_last_dim_contiguous, check_tensor
from ..core.dtypes import KV_KINDS, SMALLEST, kv_kind
from ..core.errors import InvalidInputError

# A row of the published fp8 form (FlashMLA, vLLM's "fp8_ds_mla"): 512 e4m3 latents, a float32 scale for each 128 of
# them, 64 bfloat16 rotated dimensions.
PACKED_BYTES, PACKED_LATENT, PACKED_ROPE, PACKED_GROUP = 656, 512, 64, 128
# A record of DeepSeek-V4 (vLLM, 2026): 448 e4m3 codes, 64 bfloat16 rotated dimensions, a UE8M0 scale (a power of two,
# its exponent as a byte) for each 64 codes, a byte of padding.
RECORD_BYTES, RECORD_CODES, RECORD_ROPE, RECORD_GROUP = 584, 448, 64, 64
RECORD_DIM = RECORD_CODES + RECORD_ROPE
# A record of DeepSeek-V4.1 (vLLM, 2026): 512 e4m3 codes, the rotated ones too, then a UE8M0 scale for each 32 of them.
MXFP8_BYTES, MXFP8_GROUP = 528, 32
# A record of DeepSeek-V4 in NVFP4 (sizes as in FlashInfer's pull request 4955): e2m1 codes, two a byte, then bfloat16
# rotated dimensions, an e4m3 scale a group, and padding. It has no float32 scale of a table, because a norm bounds the
# numbers, see docs/kv-cache-formats.md.
NVFP4_BYTES, NVFP4_GROUP = 384, 16
# Largest latent, that of dots3-note's layers with a window.
MAX_LATENT = 1024


def latent_kind(kv_cache: torch.Tensor) -> str:
    """Return the kind of a latent cache: the name of a `KvKind`, or "packed" for the published fp8 form."""
    return "packed" if kv_cache.dtype == torch.uint8 else kv_kind(kv_cache.dtype).name


class LatentParts(NamedTuple):
    """Views of a latent cache, [num_blocks, block_size, size] each.

    rope: int16 bits of bfloat16 in the published fp8 form.
    scales: float32, only in the published fp8 form.
    """

    latent: torch.Tensor
    rope: torch.Tensor
    scales: torch.Tensor | None


def latent_parts(kv_cache: torch.Tensor, v_head_dim: int) -> LatentParts:
    """Return the parts of a cache that `check_latent_cache` accepts."""
    if kv_cache.dtype != torch.uint8:
        return LatentParts(kv_cache[..., :v_head_dim], kv_cache[..., v_head_dim:], None)
    start = PACKED_BYTES - 2 * PACKED_ROPE
    scales = kv_cache[..., PACKED_LATENT:start].view(torch.float32)
    return LatentParts(kv_cache[..., :PACKED_LATENT], kv_cache[..., start:].view(torch.int16), scales)


def typed_parts(kv_cache: torch.Tensor, v_head_dim: int) -> LatentParts:
    """Return `latent_parts` in the dtypes of their numbers."""
    latent, rope, scales = latent_parts(kv_cache, v_head_dim)
    if scales is not None:
        latent, rope = latent.view(torch.float8_e4m3fn), rope.view(torch.bfloat16)
    return LatentParts(latent, rope, scales)


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
        if (size, v_head_dim) != (PACKED_BYTES, PACKED_LATENT):
            raise InvalidInputError(
                f"kv_cache: {size} bytes a token and v_head_dim {v_head_dim}, expected {PACKED_BYTES} and "
                f"{PACKED_LATENT} of a uint8 cache"
            )
        if kv_cache.data_ptr() % 4 or any(stride % 4 for stride in kv_cache.stride()[:2]):
            raise InvalidInputError(f"kv_cache: strides {kv_cache.stride()}, expected multiples of 4 bytes")
        return PACKED_LATENT + PACKED_ROPE
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


def dequantized(
    rows: torch.Tensor, v_head_dim: int, k_scale: torch.Tensor | None, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return rows of a latent cache as numbers of a float dtype, [..., latent + rope]."""
    if rows.dtype != torch.uint8:
        if k_scale is None:
            return rows.to(dtype)
        return rows.to(dtype) * k_scale
    latent, rope, scales = typed_parts(rows, v_head_dim)
    assert scales is not None
    numbers = latent.to(dtype).unflatten(-1, (-1, PACKED_GROUP)) * scales.unsqueeze(-1)
    return torch.cat([numbers.flatten(-2), rope.to(dtype)], -1)


@dataclass(frozen=True)
class RecordForm:
    """A form of rows of 512 numbers in bytes: codes, then bfloat16 numbers, then a scale for each `group` of codes.

    This base class has e4m3 codes. Their scales are powers of two, exponents as bytes.

    Attributes:
        kind: its name in kernels.
        num_bytes: size of a record; bytes behind the scales are padding.
        num_codes: numbers that are codes, the first ones.
        codes_per_byte: 1, or 2 with the first code in the low bits.
    """

    kind: str
    num_bytes: int
    num_codes: int
    group: int
    codes_per_byte: int = 1

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes, where the bfloat16 numbers begin."""
        return self.num_codes // self.codes_per_byte

    def numbers(self, rows: torch.Tensor) -> torch.Tensor:
        """Return what `encode` rounds, [..., num_codes]: rows, or NaN in groups with a number that is not finite."""
        groups = rows[..., : self.num_codes].unflatten(-1, (-1, self.group))
        return (groups + (groups * 0.0).sum(-1, keepdim=True)).flatten(-2)

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes of rows [..., 512] and the scales of their groups, as bytes.

        A scale is the least power of two that is not below the group's largest magnitude / 448; NaN, exponent 255, if a
        number of the group is not finite.
        """
        groups = rows[..., : self.num_codes].float().unflatten(-1, (-1, self.group))  # [..., groups, group]
        largest = groups.abs().amax(-1, keepdim=True).clamp(min=SMALLEST)
        mantissas, exponents = torch.frexp(largest / 448.0)  # a mantissa is at least 0.5 and below 1
        exponents = exponents - (mantissas == 0.5).int() + 127
        exponents = exponents.masked_fill(~groups.isfinite().all(-1, keepdim=True), 255)
        codes = (groups / _powers(exponents)).clamp(-448, 448).flatten(-2).to(torch.float8_e4m3fn)
        return codes.view(torch.uint8), exponents.squeeze(-1).to(torch.uint8)

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the numbers of codes and scales, [..., num_codes]."""
        numbers = codes.view(torch.float8_e4m3fn).to(dtype).unflatten(-1, (-1, self.group))  # [..., groups, group]
        return (numbers * _powers(scales.unsqueeze(-1)).to(dtype)).flatten(-2)


class _Nvfp4Form(RecordForm):
    """e2m1 codes with e4m3 scales, as an NVFP4 cache without the scale of a table has them."""

    def numbers(self, rows: torch.Tensor) -> torch.Tensor:
        return _NVFP4.numbers(rows[..., : self.num_codes], None, rows.dtype)

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = _NVFP4.encode(rows[..., : self.num_codes], None)
        assert scales is not None
        return codes.view(torch.uint8), scales.view(torch.uint8)

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return _NVFP4.decode(codes, scales.view(torch.float8_e4m3fn), dtype)


_NVFP4 = KV_KINDS[torch.float4_e2m1fn_x2]
_FORMS = (
    RecordForm("record", RECORD_BYTES, RECORD_CODES, RECORD_GROUP),
    RecordForm("mxfp8", MXFP8_BYTES, RECORD_DIM, MXFP8_GROUP),
    _Nvfp4Form("nvfp4_record", NVFP4_BYTES, RECORD_CODES, NVFP4_GROUP, codes_per_byte=2),
)
RECORD_FORMS = {form.num_bytes: form for form in _FORMS}
# Sizes of records, for messages of errors.
RECORD_SIZES = " or ".join(map(str, RECORD_FORMS))


def record_form(cache: torch.Tensor, head_dim: int) -> RecordForm | None:
    """Return the form of a cache's rows of `head_dim` numbers; None if they are no records."""
    if cache.dtype != torch.uint8 or head_dim != RECORD_DIM:
        return None
    return RECORD_FORMS.get(cache.shape[-1])


class RecordParts(NamedTuple):
    """Views of records: uint8 codes [..., code_bytes], bfloat16 numbers behind them, and a uint8 scale a group.

    rope: None if all numbers are codes.
    """

    codes: torch.Tensor
    rope: torch.Tensor | None
    scales: torch.Tensor


def record_parts(records: torch.Tensor) -> RecordParts:
    """Return the parts of records, uint8 [..., num_bytes]."""
    form = RECORD_FORMS[records.shape[-1]]
    start = form.code_bytes + 2 * (RECORD_DIM - form.num_codes)
    rope = None
    if form.num_codes < RECORD_DIM:
        rope = records[..., form.code_bytes : start].view(torch.bfloat16)
    num_groups = form.num_codes // form.group
    return RecordParts(records[..., : form.code_bytes], rope, records[..., start : start + num_groups])


def encode_records(rows: torch.Tensor, num_bytes: int = RECORD_BYTES) -> torch.Tensor:
    """Return rows [..., 512] as records, uint8 [..., num_bytes]; see `RecordForm.encode`."""
    form = RECORD_FORMS[num_bytes]
    codes, scales = form.encode(rows)
    records = torch.zeros(*rows.shape[:-1], num_bytes, dtype=torch.uint8, device=rows.device)
    parts = record_parts(records)
    parts.codes.copy_(codes)
    if parts.rope is not None:
        parts.rope.copy_(rows[..., form.num_codes :])
    parts.scales.copy_(scales)
    return records


def decode_records(records: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return records as numbers of a float dtype, [..., 512]."""
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
        expected = f"{RECORD_SIZES}, and {RECORD_DIM}, of a uint8 cache"
        raise InvalidInputError(f"{name}: {cache.shape[2]} bytes a row and head_dim {head_dim}, expected {expected}")
    if cache.data_ptr() % 2 or any(stride % 8 for stride in cache.stride()[:2]):
        raise InvalidInputError(f"{name}: strides {cache.stride()}, expected multiples of 8 bytes")


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
    keys, scales = index_parts(rows, head_dim)
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
