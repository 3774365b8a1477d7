"""The engine: its host time a step, its speed beside transformers' continuous batching, and what a long prompt does to
running decodes.

    python -m bench.bench_engine [--json FILE] [--only NAME] [--repeats N] [--device DEVICE]
    pytest bench/bench_engine.py --benchmark-json=FILE       the rows stand in extra_info

Rows, and their goals:

overhead.greedy, overhead.sampled: microseconds of a step with 256 decoding sequences outside of the executor's call:
    plan, items, what sampling needs, stops. The executor is the oracle without its attention, and the arithmetic of
    sampling, which is a device's, is left out too (`with_sampling_us` has it in). At most 300 us.
overhead.host: the same with the executor's own work on the host: checks, slots, metadata, counts.
throughput.10M, throughput.100M: 32 ragged prompts, 64 greedy tokens each, random weights, one run after a short one
    that warms up. The peer is `generate_batch` on the same weights, as it comes, and once more with a cache of our
    size, which `over_peer_sized` compares. At least 10 and 2.5 times the peer as it comes.
    On a CPU `linear_share` of our time goes to the products with the weights, without which there is no engine: with
    nothing beside them there would be `bound_tokens_per_second`, and `bound_over_peer` in place of the ratio.
long_prompt.budget, long_prompt.paced: 32 sequences decode and a prompt of 32k tokens arrives (4k on a CPU): the
    slowest step until its first token, in steps without it, with a budget of 2,048; paced is with `decode_stretch` 2.
    At most 2.
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any

import torch

from paged import (
    Engine,
    EngineConfig,
    LlmExecutor,
    PagedExecutorConfig,
    PagedKvCacheConfig,
    PagedKvCacheManager,
    SamplingParams,
    UnifiedBatch,
)
from paged.bench.environment import environment, save
from paged.bench.goal import Goal, at_least, at_most, verdict
from paged.executors import sampler
from paged.executors.model_executor import ModelExecutor
from paged.executors.paged_attention_executor import PagedAttentionExecutor
from paged.forward_step import ForwardStep
from paged.kernels.compat import interpreting
from paged.models import layers, llama

REPEATS = 100
_NUM_PROMPTS, _NEW_TOKENS = 32, 64
_VOCAB = 8000
_SIZES: dict[str, dict[str, Any]] = {
    "10M": {"hidden_size": 288, "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 9},
    "100M": {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 13, "num_attention_heads": 12},
}
_BLOCK_SIZE, _NUM_BLOCKS = 16, 1024


class DifferentTokensError(Exception):
    """Ours and the peer do not give the same text, so their times say nothing."""


@dataclass(frozen=True)
class Row:
    """A result; `detail` holds what it was made of."""

    name: str
    value: float
    unit: str
    goals: list[Goal]
    detail: dict[str, float]


@dataclass(frozen=True)
class Case:
    """A row to be, measured on a device with so many repeats."""

    name: str
    measure: Callable[[torch.device, int], Row]


@contextmanager
def _timed(module: ModuleType, *names: str) -> Iterator[list[float]]:
    """Adds up the seconds inside of a module's functions, called by these names in it."""
    total, originals = [0.0], {name: getattr(module, name) for name in names}

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            start = perf_counter()
            result = call(*args, **kwargs)
            total[0] += perf_counter() - start
            return result

        return wrapped

    for name, call in originals.items():
        setattr(module, name, timed(call))
    try:
        yield total
    finally:
        for name, call in originals.items():
            setattr(module, name, call)


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
    engine = Engine(executor, seed=0)
    for index in range(256):
        engine.add_request([index % 64] * (20 + index % 50), params)
    while engine.status().decoding < 256:
        engine.step()
    samples, with_sampling = [], []
    with _timed(sampler, "greedy_argmax", "filter_", "draw") as sampling:
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


def throughput(size: str, least: float, device: torch.device, repeats: int) -> Row:
    """Our tokens a second over the peer's, on the same weights."""
    from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    torch.manual_seed(0)
    config = LlamaConfig(
        **_SIZES[size],
        num_key_value_heads=3,
        vocab_size=_VOCAB,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    model = AutoModelForCausalLM.from_config(config).eval().to(device)
    rng = random.Random(0)
    prompts = [[rng.randrange(_VOCAB) for _ in range(rng.randint(8, 128))] for _ in range(_NUM_PROMPTS)]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        executor = LlmExecutor.from_pretrained(folder, device=device, num_blocks=_NUM_BLOCKS, block_size=_BLOCK_SIZE)
    executor.warmup()
    ours, linears, our_tokens = _run_ours(executor, prompts)

    def theirs(sizes: ContinuousBatchingConfig | None, new_tokens: int) -> tuple[float, list[list[int]]]:
        options = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
        start = perf_counter()
        outputs = model.generate_batch(
            inputs=prompts, generation_config=options, continuous_batching_config=sizes, persistent_manager=bool(sizes)
        )
        seconds = perf_counter() - start
        ordered = sorted(outputs.values(), key=lambda output: int(output.request_id.rpartition("_")[2]))
        return seconds, [list(output.generated_tokens) for output in ordered]

    page_blocks = _NUM_BLOCKS * _BLOCK_SIZE // 32
    sized = ContinuousBatchingConfig(page_size=32, num_blocks=page_blocks, max_batch_tokens=2048, use_cuda_graph=False)
    theirs(sized, 2)
    sized_seconds, their_tokens = theirs(sized, _NEW_TOKENS)
    _check_same(our_tokens, their_tokens)
    plain_seconds, _ = theirs(None, _NEW_TOKENS)
    total, ratio = _NUM_PROMPTS * _NEW_TOKENS, plain_seconds / ours
    detail = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens_per_second": total / ours,
        "peer_tokens_per_second": total / plain_seconds,
        "peer_sized_tokens_per_second": total / sized_seconds,
        "over_peer_sized": sized_seconds / ours,
    }
    if device.type == "cpu":  # on a GPU a call is over before its product is
        detail["linear_share"] = linears / ours
        detail["bound_tokens_per_second"] = total / linears
        detail["bound_over_peer"] = plain_seconds / linears
    return Row(f"throughput.{size}", ratio, "times the peer", [at_least(f"{least:g}x", ratio, least)], detail)


def _run_ours(executor: ModelExecutor, prompts: Sequence[Sequence[int]]) -> tuple[float, float, list[list[int]]]:
    """Seconds, those inside of the linear layers, and the texts."""
    Engine(executor).generate(prompts, SamplingParams(temperature=0, max_tokens=2), progress=False)
    manager = executor.kv_manager
    assert manager is not None
    manager.clear_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=_NEW_TOKENS)
    with _timed(layers, "linear") as in_layers, _timed(llama, "linear") as in_head:
        start = perf_counter()
        outputs = Engine(executor).generate(prompts, params, progress=False)
        seconds = perf_counter() - start
    return seconds, in_layers[0] + in_head[0], [output.outputs[0].token_ids for output in outputs]


def _check_same(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> None:
    """At least 90 % of the texts agree to their ends: rounding may turn one where two logits are almost equal."""
    same = sum(list(one) == list(other) for one, other in zip(ours, theirs, strict=True))
    if same < 0.9 * len(ours):
        raise DifferentTokensError(f"{same} of {len(ours)} texts are those of the peer")


def long_prompt(name: str, stretch: float | None, device: torch.device, repeats: int) -> Row:
    """The slowest step of decodes while a long prompt comes in, over the median of those before."""
    executor = _oracle(PagedAttentionExecutor, device, 4096, 40_000)
    engine = Engine(executor, EngineConfig(token_budget=2048, decode_stretch=stretch))
    for index in range(32):
        engine.add_request([index] * (30 + 2 * index), SamplingParams(temperature=0, max_tokens=30_000))
    while engine.status().decoding < 32:
        engine.step()

    def step() -> float:
        start = perf_counter()
        engine.step()
        return perf_counter() - start

    steady = statistics.median([step() for _ in range(repeats)])
    long = engine.add_request(
        [7] * (32_768 if device.type == "cuda" else 4096), SamplingParams(temperature=0, max_tokens=2)
    )
    samples = []
    while not long.outputs[0].token_ids:
        samples.append(step())
    worst = max(samples) / steady
    detail = {
        "steady_ms": steady * 1e3,
        "median_times_steady": statistics.median(samples) / steady,
        "p99_times_steady": statistics.quantiles(samples, n=100)[98] / steady,
        "steps": len(samples),
        "prompt_seconds": sum(samples),
    }
    return Row(name, worst, "times steady", [at_most("2", worst, 2)], detail)


_GREEDY = SamplingParams(temperature=0, max_tokens=2000)
_SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=2000)
CASES = [
    Case("overhead.greedy", lambda *run: overhead("overhead.greedy", _GREEDY, *run, with_executor=False)),
    Case("overhead.sampled", lambda *run: overhead("overhead.sampled", _SAMPLED, *run, with_executor=False)),
    Case("overhead.host", lambda *run: overhead("overhead.host", _GREEDY, *run, with_executor=True)),
    Case("throughput.10M", lambda *run: throughput("10M", 10.0, *run)),
    Case("throughput.100M", lambda *run: throughput("100M", 2.5, *run)),
    Case("long_prompt.budget", lambda *run: long_prompt("long_prompt.budget", None, *run)),
    Case("long_prompt.paced", lambda *run: long_prompt("long_prompt.paced", 2.0, *run)),
]


def pytest_generate_tests(metafunc: Any) -> None:
    """Parametrise without importing pytest, which the command line does not need."""
    metafunc.parametrize("case", CASES, ids=[case.name for case in CASES])


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
    args = parser.parse_args(argv)
    if interpreting():
        parser.error("TRITON_INTERPRET=1: unset it to benchmark")
    torch.set_num_threads(args.threads)
    report = environment("engine", args.device)
    write("\n".join(f"{name}: {value}" for name, value in report.items()))
    rows = []
    for case in CASES:
        if args.only in case.name:
            row = case.measure(args.device, args.repeats)
            rows.append(row)
            goals = "; ".join(verdict(vars(goal)) for goal in row.goals)
            details = ", ".join(f"{name} {value:.4g}" for name, value in row.detail.items())
            write(f"{row.name:20} {row.value:10.2f} {row.unit:15} {goals}    {details}")
    if args.json:
        save(args.json, {**report, "rows": [asdict(row) for row in rows]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
