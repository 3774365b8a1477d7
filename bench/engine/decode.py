"""Decode steps of the engine at published sizes, with random weights, against the device's bandwidth."""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any
from unittest import mock

import torch

from paged import Engine, EngineConfig, SamplingParams
from paged.bench.benchmark import Json, Setting
from paged.bench.engine.cost import weights
from paged.bench.engine.models import MODELS, random_executor, random_prompts, warm_up
from paged.bench.limits import Cost, at_least, speed
from paged.bench.timing import ceilings, late_kernels
from paged.bench.watchdog import WATCHDOG

# Number of samples of each ceiling.
_CEILING_REPEATS = 10


@contextmanager
def timed_replays() -> Iterator[list[tuple[torch.cuda.Event, torch.cuda.Event]]]:
    """Record events before and after every replay of a CUDA graph that is captured inside, even after the end."""
    events, replay = [], torch.cuda.CUDAGraph.replay

    def replay_timed(graph: torch.cuda.CUDAGraph) -> None:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        replay(graph)
        end.record()
        events.append((start, end))

    with mock.patch.object(torch.cuda.CUDAGraph, "replay", replay_timed):
        yield events


def decode_early(name: str, model: str, setting: Setting, **options: Any) -> Json:
    """Run `decode` with kernels that start before earlier ones have ended, if the device can do so."""
    with mock.patch.dict(os.environ, PAGED_PDL="1"):
        return decode(name, model, setting, **options)


def decode(
    name: str, model: str, setting: Setting, *, batch: int = 64, context: int = 4096, goal: float | None = None
) -> Json:
    """Measure tokens per second of `batch` sequences behind `context` tokens, or of fewer if the cache holds no more.

    percent: share of the least time to read the weights and the cache. The weights include the experts that evenly
    spread tokens reach, and the embedding's rows of the batch. replay_us: device time of the graph of a step. gap_us:
    the rest of the step, for sampling and the host.
    """
    config, device, repeats = MODELS[model], setting.device, setting.repeats
    # The first sequences already decode while the last prompts run, one chunk a step.
    per_sequence = context + repeats + 2 * batch
    executor = random_executor(config, device, batch * per_sequence)
    manager = executor.kv_manager
    assert manager is not None
    WATCHDOG.progress()
    batch = min(batch, executor.kv_capacity() // per_sequence)
    with timed_replays() as replays:
        warm_up(executor)
    limits = ceilings(device, setting.dtype, _CEILING_REPEATS)

    engine = Engine(executor, EngineConfig(token_budget=max(8192, batch)), eos_token_ids=())
    rng = random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=per_sequence - context)
    for prompt in random_prompts(rng, config["vocab_size"], [context] * batch):
        engine.add_request(prompt, params)
    steps: list[float] = []
    with late_kernels() as late:
        start = perf_counter()
        while engine.status().decoding < batch:
            engine.step()
            WATCHDOG.progress()
        prefill_seconds = perf_counter() - start

        num_tokens = manager.stats().num_tokens
        replays.clear()
        for _ in range(repeats):
            start = perf_counter()
            engine.step()
            steps.append(perf_counter() - start)
    num_tokens = (num_tokens + manager.stats().num_tokens) // 2
    read = weights(executor, config, batch)
    multiplied, weight_bytes = read.layer_products + read.head_products, read.layer_bytes + read.head_bytes
    kv_bytes = num_tokens * manager.stats().bytes_per_block // manager.config.block_size
    times = speed(steps, Cost(2 * batch * multiplied, weight_bytes + kv_bytes), limits)
    replay_us = 0.0
    if replays:
        torch.cuda.synchronize(device)
        replay_us = statistics.median(start.elapsed_time(end) * 1e3 for start, end in replays)
    detail = {
        "sequences": batch,
        "graph_replays": len(replays),
        "replay_us": replay_us,
        "gap_us": times["median_us"] - replay_us,
        "prefill_tokens_per_second": batch * context / prefill_seconds,
    }
    goals = []
    if goal is not None:
        goals.append(at_least(f"{goal:g} % of the bound", times["percent"], goal))
    row = {"name": name, "value": batch / times["median_us"] * 1e6, "unit": "tokens/s", "goals": goals}
    return {**row, "late_kernels": ", ".join(late), "detail": detail, **times, "cold": True}
