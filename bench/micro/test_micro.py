"""Microbenchmarks through pytest-benchmark: every kernel and the cache, beside their peers.

    pytest bench --benchmark-only [-k TEXT] [--benchmark-json FILE] [--benchmark-compare]
    paged bench micro [PYTEST OPTIONS]

A test times one implementation of a case: ours, or a peer that takes the case. The tests of a case are a group and
share its tensors. A wrong result fails and gets no time. The timer counts the seconds of calls as `paged bench` does:
on a GPU the seconds of a CUDA graph, on a CPU the seconds of a call with other tensors than the last call's.
`extra_info` in the results holds the share of the hardware's limit. `paged bench kernels` and similar commands print
the same cases as a table and time peers in turns, which a test that ends before the next one cannot do.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from paged.bench.attention import run as attention
from paged.bench.benchmark import DEVICE, INTERPRETING, Setting
from paged.bench.cache import run as cache
from paged.bench.contest import OURS, Contest, peers_of
from paged.bench.kernels import run as kernels
from paged.bench.moe import run as moe
from paged.bench.timing import SampleClock, timed
from paged.kernels.core.compat import interpreting
from paged.kernels.core.device import load_numba, using_numba

FAMILIES: dict[str, Any] = {module.BENCHMARK.name: module for module in (kernels, attention, moe, cache)}
CLOCK = SampleClock()


def setting_of(family: str) -> Setting:
    """Return the setting of a family's cases on this machine; the cache is measured on the host."""
    repeats = FAMILIES[family].BENCHMARK.repeats
    device = DEVICE
    if device not in repeats:
        device = "cpu"
    return Setting(torch.device(device), repeats[device], small=device == "cpu")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    params = []
    for family, module in FAMILIES.items():
        setting = setting_of(family)
        for case in module.BENCHMARK.cases(setting):
            for implementation in (OURS, *peers_of(module.PEERS, case, setting)):
                name = f"{family}.{case.name}-{implementation}"
                params.append(pytest.param(family, case.name, implementation, id=name))
    metafunc.parametrize(("family", "name", "implementation"), params)


@functools.lru_cache(maxsize=1)
def contest_of(family: str, name: str) -> Contest:
    """Return the checked implementations of a case; the tests of a case run one after another."""
    setting = setting_of(family)
    (case,) = (case for case in FAMILIES[family].BENCHMARK.cases(setting) if case.name == name)
    contest: Contest = FAMILIES[family].contest(case, setting)
    return contest


@pytest.mark.benchmark(timer=CLOCK)
def test_micro(family: str, name: str, implementation: str, benchmark: Any) -> None:
    if interpreting():
        pytest.skip(INTERPRETING)
    benchmark.group = f"{family}.{name}"
    with using_numba(DEVICE == "cpu" and load_numba()):  # as models do
        contest = contest_of(family, name)
        if implementation not in contest.samples:
            pytest.fail(contest.absent[implementation])
        sample = contest.samples[implementation]
        seconds = max(sample(), sample(), sample())
        rounds = contest.setting.repeats
        if seconds * rounds > contest.max_seconds:
            rounds = max(contest.min_samples, int(contest.max_seconds / seconds))
        with timed():
            benchmark.pedantic(CLOCK.run, args=(sample,), rounds=rounds)
        if benchmark.stats is not None:  # None with --benchmark-disable
            benchmark.extra_info |= {**contest.about, **contest.result(benchmark.stats.stats.data)}


def main(argv: Sequence[str]) -> int:
    """Run pytest with this file, wherever it is installed."""
    path = Path(__file__).resolve()
    options = ["--benchmark-only", "--import-mode=importlib", "-p", "no:cacheprovider"]
    return int(pytest.main([str(path), *options, *argv]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
