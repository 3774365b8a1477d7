"""A suite is worth what it catches: copies of the kernels with one fault each must turn the checks of sampling red."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paged.kernels.sampling import passes, reference, row_functions, thresholds
from paged.kernels.sampling import sample_tokens as module
from paged.kernels.sampling.sample_tokens import filter_logits
from tests.kernels.faulty import planted
from tests.kernels.sampling.rows import demanding_rows

PARTS = {part.__name__.rpartition(".")[2]: part for part in (row_functions, passes, thresholds)}

# fault -> (file, its text, what the faulty copy has in its place)
MUTATIONS = {
    "no fault": ("passes", "", ""),
    "the noise of another token": ("row_functions", "* 0x9E3779B1 + low)", "* 0x9E3779B1 + low + 1)"),
    "no penalty": ("row_functions", "if table_row >= 0:", "if table_row >= 1000:"),
    "counts of tokens not seen": ("row_functions", "tl.where(counts > 0, presence, 0.0)", "presence"),
    "no temperature": ("row_functions", "tl.div_rn(x - largest, temperature)", "x - largest"),
    "a chunk's own largest": ("passes", "z = scaled(x, largest, temperature)", "z = scaled(x, tl.max(x), temperature)"),
    "the first bin is not counted": ("passes", "mask=histogram > 0)", "mask=(histogram > 0) & (bins > 0))"),
    "masses of whole bins are lost": ("passes", "tl.atomic_add(sums_ptr + 3 * row, before)", "pass"),
    "masses between are lost": ("passes", "tl.atomic_add(sums_ptr + 3 * row + 1, between)", "pass"),
    "the last bin is not listed": ("passes", "(bins <= last) | (bins == last_bin)", "bins <= last"),
    "a token of the list is lost": ("passes", "length.to(tl.int64)) - 1", "length.to(tl.int64) - 1) - 1"),
    "min_p is ignored": ("passes", "kept = z >= minimum", "kept = z >= -100.0"),
    "one token more than top_k": ("thresholds", "target = wanted.to(tl.float64)", "target = wanted.to(tl.float64) + 1"),
    "top_p of everything": ("thresholds", "+ (wanted - count) * tied", "+ (length - count) * tied"),
    "less than top_p": ("thresholds", "sums.to(tl.float64) < target", "sums.to(tl.float64) < target * 0.98"),
    "half of the mass": ("thresholds", "total = preceding +", "total = 0 * preceding +"),
    "bounds too narrow": ("thresholds", "tl.minimum(by_head, by_tail))", "tl.minimum(by_head, by_tail) - 2)"),
    "bounds too wide": ("thresholds", "tl.maximum(by_head, by_tail))", "tl.maximum(by_head, by_tail) + 2)"),
    "listed tokens are never drawn": ("thresholds", "(found > best)", "(found > best + 1000)"),
}  # fmt: skip


@pytest.mark.parametrize("fault", MUTATIONS)
def test_checks_see_the_fault(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(module, "BLOCK_TOKENS", 128)
    name, *change = MUTATIONS[fault]
    with planted([PARTS[name]], list(PARTS.values()), tmp_path, *change):
        assert _is_right(demanding_rows(device)) == (fault == "no fault")


def _is_right(arguments: dict[str, Any]) -> bool:
    """Whether filters keep what they should, and two draws of every row are the reference's."""
    names = ("logits", "temperature", "top_k", "top_p", "min_p")
    kept = filter_logits(**{name: arguments[name] for name in names}).cpu() > -torch.inf
    for row, tokens in enumerate(kept):
        values, *filters = (arguments[name][row].tolist() for name in names)
        expected = reference.kept_scores(values, *filters)
        if expected is None or tokens.tolist() != [score > -torch.inf for score in expected]:
            return False
    for _ in range(2):
        if module.sample_tokens(**arguments).tolist() != reference.sample_tokens(**arguments).tolist():
            return False
        arguments["keys"] = arguments["keys"].flip(0)
    return True
