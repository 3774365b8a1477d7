"""`make gpu` on an emulated device: whatever happens to a case, the others get their rows."""

import json
import sys
from pathlib import Path

import pytest

from paged.bench import gpu
from paged.bench.cards.cards import CARDS

pytestmark = pytest.mark.thorough  # 40 s: each process imports every kernel


def test_a_hang_and_a_lost_context_take_one_case_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step goes on in two more processes, and the archive holds it all."""
    work, out = tmp_path / "work", tmp_path / "out"
    work.mkdir()
    out.mkdir()
    monkeypatch.setattr(gpu, "PYTHON", [sys.executable, "-m", "tests.emulated_device.machine", str(work)])
    monkeypatch.setattr(gpu, "CASE_SECONDS", 10.0)
    faults = {"fused_add_rms_norm": "hangs", "mla_norm_rope_and_cache": "lost"}
    monkeypatch.setenv("EMULATED_FAULTS", json.dumps(faults))
    steps = [step for step in gpu.steps(work, out, cases="norm") if (step.slice, step.name) == (3, "kernels")]
    assert gpu.run(steps, work, out, 600.0) == 1
    gpu.unpack([out / "results-3.tar.xz"], tmp_path / "again")
    (path,) = (tmp_path / "again").glob("*/kernels.json")
    results = json.loads(path.read_text())
    assert results["device"] == "emulated"
    rows = {row["name"] for row in results["rows"]}
    cases = {card.row_name(row) for card in CARDS.values() for row in card.rows}
    assert rows == {name for name in cases if "norm" in name} - faults.keys()
    assert results["refused"].keys() == faults.keys()
    assert results["refused"]["fused_add_rms_norm"].startswith("it hung at threading.py:")
    assert "illegal memory access" in results["refused"]["mla_norm_rope_and_cache"]
    assert not any("norm" in name for name in results["not_run"])
    assert "running" not in results
