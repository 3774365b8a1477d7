"""Metrics under vLLM's names, so that its dashboards show this server, too."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from types import SimpleNamespace

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from paged.executors.engine.async_engine import AsyncEngine
from paged.executors.engine.metrics import EngineStatus, Histogram
from paged.executors.serving.gate import Record

_TOKENS = tuple(digit * 10.0**power for power in range(6) for digit in (1, 2, 5))
# Of `end`, in its order.
_TIMES = (
    "e2e_request_latency request_queue_time request_inference_time request_prefill_time request_decode_time".split()
)
_COUNTS = "request_prompt_tokens request_generation_tokens request_max_num_generation_tokens".split()


class ServerMetrics:
    """Counts requests as they end; all else is the engine's.

    Attributes:
        between_tokens: seconds between two steps that gave tokens to the same prompt.
    """

    def __init__(self, engine: AsyncEngine, model_name: str) -> None:
        self._engine, self._labels = engine, {"model_name": model_name, "engine": "0"}
        self.between_tokens = Histogram()
        self._requests = {f"{name}_seconds": Histogram() for name in _TIMES}
        self._requests |= {name: Histogram(_TOKENS, [0] * (len(_TOKENS) + 1)) for name in _COUNTS}
        self._prompt_tokens = 0

    def end(self, record: Record) -> None:
        """Count a request that has ended, if it has run."""
        if record.queued_s is None:
            return
        self._prompt_tokens += record.prompt_tokens
        total, queued = record.seconds, record.queued_s
        first = total if record.first_token_s is None else record.first_token_s
        times = total, queued, total - queued, first - queued, total - first
        values = *times, record.prompt_tokens, record.new_tokens, record.most_tokens
        for histogram, value in zip(self._requests.values(), values, strict=True):
            histogram.observe(value)

    async def text(self) -> str:
        """Return a page for Prometheus."""
        status = await self._engine.status()
        page: bytes = generate_latest(SimpleNamespace(collect=lambda: self._families(status)))  # type: ignore[arg-type]
        return page.decode()

    def _families(self, status: EngineStatus) -> Iterator[Metric]:
        counts, manager = self._engine.engine.metrics, self._engine.engine.executor.kv_manager
        gauges = {
            "num_requests_running": status.prefilling + status.decoding,
            "num_requests_waiting": status.waiting,
            "kv_cache_usage_perc": (status.used_blocks or 0) / (status.num_blocks or 1),
        }
        cache = None if manager is None else manager.stats()
        totals = {
            "prefix_cache_queries": self._prompt_tokens,
            "prefix_cache_hits": 0 if cache is None else cache.prefix_hit_tokens,
            "external_prefix_cache_queries": 0 if cache is None else cache.host_query_tokens,
            "external_prefix_cache_hits": 0 if cache is None else cache.host_hit_tokens,
            "num_preemptions": counts.preempted.total(),
            "prompt_tokens": self._prompt_tokens,
            "generation_tokens": counts.generated_tokens,
        }
        histograms = self._requests | {
            "inter_token_latency_seconds": self.between_tokens,
            "time_to_first_token_seconds": counts.time_to_first_token,
            "request_time_per_output_token_seconds": counts.time_per_output_token,
        }
        names, labels = list(self._labels), list(self._labels.values())
        for kind, values in ((GaugeMetricFamily, gauges), (CounterMetricFamily, totals)):
            for name, value in values.items():
                family = kind(f"vllm:{name}", name, labels=names)
                family.add_metric(labels, value)
                yield family
        ended = CounterMetricFamily("vllm:request_success", "requests", labels=[*names, "finished_reason"])
        for reason, count in counts.finished.items():
            ended.add_metric([*labels, reason], count)
        yield ended
        for name, histogram in histograms.items():
            of_buckets = HistogramMetricFamily(f"vllm:{name}", name, labels=names)
            buckets = zip([*map(str, histogram.bounds), "+Inf"], accumulate(histogram.counts), strict=True)
            of_buckets.add_metric(labels, list(buckets), histogram.total)
            yield of_buckets
