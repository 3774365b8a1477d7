"""Numba kernels of attention with few queries: one for each pair of formats of keys and values, and their launch."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from ...attention.call import AttentionCall
from ...core.checks import scale_strides
from ...core.dtypes import kv_kind
from .. import kernel as nb
from ..launch import SCRATCH, NumbaLaunch
from ..vectors import LOG2_E
from . import few_queries
from .few_queries import _KEYS
from .many_queries import options_of

# Scratch memory of the rows that a thread takes at once. Adjacent heads are read together while this fits the L1 cache.
_SCRATCH_BYTES = 24 << 10
# Smallest softmax scale. It is not 0, because 0 * -inf is NaN.
LEAST_SCALE = 2.0**-126
# First arguments of attention kernels.
TENSORS = (
    *("q", "k_cache", "v_cache", "out", "block_table", "cu_seqlens_q", "seq_lens"),
    *("sinks", "alibi_slopes", "lse", SCRATCH),
)


def _attention_of(keys: str, values: str) -> Any:
    """Return a function of a kernel's arguments that attends over keys and values of these formats."""
    key_format, value_format = few_queries.FORMATS[keys], few_queries.FORMATS[values]
    attend = few_queries.attention_by(key_format, value_format)
    k_bfloats, copied_bfloats = key_format.bfloats
    k_floats, copied_floats = key_format.floats
    v_bfloats, v_floats = value_format.bfloats[0], value_format.floats[0]
    k_scales, v_scales, k_unit, v_unit = key_format.scales, value_format.scales, key_format.unit, value_format.unit

    @nb.inlined
    def run(arguments):
        values = nb.unpack(arguments, 51)
        is_bf16, q, k_cache, v_cache, out, block_table, cu_seqlens_q, seq_lens = values[1:9]
        ids = nb.int32s(block_table), nb.int32s(cu_seqlens_q), nb.int32s(seq_lens)
        options, scratch, scratch_size = options_of(values[9:12], values[38:41]), values[12], values[13]
        at, scale = nb.thread_index() * scratch_size, nb.as_float(values[14])
        floats, queries = nb.floats(scratch), scratch + at * 4  # in bytes
        sizes, strides = values[15:27], values[27:38] + values[45:51]
        scales = k_scales(values[41]), v_scales(values[42])
        factors = nb.floats(values[43])[0] * np.float32(k_unit), nb.floats(values[44])[0] * np.float32(v_unit)
        if is_bf16:
            tensors = nb.bfloats(q), k_bfloats(k_cache), v_bfloats(v_cache)
            memory = floats, copied_bfloats(queries)
            attend(*tensors, scales, factors, nb.bfloats(out), ids, memory, options, sizes, strides, scale, at)
        else:
            wide = nb.floats(q), k_floats(k_cache), v_floats(v_cache)
            memory = floats, copied_floats(queries)
            attend(*wide, scales, factors, nb.floats(out), ids, memory, options, sizes, strides, scale, at)

    return run


_attend: Any  # a global of the copy that `kernel_of` makes


def _paged_attention(arguments):
    _attend(arguments)  # noqa: F821


@cache
def kernel_of(keys: str, values: str) -> nb.Kernel:
    """Return the kernel for caches of two kinds, by names of `KvKind`. It is compiled at its first use."""
    return nb.Kernel(
        _paged_attention, name=f"of_{keys}_and_{values}", functions={"_attend": _attention_of(keys, values)}
    )


def sizes_of(call: AttentionCall) -> tuple[int, ...]:
    """Return arguments of all kernels: sizes, visibility, strides and options."""
    are_bf16 = [number is not None and number.dtype == torch.bfloat16 for number in (call.sinks, call.alibi_slopes)]
    return (
        call.q.shape[0],
        call.q.shape[2],
        call.v_head_dim,
        call.k_cache.shape[1],
        *call.window,
        call.chunk_size,
        *call.q.stride()[:2],
        *call.k_cache.stride()[:3],
        *call.v_cache.stride()[:3],
        *call.out_strides,
        call.block_table.stride(0),
        *are_bf16,
        nb.bits(call.softcap * LOG2_E),
    )


def scales_of(call: AttentionCall) -> tuple[int | str, ...]:
    """Return the last arguments of kernels that read codes: scales, scales of tables, and strides of scales."""
    strides = scale_strides(k_scale=call.k_scale, v_scale=call.v_scale).values()
    return "k_scale", "v_scale", "k_table_scale", "v_table_scale", *strides


def launch_for(call: AttentionCall, max_queries: int) -> NumbaLaunch:
    """Return a launch that fills the rows of sequences with up to `max_queries` queries.

    The launch is for calls like this one, with the same lengths and checked ids. cu_seqlens_q and seq_lens must be
    contiguous.
    """
    _, num_q_heads, size = call.q.shape
    num_kv_heads, v_size = call.v_cache.shape[2], call.v_head_dim
    group = num_q_heads // num_kv_heads
    # Float32 numbers of a row: its query, scores, sums, and two numbers of the softmax. The scratch memory of a thread
    # is rounded up to cache lines of 64 bytes, so that threads share none.
    row_size = size + _KEYS + v_size + 2
    max_rows = max(max_queries * group, min(num_kv_heads * group, _SCRATCH_BYTES // (4 * row_size)))
    scratch_size = -(-max_rows * row_size // 16) * 16
    arguments: tuple[int | str, ...] = (
        call.q.dtype == torch.bfloat16,
        *TENSORS,
        scratch_size,
        nb.bits(max(call.softmax_scale * LOG2_E, LEAST_SCALE)),
        len(call.seq_lens),
        max_queries,
        num_kv_heads,
        max_rows,
        group,
        *sizes_of(call),
        *scales_of(call),
    )
    kernel = kernel_of(kv_kind(call.k_cache.dtype).name, kv_kind(call.v_cache.dtype).name)
    return NumbaLaunch(kernel.address, call.num_products, arguments, scratch_size=scratch_size)
