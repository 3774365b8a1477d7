"""Adapters through the fronts for coroutines: they come and go between the steps of requests that run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from paged import (
    AsyncEngine,
    AsyncModelExecutor,
    Engine,
    EngineConfig,
    InvalidInputError,
    LlmExecutor,
    RequestOutput,
    SamplingParams,
    UnifiedBatchItem,
    UnsupportedError,
)
from tests.executors.oracle import batch, make_executor
from tests.executors.test_lora_loader import FRENCH, IDS
from tests.models.families import FAMILIES, save_checkpoint

parser = pytest.importorskip("prometheus_client.parser")

PARAMS = SamplingParams(temperature=0.0, max_tokens=6)
NAMED = {"lora_adapter": "french"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora") / "base"
    save_checkpoint(FAMILIES["llama"], folder)
    return folder


@pytest.fixture(scope="module")
def french(base: Path) -> Path:
    return FRENCH.save(base.parent / "french", base)


@pytest.fixture
def executor(base: Path, device: torch.device) -> LlmExecutor:
    return LlmExecutor.from_pretrained(base, device=device, num_blocks=16, block_size=8, max_loras=2)


def samples(page: str) -> dict[tuple[str, ...], float]:
    families = parser.text_string_to_metric_families(page)
    return {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}


def test_engine_loads_while_requests_stream(executor: LlmExecutor, base: Path, french: Path) -> None:
    """A stream that began before goes on as if alone; unloading waits for those that run, and for those that queue."""
    merged = LlmExecutor.from_pretrained(FRENCH.merge(french, base, base.parent / "merged"), num_blocks=16)
    (expected,) = Engine(merged).generate([IDS], PARAMS, progress=False)
    long = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    alone = LlmExecutor.from_pretrained(base, device=executor.info().device, num_blocks=16, block_size=8)
    (base_tokens,) = Engine(alone).generate([IDS], long, progress=False)

    async def scenario() -> None:
        engine = AsyncEngine(Engine(executor, EngineConfig(max_num_seqs=2)))
        assert ("paged_lora_adapter_tokens_total", "french") not in samples(await engine.prometheus_text())
        first = engine.generate(IDS, long)
        await anext(first)
        await engine.load_lora("french", french)
        assert await engine.list_loras() == ("french",)
        named = [engine.generate(IDS, PARAMS, metadata=NAMED, request_id=name) for name in ("runs", "queues")]
        outputs: list[list[RequestOutput]] = [[await anext(named[0])], []]
        queued = asyncio.create_task(anext(named[1]))
        await asyncio.sleep(0)
        with pytest.raises(InvalidInputError, match="'french': 2 requests name it, first 'runs'"):
            await engine.unload_lora("french")
        outputs[0] += [output async for output in named[0]]
        with pytest.raises(InvalidInputError, match="'french': 1 requests name it, first 'queues'"):
            await engine.unload_lora("french")
        outputs[1] = [await queued] + [output async for output in named[1]]
        assert [one[-1].outputs[0].token_ids for one in outputs] == [expected.outputs[0].token_ids] * 2

        status, page = await engine.status(), samples(await engine.prometheus_text())
        assert status.lora is not None
        # The second found a block of the first one's prompt, and the last token of an output is never run.
        cached = sum(one[-1].num_cached_tokens for one in outputs)
        assert cached == 8
        num_tokens = 2 * (len(IDS) + PARAMS.max_tokens - 1) - cached
        assert page["paged_lora_adapter_tokens_total", "french"] == num_tokens
        assert page["paged_lora_adapter_rank", "french"] == status.lora["adapters"]["french"]["rank"]
        assert page["paged_lora_free_slots",] == 1
        await engine.unload_lora("french")
        assert await engine.list_loras() == ()
        assert ("paged_lora_adapter_rank", "french") not in samples(await engine.prometheus_text())
        assert [output async for output in first][-1].outputs[0].token_ids == base_tokens.outputs[0].token_ids
        await engine.shutdown()

    asyncio.run(scenario())


def test_executor_as_coroutines(executor: LlmExecutor, french: Path) -> None:
    async def scenario() -> None:
        front = AsyncModelExecutor(executor)
        await front.load_lora("french", french)
        assert await front.list_loras() == ("french",)
        await front.unified_decode(batch(UnifiedBatchItem("a", IDS, metadata=NAMED)))
        with pytest.raises(InvalidInputError, match="1 sequences hold it"):
            await front.unload_lora("french")
        await front.release_cache("a")
        await front.unload_lora("french")
        assert await front.list_loras() == ()

    asyncio.run(scenario())


def test_executors_without_adapters_are_named(device: torch.device) -> None:
    oracle = make_executor(device)

    async def scenario() -> None:
        engine = AsyncEngine(Engine(oracle))
        for front in (AsyncModelExecutor(oracle), engine):
            for call in (front.load_lora("french", "folder"), front.unload_lora("french"), front.list_loras()):
                with pytest.raises(UnsupportedError, match="PagedAttentionExecutor takes no adapters"):
                    await call
        assert (await engine.status()).lora is None
        assert "lora" not in await engine.prometheus_text()
        await engine.shutdown()

    asyncio.run(scenario())
