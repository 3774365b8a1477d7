"""The bundled checkpoint on 32 prompts that begin alike: the same right answers with and without shared blocks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from tokenizers import Tokenizer

from paged import (
    GreedyArgmax,
    KvCacheHandle,
    LlmExecutor,
    PagedKvCacheManager,
    StaleHandleError,
    UnifiedBatch,
    UnifiedBatchItem,
)
from paged.executors.command_line.cli import RECALL
from paged.models.loading.end_tokens import read_eos_token_ids
from paged.models.recall.task import sample_pairs

TOKENIZER = Tokenizer.from_file(str(RECALL / "tokenizer.json"))
EOS = read_eos_token_ids(RECALL)
BLOCK = 16
NUM_PROMPTS = 32
# 25 blocks and 5 tokens: a full block less would leave a prompt to one token, which counts as a decode step.
PREFIX_TOKENS = 405


@dataclass
class Request:
    """A prompt by the key it asks for, its answer, and what has come so far."""

    name: str
    prompt: list[int]
    answer: str
    handle: KvCacheHandle | None = None
    token_ids: list[int] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return bool(self.token_ids) and self.token_ids[-1] in EOS


def make_requests() -> list[Request]:
    pairs = sample_pairs(random.Random("prefix reuse"), PREFIX_TOKENS)
    context = " ".join(" ".join(pair[:-1]) + pair[-1] for pair in pairs)
    requests = [
        Request(key, TOKENIZER.encode(f"{context} {key}").ids, " ".join(value))
        for key, *value, _ in pairs[:NUM_PROMPTS]
    ]
    assert {len(request.prompt) for request in requests} == {PREFIX_TOKENS + 1}
    return requests


def make_executor(*, share: bool) -> tuple[LlmExecutor, PagedKvCacheManager]:
    executor = LlmExecutor.from_pretrained(
        RECALL, num_blocks=1024, block_size=BLOCK, num_swap_blocks=512, enable_prefix_cache=share
    )
    assert executor.kv_manager is not None
    return executor, executor.kv_manager


def step(executor: LlmExecutor, manager: PagedKvCacheManager, requests: Sequence[Request]) -> None:
    """One forward: what is not cached of new prompts, and the next token of others."""
    items = []
    for request in requests:
        if request.handle is None:
            request.handle = manager.allocate(request.name, token_ids=request.prompt)
        position = request.handle.num_tokens
        new = request.token_ids[-1:] or request.prompt[position:]
        items.append(
            UnifiedBatchItem(
                request.handle.cache_id,
                new,
                kv_cache=request.handle,
                pos_offset=position,
                logits_policy=GreedyArgmax(),
            )
        )
    for request, token in zip(requests, executor.unified_decode(UnifiedBatch(items)), strict=True):
        assert token is not None
        request.token_ids.append(int(token))


def finish(executor: LlmExecutor, manager: PagedKvCacheManager, requests: Sequence[Request]) -> list[list[int]]:
    """Decode to the ends, and see that the answers are right."""
    for _ in range(8):
        running = [request for request in requests if not request.is_done]
        if running:
            step(executor, manager, running)
    texts = [TOKENIZER.decode(request.token_ids[:-1]).strip() for request in requests]
    assert texts == [request.answer for request in requests]
    assert all(request.is_done for request in requests)
    manager.check_integrity()
    return [request.token_ids for request in requests]


@pytest.fixture(scope="module")
def unshared() -> list[list[int]]:
    """Generated without the prefix index, every prompt computed whole."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setenv("PAGED_BACKEND", "torch")
        executor, manager = make_executor(share=False)
        requests = make_requests()
        for request in requests:
            step(executor, manager, [request])
        assert executor.status().prefill_tokens == NUM_PROMPTS * (PREFIX_TOKENS + 1)
        assert manager.stats().prefix_hits == manager.stats().shared_blocks == 0
        return finish(executor, manager, requests)


def test_prefix_is_computed_once(unshared: list[list[int]]) -> None:
    executor, manager = make_executor(share=True)
    requests = make_requests()
    step(executor, manager, requests[:1])
    assert executor.status().prefill_tokens == PREFIX_TOKENS + 1
    cached = PREFIX_TOKENS // BLOCK * BLOCK
    for request in requests[1:]:
        step(executor, manager, [request])
        assert request.handle is not None
        assert request.handle.num_cached_tokens == cached
    expected = PREFIX_TOKENS + 1 + (NUM_PROMPTS - 1) * (PREFIX_TOKENS + 1 - cached)
    assert executor.status().prefill_tokens == expected
    stats = manager.stats()
    assert (stats.prefix_hits, stats.prefix_misses) == (NUM_PROMPTS - 1, 1)
    assert stats.prefix_hit_tokens == (NUM_PROMPTS - 1) * cached
    assert stats.used_blocks == cached // BLOCK + NUM_PROMPTS
    assert finish(executor, manager, requests) == unshared
    assert stats.cow_copies == 0


def test_freed_prefix_is_found_again(unshared: list[list[int]]) -> None:
    executor, manager = make_executor(share=True)
    for run in range(2):
        requests = make_requests()[:4]
        for request in requests:
            step(executor, manager, [request])
        assert finish(executor, manager, requests) == unshared[:4]
        for request in requests:
            assert request.handle is not None
            manager.free(request.handle)
        assert manager.stats().used_blocks == 0
        assert manager.stats().prefix_misses == 1, f"run {run}"


def test_half_is_swapped_out_halfway(unshared: list[list[int]]) -> None:
    executor, manager = make_executor(share=True)
    requests = make_requests()
    for request in requests:
        step(executor, manager, [request])
    step(executor, manager, [request for request in requests if not request.is_done])
    out = [request for request in requests[::2] if not request.is_done]
    assert len(out) > NUM_PROMPTS // 4
    handles = [request.handle for request in out if request.handle is not None]
    for handle in handles:
        manager.swap_out(handle)
    assert manager.stats().swapped_out_blocks == len(handles), "each its own block, not the prefix"
    manager.evict(manager.config.num_blocks)
    with pytest.raises(StaleHandleError, match="swapped out"):
        step(executor, manager, out[:1])
    # Blocks without a holder are overwritten, and with them all that sequences were swapped out from.
    held = {block for handle in manager.handles() for block in handle.blocks}
    free = [block for block in range(1, manager.config.num_blocks + 1) if block not in held]
    for layer in range(manager.config.num_layers):
        for cache in (manager.k_cache(layer), manager.v_cache(layer)):
            cache[free] = torch.nan
    running = [request for request in requests if request not in out and not request.is_done]
    if running:
        step(executor, manager, running)
    for handle in handles:
        manager.swap_in(handle)
    assert finish(executor, manager, requests) == unshared
    assert manager.stats().swap_blocks_free == manager.config.num_swap_blocks
