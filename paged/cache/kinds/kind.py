"""A kind of table: what a cache keeps of its sequences for the layers of one group, and when it may drop it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from paged.cache.groups import CacheGroup
    from paged.cache.guard import CacheGuard
    from paged.cache.kv_cache import PagedKvCacheConfig
    from paged.cache.pool import BlockPool
    from paged.cache.prefix_index import PrefixIndex
    from paged.cache.retention import Level
    from paged.cache.slot_reservation import SequenceState
    from paged.cache.tensors import KvCacheTensors
    from paged.cache.token_chain import Hash
    from paged.step.step import Step


@dataclass(frozen=True, slots=True)
class CacheParts:
    """Parts of the cache that a kind works with.

    Attributes:
        pool: blocks of all tables.
        new_pool: makes a pool of other memory from the arguments of `BlockPool`.
    """

    config: PagedKvCacheConfig
    guard: CacheGuard
    tensors: KvCacheTensors
    index: PrefixIndex
    pool: BlockPool
    new_pool: Callable[..., BlockPool]


@dataclass(frozen=True, slots=True)
class Match:
    """Full blocks that the cache holds of a prompt's beginning.

    Attributes:
        has_block: whether the device or the tier has the block of each position and table, [positions, tables].
        blocks: published blocks of the first table; the positions behind them are in a tier.
        hashes: chained hash of each position; empty for a hit without a tier.
        longest: limit for the tokens that a hit may take.
    """

    has_block: NDArray[np.bool_]
    blocks: Sequence[int]
    hashes: Sequence[Hash]
    longest: int

    def lengths(self, block_size: int) -> list[int]:
        """Return the length of a hit for each number of positions, beginning with 0."""
        return [min(count * block_size, self.longest) for count in range(len(self.has_block) + 1)]


class Kind:
    """Layers whose memory follows one rule. The cache asks all its kinds the same four questions in one loop.

    What does it keep of a sequence, what does a prefix hit need, what may it drop, and how much does it hold? Every
    method does nothing unless a kind overrides it, and answers that everything is possible: tables that see all tokens
    keep their blocks as long as the sequence, and a hit needs every block. The caller holds the cache's lock. Methods
    named `check_` or `require` raise before a call changes anything; the methods that follow them fail only for lack of
    memory. Errors are rolled back.

    A kind keeps one record of each sequence. Records are replaced by `put`, never changed, so that a rollback restores
    them. Other changes of a kind have to be noted in the rollback log or derived in `recount`.

    To add a kind, derive from it and from `CacheGroup`, and name the kind in the group's `kind`. A kind with memory of
    its own derives from `SlotKind` (`slots.py`).

    empty: record of a sequence for which the kind keeps nothing.
    columns: indices of the kind's block tables; for memory of its own, one index behind all tables.
    """

    empty: Any = None

    def __init__(self, group: CacheGroup | None, columns: range, parts: CacheParts) -> None:
        self.group = group
        self.columns = columns
        self._config = parts.config
        self._block_size, self._num_tables = parts.config.block_size, len(parts.config.tables)
        self._pool, self._index = parts.pool, parts.index
        self._rollback, self._counts = parts.guard.rollback, parts.guard.counts

    # What it keeps of a sequence.

    def get(self, state: SequenceState) -> Any:
        """Return the record of a sequence."""
        return state.parts.get(self, self.empty)

    def put(self, state: SequenceState, record: Any) -> None:
        """Replace the record of a sequence."""
        self._rollback.append((state.parts.__setitem__, self, self.get(state)))
        state.parts[self] = record

    def get_all(self, states: Sequence[SequenceState]) -> list[Any]:
        """Return the records of sequences."""
        return [state.parts.get(self, self.empty) for state in states]

    def require(self, states: Sequence[SequenceState], targets: Sequence[int]) -> Any:
        """Raise an error unless `reserve` would succeed; return what it needs to know."""

    def reserve(self, states: Sequence[SequenceState], targets: Sequence[int], plan: Any) -> None:
        """Provide memory for a step of every sequence up to its target length. plan: result of `require`."""

    def check_step(self, states: Sequence[SequenceState], targets: Sequence[int]) -> None:
        """Raise InvalidInputError unless a forward can run up to the targets without a new reservation."""

    def fill(self, step: Step, states: Sequence[SequenceState]) -> None:
        """Fill in what layers of this kind read in a forward."""

    def commit(self, states: Sequence[SequenceState]) -> None:
        """End the steps: their tokens are written, and the lengths are the targets."""

    def cancel(self, states: Sequence[SequenceState]) -> None:
        """Drop open steps of sequences whose lengths stay."""

    def check_advance(self, call: str, state: SequenceState, target: int) -> None:
        """Raise an error unless a caller without reservation can write the tokens up to `target`."""

    def check_read(self, state: SequenceState, column: int, start: int, end: int) -> None:
        """Raise InvalidInputError if a table lacks one of the positions start..end."""

    def fork(self, source: SequenceState, target: SequenceState) -> None:
        """Give a sequence without tokens until now what `source` has; it has the same tokens, or the first of them."""

    def check_truncate(self, state: SequenceState, num_tokens: int) -> None:
        """Raise InvalidInputError unless the sequence can be cut to `num_tokens`."""

    def truncate(self, state: SequenceState, num_tokens: int) -> None:
        """Cut a sequence to `num_tokens`, before its blocks, its length and its chain are cut."""

    def release(self, state: SequenceState) -> None:
        """Free what a sequence holds."""

    def check_swap_out(self, state: SequenceState) -> None:
        """Raise OutOfBlocksError unless the host has memory for the sequence."""

    def swap_out(self, state: SequenceState) -> None:
        """Move what only this sequence holds to the host; blocks are moved by the caller."""

    def check_swap_in(self, state: SequenceState) -> None:
        """Raise OutOfBlocksError unless the device has memory for the sequence."""

    def swap_in(self, state: SequenceState) -> None:
        """Move a sequence back to the device."""

    def chunk_end(self, state: SequenceState, limit: int, total: int, *, may_leave_grid: bool) -> int:
        """Return where the next chunk of a prompt of `total` tokens ends, at most `limit`."""
        return limit

    # What a prefix hit needs.

    def usable(self, match: Match) -> NDArray[np.bool_] | None:
        """Return for each number of positions, beginning with 0, whether a hit may end there; None if all are."""
        return None

    def begin(self, state: SequenceState, matched: Sequence[int], prompt_len: int) -> None:
        """Give a new sequence what a hit of its length has.

        matched: all published blocks of the first table that its prompt begins with, also unusable ones.
        """

    def check_share(self, giver: SequenceState, num_tokens: int) -> None:
        """Raise an error unless another sequence can begin with the giver's first `num_tokens`, which fill blocks."""

    def fetch(self, match: Match, count: int) -> bool:
        """Load from a tier what a hit of `count` positions needs besides blocks; False if that is impossible."""
        return True

    def retain(self, blocks: Sequence[int], level: Level) -> None:
        """Give what hits behind blocks of the first table need the priority of the blocks."""

    def enter(self, blocks: Sequence[int]) -> None:
        """Keep what `fetch` has loaded for the positions of these blocks of the first table, and drop the rest."""

    # What it may drop.

    def keep(self, states: Sequence[SequenceState]) -> None:
        """Keep what later hits need, after blocks of the sequences may have been published."""

    def drop(self, states: Sequence[SequenceState]) -> None:
        """Free what no later token needs, after sequences have grown."""

    def withdrawn(self, blocks: Iterable[int]) -> None:
        """Drop what is kept for hits that end behind `blocks` of the first table, which are no longer published."""

    def store(self, blocks: Iterable[int]) -> None:
        """Copy to a tier what is kept for hits that end behind `blocks`, which are about to be withdrawn."""

    # How much it holds. Bytes follow from the group or spec, because sizes are planned before there is a cache.

    def stats(self) -> dict[str, int]:
        """Return the fields of `CacheStats` that this kind counts."""
        return {}

    def recount(self, states: Sequence[SequenceState]) -> None:
        """Derive counts from the restored sequences, after a rollback."""

    def check(self, states: Sequence[SequenceState]) -> None:
        """Raise PagedError if a count or a position is wrong."""
