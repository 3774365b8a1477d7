"""Check a changed kernel with the oracle: a model whose answers are known in closed form.

    python examples/oracle.py

`PagedAttentionExecutor` embeds token t as a one-hot vector and uses it as Q, K and V. So the attention output is a
weighted histogram of the visible tokens. Here a changed kernel loses a key, and the oracle finds it.
"""

import math
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch

import paged.executors.paged_attention_executor as oracle_module
from paged import (
    PagedAttentionExecutor,
    PagedExecutorConfig,
    PagedKvCacheConfig,
    PagedKvCacheManager,
    UnifiedBatch,
    UnifiedBatchItem,
    paged_attention,
)

NUM_HEADS, HEAD_DIM, VOCAB_SIZE = 4, 8, 256


def expected_logits(tokens: Sequence[int]) -> torch.Tensor:
    """The closed form after `tokens`. In the head that holds the query's index, keys with that index weigh
    exp(1 / sqrt(head_dim)); all other keys, and all keys of other heads, weigh 1.
    """
    width = NUM_HEADS * HEAD_DIM
    index = torch.tensor(tokens) % width
    histogram = torch.zeros(width, dtype=torch.float64)
    own_head = int(index[-1]) // HEAD_DIM
    for head in range(NUM_HEADS):
        weights = torch.ones(len(tokens), dtype=torch.float64)
        if head == own_head:
            weights[index == index[-1]] = math.exp(1 / math.sqrt(HEAD_DIM))
        weights /= weights.sum()
        inside = index // HEAD_DIM == head
        histogram.index_add_(0, index[inside], weights[inside])
    logits = torch.zeros(VOCAB_SIZE, dtype=torch.float64)
    logits[:width] = histogram
    return logits.float()


def check() -> None:
    """A prompt in two chunks beside decode steps of another sequence, compared with the closed form."""
    manager = PagedKvCacheManager(
        PagedKvCacheConfig(num_layers=2, num_kv_heads=NUM_HEADS, head_dim=HEAD_DIM, device="cpu")
    )
    executor = PagedAttentionExecutor(PagedExecutorConfig(VOCAB_SIZE, 2, NUM_HEADS, NUM_HEADS, HEAD_DIM), manager)
    a, b = [3, 3, 9, 200, 3], list(range(40))
    executor.unified_decode(
        UnifiedBatch([UnifiedBatchItem("a", a[:4]), UnifiedBatchItem("b", b[:25], is_final_chunk=False)])
    )
    items = [UnifiedBatchItem("a", a[4:], pos_offset=4), UnifiedBatchItem("b", b[25:], pos_offset=25)]
    for tokens, logits in zip((a, b), executor.unified_decode(UnifiedBatch(items)), strict=True):
        torch.testing.assert_close(logits.cpu(), expected_logits(tokens), rtol=1e-5, atol=1e-5)


def changed(*args: Any, seq_lens: torch.Tensor, plan: Any, **options: Any) -> Any:
    """What your change might do wrong: one key too few."""
    return paged_attention(*args, seq_lens=seq_lens - 1, **options)


check()
print("the unchanged kernel: agrees with the closed form")
with mock.patch.object(oracle_module, "paged_attention", changed):
    try:
        check()
    except AssertionError as error:
        print("the changed kernel: found,", str(error).splitlines()[0])
    else:
        raise SystemExit("the oracle did not see the change")
