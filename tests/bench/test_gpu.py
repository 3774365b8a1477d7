"""The run of all steps on a GPU machine: a step that fails or hangs takes nothing from the others."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from paged.bench import gpu
from paged.bench.attention import run as bench_attention
from paged.bench.engine import run as bench_engine
from paged.bench.kernels import run as bench_kernels
from paged.bench.moe import run as bench_moe
from paged.bench.moe import tune as bench_tune
from paged.bench.report import build as report


def _step(name: str, code: str, share: float = 1.0, *, resumes: bool = False) -> gpu.Step:
    return gpu.Step(name, lambda _: [sys.executable, "-c", code], share, resumes)


def test_steps_follow_one_another_whatever_happens(tmp_path: Path) -> None:
    """A step that succeeds, one that fails, one that hangs with a child that holds its output, one that succeeds."""
    hang = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    steps = [
        _step("good", "print('first'); print('3 passed'); print()"),
        _step("bad", "print('1 failed'); raise SystemExit(3)"),
        _step("hangs", f"print('started', flush=True); {hang}; time.sleep(60)", 0.1),
        _step("paths", "import os; print(os.environ['PYTHONPATH'])"),
    ]
    start, out = time.monotonic(), tmp_path
    assert gpu.run(steps, out, 20.0, tmp_path / "peers") == 1
    assert time.monotonic() - start < 20
    written = json.loads((out / "gpu.json").read_text())["steps"]
    assert [step["returncode"] for step in written] == [0, 3, -9, 0]
    assert [step["summary"] for step in written[:3]] == ["3 passed", "1 failed", "started"]
    assert written[3]["summary"].split(":")[:2] == [str(gpu.ROOT), str(tmp_path / "peers")]
    assert "first\n3 passed" in (out / "gpu.log").read_text()
    assert sorted(path.name for path in out.iterdir()) == ["gpu.json", "gpu.log"]


def test_benchmark_goes_on_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not so where it ended well, or by a failure of its own, or where no time is left."""
    monkeypatch.setattr(gpu, "_LAST_CASE_SECONDS", 0.0)
    code = "import sys; resumed = '--resume' in sys.argv; print(resumed); sys.exit(1 if resumed else {})"
    for first, resumes, expected in ((3, True, "True"), (-11, True, "True"), (1, True, "False"), (3, False, "False")):
        step = _step("step", code.format(first), resumes=resumes)
        with (tmp_path / "log").open("w") as log:
            assert gpu.run_step(step, 20.0, os.environ, log).summary == expected


@pytest.mark.usefixtures("by_pytorch")
def test_commands_are_understood(tmp_path: Path) -> None:
    """Those of the benchmarks and the report, with no case to run; the tests that the first step names are there."""
    tests, attention, moe, engine, kernels, tune, told = gpu.steps(tmp_path)
    paths = [word for word in tests.command(1.0) if word.removeprefix("--ignore=").startswith("tests/")]
    assert len(paths) == 5
    assert all((gpu.ROOT / path.removeprefix("--ignore=")).exists() for path in paths)
    nothing = ["--only", "no such case", "--device", "cpu", "--repeats", "2"]
    assert gpu.run([_step("good", "print(1)")], tmp_path, 10.0) == 0
    benchmarks = {attention: bench_attention, moe: bench_moe, kernels: bench_kernels, engine: bench_engine}
    for step, module in (*benchmarks.items(), (told, report)):
        python, flag, name, *words = step.command(50.0)
        assert (python, flag, name) == (sys.executable, "-m", module.__name__)
        assert module.main([*words, *([] if step is told else nothing)], lambda _: None) == 0
    with pytest.raises(SystemExit) as shown:
        bench_tune.main([*tune.command(50.0)[3:], "--help"])
    assert shown.value.code == 0
    assert "20.0" in attention.command(50.0)
    assert "20.0" in moe.command(50.0)
    assert (tmp_path / "report.html").exists()
