"""Adapters through executors, engines and their fronts for coroutines: they come and go beside sequences that run."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import torch

from paged import AsyncEngine, AsyncModelExecutor, Engine, EngineConfig, LlmExecutor, RequestOutput, SamplingParams
from paged.errors import CheckpointError, InvalidInputError, UnsupportedError
from paged.executors.model_executor import ExecutorShutDownError
from paged.step.batch import UnifiedBatchItem
from tests.executors.engine_cases import StepGate
from tests.executors.oracle import forward, item, make_executor, prompt, step
from tests.executors.parrot import Parrot, other_executor
from tests.models.families import FAMILIES, assert_same_logits, save_checkpoint, tokens
from tests.models.lora.folders import Adapter

FRENCH = Adapter(("q_proj", "k_proj", "gate_proj", "down_proj"), seed=1)
NAMED = {"lora_adapter": "french"}
IDS = tokens(12)

Load = Callable[..., LlmExecutor]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The base model, an adapter of it, and both in one."""
    root = tmp_path_factory.mktemp("lora")
    save_checkpoint(FAMILIES["llama"], root / "base")
    adapter = FRENCH.save(root / "french", root / "base")
    return {"base": root / "base", "french": adapter, "merged": FRENCH.merge(adapter, root / "base", root / "merged")}


@pytest.fixture
def load(folders: dict[str, Path], device: torch.device) -> Load:
    options = {"device": device, "num_blocks": 16, "block_size": 8}
    return lambda name, **more: LlmExecutor.from_pretrained(folders[name], **options, **more)


@pytest.fixture
def executor(load: Load) -> LlmExecutor:
    return load("base", max_loras=2)


def named(seq_id: str, ids: list[int]) -> UnifiedBatchItem:
    return item(seq_id, ids, metadata=NAMED)


def generated(executor: LlmExecutor, params: SamplingParams) -> list[int]:
    """Tokens of an engine of its own."""
    return Engine(executor).generate([IDS], params, progress=False)[0].outputs[0].token_ids


def test_items_name_their_adapter(executor: LlmExecutor, load: Load, folders: dict[str, Path]) -> None:
    """Later items of the sequence need not, a row without it is the base model's, and others come and go meanwhile."""
    executor.load_lora("french", folders["french"])
    merged = load("merged")
    assert executor.capabilities().supports_lora
    base = executor.prefill(prompt(IDS)).logits[0, 0]
    french, plain = forward(executor, named("a", IDS[:8]), item("b", IDS))
    assert executor.lora_metrics_snapshot()["adapters"]["french"]["tokens"] == 8
    assert_same_logits(french, merged.prefill(prompt(IDS[:8])).logits[0, 0].cpu())
    assert_same_logits(plain, base.cpu())
    executor.load_lora("other", folders["french"])
    assert executor.list_loras() == ("french", "other")
    executor.unload_lora("other")
    with pytest.raises(InvalidInputError, match="'french': 1 sequences use it"):
        executor.unload_lora("french")
    (french,) = forward(executor, item("a", IDS[8:], 8))
    assert_same_logits(french, merged.prefill(prompt(IDS)).logits[0, 0].cpu())
    handle = executor.model.kv_manager.get_handle("a")
    verified = executor.forward_verify([step(handle, token) for token in IDS[:3]])
    assert_same_logits(verified[-1].logits[0], merged.prefill(prompt(IDS + IDS[:3])).logits[0, 0].cpu())
    executor.release_cache("a")
    executor.unload_lora("french")
    assert executor.list_loras() == ()


def test_errors(executor: LlmExecutor, folders: dict[str, Path]) -> None:
    """A batch that fails leaves no sequence."""
    executor.load_lora("french", folders["french"])
    with pytest.raises(InvalidInputError, match="'poetry': not loaded"):
        forward(executor, named("a", IDS), item("b", IDS, metadata={"lora_adapter": "poetry"}))
    assert executor.model.kv_manager.handles() == ()
    with pytest.raises(CheckpointError, match=r"adapter_config\.json: missing"):
        executor.load_lora("other", folders["base"])
    other = other_executor(Parrot())
    assert other.list_loras() == ()
    with pytest.raises(UnsupportedError, match="Parrot takes no adapters"):
        other.load_lora("french", folders["french"])
    executor.shutdown()
    with pytest.raises(ExecutorShutDownError):
        executor.load_lora("french", folders["french"])


def test_requests_of_an_engine(executor: LlmExecutor, load: Load, folders: dict[str, Path]) -> None:
    """Chunks, forks, cached prefixes and decodes of an adapter's requests beside the base model's, with an adapter that
    is replaced by another of the same name between them."""
    executor.load_lora("french", folders["french"])
    params = SamplingParams(temperature=0.0, max_tokens=4, n=2)
    engine = Engine(executor, EngineConfig(chunk_size=5))

    def run() -> list[list[int]]:
        outputs = engine.generate([IDS] * 2, params, adapter=["french", None], progress=False)
        assert all(output.outputs[0].token_ids == output.outputs[1].token_ids for output in outputs)
        return [list(output.outputs[0].token_ids) for output in outputs]

    expected = [generated(load(name), params) for name in ("merged", "base")]
    assert expected[0] != expected[1]
    refused = (
        ("nothing reads the key 'lora'", {"metadata": {"lora": "french"}}),
        ("expected one of them", {"metadata": NAMED, "adapter": "french"}),
        ("'poetry' is not loaded", {"adapter": "poetry"}),
    )
    for message, options in refused:
        with pytest.raises(InvalidInputError, match=message):
            engine.add_request(IDS, params, **options)
    with pytest.raises(InvalidInputError, match="adapter: 1, expected one for each of 2 prompts"):
        engine.generate([IDS] * 2, params, adapter=["french"], progress=False)
    assert run() == run() == expected
    assert executor.kv_manager.stats().prefix_hits >= 2
    executor.unload_lora("french")
    nothing = Adapter(("q_proj",), alpha=1e-9, seed=1).save(folders["base"].parent / "nothing", folders["base"])
    executor.load_lora("french", nothing)
    assert run() == [expected[1]] * 2


def test_async_engine_loads_while_requests_stream(
    executor: LlmExecutor, load: Load, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that began before goes on as if alone; unloading waits for those that run, and for those that queue."""
    parser = pytest.importorskip("prometheus_client.parser")
    params = SamplingParams(temperature=0.0, max_tokens=6)
    long = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    expected, base_tokens = generated(load("merged"), params), generated(load("base"), long)
    gate = StepGate(monkeypatch, executor)

    async def rest(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
        return [output async for output in stream]

    async def samples(engine: AsyncEngine) -> dict[tuple[str, ...], float]:
        families = parser.text_string_to_metric_families(await engine.prometheus_text())
        return {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}

    async def scenario() -> None:
        engine = AsyncEngine(Engine(executor, EngineConfig(max_num_seqs=2)))
        assert ("paged_lora_adapter_tokens_total", "french") not in await samples(engine)
        first = engine.generate(IDS, long)
        await gate.during(anext(first))
        await gate.during(engine.load_lora("french", folders["french"]))
        assert await gate.during(engine.list_loras()) == ("french",)
        streams = [engine.generate(IDS, params, metadata=NAMED, request_id=name) for name in ("runs", "queues")]
        outputs: list[list[RequestOutput]] = [[await gate.during(anext(streams[0]))], []]
        queued = asyncio.create_task(anext(streams[1]))
        await asyncio.sleep(0)
        with pytest.raises(InvalidInputError, match="'french': 2 requests name it, first 'runs'"):
            await gate.during(engine.unload_lora("french"))
        outputs[0] += await gate.during(rest(streams[0]))
        with pytest.raises(InvalidInputError, match="'french': 1 requests name it, first 'queues'"):
            await gate.during(engine.unload_lora("french"))
        gate.open()
        outputs[1] = [await queued, *await rest(streams[1])]
        assert [one[-1].outputs[0].token_ids for one in outputs] == [expected] * 2

        status, page = await engine.status(), await samples(engine)
        # The second found a block of the first one's prompt, and the last token of an output is never run.
        cached = sum(one[-1].num_cached_tokens for one in outputs)
        assert cached == 8
        assert page["paged_lora_adapter_tokens_total", "french"] == 2 * (len(IDS) + params.max_tokens - 1) - cached
        assert page["paged_lora_adapter_rank", "french"] == status.lora["adapters"]["french"]["rank"]
        assert page["paged_lora_free_slots",] == 1
        await engine.unload_lora("french")
        assert await engine.list_loras() == ()
        assert ("paged_lora_adapter_rank", "french") not in await samples(engine)
        assert (await rest(first))[-1].outputs[0].token_ids == base_tokens
        await engine.shutdown()

    asyncio.run(scenario())


def test_executors_without_adapters_as_coroutines(device: torch.device) -> None:
    oracle = make_executor(device)

    async def scenario() -> None:
        engine = AsyncEngine(Engine(oracle))
        for front in (AsyncModelExecutor(oracle), engine):
            for call in (front.load_lora("french", "folder"), front.unload_lora("french"), front.list_loras()):
                with pytest.raises(UnsupportedError, match="PagedAttentionExecutor takes no adapters"):
                    await call
        assert "lora" not in await engine.prometheus_text()
        await engine.shutdown()

    asyncio.run(scenario())
