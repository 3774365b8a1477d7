"""Messages from rank 0 to the other ranks: arrays in one broadcast, or in two if they are large."""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from paged.models.logits_policy import Draws
from paged.models.parallel.ranks import Ranks
from paged.step.batch import CapturedStates
from paged.step.embeds import StepEmbeds
from paged.step.step import Step

# Bytes of the first broadcast, enough for common decode steps, see limits.md. Larger messages need a second broadcast.
_FIRST_BYTES = 1 << 14
# Header of a message: bytes of the message with this header, and bytes of the array layouts, which come next.
_SIZES = struct.Struct("=qq")


class Kind(IntEnum):
    """Kind of a message."""

    STEP = 0
    MOVE_BLOCKS = 1
    WARM_UP = 2
    LOAD_LORA = 3
    UNLOAD_LORA = 4
    UPDATE_WEIGHTS = 5
    COMPARE = 6
    STOP = 7
    SLEEP = 8
    WAKE = 9
    COMPARE_READ = 10


class Channel:
    """Channel from rank 0 to the other ranks. Each `send` needs a `receive` on every other rank.

    state: int64 [2], number of messages and checksum of all their bytes, equal on every rank.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._first = torch.zeros(_FIRST_BYTES, dtype=torch.uint8)
        self.state = torch.zeros(2, dtype=torch.int64)

    def send(self, kind: Kind, arrays: Sequence[NDArray[Any]]) -> None:
        """Send a message to the other ranks."""
        array_layouts = [(array.dtype.str, array.shape) for array in arrays]
        layouts = json.dumps([kind, array_layouts]).encode()
        message = layouts + b"".join([array.tobytes() for array in arrays])
        message = _SIZES.pack(_SIZES.size + len(message), len(layouts)) + message
        buffer = self._first
        if len(message) > _FIRST_BYTES:
            buffer = torch.empty(len(message), dtype=torch.uint8)
        buffer.numpy()[: len(message)] = np.frombuffer(message, np.uint8)
        self._ranks.broadcast(buffer[:_FIRST_BYTES])
        if len(message) > _FIRST_BYTES:
            self._ranks.broadcast(buffer[_FIRST_BYTES:])
        self._count(message)

    def receive(self) -> tuple[Kind, list[NDArray[Any]]]:
        """Return the next message of rank 0."""
        self._ranks.broadcast(self._first)
        size, num_layouts = _SIZES.unpack(self._first[: _SIZES.size].numpy().tobytes())
        message = self._first[: min(size, _FIRST_BYTES)].numpy().tobytes()
        if size > _FIRST_BYTES:
            second = torch.empty(size - _FIRST_BYTES, dtype=torch.uint8)
            self._ranks.broadcast(second)
            message += second.numpy().tobytes()
        self._count(message)
        arrays, start = [], _SIZES.size + num_layouts
        kind, layouts = json.loads(message[_SIZES.size : start])
        for dtype, shape in layouts:
            flat = np.frombuffer(message, dtype, math.prod(shape), start).copy()
            start += flat.nbytes
            arrays.append(flat.reshape(shape))
        return Kind(kind), arrays

    def _count(self, message: bytes) -> None:
        self.state[0] += 1
        self.state[1] = zlib.crc32(message, int(self.state[1]))


class _Numbers(NamedTuple):
    """Numbers and flags of a step, sent as the first array."""

    max_seqlen_q: int
    max_seqlen_k: int
    num_device_ids: int
    num_states: int
    max_append: int
    is_adapted: bool
    is_drawn: bool
    returns_hidden: bool
    is_captured: bool
    has_embeds: bool
    is_invariant: bool


class StepMessage(NamedTuple):
    """Message of a step: adapter of each row or None, draws from its logits or None for logits.

    num_device_ids: number of leading tokens that only rank 0's device knows.
    """

    step: Step
    row_adapters: NDArray[np.int32] | None
    draws: Draws | None
    num_device_ids: int

    def arrays(self) -> list[NDArray[Any]]:
        """Return the message as arrays."""
        step, row_adapters = self.step, self.row_adapters
        numbers = _Numbers(
            max_seqlen_q=step.max_seqlen_q,
            max_seqlen_k=step.max_seqlen_k,
            num_device_ids=self.num_device_ids,
            num_states=len(step.states),
            max_append=step.max_append,
            is_adapted=row_adapters is not None,
            is_drawn=self.draws is not None,
            returns_hidden=step.returns_hidden,
            is_captured=step.captured is not None,
            has_embeds=step.embeds is not None,
            is_invariant=step.is_invariant,
        )
        adapters = np.empty(0, np.int32) if row_adapters is None else row_adapters
        draws = self.draws or Draws.of([])
        embeds = []
        if step.embeds is not None:
            embeds = step.embeds.arrays()
        return [np.array(numbers, np.int64), step.token_ids, step.row_ids, adapters, *draws, *step.arrays, *embeds]

    @classmethod
    def read(cls, arrays: Sequence[NDArray[Any]], device: torch.device) -> StepMessage:
        """Rebuild the message from its arrays. The step has no sequences, because only rank 0 has the cache manager."""
        numbers = _Numbers(*arrays[0].tolist())
        token_ids, row_ids = arrays[1:3]
        row_adapters: NDArray[np.int32] | None = None
        if numbers.is_adapted:
            row_adapters = arrays[3]
        num_read = 4 + len(Draws._fields)
        draws: Draws | None = None
        if numbers.is_drawn:
            draws = Draws(*arrays[4:num_read])
        step = Step(
            device=device,
            returns_hidden=bool(numbers.returns_hidden),
            is_invariant=bool(numbers.is_invariant),
            max_seqlen_q=numbers.max_seqlen_q,
            max_seqlen_k=numbers.max_seqlen_k,
            max_append=numbers.max_append,
        )
        step.token_ids, step.row_ids = token_ids, row_ids
        step.positions, step.slot_mappings, step.seq_lens = arrays[num_read : num_read + 3]
        num_read += 3
        step.states = tuple(arrays[num_read : num_read + numbers.num_states])
        num_read += numbers.num_states
        step.cu_seqlens_q, step.block_tables = arrays[num_read : num_read + 2]
        if numbers.has_embeds:
            step.embeds = StepEmbeds.read(arrays[num_read + 2 :])
        if numbers.is_captured:
            step.captured = CapturedStates()
        return cls(step, row_adapters, draws, numbers.num_device_ids)
