"""Metrics under vLLM's names, so that vLLM's dashboards also show this server."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from types import SimpleNamespace

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from paged.executors.engine.async_engine import AsyncEngine
from paged.executors.engine.metrics import TOKEN_BOUNDS, EngineStatus, Histogram
from paged.serving.http.gate import RequestLog

# Names of the times that `end` records, in the same order.
_TIMES = (
    "e2e_request_latency request_queue_time request_inference_time request_prefill_time request_decode_time".split()
)
# Name of each sleep level, from 0.
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
_COUNTS = "request_prompt_tokens request_generation_tokens request_max_num_generation_tokens".split()


class ServerMetrics:
    """Counts requests when they end; all other metrics come from the engine.

    Attributes:
        between_tokens: seconds between two steps that gave tokens to the same prompt's choices.
    """

    def __init__(self, engine: AsyncEngine, model_name: str) -> None:
        self._engine, self._labels = engine, {"model_name": model_name, "engine": "0"}
        self.between_tokens = Histogram()
        self._requests: dict[str, Histogram] = {}
        for name in _TIMES:
            self._requests[f"{name}_seconds"] = Histogram()
        for name in _COUNTS:
            self._requests[name] = Histogram(TOKEN_BOUNDS)
        self._prompt_tokens: Counter[str] = Counter()  # by source
        self._answers: Counter[tuple[str, str]] = Counter()  # by route and status class
        self._answer_times: defaultdict[str, Histogram] = defaultdict(Histogram)  # by route

    def end(self, log: RequestLog, route: str) -> None:
        """Count a request that has ended. route: its path if it is a known route."""
        if log.method == "POST" and log.status:
            self._answers[route, f"{log.status // 100}xx"] += 1
            self._answer_times[route].observe(log.seconds)
        if log.queued_s is None:
            return
        self._prompt_tokens["local_compute"] += log.prompt_tokens - log.cached_tokens
        self._prompt_tokens["local_cache_hit"] += log.cached_tokens - log.loaded_tokens
        self._prompt_tokens["external_kv_transfer"] += log.loaded_tokens
        total, queued = log.seconds, log.queued_s
        first = total if log.first_token_s is None else log.first_token_s
        times = total, queued, total - queued, first - queued, total - first
        values = *times, log.prompt_tokens, log.new_tokens, log.most_tokens
        for histogram, value in zip(self._requests.values(), values, strict=True):
            histogram.observe(value)

    async def text(self) -> str:
        """Return all metrics in Prometheus' text format."""
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
        num_prompt_tokens = self._prompt_tokens.total()
        totals = {
            "prefix_cache_queries": num_prompt_tokens,
            "prefix_cache_hits": 0,
            "external_prefix_cache_queries": 0,
            "external_prefix_cache_hits": 0,
            "num_preemptions": counts.preempted.total(),
            "prompt_tokens": num_prompt_tokens,
            "prompt_tokens_cached": num_prompt_tokens - self._prompt_tokens["local_compute"],
            "generation_tokens": counts.generated_tokens,
        }
        if manager is not None:
            cache = manager.stats()
            totals["prefix_cache_hits"] = cache.prefix_hit_tokens
            totals["external_prefix_cache_queries"] = cache.host_query_tokens
            totals["external_prefix_cache_hits"] = cache.host_hit_tokens
        histograms = self._requests | {
            "inter_token_latency_seconds": self.between_tokens,
            "time_to_first_token_seconds": counts.time_to_first_token,
            "request_time_per_output_token_seconds": counts.time_per_output_token,
            "iteration_tokens_total": counts.step_tokens,
        }
        labels, label_values = list(self._labels), list(self._labels.values())
        for kind, values in ((GaugeMetricFamily, gauges), (CounterMetricFamily, totals)):
            for name, value in values.items():
                family = kind(f"vllm:{name}", name, labels=labels)
                family.add_metric(label_values, value)
                yield family
        yield self._by(CounterMetricFamily, "prompt_tokens_by_source", "source", self._prompt_tokens)
        yield self._by(CounterMetricFamily, "request_success", "finished_reason", counts.finished)
        yield self._by(GaugeMetricFamily, "num_requests_waiting_by_reason", "reason", {"capacity": status.waiting})
        sleep_states = dict.fromkeys(_SLEEP_STATES, 0)
        sleep_states[_SLEEP_STATES[self._engine.engine.executor.sleep_level]] = 1
        yield self._by(GaugeMetricFamily, "engine_sleep_state", "sleep_state", sleep_states)
        for name, histogram in histograms.items():
            distribution = HistogramMetricFamily(f"vllm:{name}", name, labels=labels)
            distribution.add_metric(label_values, histogram.buckets(), histogram.total)
            yield distribution
        # The names of prometheus-fastapi-instrumentator, which vLLM's dashboards use.
        answers = CounterMetricFamily("http_requests", "answers", labels=["handler", "status", "method"])
        for (route, status_class), total in self._answers.items():
            answers.add_metric([route, status_class, "POST"], total)
        yield answers
        times = HistogramMetricFamily("http_request_duration_seconds", "time to answer", labels=["handler", "method"])
        for route, histogram in self._answer_times.items():
            times.add_metric([route, "POST"], histogram.buckets(), histogram.total)
        yield times

    def _by(
        self, kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, label: str, values: Mapping[str, float]
    ) -> Metric:
        """Return a metric family of values by one more label."""
        family = kind(f"vllm:{name}", name, labels=[*self._labels, label])
        for label_value, value in values.items():
            family.add_metric([*self._labels.values(), label_value], value)
        return family
