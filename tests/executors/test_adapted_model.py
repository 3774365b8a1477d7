"""Models of others: run by the calls that they have, and rolled back by them."""

import pytest
import torch

from paged.batch import GreedyArgmax, VerifyLogits
from paged.errors import InvalidInputError, SequenceTooLongError, StaleHandleError, UnsupportedError
from tests.executors.oracle import chunk, forward, item, prompt, step
from tests.executors.parrot import Parrot, UnifiedParrot, UnsupportedParrot, other_executor, parrot_logits


def test_unsupported_is_tried_once_then_taken_apart() -> None:
    model = UnsupportedParrot()
    executor = other_executor(model)
    assert executor.supports_native_unified_decode()
    first = forward(executor, item("a", [1, 2]), item("b", [3]), chunk("c", [4, 5]), chunk("d", [6]))
    assert model.calls == ["unified_forward", "prefill a 2", "prefill b 1", "prefill c 2", "prefill d 1"]
    assert not executor.supports_native_unified_decode()
    assert not executor.capabilities().supports_native_unified_decode
    assert [row is None for row in first] == [False, False, True, True]

    model.calls.clear()
    greedy = item("b", [2], 1, logits_policy=GreedyArgmax())
    a, c, d, b = forward(executor, item("a", [7], 2), item("c", [8, 9], 2), chunk("d", [1], 1), greedy)
    assert model.calls == ["decode_batch ['a', 'b']", "prefill c 2", "prefill d 1"]
    assert torch.equal(a, parrot_logits([1, 2, 7]))
    assert torch.equal(c, parrot_logits([4, 5, 8, 9]))
    assert d is None
    assert int(b) == 5
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
    executor, new = other_executor(model), item("n", [4])
    forward(executor, item("a", [1, 2]))
    bad_batches = (
        (RuntimeError, (item("a", [3], 2), new, item("m", [60]))),
        (InvalidInputError, (new, item("a", [3], 1))),
        (SequenceTooLongError, (new, item("a", [3] * 19, 2))),
        (UnsupportedError, (item("n", [4], metadata={"lora_adapter": "x"}),)),
    )
    for count, (error, items) in enumerate(bad_batches, start=1):
        with pytest.raises(error):
            forward(executor, *items)
        assert model.caches == {"a": [1, 2]}
        assert executor.status().failed_calls == count
    assert executor.supports_native_unified_decode() == (model_class is UnifiedParrot)
    [row] = forward(executor, item("a", [3] * 18, 2))
    assert torch.equal(row, parrot_logits([1, 2] + [3] * 18))


def test_a_unified_forward_that_knows_nothing_of_drafts() -> None:
    executor = other_executor(UnifiedParrot())
    forward(executor, item("a", [1, 2]))
    verified, decoded = forward(executor, item("a", [3, 4], 2, logits_policy=VerifyLogits()), item("b", [5]))
    assert torch.equal(verified, torch.stack([parrot_logits([1, 2, 3]), parrot_logits([1, 2, 3, 4])]))
    assert torch.equal(decoded, parrot_logits([5]))
