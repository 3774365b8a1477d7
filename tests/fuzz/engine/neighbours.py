"""An engine with neighbours: requests whose tokens are known from a run of their own, to be run beside odd ones."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from typing import Any

import torch

from paged import AsyncEngine, Engine, EngineConfig, PagedAttentionExecutor, RequestOutput, SamplingParams
from tests.deadline import HANG_S
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


def small_engine(*, tokenizer: Any = None, proposer: Any = None, **config: Any) -> Engine:
    """An engine on the oracle, which works as on a GPU: one step ahead."""
    config = {"token_budget": 64, "overlap": True} | config
    return Engine(small_executor(), EngineConfig(**config), tokenizer=tokenizer or Letters(), proposer=proposer, seed=0)


def small_executor() -> PagedAttentionExecutor:
    """The oracle with one layer."""
    return make_executor(
        torch.device("cpu"), num_blocks=48, num_swap_blocks=2, num_layers=1, num_heads=2, num_kv_heads=1
    )


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


def check_neighbours(engine: Engine, outputs: Sequence[RequestOutput], *, drafts: bool = False) -> None:
    """At the end they have the tokens that they get alone, and nothing is held.

    drafts: whether some were drafted: these are accepted by other chances, so sampled tokens differ from plain ones.
    """
    run_to_end(engine)
    for index, output in enumerate(outputs):
        assert output.error is None
        assert [one.finish_reason for one in output.outputs] == ["length"] * len(output.outputs)
        assert (drafts and index > 0) or [one.token_ids for one in output.outputs] == alone(index)
    check_empty(engine)


@cache
def alone(index: int) -> list[list[int]]:
    """What a neighbour gets in a run of its own, step by step."""
    engine = small_engine(overlap=False)
    prompt, params = NEIGHBOURS[index]
    output = engine.add_request(prompt, params)
    run_to_end(engine)
    return [one.token_ids for one in output.outputs]


def stream_beside(engine: Engine, scenario: Callable[[AsyncEngine], Awaitable[None]]) -> None:
    """Run the scenario while the neighbours' tokens are streamed: they are those that they get alone."""

    async def main() -> None:
        async with AsyncEngine(engine) as server:
            neighbours = [asyncio.create_task(tokens_of(server, index)) for index in range(len(NEIGHBOURS))]
            await scenario(server)
            assert [await asyncio.wait_for(task, HANG_S) for task in neighbours] == list(map(alone, range(3)))

    asyncio.run(main())
    check_empty(engine)


async def tokens_of(server: AsyncEngine, index: int) -> list[list[int]]:
    """A neighbour's tokens, put together from what came new each time."""
    prompt, params = NEIGHBOURS[index]
    tokens: list[list[int]] = [[] for _ in range(params.n)]
    async for output in server.generate(prompt, params, deltas=True):
        for one in output.outputs:
            tokens[one.index] += one.token_ids
    return tokens


def check_ended(output: RequestOutput) -> None:
    """It ended once, with a reason, and what it has fits that."""
    assert output.finished
    for one in output.outputs:
        assert one.finish_reason in ("stop", "length", "error", "timeout")
        assert all(type(token) is int and token >= 0 for token in one.token_ids)
        assert isinstance(one.text, str)
