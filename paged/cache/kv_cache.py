"""Configuration of a KV cache, and handles of its sequences."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paged.cache.groups import CacheGroup, RecurrentSpec, split_evenly
from paged.cache.pool import BlockPool
from paged.cache.slot_reservation import SequenceState
from paged.errors import InvalidInputError
from paged.folder_path import as_folder
from paged.kernels.common.scalars import as_bool, as_float, as_int, shown
from paged.seq_id import SeqId

if TYPE_CHECKING:
    import torch


# A row of int8 has a float32 scale.
SCALE_BYTES = 4
# Host memory through which files come, if there is no host tier otherwise.
_FOLDER_HOST_BYTES = 64 << 20
# Kernels read block ids as int32.
_MAX_SIZE = (1 << 31) - 2


def row_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of a row (the key or value of one head and token), with its scale if there is one."""
    return head_dim * dtype.itemsize + (0 if dtype.is_floating_point else SCALE_BYTES)


@dataclass(frozen=True)
class PagedKvCacheConfig:
    """Shape and policy of a KV cache.

    Attributes:
        num_kv_heads, head_dim: for layers whose group sets none.
        block_size: positions in a block; 16 by default. A loaded model passes its GPU's `default_block_size`, 64 or 16.
        num_blocks: blocks that can be handed out. Storage holds one more, block 0.
        num_swap_blocks: blocks of host memory for `swap_out`.
        dtype: None takes PyTorch's default when the cache is made. The kernels take float32, float16, bfloat16,
            float8_e4m3fn, float8_e5m2 and int8. int8 has a float32 scale for each head and token, of keys and of
            values.
        device: None takes CUDA if there is one, else the CPU, as models do.
        enable_prefix_cache: whether full blocks are published and shared.
        low_watermark, high_watermark: fractions of the pool that can be handed out. Below the first, pressure is HIGH;
            below the second, CRITICAL.
        max_seq_len: longest sequence in tokens; None for the pool's capacity.
        sliding_window: number of tokens that a token sees, itself included, if all layers have the same. Blocks that no
            later token can see are freed. None keeps all.
        prefix_hash: "fast", a polynomial modulo 2^64, or "sha256". With either, token ids are compared on every hit.
        groups: layers of several shapes or windows; None for one group of all. A layer in no group has no K/V of its
            own.
        recurrent: states of recurrent layers, and how many sequences they have memory for; None without such layers.
        host_cache_bytes: host memory where published blocks go when the device evicts them, and from where a prompt
            that begins with them gets them back; 0 for none. The blocks of `num_swap_blocks` are in it. Half of it is
            for states of recurrent layers, if there are any. Hashes are then those of "sha256".
        cache_folder: folder where the blocks that go to host memory are written, too, and found again by other
            processes and after a restart. A cache without a model does not know its weights: its namespaces must
            name them, or `set_fingerprint`. Without `host_cache_bytes`, 64 MiB of host memory are taken.
        cache_folder_bytes: most bytes of all files there; None for no limit.
        tables: the groups with a block table each, derived from `groups`; groups without a window come first.

    Raises:
        InvalidInputError: a size is not a positive integer of 31 bits, the watermarks are not 0 <= high <= low <= 1,
            enable_prefix_cache is not a bool, or the hash is unknown; or groups are not CacheGroups, share a layer,
            contain one beyond num_layers, or are given together with sliding_window; or recurrent is not a
            RecurrentSpec of layers below num_layers; or a number of bytes is negative;
            or cache_folder is not a path that can be a folder.
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
    groups: Sequence[CacheGroup] | None = None
    recurrent: RecurrentSpec | None = None
    host_cache_bytes: int = 0
    cache_folder: str | os.PathLike[str] | None = None
    cache_folder_bytes: int | None = None
    tables: tuple[CacheGroup, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size", "num_blocks"):
            self._set(name, as_int(name, getattr(self, name), low=1, high=_MAX_SIZE))
        self._set("num_swap_blocks", as_int("num_swap_blocks", self.num_swap_blocks, high=_MAX_SIZE))
        self._set("host_cache_bytes", as_int("host_cache_bytes", self.host_cache_bytes))
        if self.cache_folder is not None:
            self._set("cache_folder", as_folder("cache_folder", self.cache_folder))
        if self.cache_folder_bytes is not None:
            self._set("cache_folder_bytes", as_int("cache_folder_bytes", self.cache_folder_bytes))
            if self.cache_folder is None:
                raise InvalidInputError(f"cache_folder_bytes: {self.cache_folder_bytes}, but there is no cache_folder")
        for name in ("max_seq_len", "sliding_window"):
            if getattr(self, name) is not None:
                self._set(name, as_int(name, getattr(self, name), low=1))
        for name in ("low_watermark", "high_watermark"):
            self._set(name, as_float(name, getattr(self, name), 0.0, 1.0))
        if self.high_watermark > self.low_watermark:
            raise InvalidInputError(
                f"high_watermark, low_watermark: {self.high_watermark}, {self.low_watermark}, "
                "expected 0 <= high_watermark <= low_watermark <= 1"
            )
        self._set("enable_prefix_cache", as_bool("enable_prefix_cache", self.enable_prefix_cache))
        if not isinstance(self.prefix_hash, str) or self.prefix_hash not in ("fast", "sha256"):
            raise InvalidInputError(f"prefix_hash: {shown(self.prefix_hash)}, expected 'fast' or 'sha256'")
        recurrent = self.recurrent
        if recurrent is not None and not (
            isinstance(recurrent, RecurrentSpec) and max(recurrent.layers) < self.num_layers
        ):
            expected = f"a RecurrentSpec of layers below {self.num_layers}"
            raise InvalidInputError(f"recurrent: {shown(recurrent)}, expected {expected}")
        groups = [group.with_defaults(self.num_kv_heads, self.head_dim) for group in self._checked_groups()]
        self._set("tables", split_evenly(groups))

    def _checked_groups(self) -> Sequence[CacheGroup]:
        if self.groups is None:
            return [CacheGroup(tuple(range(self.num_layers)), sliding_window=self.sliding_window)]
        if not isinstance(self.groups, list | tuple) or not all(isinstance(group, CacheGroup) for group in self.groups):
            raise InvalidInputError(f"groups: {shown(self.groups)}, expected CacheGroups")
        self._set("groups", tuple(self.groups))
        layers: list[int] = []
        for group in self.groups:
            layers += group.layers
        if not layers or len(set(layers)) != len(layers) or max(layers) >= self.num_layers:
            raise InvalidInputError(
                f"groups: layers {shown(layers)}, expected one or more distinct layers below {self.num_layers}"
            )
        if self.sliding_window is not None:
            raise InvalidInputError(f"sliding_window: {self.sliding_window}, expected None beside groups")
        return self.groups

    def _set(self, name: str, value: Any) -> None:
        """Store a converted field of the frozen configuration."""
        object.__setattr__(self, name, value)

    @property
    def has_tier(self) -> bool:
        """Whether evicted blocks go to host memory."""
        return self.enable_prefix_cache and (self.host_cache_bytes > 0 or self.cache_folder is not None)

    @property
    def host_state_bytes(self) -> int:
        """The part of `host_cache_bytes` that is for states of recurrent layers."""
        if not self.has_tier or self.recurrent is None:
            return 0
        return (self.host_cache_bytes or _FOLDER_HOST_BYTES) // 2

    def num_host_blocks(self, dtype: torch.dtype) -> int:
        """Return the number of host blocks of a cache of `dtype`, those for swapped sequences included.

        Raises:
            InvalidInputError: `host_cache_bytes` holds no block, or fewer than `num_swap_blocks`.
        """
        if not self.has_tier:
            return self.num_swap_blocks
        block_bytes, num_least = self.block_bytes(dtype), max(1, self.num_swap_blocks)
        num_bytes = self.host_cache_bytes - self.host_state_bytes
        if not self.host_cache_bytes:
            num_bytes = max(_FOLDER_HOST_BYTES, num_least * block_bytes)
        if num_bytes < num_least * block_bytes:
            expected = f"0 or at least {num_least * block_bytes}, {num_least} blocks of {block_bytes}"
            raise InvalidInputError(f"host_cache_bytes: {num_bytes}, expected {expected}")
        return min(num_bytes // block_bytes, _MAX_SIZE)

    @property
    def num_whole(self) -> int:
        """Number of tables that get blocks when capacity is reserved: those without a window, at least the first."""
        # Other tables get a block when it is written: a long prompt frees blocks chunk by chunk.
        return max(1, [table.sliding_window for table in self.tables].count(None))

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that hold `num_tokens` in all tables."""
        return -(-num_tokens // self.block_size) * len(self.tables)

    def blocks_to_begin(self, num_tokens: int) -> int:
        """Return the number of blocks that `allocate` takes for `num_tokens`."""
        return -(-num_tokens // self.block_size) * self.num_whole

    def blocks_to_grow(self, num_tokens: int, capacity: int, target: int) -> int:
        """Return the most blocks that a sequence lacks on its way to `target` tokens, which are written one by one."""
        missing = max(0, -(-target // self.block_size) - capacity // self.block_size) * self.num_whole
        for table in self.tables[self.num_whole :]:
            now = table.blocks_kept(num_tokens, self.block_size)
            missing += max(0, table.most_blocks_kept(target, self.block_size) - now)
        return missing

    def longest_with(self, chunks: Iterable[tuple[int, int]]) -> int:
        """Return the length of the longest sequence that runs in an empty pool.

        It has capacity for all of its tokens in the tables of `num_whole` from the start. In others it takes blocks as
        it writes and frees them behind the window.

        chunks: (start, end) of tokens that must be written in one step; others are written one by one if need be.
        """
        size, windowed = self.block_size, self.tables[self.num_whole :]
        least = 0
        for start, end in chunks:
            written = sum(table.blocks_kept(start, size, num_new=end - start) for table in windowed)
            least = max(least, written - self.tables[0].blocks_gone(start, size))

        def needed(num_blocks: int) -> int:
            one_by_one = sum(table.most_blocks_kept(num_blocks * size, size) for table in windowed)
            return num_blocks * self.num_whole + max(one_by_one, least)

        return self._longest(needed)

    def _longest(self, needed: Callable[[int], int]) -> int:
        """Return the length of the longest sequence in the pool. needed: blocks of all tables by the first's number."""
        counts = range(1, self.num_blocks // self.num_whole + 1)
        return bisect_right(counts, self.num_blocks, key=needed) * self.block_size

    @property
    def capacity_tokens(self) -> int:
        """Length of the longest sequence that fits into the pool; it may be longer if every table has a window."""
        return self.longest_with(())

    @property
    def longest_sequence(self) -> int | None:
        """Length that no sequence exceeds, or None if every table has a window.

        It is more than `capacity_tokens`: a cached prefix has only those blocks of a window that the next token sees.
        """
        if self.tables[0].sliding_window is not None:
            return None

        def needed(num_blocks: int) -> int:
            total = num_blocks * self.num_whole
            for table in self.tables[self.num_whole :]:
                num_seen = -(-(table.sliding_window or 0) // self.block_size)
                total += min(num_blocks, num_seen)
            return total

        return self._longest(needed)

    @property
    def slots(self) -> tuple[int, int]:
        """Number of slots in a block, and elements of a token in each.

        A slot holds the keys or the values of one layer, or its latents, or those of several small layers.
        """
        size = max(max(table.sizes) for table in self.tables)
        return max(table.num_slots(size, len(table.layers)) for table in self.tables), size

    @property
    def rows_per_slot(self) -> int:
        """Largest number of rows of a token in a slot, over all layers; a row is one head's key or value."""
        _, size = self.slots
        num_rows = 0
        for table in self.tables:
            assert table.num_kv_heads is not None
            num_rows = max(num_rows, size // min(table.sizes) * table.num_kv_heads)
        return num_rows

    def block_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of a block in a cache of `dtype`, scales included."""
        num_slots, size = self.slots
        scales = 0 if dtype.is_floating_point else self.rows_per_slot * SCALE_BYTES
        return num_slots * self.block_size * (size * dtype.itemsize + scales)

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of a token in a cache of `dtype`, over all layers and tables."""
        return -(-self.block_bytes(dtype) * len(self.tables) // self.block_size)


@dataclass(frozen=True)
class KvCacheHandleStats:
    """Counts of one sequence at one moment.

    Attributes:
        num_blocks: entries of `KvCacheHandle.blocks`, zeros included.
        shared_blocks: blocks that another sequence holds too.
        swapped_blocks: blocks in host memory.
    """

    num_blocks: int
    shared_blocks: int
    num_tokens: int
    capacity: int
    swapped_blocks: int


class KvCacheHandle:
    """One sequence in the cache. Read-only: only the manager that made it changes it."""

    __slots__ = ("__weakref__", "_block_size", "_num_tables", "_pool", "_state")

    def __init__(self, state: SequenceState, pool: BlockPool, config: PagedKvCacheConfig) -> None:
        self._state = state
        self._pool = pool
        self._block_size, self._num_tables = config.block_size, len(config.tables)

    @property
    def cache_id(self) -> SeqId:
        """Key that executors use; equals `request_id`."""
        return self._state.request_id

    @property
    def request_id(self) -> SeqId:
        """Request id of the sequence."""
        return self._state.request_id

    @property
    def num_tokens(self) -> int:
        """Number of positions that hold valid K/V."""
        return self._state.num_tokens

    @property
    def capacity(self) -> int:
        """Number of positions that the blocks can hold."""
        return len(self._state.blocks) // self._num_tables * self._block_size

    @property
    def num_cached_tokens(self) -> int:
        """Number of leading tokens whose K/V came from the prefix cache or from `share_prefix_blocks`."""
        return self._state.num_cached_tokens

    @property
    def num_loaded_tokens(self) -> int:
        """Number of those tokens whose K/V came from host memory or from files."""
        return min(self._state.num_loaded_tokens, self._state.num_cached_tokens)

    @property
    def num_known_tokens(self) -> int:
        """Number of leading positions whose token ids the cache knows."""
        return len(self._state.chain.ids)

    @property
    def blocks(self) -> tuple[int, ...]:
        """Block ids by position: the first block of every table, then the second of every table, and so on.

        An id is 0 if the block is swapped out, behind the sliding window, or not allocated before it is written.
        """
        return self._state.blocks

    @property
    def namespace(self) -> Hashable:
        """Namespace of the sequence; prefixes are shared only within one namespace."""
        return self._state.namespace

    @property
    def is_valid(self) -> bool:
        """Whether the sequence is live; False once it has been freed."""
        return self._state.is_valid

    @property
    def is_swapped(self) -> bool:
        """Whether K/V lie in host memory. The sequence cannot run until `swap_in`."""
        return self._state.host_blocks is not None

    def stats(self) -> KvCacheHandleStats:
        """Count the sequence's tokens and blocks."""
        blocks = self.blocks
        return KvCacheHandleStats(
            num_blocks=len(blocks),
            shared_blocks=len(self._pool.shared & set(blocks)),
            num_tokens=self.num_tokens,
            capacity=self.capacity,
            swapped_blocks=len(self._state.host_blocks or ()),
        )

    def __repr__(self) -> str:
        freed = "" if self.is_valid else ", freed"
        return f"KvCacheHandle({self.request_id!r}, num_tokens={self.num_tokens}, capacity={self.capacity}{freed})"
