"""The report: what stands in its tables and what does not."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from paged.bench.report import attention_section, kernel_section, main, roofline

ENVIRONMENT = {"device": "H200", "dtype": "bfloat16", "torch": "2.11", "triton": "3.6", "date": "2026-11-21"}
ENVIRONMENT |= {"copy_gb_per_s": 4300.0, "read_gb_per_s": 4400.0, "matmul_tflop_per_s": 790.0}  # type: ignore[dict-item]
TIMES = {"median_us": 120.0, "p20_us": 119.0, "p80_us": 125.0, "bound_us": 100.0, "percent": 83.3, "bound_by": "memory"}
RATES = {"gb_per_s": 3600.0, "tflop_per_s": 28.8, "flops": 3_456_000_000, "num_bytes": 432_000_000, "cold": True}


def _row(name: str, **changes: Any) -> dict[str, Any]:
    row = {"name": name, "kind": "decode", **TIMES, **RATES, "per_sequence_bound_us": 101.0, "planning_us": 7.0}
    return {**row, "host_us": 25.0, "peers": {}, "absent": {}, "goals": [], **changes}


def _attention() -> dict[str, Any]:
    vllm = {"median_us": 180.0, "ratio": 1.5, "tflop_per_s": 19.2}
    goals = [
        {"text": "at least 1.3x vLLM", "value": 1.5, "met": True},
        {"text": "at least 90 % of copy", "value": 83.7, "met": False},
        {"text": "at least 0.85x cuDNN", "value": None, "met": None},
    ]
    rows = [
        _row("a", peers={"vllm": vllm}, goals=goals),
        _row("b", cold=False, host_us=None, absent={"vllm": "wrong: 3 elements off", "flex": "compiles"}),
    ]
    return {**ENVIRONMENT, "peers": {"vllm": "0.33.0"}, "rows": rows, "refused": {"c": "NaN"}, "not_run": ["d"]}


def test_attention_section() -> None:
    text = attention_section(_attention())
    lines = text.splitlines()
    (first,) = (line for line in lines if line.startswith("| a |"))
    assert "| 120.0 (119.0 to 125.0) | 100.0 | 83.3 % of memory |" in first
    assert "| 25.0 | 180.0 (1.50x) |" in first
    assert "at least 1.3x vLLM: met (1.50); at least 90 % of copy: MISSED (83.70) |" in first
    assert any(line.startswith("| b (warm) |") for line in lines)
    assert "Goals met: 1 of 2." in text
    assert "- c: NaN" in lines
    assert "- b: vllm wrong: 3 elements off" in lines
    assert "compiles" not in text
    assert "Not run: d." in text
    assert not any(line.startswith(("| c |", "| d |")) for line in lines)
    widths = {line.count("|") for line in lines if line.startswith("|")}
    assert len(widths) == 1


def test_kernel_section() -> None:
    rows = [{"name": "rms_norm", **TIMES, **RATES}]
    text = kernel_section({**ENVIRONMENT, "rows": rows, "refused": {"fused_moe": "off"}})
    assert "| rms_norm | 120.0 (119.0 to 125.0) |" in text
    assert "- fused_moe: off" in text


def test_all_kinds_of_files(tmp_path: Path) -> None:
    steps = [{"name": "tests", "returncode": 1, "seconds": 99.6, "summary": "1 failed | 9 passed"}]
    files = {
        "attention": _attention(),
        "kernels": {**ENVIRONMENT, "rows": [{"name": "rms_norm", **TIMES, **RATES}], "refused": {}},
        "gpu": {"device": "H200", "torch": "2.11", "steps": steps},
    }
    for name, results in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(results))
    assert main([*(str(tmp_path / f"{name}.json") for name in files), "--out", str(tmp_path)], lambda _: None) == 0
    text = (tmp_path / "report.md").read_text()
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## Paged attention",
        "## Kernels",
        "## Run",
    ]
    assert "| tests | failed (1) | 100 | 1 failed \\| 9 passed |" in text


def test_unknown_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(SystemExit):
        main([str(tmp_path / "other.json"), "--out", str(tmp_path)])
    assert not (tmp_path / "report.md").exists()


def test_roofline_needs_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    lines: list[str] = []
    (tmp_path / "rows.json").write_text(json.dumps(_attention()))
    assert main([str(tmp_path / "rows.json"), "--out", str(tmp_path)], lines.append) == 0
    assert lines[-1].endswith("no roofline: matplotlib is not installed")
    assert "roofline" not in (tmp_path / "report.md").read_text()


def test_roofline_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert roofline([_attention()], tmp_path / "roofline.png") is None
    assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG")
    assert roofline([{**_attention(), "rows": []}], tmp_path / "none.png") == "no rows of attention"
