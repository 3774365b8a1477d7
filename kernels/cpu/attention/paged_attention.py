"""Launches of paged attention's numba kernels, which read the caches in place."""

from __future__ import annotations

from itertools import accumulate

import torch

from ...attention.call import AttentionCall
from ...core.dtypes import kv_kind
from .. import kernel as nb
from ..code_vectors import CODES, HAS_FLOAT16, NUMBERS
from ..launch import NumbaLaunch
from ..tiles import TILE_COLUMNS, configure, has_tiles, release
from ..vectors import LANES, LOG2_E
from . import few_kernels, tile_products, vector_products
from .many_queries import KEYS, ROWS
from .vector_products import number_of_format

# Most rows of a KV head (queries times heads of a group) for the kernel for few queries, which is slower from 20 rows
# on. See ../limits.md.
FEW_ROWS = 16
# Most rows for which keys are packed once. A long prompt is split into this many shares per thread, or into more if a
# share would have more rows.
_ROWS_AT_ONCE, _SHARES = 512, 4
_attend_by_tiles, _attend_by_vectors = tile_products.attend, vector_products.attend
_attend_codes = vector_products.attend_codes


@nb.device_function
def _bfloat16_tensors(values):
    return nb.bfloats(values[1]), nb.bfloats(values[2]), nb.bfloats(values[3]), nb.bfloats(values[4])


@nb.Kernel
def _tiles(arguments):
    values = nb.unpack(arguments, 64)
    configure()
    _attend_by_tiles(_bfloat16_tensors(values), values)
    release()


@nb.Kernel
def _bfloat16(arguments):
    values = nb.unpack(arguments, 64)
    _attend_by_vectors(_bfloat16_tensors(values), values)


@nb.Kernel
def _float32(arguments):
    values = nb.unpack(arguments, 64)
    _attend_by_vectors((nb.floats(values[1]), nb.floats(values[2]), nb.floats(values[3]), nb.floats(values[4])), values)


@nb.Kernel
def _codes(arguments):
    values = nb.unpack(arguments, 64)
    if values[51]:
        _attend_codes((nb.bfloats(values[1]), values[2], values[3], nb.bfloats(values[4])), values)
    else:
        _attend_codes((nb.floats(values[1]), values[2], values[3], nb.floats(values[4])), values)


def kernel_of_many(dtype: torch.dtype, *sizes: int) -> nb.Kernel:
    """Return the kernel for many queries and caches of this dtype, for keys and values of these sizes."""
    if dtype == torch.float32:
        return _float32
    if has_tiles() and all(size % TILE_COLUMNS == 0 for size in sizes):
        return _tiles
    return _bfloat16


def _many_kernel(dtype: torch.dtype, k_cache: torch.Tensor, v_cache: torch.Tensor) -> nb.Kernel:
    if k_cache.dtype == v_cache.dtype == dtype:
        return kernel_of_many(dtype, k_cache.shape[-1], v_cache.shape[-1])
    return _codes


def _reads_rows(cache: torch.Tensor) -> bool:
    """Return whether numba kernels read a cache if keys or values are in 4 or 8 bits: heads of whole groups of 32."""
    kind = kv_kind(cache.dtype)
    if kind.width(cache) % NUMBERS != 0:
        return False
    codes = CODES.get(kind.name)
    return codes is None or HAS_FLOAT16 or not codes.needs_float16


def kernels_for(dtype: torch.dtype, k_cache: torch.Tensor, v_cache: torch.Tensor) -> list[nb.Kernel]:
    """Return the kernels beside queries of a dtype for caches [..., elements]; none if PyTorch attends."""
    is_plain = k_cache.dtype == v_cache.dtype == dtype
    if not is_plain and not (_reads_rows(k_cache) and _reads_rows(v_cache)):
        return []
    return [few_kernels.kernel_for(dtype, k_cache, v_cache), _many_kernel(dtype, k_cache, v_cache)]


def takes_codes(call: AttentionCall) -> bool:
    """Return whether numba kernels read calls like this one with keys or values in 4 or 8 bits.

    Plain keys beside values in codes, or the reverse, have the dtype of q and no scale.
    """
    for cache, scale in ((call.k_cache, call.k_scale), (call.v_cache, call.v_scale)):
        if not _reads_rows(cache):
            return False
        if kv_kind(cache.dtype).name not in CODES and scale is not None:
            return False
    return True


def launch_for(call: AttentionCall, *, keys_are_values: bool = False) -> NumbaLaunch:
    """Return a launch that fills the rows of calls like this one, with the same lengths and checked ids.

    cu_seqlens_q and seq_lens must be contiguous.

    keys_are_values: whether every key begins with its value, so that it is widened once for both.
    """
    max_few = FEW_ROWS * call.k_cache.shape[2] // call.q.shape[1]
    if max_few == 0 or call.k_cache.dtype == torch.uint8:
        return _launch_for_many(call, 1, None, keys_are_values=keys_are_values)
    few = few_kernels.launch_for(call, max_few)
    if call.max_seqlen_q <= max_few:
        return few
    return _launch_for_many(call, max_few + 1, few, keys_are_values=keys_are_values)


def _launch_for_many(
    call: AttentionCall, min_queries: int, few: NumbaLaunch | None, *, keys_are_values: bool
) -> NumbaLaunch:
    (num_tokens, num_q_heads, size), num_kv_heads, v_size = call.q.shape, call.v_cache.shape[2], call.v_head_dim
    q_size, sums_size = (-(-width // LANES) * LANES for width in (size, v_size))
    num_rows = num_tokens * num_q_heads // (_SHARES * torch.get_num_threads())
    num_rows = min(max(num_rows // ROWS * ROWS, ROWS), _ROWS_AT_ONCE)
    kernel = _many_kernel(call.q.dtype, call.k_cache, call.v_cache)
    keys_are_values = keys_are_values and kernel is not _tiles  # tiles take values as columns
    values_size = 0 if keys_are_values else sums_size
    areas = (
        num_rows * q_size,
        num_rows * sums_size,
        num_rows * 2,
        num_rows * 2,
        num_rows * 2,
        KEYS * q_size,
        KEYS * values_size,
        KEYS * ROWS,
        KEYS * ROWS // 2,
        num_rows * 4,
        KEYS * 8,
    )
    *offsets, scratch_size = accumulate(areas, initial=0)
    if keys_are_values:
        offsets[6] = offsets[5]
    offsets[-2:] = (offset // 2 for offset in offsets[-2:])
    arguments: tuple[int | str, ...] = (
        *few_kernels.TENSORS,
        scratch_size,
        nb.bits(max(call.softmax_scale * LOG2_E, few_kernels.LEAST_SCALE)),
        *offsets,
        len(call.seq_lens),
        min_queries,
        num_kv_heads,
        num_q_heads // num_kv_heads,
        num_rows,
        *few_kernels.sizes_of(call),
        call.q.dtype == torch.bfloat16,
        number_of_format(call.k_cache),
        number_of_format(call.v_cache),
        *few_kernels.scales_of(call),
    )
    return NumbaLaunch(kernel.address, call.num_products, arguments, scratch_size=scratch_size, before=few)
