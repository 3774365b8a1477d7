"""vLLM's KVCacheManager in the cases of the cache benchmark, by functions of the same names as ours.

The import needs vLLM's Python files, and no GPU.

The peer allocates blocks and publishes full ones in one call, `allocate_slots`. It hashes a request's blocks when the
request is made.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from time import perf_counter

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from paged.bench.cache.cases import BLOCK_SIZE, DECODE_STEPS, NUM_BLOCKS, check_hit, decode_lengths, prompts

init_none_hash(sha256)
_HASHER = get_request_block_hasher(BLOCK_SIZE, sha256)
_IDS = itertools.count()


def _manager(num_blocks: int = NUM_BLOCKS, *, prefix_cache: bool = True) -> KVCacheManager:
    """Return a manager with one more block than `num_blocks`, because the first is never handed out."""
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float16)
    group = KVCacheGroupSpec(["layer"], spec)
    config = KVCacheConfig(num_blocks=num_blocks + 1, kv_cache_tensors=[], kv_cache_groups=[group])
    return KVCacheManager(
        config,
        max_model_len=65_536,
        scheduler_block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        enable_caching=prefix_cache,
    )


def _request(tokens: list[int]) -> Request:
    return Request(
        request_id=str(next(_IDS)),
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=DECODE_STEPS),
        pooling_params=None,
        block_hasher=_HASHER,
    )


def _allocate(cache: KVCacheManager, request: Request, num_tokens: int) -> None:
    if cache.allocate_slots(request, num_tokens) is None:
        raise RuntimeError("the peer found no room: its pool is too small")


def allocate_free(num_tokens: int, *, prefix_cache: bool) -> Iterator[float]:
    """Allocate and free. The request and its hashes exist before; with the prefix cache its blocks are published."""
    cache, fresh = _manager(prefix_cache=prefix_cache), prompts(num_tokens)
    request = _request(next(fresh))
    while True:
        if prefix_cache:
            request = _request(next(fresh))
        start = perf_counter()
        _allocate(cache, request, num_tokens)
        cache.free(request)
        yield perf_counter() - start


def publish_free(num_tokens: int) -> Iterator[float]:
    """From token ids: hash, look up, allocate and publish, free."""
    cache = _manager()
    for tokens in prompts(num_tokens):
        start = perf_counter()
        request = _request(tokens)
        cache.get_computed_blocks(request)
        _allocate(cache, request, num_tokens)
        cache.free(request)
        yield perf_counter() - start


def decode_step() -> Iterator[float]:
    """Call `allocate_slots` once a sequence. The blocks that fill up are hashed before, and published."""
    while True:
        cache = _manager()
        requests = []
        for length, tokens in zip(decode_lengths(), prompts(max(decode_lengths())), strict=False):
            request = _request(tokens[:length])
            _allocate(cache, request, length)
            request.num_computed_tokens = length
            requests.append(request)
        for step in range(DECODE_STEPS):
            for request in requests:
                request.append_output_token_ids(step)
            start = perf_counter()
            for request in requests:
                _allocate(cache, request, 1)
            yield perf_counter() - start
            for request in requests:
                request.num_computed_tokens += 1


def prefix_match(num_tokens: int, *, cached: bool) -> Iterator[float]:
    """Hash a prompt's blocks and look them up. The call takes no references and allocates nothing."""
    cache, fresh = _manager(), prompts(num_tokens)
    known = next(fresh)
    first = _request(known)
    _allocate(cache, first, num_tokens)
    cache.free(first)
    while True:
        tokens = known
        if not cached:
            tokens = next(fresh)
        start = perf_counter()
        _, hit, _ = cache.get_computed_blocks(_request(tokens))
        seconds = perf_counter() - start
        check_hit(hit, num_tokens, cached=cached)
        yield seconds


def evict(num_tokens: int, num_blocks: int) -> Iterator[float]:
    """Allocate blocks that are all evicted. The request and its hashes exist before; its blocks are published."""
    cache, fresh = _manager(num_blocks), prompts(num_tokens)
    for tokens in itertools.islice(fresh, num_blocks * BLOCK_SIZE // num_tokens):
        request = _request(tokens)
        _allocate(cache, request, num_tokens)
        cache.free(request)
    for tokens in fresh:
        request = _request(tokens)
        start = perf_counter()
        _allocate(cache, request, num_tokens)
        yield perf_counter() - start
        cache.free(request)
