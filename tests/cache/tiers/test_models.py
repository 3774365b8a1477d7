"""Models whose prompts take turns in a small pool, with a tier: the tokens of a model without one."""

from pathlib import Path
from typing import Any

import pytest

from paged import Engine, EngineConfig, LlmExecutor, SamplingParams
from paged.executors.engine.metrics import prometheus_text
from tests.models.edits import copy_with_rolled_weights
from tests.models.families import FAMILIES, PARTS, save_checkpoint, tokens
from tests.models.lora.folders import Adapter

OPTIONS: dict[str, Any] = {"block_size": 4, "num_blocks": 16, "progress": False, "max_loras": 2}
HOST = {"host_cache_bytes": 1 << 20}
GREEDY = SamplingParams(temperature=0, max_tokens=6)
PROMPTS = [tokens(40, seed) for seed in (1, 2, 3)]


def answers(executor: LlmExecutor, adapter: str | None = None) -> list[list[int]]:
    metadata = None if adapter is None else {"lora_adapter": adapter}
    engine = Engine(executor, EngineConfig(), eos_token_ids=())
    outputs = [engine.add_request(prompt, GREEDY, metadata=metadata) for prompt in PROMPTS]
    while engine.num_unfinished:
        engine.step()
    return [output.outputs[0].token_ids for output in outputs]


def load(folder: Path, **options: Any) -> LlmExecutor:
    return LlmExecutor.from_pretrained(folder, **OPTIONS | options)


def num_loaded(executor: LlmExecutor) -> int:
    assert executor.kv_manager is not None
    return executor.kv_manager.stats().host_loaded_blocks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiers") / "old"
    save_checkpoint(FAMILIES["llama"], path)
    return path


@pytest.fixture(scope="module")
def other_folder(folder: Path) -> Path:
    """The same model with the rows of its weights in another order."""
    return copy_with_rolled_weights(folder, folder.parent / "new")


def test_new_weights_find_nothing_old(folder: Path, other_folder: Path) -> None:
    expected, expected_new = answers(load(folder)), answers(load(other_folder))
    assert expected != expected_new
    running = load(folder, **HOST)
    assert answers(running) == answers(running) == expected
    loaded = num_loaded(running)
    assert loaded > 0
    running.update_weights(other_folder)
    assert answers(running) == expected_new
    assert num_loaded(running) == loaded
    assert answers(running) == expected_new
    running.sleep(1)
    running.wake()
    loaded = num_loaded(running)
    assert answers(running) == expected_new
    assert num_loaded(running) == loaded


def test_an_adapter_of_the_same_name_finds_nothing_old(folder: Path, tmp_path: Path) -> None:
    """Its blocks were on the host alone when it was unloaded."""
    running, fresh = load(folder, **HOST), load(folder)
    expected = []
    for seed in (1, 2):
        path = Adapter(("q_proj", "v_proj", "up_proj"), alpha=32, seed=seed).save(tmp_path / str(seed), folder)
        for executor in (running, fresh):
            executor.load_lora("x", path)
        expected.append(answers(fresh, "x"))
        assert answers(running, "x") == answers(running, "x") == expected[-1]
        assert running.kv_manager is not None
        running.kv_manager.evict(16)
        for executor in (running, fresh):
            executor.unload_lora("x")
    assert expected[0] != expected[1]
    assert num_loaded(running) > 0


def test_a_restart_begins_with_hits(folder: Path, other_folder: Path, tmp_path: Path) -> None:
    """Of the same weights alone, and not after an update."""
    expected, expected_new = answers(load(folder)), answers(load(other_folder))
    options = {**HOST, "cache_folder": tmp_path, "cache_folder_bytes": 1 << 24}
    num_cached = []
    for path, is_updated in ((folder, False), (folder, False), (other_folder, False), (folder, True)):
        executor = load(path, **options)
        if is_updated:
            executor.update_weights(other_folder)
        assert executor.kv_manager is not None
        assert answers(executor) == (expected if path == folder and not is_updated else expected_new)
        num_cached.append(executor.kv_manager.stats().prefix_hit_tokens)
        executor.shutdown()
    assert num_cached == [0, 3 * 39, 0, 0]


KINDS = {"windows": "gemma3", "latents": "deepseek_v3", "states": "qwen3_next", "convolutions": "lfm2_moe"}
KINDS |= {"states alone": "rwkv7", "indexer keys": "deepseek_v32", "pooled keys": "glm5_next"}


@pytest.mark.parametrize(
    "kind", ["states", *(pytest.param(kind, marks=pytest.mark.thorough) for kind in KINDS if kind != "states")]
)
def test_models_of_every_kind_of_cache(kind: str, tmp_path: Path) -> None:
    """From host memory, and from files after a restart."""
    save_checkpoint((PARTS | FAMILIES)[KINDS[kind]], tmp_path)
    expected = answers(load(tmp_path))
    for num_runs in (3, 1):
        executor = load(tmp_path, host_cache_bytes=1 << 24, cache_folder=tmp_path / "cache")
        for _ in range(num_runs):
            assert answers(executor) == expected
        assert executor.kv_manager is not None
        stats = executor.kv_manager.stats()
        assert stats.host_hit_tokens > 0
        assert (stats.host_loaded_states > 0) == (executor.kv_manager.config.recurrent is not None)
        assert stats.folder_faults == 0
        executor.shutdown()


def test_what_came_from_the_host_is_counted(folder: Path) -> None:
    pytest.importorskip("prometheus_client")
    executor = load(folder, **HOST)
    answers(executor)
    engine = Engine(executor, EngineConfig(), eos_token_ids=())
    first = engine.generate(PROMPTS[:1], GREEDY, progress=False)[0]
    again = engine.generate(PROMPTS[:1], GREEDY, progress=False)[0]
    assert first.num_loaded_tokens == first.num_cached_tokens == 39
    assert (again.num_loaded_tokens, again.num_cached_tokens) == (0, 39)
    page = prometheus_text(engine.metrics, engine.status())
    assert executor.kv_manager is not None
    tiers = executor.kv_manager.stats().of_tiers()
    assert tiers["host_hit_tokens"] == 39
    for name, value in tiers.items():
        assert f"paged_cache_{name} {float(value)}" in page
