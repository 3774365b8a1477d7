"""What callers of the cache manager hold: its configuration, handles of sequences, reservations, figures."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from paged.batch import SeqId
from paged.block_pool import BlockPool
from paged.cache_events import Notifier
from paged.errors import InvalidInputError
from paged.token_chain import TokenChain

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PagedKvCacheConfig:
    """Shape and policy of a cache.

    num_blocks: blocks that can be handed out; storage holds one more, block 0.
    num_swap_blocks: blocks of host memory that sequences can be swapped to.
    dtype, device: of the tensors; None takes PyTorch's defaults when the cache is made. The kernels take float32,
        float16, bfloat16 and float8_e4m3fn.
    low_watermark, high_watermark: fractions of the pool that can be handed out; below the first, pressure is HIGH,
        below the second, CRITICAL.
    max_seq_len: longest sequence, None for no limit but the pool's.
    sliding_window: tokens that any token can see, itself included, where that holds for every layer: blocks out of
        later tokens' reach are given back. None keeps all.
    prefix_hash: "fast", a polynomial modulo 2^64, or "sha256"; token ids are compared on every hit with either.

    Raises:
        InvalidInputError: a size is not positive, the watermarks are not 0 <= high <= low <= 1, or the hash is another.
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
    sliding_window: int | None = None
    prefix_hash: str = "fast"

    def __post_init__(self) -> None:
        optional = ("max_seq_len", "sliding_window")
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size", "num_blocks", *optional):
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            if not isinstance(value, int) or value < 1:
                raise InvalidInputError(f"{name}: {value!r}, expected a positive integer")
        check_count("num_swap_blocks", self.num_swap_blocks)
        if not 0.0 <= self.high_watermark <= self.low_watermark <= 1.0:
            raise InvalidInputError(
                f"high_watermark, low_watermark: {self.high_watermark}, {self.low_watermark}, "
                "expected 0 <= high_watermark <= low_watermark <= 1"
            )
        if self.prefix_hash not in ("fast", "sha256"):
            raise InvalidInputError(f"prefix_hash: {self.prefix_hash!r}, expected 'fast' or 'sha256'")


_INTEGERS = (int, np.integer)


def check_count(name: str, value: int) -> None:
    """Raise InvalidInputError unless `value` is an integer of at least 0."""
    if not isinstance(value, _INTEGERS) or value < 0:
        raise InvalidInputError(f"{name}: {value!r}, expected an integer of at least 0")


@dataclass(frozen=True)
class CacheStats:
    """The cache at one moment, counted when asked for.

    free_blocks: those that could be handed out; cached_blocks of them still hold K/V that a prompt may begin with.
    published_blocks: all that a prompt may begin with, those in use included.
    prefix_hits, prefix_misses: prompts that found a prefix or none; prefix_hit_tokens: tokens not computed again.
    evictions: cached blocks handed out or withdrawn. swapped_out_blocks, swapped_in_blocks: moved since the start.
    swap_blocks_free: host blocks left.
    num_tokens: lengths of all sequences added up, so a shared position counts once a sequence.
    capacity_tokens: the room of the whole pool.
    utilization: used_blocks / num_blocks.
    cow_copies, allocation_failures, and the counts of hits, evictions and swaps: since the cache was made.
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
    cached_blocks: int
    published_blocks: int
    prefix_hits: int
    prefix_misses: int
    prefix_hit_tokens: int
    evictions: int
    swapped_out_blocks: int
    swapped_in_blocks: int
    swap_blocks_free: int


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
    chain: what is known of the tokens, and published of them.
    host_blocks: while swapped out, the host block by index in `blocks`, where 0 stands meanwhile.
    row, row_blocks: the sequence's row in the manager's table, and the blocks that stand there.
    """

    request_id: SeqId
    namespace: Hashable
    blocks: tuple[int, ...] = ()
    num_tokens: int = 0
    num_cached_tokens: int = 0
    num_written: int = 0
    is_valid: bool = True
    reservation: KvSlotReservation | None = None
    chain: TokenChain = field(default_factory=TokenChain)
    host_blocks: dict[int, int] | None = None
    row: int = 0
    row_blocks: tuple[int, ...] = ()


class KvCacheHandle:
    """One sequence in the cache. Read-only: it changes through the manager that made it."""

    __slots__ = ("__weakref__", "_block_size", "_pool", "_state")

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
        """Ids of the blocks, in order of position; 0 for one that is swapped out or behind the sliding window."""
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
        """Whether K/V lie in host memory; until they are back the sequence cannot run."""
        return self._state.host_blocks is not None

    def stats(self) -> KvCacheHandleStats:
        """Figures of this sequence, as of now."""
        blocks = self.blocks
        return KvCacheHandleStats(
            num_blocks=len(blocks),
            shared_blocks=len(self._pool.shared & set(blocks)),
            num_tokens=self.num_tokens,
            capacity=len(blocks) * self._block_size,
        )

    def __repr__(self) -> str:
        freed = "" if self.is_valid else ", freed"
        return f"KvCacheHandle({self.request_id!r}, num_tokens={self.num_tokens}, capacity={self.capacity}{freed})"


@dataclass(slots=True)
class Undo:
    """What takes back what a reservation changed of one sequence.

    replaced: shared block by its index in `blocks`, where a copy stands now; the reservation keeps the reference.
    """

    num_blocks: int
    num_written: int
    replaced: dict[int, int]


class KvSlotReservation:
    """Room for a whole batch, as a context manager.

    `commit()` moves every sequence to its target length. `rollback()`, or leaving by an exception, takes the room back
    and undoes copies. Leaving normally without either keeps the room and leaves the lengths alone. A sequence that
    another call changes meanwhile is settled as if left normally; commit and rollback pass it over.
    """

    def __init__(
        self,
        guard: Notifier,
        pool: BlockPool,
        states: Sequence[SequenceState],
        targets: Sequence[int],
        undo: dict[SeqId, Undo],
        on_commit: Callable[[Sequence[SequenceState], Sequence[Sequence[int]] | None], None],
    ) -> None:
        self._guard = guard
        self._pool = pool
        self._states = states
        self._targets = targets
        self._undo = undo
        self._on_commit = on_commit
        self._is_open = True
        self._is_whole = True
        for state, target in zip(states, targets, strict=True):
            if target > state.num_tokens:
                state.reservation = self
            else:  # one that grows by nothing has nothing to keep or to take back
                self._is_whole = False

    @property
    def is_open(self) -> bool:
        """Whether it can still be committed or rolled back."""
        return self._is_open

    @property
    def is_whole(self) -> bool:
        """Whether it is open, all of its sequences grow by it, and no other call has changed one of them since."""
        return self._is_whole

    @property
    def kept_blocks(self) -> list[int]:
        """Shared blocks that copies replaced, kept to go back to."""
        return [block for undo in self._undo.values() for block in undo.replaced.values()]

    def covers(self, states: Sequence[SequenceState], targets: Sequence[int]) -> bool:
        """Whether exactly these sequences have room for exactly these lengths, and none has changed since."""
        return self._is_whole and states == self._states and targets == self._targets

    def commit(self, token_ids: Sequence[Sequence[int]] | None = None) -> None:
        """Every sequence now holds valid K/V up to its target length.

        token_ids: the ids of each sequence's new tokens, in the order of the requests: full blocks are published.

        Raises:
            InvalidInputError: committed, rolled back or left before.
        """
        with self._guard:
            if not self._is_open:
                raise InvalidInputError("commit: the reservation is closed")
            is_ours = [state.reservation is self for state in self._states]
            grown = list(compress(self._states, is_ours))
            for state, target in zip(grown, compress(self._targets, is_ours), strict=True):
                state.num_tokens = target
            self._close()
            self._on_commit(grown, None if token_ids is None else list(compress(token_ids, is_ours)))

    def rollback(self) -> None:
        """Blocks, reference counts and lengths of sequences that were to grow are again as before the reservation. Does
        nothing once it is closed.
        """
        with self._guard:
            for state in self._states:
                undo = self._undo.get(state.request_id) if state.reservation is self else None
                if undo is None:
                    continue
                blocks = list(state.blocks)
                dropped = blocks[undo.num_blocks :]
                for index, original in undo.replaced.items():
                    dropped.append(blocks[index])
                    blocks[index] = original
                undo.replaced = {}
                state.blocks = tuple(blocks[: undo.num_blocks])
                state.num_written = undo.num_written
                self._pool.release(dropped)
            self._close()

    def settle(self, state: SequenceState) -> None:
        """Leave one sequence as it stands: its room stays, and so does its length."""
        state.reservation = None
        self._is_whole = False
        undo = self._undo.pop(state.request_id, None)
        if undo is not None:
            self._pool.release(list(undo.replaced.values()))

    def _close(self) -> None:
        if self._is_open:
            for state in self._states:
                if state.reservation is self:
                    state.reservation = None
            for undo in self._undo.values():
                self._pool.release(list(undo.replaced.values()))
            self._undo = {}
            self._is_open = self._is_whole = False

    def __enter__(self) -> KvSlotReservation:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._guard:
            if exc_type is not None:
                self.rollback()
            else:
                self._close()
