"""Configuration of a KV cache, and handles of its sequences."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from paged.cache.groups import CacheGroup, RecurrentSpec, split_evenly
from paged.cache.pool import BlockPool
from paged.cache.slot_reservation import SequenceState
from paged.errors import InvalidInputError
from paged.folder_path import as_folder
from paged.kernels.core.errors import as_bool, as_float, as_int, shown
from paged.seq_id import SeqId

if TYPE_CHECKING:
    import torch

    from paged.kernels.core.dtypes import KvKind


# Bytes of host memory through which files are read if `host_cache_bytes` is 0.
_FOLDER_HOST_BYTES = 64 << 20
# Limit of every size, because kernels read block ids as int32.
_MAX_SIZE = (1 << 31) - 2


class CacheRows(NamedTuple):
    """Keys or values of some layers of a table, in one dtype.

    size: numbers that a layer takes per token. row_size: those of the token's heads, without entries of pools.
    """

    layers: tuple[int, ...]
    num_heads: int
    size: int
    row_size: int
    dtype: torch.dtype


class StorageShape(NamedTuple):
    """The planes of a dtype. A plane holds keys, values or latents of one layer, or of several small layers.

    size: numbers of a token in a plane. num_rows, num_scales: most rows and scales of a token in a plane. A row is one
    head's key or value.
    """

    kind: KvKind
    num_planes: int
    size: int
    num_rows: int
    num_scales: int


@dataclass(frozen=True)
class PagedKvCacheConfig:
    """Shape and policy of a KV cache.

    Attributes:
        num_kv_heads, head_dim: defaults for groups that set none.
        block_size: positions in a block, 16 by default. A loaded model passes its GPU's `default_block_size`, 64 or 16.
        num_blocks: blocks that can be handed out. Storage has one more, block 0.
        num_swap_blocks: blocks of host memory for `swap_out`.
        dtype: dtype of K and V; None for PyTorch's default when the cache is made. The kernels support float32,
            float16, bfloat16 and the dtypes of `KV_KINDS`, of which some have scales for each token and head,
            separately for keys and values.
        v_dtype: dtype of V; None for `dtype`. Not for latents, nor beside entries of pools.
        rotation: name of a rotation that heads pass before they are written; caches with other names share no files.
        kept_layers: layers whose K and V have `kept_dtype` instead, with the same limits.
        device: None for CUDA if there is one, else the CPU, as models do.
        enable_prefix_cache: whether full blocks are published and shared.
        low_watermark, high_watermark: pressure is HIGH if less than the fraction `low_watermark` of the pool can be
            handed out, and CRITICAL if less than `high_watermark` can.
        max_seq_len: length of the longest sequence in tokens; None for the pool's capacity.
        sliding_window: number of tokens that a token sees, itself included, if it is the same in all layers. Blocks
            that no later token can see are freed. None keeps all blocks.
        prefix_hash: "fast", a polynomial modulo 2^64, or "sha256". Token ids are compared on every hit in both cases.
        groups: groups of layers, if shapes or windows differ; None for a single group. A layer in no group has no K/V
            of its own. Empty if no layer has K/V; then `recurrent` is not None, and a block takes no memory.
        recurrent: shape and number of the states of recurrent layers; None without such layers.
        host_cache_bytes: size of the host tier, 0 for none. The tier keeps published blocks that the device evicts, and
            prompts that begin with them load them back. It includes the `num_swap_blocks`; if there are recurrent
            layers, half of it is for their states, or all of it if no layer has K/V. Prefix hashes are then always
            "sha256".
        cache_folder: folder where blocks of the host tier are also written, so that other processes find them, also
            after a restart. A cache without a model does not know its weights: name them in the namespaces or by
            `set_fingerprint`. Without `host_cache_bytes`, the cache takes 64 MiB of host memory.
        cache_folder_bytes: limit for the bytes of all files in `cache_folder`; None for no limit.
        max_pinned_fraction: share of the pool that `pin` may keep, below 1. Sequences are limited to the rest, so that
            pins never starve them. 0 allows no pins.
        tables: one CacheGroup for each block table, derived from `groups`; groups without a window come first.
        own_groups: those of `groups` with memory of their own.
        has_canaries: whether the cache checks what it holds before every forward, by PAGED_CANARY=1.

    Raises:
        InvalidInputError: PAGED_CANARY is neither 1 nor 0; a size is not a positive integer of 31 bits, the watermarks
            are not 0 <= high <= low <= 1, enable_prefix_cache is not a bool, or the hash is unknown; or groups are not
            CacheGroups, share a layer, contain one beyond num_layers, cannot have blocks of this size, or are given
            together with sliding_window; or recurrent is not a RecurrentSpec of layers below num_layers; or a number of
            bytes is negative; or cache_folder is not a path that can be a folder.
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
    max_pinned_fraction: float = 0.0
    v_dtype: torch.dtype | None = None
    kept_layers: Sequence[int] = ()
    kept_dtype: torch.dtype | None = None
    rotation: str | None = None
    tables: tuple[CacheGroup, ...] = field(init=False, repr=False, compare=False)
    own_groups: tuple[CacheGroup, ...] = field(init=False, repr=False, compare=False)
    has_canaries: bool = field(init=False, repr=False, compare=False)

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
        for name in ("low_watermark", "high_watermark", "max_pinned_fraction"):
            self._set(name, as_float(name, getattr(self, name), 0.0, 1.0))
        if self.high_watermark > self.low_watermark:
            raise InvalidInputError(
                f"high_watermark, low_watermark: {self.high_watermark}, {self.low_watermark}, "
                "expected 0 <= high_watermark <= low_watermark <= 1"
            )
        if self.num_pinned_blocks >= self.num_blocks:
            raise InvalidInputError(f"max_pinned_fraction: {self.max_pinned_fraction}, expected below 1")
        self._set("enable_prefix_cache", as_bool("enable_prefix_cache", self.enable_prefix_cache))
        if not isinstance(self.prefix_hash, str) or self.prefix_hash not in ("fast", "sha256"):
            raise InvalidInputError(f"prefix_hash: {shown(self.prefix_hash)}, expected 'fast' or 'sha256'")
        recurrent = self.recurrent
        if recurrent is not None and not (
            isinstance(recurrent, RecurrentSpec) and max(recurrent.all_layers) < self.num_layers
        ):
            expected = f"a RecurrentSpec of layers below {self.num_layers}"
            raise InvalidInputError(f"recurrent: {shown(recurrent)}, expected {expected}")
        groups = [group.with_defaults(self.num_kv_heads, self.head_dim) for group in self._checked_groups()]
        for group in groups:
            group.check_block_size(self.block_size)
        in_pool = [group for group in groups if not group.has_own_memory]
        if not in_pool and recurrent is None:
            raise InvalidInputError(f"groups: {shown(groups)}, expected one with blocks of the pool")
        self._set("tables", split_evenly(in_pool))
        self._check_formats()
        self._set("own_groups", tuple(group for group in groups if group.has_own_memory))
        num_slots_of_step = [group.keeps_slots for group in self.own_groups].count(False) + (recurrent is not None)
        if num_slots_of_step > 1:
            raise InvalidInputError("groups: slots of open pools twice or beside recurrent layers, expected them once")
        canaries = os.environ.get("PAGED_CANARY", "")
        if canaries not in ("", "0", "1"):
            raise InvalidInputError(f"PAGED_CANARY={canaries!r}: expected '1' or '0'")
        self._set("has_canaries", canaries == "1")

    def _check_formats(self) -> None:
        """Raise InvalidInputError unless layers can have caches of several dtypes, if any are given."""
        kept = tuple(as_int("kept_layers", layer, high=self.num_layers - 1) for layer in self.kept_layers)
        self._set("kept_layers", kept)
        if bool(kept) != (self.kept_dtype is not None):
            raise InvalidInputError(f"kept_layers, kept_dtype: {kept}, {self.kept_dtype}, expected both or neither")
        if self.v_dtype is None and not kept:
            return
        for table in self.tables:
            if table.sizes != table.row_sizes or table.latent:
                raise InvalidInputError(
                    f"v_dtype, kept_layers: {self.v_dtype}, {kept}, expected none with latents or pooled keys"
                )

    def _checked_groups(self) -> Sequence[CacheGroup]:
        if self.groups is None:
            return [CacheGroup(tuple(range(self.num_layers)), sliding_window=self.sliding_window)]
        if not isinstance(self.groups, list | tuple) or not all(isinstance(group, CacheGroup) for group in self.groups):
            raise InvalidInputError(f"groups: {shown(self.groups)}, expected CacheGroups")
        self._set("groups", tuple(self.groups))
        layers: list[int] = []
        for group in self.groups:
            layers += group.layers
        least = int(self.recurrent is None)
        if len(layers) < least or len(set(layers)) != len(layers) or max(layers, default=0) >= self.num_layers:
            raise InvalidInputError(
                f"groups: layers {shown(layers)}, expected one or more distinct layers below {self.num_layers}"
            )
        if self.sliding_window is not None:
            raise InvalidInputError(f"sliding_window: {self.sliding_window}, expected None beside groups")
        return self.groups

    def _set(self, name: str, value: Any) -> None:
        """Set a converted field of this frozen dataclass."""
        object.__setattr__(self, name, value)

    @property
    def has_kv(self) -> bool:
        """Whether blocks of the pool hold K/V. Without K/V they only count positions and name cached prefixes."""
        return bool(self.tables[0].layers)

    @property
    def has_tier(self) -> bool:
        """Whether evicted blocks are kept in host memory."""
        return self.enable_prefix_cache and (self.host_cache_bytes > 0 or self.cache_folder is not None)

    @property
    def host_state_bytes(self) -> int:
        """Bytes of `host_cache_bytes` for each kind with memory of its own, such as recurrent states.

        All such kinds together have half, or everything if no block holds K/V.
        """
        num_own = self._num_own
        if not self.has_tier or not num_own:
            return 0
        num_bytes = self.host_cache_bytes or _FOLDER_HOST_BYTES
        if self.has_kv:
            num_bytes //= 2
        return num_bytes // num_own

    @property
    def _num_own(self) -> int:
        return [group.keeps_slots for group in self.own_groups].count(True) + (self.recurrent is not None)

    @property
    def has_slots(self) -> bool:
        """Whether the metadata of a step has slots, see `AttentionMetadata.recurrent`."""
        return self.num_slots is not None

    @property
    def num_slots(self) -> int | None:
        """Slots for states or rows of open pools, of which a sequence may take two in a step; None without them."""
        if self.recurrent is not None:
            return self.recurrent.num_slots
        for group in self.own_groups:
            if not group.keeps_slots:
                num_slots, _ = group.sequence_slots
                return num_slots
        return None

    def num_host_blocks(self, dtype: torch.dtype) -> int:
        """Return the number of host blocks of a cache of `dtype`, including the blocks for swapped sequences.

        Raises:
            InvalidInputError: `host_cache_bytes` holds no block, or fewer than `num_swap_blocks`.
        """
        if not self.has_tier:
            return self.num_swap_blocks
        if not self.has_kv:  # as many as on the device, because they take no memory
            return max(self.num_blocks, self.num_swap_blocks)
        block_bytes, num_least = self.block_bytes(dtype), max(1, self.num_swap_blocks)
        num_bytes = self.host_cache_bytes - self.host_state_bytes * self._num_own
        if not self.host_cache_bytes:
            num_bytes = max(_FOLDER_HOST_BYTES, num_least * block_bytes)
        if num_bytes < num_least * block_bytes:
            expected = f"0 or at least {num_least * block_bytes}, {num_least} blocks of {block_bytes}"
            raise InvalidInputError(f"host_cache_bytes: {num_bytes}, expected {expected}")
        return min(num_bytes // block_bytes, _MAX_SIZE)

    @property
    def num_whole(self) -> int:
        """Number of tables, counted from the first, with a block at every position: all that see every token.

        They get their blocks when capacity is reserved. The others get each block when it is written, because a long
        prompt frees blocks chunk by chunk, and published positions may lack their blocks. The first table is always
        whole.
        """
        return max(1, [table.most_seen for table in self.tables].count(None))

    @property
    def num_pinned_blocks(self) -> int:
        """Most blocks that pins may keep."""
        return int(self.num_blocks * self.max_pinned_fraction)

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that hold `num_tokens` in all tables."""
        return -(-num_tokens // self.block_size) * len(self.tables)

    def blocks_to_begin(self, num_tokens: int) -> int:
        """Return the number of blocks that `allocate` takes for `num_tokens`."""
        return -(-num_tokens // self.block_size) * self.num_whole

    def blocks_to_grow(self, num_tokens: int, capacity: int, target: int) -> int:
        """Return the most blocks that a sequence still needs to grow to `target` tokens, one token at a time."""
        missing = max(0, -(-target // self.block_size) - capacity // self.block_size) * self.num_whole
        for table in self.tables[self.num_whole :]:
            now = table.blocks_kept(num_tokens, self.block_size)
            missing += max(0, table.most_blocks_kept(target, self.block_size) - now)
        return missing

    def longest_with(self, chunks: Iterable[tuple[int, int]]) -> int:
        """Return the length of the longest sequence that runs in an empty pool.

        In the first `num_whole` tables it has capacity for all its tokens from the start. In the other tables it takes
        blocks as it writes, and frees them behind the window.

        chunks: (start, end) of tokens that must be written in one step; all others may be written one by one.
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
        """Return the longest length in the part of the pool that pins cannot take.

        needed: blocks of all tables for a number of blocks of the first.
        """
        num_blocks = self.num_blocks - self.num_pinned_blocks
        counts = range(1, num_blocks // self.num_whole + 1)
        return bisect_right(counts, num_blocks, key=needed) * self.block_size

    @property
    def capacity_tokens(self) -> int:
        """Length of the longest sequence that fits into the pool; it may be longer if every table has a window."""
        return self.longest_with(())

    @property
    def longest_sequence(self) -> int | None:
        """Upper bound for the length of a sequence, or None if every table has a window.

        It exceeds `capacity_tokens`, because a cached prefix needs only the blocks of a window that the next token
        sees.
        """
        if self.tables[0].most_seen is not None:
            return None

        def needed(num_blocks: int) -> int:
            total = num_blocks * self.num_whole
            for table in self.tables[self.num_whole :]:
                num_seen = -(-(table.most_seen or 0) // self.block_size)
                total += min(num_blocks, num_seen)
            return total

        return self._longest(needed)

    def rows_of(self, table: CacheGroup, dtype: torch.dtype) -> list[CacheRows]:
        """Return the rows of a table's layers in a cache of `dtype`: keys and values, each once for every dtype."""
        kept = tuple(layer for layer in table.layers if layer in self.kept_layers)
        not_kept = tuple(layer for layer in table.layers if layer not in self.kept_layers)
        rows: list[CacheRows] = []
        heads = table.num_kv_heads
        assert heads is not None
        for layers, k_dtype, v_dtype in (
            (not_kept, dtype, self.v_dtype or dtype),
            (kept, self.kept_dtype or dtype, self.kept_dtype or dtype),
        ):
            if not layers:
                continue
            for size, row_size, row_dtype in zip(table.sizes, table.row_sizes, (k_dtype, v_dtype), strict=False):
                rows.append(CacheRows(layers, heads, size, row_size, row_dtype))
        return rows

    def storage_shapes(self, dtype: torch.dtype) -> list[StorageShape]:
        """Return the shape of each dtype's storage in a cache of `dtype`, that of `dtype` first.

        Without K/V, a block has one plane without elements.
        """
        from paged.kernels.core.dtypes import kv_kind  # PyTorch takes seconds to import

        rows_of_tables = [self.rows_of(table, dtype) for table in self.tables]
        rows_of_dtype: dict[torch.dtype, list[CacheRows]] = {dtype: []}
        for rows in chain.from_iterable(rows_of_tables):
            rows_of_dtype.setdefault(rows.dtype, []).append(rows)
        shapes: list[StorageShape] = []
        for row_dtype, all_rows in rows_of_dtype.items():
            if not all_rows and self.has_kv:
                continue
            kind = kv_kind(row_dtype)
            size = max((rows.size for rows in all_rows), default=0)
            num_planes, num_rows, num_scales = 1, 0, 0
            for rows_of_table in rows_of_tables:
                planes = 0
                for rows in rows_of_table:
                    if rows.dtype == row_dtype:
                        together = size // rows.size
                        planes += -(-len(rows.layers) // together)
                        num_rows = max(num_rows, together * rows.num_heads)
                        num_scales = max(
                            num_scales, together * rows.num_heads * kind.num_scales(rows.row_size // rows.num_heads)
                        )
                num_planes = max(num_planes, planes)
            shapes.append(StorageShape(kind, num_planes, size, num_rows, num_scales))
        return shapes

    def block_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of a block in a cache of `dtype`, scales and canaries included."""
        num_bytes = 8 * self.has_canaries
        for shape in self.storage_shapes(dtype):
            kind = shape.kind
            row_bytes = kind.num_elements(shape.size) * kind.dtype.itemsize
            num_bytes += shape.num_planes * (row_bytes + shape.num_scales * kind.scale_dtype.itemsize)
        return self.block_size * num_bytes

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of a token in a cache of `dtype`, over all layers and tables.

        If no layer keeps rows of all tokens, but entries of pools, these are the bytes of entries.
        """
        num_tables = len(self.tables)
        if self.num_whole and not any(sum(table.row_sizes) for table in self.tables[: self.num_whole]):
            num_tables = self.num_whole
        return -(-self.block_bytes(dtype) * num_tables // self.block_size)

    def growth_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes by which a token makes a long sequence grow: those of layers without a window."""
        return -(-self.block_bytes(dtype) * self.num_whole // self.block_size)

    def sequence_bytes(self, dtype: torch.dtype) -> int:
        """Return the most bytes of a long sequence besides growth: blocks of windows, and a slot of open rows."""
        num_blocks = 0
        for table in self.tables[self.num_whole :]:
            num_blocks += table.most_blocks_kept(_MAX_SIZE, self.block_size)
        num_bytes = num_blocks * self.block_bytes(dtype)
        for group in self.own_groups:
            _, slot_bytes = group.sequence_slots
            num_bytes += slot_bytes
        return num_bytes


@dataclass(frozen=True)
class KvCacheHandleStats:
    """Counts of one sequence at one moment.

    Attributes:
        num_blocks: entries of `KvCacheHandle.blocks`, zeros included.
        shared_blocks: blocks that another sequence also holds.
        swapped_blocks: blocks in host memory.
    """

    num_blocks: int
    shared_blocks: int
    num_tokens: int
    capacity: int
    swapped_blocks: int


class KvCacheHandle:
    """One sequence in the cache. Read-only; only its manager changes it."""

    __slots__ = ("__weakref__", "_block_size", "_num_tables", "_pool", "_state")

    def __init__(self, state: SequenceState, pool: BlockPool, config: PagedKvCacheConfig) -> None:
        self._state = state
        self._pool = pool
        self._block_size, self._num_tables = config.block_size, len(config.tables)

    @property
    def cache_id(self) -> SeqId:
        """Id of the sequence."""
        return self._state.seq_id

    @property
    def request_id(self) -> SeqId:
        """Id of the sequence."""
        return self._state.seq_id

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
        """Number of cached tokens whose K/V came from host memory or from files."""
        return min(self._state.num_loaded_tokens, self._state.num_cached_tokens)

    @property
    def num_known_tokens(self) -> int:
        """Number of leading positions whose token ids the cache knows."""
        return len(self._state.chain.ids)

    @property
    def blocks(self) -> tuple[int, ...]:
        """Block ids: the first block of every table, then the second block of every table, and so on.

        An id is 0 if the block is swapped out, lies behind the sliding window, or is not allocated yet.
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
        """Whether the K/V are in host memory. The sequence cannot run before `swap_in`."""
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
        return f"KvCacheHandle({self.cache_id!r}, num_tokens={self.num_tokens}, capacity={self.capacity}{freed})"
