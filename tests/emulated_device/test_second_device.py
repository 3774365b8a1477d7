"""A model on the second of two emulated GPUs while the first is current."""

from __future__ import annotations

from pathlib import Path

import pytest

from paged import Engine, EngineConfig, LlmExecutor, SamplingParams
from tests.emulated_device.emulator.device import EmulatedCuda
from tests.models.families import FAMILIES, save_checkpoint, tokens


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_work_goes_to_the_device_of_its_tensors(family: str, tmp_path: Path) -> None:
    save_checkpoint(FAMILIES[family], tmp_path)
    with EmulatedCuda(num_devices=2, executes=False) as cuda:
        executor = LlmExecutor.from_pretrained(tmp_path, device="cuda:1", num_blocks=32, cuda_graphs=[1, 2])
        executor.warmup()
        engine = Engine(executor, EngineConfig(), seed=0)
        engine.generate([tokens(9), tokens(5, 1)], SamplingParams(temperature=0, max_tokens=4), progress=False)
        assert cuda.report.hazards == []
        assert {kernel.device for kernel in cuda.report.compiled} == {1}
