"""The run of all steps on a GPU machine: a step that fails or hangs takes nothing from the others."""

from __future__ import annotations

import json
import os
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch

from paged.bench import gpu
from paged.bench.attention import run as bench_attention
from paged.bench.engine import run as bench_engine
from paged.bench.kernels import run as bench_kernels
from paged.bench.moe import run as bench_moe
from paged.bench.moe import tune as bench_tune
from paged.bench.report import build as report


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_steps_follow_one_another_whatever_happens(tmp_path: Path) -> None:
    """A step that succeeds, one that fails, one that hangs with a child that holds its output, one that succeeds."""
    hang = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    steps = [
        gpu.Step("good", lambda _: _python("print('first'); print('3 passed'); print()"), 1.0),
        gpu.Step("bad", lambda _: _python("print('1 failed'); raise SystemExit(3)"), 1.0),
        gpu.Step("hangs", lambda _: _python(f"print('started', flush=True); {hang}; time.sleep(60)"), 0.1),
        gpu.Step("paths", lambda _: _python("import os; print(os.environ['PYTHONPATH'])"), 1.0),
    ]
    start = time.monotonic()
    out, extras = tmp_path / "out", tmp_path / "extras"
    out.mkdir()
    extras.mkdir()
    (extras / "tiles.json").write_text("{}")
    assert gpu.run(steps, out, extras, 20.0, tmp_path / "peers") == 1
    assert time.monotonic() - start < 20
    written = json.loads((out / "gpu.json").read_text())["steps"]
    assert [step["returncode"] for step in written] == [0, 3, -9, 0]
    assert [step["summary"] for step in written[:3]] == ["3 passed", "1 failed", "started"]
    assert written[3]["summary"].split(":")[:2] == [str(gpu.ROOT), str(tmp_path / "peers")]
    assert "first\n3 passed" in (out / "gpu.log").read_text()
    assert sorted(path.name for path in out.iterdir()) == ["gpu.json", "gpu.log", "gpu.tar.gz", "warnings.log"]
    with tarfile.open(out / "gpu.tar.gz") as tar:
        assert sorted(tar.getnames()) == ["gpu.json", "gpu.log", "tiles.json", "warnings.log"]


def test_benchmark_goes_on_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not so where it ended well, or by a failure of its own, or where no time is left."""
    monkeypatch.setattr(gpu, "_LAST_CASE_SECONDS", 0.0)
    code = "import sys; resumed = '--resume' in sys.argv; print(resumed); sys.exit(1 if resumed else {})"
    for first, resumes, expected in ((3, True, "True"), (-11, True, "True"), (1, True, "False"), (3, False, "False")):
        step = gpu.Step("step", lambda _, first=first: _python(code.format(first)), 1.0, resumes)
        with (tmp_path / "log").open("w") as log:
            assert gpu.run_step(step, 20.0, os.environ, log, log).summary == expected


def test_what_compilers_warn_of_lies_apart(tmp_path: Path) -> None:
    lines = [
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized",
        "/x/kernels/moe/gemm.py:120:18: warning: cannot prefetch",
        "loc(unknown): remark: not pipelined",
    ]
    ours = ["decode.64x8k 533.0 us", "1 warning: see the log", "tests/kernels/test_x.py::test_warning FAILED"]
    with (tmp_path / "log").open("w+") as log, (tmp_path / "warnings").open("w+") as warnings:
        step = gpu.Step("step", lambda _: _python(f"print(*{[*lines, *ours]!r}, sep='\\n')"), 1.0)
        gpu.run_step(step, 20.0, os.environ, log, warnings)
        assert log.seek(0) == warnings.seek(0) == 0
        assert log.read().splitlines()[2:] == ours
        assert warnings.read().splitlines() == lines


def test_all_well(tmp_path: Path) -> None:
    assert gpu.run([gpu.Step("good", lambda _: _python("print(1)"), 1.0)], tmp_path, tmp_path, 10.0) == 0


def test_commands_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the benchmarks and the report, with no case to run; the tests that the first step names are there."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    extras = tmp_path / "extras"
    extras.mkdir()
    tests, attention, moe, engine, kernels, tune, told = gpu.steps(tmp_path, extras)
    paths = [word for word in tests.command(1.0) if word.removeprefix("--ignore=").startswith("tests/")]
    assert len(paths) == 5
    assert all((gpu.ROOT / path.removeprefix("--ignore=")).exists() for path in paths)
    nothing = ["--only", "no such case", "--device", "cpu", "--repeats", "2"]
    assert gpu.run([gpu.Step("good", lambda _: _python("print(1)"), 1.0)], tmp_path, extras, 10.0) == 0
    for step, module, arguments in (
        (attention, bench_attention, nothing),
        (moe, bench_moe, nothing),
        (kernels, bench_kernels, nothing),
        (engine, bench_engine, nothing),
        (told, report, []),
    ):
        python, flag, name, *words = step.command(50.0)
        assert (python, flag, name) == (sys.executable, "-m", module.__name__)
        assert module.main([*words, *arguments], lambda _: None) == 0
    with pytest.raises(SystemExit) as shown:
        bench_tune.main([*tune.command(50.0)[3:], "--help"])
    assert shown.value.code == 0
    assert "20.0" in attention.command(50.0)
    assert "20.0" in moe.command(50.0)
    assert (extras / "report.html").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_machine_without_a_gpu_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--out", str(tmp_path)])
    assert "torch sees no GPU" in capsys.readouterr().err
