"""The kernel benchmark: its arithmetic, its coverage, and that nothing wrong gets a speed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import paged
from paged.bench.attention.cases import AttentionCase
from paged.bench.benchmark import Setting
from paged.bench.check import WrongResultError
from paged.bench.kernels import run as bench_kernels
from paged.bench.kernels.cases import CASES, Case
from paged.bench.kernels.run import check, main, measure
from paged.bench.limits import Ceilings, Cost
from paged.bench.moe.cases import MoeCase, MoeModel
from tests.operations import OPERATIONS

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")
ATTENTION = AttentionCase("mixed", "tiny", (), heads=(4, 2), block_size=16, head_dim=8)
EACH_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(autouse=True)
def _by_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases run what they run on a machine without a GPU, and so does the benchmark where it is called."""
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def run_command(*command: str) -> subprocess.CompletedProcess[str]:
    """In a process that never saw the interpreter; with one thread, as threads that await busy cores take minutes.

    Nor has it seen this test run: a benchmark that finds itself in a parallel run takes one sample only.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = {**inherited, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_attention_cost_of_a_chunk() -> None:
    """3 queries after 5 cached keys see 6 + 7 + 8 = 21 keys: 4 * 4 heads * 8 * 21 operations. Moved: 3 rows of 4 heads
    in and out, 8 of 2 heads of K and of V, 16 bytes each, and one block id."""
    assert ATTENTION.cost(torch.float16, [(3, 8)]) == Cost(2688, (2 * 3 * 4 + 2 * 8 * 2) * 16 + 4)


def test_attention_cost_of_a_decode_step() -> None:
    """4 Hq D L operations, 2 L Hkv D b of K and V, 2 Hq D b of query and output, ceil(40 / 16) = 3 block ids."""
    assert ATTENTION.cost(torch.float16, [(1, 40)]) == Cost(4 * 4 * 8 * 40, 2 * 40 * 2 * 16 + 2 * 4 * 16 + 12)


def test_attention_cost_of_a_mixed_batch_is_the_sum() -> None:
    parts = [ATTENTION.cost(torch.float16, [lengths]) for lengths in ((3, 8), (1, 40))]
    assert ATTENTION.cost(torch.float16, [(3, 8), (1, 40)]) == Cost(
        sum(part.flops for part in parts), sum(part.num_bytes for part in parts)
    )


def test_moe_cost_counts_active_experts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """5 entries of 6 H I operations; weights of the two experts that got some, 5 tokens in and out."""
    case = MoeCase(MoeModel("tiny", 3, 1, 8, 4, 3), 5, "balanced")
    monkeypatch.setattr(MoeCase, "histogram", lambda *_: [3, 0, 2])
    layer, batch = case.layer(CPU, torch.float16), case.batch(CPU, torch.float16)
    assert case.cost(layer, batch) == Cost(6 * 5 * 8 * 4, (3 * 2 * 8 * 4 + 2 * 5 * 8) * 2)


def test_moe_case_takes_its_real_histogram(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MoeCase, "histogram", lambda *_: [6, 0, 0, 6, 0, 6, 6, *[0] * 9])
    (case,) = (case for case in CASES if case.name == "fused_moe.decode")
    assert case.work("check", CPU, torch.float32).cost == Cost(
        6 * 24 * 256 * 128, (3 * 4 * 256 * 128 + 2 * 6 * 256) * 4
    )


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("reshape_and_cache", 4 * 19 * 2 * 128 * 4 + 19 * 8),
        ("copy_blocks", 2 * 3 * 4 * 16 * 2 * 128 * 4 + 4 * 2 * 8),
        ("merge_attn_states", 3 * (19 * 8 * 128 + 19 * 8) * 4),
        ("rms_norm", (2 * 19 + 1) * 4096 * 4),
        ("fused_add_rms_norm", (4 * 19 + 1) * 4096 * 4),
        ("rotary_embedding", 2 * 19 * 10 * 128 * 4 + 19 * (8 + 128 * 4)),
        ("qk_norm_rope_and_cache", 2 * 19 * 12 * 128 * 4 + 19 * (8 + 8 + 128 * 4) + 2 * 128 * 4),
        ("silu_and_mul", 3 * 19 * 12288 * 4),
        ("greedy_argmax", 2 * 9000 * 4 + 2 * 8),
        ("sample_tokens", 2 * 9000 * 4 + 2 * 8),
        ("sample_tokens.top_k_top_p", 2 * 9000 * 12 + 2 * 8),
        ("route_tokens", 19 * 16 * 4 + 19 * 4 * (4 + 4)),
        ("route_and_align", 19 * 16 * 4 + 76 * 8 + 20 * 16 * 4 + 20 * 4 + 4),
        ("moe_align_block_size", 76 * 4 + 20 * 16 * 4 + 20 * 4 + 4),  # 76 entries, at most 15 unused an expert
    ],
)
def test_bytes_of_the_row_operations(name: str, num_bytes: int) -> None:
    (case,) = (case for case in CASES if case.name == name)
    assert case.work("check", CPU, torch.float32).cost == Cost(0, num_bytes)


def test_bound_is_the_slower_of_memory_and_matmul() -> None:
    limits = Ceilings(copy=4e12, read=5e12, matmul=8e14)
    assert limits.bound(Cost(flops=int(8e11), num_bytes=int(1e9))) == (1e-3, "matmul")
    assert limits.bound(Cost(flops=int(8e11), num_bytes=int(1e10))) == (2e-3, "memory")  # of the faster stream


def test_every_public_kernel_has_a_case() -> None:
    assert {"paged_attention", "fused_moe"} <= set(OPERATIONS)
    assert {case.operation for case in CASES} == set(OPERATIONS)


@EACH_CASE
def test_case_agrees_with_the_reference(case: Case) -> None:
    check(case.work("check", CPU, torch.float32))


@EACH_CASE
def test_case_of_a_wrong_operation_is_refused(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operation is replaced by one whose last element is off by one, or by nothing where it returns none."""
    right = getattr(paged, case.operation)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        if case.operation in ("reshape_and_cache", "copy_blocks"):
            return None
        last = result = right(*args, **kwargs)
        while not isinstance(last, torch.Tensor):
            last = last[-1]
        last.view(-1)[-1] += 1
        return result

    monkeypatch.setattr(paged, case.operation, wrong)
    with pytest.raises(WrongResultError, match="elements off"):
        check(case.work("check", CPU, torch.float32))


def test_nan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "rms_norm", lambda x, *_, **__: torch.full_like(x, float("nan")))
    (case,) = (case for case in CASES if case.name == "rms_norm")
    with pytest.raises(WrongResultError):
        check(case.work("check", CPU, torch.float32))


def test_refused_case_gets_no_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The other case of the run still gets its row."""
    monkeypatch.setattr(paged, "rms_norm", lambda x, *_, **__: x)
    lines: list[str] = []
    path = tmp_path / "rows.json"
    arguments = ["--device", "cpu", "--repeats", "2", "--only", "rms_norm", "--json", str(path)]
    assert main(arguments, lines.append) == 1
    report = json.loads(path.read_text())
    assert [row["name"] for row in report["rows"]] == ["fused_add_rms_norm"]
    assert list(report["refused"]) == ["rms_norm"]
    assert any("refused: WrongResultError" in line for line in lines if line.startswith("rms_norm: "))


def test_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="times mean nothing"):
        measure(CASES[0], Setting(CPU, 2))
    with pytest.raises(SystemExit):
        main(["--device", "cpu"])
    assert "times mean nothing" in capsys.readouterr().err


def test_run_on_a_cpu(tmp_path: Path) -> None:
    """The whole table, every case timed twice."""
    path = tmp_path / "rows.json"
    result = run_command("-m", "paged.bench.kernels.run", "--device", "cpu", "--repeats", "2", "--json", str(path))
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(path.read_text())
    assert {"device", "torch", "triton", "date"} <= report.keys()
    assert min(report[name] for name in ("copy_gb_per_s", "read_gb_per_s", "matmul_tflop_per_s")) > 0
    assert [row["name"] for row in report["rows"]] == [case.name for case in CASES]
    for row in report["rows"]:
        assert row["percent"] > 0
        assert row["percent"] == pytest.approx(100 * row["bound_us"] / row["median_us"])
        assert 0 < row["p20_us"] <= row["median_us"] <= row["p80_us"]
        assert row["name"] in result.stdout


@pytest.mark.skipif(importlib.util.find_spec("pytest_benchmark") is None, reason="pytest-benchmark is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the suite runs at full size")
def test_run_under_pytest_benchmark(tmp_path: Path) -> None:
    path = tmp_path / "suite.json"
    suite = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "bench/kernels/run.py", "-k", "silu_and_mul")
    result = run_command(*suite, f"--benchmark-json={path}")
    assert result.returncode == 0, result.stdout + result.stderr
    (benchmark,) = json.loads(path.read_text())["benchmarks"]
    assert benchmark["extra_info"]["name"] == "silu_and_mul"
    assert benchmark["extra_info"]["percent"] > 0
    assert benchmark["extra_info"]["samples"] == bench_kernels.BENCHMARK.repeats["cpu"]
