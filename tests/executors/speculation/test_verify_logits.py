"""VerifyLogits: logits after each of an item's tokens, in one forward with chunks and decodes of other sequences."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from paged import GreedyArgmax, LlmExecutor, PagedAttentionExecutor, UnifiedBatchItem, VerifyLogits
from paged.executors.command_line.cli import RECALL
from paged.executors.command_line.closed_form import expected_logits
from tests.executors.oracle import batch, make_executor
from tests.executors.parrot import Parrot, UnifiedParrot, other_executor, parrot_logits
from tests.tolerance import assert_close

Expect = Callable[[list[int]], torch.Tensor]


def _mixed(executor: PagedAttentionExecutor | LlmExecutor, expect: Expect) -> None:
    executor.unified_decode(
        batch(UnifiedBatchItem("a", [1, 2, 3]), UnifiedBatchItem("b", [4]), UnifiedBatchItem("c", [5, 6]))
    )
    before = executor.decode_count, executor.prefill_count
    rows = executor.unified_decode(
        batch(
            UnifiedBatchItem("a", [7, 8, 9], pos_offset=3, logits_policy=VerifyLogits()),
            UnifiedBatchItem("d", [2, 3, 4], is_final_chunk=False),
            UnifiedBatchItem("b", [1], pos_offset=1),
            UnifiedBatchItem("c", [3], pos_offset=2, logits_policy=VerifyLogits()),
            UnifiedBatchItem("e", [6, 2], logits_policy=GreedyArgmax()),
        )
    )
    verified, none, decoded, one, token = rows
    assert none is None
    assert verified is not None
    assert one is not None
    assert decoded is not None
    assert token is not None
    assert (verified.shape[0], one.shape[0], decoded.dim()) == (3, 1, 1)
    for length in range(3):
        assert_close(verified[length], expect([1, 2, 3, 7, 8, 9][: 4 + length]))
    assert_close(decoded, expect([4, 1]))
    assert_close(one[0], expect([5, 6, 3]))
    assert int(token) == int(expect([6, 2]).argmax())
    assert (executor.decode_count - before[0], executor.prefill_count - before[1]) == (5, 1)


def test_of_the_oracle(device: torch.device) -> None:
    executor = make_executor(device)
    _mixed(executor, lambda tokens: expected_logits(executor.config, tokens).to(device))


def test_of_a_checkpoint() -> None:
    executor = LlmExecutor.from_pretrained(RECALL, num_blocks=32)
    alone = LlmExecutor.from_pretrained(RECALL, num_blocks=32)

    def expect(tokens: list[int]) -> torch.Tensor:
        [row] = alone.unified_decode(batch(UnifiedBatchItem("x", tokens)))
        alone.release_cache("x")
        assert row is not None
        return row

    _mixed(executor, expect)


@pytest.mark.parametrize("model_class", [Parrot, UnifiedParrot])
def test_of_anothers_model(model_class: type[Parrot]) -> None:
    """One that knows nothing of it, and keeps its own caches."""
    executor = other_executor(model_class())
    executor.unified_decode(batch(UnifiedBatchItem("a", [1, 2])))
    verified, decoded = executor.unified_decode(
        batch(
            UnifiedBatchItem("a", [3, 4], pos_offset=2, logits_policy=VerifyLogits()),
            UnifiedBatchItem("b", [5]),
        )
    )
    assert verified is not None
    assert torch.equal(verified, torch.stack([parrot_logits([1, 2, 3]), parrot_logits([1, 2, 3, 4])]))
    assert decoded is not None
    assert torch.equal(decoded, parrot_logits([5]))
