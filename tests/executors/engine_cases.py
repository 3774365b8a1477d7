"""Engines over the bundled checkpoint, tiny random ones and the oracle, and what they must answer."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import pytest
import torch
from tokenizers import Tokenizer

from paged import Engine, EngineConfig, LlmExecutor, RequestOutput, SamplingParams
from paged.executors.closed_form import expected_logits
from paged.executors.model_executor import ModelExecutor
from paged.models.loading.hf_config import read_eos_token_ids
from paged.models.recall.task import RecallPrompt, sample_prompts
from paged.serving.command_line.cli import RECALL
from paged.step.step import Step
from tests.deadline import HANG_S
from tests.executors.oracle import make_executor

T = TypeVar("T")
TOKENIZER = Tokenizer.from_file(str(RECALL / "tokenizer.json"))
EOS = read_eos_token_ids(RECALL)
PROMPTS = [[(7 * i + j * j) % 11 for j in range(3 + 5 * i)] for i in range(5)]
FIVE, GREEDY, TEN = (SamplingParams(temperature=0, max_tokens=count) for count in (5, 8, 10))


def encode(prompts: Sequence[RecallPrompt]) -> list[list[int]]:
    """Token ids of recall prompts."""
    return [TOKENIZER.encode(prompt.text).ids for prompt in prompts]


def recall_prompts(count: int = 6, max_tokens: int = 120, seed: int = 7) -> list[RecallPrompt]:
    """Prompts of ragged length that the checkpoint answers right."""
    return sample_prompts(seed, count, max_tokens=max_tokens)


def recall_engine(num_blocks: int = 64, *, options: dict[str, Any] | None = None, **config: Any) -> Engine:
    """An engine on the bundled checkpoint; `options` go to the executor, the rest to the engine's configuration."""
    executor = LlmExecutor.from_pretrained(RECALL, num_blocks=num_blocks, **(options or {}))
    return Engine(executor, EngineConfig(**config), tokenizer=TOKENIZER, eos_token_ids=EOS, seed=5)


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """The tokens of each first completion, which must all have ended well."""
    assert [output.error for output in outputs] == [None] * len(outputs)
    assert all(one.finish_reason in ("stop", "length") for output in outputs for one in output.outputs)
    return [output.outputs[0].token_ids for output in outputs]


def run(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    """Tokens of the first completion of every prompt, after seeing that nothing is left behind."""
    tokens = tokens_of(engine.generate(prompts, params, progress=False))
    check_empty(engine)
    return tokens


def check_empty(engine: Engine) -> None:
    """No request and no block is held."""
    status = engine.status()
    assert (engine.num_unfinished, status.waiting, status.prefilling, status.decoding, status.swapped) == (0,) * 5
    check_pool_empty(engine.executor)


def check_pool_empty(executor: ModelExecutor) -> None:
    """Every block is free, on the device and in host memory, and every reference accounted for."""
    assert executor.kv_manager is not None
    stats = executor.kv_manager.stats()
    assert (stats.used_blocks, stats.num_sequences) == (stats.pinned_blocks, 0)
    assert stats.swap_blocks_free == executor.kv_manager.config.num_swap_blocks
    executor.kv_manager.check_integrity()


def expected_tokens(prompt: list[int], count: int) -> list[int]:
    """The oracle's greedy answer, from its formula."""
    config, tokens = make_executor(torch.device("cpu"), num_blocks=1).config, list(prompt)
    for _ in range(count):
        tokens.append(int(expected_logits(config, tokens).float().argmax()))
    return tokens[len(prompt) :]


def spy(monkeypatch: pytest.MonkeyPatch, executor: Any, before: Callable[[Step], None]) -> None:
    """Calls `before` with every step that the executor runs."""
    forward = executor._run

    def run(step: Step) -> Any:
        before(step)
        return forward(step)

    monkeypatch.setattr(executor, "_run", run)


class StepGate:
    """Holds the forwards of an `AsyncEngine`, whose worker else runs on while the event loop's thread has no turn: what
    comes between two steps of a test would depend on how busy the machine is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, executor: Any) -> None:
        self._is_open = False
        self._is_waiting, self._permits = threading.Event(), threading.Semaphore(0)
        spy(monkeypatch, executor, self._wait)

    def _wait(self, _: Step) -> None:
        if not self._is_open:
            self._is_waiting.set()
            assert self._permits.acquire(timeout=HANG_S)

    async def during(self, awaitable: Awaitable[T]) -> T:
        """Wait for it, which has its first turn before a forward runs; then one runs for every turn of the loop."""
        task = asyncio.ensure_future(awaitable)
        while True:
            await asyncio.sleep(0.001)
            if task.done():
                return await task
            if self._is_waiting.is_set():
                self._is_waiting.clear()
                self._permits.release()

    def open(self) -> None:
        """Hold no forward any more."""
        self._is_open = True
        self._permits.release()


def run_to_end(engine: Engine) -> None:
    """Step until nothing is left, and see that nothing is left behind."""
    while engine.num_unfinished:
        engine.step()
    check_empty(engine)
