"""HandleRunner: executors without a cache manager or a unified forward."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paged import Engine, EngineConfig, SamplingParams
from tests.executors.engine_cases import GREEDY
from tests.executors.minimal_executor import MinimalExecutor
from tests.executors.parrot import Parrot, UnsupportedParrot, other_executor, parrot_logits


def test_any_executor_will_do() -> None:
    """One with the five required calls, and another's model behind LlmExecutor: no forks, no prefixes, same answers."""
    prompts = [[1, 2, 3], [4], [5, 6]]

    def parrot_tokens(prompt: list[int]) -> list[int]:
        tokens = list(prompt)
        for _ in range(4):
            tokens.append(int(parrot_logits(tokens).argmax()))
        return tokens[len(prompt) :]

    params = SamplingParams(temperature=0, max_tokens=4, n=2)
    for executor in (MinimalExecutor(), other_executor(Parrot()), other_executor(UnsupportedParrot())):
        engine = Engine(executor, EngineConfig(chunk_size=2))
        for prompt, output in zip(prompts, engine.generate(prompts, params, progress=False), strict=True):
            assert output.error is None
            assert [one.token_ids for one in output.outputs] == [parrot_tokens(prompt)] * 2
        assert engine.num_unfinished == 0
        caches = executor.caches if isinstance(executor, MinimalExecutor) else executor.model.caches  # type: ignore[attr-defined]
        assert caches == {}


def test_a_minimal_executor_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = MinimalExecutor()
    outputs = Engine(executor).generate([[1, 2], [60], [3]], replace(GREEDY, max_tokens=3), progress=False)
    assert [output.error for output in outputs] == [None, "RuntimeError: 60 breaks it", None]
    assert executor.caches == {}
