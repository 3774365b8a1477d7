"""The cache of layers with compressed entries: rows of windows, entries, and rows of open pools.

All entries lie in one layer of the cache, and blocks consist of whole pools. Rows of open pools lie in a slot for each
sequence. A pool that overlaps the last one of the block before finds it at that block's border, behind the window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from paged.cache.groups import CacheGroup
from paged.cache.pooled_groups import BorderGroup, Entries, EntriesGroup, OpenPart, OpenPoolGroup
from paged.kernels.cache.latent_cache import NVFP4_BYTES, RECORD_DIM, RECORD_FORMS, RECORD_ROPE
from paged.models.layers.attention_config import AttentionConfig, CompressedConfig


def entries_layer(attention: Sequence[AttentionConfig]) -> int:
    """Return the layer of the cache with all entries."""
    return len(attention)


def open_layer(attention: Sequence[AttentionConfig], index: int) -> int:
    """Return the layer of the cache with a layer's rows of open pools."""
    return len(attention) + 1 + index


def num_cache_layers(attention: Sequence[AttentionConfig]) -> int:
    """Return the number of layers of the cache."""
    return open_layer(attention, len(attention))


def entries_source(attention: Sequence[AttentionConfig], index: int) -> int | None:
    """Return the layer that writes the entries of layer `index`; None for a layer with a window alone."""
    sizes = attention[index].compressed
    if sizes is None or not sizes.pool_size:
        return None
    if sizes.sharing is None:
        return index
    return sizes.sharing.entries_of


def entry_indices(attention: Sequence[AttentionConfig]) -> dict[int, range]:
    """Return where the layer of all entries has those of each layer that writes some: entries, then its index keys."""
    indices: dict[int, range] = {}
    count = 0
    for index, layer in enumerate(attention):
        if entries_source(attention, index) == index:
            assert layer.compressed is not None
            first, count = count, count + 1 + (layer.compressed.index is not None)
            indices[index] = range(first, count)
    return indices


def token_ids_index(attention: Sequence[AttentionConfig]) -> int:
    """Return the index of the token ids in the layer of all entries, behind all others."""
    return sum(map(len, entry_indices(attention).values()))


def has_records(layer: AttentionConfig, dtype: torch.dtype) -> bool:
    """Return whether rows and entries of a layer have the sizes of records, their form in a cache of `dtype`."""
    sizes = layer.compressed
    if sizes is None or layer.head_dim != RECORD_DIM:
        return False
    form = RECORD_FORMS[_row_size(layer, dtype)]
    return form.num_codes == RECORD_DIM or sizes.rope_dim == RECORD_ROPE


def _row_size(layer: AttentionConfig, dtype: torch.dtype) -> int:
    """Return the size of rows and entries of a layer in a cache of `dtype`: in numbers, or in bytes if it is a byte."""
    assert layer.compressed is not None
    if dtype == torch.float4_e2m1fn_x2:
        return NVFP4_BYTES
    if dtype.itemsize == 1:
        return layer.compressed.record_bytes
    return layer.head_dim


def compressed_groups(
    attention: Sequence[AttentionConfig], dtype: torch.dtype, block_size: int, *, keeps_ids: bool = False
) -> list[CacheGroup]:
    """Return the groups of a model whose layers all have `compressed`, in a cache of `dtype`.

    They hold the entries, the rows of windows, with and without borders, and the rows of open pools. keeps_ids: whether
    each position has its token id beside the entries, as a number of 32 bits.
    """
    first = attention[0]
    head_dim, window, row_size = first.head_dim, first.window, _row_size(first, dtype)
    entries: list[Entries] = []
    parts: list[OpenPart] = []
    bordered: dict[CompressedConfig, list[int]] = {}
    plain: list[int] = []
    for index, layer in enumerate(attention):
        sizes = layer.compressed
        assert sizes is not None
        if sizes.overlaps:
            bordered.setdefault(sizes, []).append(index)
        else:
            plain.append(index)
        if entries_source(attention, index) != index:
            continue
        entries.append(Entries(sizes.pool_size, row_size))
        if sizes.index is not None:
            entries.append(Entries(sizes.pool_size, sizes.index.key_size(dtype)))
        if sizes.num_earlier_rows:
            parts.append(OpenPart((open_layer(attention, index),), sizes.row_size(head_dim), sizes.num_earlier_rows))
    if keeps_ids:
        entries.append(Entries(1, 4 // dtype.itemsize))
    groups: list[CacheGroup] = []
    if entries:
        groups.append(EntriesGroup((entries_layer(attention),), entries=entries))
    for sizes, layers in bordered.items():
        # Half of each row of the block's last pool.
        border_size = sizes.pool_size * sizes.row_size(head_dim) // 2 * 4 // dtype.itemsize
        groups.append(
            BorderGroup(
                tuple(layers), 1, row_size, row_size, window, latent=True, pool_size=block_size, entry_size=border_size
            )
        )
    if plain:
        groups.append(CacheGroup(tuple(plain), 1, row_size, row_size, window, latent=True))
    if parts:
        groups.append(OpenPoolGroup((), parts=_together(parts)))
    return groups


def _together(parts: Sequence[OpenPart]) -> list[OpenPart]:
    """Return parts with the layers of all that have equal rows."""
    layers: dict[tuple[int, int], list[int]] = {}
    for part in parts:
        layers.setdefault((part.size, part.num_rows), []).extend(part.layers)
    return [OpenPart(tuple(of_part), *rows) for rows, of_part in layers.items()]


def whole_pools(attention: Sequence[AttentionConfig]) -> int:
    """Return the positions that a block must be a multiple of; 1 without pools."""
    sizes = [1]
    for layer in attention:
        if layer.compressed is not None and layer.compressed.pool_size:
            sizes.append(layer.compressed.pool_size)
    return math.lcm(*sizes)
