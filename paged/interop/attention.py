"""Implementation of all FlashAttention functions by one paged call for any layout of arguments."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from paged.errors import InvalidInputError, UnsupportedError
from paged.interop.arguments import Arguments
from paged.interop.layouts import (
    Batch,
    by_token,
    check_lengths,
    check_offsets,
    check_within,
    is_readable,
    lengths,
    read_batch,
    unpack,
    with_contiguous_rows,
)
from paged.kernels.attention.paged_attention import paged_attention
from paged.kernels.cache.reshape_and_cache import reshape_and_cache
from paged.kernels.core.checks import FLOAT_DTYPES, check_device, check_dtype, check_tensor
from paged.kernels.core.errors import arguments_named
from paged.kernels.layers.rotary_embedding import rotary_embedding

Rows = dict[str, Any]  # tensor or None by argument name
# A position behind the end of every sequence; it fits int32.
_FAR = 1 << 30
_ROUNDED_DTYPES = (*FLOAT_DTYPES, torch.float8_e4m3fn)


def attend(
    function: str, arguments: Mapping[str, Any], *, has_negative_edges: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run a FlashAttention function of any version; `arguments` has the caller's names.

    has_negative_edges: whether negative numbers in window_size are edges, as in version 4, or mean no limit.

    Returns:
        out: like q with the values' head_dim; bfloat16 if q has 8 bits. lse: float32 [num_q_heads, total_q] or [batch,
            num_q_heads, seqlen_q]; None unless requested.
    """
    args = Arguments(function, arguments)
    try:
        return _attend(args, has_negative_edges)
    except (InvalidInputError, UnsupportedError):
        with arguments_named(**args.names):
            raise


class _Call(NamedTuple):
    """Checked arguments of a call.

    Attributes:
        rows: slopes and scales for reading, one row for all sequences or one for each.
        new_scales: k_scale and v_scale for writing; None if new keys are stored unchanged.
        edges: edges of the window, None for no limit.
        used: number of queries of each sequence that see keys, int32 [num_seqs]; None for all.
        padding: number of leading keys of each sequence that no query sees, int32 [num_seqs].
        given_out, out: the caller's output and the memory to write, from `_outputs`.
    """

    batch: Batch
    new: _NewKeys | None
    options: dict[str, Any]
    rows: Rows
    new_scales: tuple[torch.Tensor | None, torch.Tensor | None]
    edges: tuple[int | None, int | None]
    used: torch.Tensor | None
    padding: torch.Tensor | None
    given_out: torch.Tensor | None
    out: torch.Tensor
    has_lse: bool


def _attend(args: Arguments, has_negative_edges: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the call; errors name the keys of `args`."""
    unpack(args)
    # Check everything before writing the first key, so that a call that fails does not change the cache.
    call = _read_call(args, has_negative_edges)
    is_local = call.edges != (None, None) or call.options["attention_chunk_size"] > 0
    batch, new = _rotate(args, call.batch, call.new, in_order=call.options["causal"] or is_local)
    keys = batch if call.padding is None else by_token(batch, call.padding)
    if new is not None:
        batch = _append(batch, new, *call.new_scales)
    if call.padding is not None:
        batch = keys._replace(seq_lens=(batch.seq_lens - call.padding).clamp_(min=0))
    batch = batch._replace(q=batch.q.to(call.out.dtype))
    batch, used, window_size = _without_negative_edges(batch, call.used, *call.edges)
    rows = call.rows
    if used is not None:
        batch, rows = _with_unused_queries(batch, rows, used)
    lse = _fill(call.out, batch, rows, {**call.options, "window_size": window_size}, call.has_lse)
    shape = args.tensor("q").shape[:-1]
    if lse is not None and "cu_seqlens_q" not in args:
        lse = lse.unflatten(1, shape[:2]).transpose(0, 1)
    if call.given_out is None:
        return call.out.view(*shape, call.out.shape[-1]), lse
    if call.given_out.data_ptr() != call.out.data_ptr():
        call.given_out.copy_(call.out.view(call.given_out.shape))
    return call.given_out, lse


def _read_call(args: Arguments, has_negative_edges: bool) -> _Call:
    batch = read_batch(args)
    for key, values in (("q_scale", batch.q), ("k_scale", batch.k_cache), ("v_scale", batch.v_cache)):
        if values.dtype != torch.float8_e4m3fn:  # FlashAttention uses scales only for e4m3 values
            args.pop(key, None)
    new = _read_new_keys(args, batch)
    args.refuse_gradients()
    num_new = 0 if new is None else new.counts
    check_lengths(batch, num_new)
    num_seqs, device = batch.num_seqs, batch.q.device
    num_q_heads, num_kv_heads = batch.q.shape[1], batch.k_cache.shape[2]
    options: dict[str, Any] = {
        "softmax_scale": args.softmax_scale(),
        "causal": args.flag("causal"),
        "softcap": args.softcap(),
        "attention_chunk_size": args.integer("attention_chunk_size") or 0,
        "sinks": args.optional_tensor("sinks"),
    }
    if options["sinks"] is not None:
        check_tensor("sinks", options["sinks"], (num_q_heads,), FLOAT_DTYPES, device)
        options["sinks"] = options["sinks"].contiguous()
    edges = _edges(args, has_negative_edges)
    q_scale = _row_for_all(args, "q_scale", num_seqs, num_kv_heads)
    k_scale = _row_for_all(args, "k_scale", num_seqs, num_kv_heads)
    v_scale = _row_for_all(args, "v_scale", num_seqs, num_kv_heads)
    score_scale = k_scale
    if q_scale is not None and k_scale is not None:
        score_scale = k_scale * q_scale
    elif q_scale is not None:
        score_scale = q_scale
    rows: Rows = {
        "alibi_slopes": _row_for_all(args, "alibi_slopes", num_seqs, num_q_heads),
        "k_scale": score_scale,
        "v_scale": v_scale,
    }
    has_lse = args.flag("return_lse")
    has_probs = args.flag("return_attn_probs")
    dtype = batch.q.dtype
    if dtype == torch.float8_e4m3fn:
        dtype = torch.bfloat16  # holds all e4m3 values
    given_out, out = _outputs(args, batch, dtype)
    used = lengths(args, "seqused_q", num_seqs, device)
    if used is not None:
        check_within("seqused_q", used, 0, batch.cu_seqlens_q.diff(), "the queries of each sequence")
    padding = lengths(args, "cache_leftpad", num_seqs, device)
    if padding is not None:
        check_within("cache_leftpad", padding, 0, batch.seq_lens, "seq_lens")
    new_scales = (k_scale, v_scale)
    if new is not None and new.is_scaled:
        new_scales = (None, None)
    return _Call(batch, new, options, rows, new_scales, edges, used, padding, given_out, out, has_lse or has_probs)


def _outputs(args: Arguments, batch: Batch, dtype: torch.dtype) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the caller's `out` and the memory to write, which is the same if `paged_attention` can address it."""
    out, v_head_dim = args.optional_tensor("out"), batch.v_cache.shape[3]
    if out is not None:
        check_tensor("out", out, (*args.tensor("q").shape[:-1], v_head_dim), (dtype,), batch.q.device)
        if any(size > 1 and step == 0 for size, step in zip(out.shape, out.stride(), strict=True)):
            raise InvalidInputError(f"out: strides {out.stride()}, expected memory for every element")
        rows = out if "cu_seqlens_q" in args else out.flatten(0, 1)
        if rows.data_ptr() == out.data_ptr() and rows.stride(-1) == 1:
            return out, rows
    return out, torch.empty(*batch.q.shape[:2], v_head_dim, dtype=dtype, device=batch.q.device)


def _edges(args: Arguments, has_negative: bool) -> tuple[int | None, int | None]:
    """Return the window's edges, None for no limit.

    has_negative: whether negative numbers are edges, as in FlashAttention 4; if their sum is negative, there is no
    limit.

    Raises:
        UnsupportedError: a negative edge is combined with an argument that depends on absolute positions.
    """
    window_left, window_right = args.window()
    if not has_negative:
        if window_left is not None and window_left < 0:
            window_left = None
        if window_right is not None and window_right < 0:
            window_right = None
        return window_left, window_right
    if args.flag("causal"):
        window_right = 0
    if window_left is not None and window_right is not None and window_left + window_right < 0:
        return None, None
    is_negative = min(window_left or 0, window_right or 0) < 0
    if is_negative and ("alibi_slopes" in args or args.integer("attention_chunk_size")):
        edges = window_left, window_right
        raise UnsupportedError(f"window_size: {edges}, none below 0 beside alibi_slopes or attention_chunk")
    return window_left, window_right


def _without_negative_edges(
    batch: Batch, used: torch.Tensor | None, window_left: int | None, window_right: int | None
) -> tuple[Batch, torch.Tensor | None, tuple[int, int]]:
    """Shift queries so that no edge of their window is negative; return the window, -1 for no limit.

    Queries are aligned with the end of the keys. A right edge of -n equals a right edge of 0 with the last n keys
    removed. A left edge of -n shifts the queries n keys ahead; the last n queries then see no key.
    """
    if window_right is not None and window_right < 0:
        batch = batch._replace(seq_lens=(batch.seq_lens + max(window_right, -_FAR)).clamp_(min=0))
        if window_left is not None:
            window_left += window_right
        window_right = 0
    if window_left is not None and window_left < 0:
        if used is None:
            used = batch.cu_seqlens_q.diff()
        used = (used + max(window_left, -_FAR)).clamp_(min=0)
        if window_right is not None:
            window_right += window_left
        window_left = 0
    if window_left is None:
        window_left = -1
    if window_right is None:
        window_right = -1
    return batch, used, (window_left, window_right)


def _with_unused_queries(batch: Batch, rows: Rows, used: torch.Tensor) -> tuple[Batch, Rows]:
    """Split each sequence in two: its first `used` queries, and the remaining queries, which see no key."""
    starts = batch.cu_seqlens_q[:-1]
    offsets = torch.cat([torch.stack([starts, starts + used], 1).flatten(), batch.cu_seqlens_q[-1:]])
    seq_lens = torch.stack([batch.seq_lens, torch.zeros_like(batch.seq_lens)], 1).flatten()
    table = batch.block_table.repeat_interleave(2, 0)
    twice = dict(rows)
    for name, row in rows.items():
        if _is_by_sequence(row):
            twice[name] = row.repeat_interleave(2, 0)
    return batch._replace(cu_seqlens_q=offsets, block_table=table, seq_lens=seq_lens), twice


def _fill(out: torch.Tensor, batch: Batch, rows: Rows, options: dict[str, Any], has_lse: bool) -> torch.Tensor | None:
    """Run `paged_attention` into `out`; return the log-sum-exp if requested.

    Sequences with different rows (slopes or scales) run one after another.
    """
    if not any(map(_is_by_sequence, rows.values())):
        result = paged_attention(**batch._asdict(), out=out, return_lse=has_lse, **options, **rows)
        return result[1] if isinstance(result, tuple) else None
    out.zero_()
    lse = torch.full(batch.q.shape[1::-1], -torch.inf, dtype=torch.float32, device=out.device)
    for seq, (start, end) in enumerate(pairwise(batch.cu_seqlens_q.tolist())):
        row = slice(seq, seq + 1)
        its_own = batch._replace(
            q=batch.q[start:end],
            block_table=batch.block_table[row],
            cu_seqlens_q=batch.cu_seqlens_q[seq : seq + 2] - start,
            seq_lens=batch.seq_lens[row],
            max_seqlen_q=end - start,
        )
        its_rows = dict(rows)
        for name, values in rows.items():
            if _is_by_sequence(values):
                its_rows[name] = values[seq]
        lse_of_one = _fill(out[start:end], its_own, its_rows, options, has_lse)
        if lse_of_one is not None:
            lse[:, start:end] = lse_of_one
    return lse if has_lse else None


def _is_by_sequence(row: torch.Tensor | None) -> bool:
    return row is not None and row.dim() == 2


def _row_for_all(args: Arguments, key: str, num_seqs: int, num_heads: int) -> torch.Tensor | None:
    """Read slopes or scales as one row for all sequences, if their rows are equal.

    FlashAttention takes a row per sequence, `paged_attention` one row. Returns [num_heads], or [] or [1] for a scale;
    if rows differ, all rows. Expanded rows share memory, so they are equal. Other rows are compared on the host, which
    waits for the device.
    """
    values = args.optional_tensor(key)
    if values is None:
        return None
    widths = [num_heads]
    if key == "alibi_slopes":
        check_dtype(key, values, *FLOAT_DTYPES)
        *leading, width = values.shape or (0,)
    else:
        check_dtype(key, values, torch.float32)
        *leading, width = values.shape or (1,)
        widths.append(1)
    check_device(key, values, args.tensor("k_cache").device)
    if width not in widths or leading not in ([], [1], [num_seqs]):
        expected = f"[{num_heads}] or [{num_seqs}, {num_heads}]"
        raise InvalidInputError(f"{key}: shape {list(values.shape)}, expected {expected}")
    if not leading:
        return values.contiguous()
    if leading == [0]:
        return values.new_ones(num_heads)
    is_one = leading == [1] or values.stride(0) == 0
    if not is_one:
        if values.is_cuda and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(f"{key}: {num_seqs} rows in memory, expected one expanded row in a graph")
        is_one = torch.equal(values, values[:1].expand_as(values))
    if is_one:
        values = values[0]
    return values.contiguous()


class _NewKeys(NamedTuple):
    """New keys and values of all sequences, and their positions.

    key, value: [num_new, num_kv_heads, head_dim], each with its cache's head_dim.
    seqs, steps: int64 [num_new], sequence of each row and index of the row within the sequence.
    counts: number of new keys of each sequence, int32 [num_seqs], or one number for all.
    is_scaled: whether keys and values are float8_e4m3fn, which the cache stores unchanged.
    """

    key: torch.Tensor
    value: torch.Tensor
    seqs: torch.Tensor
    steps: torch.Tensor
    counts: torch.Tensor | int
    is_scaled: bool


def _read_new_keys(args: Arguments, batch: Batch) -> _NewKeys | None:
    """Read [batch, seqlen_new, num_kv_heads, head_dim], or [total_new, ...] with cu_seqlens_k_new."""
    if ("key" in args) != ("value" in args):
        raise InvalidInputError("key, value: only one given, expected both or neither")
    num_seqs, device = batch.num_seqs, batch.k_cache.device
    offsets = lengths(args, "cu_seqlens_k_new", num_seqs + 1, device)
    if "key" not in args:
        return None  # SGLang passes offsets without keys, which FlashAttention 3 ignores
    if "seq_lens" not in args:
        raise InvalidInputError(f"cache_seqlens: None, but {args.function} needs it")
    key, value = args.tensor("key"), args.tensor("value")
    rows: tuple[int | str, ...] = ("total_new",)
    if offsets is None:
        rows = (num_seqs, "seqlen_new")
    dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES
    if batch.k_cache.dtype == torch.float8_e4m3fn:
        dtypes = _ROUNDED_DTYPES
    check_tensor("key", key, (*rows, *batch.k_cache.shape[2:]), dtypes, device)
    check_tensor("value", value, (*key.shape[:-1], batch.v_cache.shape[3]), (key.dtype,), device)
    is_scaled = key.dtype == torch.float8_e4m3fn
    if is_scaled:
        key, value = key.float(), value.float()
    key, value = with_contiguous_rows(key), with_contiguous_rows(value)
    if offsets is None:
        seqs_and_steps = _steps(num_seqs, key.shape[1], device)
        return _NewKeys(key.flatten(0, 1), value.flatten(0, 1), *seqs_and_steps, key.shape[1], is_scaled)
    check_offsets("cu_seqlens_k_new", offsets, len(key))
    return _NewKeys(key, value, *_packed_steps(offsets, len(key)), offsets.diff(), is_scaled)


def _rotate(args: Arguments, batch: Batch, new: _NewKeys | None, *, in_order: bool) -> tuple[Batch, _NewKeys | None]:
    """Return rotated copies of the queries and new keys.

    Positions count on from `rotary_seqlens`, by default from each sequence's length. Unless `in_order`, all queries of
    a sequence take its first position.
    """
    cos, sin = args.optional_tensor("rotary_cos"), args.optional_tensor("rotary_sin")
    if cos is None:
        return batch, new  # without rotary_cos, FlashAttention ignores the other rotary arguments
    if sin is None or new is None:
        raise InvalidInputError("rotary_cos, rotary_sin: expected both, with k and v, or neither")
    starts = lengths(args, "rotary_seqlens", batch.num_seqs, batch.k_cache.device)
    is_interleaved = args.flag("rotary_interleaved", True)
    check_tensor("rotary_cos", cos, ("max_position", "rotary_dim / 2"), _ROUNDED_DTYPES, batch.k_cache.device)
    check_tensor("rotary_sin", sin, cos.shape, _ROUNDED_DTYPES, batch.k_cache.device)
    if not 0 < 2 * cos.shape[1] <= batch.k_cache.shape[3]:
        raise InvalidInputError(f"rotary_cos: {cos.shape[1]} columns, expected 1 to {batch.k_cache.shape[3] // 2}")
    if batch.num_seqs == 0:
        return batch, new
    table = torch.cat([cos.float(), sin.float()], 1)
    if starts is None:
        starts = batch.seq_lens
    starts = starts.long()
    if "cu_seqlens_q" in args:
        seqs, steps = _packed_steps(batch.cu_seqlens_q, len(batch.q))
    else:
        seqs, steps = _steps(batch.num_seqs, batch.max_seqlen_q, table.device)
    # Rows after the last sequence are padding. They are rotated as at position 0, and nothing reads them.
    of_queries = starts.index_select(0, seqs)
    if in_order:
        of_queries = of_queries + steps
    of_queries = of_queries * (steps >= 0)
    of_keys = (starts.index_select(0, new.seqs) + new.steps) * (new.steps >= 0)
    rotated = []
    for positions, rows in ((of_queries, batch.q), (of_keys, new.key)):
        check_within("rotary_cos", positions, 0, len(table) - 1, f"{len(table) - 1}, its rows, as positions")
        dtype = torch.float32 if rows.dtype == torch.float8_e4m3fn else rows.dtype
        rotated.append(rows.to(dtype, copy=True, memory_format=torch.contiguous_format))
        rotary_embedding(positions, rotated[-1], None, table, interleaved=is_interleaved)
    return batch._replace(q=rotated[0]), new._replace(key=rotated[1])


def _append(batch: Batch, new: _NewKeys, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None) -> Batch:
    """Append the new keys and values to the cache."""
    num_blocks, block_size = batch.k_cache.shape[:2]
    positions = batch.seq_lens.index_select(0, new.seqs) + new.steps
    blocks = batch.block_table[new.seqs, (positions // block_size).clamp_(min=0)].long()
    if is_readable(blocks):
        check_within("block_table", blocks[new.steps >= 0], 0, num_blocks - 1, f"{num_blocks - 1}")
    slots = torch.where(new.steps < 0, -1, blocks * block_size + positions % block_size)
    if _is_by_sequence(k_scale) or _is_by_sequence(v_scale):  # `reshape_and_cache` takes no scales per sequence
        new = new._replace(key=_divided(new.key, k_scale, new.seqs), value=_divided(new.value, v_scale, new.seqs))
        k_scale = v_scale = None
    reshape_and_cache(new.key, new.value, batch.k_cache, batch.v_cache, slots, k_scale=k_scale, v_scale=v_scale)
    return batch._replace(seq_lens=batch.seq_lens + new.counts)


def _divided(rows: torch.Tensor, scale: torch.Tensor | None, seqs: torch.Tensor) -> torch.Tensor:
    if scale is None:
        return rows.float()
    if _is_by_sequence(scale):
        scale = scale.index_select(0, seqs)
    return rows.float() / scale.unsqueeze(-1)


def _steps(num_seqs: int, seqlen: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for each row of [num_seqs, seqlen], its sequence and its index within the sequence."""
    rows = torch.arange(num_seqs * seqlen, device=device)
    return rows // max(seqlen, 1), rows % max(seqlen, 1)


def _packed_steps(offsets: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sequence and index of each packed row, by `offsets`; rows after the last sequence have index -1."""
    rows = torch.arange(num_rows, device=offsets.device)
    seqs = torch.searchsorted(offsets[1:], rows, right=True, out_int32=False).clamp_(max=offsets.shape[0] - 2)
    return seqs, torch.where(rows < offsets[-1], rows - offsets[seqs], -1)
