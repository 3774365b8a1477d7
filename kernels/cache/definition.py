"""Writes to the cache as formulas; see `kernels.layers.definition` for what a definition is.

A definition of a write returns the numbers of the whole cache afterwards, before new rows are rounded to its dtype. The
functions whose names begin with `write` compute in float32 and write to the cache.
"""

from __future__ import annotations

import functools

import torch

from ..core.dtypes import KV_KINDS, as_kernel_argument, kv_kind
from ..core.ids import check_ids_on_host, check_rising_on_host
from ..layers import definition as layers
from .latent_cache import RECORD_FORMS, encode_records, stored_rows


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_table_scale: torch.Tensor | None = None,
    v_table_scale: torch.Tensor | None = None,
    compute: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both caches [num_blocks, block_size, num_kv_heads, head_dim] with the numbers of `KvKind` in their slots.

    Codes are returned times the scales in the cache.
    """
    written = []
    for rows, cache, scale, table_scale in (
        (key, k_cache, k_scale, k_table_scale),
        (value, v_cache, v_scale, v_table_scale),
    ):
        kind = kv_kind(cache.dtype)
        numbers = kind.decode(cache, scale, compute)
        divisor = table_scale if kind.has_scales else scale
        written.append(with_rows(numbers, slot_mapping, kind.numbers(rows, divisor, compute)))
    return written[0], written[1]


def qk_norm_rope_and_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    *,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_table_scale: torch.Tensor | None = None,
    v_table_scale: torch.Tensor | None = None,
    hadamard_signs: torch.Tensor | None = None,
    compute: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `norm_and_rotate` of q, and both caches after `reshape_and_cache` of `norm_and_rotate` of k, and of v."""
    rotate = functools.partial(
        norm_and_rotate,
        positions=positions,
        cos_sin_cache=cos_sin_cache,
        eps=eps,
        interleaved=interleaved,
        hadamard_signs=hadamard_signs,
        compute=compute,
    )
    caches = reshape_and_cache(
        rotate(k, k_weight), v, k_cache, v_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale,
        k_table_scale=k_table_scale, v_table_scale=v_table_scale, compute=compute,
    )  # fmt: skip
    return rotate(q, q_weight), *caches


def norm_and_rotate(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    *,
    eps: float = 1e-6,
    interleaved: bool = False,
    hadamard_signs: torch.Tensor | None = None,
    compute: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Return x [num_tokens, num_heads, head_dim] after `rms_norm` of every head, if there is a weight, and `rotate`.

    With signs, `hadamard` follows.
    """
    if weight is not None:
        x = layers.rms_norm(x, weight, eps, compute=compute)
    rotated = layers.rotate(x, positions, cos_sin_cache, interleaved=interleaved, compute=compute)
    if hadamard_signs is None:
        return rotated
    return hadamard(rotated, hadamard_signs, compute=compute)


def hadamard(x: torch.Tensor, signs: torch.Tensor, *, compute: torch.dtype = torch.float64) -> torch.Tensor:
    """Return x [..., size] times signs [size], each block times Sylvester's matrix over the root of the block's size.

    A block is the largest power of two that divides `size`. This randomised Hadamard transform is orthogonal.
    """
    size = x.shape[-1]
    block = size & -size
    matrix = _hadamard_matrix(block).to(x.device, compute)  # [block, block]
    blocks = (x.to(compute) * signs.to(compute)).unflatten(-1, (-1, block))  # [..., size / block, block]
    return (blocks @ matrix).flatten(-2) * block**-0.5


@functools.cache
def _hadamard_matrix(size: int) -> torch.Tensor:
    """Return Sylvester's matrix: 1, and in every step [[M, M], [M, -M]]."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        upper = torch.cat([matrix, matrix], 1)
        lower = torch.cat([matrix, -matrix], 1)
        matrix = torch.cat([upper, lower])
    return matrix


def concat_and_cache_mla(
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    compute: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Return the numbers of the cache [num_blocks, block_size, latent + rope] with those that it rounds in the slots.

    Rows of numbers are divided by the scale, and saturate at the largest 8-bit float; records are as in `RecordForm`.
    """
    rows = torch.cat([latent, k_rope], 1).to(compute)  # [num_tokens, latent + rope]
    if kv_cache.dtype == torch.uint8:
        form = RECORD_FORMS[kv_cache.shape[-1]]
        rope = kv_kind(form.rope_dtype).numbers(rows[:, form.num_codes :], None, compute)
        rows = torch.cat([form.numbers(rows), rope], 1)
    else:
        rows = kv_kind(kv_cache.dtype).numbers(rows, scale, compute)
    return with_rows(stored_rows(kv_cache, compute), slot_mapping, rows)


def mla_norm_rope_and_cache(
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    latent_weight: torch.Tensor,
    *,
    eps: float = 1e-6,
    interleaved: bool = False,
    scale: torch.Tensor | None = None,
    compute: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `rotate` of q_rope, and the cache after `concat_and_cache_mla` of `rms_norm` of latent and of k_rope."""
    rotate = functools.partial(
        layers.rotate, positions=positions, cos_sin_cache=cos_sin_cache, interleaved=interleaved, compute=compute
    )
    normed = layers.rms_norm(latent, latent_weight, eps, compute=compute)  # [num_tokens, latent]
    rotated = rotate(k_rope.unsqueeze(1)).squeeze(1)  # [num_tokens, rope]
    numbers = concat_and_cache_mla(normed, rotated, kv_cache, slot_mapping, scale=scale, compute=compute)
    return rotate(q_rope), numbers


def with_rows(cache: torch.Tensor, slot_mapping: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return a copy of a cache [num_blocks, block_size, ...] after `write_rows`."""
    written = cache.clone()
    write_rows(slot_mapping, (written, rows))
    return written


def write_rows(slot_mapping: torch.Tensor, *parts: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Write row t to slot slot_mapping[t], block_id * block_size + offset; negative slots are skipped.

    parts: caches [num_blocks, block_size, ...], each with its rows [num_tokens, ...] in the same dtype.

    Raises:
        InvalidInputError: a slot lies beyond the caches. Nothing is written then.
    """
    if len(slot_mapping) == 0:
        return
    num_blocks, block_size = parts[0][0].shape[:2]
    lowest, highest = slot_mapping.aminmax()  # one pass finds slots to skip and slots out of range
    if int(highest) >= num_blocks * block_size:
        check_ids_on_host("slot_mapping", slot_mapping, None, num_blocks * block_size - 1)
    tokens = None
    if int(lowest) < 0:
        (tokens,) = torch.where(slot_mapping >= 0)
        slot_mapping = slot_mapping[tokens]
    for cache, rows in parts:
        if tokens is not None:
            rows = rows[tokens]
        if cache.is_contiguous():
            cache.flatten(0, 1).index_copy_(0, slot_mapping, rows)
        else:
            cache[slot_mapping // block_size, slot_mapping % block_size] = rows


def write(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_table_scale: torch.Tensor | None = None,
    v_table_scale: torch.Tensor | None = None,
) -> None:
    """`kernels.cache.reshape_and_cache` for rows of any float dtype. It raises before it writes."""
    parts = []
    for rows, cache, scale, table_scale in (
        (key, k_cache, k_scale, k_table_scale),
        (value, v_cache, v_scale, v_table_scale),
    ):
        if scale is None and cache.dtype not in KV_KINDS:
            parts.append((cache, rows.to(cache.dtype)))
            continue
        kind = kv_kind(cache.dtype)
        codes, row_scales = kind.encode(rows, table_scale if kind.has_scales else scale)
        # As bytes: not every device indexes 8-bit floats.
        parts.append((as_kernel_argument(cache), as_kernel_argument(codes)))
        if scale is not None and row_scales is not None:
            parts.append((as_kernel_argument(scale), as_kernel_argument(row_scales)))
    write_rows(slot_mapping, *parts)


def write_rotated(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    *,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_table_scale: torch.Tensor | None = None,
    v_table_scale: torch.Tensor | None = None,
    hadamard_signs: torch.Tensor | None = None,
) -> torch.Tensor:
    """`kernels.cache.qk_norm_rope_and_cache`. It raises before it writes."""
    rotate = functools.partial(
        norm_and_rotate,
        positions=positions,
        cos_sin_cache=cos_sin_cache,
        eps=eps,
        interleaved=interleaved,
        hadamard_signs=hadamard_signs,
        compute=torch.float32,
    )
    rotated_q, rotated_k = rotate(q, q_weight), rotate(k, k_weight)
    write(
        rotated_k, v, k_cache, v_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale, k_table_scale=k_table_scale,
        v_table_scale=v_table_scale,
    )  # fmt: skip
    return q.copy_(rotated_q)


def write_latents(
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
) -> None:
    """`kernels.cache.concat_and_cache_mla` for rows of any float dtype. It raises before it writes."""
    rows = torch.cat([latent, k_rope], 1).float()  # [num_tokens, latent + rope]
    if kv_cache.dtype == torch.uint8:
        rows = encode_records(rows, kv_cache.shape[-1])
    else:
        rows = kv_kind(kv_cache.dtype).numbers(rows, scale, torch.float32).to(kv_cache.dtype)
    write_rows(slot_mapping, (as_kernel_argument(kv_cache), as_kernel_argument(rows)))


def write_rotated_latents(
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    latent_weight: torch.Tensor,
    *,
    eps: float = 1e-6,
    interleaved: bool = False,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """`kernels.cache.mla_norm_rope_and_cache`. It raises before it writes."""
    normed = layers.rms_norm(latent, latent_weight, eps, compute=torch.float32)
    rotated = torch.cat([q_rope, k_rope.unsqueeze(1)], 1)  # [num_tokens, num_heads + 1, rope]
    rotated = layers.rotate(rotated, positions, cos_sin_cache, interleaved=interleaved, compute=torch.float32)
    write_latents(normed, rotated[:, -1], kv_cache, slot_mapping, scale=scale)
    return q_rope.copy_(rotated[:, :-1])


def canary_terms(token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return what tokens add to the running sum of their sequence, int64: SplitMix64 of position and token id."""
    bits = (positions.long() << 32) + (token_ids & _LOW_BITS) + _as_int64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ _shifted(bits, shift)) * _as_int64(factor)
    return bits ^ _shifted(bits, 31)


def canaries_of(sums: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the canaries of tokens, int64: the high bits of the running sum behind each token, then its id."""
    return (_shifted(sums, 32) << 32) | (token_ids & _LOW_BITS)


def write_canaries(
    canaries: torch.Tensor,
    token_ids: torch.Tensor,
    slot_mapping: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    sums: torch.Tensor,
) -> torch.Tensor:
    """`kernels.cache.write_canaries`. It raises before it writes."""
    check_ids_on_host("slot_mapping", slot_mapping, None, canaries.numel() - 1)
    check_ids_on_host("cu_seqlens_q", cu_seqlens_q, 0, len(token_ids))
    check_rising_on_host("cu_seqlens_q", cu_seqlens_q, len(token_ids))
    offsets = cu_seqlens_q.long()  # [S + 1]
    q_lens = offsets.diff()
    rows = torch.arange(int(offsets[0]), int(offsets[-1]), device=canaries.device)  # [T], without padding
    seqs = torch.arange(len(seq_lens), device=canaries.device).repeat_interleave(q_lens)
    positions = rows + (seq_lens.long() - offsets[1:])[seqs]
    terms = canary_terms(token_ids[rows], positions)
    # Sums over all rows, where those of a sequence begin with the sum before its first row.
    totals = torch.cat([terms.new_zeros(1), terms.cumsum(0)])
    starts = totals[offsets[:-1] - offsets[0]]
    running = totals[1:] + (sums - starts)[seqs]
    slots = slot_mapping[rows]
    written = slots >= 0
    canaries.view(-1)[slots[written]] = canaries_of(running, token_ids[rows])[written]
    return sums + totals[offsets[1:] - offsets[0]] - starts


def most_positions(canaries: torch.Tensor, block_table: torch.Tensor) -> int:
    """Return the longest sequence that `check_canaries` takes: the slots of a row of the table, or of all blocks."""
    return max(block_table.shape[1] * canaries.shape[1], canaries.numel())


def check_canaries(
    canaries: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    firsts: torch.Tensor,
    sums: torch.Tensor,
    ends: torch.Tensor,
) -> torch.Tensor:
    """`kernels.cache.check_canaries`. A length beyond table and cache is refused, because it may not fit in memory."""
    num_blocks, block_size = canaries.shape
    check_ids_on_host("seq_lens", seq_lens, 0, most_positions(canaries, block_table))
    positions = torch.arange(int(seq_lens.max()) if len(seq_lens) else 0, device=canaries.device)  # [longest]
    is_held = (positions >= firsts[:, None]) & (positions < seq_lens[:, None])  # [S, longest]
    columns = positions // block_size
    blocks = torch.full_like(is_held, -1, dtype=torch.int64)
    inside = columns < block_table.shape[1]
    blocks[:, inside] = block_table[:, columns[inside]].long()
    is_block = (blocks >= 0) & (blocks < num_blocks)
    held = canaries[blocks.where(is_block, 0), positions % block_size].where(is_block, 0)
    terms = canary_terms(held, positions).where(is_held, 0)
    running = sums[:, None] + terms.cumsum(1)
    is_wrong = is_held & ~(is_block & (_shifted(running, 32) == _shifted(held, 32)))
    lengths = seq_lens.long()
    wrong = positions.where(is_wrong, lengths[:, None]).amin(1) if len(positions) else lengths
    is_right = (wrong == lengths) & (sums + terms.sum(1) == ends)
    return wrong.where(~is_right & (firsts >= 0), -1).int()


_LOW_BITS = 0xFFFFFFFF


def _as_int64(bits: int) -> int:
    """Return 64 bits as a signed number, as PyTorch takes it."""
    return bits - (1 << 64)


def _shifted(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Shift int64 to the right as if they had no sign."""
    return (bits >> count) & ((1 << (64 - count)) - 1)
