"""Metrics under vLLM's names, so that its dashboards show this server, too."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from paged.executors.engine.metrics import EngineStatus, Histogram
from paged.executors.serving.gate import Record
from paged.executors.serving.service import Service

_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_SECONDS = ("e2e_request_latency", "request_queue_time")


class ServerMetrics:
    """Counts requests as they end; all else is the engine's."""

    def __init__(self, service: Service) -> None:
        self._engine, self._labels = service.engine, {"model_name": service.config.model_name, "engine": "0"}
        self._seconds = {name: Histogram() for name in _SECONDS}
        self._tokens = {
            name: Histogram(_TOKENS, [0] * (len(_TOKENS) + 1)) for name in ("request_prompt", "request_generation")
        }

    def observe(self, record: Record) -> None:
        """Count a request that has ended, if it has run."""
        if record.queued_s is None:
            return
        for name, seconds in zip(_SECONDS, (record.seconds, record.queued_s), strict=True):
            self._seconds[name].observe(seconds)
        for name, count in zip(self._tokens, (record.prompt_tokens, record.new_tokens), strict=True):
            self._tokens[name].observe(count)

    async def text(self) -> str:
        """Return a page for Prometheus."""
        status = await self._engine.status()
        page: bytes = generate_latest(SimpleNamespace(collect=lambda: self._families(status)))  # type: ignore[arg-type]
        return page.decode()

    def _families(self, status: EngineStatus) -> Iterator[Metric]:
        counts, manager = self._engine.engine.metrics, self._engine.engine.executor.kv_manager
        running = status.prefilling + status.decoding
        usage = (status.used_blocks or 0) / (status.num_blocks or 1)
        gauges = {"num_requests_running": running, "num_requests_waiting": status.waiting, "kv_cache_usage_perc": usage}
        prompts = int(self._tokens["request_prompt"].total)
        totals = {
            "prefix_cache_queries": prompts,
            "prefix_cache_hits": 0 if manager is None else manager.stats().prefix_hit_tokens,
            "num_preemptions": counts.preempted.total(),
            "prompt_tokens": prompts,
            "generation_tokens": counts.generated_tokens,
        }
        histograms = {f"{name}_seconds": histogram for name, histogram in self._seconds.items()}
        histograms |= {f"{name}_tokens": histogram for name, histogram in self._tokens.items()}
        histograms["time_to_first_token_seconds"] = counts.time_to_first_token
        histograms["request_time_per_output_token_seconds"] = counts.time_per_output_token
        names: list[Any] = list(self._labels)
        for name, value in gauges.items():
            yield self._with(GaugeMetricFamily(f"vllm:{name}", name, labels=names), value)
        for name, value in totals.items():
            yield self._with(CounterMetricFamily(f"vllm:{name}", name, labels=names), value)
        ended = CounterMetricFamily("vllm:request_success", "requests", labels=[*names, "finished_reason"])
        for reason, count in counts.finished.items():
            ended.add_metric([*self._labels.values(), reason], count)
        yield ended
        for name, one in histograms.items():
            family = HistogramMetricFamily(f"vllm:{name}", name, labels=names)
            buckets = zip([*map(str, one.bounds), "+Inf"], accumulate(one.counts), strict=True)
            family.add_metric(list(self._labels.values()), list(buckets), one.total)
            yield family

    def _with(self, family: Any, value: float) -> Any:
        family.add_metric(list(self._labels.values()), value)
        return family
