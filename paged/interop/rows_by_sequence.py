"""Slopes and scales that FlashAttention takes as one row a sequence, and `paged_attention` as one for all."""

from __future__ import annotations

from typing import Any

import torch

from paged.errors import InvalidInputError, UnsupportedError
from paged.interop.arguments import Arguments
from paged.interop.layouts import Keys, Queries
from paged.kernels.attention.paged_attention import paged_attention
from paged.kernels.common.checks import FLOAT_DTYPES, check_device, check_dtype


def row_for_all(
    args: Arguments, key: str, num_seqs: int, num_heads: int, *, is_scale: bool = False
) -> torch.Tensor | None:
    """[num_heads], or a scale's [] or [1], from that or from [num_seqs, num_heads] whose rows are equal.

    Rows that are one in memory, expanded, are known to be equal. Others are compared on the host, which on a device
    waits for it; where they differ, all [num_seqs, num_heads] come back.
    """
    values, name = args.optional_tensor(key), args.name(key)
    if values is None:
        return None
    check_dtype(name, values, *((torch.float32,) if is_scale else FLOAT_DTYPES))
    check_device(name, values, args.tensor("k_cache").device)
    sizes = (1, num_heads) if is_scale else (num_heads,)
    is_by_sequence = values.dim() == 2 and values.shape[0] in (1, num_seqs) and values.shape[1] in sizes
    is_one = (values.dim() == 1 and values.shape[0] in sizes) or (is_scale and values.dim() == 0)
    if not is_by_sequence and not is_one:
        raise InvalidInputError(
            f"{name}: shape {list(values.shape)}, expected [{num_heads}] or [{num_seqs}, {num_heads}]"
        )
    if is_one:
        return values.contiguous()
    if values.shape[0] == 0:
        return values.new_ones(num_heads)
    if values.shape[0] == 1 or values.stride(0) == 0:
        return values[0].contiguous()
    if values.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(f"{name}: {num_seqs} rows in memory, a graph takes one row, expanded")
    return values[0].contiguous() if torch.equal(values, values[:1].expand_as(values)) else values.contiguous()


def scale_of_scores(args: Arguments, queries: Queries, k_scale: torch.Tensor | None, num_heads: int) -> Any:
    """k_scale, or its product with the scale of 8-bit queries."""
    q_scale = row_for_all(args, "q_scale", queries.num_seqs, num_heads, is_scale=True)
    if q_scale is not None and queries.rows.dtype != torch.float8_e4m3fn:
        raise UnsupportedError(f"{args.name('q_scale')}: {args.name('q')} is {queries.rows.dtype}, not float8_e4m3fn")
    if k_scale is None or q_scale is None:
        return q_scale if k_scale is None else k_scale
    return k_scale * q_scale


def attention_by_sequence(
    queries: Queries, keys: Keys, rows: dict[str, Any], out: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor:
    """`paged_attention` of one sequence after the other, each with its row of `rows`; fills out, returns the lse."""
    out.zero_()
    lse = torch.full(queries.rows.shape[1::-1], -torch.inf, dtype=torch.float32, device=out.device)
    offsets = queries.cu_seqlens.tolist()
    for seq in range(queries.num_seqs):
        mine = slice(offsets[seq], offsets[seq + 1])
        _, lse[:, mine] = paged_attention(
            queries.rows[mine],
            keys.k,
            keys.v,
            block_table=keys.block_table[seq : seq + 1],
            cu_seqlens_q=queries.cu_seqlens[seq : seq + 2] - offsets[seq],
            seq_lens=keys.seq_lens[seq : seq + 1],
            max_seqlen_q=mine.stop - mine.start,
            out=out[mine],
            return_lse=True,
            **options,
            **{name: row[seq] if row is not None and row.dim() == 2 else row for name, row in rows.items()},
        )
    return lse
