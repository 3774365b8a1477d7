"""The attention behind every function of FlashAttention's: one paged call for whatever layout the arguments have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from paged.errors import InvalidInputError, UnsupportedError
from paged.interop.appended_keys import append, read_new_keys, rotate
from paged.interop.arguments import ATTENTION, CACHED_ATTENTION, LARGEST_SCALE, Arguments
from paged.interop.host_checks import check_keys, check_queries, check_within
from paged.interop.layouts import Keys, Queries, by_token, lengths, read_keys, read_queries, unpack
from paged.kernels.attention.paged_attention import paged_attention
from paged.kernels.common.checks import FLOAT_DTYPES, check_device, check_dtype, check_tensor


@dataclass(frozen=True)
class Attention:
    """What a call gives.

    out: like q, with the values' head_dim; bfloat16 where q has 8 bits. lse: float32 [num_q_heads, total_q], or
    [batch, num_q_heads, seqlen_q]; None unless the caller asks for it, by return_attn_probs where `has_probs`.
    """

    out: torch.Tensor
    lse: torch.Tensor | None
    has_probs: bool


def attend(function: str, given: Mapping[str, Any], *needed: str) -> Attention:
    """Attention of a function that reads keys alone.

    given: by the caller's names, those of any version. needed: those of them that may not be None.
    """
    args = Arguments(function, given, ATTENTION)
    args.need(*needed)
    unpack(args)
    return _attend(args)


def attend_with_cache(function: str, given: Mapping[str, Any]) -> Attention:
    """Attention of a function that may add keys to the cache before it reads it."""
    return _attend(Arguments(function, given, CACHED_ATTENTION))


def _attend(args: Arguments) -> Attention:
    # All is read and checked before the first key is written: a call that fails leaves the cache as it was.
    queries = read_queries(args)
    keys = read_keys(args, queries)
    new = read_new_keys(args, keys)
    args.refuse_gradients()
    check_queries(args, queries)
    check_keys(args, keys, 0 if new is None else new.counts)
    num_seqs, device = queries.num_seqs, keys.k.device
    num_q_heads, num_kv_heads = queries.rows.shape[1], keys.k.shape[2]
    window, is_causal = args.window(), args.flag("causal")
    options: dict[str, Any] = {
        "softmax_scale": args.number("softmax_scale", LARGEST_SCALE),
        "causal": is_causal,
        "window_size": window,
        "softcap": args.softcap(),
        "attention_chunk_size": args.integer("attention_chunk_size") or 0,
        "sinks": args.optional_tensor("sinks"),
    }
    if options["sinks"] is not None:
        check_tensor(args.name("sinks"), options["sinks"], (num_q_heads,), FLOAT_DTYPES, device)
        options["sinks"] = options["sinks"].contiguous()
    k_scale = _row_for_all(args, "k_scale", num_seqs, num_kv_heads, is_scale=True)
    rows: dict[str, Any] = {
        "alibi_slopes": _row_for_all(args, "alibi_slopes", num_seqs, num_q_heads),
        "k_scale": _scale_of_scores(args, queries, k_scale, num_kv_heads),
        "v_scale": _row_for_all(args, "v_scale", num_seqs, num_kv_heads, is_scale=True),
    }
    has_probs = args.flag("return_attn_probs")
    has_lse = args.flag("return_lse") or has_probs
    given, out = _outputs(args, queries, keys.v.shape[3])
    used, padding = lengths(args, "seqused_q", num_seqs, device), _left_padding(args, num_seqs, device)
    if used is not None:
        check_within(args.name("seqused_q"), used, 0, queries.cu_seqlens.diff(), "the queries of each sequence")
    if padding is not None:
        check_within("cache_leftpad", padding, 0, keys.seq_lens, args.name("seq_lens"))
    in_tokens = keys if padding is None else by_token(args, keys, padding)
    if new is not None and any(scale is not None and scale.dim() == 2 for scale in (k_scale, rows["v_scale"])):
        raise UnsupportedError(f"{args.name('k_scale')}, {args.name('v_scale')}: rows that differ, with new keys")
    queries, new = rotate(
        args, queries, keys, new, in_order=is_causal or window != (-1, -1) or options["attention_chunk_size"] > 0
    )
    if new is not None:
        keys = append(args, keys, new, k_scale, rows["v_scale"])
    if padding is not None:
        keys = replace(in_tokens, seq_lens=(keys.seq_lens - padding).clamp_(min=0))
    if queries.rows.dtype == torch.float8_e4m3fn:  # whose values are all of bfloat16's
        queries = replace(queries, rows=queries.rows.to(torch.bfloat16))
    if used is not None:
        queries, keys, rows = _with_unused_queries(queries, keys, rows, used)
    with args.in_callers_names():
        lse = _call(queries, keys, rows, out, options, has_lse)
    if given is not None and given.data_ptr() != out.data_ptr():
        given.copy_(out.view(given.shape))
    if not args.has("cu_seqlens_q"):
        batch, seqlen = args.tensor("q").shape[:2]
        lse = None if lse is None else lse.unflatten(1, (batch, seqlen)).transpose(0, 1)
    if given is None:
        given = out.view(*args.tensor("q").shape[:-1], out.shape[-1])
    return Attention(given, lse, has_probs)


def _left_padding(args: Arguments, num_seqs: int, device: torch.device) -> torch.Tensor | None:
    padding = args.optional_tensor("cache_leftpad")
    if padding is not None and padding.dtype.is_floating_point:
        raise UnsupportedError(f"cache_leftpad: dtype {padding.dtype}, {args.function} here takes int32")
    return lengths(args, "cache_leftpad", num_seqs, device)


def _outputs(args: Arguments, queries: Queries, v_head_dim: int) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The caller's `out`, and where rows go: the same memory if its rows can be addressed there."""
    dtype = torch.bfloat16 if queries.rows.dtype == torch.float8_e4m3fn else queries.rows.dtype
    given = args.optional_tensor("out")
    if given is not None:
        shape = *args.tensor("q").shape[:-1], v_head_dim
        check_tensor(args.name("out"), given, shape, (dtype,), queries.rows.device)
        if any(size > 1 and step == 0 for size, step in zip(given.shape, given.stride(), strict=True)):
            raise InvalidInputError(f"{args.name('out')}: strides {given.stride()}, expected memory for every element")
        rows = given if args.has("cu_seqlens_q") else given.flatten(0, 1)
        if rows.data_ptr() == given.data_ptr() and rows.stride(-1) == 1:
            return given, rows
    return given, torch.empty(*queries.rows.shape[:2], v_head_dim, dtype=dtype, device=queries.rows.device)


def _with_unused_queries(
    queries: Queries, keys: Keys, rows: dict[str, Any], used: torch.Tensor
) -> tuple[Queries, Keys, dict[str, Any]]:
    """Each sequence as two: its first `used` queries, and the others, which see no key."""
    starts = queries.cu_seqlens[:-1]
    offsets = torch.cat([torch.stack([starts, starts + used], 1).flatten(), queries.cu_seqlens[-1:]])
    seq_lens = torch.stack([keys.seq_lens, torch.zeros_like(keys.seq_lens)], 1).flatten()
    keys = replace(keys, block_table=keys.block_table.repeat_interleave(2, 0), seq_lens=seq_lens)
    twice = {
        name: row.repeat_interleave(2, 0) if row is not None and row.dim() == 2 else row for name, row in rows.items()
    }
    return replace(queries, cu_seqlens=offsets), keys, twice


def _call(
    queries: Queries,
    keys: Keys,
    rows: dict[str, Any],
    out: torch.Tensor,
    options: dict[str, Any],
    has_lse: bool,
) -> torch.Tensor | None:
    """Fill out; the log-sum-exp, where it is asked for."""
    if any(row is not None and row.dim() == 2 for row in rows.values()):
        lse = _attention_by_sequence(queries, keys, rows, out, options)
        return lse if has_lse else None
    result = paged_attention(
        queries.rows,
        keys.k,
        keys.v,
        block_table=keys.block_table,
        cu_seqlens_q=queries.cu_seqlens,
        seq_lens=keys.seq_lens,
        max_seqlen_q=queries.max_seqlen,
        out=out,
        return_lse=has_lse,
        **options,
        **rows,
    )
    return result[1] if isinstance(result, tuple) else None


def _row_for_all(
    args: Arguments, key: str, num_seqs: int, num_heads: int, *, is_scale: bool = False
) -> torch.Tensor | None:
    """Read slopes or scales, which FlashAttention takes as one row a sequence and `paged_attention` as one for all.

    Returns [num_heads], or a scale's [] or [1]. Rows of [num_seqs, num_heads] that are one in memory, expanded, are
    known to be equal. Others are compared on the host, which on a device waits for it; where they differ, all of them
    come back.
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


def _scale_of_scores(args: Arguments, queries: Queries, k_scale: torch.Tensor | None, num_heads: int) -> Any:
    """k_scale, or its product with the scale of 8-bit queries."""
    q_scale = _row_for_all(args, "q_scale", queries.num_seqs, num_heads, is_scale=True)
    if q_scale is not None and queries.rows.dtype != torch.float8_e4m3fn:
        raise UnsupportedError(f"{args.name('q_scale')}: {args.name('q')} is {queries.rows.dtype}, not float8_e4m3fn")
    if k_scale is None or q_scale is None:
        return q_scale if k_scale is None else k_scale
    return k_scale * q_scale


def _attention_by_sequence(
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
