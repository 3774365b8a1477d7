"""What an engine counts: by work that was done, and by nothing else."""

from __future__ import annotations

import sys
from dataclasses import asdict

import pytest
import torch

from paged import Engine, EngineConfig, UnsupportedError, prometheus_text
from paged.executors.engine.metrics import Histogram
from tests.executors.engine_cases import PROMPTS, TEN
from tests.executors.oracle import make_executor

parser = pytest.importorskip("prometheus_client.parser")


def test_figures_of_a_run(device: torch.device) -> None:
    executor = make_executor(device, num_blocks=64)
    engine = Engine(executor, EngineConfig(max_num_seqs=2, prepare_ahead=False))
    metrics, empty = engine.metrics, asdict(engine.metrics)
    engine.step()
    assert asdict(metrics) == empty, "nothing was done"
    for prompt in PROMPTS:
        engine.add_request(prompt, TEN)
    engine.step()
    status = engine.status()
    assert (status.waiting, status.prefilling, status.decoding, status.num_blocks) == (3, 0, 2, 64)
    assert status.used_blocks == 2
    while engine.num_unfinished:
        engine.step()
    assert (metrics.requests, metrics.finished, metrics.generated_tokens) == (5, {"length": 5}, 50)
    assert metrics.prefill_tokens == sum(map(len, PROMPTS)) == executor.status().prefill_tokens
    assert metrics.decode_tokens == 45 == executor.decode_count
    assert metrics.time_to_first_token.count == metrics.time_per_output_token.count == 5
    assert metrics.step_time.count == metrics.steps
    assert 0 < metrics.time_per_output_token.total < metrics.time_to_first_token.total + metrics.step_time.total
    assert metrics.mixed_steps < metrics.steps
    done = asdict(metrics)
    engine.step()
    assert asdict(metrics) == done
    assert engine.status().used_blocks == 0


def test_histogram_counts_up_to_its_bounds() -> None:
    histogram = Histogram()
    for seconds in (0.0005, 0.001, 0.0011, 1000.0):
        histogram.observe(seconds)
    assert histogram.counts == [2, 1, *[0] * 14, 1]
    assert (histogram.count, histogram.total) == (4, pytest.approx(1000.0026))


def test_prometheus_reads_the_page(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(make_executor(device))
    engine.generate(PROMPTS, TEN, progress=False)
    page = prometheus_text(engine.metrics, engine.status())
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in parser.text_string_to_metric_families(page)
        for sample in family.samples
    }
    assert samples["paged_generated_tokens_total",] == 50
    assert samples["paged_finished_total", "length"] == 5
    assert samples["paged_time_to_first_token_seconds_count",] == 5
    assert samples["paged_time_to_first_token_seconds_bucket", "+Inf"] == 5
    assert samples["paged_decoding",] == 0
    assert samples["paged_num_blocks",] == 32
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(UnsupportedError, match="prometheus-client"):
        prometheus_text(engine.metrics, engine.status())
