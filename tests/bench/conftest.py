"""Results as the benchmarks write them, of cases small enough for a test."""

import argparse
import json
import sys
from pathlib import Path

import pytest
import torch

from paged.bench import gpu, timing
from paged.bench.attention import run as bench_attention
from paged.bench.attention import tune as tune_attention
from paged.bench.attention.cases import AttentionCase
from paged.bench.benchmark import Setting, environment
from paged.bench.engine import run as bench_engine
from paged.bench.kernels import run as bench_kernels
from paged.bench.limits import Ceilings
from paged.bench.moe import run as bench_moe
from paged.bench.moe import tune as tune_moe
from paged.bench.problems.experts import MoeModel
from paged.bench.report.build import main
from paged.bench.verification import run as verify
from paged.bench.verification import sanitize
from paged.kernels.moe.config import load_table
from tests.deadline import HANG_S

FOLDER = Path(__file__).parent
CPU = torch.device("cpu")
SMALL = {"heads": (4, 2), "head_dim": 16}
# Two contexts of one batch, for the chart over the context.
ATTENTION = (
    AttentionCase("decode", "2x3k", ((2, 1, 3072),), **SMALL),  # type: ignore[arg-type]
    AttentionCase("decode", "2x8k", ((2, 1, 8192),), **SMALL),  # type: ignore[arg-type]
    AttentionCase("mixed", "chunk", ((1, 1024, 2048), (2, 1, 1024)), **SMALL),  # type: ignore[arg-type]
)
CACHE = gpu.ROOT / "bench" / "results" / "2026-11-22-cache-2-core-xeon.json"
LIMITS = Ceilings(copy=2e10, read=2e10, matmul=1e11)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What only benchmarks use is tested in `make test-all`."""
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.thorough)


def prepare(patch: pytest.MonkeyPatch) -> None:
    """As on a machine without a GPU, outside of the interpreter; the rates of the device are given instead of measured,
    and its cache is so small that calls rotate through few tensors."""
    patch.delenv("TRITON_INTERPRET", raising=False)
    patch.setenv("PAGED_BACKEND", "torch")
    patch.setattr(timing, "cache_bytes", lambda device: 1 << 16)
    timing.ceilings.cache_clear()
    for name in ("timing", "engine.cpu_engines", "engine.throughput"):
        patch.setattr(f"paged.bench.{name}.measured_ceilings", lambda *_: LIMITS)


@pytest.fixture
def by_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs benchmarks in this process, see `prepare`."""
    prepare(monkeypatch)


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A file of every benchmark, by its name."""
    folder = tmp_path_factory.mktemp("results")
    paths = {name: folder / f"{name}.json" for name in ("attention", "moe", "kernels", "engine", "tune_attention")}
    only = {"attention": "", "moe": "Qwen3-30B-A3B/16.zipf.16", "kernels": "norm", "engine": "overhead.greedy"}
    with pytest.MonkeyPatch.context() as patch:
        prepare(patch)
        patch.setattr(bench_attention, "CASES", ATTENTION)
        for module in (bench_attention, bench_moe, bench_kernels, bench_engine):
            name = module.BENCHMARK.name
            options = ["--device", "cpu", "--repeats", "3", "--only", only[name], "--json", str(paths[name])]
            assert module.main(options, lambda _: None) == 0
        # Its command line needs a GPU, its measuring does not; a CPU has no tiles, so only the chooser's have times.
        patch.setattr(Setting, "limits", LIMITS)
        rows = [tune_attention.measure(tune_attention.TileCase(ATTENTION[0].small()), Setting(CPU, 2))]
        tuned = {**environment("tune_attention", CPU, LIMITS), "rows": rows}
        paths["tune_attention"].write_text(json.dumps(tuned))

        small = MoeModel("small", 8, 2, 64, 32, 8)
        patch.setattr(tune_moe, "MODELS", (small,))
        patch.setattr(tune_moe, "compile_ahead", lambda *_: [])
        patch.setattr(tune_moe, "timer", lambda *_: lambda _: 1e-5)
        options = {"model": "small", "packed": "", "tokens": [1, 64], "out": folder / "tiles", "budget": HANG_S}
        tuner = tune_moe.Tuner(argparse.Namespace(**options))
        rows = [tuner.measure(case, Setting(CPU, 2)) for case in tuner.cases(Setting(CPU, 2))]
        paths["tune_moe"] = folder / "tune_moe.json"
        paths["tune_moe"].write_text(json.dumps({**environment("tune_moe", CPU), "rows": rows}))
        assert [row["name"] for row in rows] == ["small.balanced.64"], "a token takes no tile"
        assert load_table(tuner.path).keys() == {64 * small.top_k}
        assert tuner.cases(Setting(CPU, 2)) == []

        patch.setattr(sanitize, "compile_cases", lambda _: None)
        rows = [sanitize.measure(sanitize.CASES[0], Setting(CPU, 1))]
        paths["sanitize"] = folder / "sanitize.json"
        paths["sanitize"].write_text(json.dumps({**environment("sanitize", CPU), "rows": rows}))

        paths["verify"] = folder / "verify.json"
        options = ["--device", "cpu", "--only", "norm", "--json", str(paths["verify"])]
        assert verify.main(options, lambda _: None) == 0

        def step(name: str, code: str) -> gpu.Step:
            return gpu.Step(1, name, 1.0, lambda _: [sys.executable, "-c", code])

        steps = [step("good", "print('3 passed')"), step("bad", "print('1 failed | <b>'); raise SystemExit(3)")]
        assert gpu.run(steps, folder, tmp_path_factory.mktemp("out"), 20.0) == 1
    return {**paths, "cache": CACHE, "gpu": gpu.results_folder(folder) / "gpu.json"}


@pytest.fixture(scope="session")
def report(results: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a report of all these files."""
    folder = tmp_path_factory.mktemp("report")
    assert main([*map(str, results.values()), "--out", str(folder)], lambda _: None) == 0
    return folder
