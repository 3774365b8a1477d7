"""Embeddings: pooled hidden states of transformers' model, and nothing left in the cache."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from paged import (
    AsyncEngine,
    Engine,
    EngineConfig,
    InvalidInputError,
    LlmExecutor,
    OutOfBlocksError,
    PagedError,
    QueueFullError,
    SamplingParams,
    UnifiedBatch,
    UnifiedBatchItem,
    UnsupportedError,
)
from paged.step.step import Step
from tests.executors.engine_cases import StepGate, check_empty, check_pool_empty, spy
from tests.executors.oracle import make_executor
from tests.models.families import FAMILIES, save_checkpoint, tokens
from tests.tolerance import assert_within

PROMPTS = [tokens(count, seed=count) for count in (5, 1, 30, 17, 30, 2)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """transformers' model, and its folder."""
    folder = tmp_path_factory.mktemp("mistral")
    return save_checkpoint(FAMILIES["mistral"], folder), folder


def load(folder: Path, **options: Any) -> LlmExecutor:
    return LlmExecutor.from_pretrained(folder, **{"num_blocks": 64, "block_size": 4} | options)


def expected(theirs: Any, pooling: str) -> torch.Tensor:
    """By transformers, scaled to length 1."""
    with torch.no_grad():
        states = [theirs.model(torch.tensor([prompt])).last_hidden_state[0] for prompt in PROMPTS]
    rows = [one[-1] if pooling == "last" else one.mean(0) for one in states]
    return functional.normalize(torch.stack(rows), dim=-1)


@pytest.mark.parametrize("token_budget", [2048, 7])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_same_as_transformers(checkpoint: tuple[Any, Path], pooling: Any, token_budget: int) -> None:
    """In one forward, and in chunks; also over CUDA graphs' counterparts, which compute logits."""
    theirs, folder = checkpoint
    executor = load(folder, cuda_graphs=(4, 16))
    executor.warmup()
    engine = Engine(executor, EngineConfig(token_budget=token_budget))
    found = engine.embed(PROMPTS, pooling=pooling)
    assert_within(found, expected(theirs, pooling), 1e-5)
    plain = engine.embed(PROMPTS[2:3], pooling=pooling, normalize=False)
    assert abs(float(plain.norm()) - 1) > 0.1
    assert_within(functional.normalize(plain, dim=-1), found[2:3], 1e-5)
    check_empty(engine)
    assert not executor.kv_manager.cached_blocks(), "nothing is published"
    assert engine.embed([]).shape == (0, 64)


def test_beside_requests_in_a_full_cache(checkpoint: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes fewer prompts at once, then preempts; requests lose nothing and are reported."""
    theirs, folder = checkpoint
    params = SamplingParams(temperature=0, max_tokens=20)
    answers = [
        output.outputs[0].token_ids
        for output in Engine(load(folder), eos_token_ids=()).generate(PROMPTS, params, progress=False)
    ]
    engine = Engine(load(folder, num_blocks=22), EngineConfig(overlap=True, admission_tokens=0), eos_token_ids=())
    gate = StepGate(monkeypatch, engine.executor)

    async def both() -> torch.Tensor:
        async with AsyncEngine(engine) as server:
            streams = [server.generate(prompt, params) for prompt in PROMPTS]
            begun = [await gate.during(anext(stream)) for stream in streams[:2]]
            ends = [asyncio.ensure_future(_last(stream)) for stream in streams]
            pooled = await gate.during(server.embed(PROMPTS))
            gate.open()
            assert [output.outputs[0].token_ids for output in await asyncio.gather(*ends)] == answers
            assert not any(output.finished for output in begun)
            return pooled

    assert_within(asyncio.run(both()), expected(theirs, "last"), 1e-5)
    assert engine.metrics.preempted
    check_empty(engine)
    holder = engine.executor.kv_manager.allocate("holder", 60)
    with pytest.raises(OutOfBlocksError):
        engine.embed(PROMPTS)
    engine.executor.kv_manager.free(holder)
    spy(monkeypatch, engine.executor, _fail_later)
    with pytest.raises(RuntimeError, match="later"):
        Engine(engine.executor, EngineConfig(token_budget=8)).embed(PROMPTS)
    check_pool_empty(engine.executor)


def test_many_at_once_delay_a_step_by_one_forward(
    checkpoint: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as a request runs, no two forwards of embeddings come without a step between; all are right."""
    theirs, folder = checkpoint
    engine = Engine(load(folder), EngineConfig(token_budget=8, max_waiting=60), eos_token_ids=())
    events: list[str] = []
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: (events.append("step"), step())[1])

    def note(step: Step) -> None:
        if step.returns_hidden:
            events.append("embed")

    spy(monkeypatch, engine.executor, note)

    async def run() -> None:
        async with AsyncEngine(engine) as server:
            stream = server.generate(PROMPTS[0], SamplingParams(max_tokens=60, ignore_eos=True))
            await anext(stream)
            calls = [asyncio.ensure_future(server.embed(PROMPTS)) for _ in range(12)]
            await asyncio.sleep(0)
            left = asyncio.ensure_future(server.embed(PROMPTS[:1]))
            await asyncio.sleep(0.01)
            left.cancel()
            last = await _last(stream)
            assert len(last.outputs[0].token_ids) == 60
            num_events = len(events)
            results = await asyncio.gather(*calls, return_exceptions=True)
            pooled = [result for result in results if isinstance(result, torch.Tensor)]
            refused = [result for result in results if not isinstance(result, torch.Tensor)]
            for rows in pooled:
                torch.testing.assert_close(rows, expected(theirs, "last"), atol=1e-4, rtol=0)
            assert len(pooled) == 11, "one runs, and 10 of 6 prompts wait"
            assert [type(error) for error in refused] == [QueueFullError]
            meanwhile = "".join(event[0] for event in events[:num_events])
            assert "ses" in meanwhile
            assert "ee" not in meanwhile

    asyncio.run(run())
    check_empty(engine)


async def _last(stream: Any) -> Any:
    return [output async for output in stream][-1]


def _fail_later(step: Step) -> None:
    if step.positions[0]:
        raise RuntimeError("later")


def test_what_cannot_be_embedded(checkpoint: tuple[Any, Path], device: torch.device) -> None:
    engine = Engine(load(checkpoint[1]))
    for prompts, options in [([[]], {}), ([[128]], {}), ("text", {}), (["text"], {}), ([[1]], {"pooling": "max"})]:
        with pytest.raises(InvalidInputError):
            engine.embed(prompts, **options)
    oracle = make_executor(device)
    with pytest.raises(UnsupportedError, match="hidden"):
        Engine(oracle).embed([[1]])
    with pytest.raises(UnsupportedError, match="returns_hidden"):
        oracle.unified_decode(UnifiedBatch([UnifiedBatchItem("a", [1])], returns_hidden=True))


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_hidden_states_that_are_not_finite(checkpoint: tuple[Any, Path], pooling: Any, value: float) -> None:
    """The error names the first prompt whose they are; others can be embedded."""
    executor = load(checkpoint[1])
    engine = Engine(executor, EngineConfig(token_budget=7))
    executor.model.network.embed_tokens.data[100] = value
    good, bad = [one for one in PROMPTS if 100 not in one], [3, 100, 4]
    for place in range(len(good)):
        with pytest.raises(PagedError, match=rf"prompts\[{place}\]: the model's hidden states are not finite"):
            engine.embed([*good[:place], bad, *good[place:]], pooling=pooling)
        check_empty(engine)
    assert engine.embed(good, pooling=pooling).isfinite().all()
