"""The MoE benchmark: what its cases cost, that wrong results get no time, and what it writes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import paged
from paged.bench.limits import Ceilings, Cost
from paged.bench.moe import run as bench_moe
from paged.bench.moe.cases import CASES, MODELS
from paged.bench.moe.run import goals, main
from paged.bench.problems.experts import MoeCase
from paged.bench.problems.formats import Format

pytestmark = pytest.mark.usefixtures("by_pytorch")
CPU = torch.device("cpu")
GROUPS = 192 * 8 + 256 * 3  # of 128 columns


def _run(folder: Path, *options: str) -> dict[str, Any]:
    """What a run with two samples a case writes."""
    path = folder / "rows.json"
    assert main(["--device", "cpu", "--repeats", "2", "--json", str(path), *options], lambda _: None) == 0
    return json.loads(path.read_text())


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_tokens_have_distinct_experts_and_cost_what_is_here(model: Any) -> None:
    case = MoeCase(model, 64, "balanced").small()
    batch = case.batch(CPU, torch.float32)
    assert all(len(set(row)) == case.model.top_k for row in batch.topk_ids.tolist())
    assert torch.allclose(batch.topk_weights.sum(1), torch.ones(64))
    histogram = case.histogram(batch)
    assert len(histogram) == case.model.num_local_experts
    assert (sum(histogram) == batch.topk_ids.numel()) == model.is_whole
    active = sum(entries > 0 for entries in histogram)
    area = case.model.hidden_size * case.model.intermediate_size
    num_bytes = (3 * active * area + 2 * 64 * case.model.hidden_size) * 4
    assert case.cost(case.layer(CPU, torch.float32), batch) == Cost(6 * sum(histogram) * area, num_bytes)


@pytest.mark.parametrize(
    ("layout", "name", "expert_bytes"),
    # An expert's 192 x 256 and 256 x 96 weights, in words of whole units, and 4 bytes for every scale, or one.
    [
        (Format("e4m3", 128, 128), "e4m3-128x128", 73728 + 4 * (2 * 2 + 2)),
        (Format("e4m3", 1, 0), "e4m3-channel", 73728 + 4 * (192 + 256)),
        (Format("e4m3", 0, 0), "e4m3-tensor", 73728 + 4 * 2),
        (Format("int8", 1, 128), "int8-1x128", 73728 + 4 * GROUPS),
        (Format("int4", 1, 128), "int4-1x128", 73728 // 2 + 4 * GROUPS),
        (Format("int4", 1, 128, True, True), "int4-words-1x128-zeros", 192 * 128 + 256 * 64 + 5 * GROUPS),
        (Format("mxfp4", 1, 32), "mxfp4-1x32", 192 * (128 + 8) + 256 * (64 + 3) + 2 * 4),
    ],
    ids=str,
)
def test_quantized_weights_cost_what_is_stored(layout: Format, name: str, expert_bytes: int) -> None:
    case = MoeCase(MODELS[0], 64, "balanced", layout)
    assert case.name == f"Qwen3-30B-A3B-{name}.balanced.64"
    case = case.small()
    layer, batch = case.layer(CPU, torch.float32), case.batch(CPU, torch.float32)
    active = sum(entries > 0 for entries in case.histogram(batch))
    assert case.cost(layer, batch) == Cost(6 * 64 * 8 * 256 * 96, active * expert_bytes + 2 * 64 * 256 * 4)


def test_goals() -> None:
    limits = Ceilings(copy=4e12, read=4e12, matmul=8e14)
    row = {"model": "Qwen3-30B-A3B", "format": None, "tokens": 64, "bound_by": "memory", "active_experts": 128}
    row |= {"local_experts": 128, "gb_per_s": 3600.0, "tflop_per_s": 100.0, "peers": {"vllm": {"ratio": 1.5}}}
    assert [(goal["value"], goal["met"]) for goal in goals(row, limits)] == [(1.5, True), (90.0, False)]
    assert [goal["value"] for goal in goals(row | {"format": "e4m3-128x128"}, limits)] == [1.5]
    prefill = row | {"tokens": 16384, "bound_by": "matmul", "tflop_per_s": 530.0, "peers": {}}
    assert [(goal["value"], goal["met"]) for goal in goals(prefill, limits)] == [(None, None), (530.0, True)]


def test_quantized_weights_run_on_a_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cases = [replace(case, num_tokens=4) for case in CASES if case.format and case.num_tokens == 16][::2]
    monkeypatch.setattr(bench_moe, "CASES", cases)
    monkeypatch.setattr(bench_moe, "CPU_CASES", ())
    monkeypatch.setattr(bench_moe, "MIN_REPEATS", 1)
    rows = _run(tmp_path)["rows"]
    assert [(row["name"], row["format"]) for row in rows] == [
        (case.small().name, str(case.small().format)) for case in cases
    ]
    for row in rows:
        assert row["matmul_dtype"] == "float32"
        assert row["absent"]["transformers"] == "takes no quantised weights"


def test_wrong_result_is_refused_and_wrong_peer_gets_no_ratio(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    only = ["--only", "Qwen3-30B-A3B/16.zipf.64"]
    right, lines = paged.fused_moe, []
    monkeypatch.setattr(paged, "fused_moe", lambda *args, **options: right(*args, **options) * 1.01)
    assert main(["--device", "cpu", "--repeats", "2", *only], lines.append) == 1
    assert any("refused: WrongResultError" in line for line in lines)
    monkeypatch.setattr(paged, "fused_moe", right)
    peer = next(peer for peer in bench_moe.PEERS if peer.name == "transformers")
    wrong = replace(peer, make=lambda *args: lambda: peer.make(*args)() * 1.01)
    monkeypatch.setattr(bench_moe, "PEERS", (wrong,))
    (row,) = _run(tmp_path, *only)["rows"]
    assert row["peers"] == {}
    assert row["absent"]["transformers"].startswith("wrong: ")
