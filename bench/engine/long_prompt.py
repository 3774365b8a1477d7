"""How much a long prompt slows down running decodes."""

from __future__ import annotations

import statistics
from time import perf_counter

from paged import Engine, EngineConfig, SamplingParams
from paged.bench.benchmark import Json, Setting
from paged.bench.engine.models import MODELS, random_executor, warm_up
from paged.bench.limits import at_most
from paged.bench.timing import late_kernels
from paged.bench.watchdog import WATCHDOG

_NUM_DECODES = 32
_BUDGET = 2048


def long_prompt(name: str, model: str, stretch: float | None, setting: Setting) -> Json:
    """Measure the slowest step of decodes while a long prompt comes in, over the steps without the prompt.

    Steps without the prompt take longer as the decodes grow. So the baseline lies between the medians of `repeats`
    steps before the prompt and after it.
    """
    device, repeats = setting.device, setting.repeats
    length = {"cuda": 32_768, "cpu": 4096}[device.type]
    # Number of tokens in the cache. It suffices even at the slowest pace, 8 tokens of the prompt a step.
    room = _NUM_DECODES * (100 + 2 * repeats + length // 8) + length
    executor = random_executor(MODELS[model], device, room)
    WATCHDOG.progress()
    warm_up(executor)
    engine = Engine(executor, EngineConfig(token_budget=_BUDGET, decode_stretch=stretch), eos_token_ids=())
    for index in range(_NUM_DECODES):
        engine.add_request([index] * (30 + 2 * index), SamplingParams(temperature=0, max_tokens=length))
    while engine.status().decoding < _NUM_DECODES:
        engine.step()
    # An untimed mixed step, because the first mixed step is slower.
    engine.add_request([8] * 200, SamplingParams(temperature=0, max_tokens=1))
    while engine.num_unfinished > _NUM_DECODES:
        engine.step()

    def step() -> float:
        start = perf_counter()
        engine.step()
        seconds = perf_counter() - start
        WATCHDOG.progress()
        return seconds

    with late_kernels() as late:
        before = statistics.median([step() for _ in range(repeats)])
        long = engine.add_request([7] * length, SamplingParams(temperature=0, max_tokens=1))
        samples = []
        while not long.finished:
            samples.append(step())
        after = statistics.median([step() for _ in range(repeats)])
    growth = (after - before) / len(samples)
    stretches = [seconds / (before + growth * index) for index, seconds in enumerate(samples)]
    worst = max(stretches)
    detail = {
        "before_ms": before * 1e3,
        "after_ms": after * 1e3,
        "median_times_steady": statistics.median(stretches),
        "steps": len(samples),
        "prompt_seconds": sum(samples),
    }
    row = {"name": name, "value": worst, "unit": "times steady", "goals": [at_most("2", worst, 2)]}
    return {**row, "late_kernels": ", ".join(late), "detail": detail}
