"""Metrics under vLLM's names, so that its dashboards show this server, too."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from paged.executors.engine.async_engine import AsyncEngine
from paged.executors.engine.metrics import EngineStatus
from paged.executors.serving.gate import Record

_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)

_TIMES = (
    "e2e_request_latency_seconds",
    "inter_token_latency_seconds",
    "request_queue_time_seconds",
    "request_inference_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
)
_COUNTS = ("request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens")


class ServerMetrics:
    """Counts requests as they end; all else is the engine's."""

    def __init__(self, engine: AsyncEngine, model_name: str) -> None:
        self._engine, self._labels = engine, {"model_name": model_name, "engine": "0"}
        self._registry = CollectorRegistry()
        self._histograms = {
            name: Histogram(f"vllm:{name}", name, list(self._labels), buckets=bounds, registry=self._registry).labels(
                **self._labels
            )
            for bounds, names in ((_SECONDS, _TIMES), (_TOKENS, _COUNTS))
            for name in names
        }
        self._status: EngineStatus | None = None
        self._prompt_tokens = 0
        self._registry.register(self)  # type: ignore[arg-type]

    def observe(self, **values: float) -> None:
        """Count values, each by the name of its histogram."""
        for name, value in values.items():
            self._histograms[name].observe(value)

    def end(self, record: Record) -> None:
        """Count a request that has ended, if it has run."""
        if record.queued_s is not None:
            self._prompt_tokens += record.prompt_tokens
            first = record.seconds if record.first_token_s is None else record.first_token_s
            self.observe(
                e2e_request_latency_seconds=record.seconds,
                request_queue_time_seconds=record.queued_s,
                request_inference_time_seconds=record.seconds - record.queued_s,
                request_prefill_time_seconds=first - record.queued_s,
                request_decode_time_seconds=record.seconds - first,
                request_prompt_tokens=record.prompt_tokens,
                request_generation_tokens=record.new_tokens,
                request_max_num_generation_tokens=record.most_tokens,
            )

    async def text(self) -> str:
        """Return a page for Prometheus."""
        self._status = await self._engine.status()
        page: bytes = generate_latest(self._registry)
        return page.decode()

    def collect(self) -> Iterator[Metric]:
        """Yield what is read when it is asked for; the registry calls this."""
        if (status := self._status) is None:
            return
        counts, manager = self._engine.engine.metrics, self._engine.engine.executor.kv_manager
        gauges = {
            "num_requests_running": status.prefilling + status.decoding,
            "num_requests_waiting": status.waiting,
            "kv_cache_usage_perc": (status.used_blocks or 0) / (status.num_blocks or 1),
        }
        totals = {
            "prefix_cache_queries": self._prompt_tokens,
            "prefix_cache_hits": 0 if manager is None else manager.stats().prefix_hit_tokens,
            "num_preemptions": counts.preempted.total(),
            "prompt_tokens": self._prompt_tokens,
            "generation_tokens": counts.generated_tokens,
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
        own = {"time_to_first_token": counts.time_to_first_token}
        own["request_time_per_output_token"] = counts.time_per_output_token
        for name, one in own.items():
            histogram = HistogramMetricFamily(f"vllm:{name}_seconds", name, labels=names)
            buckets = zip([*map(str, one.bounds), "+Inf"], accumulate(one.counts), strict=True)
            histogram.add_metric(labels, list(buckets), one.total)
            yield histogram
