"""Log probabilities of prompts: those of a plain forward of transformers, however the prompts run."""

from pathlib import Path
from typing import Any

import pytest

from paged import Engine, EngineConfig, LlmExecutor, RequestOutput, SamplingParams, UnsupportedError, VerifyLogits
from paged.executors.engine import core
from tests.executors.engine_cases import check_empty, run_to_end, spy
from tests.executors.minimal_executor import MinimalExecutor
from tests.models.families import VOCAB_SIZE, logits_of, tokens
from tests.tolerance import assert_logprobs

PROMPTS = [tokens(count, seed=count) for count in (1, 5, 17, 30, 23, 30)]
# Engine configuration, executor options, and the most rows of a step; preemptions are in test_token_states.py.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "5 rows": ({}, {}, 5),
    "chunks of 1": ({"chunk_size": 1}, {}, 1000),
    "ahead": ({"overlap": True, "chunk_size": 7}, {}, 11),
    "graphs": ({}, {"cuda_graphs": (2, 6)}, 6),
}


def check(output: RequestOutput, theirs: Any, count: int) -> None:
    """Each token once, with its own log probability first, and the best `count`."""
    assert output.error is None
    found, prompt = output.prompt_logprobs, output.prompt_token_ids
    assert found is not None
    assert len(found) == len(prompt)
    assert found[0] is None
    expected = logits_of(theirs, prompt).log_softmax(-1)
    for row, token, table in zip(expected, prompt[1:], found[1:], strict=False):
        best = row.topk(count)
        assert table is not None
        assert list(table) == list(dict.fromkeys([token, *best.indices.tolist()]))
        assert_logprobs(list(table.values()), row[list(table)])


@pytest.mark.parametrize("way", WAYS)
def test_same_as_a_plain_forward(llama_checkpoint: tuple[Any, Path], way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside requests without; a prompt that others have cached is computed again, and theirs is not."""
    (theirs, folder), (config, options, most) = llama_checkpoint, WAYS[way]
    monkeypatch.setattr(core, "_PROMPT_LOGITS", most * VOCAB_SIZE)
    executor = LlmExecutor.from_pretrained(folder, **{"num_blocks": 256, "block_size": 4} | options)
    if "cuda_graphs" in options:
        executor.warmup()
    engine = Engine(executor, EngineConfig(**config), eos_token_ids=())
    rows: list[int] = []
    spy(
        monkeypatch,
        executor,
        lambda step: rows.append(
            sum(len(item.q_tokens) for item in step.items if isinstance(item.logits_policy, VerifyLogits))
        ),
    )
    plain = SamplingParams(temperature=0, max_tokens=8, n=2)
    asking = SamplingParams(temperature=0, max_tokens=8, n=2, prompt_logprobs=3)
    expected = engine.generate(PROMPTS, plain, progress=False)
    outputs = [engine.add_request(prompt, params) for prompt in PROMPTS for params in (asking, plain)]
    run_to_end(engine)
    assert 0 < max(rows) <= most
    for one, other, output in zip(outputs[::2], outputs[1::2], expected, strict=True):
        check(one, theirs, 3)
        assert other.prompt_logprobs is None
        texts = [[each.token_ids for each in given.outputs] for given in (one, other, output)]
        assert texts[0] == texts[1] == texts[2]
        assert one.num_cached_tokens == 0
    assert any(output.num_cached_tokens for output in outputs)
    assert engine.metrics.failed_forwards == 0


def test_only_the_own_token(llama_checkpoint: tuple[Any, Path]) -> None:
    """The first output that a stream yields has all of them."""
    theirs, folder = llama_checkpoint
    engine = Engine(LlmExecutor.from_pretrained(folder, num_blocks=64), eos_token_ids=())
    for output in engine.stream(PROMPTS[3], SamplingParams(max_tokens=2, prompt_logprobs=0, logprobs=1)):
        check(output, theirs, 0)
    check_empty(engine)


def test_executors_of_one_sequence_at_a_time() -> None:
    with pytest.raises(UnsupportedError, match="prompt_logprobs"):
        Engine(MinimalExecutor()).add_request([1, 2], SamplingParams(prompt_logprobs=1))
