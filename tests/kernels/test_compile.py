"""Every kernel configuration compiles for every target without a GPU, and the compilers' reports hold no surprise."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="ahead-of-time compilation needs triton")

from bench.compile import SHARED_LIMIT, TARGETS, CompileCase, Report, problems

KERNELS = Path(__file__).resolve().parents[2] / "kernels"


@pytest.mark.parametrize("target", TARGETS)
def test_every_configuration_compiles(target: str, tmp_path: Path) -> None:
    """In a process of its own: this one may have replaced the compiler by the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = tmp_path / "reports.json"
    command = [sys.executable, "-m", "bench.compile", "--target", target, "--json", str(path)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    reports = json.loads(path.read_text())["reports"]
    assert {report["target"] for report in reports} == {target}
    kernels = {name for path in KERNELS.glob("*.py") for name in re.findall(r"def (_\w+_kernel)\(", path.read_text())}
    assert len(kernels) > 10
    assert kernels == {report["kernel"] for report in reports}


def test_problems_are_seen() -> None:
    case = CompileCase("", None, {}, {}, expect={"sm_90": ("HGMMA",)})
    sound = Report("", "", "sm_90", registers=200, spills=0, shared=SHARED_LIMIT["sm_90"], instructions={"HGMMA": 4})
    assert problems(case, sound) == []
    faulty = Report(
        "", "", "sm_90", registers=255, spills=8, shared=SHARED_LIMIT["sm_90"] + 1, instructions={"HMMA": 4}
    )
    assert len(problems(case, faulty)) == 3
