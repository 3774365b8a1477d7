"""Faults planted in the project itself are found as hazards, so that none found means something."""

from __future__ import annotations

from pathlib import Path

import pytest

import paged.staging
from paged import Engine, EngineConfig, LlmExecutor, SamplingParams
from tests.cache.random_kv import make_manager
from tests.emulated_device.emulator.device import EmulatedCuda
from tests.emulated_device.emulator.order import Stream
from tests.emulated_device.test_cache import swap
from tests.models.families import FAMILIES, save_checkpoint, tokens


def kinds(machine: EmulatedCuda) -> set[str]:
    return {hazard.kind for hazard in machine.report.hazards}


def engine_of(folder: Path) -> Engine:
    save_checkpoint(FAMILIES["llama"], folder)
    executor = LlmExecutor.from_pretrained(folder, device="cuda", num_blocks=32, block_size=4, cuda_graphs=[2])
    executor.warmup()
    return Engine(executor, EngineConfig(), seed=0)


def generate(engine: Engine) -> None:
    engine.generate([tokens(5), tokens(7, 1)], SamplingParams(temperature=0, max_tokens=3), progress=False)


@pytest.mark.parametrize("is_planted", [False, True])
def test_a_staging_buffer_is_used_again_too_early(
    is_planted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged.staging, "_NUM_BUFFERS", 1)
    if is_planted:
        monkeypatch.setattr(paged.staging._StreamEvent, "synchronize", lambda event: None)
    with EmulatedCuda() as cuda:
        for first in (1, 100):
            paged.staging.to_device((paged.staging.np.arange(first, first + 9),), paged.staging.torch.device("cuda:0"))
        paged.staging.torch.cuda.synchronize()
        assert kinds(cuda) == ({"host memory in flight"} if is_planted else set())


@pytest.mark.parametrize("is_planted", [False, True])
def test_nobody_waits_for_the_swap(is_planted: bool, monkeypatch: pytest.MonkeyPatch, cuda: EmulatedCuda) -> None:
    if is_planted:
        monkeypatch.setattr(Stream, "wait_stream", lambda stream, other: None)
    swap(make_manager(device="cuda", num_swap_blocks=6), lambda: None)
    assert kinds(cuda) == ({"unordered streams"} if is_planted else set())


@pytest.mark.parametrize("is_planted", [False, True])
def test_weights_are_replaced_under_graphs(is_planted: bool, tmp_path: Path) -> None:
    with EmulatedCuda(executes=False) as cuda:
        engine = engine_of(tmp_path)
        for parameter in engine.executor.model.network.parameters():  # type: ignore[attr-defined]
            parameter.data = parameter.data * 0.9
        if not is_planted:
            engine.executor.warmup()
        generate(engine)
        assert cuda.report.num_replays > 0
        assert kinds(cuda) == ({"freed memory"} if is_planted else set())
