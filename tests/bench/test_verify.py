"""`paged verify`: right operations pass, whatever is slightly wrong turns its own row red and no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import paged
from paged.bench.check import WrongResultError, error_shares
from paged.bench.verification.cases import CHECKS
from paged.executors import paged_attention_executor
from paged.executors.command_line import cli
from tests.operations import OPERATIONS

NAN, INF = float("nan"), float("inf")
Verify = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def verify(capsys: pytest.CaptureFixture[str]) -> Verify:
    """Exit code and, by case, the rows of the quick checks by the PyTorch implementations."""

    def run(only: str, *arguments: str) -> tuple[int, dict[str, Any]]:
        code = cli.main(["verify", "--device", "cpu", "--backend", "torch", "--only", only, "--json", *arguments])
        report = json.loads(capsys.readouterr().out)
        assert report["backend"] == "torch"
        return code, {row["case"]: row for row in report["rows"]}

    return run


def test_quick_checks_pass_and_say_how_closely(verify: Verify, capsys: pytest.CaptureFixture[str]) -> None:
    for only in ("norm", "oracle", "fused_moe: "):
        code, rows = verify(only, "--quick")
        assert code == 0
        assert all(row["ok"] and row["worst"] <= 1 and row["dtype"] == "float32" for row in rows.values())
        assert any(row["worst"] > 0 for row in rows.values())
        assert all(only in name for name in rows)
    assert cli.main(["verify", "--device", "cpu", "--backend", "torch", "--only", "merge"]) == 0
    found = capsys.readouterr()
    assert "6 of 6 right, by torch on cpu" in found.out
    assert found.out.count(" ok\n") == 6, "two cases in three dtypes"
    assert "verify" in found.err, "the bar"
    assert "PAGED_BACKEND" not in os.environ
    assert verify("no such case")[0] == 1, "nothing was checked"


def test_every_public_kernel_is_checked() -> None:
    assert "paged_attention" in OPERATIONS
    assert set(OPERATIONS) <= {check.name.partition(".")[0] for check in CHECKS if check.is_quick}


@pytest.mark.parametrize(
    ("operation", "only", "wrong"),
    [
        ("rms_norm", "rms_norm", {"rms_norm", "rms_norm, silu_and_mul: odd sizes"}),
        ("merge_attn_states", "merge", {"merge_attn_states", "merge_attn_states: empty rows"}),
        ("route_tokens", "route_tokens", {"route_tokens", "route_tokens: groups, bias, shared experts"}),
    ],
)
def test_a_slightly_wrong_operation_turns_its_rows_red(
    operation: str, only: str, wrong: set[str], verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One element in a thousandth of itself."""
    right = getattr(paged, operation)

    def faulty(*args: Any, **kwargs: Any) -> Any:
        result = right(*args, **kwargs)
        first = result if isinstance(result, torch.Tensor) else result[0]
        first.view(-1)[0] *= 1.001
        return result

    assert verify(only, "--quick")[0] == 0
    monkeypatch.setattr(paged, operation, faulty)
    code, rows = verify(only, "--quick")
    assert code == 1
    assert {name for name, row in rows.items() if not row["ok"]} == wrong
    assert len(rows) > len(wrong) or only != "rms_norm", "others are right"


def test_a_dropped_token_and_a_failing_operation(
    verify: Verify, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = paged.paged_attention

    def forgetful(*args: Any, seq_lens: torch.Tensor, **kwargs: Any) -> Any:
        return right(*args, seq_lens=(seq_lens - 1).clamp(min=0), **kwargs)

    monkeypatch.setattr(paged, "paged_attention", forgetful)
    code, rows = verify("paged_attention: ", "--quick")
    assert code == 1
    assert not any(row["ok"] for row in rows.values())

    def failing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(paged, "greedy_argmax", lambda logits, **_: torch.zeros(len(logits), dtype=torch.int64))
    code, rows = verify("greedy_argmax", "--quick")
    assert code == 1
    assert rows["greedy_argmax"]["error"] == "infinite, NaN, or a whole number that differs"

    monkeypatch.setattr(paged, "silu_and_mul", failing)
    code, rows = verify("silu_and_mul", "--quick")
    assert code == 1
    assert rows["silu_and_mul"]["worst"] is None
    assert rows["silu_and_mul"]["error"] == "RuntimeError: no such kernel"
    assert cli.main(["verify", "--device", "cpu", "--quick", "--backend", "torch", "--only", "silu_and_mul"]) == 1
    assert "WRONG RuntimeError: no such kernel" in capsys.readouterr().out


def test_the_oracle_sees_a_wrong_scale(verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    right = paged_attention_executor.paged_attention
    monkeypatch.setattr(
        paged_attention_executor, "paged_attention", lambda *a, **k: right(*a, **k | {"softmax_scale": 0.36})
    )
    code, rows = verify("oracle", "--quick")
    assert code == 1
    assert not any(row["ok"] for row in rows.values())


def test_triton_on_a_cpu_runs_in_the_interpreter() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [
        "-m",
        "paged",
        "verify",
        "--device",
        "cpu",
        "--backend",
        "triton",
        "--quick",
        "--only",
        "merge",
        "--json",
    ]
    result = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, check=True
    )  # fmt: skip
    report = json.loads(result.stdout)
    assert (report["backend"], report["interpreted"], report["wrong"]) == ("triton", True, 0)
    assert {row["dtype"] for row in report["rows"]} == {"float32"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_no_gpu_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "--device", "cuda"]) == 1
    assert "torch sees no GPU here" in capsys.readouterr().err


def test_error_shares() -> None:
    want = torch.tensor([3.0, 4.0, 0.0, NAN, INF, -INF]).double()
    shares = error_shares(want.float(), want)
    assert shares.tolist() == [0.0] * 6
    budget = 1e-5 * (4 + (25 / 6) ** 0.5)
    got = want.float() + torch.tensor([0, 2e-5, 0, 0, 0, 0])
    assert float(error_shares(got, want)[1]) == pytest.approx(2e-5 / budget, rel=0.05)
    assert float(error_shares(got, want, torch.float16).max()) < 0.01
    for position, value in ((0, NAN), (0, INF), (3, 1.0), (4, -INF), (4, NAN), (5, 0.0)):
        wrong = want.float()
        wrong[position] = value
        assert error_shares(wrong, want).isinf().tolist() == [index == position for index in range(6)]
    assert error_shares(torch.tensor([1, 2]), torch.tensor([1, 3])).tolist() == [0.0, INF]
    with pytest.raises(WrongResultError, match="shape"):
        error_shares(torch.zeros(2), torch.zeros(3))
