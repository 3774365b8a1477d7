"""The MoE benchmark: what its cases hold, that wrong results get no time, and what it writes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import paged
from paged.bench import bench_moe
from paged.bench.bench_moe import geometric_means, goals, main
from paged.bench.limits import Ceilings, Cost
from paged.bench.moe_cases import CASES, MODELS, MoeCase

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _torch_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def test_cases_cover_every_power_of_two() -> None:
    for model in MODELS:
        for routing in ("balanced", "zipf"):
            sizes = {case.num_tokens for case in CASES if case.model == model and case.routing == routing}
            assert sizes == {2**exponent for exponent in range(16)}
    assert len({case.name for case in CASES}) == len(CASES)


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
    assert case.cost(batch) == Cost(6 * sum(histogram) * area, num_bytes)


def test_zipf_has_favourites() -> None:
    def largest(routing: str) -> int:
        case = MoeCase(MODELS[0], 256, routing)
        ids = replace(case, model=replace(MODELS[0], hidden_size=1)).batch(CPU, torch.float32).topk_ids
        return int(torch.bincount(ids.flatten()).max())

    assert largest("zipf") > 3 * largest("balanced")


def test_goals_and_means() -> None:
    limits = Ceilings(copy=4e12, read=4e12, matmul=8e14)
    row = {
        "model": "Qwen3-30B-A3B",
        "tokens": 64,
        "bound_by": "memory",
        "active_experts": 128,
        "local_experts": 128,
        "gb_per_s": 3600.0,
        "tflop_per_s": 100.0,
        "peers": {"vllm": {"ratio": 1.5}},
    }
    assert [(goal["value"], goal["met"]) for goal in goals(row, limits)] == [(1.5, True), (90.0, False)]
    prefill = row | {"tokens": 16384, "bound_by": "matmul", "tflop_per_s": 530.0, "peers": {}}
    assert [(goal["value"], goal["met"]) for goal in goals(prefill, limits)] == [(None, None), (530.0, True)]
    assert geometric_means([row, row | {"peers": {"vllm": {"ratio": 6.0}}}, prefill]) == pytest.approx({"vllm": 3.0})


def test_run_on_a_cpu(tmp_path: Path) -> None:
    """A row for every model, against the peers that a CPU has; no case starts once the budget is spent."""
    path = tmp_path / "rows.json"
    arguments = ["--device", "cpu", "--repeats", "2", "--only", "zipf.4096", "--json", str(path)]
    lines: list[str] = []
    assert main(arguments, lines.append) == 0
    report = json.loads(path.read_text())
    assert [row["model"] for row in report["rows"]] == [case.model.name for case in CASES if case.num_tokens == 4096][
        :4
    ]
    assert report["refused"] == {}
    assert report["not_run"] == []
    for row in report["rows"]:
        assert row["percent"] == pytest.approx(100 * row["bound_us"] / row["median_us"])
        assert row["absent"]["vllm"] == "needs a GPU"
        assert ("transformers" in row["peers"]) == ("rank" not in row["name"])
        assert any(line.startswith(row["name"]) for line in lines)
    main([*arguments, "--budget", "0"], lines.append)
    assert "0 rows, 0 refused, 4 not run" in lines[-1]


def test_wrong_result_is_refused_and_wrong_peer_gets_no_ratio(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--repeats", "2", "--only", "Qwen3-30B-A3B.zipf.1024"]
    right = paged.fused_moe
    monkeypatch.setattr(paged, "fused_moe", lambda *args, **options: right(*args, **options) * 1.01)
    lines: list[str] = []
    assert main(arguments, lines.append) == 1
    assert any("refused: WrongResultError" in line for line in lines)
    monkeypatch.setattr(paged, "fused_moe", right)
    peer = next(peer for peer in bench_moe.PEERS if peer.name == "transformers")
    wrong = replace(peer, make=lambda *args: lambda: peer.make(*args)() * 1.01)
    monkeypatch.setattr(bench_moe, "PEERS", (wrong,))
    path = tmp_path / "rows.json"
    assert main([*arguments, "--json", str(path)], lines.append) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["peers"] == {}
    assert row["absent"]["transformers"].startswith("wrong: ")
