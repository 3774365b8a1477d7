"""`paged verify --compiled`, in a process whose kernels are compiled."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paged.bench.compiled.device import CompiledDevice
from paged.errors import InvalidInputError, UnsupportedError
from paged.serving.command_line import cli

ROOT = Path(__file__).resolve().parents[2]
_COMMAND = [sys.executable, "-m", "paged", "verify", "--json", "--quick"]


def _verify(*arguments: str) -> tuple[int, dict[str, Any]]:
    result = subprocess.run([*_COMMAND, *arguments], env=dict(os.environ), capture_output=True, text=True, check=False)
    assert result.stdout, result.stderr
    return result.returncode, json.loads(result.stdout)


@pytest.mark.thorough
def test_verify_on_compiled_kernels() -> None:
    """The tests' process interprets kernels, so that the command starts another one."""
    code, report = _verify("--compiled", "sm_90", "--only", "rms_norm: odd")
    assert (code, report["wrong"], report["compiled"], report["backend"]) == (0, 0, "sm_90", "triton")
    (row,) = report["rows"]
    assert (row["ok"], row["dtype"]) == (True, "bfloat16")
    assert 0 < row["worst"] < 1


def test_settings_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidInputError, match="compiled sm_70: expected one of sm_80, sm_89, sm_90, sm_120"):
        CompiledDevice("sm_70")
    with pytest.raises(InvalidInputError, match="schedule last: expected one of random, one, all"):
        CompiledDevice("sm_90", schedule="last")
    with pytest.raises(UnsupportedError, match="without TRITON_INTERPRET=1"):
        CompiledDevice("sm_90")
    for other in (["--backend", "torch"], ["--device", "cuda"], ["--op", "rms_norm", "--candidate", "module:name"]):
        assert cli.main(["verify", "--compiled", "sm_90", *other]) == 1
        assert "--compiled sm_90: runs the Triton kernels" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arch", "operation"),
    [
        ("sm_80", "paged_attention"),
        ("sm_90", "paged_attention"),
        ("sm_90", "fused_moe"),
        ("sm_80", "quantized_linear"),
        ("sm_90", "gated_delta_rule"),
        ("sm_120", "reshape_and_cache"),
    ],
)
def test_rows_of_large_kernels(arch: str, operation: str) -> None:
    code, report = _verify("--compiled", arch, "--op", operation)
    assert [row for row in report["rows"] if not row["ok"]] == []
    assert (code, report["wrong"], report["not_checked"]) == (0, 0, 0)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("operation", "schedule"), [("route_and_align", "one"), ("route_and_align", "all"), ("sample_tokens", "one")]
)
def test_kernels_with_tickets_in_every_order(operation: str, schedule: str) -> None:
    """CTAs that finish what others have begun."""
    code, report = _verify("--compiled", "sm_90", "--op", operation, "--schedule", schedule, "--num-sms", "3")
    assert (code, report["wrong"], report["not_checked"]) == (0, 0, 0), report["rows"]


@pytest.mark.thorough
def test_tests_of_kernels_run_compiled() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/layers", "-k"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["COMPILED"] = "sm_80"
    options: dict[str, Any] = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True, "check": False}
    result = subprocess.run([*command, "triton and norm"], **options)
    assert result.returncode == 0, result.stdout
    assert " passed" in result.stdout
