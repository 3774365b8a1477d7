"""Engines over the bundled checkpoint, tiny random ones and the oracle, and what they must answer."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from paged import Engine, EngineConfig, LlmExecutor, RequestOutput, SamplingParams, UnifiedBatch
from paged.executors.command_line.cli import RECALL
from paged.executors.command_line.closed_form import expected_logits
from paged.executors.model_executor import ModelExecutor
from paged.models.loading.hf_config import read_eos_token_ids
from paged.models.recall.task import RecallPrompt, sample_prompts
from tests.executors.oracle import make_executor

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
    assert (stats.used_blocks, stats.num_sequences) == (0, 0)
    assert stats.swap_blocks_free == executor.kv_manager.config.num_swap_blocks
    executor.kv_manager.check_integrity()


def expected_tokens(prompt: list[int], count: int) -> list[int]:
    """The oracle's greedy answer, from its formula."""
    config, tokens = make_executor(torch.device("cpu"), num_blocks=1).config, list(prompt)
    for _ in range(count):
        tokens.append(int(expected_logits(config, tokens).float().argmax()))
    return tokens[len(prompt) :]


def spy(monkeypatch: pytest.MonkeyPatch, executor: Any, before: Callable[[UnifiedBatch], None]) -> None:
    """Calls `before` with every batch that goes to the executor."""
    forward = executor.unified_decode

    def unified_decode(batch: UnifiedBatch) -> Any:
        before(batch)
        return forward(batch)

    monkeypatch.setattr(executor, "unified_decode", unified_decode)


def run_to_end(engine: Engine) -> None:
    """Step until nothing is left, and see that nothing is left behind."""
    while engine.num_unfinished:
        engine.step()
    check_empty(engine)
