"""The engine: its host time a step, its speed beside transformers' continuous batching, and what a long prompt does to
running decodes.

    python -m bench.engine.run [--json FILE] [--only NAME] [--repeats N] [--device DEVICE] [--budget SECONDS]
    pytest bench/engine/run.py --benchmark-json=FILE       the rows stand in extra_info

Rows, and their goals:

overhead.greedy, overhead.sampled: microseconds of a step with 256 decoding sequences outside of the executor's call:
    plan, items, what sampling needs, stops. The executor is the oracle without its attention, and the arithmetic of
    sampling, which is a device's, is left out too (`with_sampling_us` has it in). At most 300 us.
overhead.host: the same with the executor's own work on the host: checks, slots, metadata, counts.
decode.Qwen3-8B, decode.Qwen3-30B-A3B: tokens a second of 64 sequences that decode behind 4,096 tokens, random weights,
    on a GPU alone. `percent` is the share of the least time in which weights and cache can be read, at least 80 for the
    first; `host_ms` of a step is what the device waits for the host.
throughput.10M, throughput.100M, on a GPU throughput.8B: 32 ragged prompts, 64 greedy tokens each, random weights, the
    median of three runs after a short one that warms up, on a GPU of one. The peer is `generate_batch` on the same
    weights, as it comes, and once more with a cache of our size, which `over_peer_sized` compares. At least 10, 2.5 and
    5 times the peer as it comes.
    On a CPU `linear_share` of our time goes to the products with the weights, without which there is no engine: with
    nothing beside them there would be `bound_tokens_per_second`, and `bound_over_peer` in place of the ratio.
long_prompt.budget, long_prompt.paced: 32 sequences of Llama-100M, on a GPU of Qwen3-8B too, decode and a prompt of 32k
    tokens arrives (4k on a CPU), not the first prompt: the slowest step until its first token, in steps without it,
    with a budget of 2,048; paced is with `decode_stretch` 2. At most 2.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from paged import (
    Engine,
    PagedExecutorConfig,
    PagedKvCacheConfig,
    PagedKvCacheManager,
    SamplingParams,
    UnifiedBatch,
)
from paged.bench.engine.decode import decode
from paged.bench.engine.long_prompt import long_prompt
from paged.bench.engine.rows import Row, timed_inside
from paged.bench.engine.throughput import throughput
from paged.bench.environment import INTERPRETING, environment, save
from paged.bench.goal import at_most, verdict
from paged.executors.paged_attention_executor import PagedAttentionExecutor
from paged.executors.sampling import sampler
from paged.forward_step import ForwardStep
from paged.kernels.common.compat import interpreting

REPEATS = 100


@dataclass(frozen=True)
class Case:
    """A row to be, measured on a device with so many repeats. needs_gpu: on a CPU it would take hours."""

    name: str
    measure: Callable[[torch.device, int], Row]
    needs_gpu: bool = False


class _WithoutModel(PagedAttentionExecutor):
    """The oracle with its bookkeeping and without its mathematics; `seconds` is the time inside of its calls."""

    seconds = 0.0

    def unified_decode(self, batch: UnifiedBatch) -> list[torch.Tensor | None]:
        start = perf_counter()
        try:
            return super().unified_decode(batch)
        finally:
            self.seconds += perf_counter() - start

    def _attend(self, step: ForwardStep) -> torch.Tensor:
        return step.input_ids.new_zeros(len(step.input_ids), self.config.vocab_size, dtype=torch.float32)

    def _logits(self, attention: torch.Tensor) -> torch.Tensor:
        return attention


def _oracle(
    kind: type[PagedAttentionExecutor], device: torch.device, num_blocks: int, max_seq_len: int
) -> PagedAttentionExecutor:
    """The smallest: one layer, one head, 64 tokens of vocabulary."""
    sizes = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 32}
    config = PagedExecutorConfig(vocab_size=64, num_heads=1, max_sequence_length=max_seq_len, **sizes)
    cache = PagedKvCacheConfig(num_blocks=num_blocks, device=device, dtype=torch.float32, **sizes)
    return kind(config, PagedKvCacheManager(cache))


def overhead(name: str, params: SamplingParams, device: torch.device, repeats: int, *, with_executor: bool) -> Row:
    """A step of 256 decodes, without or with what the executor does beside running a model."""
    executor = _oracle(_WithoutModel, device, 16_384, 4096)
    assert isinstance(executor, _WithoutModel)
    engine = Engine(executor, eos_token_ids=(), seed=0)
    for index in range(256):
        engine.add_request([index % 64] * (20 + index % 50), params)
    while engine.status().decoding < 256:
        engine.step()
    samples, with_sampling = [], []
    with timed_inside(sampler, "greedy_argmax", "sample_tokens") as sampling:
        for _ in range(repeats):
            executor.seconds = sampling[0] = 0.0
            start = perf_counter()
            engine.step()
            seconds = perf_counter() - start - (0.0 if with_executor else executor.seconds)
            samples.append((seconds - sampling[0]) * 1e6)
            with_sampling.append(seconds * 1e6)
    median = statistics.median(samples)
    detail = {
        "lowest_us": min(samples),
        "p80_us": statistics.quantiles(samples, n=10)[7],
        "with_sampling_us": statistics.median(with_sampling),
    }
    return Row(name, median, "us", [] if with_executor else [at_most("300 us", median, 300)], detail)


def _long_prompt(model: str, stretch: float | None, *, needs_gpu: bool = False) -> Case:
    name = f"long_prompt.{'budget' if stretch is None else 'paced'}.{model}"
    return Case(name, partial(long_prompt, name, model, stretch), needs_gpu)


_GREEDY = SamplingParams(temperature=0, max_tokens=2000)
_SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=2000)
CASES = [
    Case("overhead.greedy", lambda *run: overhead("overhead.greedy", _GREEDY, *run, with_executor=False)),
    Case("overhead.sampled", lambda *run: overhead("overhead.sampled", _SAMPLED, *run, with_executor=False)),
    Case("overhead.host", lambda *run: overhead("overhead.host", _GREEDY, *run, with_executor=True)),
    Case("decode.Qwen3-8B", partial(decode, "Qwen3-8B", goal=80.0), needs_gpu=True),
    Case("decode.Qwen3-30B-A3B", partial(decode, "Qwen3-30B-A3B"), needs_gpu=True),
    Case("throughput.8B", partial(throughput, "8B", 5.0), needs_gpu=True),
    Case("throughput.10M", partial(throughput, "10M", 10.0)),
    Case("throughput.100M", partial(throughput, "100M", 2.5)),
    _long_prompt("Llama-100M", None),
    _long_prompt("Llama-100M", 2.0),
    _long_prompt("Qwen3-8B", None, needs_gpu=True),
    _long_prompt("Qwen3-8B", 2.0, needs_gpu=True),
]


def pytest_generate_tests(metafunc: Any) -> None:
    """Parametrise without importing pytest, which the command line does not need."""
    cases = [case for case in CASES if torch.cuda.is_available() or not case.needs_gpu]
    metafunc.parametrize("case", cases, ids=[case.name for case in cases])


def test_engine(case: Case, benchmark: Any) -> None:
    """One row of the pytest-benchmark suite."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    row = benchmark.pedantic(lambda: case.measure(device, REPEATS), rounds=1)
    benchmark.extra_info.update(environment("engine", device), **asdict(row))


def main(argv: list[str] | None = None, write: Callable[[str], object] = print) -> int:
    """Print the table; missed goals are shown, and no error."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the environment and the rows here too")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="steps that are timed; %(default)s by default")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch on a CPU; %(default)s by default")
    parser.add_argument("--budget", type=float, default=float("inf"), help="start no case after so many seconds")
    args = parser.parse_args(argv)
    end = time.monotonic() + args.budget
    if interpreting():
        parser.error(INTERPRETING)
    torch.set_num_threads(args.threads)
    report = environment("engine", args.device)
    write("\n".join(f"{name}: {value}" for name, value in report.items()))
    rows = []
    for case in CASES:
        is_here = args.device.type == "cuda" or not case.needs_gpu
        if args.only in case.name and is_here and time.monotonic() < end:
            row = case.measure(args.device, args.repeats)
            rows.append(row)
            goals = "; ".join(verdict(vars(goal)) for goal in row.goals)
            details = ", ".join(f"{name} {value:.4g}" for name, value in row.detail.items())
            write(f"{row.name:20} {row.value:10.2f} {row.unit:15} {goals}    {details}")
            if args.json:  # after every case, as a run may be killed at any time
                save(args.json, {**report, "rows": [asdict(row) for row in rows]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
