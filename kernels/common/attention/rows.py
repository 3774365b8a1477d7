"""Rows of a tile: query heads packed beside queries, and what becomes of their sums."""

from __future__ import annotations

from typing import Any, NamedTuple

from paged.kernels.common.compat import tl, triton

_LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def finite(maximum):
    """A maximum to subtract: 0 for -inf, the maximum of nothing, as -inf - -inf would be NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def _locate_rows(tile, rows, first_token, q_len, kv_head, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Of rows of a tile: their query in the sequence (int32), token and query head (int64), and whether they exist."""
    row = tile * BLOCK_M + rows
    token = (first_token + row // GROUP).to(tl.int64)
    return row // GROUP, token, (kv_head * GROUP + row % GROUP).to(tl.int64), row < q_len * GROUP


class Output(NamedTuple):
    """Where rows of the output go."""

    out_ptr: Any
    lse_ptr: Any  # or None
    stride_token: Any
    stride_head: Any
    stride_lse_head: Any


@triton.jit
def _clear_padding(
    output, first_row, num_tokens, kv_head, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr
):
    """Zero some rows of GROUP heads, with a log-sum-exp of -inf; the programs of one head share the rows."""
    offs_v = tl.arange(0, DIM_PADDED)
    for row in range(first_row, num_tokens, tl.num_programs(1)):
        first_head = kv_head.to(tl.int64) * GROUP
        for head in range(first_head, first_head + GROUP):
            out_row_ptr = output.out_ptr + row * output.stride_token + head * output.stride_head
            tl.store(out_row_ptr + offs_v, tl.zeros([DIM_PADDED], output.out_ptr.dtype.element_ty), offs_v < DIM)
            if output.lse_ptr is not None:
                tl.store(output.lse_ptr + head * output.stride_lse_head + row, float("-inf"))


@triton.jit
def _store_rows(acc, row_max, row_sum, output, sinks_ptr, token, head, offs_v, row_mask, mask):
    """Normalise a tile and store it, and the log-sum-exps of its rows to base e."""
    out, lse = normalise(acc, row_max, row_sum, sinks_ptr, head, row_mask)
    out_ptrs = output.out_ptr + (token * output.stride_token + head * output.stride_head)[:, None] + offs_v[None, :]
    tl.store(out_ptrs, out.to(output.out_ptr.dtype.element_ty), mask=mask)
    if output.lse_ptr is not None:
        tl.store(output.lse_ptr + head * output.stride_lse_head + token, lse * _LN2, mask=row_mask)


@triton.jit
def normalise(acc, row_max, row_sum, sinks_ptr, head, row_mask):
    """Output rows and their log-sum-exp in base 2. A sink is the score of one more key, whose value is 0."""
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=row_mask, other=float("-inf")).to(tl.float32) * LOG2E
        new_max = tl.maximum(row_max, sink)
        correction = tl.exp2(row_max - finite(new_max))
        row_sum = row_sum * correction + tl.exp2(sink - finite(new_max))
        acc = acc * correction[:, None]
        row_max = new_max
    has_keys = row_sum > 0
    row_sum = tl.where(has_keys, row_sum, 1.0)
    return acc / row_sum[:, None], tl.where(has_keys, row_max + tl.log2(row_sum), float("-inf"))
