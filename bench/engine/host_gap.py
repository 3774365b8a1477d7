"""How long a device waits for the host between two decode steps, measured without a device.

The engine runs its GPU path over CPU tensors. A clock stands in for the device: replayed steps take a fixed time, one
after the other, and tokens can be read when their step has ended. The clock idles only if the host is late.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import perf_counter, sleep
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray

from paged import AsyncEngine, Engine, EngineConfig, LlmExecutor, SamplingParams
from paged.bench.benchmark import Json, Setting
from paged.bench.engine.models import MODELS, random_executor
from paged.executors.sampling import sampler
from paged.models import paged_lm, step_graphs
from paged.step.staging import HostCopy

BATCHES = (1, 8, 64, 256)
# Sizes of a small model. They suffice, because the host's work does not depend on layers and vocabulary: a graph holds
# the kernels, and the device computes logits.
_VOCAB = 64
_MODEL = MODELS["Llama-10M"] | {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "vocab_size": _VOCAB,
    "intermediate_size": 64,
}
_MODEL |= {"num_attention_heads": 1, "num_key_value_heads": 1}
_NUM_STEPS = 200
# Longest prompt, in tokens. Prompt lengths differ, so that one sequence in 16 begins a block in each step, as in
# service.
_LONGEST_PROMPT = 108
# Seconds before the end of a wait from which on the thread yields in a loop, as in a wait for a GPU: a sleep is less
# precise than this.
_SPIN_S = 2e-4


class Clock:
    """A device that takes `seconds` for a step. gaps: idle seconds before each step; starts: start of each step."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.gaps: list[float] = []
        self.starts: list[float] = []
        self._end = 0.0

    def run(self) -> None:
        """Launch a step behind the running ones."""
        now = perf_counter()
        self.gaps.append(max(0.0, now - self._end))
        self.starts.append(now)
        self._end = max(now, self._end) + self.seconds

    def copy(self, host_copy: HostCopy, tensor: torch.Tensor) -> None:
        """Copy the last step's result to the host."""
        host_copy.__dict__.update(_tensor=tensor, _end=self._end)

    def wait(self, host_copy: HostCopy) -> NDArray[Any]:
        """Wait for the step of a copy."""
        end: float = host_copy.__dict__["_end"]
        while perf_counter() < end:
            sleep(max(0.0, end - perf_counter() - _SPIN_S))
        values: NDArray[Any] = host_copy.__dict__["_tensor"].numpy()
        return values


@contextmanager
def pretended(num_sequences: int, num_steps: int) -> Iterator[tuple[Clock, Engine]]:
    """Yield a clock, and an engine whose decode steps it runs."""
    clock, tokens = Clock(), torch.from_numpy(np.arange(max(BATCHES)) % _VOCAB)

    def capture(begin: Callable[[], Callable[[], None]]) -> tuple[Callable[[], None], str]:
        return clock.run, ""

    def bound(operation: object) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda logits: tokens[: len(logits)]

    patches: list[Any] = [
        mock.patch.object(step_graphs, "capture_for", return_value=capture),
        mock.patch.object(paged_lm, "graph_sizes", return_value=step_graphs.DEFAULT_SIZES),
        mock.patch.object(sampler, "Bound", bound),
        mock.patch.object(HostCopy, "__init__", lambda *args: clock.copy(*args)),
        mock.patch.object(HostCopy, "numpy", lambda host_copy: clock.wait(host_copy)),
    ]
    with ExitStack() as patched:
        for patch in patches:
            patched.enter_context(patch)
        executor: LlmExecutor = random_executor(
            _MODEL, torch.device("cpu"), num_sequences * (_LONGEST_PROMPT + num_steps + 64) + 4096
        )
        assert isinstance(executor.model, paged_lm.PagedCausalLM)
        executor.model.graphs._recorded_only = False
        executor.model.graphs.capture()
        config = EngineConfig(token_budget=8192, overlap=True, max_num_seqs=max(BATCHES))
        yield clock, Engine(executor, config, eos_token_ids=())


def params(num_steps: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_steps + 60)


def prompt(number: int) -> list[int]:
    length = _LONGEST_PROMPT - number % 16
    return np.random.default_rng(number).integers(_VOCAB, size=length).tolist()  # type: ignore[no-any-return]


def begin(engine: Engine, num_sequences: int, num_steps: int) -> None:
    """Start this many decoding sequences."""
    for number in range(num_sequences):
        engine.add_request(prompt(number), params(num_steps))
    while engine.status().decoding < num_sequences:
        engine.step()
    for _ in range(20):
        engine.step()
    gc.collect()


def engine_gap(name: str, num_sequences: int, device_ms: float, _setting: Setting) -> Json:
    """Measure idle time before steps of `device_ms`, and the host time of a step without a device."""
    with pretended(num_sequences, 2 * _NUM_STEPS) as (clock, engine):
        begin(engine, num_sequences, 2 * _NUM_STEPS)
        clock.starts.clear()
        for _ in range(_NUM_STEPS):
            engine.step()
        periods = np.diff(clock.starts)
        clock.seconds = device_ms / 1e3
        engine.step()
        clock.gaps.clear()
        for _ in range(_NUM_STEPS):
            engine.step()
        return _row(name, clock, periods)


def async_engine_gap(name: str, num_sequences: int, device_ms: float, _setting: Setting) -> Json:
    """Measure AsyncEngine as `engine_gap` does, with a reader for each sequence."""
    return asyncio.run(_read_all(name, num_sequences, device_ms))


async def _read_all(name: str, num_sequences: int, device_ms: float) -> Json:
    with pretended(num_sequences, 8 * _NUM_STEPS) as (clock, engine):
        server = AsyncEngine(engine)

        async def read(number: int) -> None:
            async for output in server.generate(prompt(number), params(8 * _NUM_STEPS), deltas=True):
                assert output.outputs[0].token_ids

        readers = [asyncio.create_task(read(number)) for number in range(num_sequences)]
        while (await server.status()).decoding < num_sequences or len(clock.starts) < 20:
            await asyncio.sleep(0.01)
        clock.starts.clear()
        while len(clock.starts) < _NUM_STEPS:
            await asyncio.sleep(0.02)
        periods = np.diff(clock.starts)
        clock.seconds = device_ms / 1e3
        await asyncio.sleep(0.1)
        clock.gaps.clear()
        while len(clock.gaps) < _NUM_STEPS:
            await asyncio.sleep(0.05)
        row = _row(name, clock, periods)
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        await server.shutdown()
        return row


def _row(name: str, clock: Clock, periods: NDArray[np.float64]) -> Json:
    """Return the row of a clock's gaps, and of the periods of steps that took no device time."""
    gaps = np.array(clock.gaps)
    detail = {
        "host_us": 1e6 * float(np.median(periods)),
        "gap_p90_us": 1e6 * float(np.quantile(gaps, 0.9)),
        "percent_without_gap": 100 * float(np.mean(gaps < 1e-6)),
    }
    return {"name": name, "value": 1e6 * float(np.median(gaps)), "unit": "us idle", "detail": detail}
