"""Decode steps of the engine at published sizes, with random weights, against the bandwidth of the device."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any
from unittest import mock

import torch

from paged import Engine, EngineConfig, SamplingParams
from paged.bench.engine.cost import weights
from paged.bench.engine.models import MODELS, random_executor
from paged.bench.environment import benchmark_dtype
from paged.bench.goal import at_least
from paged.bench.limits import Cost, speed
from paged.bench.timing import ceilings, timed

# Samples of each ceiling.
_CEILING_REPEATS = 10


class _Clock:
    """Seconds in a call: on a GPU those between two events around its launches."""

    def __init__(self, call: Callable[..., Any], device: torch.device) -> None:
        self._call = call
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
        self._seconds = 0.0

    def __call__(self, *args: Any) -> Any:
        start = perf_counter()
        for event in self._events[:1]:
            event.record()
        result = self._call(*args)
        for event in self._events[1:]:
            event.record()
        self._seconds = perf_counter() - start
        return result

    def seconds(self) -> float:
        """Of the last call, which is over."""
        if not self._events:
            return self._seconds
        first, last = self._events
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3


def decode(
    model: str, device: torch.device, repeats: int, *, batch: int = 64, context: int = 4096, goal: float | None = None
) -> dict[str, Any]:
    """Tokens a second of `batch` sequences that decode behind `context` tokens; fewer where the cache holds no more.

    percent: of the least time in which the weights and the cache can be read. Of experts those count that so many
    tokens reach when they are spread evenly, of the embeddings the rows of the batch.
    """
    config = MODELS[model]
    # The first to decode go on while the last ones' prompts run, a chunk a step.
    per_sequence = context + repeats + 2 * batch
    executor = random_executor(config, device, batch * per_sequence)
    manager = executor.kv_manager
    assert manager is not None
    batch = min(batch, executor.kv_capacity() // per_sequence)
    executor.warmup()
    limits = ceilings(device, benchmark_dtype(device), _CEILING_REPEATS)

    engine = Engine(executor, EngineConfig(token_budget=max(8192, batch)), eos_token_ids=())
    rng = random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=per_sequence - context)
    for _ in range(batch):
        engine.add_request([rng.randrange(config["vocab_size"]) for _ in range(context)], params)
    with timed():
        start = perf_counter()
        while engine.status().decoding < batch:
            engine.step()
        prefill_seconds = perf_counter() - start

    steps, forwards, replays = [], [], executor.status().graph_replays
    clock = _Clock(executor.unified_decode, device)
    with mock.patch.object(executor, "unified_decode", clock), timed():
        num_tokens = manager.stats().num_tokens
        for _ in range(repeats):
            start = perf_counter()
            engine.step()
            steps.append(perf_counter() - start)
            forwards.append(clock.seconds())
        num_tokens = (num_tokens + manager.stats().num_tokens) // 2
    read = weights(executor, config, batch)
    multiplied, weight_bytes = read.layer_products + read.head_products, read.layer_bytes + read.head_bytes
    kv_bytes = num_tokens * manager.stats().bytes_per_block // manager.config.block_size
    found = speed(steps, Cost(2 * batch * multiplied, weight_bytes + kv_bytes), limits)
    detail = {
        "sequences": batch,
        "step_ms": found["median_us"] / 1e3,
        "p20_ms": found["p20_us"] / 1e3,
        "p80_ms": found["p80_us"] / 1e3,
        "forward_ms": statistics.median(forwards) * 1e3,
        "host_ms": statistics.median([step - forward for step, forward in zip(steps, forwards, strict=True)]) * 1e3,
        "bound_ms": found["bound_us"] / 1e3,
        "percent": found["percent"],
        "gb_per_s": found["gb_per_s"],
        "graph_replays": executor.status().graph_replays - replays,
        "prefill_tokens_per_second": batch * context / prefill_seconds,
    }
    goals = [] if goal is None else [at_least(f"{goal:g} % of the bound", found["percent"], goal)]
    value = batch / found["median_us"] * 1e6
    return {"name": f"decode.{model}", "value": value, "unit": "tokens/s", "goals": goals, "detail": detail}
