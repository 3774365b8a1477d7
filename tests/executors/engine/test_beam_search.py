"""Beam search finds what transformers' does."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from paged import (
    Engine,
    EngineConfig,
    InvalidInputError,
    LlmExecutor,
    PagedError,
    SamplingParams,
    UnifiedBatch,
    UnsupportedError,
)
from tests.executors.engine_cases import TOKENIZER, check_empty, run_to_end, tokens_of
from tests.executors.minimal_executor import MinimalExecutor
from tests.models.families import tokens
from tests.tolerance import assert_within


def theirs(model: Any, prompt: list[int], width: int, count: int, penalty: float, eos: list[int]) -> list[Any]:
    """Tokens and score of each beam, by transformers. "never" ends as ours does, when no beam can become better; its
    default ends earlier, by a guess."""
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=count,
        length_penalty=penalty,
        eos_token_id=eos or None,
        pad_token_id=127,
        do_sample=False,
        early_stopping="never",
        output_scores=True,
        return_dict_in_generate=True,
    )
    rows = []
    for row, score in zip(found.sequences[:, len(prompt) :].tolist(), found.sequences_scores.tolist(), strict=True):
        end = next((index + 1 for index, token in enumerate(row) if token in eos), count)
        rows.append((row[:end], score))
    return rows


@pytest.mark.parametrize(
    ("width", "count", "penalty", "eos"),
    [
        (4, 12, 1.0, []),
        (3, 10, 1.0, [*range(2, 128, 4)]),
        (3, 5, 0.5, [*range(0, 128, 4)]),
        (2, 8, 0.0, [*range(1, 128, 3)]),
        (5, 12, -1.0, [*range(2, 128, 4)]),
    ],
)
def test_same_as_transformers(
    llama_checkpoint: tuple[Any, Path], width: int, count: int, penalty: float, eos: list[int]
) -> None:
    model, folder = llama_checkpoint
    executor = LlmExecutor.from_pretrained(folder, num_blocks=64, block_size=4)
    engine = Engine(executor, EngineConfig(token_budget=9), eos_token_ids=eos)
    num_ended = 0
    for seed in range(4):
        prompt = tokens(5 + 7 * seed, seed)
        found = engine.beam_search(prompt, width, count, penalty)
        beams, scores = zip(*theirs(model, prompt, width, count, penalty, eos), strict=True)
        assert [one.token_ids for one in found] == [*beams]
        # A score sums the log probabilities of at most 12 tokens.
        assert_within([one.score for one in found], scores, 1e-4 * max(map(abs, scores)))
        num_ended += sum(len(one.token_ids) < count for one in found)
        check_empty(engine)
    assert bool(num_ended) == bool(eos)


def test_beside_requests_and_with_texts(llama_checkpoint: tuple[Any, Path]) -> None:
    """Where the cache is full it preempts; its texts lack the end token."""
    engine = Engine(
        LlmExecutor.from_pretrained(llama_checkpoint[1], num_blocks=20, block_size=4),
        EngineConfig(admission_tokens=0, overlap=True),
        tokenizer=TOKENIZER,
        eos_token_ids=range(0, 40, 2),
    )
    prompts, params = [tokens(20, 1), tokens(22, 2)], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = tokens_of(engine.generate(prompts, params, progress=False))
    (greedy,) = Engine(engine.executor, eos_token_ids=()).beam_search(prompts[0], 1, 12)
    assert greedy.token_ids == expected[0]
    assert all(
        len(one.token_ids) == 1 for one in Engine(engine.executor, eos_token_ids=range(128)).beam_search([1], 3, 4)
    )
    alone = engine.beam_search(tokens(24), 4, 10)
    for one in alone:
        is_ended = one.token_ids[-1] in range(0, 40, 2)
        assert one.text == TOKENIZER.decode(one.token_ids[:-1] if is_ended else one.token_ids)
    outputs = [engine.add_request(prompt, params) for prompt in prompts]
    engine.step()
    assert engine.beam_search(tokens(24), 4, 10) == alone
    assert engine.metrics.preempted
    run_to_end(engine)
    assert tokens_of(outputs) == expected
    for options in ({"beam_width": 0}, {"beam_width": 257}, {"max_tokens": 0}, {"length_penalty": float("nan")}):
        with pytest.raises(InvalidInputError):
            engine.beam_search([1], **{"beam_width": 2, "max_tokens": 2} | options)
    with pytest.raises(UnsupportedError, match="fork"):
        Engine(MinimalExecutor()).beam_search([1], 2, 2)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["embed_tokens", "norm.weight", "lm_head.weight"])
def test_weights_that_are_not_finite(llama_checkpoint: tuple[Any, Path], name: str, value: float) -> None:
    """End with an error that says so, like ordinary requests; nothing is left behind."""
    executor = LlmExecutor.from_pretrained(llama_checkpoint[1], num_blocks=64, block_size=4)
    engine = Engine(executor, eos_token_ids=())
    executor.model.network.get_parameter(name).data.fill_(value)
    if math.isnan(value):
        output = engine.add_request(tokens(9, 1))
        run_to_end(engine)
        assert output.error == "the logits left no token to choose"
    with pytest.raises(PagedError, match="the logits left no token to choose as number 1"):
        engine.beam_search(tokens(9, 1), 3, 4)
    check_empty(engine)


@pytest.mark.parametrize("num_good", [1, 3])
def test_logits_of_one_beam_that_are_nan(
    num_good: int, llama_checkpoint: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN of some tokens only leaves them out; of all of them it is an error."""
    executor = LlmExecutor.from_pretrained(llama_checkpoint[1], num_blocks=64, block_size=4)
    engine, forward = Engine(executor, eos_token_ids=()), executor.unified_decode
    num_forwards = 0

    def broken(batch: UnifiedBatch) -> Any:
        nonlocal num_forwards
        answers, num_forwards = forward(batch), num_forwards + 1
        answers[-1][:64] = torch.nan
        if num_forwards > num_good:
            answers[-1][64:] = torch.nan
        return answers

    monkeypatch.setattr(executor, "unified_decode", broken)
    [best, *_] = engine.beam_search(tokens(9, 1), 1, num_good)
    assert math.isfinite(best.score)
    assert min(best.token_ids) >= 64
    num_forwards = 0
    with pytest.raises(PagedError, match=f"no token to choose as number {num_good + 1}"):
        engine.beam_search(tokens(9, 1), 3, 5)
    check_empty(engine)
