"""Decode steps as CUDA graphs: one launch in place of some ten a layer, for batches padded up to a few sizes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paged.cache.kv_cache import PagedKvCacheConfig
from paged.forward_step import ForwardStep
from paged.kernels.common.device import use_triton
from paged.metadata import AttentionMetadata
from paged.models.decoder_network import DecoderNetwork
from paged.models.graph_recorder import graph_recorder
from paged.models.loading.load_options import as_graphs
from paged.staging import staged_size, to_device

# Padding costs little while a step is bound by reading the weights: below 64 rows at most 7 are padding, then 15.
DEFAULT_SIZES = (1, 2, 4, *range(8, 64, 8), *range(64, 257, 16))
# Entries of a row of the block table come in lines of 64 bytes, so that every row is aligned.
_TABLE_LINE = 16


def graph_sizes(choice: bool | Sequence[int] | None, device: torch.device, num_blocks: int) -> tuple[int, ...]:
    """Return the batch sizes to capture, rising; none above the number of sequences that `num_blocks` can hold.

    choice: the sizes, or True for DEFAULT_SIZES, False for none, None for the default on a GPU alone. There are none
    on a GPU where PyTorch computes (PAGED_BACKEND=torch), whose implementations wait for the device.

    Raises:
        InvalidInputError: a size is no positive integer.
    """
    sizes = as_graphs("cuda_graphs", choice)
    on_gpu = device.type == "cuda"
    if sizes is None:
        sizes = on_gpu
    if on_gpu and not use_triton(device):
        sizes = False
    if isinstance(sizes, bool):
        sizes = DEFAULT_SIZES if sizes else ()
    return tuple(sorted({min(size, num_blocks) for size in sizes}))


class DecodeGraphs:
    """Steps of one token a sequence, without adapters, replayed from graphs over static inputs.

    A graph holds the forward from token ids to the head's product, planned for the longest possible sequence, so that
    it serves all lengths. Rows beyond the batch are padding: sequences without a query, whose K/V go nowhere.

    A graph knows the weights and caches by their addresses: after replacing one of those, capture again. Adapters lie
    elsewhere and concern no row here, so that they may come and go.
    """

    def __init__(
        self, network: DecoderNetwork, cache: PagedKvCacheConfig, *, max_seq_len: int, sizes: Sequence[int]
    ) -> None:
        """sizes: rising batch sizes. Nothing is captured, and no memory taken, before `capture`."""
        self._network = network
        self._device = next(network.parameters()).device
        self.longest = min(max_seq_len, cache.longest_sequence or max_seq_len)
        self._num_tables = len(cache.tables)
        # Token ids, positions, slots, lengths and query offsets.
        none = np.empty(0, np.int64)
        slots = np.empty((self._num_tables, 0), np.int64)
        self._no_sequences: tuple[NDArray[Any], ...] = none, none, slots, np.empty(0, np.int32), np.zeros(1, np.int32)
        self._table_width = -(-self.longest // (cache.block_size * _TABLE_LINE)) * _TABLE_LINE
        self._sizes = tuple(sizes)
        self._replays: dict[int, Callable[[], None]] = {}
        self._inputs = self._table = self._product = torch.empty(0)
        self._loaded: ForwardStep | None = None

    def clear(self) -> None:
        """Forget the graphs and give their memory back."""
        self._replays = {}
        self._inputs = self._table = self._product = torch.empty(0)
        self._loaded = None

    def capture(self, track: Callable[[Sequence[int]], Iterable[int]] = iter) -> None:
        """Capture a graph for every size, the largest first; where that fails there are none. Needs no cache blocks.

        track: iterates over the sizes, and may show how far it has come.
        """
        self.clear()
        if not self._sizes:
            return
        most, dtype = self._sizes[-1], next(self._network.parameters()).dtype
        empty_table = np.empty((self._num_tables, most, self._table_width), np.int32)
        num_bytes = staged_size((*_padded(self._no_sequences, most), empty_table))
        self._inputs = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        self._table = torch.zeros(empty_table.shape, dtype=torch.int32, device=self._device)
        self._product = torch.empty(most, self._network.config.vocab_size, dtype=dtype, device=self._device)
        recorder = graph_recorder(self._device)
        with torch.no_grad():
            self._replays = {size: recorder.record(self._forward(size)) for size in track(self._sizes[::-1])}

    def takes(self, step: ForwardStep) -> bool:
        """Whether there is a graph for it: one token a sequence, the logits of all wanted, not too many rows."""
        num_seqs = len(step.handles)
        return (
            bool(self._replays)
            and 0 < num_seqs <= self._sizes[-1]
            and step.host.is_one_token_each
            and len(step.row_ids) == num_seqs
        )

    def load(self, step: ForwardStep) -> None:
        """Fill the static inputs for a step that `takes` has approved; for its `logits` its tokens may be others."""
        num_seqs, size = len(step.handles), self._size(step)
        tables = step.host.block_tables[:, :, : self._table_width]
        # Of the table's rows as much goes as the batch has: all of 256 rows for 40,000 tokens are 2.6 MB a step.
        rows = _padded((step.token_ids, *step.host.arrays[:-1]), size)
        *_, there = to_device((*rows, tables), self._device, out=self._inputs)
        self._table[:, :num_seqs, : tables.shape[2]].copy_(there)
        self._loaded = step

    def logits(self, step: ForwardStep) -> torch.Tensor:
        """Run a step that `takes` has approved: float32 [num_seqs, vocab_size]."""
        size = self._size(step)
        if self._loaded is step:
            to_device((_extended(step.token_ids, size, 0),), self._device, out=self._inputs)
        else:
            self.load(step)
        self._replays[size]()
        return self._product[: len(step.handles)].to(torch.float32, copy=True)

    def _size(self, step: ForwardStep) -> int:
        return self._sizes[bisect_left(self._sizes, len(step.handles))]

    def _forward(self, size: int) -> Callable[[], None]:
        """The forward of `size` rows over the static inputs, all of them padding as yet."""
        input_ids, *rest = to_device(_padded(self._no_sequences, size), self._device, out=self._inputs)
        tensors, product = (*rest, self._table[:, :size]), self._product[:size]

        def run() -> None:
            metadata = AttentionMetadata.over(tensors, max_seqlen_q=1, max_seqlen_k=self.longest)
            self._network.head(self._network(input_ids, metadata.positions, metadata), out=product)

        return run


def _padded(arrays: Sequence[NDArray[Any]], size: int) -> list[NDArray[Any]]:
    """Token ids, positions, slots, lengths and query offsets for `size` sequences: those beyond the given ones have no
    query, no key, and no slot for K/V.
    """
    *rows, offsets = arrays
    padded = [_extended(row, size, fill) for row, fill in zip(rows, (0, 0, -1, 0), strict=True)]
    return [*padded, _extended(offsets, size + 1, offsets[-1])]


def _extended(array: NDArray[Any], length: int, fill: int) -> NDArray[Any]:
    result = np.full((*array.shape[:-1], length), fill, array.dtype)
    result[..., : array.shape[-1]] = array
    return result
