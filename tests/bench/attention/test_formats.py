"""The benchmark of decode steps by format of the cache."""

import pytest
import torch

from paged.bench.attention import formats
from paged.bench.benchmark import Setting
from tests.backends import needs_numba


@needs_numba
@pytest.mark.thorough
def test_a_row_has_all_formats_and_the_goal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every result is compared with the definition first; bytes are 0.55 of int8's."""
    monkeypatch.setenv("PAGED_BACKEND", "numba")
    monkeypatch.setattr(formats, "NUM_TOKENS", 64)
    monkeypatch.setattr(formats, "MAX_LAYERS", 2)
    row = formats.BENCHMARK.measure(formats.CASES[1], Setting(torch.device("cpu"), 2))
    assert row["peers"].keys() == formats.FORMATS.keys() - {"int4"}
    (goal,) = row["goals"]
    assert goal["text"] == "at least 1.8x int8"
    moved = row["num_bytes"] - 4 * 4 - 32 * 2 * 128 * 2  # without block ids, q and out
    assert moved == 64 * 2 * 8 * (64 + 8)
