"""`paged verify`: right operations pass, whatever is slightly wrong turns its own row red and no other."""

import json
import os
import re
import subprocess
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import paged
from paged.bench.check import WrongResultError, error_shares
from paged.bench.verification.cases import CHECKS
from paged.executors import paged_attention_executor
from paged.kernels.core import compat, device
from paged.serving.command_line import cli
from tests.backends import BACKENDS
from tests.operations import OPERATIONS

NAN, INF = float("nan"), float("inf")
Verify = Callable[[str], tuple[int, dict[str, Any]]]
BY_TORCH = ["verify", "--device", "cpu", "--backend", "torch"]


@pytest.fixture
def verify(capsys: pytest.CaptureFixture[str]) -> Verify:
    """Exit code and, by case, the rows of the quick checks by the PyTorch implementations."""

    def run(only: str) -> tuple[int, dict[str, Any]]:
        code = cli.main([*BY_TORCH, "--quick", "--only", only, "--json"])
        report = json.loads(capsys.readouterr().out)
        assert report["backend"] == "torch"
        return code, {row["case"]: row for row in report["rows"]}

    return run


def test_quick_checks_pass_and_say_how_closely(verify: Verify, capsys: pytest.CaptureFixture[str]) -> None:
    for only in ("norm", "oracle", "fused_moe: "):
        code, rows = verify(only)
        assert code == 0
        assert all(row["ok"] and row["worst"] <= 1 and row["dtype"] == "float32" for row in rows.values())
        assert any(row["worst"] > 0 for row in rows.values())
        assert all(only in name for name in rows)
    assert cli.main([*BY_TORCH, "--only", "merge"]) == 0
    found = capsys.readouterr()
    assert "6 of 6 right, by torch on cpu" in found.out
    assert found.out.count(" ok\n") == 6, "two cases in three dtypes"
    assert "PAGED_BACKEND" not in os.environ
    assert cli.main([*BY_TORCH, "--only", "no such case"]) == 1, "nothing was checked"
    assert "--only no such case: in the name of no case; there are paged_attention.prefill" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.thorough
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_row_is_right(backend: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole command, as whoever installs the library runs it, with half of every budget to spare.

    All rows by PyTorch; by the others, which take 160 and 200 s for all, the quick ones: the tests of the kernels solve
    the same problems on every backend and in every dtype.
    """
    command = ["verify", "--device", "cpu", "--backend", backend, "--json"]
    checks, num_dtypes = list(CHECKS), 3
    if backend != "torch":
        command.append("--quick")
        checks, num_dtypes = [check for check in CHECKS if check.is_quick], 1
    if backend == "triton":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    code = cli.main(command)
    report = json.loads(capsys.readouterr().out)
    rows = report["rows"]
    assert [row for row in rows if not row["ok"]] == []
    assert (code, report["wrong"], report["backend"]) == (0, 0, backend)
    assert len(rows) == num_dtypes * len(checks)
    assert [row for row in rows if row["worst"] >= 0.5] == []


def test_every_public_kernel_is_checked() -> None:
    assert "paged_attention" in OPERATIONS
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    assert set(OPERATIONS) <= {check.name.partition(".")[0] for check in CHECKS if check.is_quick}


@pytest.mark.parametrize(
    ("operation", "others"),
    [
        ("rms_norm", ["rms_norm: odd size"]),
        ("merge_attn_states", ["merge_attn_states: empty rows"]),
        ("route_tokens", ["route_tokens: groups, bias, shared experts"]),
    ],
)
def test_a_slightly_wrong_operation_turns_its_rows_red(
    operation: str, others: list[str], verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One element in a thousandth of itself."""
    right = getattr(paged, operation)

    def faulty(*args: Any, **kwargs: Any) -> Any:
        result = right(*args, **kwargs)
        first = result if isinstance(result, torch.Tensor) else result[0]
        first.view(-1)[0] *= 1.001
        return result

    monkeypatch.setattr(paged, operation, faulty)
    code, rows = verify(operation)
    assert code == 1
    assert {name for name, row in rows.items() if not row["ok"]} == {operation, *others}
    assert len(rows) > 2 or operation != "rms_norm", "others are right"


def test_a_dropped_token_and_a_failing_operation(
    verify: Verify, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = paged.paged_attention

    def forgetful(*args: Any, seq_lens: torch.Tensor, **kwargs: Any) -> Any:
        return right(*args, seq_lens=(seq_lens - 1).clamp(min=0), **kwargs)

    monkeypatch.setattr(paged, "paged_attention", forgetful)
    code, rows = verify("paged_attention: ")
    assert code == 1
    assert not any(row["ok"] for row in rows.values())

    monkeypatch.setattr(paged, "greedy_argmax", lambda logits, **_: torch.zeros(len(logits), dtype=torch.int64))
    code, rows = verify("greedy_argmax")
    assert (code, rows["greedy_argmax"]["error"]) == (1, "infinite, NaN, or a whole number that differs")

    def failing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(paged, "silu_and_mul", failing)
    code, rows = verify("silu_and_mul")
    found = rows["silu_and_mul"]
    assert (code, found["worst"]) == (1, None)
    assert re.fullmatch(r"RuntimeError: no such kernel \(test_verify\.py:\d+\)", found["error"])
    assert cli.main([*BY_TORCH, "--quick", "--only", "silu_and_mul"]) == 1
    assert "WRONG RuntimeError: no such kernel" in capsys.readouterr().out


def test_the_oracle_sees_a_wrong_scale(verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    right = paged_attention_executor.paged_attention
    monkeypatch.setattr(
        paged_attention_executor, "paged_attention", lambda *a, **k: right(*a, **k | {"softmax_scale": 0.36})
    )
    code, rows = verify("oracle")
    assert code == 1
    assert not any(row["ok"] for row in rows.values())


def test_triton_on_a_cpu_runs_in_the_interpreter(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In another process where triton came without it."""
    pytest.importorskip("triton")
    arguments = ["verify", "--device", "cpu", "--backend", "triton", "--quick", "--only", "merge", "--json"]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert cli.main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["backend"], report["interpreted"], report["wrong"]) == ("triton", True, 0)
    assert {row["dtype"] for row in report["rows"]} == {"float32"}
    in_every_dtype = ["verify", "--device", "cpu", "--backend", "triton", "--only", "fp8 cache", "--json"]
    assert cli.main(in_every_dtype) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["dtype"] for row in rows} == {"float32", "float16", "bfloat16"}
    assert max(row["worst"] for row in rows) < 0.5
    monkeypatch.delenv("TRITON_INTERPRET")
    begun: list[Any] = []
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: begun.append((a, k)) or SimpleNamespace(returncode=5))
    assert cli.main(arguments) == 5
    (((command,), options),) = begun
    assert sorted(command[1:]) == sorted(["-m", "paged", *arguments])
    assert options["env"]["TRITON_INTERPRET"] == "1"


def test_by_default_what_models_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """numba kernels on a CPU that has them, named below the rows; asked for where they cannot run, they are refused."""
    for module in (compat, device):
        monkeypatch.setattr(module, "interpreting", lambda: False)
    arguments = ["verify", "--device", "cpu", "--quick", "--only", "rms_norm"]
    assert cli.main(arguments) == 0
    expected = "numba" if device.has_numba() else "torch"
    assert f"right, by {expected} on cpu" in capsys.readouterr().out
    monkeypatch.setattr(device, "has_numba", lambda: False)
    assert cli.main(arguments) == 0
    assert "right, by torch on cpu" in capsys.readouterr().out
    assert cli.main([*arguments, "--backend", "numba"]) == 1
    assert "numba kernels cannot run on cpu" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_no_gpu_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "--device", "cuda"]) == 1
    assert "torch finds no GPU" in capsys.readouterr().err


def test_error_shares() -> None:
    want = torch.tensor([3.0, 4.0, 0.0, NAN, INF, -INF]).double()
    bound = torch.full_like(want, 1e-5)
    assert error_shares(want.float(), want, bound).tolist() == [0.0] * 6
    got = want.float() + torch.tensor([0, 2e-5, 0, 0, 0, 0])
    assert float(error_shares(got, want, bound)[1]) == pytest.approx(2, rel=0.05)
    assert float(error_shares(got, want, None)[1]) == INF
    for position, value in ((0, NAN), (0, INF), (3, 1.0), (4, -INF), (4, NAN), (5, 0.0)):
        wrong = want.float()
        wrong[position] = value
        assert error_shares(wrong, want, bound).isinf().tolist() == [index == position for index in range(6)]
    assert error_shares(torch.tensor([1, 2]), torch.tensor([1, 3]), None).tolist() == [0.0, INF]
    with pytest.raises(WrongResultError, match="shape"):
        error_shares(torch.zeros(2), torch.zeros(3), None)


@pytest.mark.parametrize(
    ("mistake", "case", "reason"),
    [
        ("next_key", "ALiBi", "as if queries saw the next key"),
        ("wrong_scale", "left window", r"as if softmax_scale were 0\.03125, not 0\.176777"),
        ("stale_block", "ALiBi", r"as if block \d+ were read in place of block \d+, column 3 of block_table"),
        ("int32_offsets", "offsets", "as if the offset of block 2, 2,147,483,648 elements, were computed in 32 bits"),
    ],
)
def test_a_strangers_wrong_kernel_is_found_and_explained(
    mistake: str, case: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    candidate = ["--op", "paged_attention", "--candidate", f"tests.bench.wrong_attention:{mistake}"]
    assert cli.main([*BY_TORCH, "--quick", *candidate, "--only", case, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    (row,) = report["rows"]
    assert (report["wrong"], report["not_checked"], row["ok"]) == (1, 0, False)
    assert re.fullmatch(r"out\[\d+, \d, \d\]: \S+, expected \S+, \S+ times its budget", row["first"])
    assert re.fullmatch(reason, row["reason"])
    assert cli.main([*BY_TORCH, "--quick", *candidate, "--only", case]) == 1
    assert f"WRONG; {row['first']}; {row['reason']}" in capsys.readouterr().out


def test_a_candidate_is_checked_with_what_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """Without an option in use it is right, and options are not checked; what cannot be asked is refused by name."""
    candidate = ["--op", "paged_attention", "--candidate", "tests.bench.wrong_attention:int32_offsets"]
    assert cli.main([*BY_TORCH, "--quick", *candidate, "--only", "decode"]) == 0
    printed = capsys.readouterr().out
    assert "not checked: tests.bench.wrong_attention:int32_offsets takes no k_scale" in printed
    assert "2 of 2 right, 3 not checked, by tests.bench.wrong_attention:int32_offsets on cpu" in printed
    assert cli.main([*BY_TORCH, *candidate, "--only", "sinks"]) == 1, "nothing was checked"
    for options, error in (
        (["--op", "attention"], "--op attention: no operation; there are paged_attention, "),
        (["--candidate", "a:b"], "--candidate: expected --op NAME beside it"),
        (
            ["--op", "rms_norm", "--candidate", "nowhere:f"],
            "--candidate nowhere:f: No module named 'nowhere', expected",
        ),
        (["--op", "rms_norm", "--candidate", "json:f"], "--candidate json:f: module 'json' has no attribute 'f'"),
        (["--op", "rms_norm", "--candidate", "shutil:move"], "takes no x by name, expected arguments of rms_norm(x, "),
    ):
        assert cli.main([*BY_TORCH, *options]) == 1
        assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mistake", "note"),
    [
        ("returns_nothing", "returned NoneType, expected tensors: out"),
        ("returns_half", "dtype torch.bfloat16, expected torch.float32"),
        ("returns_double", "dtype torch.float64, expected one of torch.float32, "),
        ("raises", r"ValueError: too wide \(wrong_norm.py:\d+\)"),
        ("swaps_halves", r"out\[0, 0\]: \S+, expected "),
    ],
)
def test_what_else_a_candidate_does_wrong(mistake: str, note: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In rows of other operations; one that takes some calls of a check is wrong if one of these is."""
    operation = "silu_and_mul" if mistake == "swaps_halves" else "rms_norm"
    candidate = ["--op", operation, "--candidate", f"tests.bench.wrong_norm:{mistake}"]
    assert cli.main([*BY_TORCH, "--quick", *candidate, "--only", "odd size"]) == 1
    assert re.search(f"WRONG.* {note}", capsys.readouterr().out)
