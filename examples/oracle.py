"""Check a changed kernel with the oracle: a model whose answers are known in closed form.

    python examples/oracle.py

`PagedAttentionExecutor` embeds token t as a one-hot vector and uses it as Q, K and V. So the attention output is a
weighted histogram of the visible tokens. Here changed kernels lose a key or see a future one; the oracle finds them.
Every row is compared: the last row of a prompt has no future, so it is right even if all others see the next token.
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
    VerifyLogits,
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
    """Compare every row of a prompt in two chunks, of another prompt and of a decode step with the closed form."""
    manager = PagedKvCacheManager(PagedKvCacheConfig(num_layers=2, num_kv_heads=NUM_HEADS, head_dim=HEAD_DIM))
    executor = PagedAttentionExecutor(PagedExecutorConfig(VOCAB_SIZE, 2, NUM_HEADS, NUM_HEADS, HEAD_DIM), manager)
    sequences = {"a": [3, 3, 9, 200, 3], "b": list(range(40))}
    for step in ({"a": (0, 4), "b": (0, 25)}, {"a": (4, 5), "b": (25, 40)}):
        items = [
            UnifiedBatchItem(name, sequences[name][start:end], pos_offset=start, logits_policy=VerifyLogits())
            for name, (start, end) in step.items()
        ]
        for item, rows in zip(items, executor.unified_decode(UnifiedBatch(items)), strict=True):
            for position, logits in enumerate(rows.cpu(), item.pos_offset):  # of [num_tokens, vocab_size]
                seen = sequences[item.seq_id][: position + 1]
                torch.testing.assert_close(logits, expected_logits(seen), rtol=1e-5, atol=1e-5)


def loses_a_key(*args: Any, seq_lens: torch.Tensor, plan: Any, **options: Any) -> Any:
    """Attend to one key too few."""
    return paged_attention(*args, seq_lens=seq_lens - 1, **options)


def sees_a_future_key(*args: Any, plan: Any, **options: Any) -> Any:
    """Attend to all past keys and to the next one; a sequence's last query has none."""
    return paged_attention(*args, **{**options, "causal": False, "window_size": (-1, 1)})


def main() -> None:
    """Check the kernel as it is, then with each change in its place."""
    check()
    print("the unchanged kernel: agrees with the closed form")
    for change in (loses_a_key, sees_a_future_key):
        with mock.patch.object(oracle_module, "paged_attention", change):
            try:
                check()
            except AssertionError as error:
                print(f"the changed kernel: found, {change.__name__}: {str(error).splitlines()[0]}")
            else:
                raise SystemExit(f"the oracle did not see the change: {change.__name__}")


if __name__ == "__main__":
    main()
