"""What rank 0 tells the others: numbers in flat arrays, in one broadcast, or two where they are many."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from paged.forward_step import ForwardStep
from paged.metadata import HostMetadata
from paged.models.logits_policy import Draws
from paged.models.parallel.ranks import Ranks

# What comes with the first broadcast, room for a decode step of 64 sequences with 40 blocks each. Over 10 Gb/s it takes
# 13 us; a second broadcast takes a round trip.
_FIRST_BYTES = 1 << 14
_DTYPES = (np.dtype(np.int64), np.dtype(np.int32), np.dtype(np.float32), np.dtype(np.uint8))
_INT64 = _DTYPES[0].itemsize


class Kind(IntEnum):
    """What a message asks for."""

    STEP = 0
    MOVE_BLOCKS = 1
    PREPARE = 2
    LOAD_LORA = 3
    UNLOAD_LORA = 4
    COMPARE = 5
    STOP = 6


class Channel:
    """The way of messages from rank 0 to the others, who call `receive` whenever it calls `send`.

    state: int64 [2], how many there were, and a checksum of all their bytes: the same on every rank.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._first = torch.zeros(_FIRST_BYTES, dtype=torch.uint8)
        self.state = torch.zeros(2, dtype=torch.int64)

    def send(self, kind: Kind, arrays: Sequence[NDArray[Any]]) -> None:
        """Tell the others; arrays of int64, int32, float32 or uint8."""
        header = [0, kind, len(arrays)]
        for array in arrays:
            header += [_DTYPES.index(array.dtype), array.ndim, *array.shape]
        size = header[0] = len(header) * _INT64 + sum(array.nbytes for array in arrays)
        whole = self._first if size <= _FIRST_BYTES else torch.empty(size, dtype=torch.uint8)
        buffer, start = whole.numpy(), 0
        for array in (np.array(header, np.int64), *arrays):
            buffer[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            start += array.nbytes
        self._ranks.broadcast(whole[:_FIRST_BYTES])
        if size > _FIRST_BYTES:
            self._ranks.broadcast(whole[_FIRST_BYTES:])
        self._count(buffer[:size])

    def receive(self) -> tuple[Kind, list[NDArray[Any]]]:
        """What rank 0 sends next."""
        self._ranks.broadcast(self._first)
        size = int(self._first[:_INT64].view(torch.int64))
        rest = torch.empty(max(0, size - _FIRST_BYTES), dtype=torch.uint8)
        if len(rest):
            self._ranks.broadcast(rest)
        buffer = torch.cat((self._first[: min(size, _FIRST_BYTES)], rest)).numpy()
        self._count(buffer)
        return _unpacked(buffer)

    def _count(self, message: NDArray[np.uint8]) -> None:
        self.state[0] += 1
        self.state[1] = zlib.crc32(message.tobytes(), int(self.state[1]))


def _unpacked(buffer: NDArray[np.uint8]) -> tuple[Kind, list[NDArray[Any]]]:
    words = buffer[: len(buffer) // _INT64 * _INT64].view(np.int64)
    _, kind, count = words[:3].tolist()
    layouts, start = [], 3
    for _ in range(count):
        dtype, ndim = words[start : start + 2].tolist()
        layouts.append((_DTYPES[dtype], tuple(words[start + 2 : start + 2 + ndim].tolist())))
        start += 2 + ndim
    arrays, first = [], start * _INT64
    for dtype, shape in layouts:
        end = first + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        arrays.append(buffer[first:end].copy().view(dtype).reshape(shape))
        first = end
    return Kind(kind), arrays


class StepMessage(NamedTuple):
    """A step, the slot of each row's adapter, None for none, and what to draw from its logits, None for the logits.

    knows_ids: whether its token ids are those that are to run; else the device alone knows them.
    """

    step: ForwardStep
    row_slots: NDArray[np.int32] | None
    draws: Draws | None
    knows_ids: bool

    def arrays(self) -> list[NDArray[Any]]:
        """It as arrays."""
        step, host, slots = self.step, self.step.host, self.row_slots
        flags = host.max_seqlen_q, host.max_seqlen_k, self.knows_ids, slots is not None, self.draws is not None
        rows = np.empty(0, np.int32) if slots is None else slots
        draws = self.draws or Draws.of([])
        return [np.array(flags, np.int64), step.token_ids, step.row_ids, rows, *draws, *host.arrays]

    @classmethod
    def read(cls, arrays: Sequence[NDArray[Any]], device: torch.device) -> StepMessage:
        """What `arrays` returned on rank 0; the step has no sequences of this rank's cache."""
        flags, token_ids, row_ids, row_slots, *rest = arrays
        num_draws = len(Draws._fields)
        draws, (positions, slots, seq_lens, cu_seqlens_q, tables) = Draws(*rest[:num_draws]), rest[num_draws:]
        max_seqlen_q, max_seqlen_k, knows_ids, is_adapted, is_drawn = flags.tolist()
        metadata = HostMetadata(positions, slots, seq_lens, cu_seqlens_q, tables, max_seqlen_q, max_seqlen_k)
        step = ForwardStep(token_ids, metadata, row_ids, (), device)
        return cls(step, row_slots if is_adapted else None, draws if is_drawn else None, bool(knows_ids))
