"""Another's model that keeps its K/V itself and raises, with or without a way back: no sequence runs on wrongly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from paged import DecodeInput, Engine, PrefillInput, SamplingParams, StaleHandleError, UnsupportedError
from paged.seq_id import SeqId
from tests.executors.parrot import Parrot, UnifiedParrot, UnsupportedParrot, other_executor, parrot_logits
from tests.fuzz.fuzzing import fuzz

POISON = 60


def with_faults(base: type[Parrot], way_back: str, fails_at: set[int]) -> Parrot:
    """A parrot whose `fails_at`-th runs of tokens raise once, half of the batch being done, and POISON always."""

    class Faulty(base):  # type: ignore[misc, valid-type]
        runs = 0

        def _run(self, cache_id: SeqId, tokens: Sequence[int]) -> torch.Tensor:
            self.runs += 1
            logits = super()._run(cache_id, tokens)
            if self.runs in fails_at:
                raise MemoryError("once")
            return logits

        def truncate_kv(self, cache_id: SeqId, new_len: int) -> None:
            if way_back == "none":
                raise UnsupportedError("no way back")
            if way_back == "broken":
                raise RuntimeError("a broken way back")
            super().truncate_kv(cache_id, new_len)

    return Faulty()


def own_tokens(prompt: Sequence[int], count: int) -> list[int]:
    """What the parrot says to a prompt, up to the token that breaks it."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count and tokens[-1] != POISON:
        tokens.append(int(parrot_logits(tokens).argmax()))
    return tokens[len(prompt) :]


MODELS = {one.__name__: one for one in (Parrot, UnsupportedParrot, UnifiedParrot)}
CASES = st.fixed_dictionaries(
    {
        "model": st.sampled_from(sorted(MODELS)),
        "way_back": st.sampled_from(["right", "none", "broken"]),
        "fails_at": st.lists(st.integers(1, 30), max_size=4),
        "prompts": st.lists(st.lists(st.integers(1, POISON), min_size=1, max_size=5), min_size=1, max_size=3),
    }
)


@fuzz(CASES, examples=60)
def test_models_that_fail(case: dict[str, Any]) -> None:
    model = with_faults(MODELS[case["model"]], case["way_back"], set(case["fails_at"]))
    engine = Engine(other_executor(model), eos_token_ids=())
    outputs = [engine.add_request(one, SamplingParams(temperature=0, max_tokens=6)) for one in case["prompts"]]
    for _ in range(200):
        engine.step()
    assert engine.num_unfinished == 0
    for prompt, output in zip(case["prompts"], outputs, strict=True):
        expected = own_tokens(prompt, 6)
        is_poisoned = POISON in prompt or len(expected) < 6
        [one] = output.outputs
        if one.finish_reason == "error":
            # One that is alone in its call when that fails for once is blamed itself.
            assert is_poisoned or case["fails_at"]
            assert one.token_ids == expected[: len(one.token_ids)]
        else:
            assert not is_poisoned
            assert one.token_ids == expected
    assert model.caches == {}


def test_siblings_of_a_failed_batch_are_given_up() -> None:
    """Directly on the executor: their handles are no longer valid, and the model holds nothing of them."""
    model = with_faults(Parrot, "none", set())
    executor = other_executor(model)

    handles = [executor.prefill(PrefillInput(torch.tensor([[1, 2]]))).kv_cache for _ in range(2)]
    inputs = [DecodeInput(torch.tensor([[token]]), handle) for token, handle in zip((3, POISON), handles, strict=True)]
    with pytest.raises(RuntimeError, match="breaks it"):
        executor.batch_decode(inputs)
    assert [handle.is_valid for handle in handles] == [False, False]
    assert model.caches == {}
    with pytest.raises(StaleHandleError):
        executor.decode(inputs[0])
    assert executor.prefill(PrefillInput(torch.tensor([[1, 2]]))).kv_cache.is_valid
