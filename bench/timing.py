"""Timing of calls, and measured rates of the device: copy and read bandwidth, and matrix products."""

from __future__ import annotations

import functools
import itertools
import math
import os
import platform
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from paged.bench.limits import Ceilings
from paged.kernels.core.compat import HAS_TRITON, triton
from paged.kernels.cpu.products import pack
from paged.kernels.layers.linear import linear
from paged.models.loading.huge_pages import move_to_huge_pages

Call = Callable[[], Any]
Sample = Callable[[], float]
"""Times one call and returns its seconds."""
# A CUDA graph repeats short calls until it has this many calls or takes this many seconds, so that its launch adds
# little to each call; see bench/limits.md.
_MIN_CALLS = 8
_MIN_SECONDS = 4e-3
# File with each core's clock ticks since Linux's start: user, nice, system, idle, iowait, irq, softirq, steal.
_STAT = Path("/proc/stat")


class SampleClock:
    """A timer for pytest-benchmark that counts only the seconds of samples."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def __call__(self) -> float:
        return self._seconds

    def run(self, sample: Sample) -> None:
        """Take a sample and add its seconds."""
        self._seconds += sample()


class CompiledWhileTimedError(Exception):
    """A kernel was compiled during a measurement, so the time is the compiler's."""


@contextmanager
def late_kernels() -> Iterator[list[str]]:
    """List the kernels that Triton compiles or loads from disk inside, ours or a peer's, in any thread."""
    late: list[str] = []
    if not HAS_TRITON:
        yield late
        return
    before = triton.knobs.runtime.jit_post_compile_hook

    def note(**compilation: Any) -> Any:
        name = compilation["fn"].name
        if name not in late:
            late.append(name)
        if before is not None:
            return before(**compilation)
        return None

    triton.knobs.runtime.jit_post_compile_hook = note
    try:
        yield late
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before


@contextmanager
def timed() -> Iterator[None]:
    """Refuse a measurement during which a kernel was compiled.

    Raises:
        CompiledWhileTimedError: at the end, if there were `late_kernels`.
    """
    with late_kernels() as late:
        yield
    if late:
        raise CompiledWhileTimedError(f"{', '.join(late)} compiled while timed")


def stolen_seconds() -> list[float]:
    """Return the CPU steal of each of our cores since boot, in seconds; zeros if the system does not report it."""
    if not _STAT.exists():
        return [0.0]
    ticks: dict[str, int] = {}
    for line in _STAT.read_text().splitlines():
        name, *numbers = line.split() or [""]
        if name.startswith("cpu") and len(numbers) > 7:
            ticks[name] = int(numbers[7])
    seconds = []
    for core in sorted(os.sched_getaffinity(0)):
        num_ticks = ticks.get(f"cpu{core}", 0)  # a container may number its cores differently
        seconds.append(num_ticks / os.sysconf("SC_CLK_TCK"))
    return seconds


def sampler(calls: Sequence[Call], device: torch.device, *, capturable: bool = True) -> tuple[str, Sample]:
    """Warm up `calls`, which differ only in their tensors. Return the method, and a function that times one call.

    "graph": events around the replay of a CUDA graph of all calls. "events": events around the calls themselves,
    including host work, for operations that cannot be captured. "host clock": one call at a time.
    """
    for call in calls:
        call()
    if device.type != "cuda":
        rotated = itertools.cycle(calls)

        def timed_call() -> float:
            call = next(rotated)
            start = time.perf_counter()
            call()
            return time.perf_counter() - start

        return "host clock", timed_call

    seconds = _elapsed(lambda: _run_all(calls)) / len(calls)
    num_calls = max(len(calls), min(_MIN_CALLS, math.ceil(_MIN_SECONDS / seconds)))
    repeated = list(itertools.islice(itertools.cycle(calls), num_calls))
    run: Call = functools.partial(_run_all, repeated)
    method = "events"
    if capturable:
        run, method = _capture(repeated), "graph"
    _elapsed(run)
    return method, lambda: _elapsed(run) / num_calls


def take(calls: Sequence[Call], device: torch.device, repeats: int) -> list[float]:
    """Return `repeats` samples of `calls`, in seconds; see `sampler`."""
    _, sample = sampler(calls, device)
    with timed():
        return [sample() for _ in range(repeats)]


def take_in_turns(
    samples: Mapping[str, Sample], repeats: int, *, max_seconds: float = math.inf, min_samples: int = 1
) -> dict[str, list[float]]:
    """Take each of the samples once per round, for `repeats` rounds or as many as fit into `max_seconds`.

    The order is drawn anew in every round. Otherwise a call that always follows the longest one would always find cold
    CPU caches, which can double a short call.
    """
    seconds: dict[str, list[float]] = {name: [] for name in samples}
    start, generator = time.monotonic(), random.Random(0)
    with timed():
        for index in range(repeats):
            for name in generator.sample(list(samples), len(samples)):
                seconds[name].append(samples[name]())
            if index + 1 >= min_samples and time.monotonic() - start > max_seconds:
                break
    return seconds


def _run_all(calls: Sequence[Call]) -> list[Any]:
    """Run calls and keep all results. A freed result would be the next call's output, still in the L2 cache."""
    return [call() for call in calls]


def _elapsed(run: Call) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _capture(calls: Sequence[Call]) -> Call:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = _run_all(calls)

    def replay(_results: list[Any] = results) -> None:
        graph.replay()

    return replay


def cache_bytes(device: torch.device) -> int:
    """Return the size of the cache that inputs must exceed: a GPU's L2; 32 MB, a common L3, for a CPU."""
    if device.type != "cuda":
        return 32 << 20
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def num_sets(num_bytes: int, device: torch.device, limit: int) -> tuple[int, bool]:
    """Return the number of sets of tensors that calls rotate through, and whether the sets exceed the cache.

    With enough sets of `num_bytes`, at most `limit`, no call finds its own tensors in the cache.
    """
    cache = cache_bytes(device)
    count = 1 + min(2 * cache // num_bytes, limit - 1)
    return count, count * num_bytes > cache


def measured_ceilings(device: torch.device, dtype: torch.dtype, repeats: int, max_bytes: int = 1 << 30) -> Ceilings:
    """Measure the best rates of a copy, of two ways to read random numbers, and of large products in `dtype`.

    Copies and reads are far larger than any cache, but at most max_bytes. Products are PyTorch's and packed weights'.
    """
    columns = 4096
    # Copy far more bytes than a CPU's cache holds, because the cache would raise the rate; see bench/limits.md.
    num_bytes, num_rows, num_outputs, size = 1 << 29, 1024, 4096, 1024
    if device.type == "cuda":
        num_bytes, num_rows, num_outputs, size = 1 << 30, 8192, 8192, 8192
    rows = max(min(num_bytes, max_bytes) // (4 * columns), 1)
    source = torch.randn(rows, columns, device=device)
    target, vector = torch.zeros_like(source), torch.randn(columns, device=device)
    if device.type == "cpu":
        move_to_huge_pages([source, target])  # as models do with weights
    x = torch.randn(num_rows, size, device=device, dtype=dtype)
    weight = torch.randn(num_outputs, size, device=device, dtype=dtype)
    packed = pack(weight)

    def seconds(*calls: Call) -> float:
        return min(min(take([call], device, repeats)) for call in calls)

    return Ceilings(
        copy=2 * source.nbytes / seconds(lambda: target.copy_(source)),
        read=source.nbytes / seconds(source.sum, lambda: torch.mv(source, vector)),
        matmul=2 * num_rows * num_outputs * size / seconds(lambda: x @ weight.T, lambda: linear(x, packed)),
    )


@functools.cache
def ceilings(device: torch.device, dtype: torch.dtype, repeats: int) -> Ceilings:
    """Return `measured_ceilings` beyond any cache, measured once per process."""
    return measured_ceilings(device, dtype, repeats)


def memory_gib(device: torch.device) -> float | None:
    """Return the size of a GPU's memory, which decides what fits: an H100 and an H200 differ in little else."""
    if device.type != "cuda":
        return None
    return round(torch.cuda.get_device_properties(device).total_memory / 2**30, 1)


def device_name(device: torch.device) -> str:
    """Return the device's name; for a CPU with the number of threads in use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model, info = platform.machine(), Path("/proc/cpuinfo")
    if info.exists():
        match = re.search(r"^model name\s*: (.*)$", info.read_text(), re.MULTILINE)
        if match:
            model = match[1].strip()
    return f"{model}, {torch.get_num_threads()} threads"
