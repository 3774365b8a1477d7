"""What callers of the cache manager hold: its configuration, handles of sequences, reservations, figures."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from threading import RLock
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from paged.batch import SeqId
from paged.block_pool import BlockPool
from paged.errors import InvalidInputError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PagedKvCacheConfig:
    """Shape and policy of a cache.

    num_blocks: blocks that can be handed out; storage holds one more, block 0.
    num_swap_blocks: blocks of host memory that sequences can be swapped to.
    dtype, device: of the tensors; None takes PyTorch's defaults when the cache is made.
    low_watermark, high_watermark: fractions of the pool that can be handed out; below the first, pressure is HIGH,
        below the second, CRITICAL.
    max_seq_len: longest sequence, None for no limit but the pool's.

    Raises:
        InvalidInputError: a size is not positive, or the watermarks are not 0 <= high <= low <= 1.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    num_blocks: int = 1024
    num_swap_blocks: int = 0
    dtype: torch.dtype | None = None
    device: torch.device | str | None = None
    enable_prefix_cache: bool = True
    low_watermark: float = 0.3
    high_watermark: float = 0.1
    max_seq_len: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size", "num_blocks", "max_seq_len"):
            value = getattr(self, name)
            if value is None and name == "max_seq_len":
                continue
            if not isinstance(value, int) or value < 1:
                raise InvalidInputError(f"{name}: {value!r}, expected a positive integer")
        check_count("num_swap_blocks", self.num_swap_blocks)
        if not 0.0 <= self.high_watermark <= self.low_watermark <= 1.0:
            raise InvalidInputError(
                f"high_watermark, low_watermark: {self.high_watermark}, {self.low_watermark}, "
                "expected 0 <= high_watermark <= low_watermark <= 1"
            )


def check_count(name: str, value: int) -> None:
    """Raise InvalidInputError unless `value` is an integer of at least 0."""
    if not isinstance(value, int | np.integer) or value < 0:
        raise InvalidInputError(f"{name}: {value!r}, expected an integer of at least 0")


@dataclass(frozen=True)
class CacheStats:
    """The cache at one moment, counted when asked for.

    num_tokens: lengths of all sequences added up, so a shared position counts once a sequence.
    capacity_tokens: the room of the whole pool.
    utilization: used_blocks / num_blocks.
    cow_copies, allocation_failures: since the cache was made.
    bytes_per_block: K and V of all layers.
    """

    num_blocks: int
    free_blocks: int
    used_blocks: int
    shared_blocks: int
    num_sequences: int
    num_tokens: int
    capacity_tokens: int
    utilization: float
    cow_copies: int
    allocation_failures: int
    bytes_per_block: int


@dataclass(frozen=True)
class KvCacheHandleStats:
    """One sequence at one moment; shared_blocks are those that another sequence holds too."""

    num_blocks: int
    shared_blocks: int
    num_tokens: int
    capacity: int


@dataclass(eq=False, slots=True)
class SequenceState:
    """What the manager knows of one sequence; callers see it through a KvCacheHandle.

    num_written: positions below it were written through write_kv, without a gap after num_tokens.
    blocks is replaced, never changed in place, so an old value can be kept to go back to.
    """

    request_id: SeqId
    namespace: Hashable
    blocks: tuple[int, ...] = ()
    num_tokens: int = 0
    num_cached_tokens: int = 0
    num_written: int = 0
    is_valid: bool = True
    reservation: KvSlotReservation | None = None
    _row: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    _row_blocks: tuple[int, ...] = ()

    def block_row(self) -> NDArray[np.int32]:
        """`blocks` as an array, converted when they change: converting 256 x 512 ids takes milliseconds."""
        if self._row_blocks is not self.blocks:
            self._row = np.array(self.blocks, np.int32)
            self._row_blocks = self.blocks
        return self._row


class KvCacheHandle:
    """One sequence in the cache. Read-only: it changes through the manager that made it."""

    def __init__(self, state: SequenceState, pool: BlockPool, block_size: int) -> None:
        self._state = state
        self._pool = pool
        self._block_size = block_size

    @property
    def cache_id(self) -> SeqId:
        """The key executors use; the same as `request_id`."""
        return self._state.request_id

    @property
    def request_id(self) -> SeqId:
        """The name the sequence was allocated under."""
        return self._state.request_id

    @property
    def num_tokens(self) -> int:
        """Positions that hold valid K/V."""
        return self._state.num_tokens

    @property
    def capacity(self) -> int:
        """Positions that the blocks have room for."""
        return len(self._state.blocks) * self._block_size

    @property
    def num_cached_tokens(self) -> int:
        """Tokens whose K/V another sequence computed."""
        return self._state.num_cached_tokens

    @property
    def blocks(self) -> tuple[int, ...]:
        """Ids of the blocks, in order of position."""
        return self._state.blocks

    @property
    def namespace(self) -> Hashable:
        """Sequences share K/V within one namespace: adapter, model, tenant."""
        return self._state.namespace

    @property
    def is_valid(self) -> bool:
        """False once the sequence has been freed."""
        return self._state.is_valid

    @property
    def is_swapped(self) -> bool:
        """Whether the K/V lie in host memory."""
        return False

    def stats(self) -> KvCacheHandleStats:
        """Figures of this sequence, as of now."""
        blocks = self.blocks
        return KvCacheHandleStats(
            num_blocks=len(blocks),
            shared_blocks=sum(self._pool.ref_count(block) > 1 for block in blocks),
            num_tokens=self.num_tokens,
            capacity=len(blocks) * self._block_size,
        )

    def __repr__(self) -> str:
        freed = "" if self.is_valid else ", freed"
        return f"KvCacheHandle({self.request_id!r}, num_tokens={self.num_tokens}, capacity={self.capacity}{freed})"


@dataclass(slots=True)
class ReservedSlots:
    """What a reservation gave to one sequence, and what takes it back.

    replaced: shared block by its index in `blocks`, where a copy stands now; the reservation keeps the reference.
    """

    state: SequenceState
    target_len: int
    num_blocks_before: int
    num_written_before: int
    replaced: dict[int, int]


class KvSlotReservation:
    """Room for a whole batch, as a context manager.

    `commit()` moves every sequence to its target length. `rollback()`, or leaving by an exception, takes the room back
    and undoes copies. Leaving normally without either keeps the room and leaves the lengths alone. A sequence that
    another call changes meanwhile is settled as if left normally; commit and rollback pass it over.
    """

    def __init__(self, lock: RLock, pool: BlockPool, slots: Sequence[ReservedSlots]) -> None:
        self._lock = lock
        self._pool = pool
        self._slots = {slot.state.request_id: slot for slot in slots}
        self._is_open = True
        for slot in slots:
            slot.state.reservation = self

    @property
    def is_open(self) -> bool:
        """Whether it can still be committed or rolled back."""
        return self._is_open

    @property
    def kept_blocks(self) -> list[int]:
        """Shared blocks that copies replaced, kept to go back to."""
        return [block for slot in self._slots.values() for block in slot.replaced.values()]

    def commit(self) -> None:
        """Every sequence now holds valid K/V up to its target length.

        Raises:
            InvalidInputError: committed, rolled back or left before.
        """
        with self._lock:
            if not self._is_open:
                raise InvalidInputError("commit: the reservation is closed")
            for slot in self._slots.values():
                slot.state.num_tokens = slot.target_len
            self._settle_all()

    def rollback(self) -> None:
        """Blocks, reference counts and lengths are again as before the reservation. Does nothing once it is closed."""
        with self._lock:
            for slot in self._slots.values():
                state, kept = slot.state, slot.num_blocks_before
                blocks = list(state.blocks)
                dropped = blocks[kept:]
                for index, original in slot.replaced.items():
                    dropped.append(blocks[index])
                    blocks[index] = original
                slot.replaced = {}
                state.blocks = tuple(blocks[:kept])
                state.num_written = slot.num_written_before
                self._pool.release(dropped)
            self._settle_all()

    def settle(self, state: SequenceState) -> None:
        """Leave one sequence as it stands: its room stays, and so does its length."""
        slot = self._slots.pop(state.request_id)
        state.reservation = None
        self._pool.release(list(slot.replaced.values()))

    def _settle_all(self) -> None:
        for slot in list(self._slots.values()):
            self.settle(slot.state)
        self._is_open = False

    def __enter__(self) -> KvSlotReservation:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            if exc_type is not None:
                self.rollback()
            else:
                self._settle_all()
