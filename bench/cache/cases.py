"""Cases of the cache benchmark: the calls of the manager in each case."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from paged import KvSlotRequest, PagedKvCacheConfig, PagedKvCacheManager
from paged.bench.check import WrongResultError

BLOCK_SIZE = 16
# Number of blocks, so many that only the eviction case evicts: 300 samples of 2,048 tokens take 38,400 blocks.
NUM_BLOCKS = 40_000
# Number of decode steps before new sequences start.
DECODE_STEPS = 256
_VOCAB_SIZE = 50_000
_NUM_TOKENS = 2048
_CHUNK = 64

Samples = Iterator[float]
"""Seconds of consecutive calls; preparation of a call is not counted."""


@dataclass(frozen=True)
class Case:
    """Samples of a function of this module and, with a peer, of the peer's function of the same name.

    goal_us: goal of a case without a peer.
    """

    name: str
    function: Callable[..., Samples]
    arguments: dict[str, Any] = field(default_factory=dict)
    has_peer: bool = True
    goal_us: float | None = None

    def ours(self) -> Samples:
        return self.function(**self.arguments)

    def theirs(self, peer: Any) -> Samples:
        """Return the peer's samples. peer: a module."""
        samples: Samples = getattr(peer, self.function.__name__)(**self.arguments)
        return samples


def prompts(num_tokens: int) -> Iterator[list[int]]:
    """Yield prompts of random token ids endlessly, the same prompts for every caller."""
    generator = random.Random(0)
    while True:
        yield generator.choices(range(_VOCAB_SIZE), k=num_tokens)


def decode_lengths() -> list[int]:
    """Return 256 lengths near 1,000. In every step, the same number of sequences needs a new block."""
    return [992 + index % BLOCK_SIZE for index in range(256)]


def check_hit(num_cached_tokens: int, num_tokens: int, *, cached: bool) -> None:
    """Raise WrongResultError unless all of the prompt except its last block or token was found, or none if not cached.

    The last token is always computed. Ours shares its block and copies it; the peer computes the whole block.
    """
    lowest = highest = 0
    if cached:
        lowest, highest = (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE, num_tokens - 1
    if not lowest <= num_cached_tokens <= highest:
        raise WrongResultError(
            f"{num_cached_tokens} tokens were found in the prefix cache, expected {lowest} to {highest}"
        )


def _manager(num_blocks: int = NUM_BLOCKS, *, prefix_cache: bool = True) -> PagedKvCacheManager:
    # One element per token keeps the cache of a million blocks at 64 MB.
    sizes = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1, "block_size": BLOCK_SIZE, "num_blocks": num_blocks}
    config = PagedKvCacheConfig(**sizes, dtype=torch.float16, device="cpu", enable_prefix_cache=prefix_cache)
    return PagedKvCacheManager(config)


def _publish_free(cache: PagedKvCacheManager, tokens: list[int]) -> None:
    handle = cache.allocate("prompt", token_ids=tokens)
    cache.advance(handle, len(tokens) - handle.num_cached_tokens)
    cache.commit(handle, tokens)
    cache.free(handle)


def allocate_free(num_tokens: int, *, prefix_cache: bool, num_blocks: int = NUM_BLOCKS) -> Samples:
    """Allocate a sequence, with a look-up if the prefix cache is on, and free it."""
    cache, fresh = _manager(num_blocks, prefix_cache=prefix_cache), prompts(num_tokens)
    tokens = None
    if prefix_cache:
        _publish_free(cache, next(fresh))  # with an empty index, a look-up would cost nothing
    while True:
        if prefix_cache:
            tokens = next(fresh)
        start = perf_counter()
        cache.free(cache.allocate("prompt", num_tokens, token_ids=tokens))
        yield perf_counter() - start


def publish_free(num_tokens: int) -> Samples:
    """Look up, allocate, publish, free."""
    cache = _manager()
    for tokens in prompts(num_tokens):
        start = perf_counter()
        _publish_free(cache, tokens)
        yield perf_counter() - start


def decode_step() -> Samples:
    """Reserve a token for every sequence and commit."""
    while True:
        cache, lengths = _decoding()
        for step in range(1, DECODE_STEPS + 1):
            start = perf_counter()
            requests = [KvSlotRequest(index, length + step) for index, length in enumerate(lengths)]
            cache.reserve(requests).commit()
            yield perf_counter() - start


def metadata(*, num_chunks: int) -> Samples:
    """Run `build_metadata` after `reserve`, for sequences that grow between calls; the last `num_chunks` are chunks."""
    while True:
        cache, lengths = _decoding()
        handles = cache.handles()
        new_tokens = [1] * (len(handles) - num_chunks) + [_CHUNK] * num_chunks
        items = list(zip(handles, new_tokens, strict=True))
        for _ in range(DECODE_STEPS):
            requests = [KvSlotRequest(handle.cache_id, handle.num_tokens + count) for handle, count in items]
            with cache.reserve(requests) as reservation:
                start = perf_counter()
                cache.build_metadata(items)
                seconds = perf_counter() - start
                reservation.commit()
            for index in range(len(handles) - num_chunks, len(handles)):
                cache.truncate(handles[index], lengths[index])
            yield seconds


def _decoding() -> tuple[PagedKvCacheManager, list[int]]:
    """Return a cache with `decode_lengths()` tokens in sequences 0 to 255."""
    cache, lengths = _manager(), decode_lengths()
    for index, length in enumerate(lengths):
        cache.allocate(index)
        cache.reserve([KvSlotRequest(index, length)]).commit()
    return cache, lengths


def prefix_match(num_tokens: int, *, cached: bool) -> Samples:
    """Allocate a prompt that is cached completely or not at all."""
    cache, fresh = _manager(), prompts(num_tokens)
    known = next(fresh)
    _publish_free(cache, known)
    while True:
        tokens = known
        if not cached:
            tokens = next(fresh)
        start = perf_counter()
        handle = cache.allocate("prompt", token_ids=tokens)
        seconds = perf_counter() - start
        check_hit(handle.num_cached_tokens, num_tokens, cached=cached)
        cache.free(handle)
        yield seconds


def evict(num_tokens: int, num_blocks: int) -> Samples:
    """Allocate in a pool full of published, freed blocks."""
    cache, fresh = _manager(num_blocks), prompts(num_tokens)
    for tokens in itertools.islice(fresh, num_blocks * BLOCK_SIZE // num_tokens):
        _publish_free(cache, tokens)
    for tokens in fresh:
        start = perf_counter()
        handle = cache.allocate("prompt", token_ids=tokens)
        seconds = perf_counter() - start
        cache.advance(handle, num_tokens)
        cache.commit(handle, tokens)
        cache.free(handle)
        yield seconds


_PROMPT = {"num_tokens": _NUM_TOKENS}
_CACHED = {**_PROMPT, "prefix_cache": True}
CASES = [
    Case("allocate_free.no_prefix_cache", allocate_free, {**_PROMPT, "prefix_cache": False}),
    Case("allocate_free.prefix_cache", allocate_free, _CACHED),
    Case("publish_free", publish_free, _PROMPT),
    Case("decode_step", decode_step),
    Case("prefix_match.4k_cached", prefix_match, {"num_tokens": 4 << 10, "cached": True}),
    Case("prefix_match.8k_cached", prefix_match, {"num_tokens": 8 << 10, "cached": True}),
    Case("prefix_match.16k_cached", prefix_match, {"num_tokens": 16 << 10, "cached": True}),
    Case("prefix_match.32k_cached", prefix_match, {"num_tokens": 32 << 10, "cached": True}),
    Case("prefix_match.32k_new", prefix_match, {"num_tokens": 32 << 10, "cached": False}),
    Case("evict", evict, {**_PROMPT, "num_blocks": 4096}),
    Case("metadata.decode", metadata, {"num_chunks": 0}, has_peer=False, goal_us=100.0),
    Case("metadata.mixed", metadata, {"num_chunks": 8}, has_peer=False),
    Case("pool.1k", allocate_free, {**_CACHED, "num_blocks": 1_000}, has_peer=False),
    Case("pool.10k", allocate_free, {**_CACHED, "num_blocks": 10_000}, has_peer=False),
    Case("pool.100k", allocate_free, {**_CACHED, "num_blocks": 100_000}, has_peer=False),
    Case("pool.1M", allocate_free, {**_CACHED, "num_blocks": 1_000_000}, has_peer=False),
]
