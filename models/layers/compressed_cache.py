"""The cache of layers with compressed entries: rows of windows, entries, and rows of open pools.

A block holds whole pools, so an entry lies in the block of its pool's positions and is written with the last of them.
Copies, forks, prefix hits, swap, tiers and truncations then treat it like that position's key. Rows of open pools are
kept as far as the next entry needs them, in tables with a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from paged.cache.groups import CacheGroup
from paged.models.layers.config import AttentionConfig, CompressedConfig


class EntryArea(NamedTuple):
    """Where a layer's entries lie: in a part of every block of one cache layer.

    Attributes:
        layer: layer of the cache.
        start, size: first element of a position's share of entries, and its elements.
    """

    layer: int
    start: int
    size: int

    def entries(self, cache: torch.Tensor, pool_size: int) -> torch.Tensor:
        """Return the entries, [num_blocks, entries of a block, size of an entry].

        cache: [num_blocks, block_size, 1, elements]; its blocks consist of whole pools.
        """
        block_size = cache.shape[1]
        blocks = cache.view(len(cache), -1)  # [num_blocks, elements of a block]
        area = blocks[:, block_size * self.start : block_size * (self.start + self.size)]
        return area.view(len(area), block_size // pool_size, pool_size * self.size)


def _pooling_layers(attention: Sequence[AttentionConfig]) -> dict[CompressedConfig, list[int]]:
    """Return the layers with each kind of pool."""
    layers: dict[CompressedConfig, list[int]] = {}
    for index, layer in enumerate(attention):
        sizes = layer.compressed
        if sizes is not None and sizes.pool_size:
            layers.setdefault(sizes, []).append(index)
    return layers


def entry_areas(attention: Sequence[AttentionConfig], dtype: torch.dtype) -> dict[int, EntryArea]:
    """Return the area of each layer with pools, in a cache of `dtype`.

    A layer of the cache holds the entries of one layer of each kind, beside each other.
    """
    areas: dict[int, EntryArea] = {}
    start = 0
    for sizes, layers in _pooling_layers(attention).items():
        size = sizes.entry_share(attention[layers[0]].head_dim, dtype)
        for rank, index in enumerate(layers):
            areas[index] = EntryArea(len(attention) + rank, start, size)
        start += size
    return areas


def row_layer(attention: Sequence[AttentionConfig], index: int) -> int:
    """Return the layer of the cache with a layer's rows of open pools."""
    return 2 * len(attention) + index


def compressed_groups(attention: Sequence[AttentionConfig], dtype: torch.dtype) -> list[CacheGroup]:
    """Return the groups of a model whose layers all have `compressed`, in a cache of `dtype`.

    They hold the rows of windows, the entries, and the rows of open pools.
    """
    first = attention[0]
    layers = tuple(range(len(attention)))
    groups = [CacheGroup(layers, 1, first.head_dim, first.head_dim, sliding_window=first.window, latent=True)]
    areas = entry_areas(attention, dtype)
    if areas:
        size = max(area.start + area.size for area in areas.values())
        entry_layers = sorted({area.layer for area in areas.values()})
        groups.append(CacheGroup(tuple(entry_layers), 1, size, size, latent=True))
    for sizes, pooling in _pooling_layers(attention).items():
        row_layers = tuple(row_layer(attention, index) for index in pooling)
        size = sizes.row_size(first.head_dim, dtype)
        groups.append(CacheGroup(row_layers, 1, size, size, sliding_window=sizes.row_window, latent=True))
    return groups


def largest_pool(attention: Sequence[AttentionConfig]) -> int:
    """Return the positions that a block must be a multiple of; 1 without pools."""
    largest = 1
    for layer in attention:
        if layer.compressed is not None:
            largest = max(largest, layer.compressed.pool_size)
    return largest
