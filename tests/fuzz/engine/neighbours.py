"""An engine with neighbours: requests whose tokens are known from a run of their own, to be run beside odd ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from paged import Engine, EngineConfig, PagedAttentionExecutor, RequestOutput, SamplingParams
from tests.executors.engine_cases import check_empty
from tests.executors.oracle import make_executor

NEIGHBOURS: tuple[tuple[tuple[int, ...], SamplingParams], ...] = (
    ((1, 2, 3), SamplingParams(temperature=0, max_tokens=12)),
    ((7,) * 20, SamplingParams(n=2, temperature=0.9, top_p=0.9, seed=3, max_tokens=9)),
    ((5, 5, 9), SamplingParams(top_k=20, seed=5, max_tokens=10, frequency_penalty=0.5, logprobs=2)),
)
# Far more than any request here takes: 100 tokens, one a step, and some steps in the queue.
MOST_STEPS = 400


class Letters:
    """A tokenizer whose ids are code points."""

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))


def small_engine(**config: Any) -> Engine:
    """An engine on the oracle; `proposer` goes to the engine, the rest to its configuration."""
    proposer = config.pop("proposer", None)
    config = {"token_budget": 64} | config
    return Engine(small_executor(), EngineConfig(**config), tokenizer=Letters(), proposer=proposer, seed=0)


def small_executor() -> PagedAttentionExecutor:
    """The oracle with one layer."""
    return make_executor(torch.device("cpu"), num_blocks=48, num_layers=1, num_heads=2, num_kv_heads=1)


def add_neighbours(engine: Engine) -> list[RequestOutput]:
    """The neighbours, queued."""
    return [engine.add_request(prompt, params) for prompt, params in NEIGHBOURS]


def run_to_end(engine: Engine) -> None:
    """Steps, of which there must be an end."""
    for _ in range(MOST_STEPS):
        if not engine.num_unfinished:
            return
        engine.step()
    raise AssertionError(f"{engine.status()} after {MOST_STEPS} steps")


def check_neighbours(outputs: Sequence[RequestOutput]) -> None:
    """They got the tokens that they get alone."""
    for index, output in enumerate(outputs):
        assert output.error is None
        assert [one.token_ids for one in output.outputs] == alone(index)
        assert [one.finish_reason for one in output.outputs] == ["length"] * len(output.outputs)


@cache
def alone(index: int) -> list[list[int]]:
    """What a neighbour gets in a run of its own."""
    engine = small_engine()
    prompt, params = NEIGHBOURS[index]
    output = engine.add_request(prompt, params)
    run_to_end(engine)
    check_empty(engine)
    return [one.token_ids for one in output.outputs]
