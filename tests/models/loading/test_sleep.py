"""A model that sleeps holds no memory, and afterwards is the one that it was."""

from pathlib import Path
from typing import Any

import pytest
import torch

from paged import Engine, EngineConfig, InvalidInputError, LlmExecutor, ModelAsleepError, SamplingParams
from paged.cache.kv_cache import PagedKvCacheConfig
from paged.cache.tensors import KvCacheTensors
from paged.errors import CheckpointError
from paged.kernels.core.device import has_numba
from paged.models import device_memory
from tests.models.allocations import recorded
from tests.models.families import FAMILIES, save_checkpoint, tokens

OPTIONS: dict[str, Any] = {"block_size": 4, "num_blocks": 24, "num_swap_blocks": 24, "progress": False}
SWAPPING = EngineConfig(admission_tokens=0, preemption="swap")
GREEDY = SamplingParams(temperature=0, max_tokens=8)
PROMPTS = [tokens(9) + tokens(length, length) for length in (3, 9, 14, 22, 22)]
# Graphs in all; blocks and slots of states that are swapped, scales, latents that hold a product of weights.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama_tied", {}),
    "int8 cache": ("llama", {"kv_cache_dtype": torch.int8}),
    "latents": ("deepseek_v3", {}),
    "states": ("qwen3_next", {"num_swap_blocks": 24}),
}


def texts(executor: LlmExecutor) -> list[list[int]]:
    """Some are swapped out on the way, and all begin alike."""
    engine = Engine(executor, SWAPPING, eos_token_ids=())
    found = [one.outputs[0].token_ids for one in engine.generate(PROMPTS, GREEDY, progress=False)]
    assert engine.metrics.preempted["swap"] > 0
    return found


def held_bytes(executor: LlmExecutor) -> tuple[int, int]:
    """Memory of weights that have some, and of the cache."""
    model: Any = executor.model
    weights = [one for one in model.network.parameters() if not one.is_mkldnn]
    return tuple(
        sum(one.untyped_storage().nbytes() for one in tensors)
        for tensors in (weights, model.kv_manager.tensors._on_device())
    )  # type: ignore[return-value]


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_the_same_afterwards(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "_is_on_host", lambda weight: False)  # as on a GPU: level 1 copies weights
    if case == "llama" and has_numba():
        monkeypatch.setenv("PAGED_BACKEND", "numba")  # whose recorded steps hold addresses
    name, options = CASES[case]
    save_checkpoint(FAMILIES[name], tmp_path)
    executor = LlmExecutor.from_pretrained(tmp_path, **OPTIONS | options, cuda_graphs=(2, 4))
    executor.warmup()
    expected, before = texts(executor), held_bytes(executor)
    for level in (1, 2):
        executor.sleep(level)
        assert held_bytes(executor) == (0, 0)
        with pytest.raises(ModelAsleepError, match=f"sleeps at level {level}"):
            executor.model.prefill("a", [1, 2])
        with pytest.raises(InvalidInputError, match="already"):
            executor.sleep()
        if level == 1:
            executor.wake()
        else:
            with pytest.raises(ModelAsleepError, match="call update_weights"):
                executor.wake()
            with pytest.raises(CheckpointError):
                executor.update_weights([])
            assert held_bytes(executor) == (0, 0)
            executor.update_weights(tmp_path)
        assert held_bytes(executor) == before
        replays = executor.status().graph_replays
        assert texts(executor) == expected
        assert executor.status().graph_replays > replays or not executor.model.graphs.are_captured
    executor.wake()  # without effect


def test_blocks_move_in_new_memory(backend: str) -> None:
    """Kernels hold the addresses of all caches."""
    config = PagedKvCacheConfig(
        num_layers=2, num_kv_heads=1, head_dim=8, block_size=4, num_blocks=4, num_swap_blocks=2, dtype=torch.float32
    )
    tensors = KvCacheTensors(config)
    tensors.release()
    elsewhere = [torch.empty_like(tensors.storage) for _ in range(4)]  # so that it is not the same memory
    tensors.restore()
    assert not tensors.storage.any()
    tensors.storage[:, 1] = wanted = torch.randn_like(tensors.storage[:, 1])
    tensors.copy([(1, 2)])
    tensors.swap_out([(2, 1)])
    tensors.swap_in([(1, 3)])
    assert torch.equal(tensors.storage[:, 3], wanted)
    assert len(elsewhere) == 4


def test_requests_and_sequences(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = LlmExecutor.from_pretrained(llama_folder, **OPTIONS)
    engine = Engine(executor, SWAPPING)
    output = engine.add_request([5, 3], GREEDY)
    with pytest.raises(InvalidInputError, match="sleep: 1 requests are unfinished"):
        engine.sleep()
    engine.step()
    with pytest.raises(InvalidInputError, match="sleep: 1 sequences hold K/V"):
        executor.sleep()
    while not output.finished:
        engine.step()
    engine.sleep()
    asleep = engine.generate([[5, 3]], GREEDY, progress=False)[0]
    assert "ModelAsleepError" in str(asleep.error)
    with monkeypatch.context() as patched:
        patched.setattr(torch.UntypedStorage, "resize_", _no_memory(torch.UntypedStorage.resize_))
        with pytest.raises(RuntimeError, match="no memory"):
            engine.wake()
    assert held_bytes(executor)[1] == 0
    engine.wake()
    assert engine.generate([[5, 3]], GREEDY, progress=False)[0].outputs[0].token_ids == output.outputs[0].token_ids
    assert executor.kv_manager is not None
    assert executor.kv_manager.stats().used_blocks == 0


def _no_memory(resize: Any) -> Any:
    def refuse(storage: torch.UntypedStorage, size: int) -> Any:
        if size:
            raise RuntimeError("no memory")
        return resize(storage, size)

    return refuse


@pytest.mark.thorough
def test_nothing_else_holds_the_memory(tmp_path: Path) -> None:
    """Of a head and an embedding of 51 MB each, and a cache of 268 MB, there is no other copy."""
    config = FAMILIES["llama"]
    config.vocab_size = 200_000
    save_checkpoint(config, tmp_path)
    with recorded() as allocations:
        executor = LlmExecutor.from_pretrained(tmp_path, **OPTIONS | {"num_blocks": 1 << 16, "num_swap_blocks": 0})
        model: Any = executor.model
        num_bytes = model.parameter_bytes() + model.kv_manager.tensors.storage.nbytes
        allocations.mark()
        executor.sleep(2)
        allocations.mark()
        executor.update_weights(tmp_path)
        allocations.mark()
    awake, asleep, awake_again = allocations.at_marks
    assert awake >= num_bytes > 300e6
    assert asleep < num_bytes / 100
    assert awake_again == awake
