"""New keys and values on their way to the cache, rotated where asked for, with the queries that go with them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from paged.errors import InvalidInputError, UnsupportedError
from paged.interop.arguments import Arguments
from paged.interop.layouts import Batch, check_offsets, check_within, is_readable, lengths, with_contiguous_rows
from paged.kernels.cache.reshape_and_cache import reshape_and_cache
from paged.kernels.common.checks import FLOAT_DTYPES, check_tensor
from paged.kernels.layers.rotary_embedding import rotary_embedding


class NewKeys(NamedTuple):
    """key, value: [num_new, num_kv_heads, head_dim], each with its cache's. seqs, steps: int64 [num_new], whose
    key a row is, and which of it.

    counts: int32 [num_seqs], or one number for all, how many a sequence gains.
    """

    key: torch.Tensor
    value: torch.Tensor
    seqs: torch.Tensor
    steps: torch.Tensor
    counts: torch.Tensor | int


def read_new_keys(args: Arguments, batch: Batch) -> NewKeys | None:
    """[batch, seqlen_new, num_kv_heads, head_dim], or [total_new, ...] with cu_seqlens_k_new."""
    if ("key" in args) != ("value" in args):
        raise InvalidInputError("key, value: one of them is None, expected both or none")
    num_seqs, device = batch.num_seqs, batch.k_cache.device
    offsets = lengths(args, "cu_seqlens_k_new", num_seqs + 1, device)
    if "key" not in args:
        return None  # with offsets, too: SGLang gives those of all its keys, which FlashAttention 3 leaves unread
    if "seq_lens" not in args:
        raise InvalidInputError(f"cache_seqlens: None, expected one: {args.function} needs it")
    key, value = args.tensor("key"), args.tensor("value")
    rows: tuple[int | str, ...] = (num_seqs, "seqlen_new") if offsets is None else ("total_new",)
    check_tensor("key", key, (*rows, *batch.k_cache.shape[2:]), FLOAT_DTYPES, device)
    check_tensor("value", value, (*key.shape[:-1], batch.v_cache.shape[3]), (key.dtype,), device)
    key, value = with_contiguous_rows(key), with_contiguous_rows(value)
    if offsets is None:
        seqs_and_steps = _steps(num_seqs, key.shape[1], device)
        return NewKeys(key.flatten(0, 1), value.flatten(0, 1), *seqs_and_steps, key.shape[1])
    check_offsets("cu_seqlens_k_new", offsets, len(key))
    return NewKeys(key, value, *_packed_steps(offsets, len(key)), offsets.diff())


def rotate(args: Arguments, batch: Batch, new: NewKeys | None, *, in_order: bool) -> tuple[Batch, NewKeys | None]:
    """Rotated copies, from each sequence's length on; without `in_order` all its queries at that one position."""
    cos, sin = args.optional_tensor("rotary_cos"), args.optional_tensor("rotary_sin")
    starts = lengths(args, "rotary_seqlens", batch.num_seqs, batch.k_cache.device)
    is_interleaved = args.flag("rotary_interleaved", True)
    if cos is None and sin is None:
        if starts is not None:
            raise InvalidInputError("rotary_seqlens: given without rotary_cos and rotary_sin")
        return batch, new
    if cos is None or sin is None or new is None:
        raise InvalidInputError("rotary_cos, rotary_sin: expected both, with k and v, or neither")
    if batch.q.dtype == torch.float8_e4m3fn:
        raise UnsupportedError("rotary_cos: q is float8_e4m3fn, which cannot be rotated")
    check_tensor("rotary_cos", cos, ("max_position", "rotary_dim / 2"), FLOAT_DTYPES, batch.k_cache.device)
    check_tensor("rotary_sin", sin, cos.shape, FLOAT_DTYPES, batch.k_cache.device)
    if not 0 < 2 * cos.shape[1] <= batch.k_cache.shape[3]:
        raise InvalidInputError(f"rotary_cos: {cos.shape[1]} columns, expected 1 to {batch.k_cache.shape[3] // 2}")
    if batch.num_seqs == 0:
        return batch, new
    table, starts = torch.cat([cos, sin], 1).float(), (batch.seq_lens if starts is None else starts).long()
    if "cu_seqlens_q" in args:
        seqs, steps = _packed_steps(batch.cu_seqlens_q, len(batch.q))
    else:
        seqs, steps = _steps(batch.num_seqs, batch.max_seqlen_q, table.device)
    # Rows behind the last sequence belong to none: they are rotated as of position 0, and never used.
    of_queries = (starts.index_select(0, seqs) + (steps if in_order else 0)) * (steps >= 0)
    of_keys = (starts.index_select(0, new.seqs) + new.steps) * (new.steps >= 0)
    rotated = []
    for positions, rows in ((of_queries, batch.q), (of_keys, new.key)):
        check_within("rotary_cos", positions, 0, len(table) - 1, f"{len(table) - 1}, its rows, as positions")
        rotated.append(rows.clone(memory_format=torch.contiguous_format))
        rotary_embedding(positions, rotated[-1], None, table, interleaved=is_interleaved)
    return batch._replace(q=rotated[0]), new._replace(key=rotated[1])


def append(batch: Batch, new: NewKeys, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None) -> Batch:
    """Write the new keys and values behind those that are there."""
    num_blocks, block_size = batch.k_cache.shape[:2]
    positions = batch.seq_lens.index_select(0, new.seqs) + new.steps
    blocks = batch.block_table[new.seqs, (positions // block_size).clamp_(min=0)].long()
    if is_readable(blocks):
        check_within("block_table", blocks[new.steps >= 0], 0, num_blocks - 1, f"{num_blocks - 1}")
    slots = torch.where(new.steps < 0, -1, blocks * block_size + positions % block_size)
    reshape_and_cache(new.key, new.value, batch.k_cache, batch.v_cache, slots, k_scale=k_scale, v_scale=v_scale)
    return batch._replace(seq_lens=batch.seq_lens + new.counts)


def _steps(num_seqs: int, seqlen: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Whose row each of [num_seqs, seqlen] is, and which of it."""
    rows = torch.arange(num_seqs * seqlen, device=device)
    return rows // max(seqlen, 1), rows % max(seqlen, 1)


def _packed_steps(offsets: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of rows in sequences that begin at `offsets`; step -1 behind the last."""
    rows = torch.arange(num_rows, device=offsets.device)
    seqs = torch.searchsorted(offsets[1:], rows, right=True, out_int32=False).clamp_(max=offsets.shape[0] - 2)
    return seqs, torch.where(rows < offsets[-1], rows - offsets[seqs], -1)
