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
from ..vectors import HAS_BF16_PRODUCTS, LOG2_E
from .few_formats import _KEYS, FORMATS, FORMATS_OF_PAIRS, Format
from .few_queries import attention_by
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


def _format_of(cache: torch.Tensor, dtype: torch.dtype) -> tuple[str, Format]:
    """Return the name of a cache's format beside queries of a dtype, and the format."""
    kind = kv_kind(cache.dtype)
    if dtype == torch.bfloat16 and HAS_BF16_PRODUCTS:
        for numbers, formats in FORMATS_OF_PAIRS.items():
            if kind.name in formats and kind.width(cache) % numbers == 0:
                return f"{kind.name}_by_{numbers}", formats[kind.name]
    return kind.name, FORMATS[kind.name]


def _attention_of(keys: Format, values: Format, dtype: torch.dtype) -> Any:
    """Return a function of a kernel's arguments that attends over keys and values of these formats."""
    attend = attention_by(keys, values)
    pointers, (k_pointers, copied), (v_pointers, _) = nb.floats, keys.floats, values.floats
    if dtype == torch.bfloat16:
        pointers, (k_pointers, copied), (v_pointers, _) = nb.bfloats, keys.bfloats, values.bfloats
    k_scales, v_scales, k_unit, v_unit = keys.scales, values.scales, keys.unit, values.unit

    @nb.inlined
    def run(arguments):
        values = nb.unpack(arguments, 50)
        q, k_cache, v_cache, out, block_table, cu_seqlens_q, seq_lens = values[1:8]
        tensors = pointers(q), k_pointers(k_cache), v_pointers(v_cache)
        ids = nb.int32s(block_table), nb.int32s(cu_seqlens_q), nb.int32s(seq_lens)
        options, scratch, scratch_size = options_of(values[8:11], values[37:40]), values[11], values[12]
        at = nb.thread_index() * scratch_size
        memory = nb.floats(scratch), copied(scratch + at * 4)  # in bytes
        sizes, strides = values[14:26], values[26:37] + values[44:50]
        scales = k_scales(values[40]), v_scales(values[41])
        factors = nb.floats(values[42])[0] * np.float32(k_unit), nb.floats(values[43])[0] * np.float32(v_unit)
        scale = nb.as_float(values[13])
        attend(*tensors, scales, factors, pointers(out), ids, memory, options, sizes, strides, scale, at)

    return run


_attend: Any  # a global of the copy that `_kernel` makes


def _paged_attention(arguments):
    _attend(arguments)  # noqa: F821


def kernel_for(dtype: torch.dtype, k_cache: torch.Tensor, v_cache: torch.Tensor) -> nb.Kernel:
    """Return the kernel for queries of a dtype, float32 or bfloat16, and caches [..., elements].

    It is compiled at its first use.
    """
    names, formats = zip(*(_format_of(cache, dtype) for cache in (k_cache, v_cache)), strict=True)
    name = f"of_{names[0]}_and_{names[1]}_beside_{dtype}"
    return _kernel(name, *formats, dtype)


@cache
def _kernel(name: str, keys: Format, values: Format, dtype: torch.dtype) -> nb.Kernel:
    return nb.Kernel(_paged_attention, name=name, functions={"_attend": _attention_of(keys, values, dtype)})


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
    _, keys = _format_of(call.k_cache, call.q.dtype)
    row_size = size * keys.query_floats + _KEYS + v_size + 2
    max_rows = max(max_queries * group, min(num_kv_heads * group, _SCRATCH_BYTES // (4 * row_size)))
    scratch_size = -(-max_rows * row_size // 16) * 16
    arguments: tuple[int | str, ...] = (
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
    kernel = kernel_for(call.q.dtype, call.k_cache, call.v_cache)
    return NumbaLaunch(kernel.address, call.num_products, arguments, scratch_size=scratch_size)
