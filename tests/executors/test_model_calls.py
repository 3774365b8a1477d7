"""Models of others: run by the calls that they have, and rolled back by them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paged.batch import GreedyArgmax, UnifiedBatchItem
from paged.errors import InvalidInputError, PagedError, SequenceTooLongError, StaleHandleError, UnsupportedError
from tests.executors.oracle import batch, prompt, step
from tests.executors.parrot import Parrot, UnifiedParrot, UnsupportedParrot, other_executor, parrot_logits


def count_calls(monkeypatch: pytest.MonkeyPatch, target: Any, name: str) -> list[str]:
    """The list grows by `name` with every call."""
    method, calls = getattr(target, name), []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return method(*args, **kwargs)

    monkeypatch.setattr(target, name, counted)
    return calls


def test_unsupported_is_tried_once_then_taken_apart() -> None:
    model = UnsupportedParrot()
    executor = other_executor(model)
    assert executor.supports_native_unified_decode()
    first = executor.unified_decode(
        batch(
            UnifiedBatchItem("a", [1, 2]),
            UnifiedBatchItem("b", [3]),
            UnifiedBatchItem("c", [4, 5], is_final_chunk=False),
            UnifiedBatchItem("d", [6], is_final_chunk=False),
        )
    )
    assert model.calls == ["unified_forward", "prefill a 2", "prefill b 1", "prefill c 2", "prefill d 1"]
    assert not executor.supports_native_unified_decode()
    assert not executor.capabilities().supports_native_unified_decode
    assert [row is None for row in first] == [False, False, True, True]

    model.calls.clear()
    rows = executor.unified_decode(
        batch(
            UnifiedBatchItem("a", [7], pos_offset=2),
            UnifiedBatchItem("c", [8, 9], pos_offset=2),
            UnifiedBatchItem("d", [1], pos_offset=1, is_final_chunk=False),
            UnifiedBatchItem("b", [2], pos_offset=1, logits_policy=GreedyArgmax()),
        )
    )
    assert model.calls == ["decode_batch ['a', 'b']", "prefill c 2", "prefill d 1"]
    assert rows[0] is not None
    assert torch.equal(rows[0], parrot_logits([1, 2, 7]))
    assert rows[1] is not None
    assert torch.equal(rows[1], parrot_logits([4, 5, 8, 9]))
    assert rows[2] is None
    assert rows[3] is not None
    assert int(rows[3]) == 5
    assert executor.status().memory_bytes == (10 + 2 * 4 * (3 + 2 + 4 + 2)) * 4


@pytest.mark.parametrize("model_class", [Parrot, UnsupportedParrot, UnifiedParrot])
def test_all_calls_of_anothers_model(model_class: type[Parrot]) -> None:
    model = model_class()
    executor = other_executor(model)
    out = executor.prefill(prompt([1, 2, 3], [4, 5, 6]))
    assert torch.equal(out.last_token_logits()[1], parrot_logits([4, 5, 6]))
    left, right = out.kv_caches
    decoded = executor.batch_decode([step(left, 9), step(right, 9)])
    assert torch.equal(decoded[0].logits[0], parrot_logits([1, 2, 3, 9]))
    verified = executor.forward_verify([step(left, 1), step(left, 2, logits_policy=GreedyArgmax())])
    assert torch.equal(verified[0].logits[0], parrot_logits([1, 2, 3, 9, 1]))
    assert verified[1].logits.tolist() == [18]
    executor.truncate_kv(left, 2)
    assert left.num_tokens == 2
    with pytest.raises(InvalidInputError, match="new_len"):
        executor.truncate_kv_for_cache_id(left.cache_id, 3)
    assert torch.equal(executor.decode(step(left, 7)).logits[0], parrot_logits([1, 2, 7]))
    executor.release_cache(right.cache_id)
    assert list(model.caches) == [left.cache_id]
    with pytest.raises(StaleHandleError):
        executor.decode(step(right, 1))
    with pytest.raises(InvalidInputError, match="no cache"):
        executor.truncate_kv_for_cache_id(right.cache_id, 0)


@pytest.mark.parametrize("model_class", [Parrot, UnifiedParrot])
def test_failures_of_anothers_model(model_class: type[Parrot]) -> None:
    model = model_class()
    executor = other_executor(model)
    executor.unified_decode(batch(UnifiedBatchItem("a", [1, 2])))
    bad_batches = (
        (
            RuntimeError,
            (UnifiedBatchItem("a", [3], pos_offset=2), UnifiedBatchItem("n", [4]), UnifiedBatchItem("m", [60])),
        ),
        (InvalidInputError, (UnifiedBatchItem("n", [4]), UnifiedBatchItem("a", [3], pos_offset=1))),
        (SequenceTooLongError, (UnifiedBatchItem("n", [4]), UnifiedBatchItem("a", [3] * 19, pos_offset=2))),
        (UnsupportedError, (UnifiedBatchItem("n", [4], metadata={"lora_adapter": "x"}),)),
    )
    for count, (error, items) in enumerate(bad_batches, start=1):
        with pytest.raises(error):
            executor.unified_decode(batch(*items))
        assert model.caches == {"a": [1, 2]}
        assert executor.status().failed_calls == count
    assert executor.supports_native_unified_decode() == (model_class is UnifiedParrot)
    [row] = executor.unified_decode(batch(UnifiedBatchItem("a", [3] * 18, pos_offset=2)))
    assert row is not None
    assert torch.equal(row, parrot_logits([1, 2] + [3] * 18))


@pytest.mark.parametrize("answer", [lambda rows: rows[:-1], lambda rows: [None, *rows[1:]], lambda rows: []])
def test_too_few_results(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = UnifiedParrot()
    executor = other_executor(model)
    items = batch(UnifiedBatchItem("a", [1, 2]), UnifiedBatchItem("b", [3]))
    with monkeypatch.context() as patch:
        patch.setattr(model, "answer", answer)
        with pytest.raises(PagedError, match="results for 2 items"):
            executor.unified_decode(items)
    assert model.caches == {}
    assert executor.status().prefill_count == 0
    assert len(executor.unified_decode(items)) == 2
