"""Faults planted in the project itself are found as hazards, so that none found means something."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import paged.step.staging
from paged import Engine, EngineConfig, LlmExecutor, SamplingParams
from paged.cache.manager import PagedKvCacheManager
from paged.kernels.cache.copy_blocks import BlockCopy
from tests.cache.random_kv import make_manager
from tests.emulated_device.emulator.device import EmulatedCuda
from tests.emulated_device.emulator.streams import Event, Stream
from tests.emulated_device.test_cache import HOST_CACHE_BYTES, swap, tier
from tests.models.families import FAMILIES, save_checkpoint, tokens


def kinds(machine: EmulatedCuda) -> set[str]:
    return {hazard.kind for hazard in machine.report.hazards}


def send_numbers() -> None:
    for first in (1, 100):
        paged.step.staging.to_device((np.arange(first, first + 9),), torch.device("cuda:0"))


def send_pairs() -> None:
    tensors = make_manager(device="cuda")._tensors
    for pairs in ([(1, 2), (1, 3)], [(4, 5)]):
        tensors.copy(pairs)


@pytest.mark.parametrize("is_planted", [False, True])
@pytest.mark.parametrize("send", [send_numbers, send_pairs])
def test_a_staging_buffer_is_used_again_too_early(
    send: Callable[[], None], is_planted: bool, monkeypatch: pytest.MonkeyPatch, cuda: EmulatedCuda
) -> None:
    monkeypatch.setattr(paged.step.staging, "_NUM_BUFFERS", 1)
    if is_planted:
        monkeypatch.setattr(paged.step.staging._StreamEvent, "synchronize", lambda event: None)
    send()
    torch.cuda.synchronize()
    assert kinds(cuda) == ({"host memory in flight"} if is_planted else set())


def never_waits(is_computing: bool, patch: pytest.MonkeyPatch, cuda: EmulatedCuda) -> None:
    wait = Stream.wait_event

    def wait_unless(stream: Stream, event: Event) -> None:
        if (stream is cuda.defaults[0]) != is_computing:
            wait(stream, event)

    patch.setattr(Stream, "wait_event", wait_unless)


def gathers_elsewhere(patch: pytest.MonkeyPatch, cuda: EmulatedCuda) -> None:
    """Into staged memory that the copy before may still be reading."""
    copy = BlockCopy.__call__

    def copy_there(blocks: BlockCopy, pairs: torch.Tensor) -> None:
        with cuda.stream(cuda.defaults[0]):
            copy(blocks, pairs)

    patch.setattr(BlockCopy, "__call__", copy_there)


SWAP_FAULTS: dict[str, Callable[[pytest.MonkeyPatch, EmulatedCuda], None]] = {
    "none": lambda patch, cuda: None,
    "the swap does not wait for the forward": partial(never_waits, False),
    "the forward does not wait for the swap": partial(never_waits, True),
    "staged memory is overwritten": gathers_elsewhere,
}


@pytest.mark.parametrize("way", [swap, tier])
@pytest.mark.parametrize("fault", SWAP_FAULTS)
def test_swap_faults(
    fault: str, way: Callable[[PagedKvCacheManager], None], monkeypatch: pytest.MonkeyPatch, cuda: EmulatedCuda
) -> None:
    SWAP_FAULTS[fault](monkeypatch, cuda)
    way(make_manager(device="cuda", num_swap_blocks=6, host_cache_bytes=HOST_CACHE_BYTES))
    assert ("unordered streams" in kinds(cuda)) == (fault != "none")
    assert fault != "none" or not kinds(cuda)


@pytest.mark.parametrize("is_planted", [False, True])
def test_weights_are_replaced_under_graphs(is_planted: bool, tmp_path: Path) -> None:
    save_checkpoint(FAMILIES["llama"], tmp_path)
    with EmulatedCuda(executes=False) as cuda:
        executor = LlmExecutor.from_pretrained(tmp_path, device="cuda", num_blocks=32, block_size=4, cuda_graphs=[2])
        executor.warmup()
        for parameter in executor.model.network.parameters():  # type: ignore[attr-defined]
            parameter.data = parameter.data * 0.9
        if not is_planted:
            executor.warmup()
        engine = Engine(executor, EngineConfig(), seed=0)
        engine.generate([tokens(5), tokens(7, 1)], SamplingParams(temperature=0, max_tokens=3), progress=False)
        assert cuda.report.num_replays > 0
        assert kinds(cuda) == ({"freed memory"} if is_planted else set())
