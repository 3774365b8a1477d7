"""Metrics of an engine: counts and latency histograms."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from paged.errors import UnsupportedError

if TYPE_CHECKING:
    from prometheus_client.core import Metric

# Bounds of the buckets of times in seconds, from a step of a small model to a long wait. They include the targets of
# vLLM's dashboard.
_BOUNDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.5, 0.75),
    *(1.0, 2.0, 2.5, 5.0, 10.0, 20.0, 50.0, 100.0),
)
TOKEN_BOUNDS = tuple(digit * 10.0**power for power in range(6) for digit in (1, 2, 5))


@dataclass
class Histogram:
    """Histogram by upper bounds; the last of `counts` is for values above all `bounds`. unit: suffix of the name."""

    bounds: tuple[float, ...] = _BOUNDS
    counts: list[int] = field(init=False)
    total: float = 0.0
    unit: str = "seconds"

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return (bound as text, number of values up to it) pairs, as in Prometheus."""
        return list(zip([*map(str, self.bounds), "+Inf"], accumulate(self.counts), strict=True))

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)


@dataclass
class EngineMetrics:
    """Counts and latencies of an engine since its creation.

    Attributes:
        requests: requests added.
        finished: requests that ended, by the finish reason of their last completion.
        preempted: completions preempted, by "swap" or "recompute".
        steps, mixed_steps: steps that ran a forward, and steps that ran both prompt tokens and decodes.
        failed_forwards: calls of the executor that raised or returned wrong results.
        overlapped_steps: steps launched before the previous step's tokens were read.
        dropped_tokens: tokens computed by overlapped steps for completions that had already ended.
        prefill_tokens: tokens run for prompts, and again after preemptions.
        cached_tokens: prompt tokens found in the cache.
        decode_tokens: tokens run for decoding sequences, drafts included.
        generated_tokens: new tokens of all outputs.
        draft_tokens, accepted_tokens: drafts verified, and drafts accepted.
        time_to_first_token: time from a request's arrival to its first token.
        time_per_output_token: time per token after the first, mean over all completions of a request.
        step_time: time of a whole step.
        step_tokens: tokens run in a step.
    """

    requests: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    preempted: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    mixed_steps: int = 0
    failed_forwards: int = 0
    overlapped_steps: int = 0
    dropped_tokens: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    decode_tokens: int = 0
    generated_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    time_to_first_token: Histogram = field(default_factory=Histogram)
    time_per_output_token: Histogram = field(default_factory=Histogram)
    step_time: Histogram = field(default_factory=Histogram)
    step_tokens: Histogram = field(default_factory=lambda: Histogram(TOKEN_BOUNDS, unit=""))


@dataclass(frozen=True)
class EngineStatus:
    """State of an engine at one moment.

    Attributes:
        waiting, swapped: completions in the queue, and how many of them have K/V in host memory.
        prefilling, decoding: running completions that run their prompt, and that decode.
        used_blocks, num_blocks: blocks of the KV cache; None without a cache manager.
        retained_blocks, pinned_blocks: blocks with a priority, and blocks of pins; see `CacheStats`.
        lora: the executor's `lora_metrics_snapshot`.
        tiers: `CacheStats.of_tiers`.
    """

    waiting: int
    swapped: int
    prefilling: int
    decoding: int
    used_blocks: int | None
    num_blocks: int | None
    retained_blocks: int | None = None
    pinned_blocks: int | None = None
    lora: Mapping[str, Any] | None = None
    tiers: Mapping[str, int] = field(default_factory=dict)


def prometheus_text(metrics: EngineMetrics, status: EngineStatus) -> str:
    """Return metrics and status in Prometheus' text format.

    Raises:
        UnsupportedError: the package prometheus-client is not installed.
    """
    try:
        from prometheus_client import generate_latest
    except ImportError as error:
        raise UnsupportedError("a Prometheus page needs prometheus-client: pip install 'paged[metrics]'") from error
    page: bytes = generate_latest(SimpleNamespace(collect=lambda: _families(metrics, status)))  # type: ignore[arg-type]
    return page.decode()


def _families(metrics: EngineMetrics, status: EngineStatus) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    for name, value in vars(metrics).items():
        text = name.replace("_", " ")
        if isinstance(value, Histogram):
            if value.unit:
                name, text = f"{name}_{value.unit}", f"{text} in {value.unit}"
            yield HistogramMetricFamily(f"paged_{name}", text, value.buckets(), value.total)
        elif isinstance(value, Counter):
            counter = CounterMetricFamily(f"paged_{name}", f"requests {text}", labels=["kind"])
            labels = ("swap", "recompute") if name == "preempted" else ("stop", "length", "abort", "timeout", "error")
            # Start at 0, because a rate needs the count before the first event.
            for label, count in (dict.fromkeys(labels, 0) | value).items():
                counter.add_metric([label], count)
            yield counter
        else:
            yield CounterMetricFamily(f"paged_{name}", text, value=value)
    lora = status.lora or {}
    gauges = dict(vars(status))
    for name, value in lora.items():
        gauges[f"lora_{name}"] = value
    for name, value in status.tiers.items():
        gauges[f"cache_{name}"] = value
    for name, gauge in gauges.items():
        if isinstance(gauge, int | float):
            yield GaugeMetricFamily(f"paged_{name}", name.replace("_", " "), value=gauge)
    families: dict[str, Any] = {}
    for adapter, figures in lora.get("adapters", {}).items():
        for name, value in figures.items():
            if name not in families:
                # "tokens" only grows while the adapter is loaded.
                kind = CounterMetricFamily if name == "tokens" else GaugeMetricFamily
                families[name] = kind(f"paged_lora_adapter_{name}", f"adapter {name}", labels=["adapter"])
            families[name].add_metric([adapter], value)
    yield from families.values()
