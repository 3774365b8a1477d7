"""What callers of the cache manager hold: its configuration, and handles of sequences."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paged.cache.blocks.pool import BlockPool
from paged.cache.slot_reservation import SequenceState
from paged.errors import InvalidInputError
from paged.kernels.common.scalars import as_bool, as_float, as_int, shown
from paged.seq_id import SeqId, given_namespace

if TYPE_CHECKING:
    import torch


# Ids of blocks are int32 where kernels read them.
_MAX_SIZE = (1 << 31) - 2


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
        InvalidInputError: a size is not a positive integer of 31 bits, the watermarks are not 0 <= high <= low <= 1,
            enable_prefix_cache is not a bool, or the hash is another.
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
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size", "num_blocks"):
            self._set(name, as_int(name, getattr(self, name), low=1, high=_MAX_SIZE))
        self._set("num_swap_blocks", as_int("num_swap_blocks", self.num_swap_blocks, high=_MAX_SIZE))
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

    def _set(self, name: str, value: Any) -> None:
        """A field as it was meant, while the configuration is made."""
        object.__setattr__(self, name, value)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that have room for `num_tokens`."""
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True)
class KvCacheHandleStats:
    """One sequence at one moment; shared_blocks are those that another sequence holds too."""

    num_blocks: int
    shared_blocks: int
    num_tokens: int
    capacity: int


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
        return given_namespace(self._state.namespace)

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
