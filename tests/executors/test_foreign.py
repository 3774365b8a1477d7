"""Models of others: run by the calls that they have, and rolled back by them."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from paged import Engine, SamplingParams
from paged.errors import (
    InvalidInputError,
    OutOfBlocksError,
    SequenceTooLongError,
    StaleHandleError,
    UnsupportedError,
)
from paged.executors.llm_executor import LlmExecutor
from paged.executors.model_executor import ModelExecutor
from paged.seq_id import SeqId
from paged.step.batch import GreedyArgmax, VerifyLogits
from tests.executors.engine.answers import parrot_tokens
from tests.executors.engine_cases import GREEDY
from tests.executors.minimal_executor import MinimalExecutor
from tests.executors.oracle import chunk, forward, item, prompt, step
from tests.executors.parrot import INFO, Parrot, UnifiedParrot, UnsupportedParrot, other_executor, parrot_logits


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


class AdaptedParrot(Parrot):
    """Forgets its adapters with their sequences, cannot truncate, and breaks once if it decodes a token of `once`."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters: dict[SeqId, str | None] = {}
        self.once: set[int] = set()

    def set_lora_adapter_for_cache(self, cache_id: SeqId, adapter: str | None) -> None:
        self.adapters[cache_id] = adapter

    def release(self, cache_id: SeqId) -> None:
        super().release(cache_id)
        self.adapters.pop(cache_id, None)

    def truncate_kv(self, cache_id: SeqId, new_len: int) -> None:
        raise UnsupportedError("no way back")

    def _run(self, cache_id: SeqId, tokens: Sequence[int]) -> torch.Tensor:
        assert self.adapters[cache_id] == "x"
        logits = super()._run(cache_id, tokens)
        if not self.once.isdisjoint(tokens):
            self.once.clear()
            raise RuntimeError("once")
        return logits


@pytest.mark.parametrize("once", [None, 2, 12])
def test_an_engine_chooses_adapters_of_anothers_model(once: int | None) -> None:
    """Before the first token, and again if the sequence was dropped because it cannot be truncated."""
    model = AdaptedParrot()
    if once is not None:
        model.once.add(once)
    engine = Engine(other_executor(model))
    output = engine.add_request([1, 2], replace(GREEDY, max_tokens=5), adapter="x")
    while engine.num_unfinished:
        engine.step()
    assert (output.error, output.outputs[0].token_ids) == (None, parrot_tokens([1, 2], 5))
    assert not model.caches
    assert not model.adapters


class PooledParrot(Parrot):
    """Has blocks of its own, too few for a prompt with token 50 or an answer of 24."""

    def _run(self, cache_id: SeqId, tokens: Sequence[int]) -> torch.Tensor:
        if not {24, 50}.isdisjoint(tokens):
            raise OutOfBlocksError(1, 0)
        return super()._run(cache_id, tokens)


def test_a_model_that_runs_out_of_its_own_blocks_fails_alone() -> None:
    model = PooledParrot()
    engine = Engine(other_executor(model))
    outputs = [engine.add_request(tokens, replace(GREEDY, max_tokens=6)) for tokens in ([50, 1], [5], [1, 2])]
    for _ in range(8):
        engine.step()
    assert [output.error is None for output in outputs] == [False, True, False]
    assert outputs[1].outputs[0].token_ids == parrot_tokens([5], 6)
    assert outputs[2].outputs[0].token_ids == parrot_tokens([1, 2], 4)
    assert not model.caches


@pytest.mark.parametrize("kind", [MinimalExecutor, Parrot])
def test_a_release_that_fails_is_done_again(
    kind: type[MinimalExecutor | Parrot], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = kind()
    name = "release" if isinstance(owner, Parrot) else "release_cache"
    release = getattr(owner, name)
    calls: list[SeqId] = []

    def release_late(seq_id: SeqId) -> None:
        calls.append(seq_id)
        if len(calls) == 1:
            raise RuntimeError("not now")
        release(seq_id)

    monkeypatch.setattr(owner, name, release_late)
    executor: ModelExecutor = other_executor(owner) if isinstance(owner, Parrot) else owner
    (output,) = Engine(executor).generate([[1, 2]], replace(GREEDY, max_tokens=3), progress=False)
    assert output.outputs[0].token_ids == parrot_tokens([1, 2], 3)
    assert calls == calls[:1] * 2
    assert not owner.caches


def test_a_model_without_a_longest_sequence() -> None:
    executor = LlmExecutor(Parrot(), replace(INFO, max_sequence_length=1 << 30))
    (output,) = Engine(executor).generate([[1, 2]], replace(GREEDY, max_tokens=3), progress=False)
    assert output.outputs[0].token_ids == parrot_tokens([1, 2], 3)


def test_prompt_logprobs_of_anothers_model() -> None:
    prompt_ids = [1, 2, 3, 4]
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)
    (output,) = Engine(other_executor(UnifiedParrot())).generate([prompt_ids], params, progress=False)
    assert (output.error, output.outputs[0].token_ids) == (None, parrot_tokens(prompt_ids, 2))
    assert output.prompt_logprobs is not None
    for position in range(1, 4):
        logprobs = parrot_logits(prompt_ids[:position]).log_softmax(0)
        token = prompt_ids[position]
        assert output.prompt_logprobs[position][token] == pytest.approx(float(logprobs[token]), abs=1e-5)
