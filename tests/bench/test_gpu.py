"""The run of all steps on a GPU machine: a step that fails or hangs takes nothing from the others."""

import json
import os
import random
import shutil
import sys
from pathlib import Path

import pytest
import triton
import triton.language as tl

from paged.bench import gpu
from paged.bench.attention import run as bench_attention
from paged.bench.benchmark import HUNG
from paged.bench.compilation import ahead
from paged.bench.engine import run as bench_engine
from paged.bench.kernels import run as bench_kernels
from paged.bench.moe import run as bench_moe
from paged.bench.moe import tune as bench_tune
from paged.bench.report import build as report
from paged.bench.verification import run as bench_verify
from tests.deadline import HANG_S


def _step(name: str, code: str, share: float = 1.0, *, resumes: bool = False, number: int = 1) -> gpu.Step:
    return gpu.Step(number, name, share, lambda _: [sys.executable, "-c", code], resumes)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Where steps work, and where archives go."""
    for name in ("work", "out"):
        (tmp_path / name).mkdir()
    return tmp_path / "work", tmp_path / "out"


def test_steps_follow_one_another_whatever_happens(folders: tuple[Path, Path]) -> None:
    """A step that succeeds, one that fails, one that hangs with a child that holds its output, one that ends before
    such a child, one that succeeds."""
    sleep = f"time.sleep({2 * HANG_S})"
    hang = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; {sleep}'])"
    steps = [
        _step("good", "print('first'); print('3 passed'); print()"),
        _step("bad", "print('1 failed'); raise SystemExit(3)"),
        _step("hangs", f"print('started', flush=True); {hang}; {sleep}", 0.015),
        _step("leaves", f"{hang}; print('left')"),
        _step("paths", "import os; print(os.environ['PYTHONPATH'])"),
    ]
    work, out = folders
    assert gpu.run(steps, work, out, 600.0, out / "peers") == 1
    written = json.loads((gpu.results_folder(work) / "gpu.json").read_text())["steps"]
    assert [step["returncode"] for step in written] == [0, 3, -9, 0, 0]
    assert max(step["seconds"] for step in written) < HANG_S, "none waits for the child, which sleeps twice as long"
    assert [step["summary"] for step in written[:4]] == ["3 passed", "1 failed", "started", "left"]
    assert written[4]["summary"].split(":")[:2] == [str(gpu.ROOT), str(out / "peers")]
    assert "first\n3 passed" in (work / "gpu.log").read_text()
    assert [path.name for path in out.iterdir()] == ["results-1.tar.xz"]


def test_time_goes_to_the_steps_that_are_left(folders: tuple[Path, Path]) -> None:
    """By their shares, in a slice; what a step leaves is the others'."""
    steps = [_step("some", "", 1.0), _step("more", "", 3.0), _step("other slice", "", 0.1, number=2)]
    assert gpu.run(steps, *folders, 40_000.0) == 0
    some, more, other = (
        step["limit_s"] for step in json.loads((gpu.results_folder(folders[0]) / "gpu.json").read_text())["steps"]
    )
    assert 9_900 < some <= 10_000
    assert min(more, other) > 39_000, "all but what the first took to start and end"


def test_another_run_goes_on_from_an_archive(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Steps are added to those before; what was refused, or running when the time was up, comes last; what hung does
    not come again, and another device's results stay as they are."""
    work, out = folders
    kept = {"rows": [{"name": "a"}], "refused": {"b": "wrong"}, "not_run": ["c", "d"], "running": "c"}
    kept["refused"]["e"] = f"{HUNG} at a.py:1"
    for folder in (gpu.results_folder(work), work / "another"):
        folder.mkdir()
        (folder / "moe.json").write_text(json.dumps(kept))
    assert gpu.run([_step("good", "print(1)")], work, out, HANG_S) == 0
    gpu.unpack([out / "results-1.tar.xz"], again := tmp_path / "again")
    assert json.loads((again / "another" / "moe.json").read_text()) == kept
    found = json.loads((gpu.results_folder(again) / "moe.json").read_text())
    assert found == {"rows": [{"name": "a"}], "refused": {"e": f"{HUNG} at a.py:1"}, "not_run": ["d", "b", "c"]}
    assert gpu.run([_step("better", "print(1)", number=2)], again, out, HANG_S) == 0
    assert [step["name"] for step in json.loads((gpu.results_folder(again) / "gpu.json").read_text())["steps"]] == [
        "1.good",
        "2.better",
    ]


@triton.jit
def _copy_kernel(x_ptr):
    tl.store(x_ptr + 1, tl.load(x_ptr))


def test_compiled_kernels_are_found_elsewhere(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """From an archive that is laid out in another folder, by another process."""
    code = (
        "import sys, triton; from tests.bench.test_gpu import _copy_kernel; from triton.compiler import ASTSource;"
        "triton.knobs.compilation.listener = lambda *, cache_hit, **_: print(cache_hit);"
        "from paged.bench.compilation.machine_code import GPU_TARGETS;"
        "triton.compile(ASTSource(_copy_kernel, {'x_ptr': '*fp32'}), target=GPU_TARGETS['sm_90'])"
    )
    work, out = folders
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "0")
        assert gpu.run([_step("compiles", code)], work, out, HANG_S) == 0
        gpu.unpack(sorted(out.glob("*.tar.xz")), again := tmp_path / "again")
        shutil.rmtree(work)
        assert gpu.run([_step("finds", code)], again, out, HANG_S) == 0
    assert [step["summary"] for step in json.loads((gpu.results_folder(again) / "gpu.json").read_text())["steps"]] == [
        "False",
        "True",
    ]


def test_archives_of_kernels_are_small(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what no compressor makes smaller; old ones go, and the results hold none of them."""
    work, out = folders
    monkeypatch.setattr(gpu, "_ARCHIVE_BYTES", 2 << 20)
    for name in range(40):
        (kernel := work / "cache" / f"kernel{name}").mkdir(parents=True)
        (kernel / "code.cubin").write_bytes(random.Random(name).randbytes(1 << 18))
    (out / "kernels-9.tar.xz").touch()
    assert gpu.run([_step("good", "print(1)")], work, out, HANG_S) == 0
    sizes = {path.name: path.stat().st_size for path in out.iterdir()}
    assert sorted(sizes) == [*(f"kernels-{number}.tar.xz" for number in (1, 2, 3, 4, 5)), "results-1.tar.xz"]
    assert sizes.pop("results-1.tar.xz") < 10_000
    assert max(sizes.values()) <= 4 << 20, "2 MiB more, as 13 are to end below 15"
    gpu.unpack(sorted(out.glob("*.tar.xz")), again := work / "again")
    assert len(list((again / "cache").iterdir())) == 40


def test_benchmark_goes_on_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not so where it ended well, or by a failure of its own, or where no time is left."""
    monkeypatch.setattr(gpu, "_LAST_CASE_SECONDS", 0.0)
    begun = tmp_path / "begun"
    code = (
        f"import os, pathlib; path = pathlib.Path({str(begun)!r}); again = path.exists(); path.touch(); print(again);"
    )
    for first, resumes, expected in ((3, True, "True"), (-11, True, "True"), (1, True, "False"), (3, False, "False")):
        begun.unlink(missing_ok=True)
        step = _step("step", f"{code} os._exit(1 if again else {first} % 256)", resumes=resumes)
        with (tmp_path / "log").open("w") as log:
            assert gpu.run_step(step, HANG_S, os.environ, log).summary == expected


@pytest.mark.usefixtures("by_pytorch")
def test_commands_are_understood(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of benchmarks and report, with no case to run; the tests and cases that steps name are there."""
    work, out = folders
    monkeypatch.setattr(gpu, "_tool", lambda name: name)
    every = gpu.steps(work, out)
    profiled = {step.command(20.0)[-1] for step in every if step.name.startswith("ncu")}
    assert len(profiled) == 3
    assert profiled <= {case.name for case in (*bench_attention.CASES, *bench_moe.CASES)}
    commands = [step.command(20.0) for step in every]
    paths = [word for command in commands for word in command if word.startswith("tests/")]
    assert len(paths) == 8
    assert all((gpu.ROOT / path).exists() for path in paths)
    assert gpu.run([_step("good", "print(1)")], work, out, HANG_S) == 0
    assert {step.slice for step in every} == set(range(1, 6))
    benches = (bench_attention, bench_moe, bench_kernels, bench_engine, bench_verify)
    modules = {module.__name__: module for module in benches}
    benchmarks = [step for step in gpu.steps(work, out, cases="no such case") if step.command(1.0)[2] in modules]
    assert len(benchmarks) == 8
    for step in benchmarks:
        python, flag, name, *words = step.command(20.0)
        assert (python, flag, words[words.index("--budget") + 1]) == (sys.executable, "-m", "10.0")
        assert modules[name].main([*words, "--device", "cpu", "--repeats", "2"], lambda _: None) == 0
    for name, module in (("paged.bench.moe.tune", bench_tune), ("paged.bench.compilation.ahead", ahead)):
        (words, *_) = [command[3:] for command in commands if name in command]
        with pytest.raises(SystemExit) as shown:
            module.main([*words, "--help"])
        assert shown.value.code == 0
    assert report.main(next(step for step in every if step.name == "report").command(1.0)[3:], lambda _: None) == 0
    assert (out / "report.html").exists()
