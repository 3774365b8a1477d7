"""`paged verify --candidate`: only a right function gets exit code 0, whatever else one does to its judge."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import paged
from paged.bench.check import Result, WrongResultError
from paged.bench.verification import verify
from paged.bench.verification.candidate import Candidate
from paged.bench.verification.cases import Check
from paged.serving.command_line import cli
from tests.deadline import HANG_S

REUSES_LSE = "tests.bench.cheating:reuses_its_lse"
NORM = ["verify", "--device", "cpu", "--backend", "torch", "--quick", "--op", "rms_norm", "--only", "odd size"]


def _verify(capsys: pytest.CaptureFixture[str], function: str, *options: str) -> tuple[int, str]:
    code = cli.main([*NORM, "--candidate", f"tests.bench.cheating:{function}", *options])
    return code, capsys.readouterr().out


def test_a_right_function_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = _verify(capsys, "right")
    assert code == 0, printed
    assert "1 of 1 right, by tests.bench.cheating:right on cpu" in printed


@pytest.mark.parametrize("operation", ["copy_blocks", "gated_delta_rule", "qk_norm_rope_and_cache", "route_and_align"])
def test_an_operation_that_writes_is_its_own_right_candidate(
    operation: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["verify", "--device", "cpu", "--backend", "torch", "--quick", "--op", operation]
    assert cli.main([*command, "--candidate", f"paged:{operation}"]) == 0
    assert "not checked" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("function", "note"),
    [
        ("clears_x", "changed x[0, 0], which the operation only reads"),
        ("nudges_x", "changed x["),
        ("ruins_weights", "changed weight[0], which the operation only reads"),
        ("returns_x", "returned memory of x, which the operation only reads"),
        ("shrinks_x", "made x torch.float32 of shape [0]"),
        ("remembers", "out[0, 0]: "),
        ("reuses_its_result", "returned the memory of its last result"),
        ("is_right_at_first", "out of a second call[0, 0]: "),
        ("exits", "SystemExit: 0 (cheating.py:"),
        ("ends_at_once", "its process ended with exit code 0, which is no verdict"),
        ("crashes", "its process ended with signal 6"),
        ("forks", "answered what was not asked"),
        ("breaks_a_pipe", "BrokenPipeError"),
        ("interrupts", "KeyboardInterrupt"),
        ("patches_the_judge", "out[0, 0]: "),
        ("answers_itself", "WRONG"),
        ("answers_with_numbers", "its process answered what was not asked"),
        ("writes_after_its_answer", "its process answered what was not asked"),
    ],
)
def test_a_cheating_function_is_wrong(
    function: str, note: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code, printed = _verify(capsys, function)
    assert code == 1, printed
    assert note in printed
    assert "0 of 1 right" in printed
    assert not list(tmp_path.glob("paged-candidate-*"))


@pytest.mark.parametrize(
    ("operation", "case", "function", "note"),
    [
        ("reshape_and_cache", "skipped", "overwrites_the_cache", "changed k_cache["),
        ("paged_attention", "left window", "overwrites_what_it_reads", "changed k_cache["),
    ],
)
def test_blocks_of_a_cache_stay(
    operation: str, case: str, function: str, note: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["verify", "--device", "cpu", "--backend", "torch", "--quick", "--op", operation, "--only", case]
    assert cli.main([*command, "--candidate", f"tests.bench.cheating:{function}"]) == 1
    assert f"WRONG {note}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("operation", "case", "function", "note"),
    [
        ("paged_attention", "sinks", "forgets_its_lse", "returned no lse"),
        ("paged_attention", "sinks", "doubles_its_lse", "dtype torch.float64"),
        ("route_tokens", "groups", "forgets_its_ids", "returned no topk_ids"),
        ("route_tokens", "groups", "counts_in_floats", "dtype torch.float32, expected whole numbers"),
    ],
)
def test_every_result_counts(
    operation: str, case: str, function: str, note: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["verify", "--device", "cpu", "--backend", "torch", "--quick", "--op", operation, "--only", case]
    assert cli.main([*command, "--candidate", f"tests.bench.cheating:{function}"]) == 1
    assert f"WRONG {note}" in capsys.readouterr().out


def test_a_hanging_function_ends_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Other cases do not wait for it again."""
    start = time.monotonic()
    command = ["verify", "--device", "cpu", "--backend", "torch", "--op", "rms_norm", "--call-seconds", "0.5"]
    assert cli.main([*command, "--candidate", "tests.bench.cheating:hangs"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("no answer within 0.5 s") == 1
    assert printed.count("not called: an earlier call took more than 0.5 s") == 5
    assert time.monotonic() - start < HANG_S
    assert cli.main([*command[:-1], "nan", "--candidate", "tests.bench.cheating:hangs"]) == 1
    assert "--call-seconds nan: expected more than 0" in capsys.readouterr().err


def test_what_a_function_prints_is_no_line_of_the_judge() -> None:
    command = [sys.executable, "-m", "paged", *NORM, "--json", "--candidate", "tests.bench.cheating:exits"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert run.returncode == 1
    assert json.loads(run.stdout)["wrong"] == 1
    assert "tests.bench.cheating:exits: 9 of 9 right" in run.stderr


def test_a_closed_output_is_no_verdict() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "paged", *NORM]
    run = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    os.close(writer)
    assert run.returncode == 1
    assert "the output was closed before the last line" in run.stderr


def test_a_module_that_ends_the_process_is_no_candidate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    greets = "import os, sys, time; os.write(int(sys.argv[1]), b'{\"number\": 0}\\n'); time.sleep(60)"
    codes = [
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("import os; os._exit(0)", "exit code 0"),
        (greets, "its process answered what was not asked"),
    ]
    for code, error in codes:
        (tmp_path / "ending.py").write_text(code)
        assert cli.main([*NORM, "--candidate", "ending:norm"]) == 1
        assert error in capsys.readouterr().err


def test_a_replay_takes_a_candidate_of_its_operation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with paged.record(tmp_path):
        paged.rms_norm(torch.randn(2, 16), torch.rand(16))
    (path,) = tmp_path.iterdir()
    replay = ["verify", "--device", "cpu", "--backend", "torch", "--replay", str(path)]
    for function, code in (("right", 0), ("clears_x", 1)):
        assert cli.main([*replay, "--candidate", f"tests.bench.cheating:{function}"]) == code
    capsys.readouterr()
    assert cli.main([*replay, "--op", "silu_and_mul", "--candidate", "tests.bench.cheating:right"]) == 1
    assert "holds a call of rms_norm" in capsys.readouterr().err
    timed = ["bench", "--replay", str(path), "--repeats", "2", "--candidate"]
    assert cli.main([*timed, "tests.bench.cheating:exits"]) == 1


def test_a_case_that_calls_another_function_is_not_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ones = torch.ones(2)
    check = Check("rms_norm: odd size", lambda *_: iter([Result(ones, ones, None)]))
    monkeypatch.setattr(verify, "CHECKS", (check,))
    code, printed = _verify(capsys, "right")
    assert code == 1, "nothing was checked"
    assert "not checked: the case does not call the operation" in printed


@pytest.mark.parametrize(("function", "is_right"), [("paged:paged_attention", True), (REUSES_LSE, False)])
def test_a_second_result_may_not_be_reused(function: str, is_right: bool) -> None:
    """Even if the first one lies in `out`."""
    candidate = Candidate("paged_attention", function)
    q, cache = torch.randn(1, 2, 16), torch.randn(1, 16, 2, 16)
    call: dict[str, Any] = {
        "block_table": torch.zeros(1, 1, dtype=torch.int32),
        "seq_lens": torch.ones(1, dtype=torch.int32),
    }
    call |= {"cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32), "out": torch.empty_like(q)}
    error = contextlib.nullcontext() if is_right else pytest.raises(WrongResultError, match="memory of its last")
    try:
        with error:
            candidate(q=q, k_cache=cache, v_cache=cache.clone(), max_seqlen_q=1, return_lse=True, **call)
    finally:
        candidate.close()


def test_arguments_that_a_call_writes_are_written() -> None:
    """In the judge's process, from what the candidate's process returns."""
    candidate = Candidate("fused_add_rms_norm", "paged:fused_add_rms_norm")
    try:
        x, residual, weight = torch.randn(3, 2, 16)
        arguments = x.clone(), residual.clone(), weight[0]
        expected = paged.fused_add_rms_norm(x, residual, weight[0])
        returned = candidate(*arguments)
    finally:
        candidate.close()
    for got, want, written in zip(returned, expected, arguments, strict=False):
        assert torch.equal(got, want)
        assert torch.equal(written, want)
