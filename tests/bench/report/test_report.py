"""The report: what every benchmark writes gives a page of its numbers that needs nothing else."""

import json
import re
from collections import Counter
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from paged.bench import gpu
from paged.bench.report.build import load_runs, main, page
from paged.bench.report.results import TITLES

Json = dict[str, Any]
VOID = {"meta", "input", "br"}


class Page(HTMLParser):
    """A page's tables, as a dictionary of cells, text and value, for each row, and what else of it tests look at; its
    tags must be closed in the order in which they were opened."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source, self.text, self._open = source, "", []
        self.ids: Counter[str] = Counter()
        self.feed(source)
        self.close()
        assert self._open == []
        self.tables = [_rows(table) for table in re.findall(r"<table.*?</table>", source, re.DOTALL)]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        self._open += [tag] * (tag not in VOID)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids.update(value or "" for name, value in attrs if name == "id")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, self.getpos()

    def handle_data(self, data: str) -> None:
        self.text += "" if self._open[-1:] == ["script"] else data


def _rows(table: str) -> list[dict[str, tuple[str, str | None]]]:
    def cell(attributes: str, text: str) -> tuple[str, str | None]:
        values = re.findall('data-value="(.*?)"', attributes)
        return " ".join(unescape(re.sub("<[^>]*>", "", text)).split()), values[0] if values else None

    rows = re.findall(r"<tr.*?</tr>", table, re.DOTALL)
    found = (re.findall(r"<t[hd]\b(.*?)>(.*?)</t[hd]>", row, re.DOTALL) for row in rows)
    heads, *cells = ([cell(*each) for each in row] for row in found)
    return [dict(zip([head for head, _ in heads], row, strict=True)) for row in cells]


@pytest.fixture(scope="module")
def whole(report: Path) -> Page:
    """The page of a file of every benchmark."""
    return Page((report / "report.html").read_text(encoding="utf-8"))


@pytest.fixture
def runs(results: dict[str, Path]) -> dict[str, Json]:
    """What the files hold, to be changed."""
    return {name: json.loads(path.read_text()) for name, path in results.items()}


@pytest.mark.parametrize("kind", TITLES)
def test_table_holds_what_the_file_holds(kind: str, runs: dict[str, Json], whole: Page) -> None:
    run = runs[kind]
    rows = run["steps" if kind == "gpu" else "rows"]
    index = list(TITLES).index(kind)
    overview, table = whole.tables[0][index], whole.tables[1 + index]
    assert overview["device"] == (run["device"], None)
    assert run["torch"] in overview["versions"][0]
    assert len(table) == len(rows) > 0
    numbers = {"p20, µs": "p20_us", "p50, µs": "median_us", "p80, µs": "p80_us", "limit, µs": "bound_us"}
    numbers |= {"% of limit": "percent", "GB/s": "gb_per_s", "TFLOP/s": "tflop_per_s", "value": "value", "s": "seconds"}
    for row, cells in zip(rows, table, strict=True):
        assert row.get("p20_us", 0) <= row.get("median_us", 0) <= row.get("p80_us", 0)
        assert row.get("percent") == pytest.approx(
            100 * row["bound_us"] / row["median_us"] if "percent" in row else None
        )
        assert cells["case"][0].removesuffix(" (warm)") == row["name"]
        assert cells["case"][0].endswith(" (warm)") != row.get("cold", True)
        for head, name in numbers.items():
            assert (head in cells) == (name in row)
            if name in row:
                text, value = cells[head]
                assert float(value or "nan") == row[name]
                assert float(text.replace(",", "")) == pytest.approx(row[name], rel=6e-3, abs=0.5)
        for name, peer in row.get("peers", {}).items():
            text, value = cells[f"{name}, µs (over ours)"]
            assert float(value or "nan") == peer["ratio"] == pytest.approx(peer["median_us"] / row["median_us"])
            assert text == f"{peer['median_us']:,.1f} ({peer['ratio']:.2f}x)"
        for goal in row.get("goals", []):
            sign = "\N{CHECK MARK}" if goal["met"] else "\N{BALLOT X}"
            assert f"{sign} {goal['text']}: {goal['value']:.4g}" in cells["goals"][0]
        assert cells["device"][0] == run["device"]
        assert cells["date"][0] == run["date"][:10]
    assert ("goals" in table[0]) == (kind in ("cache", "engine")), "no column stands empty"
    assert any(row.get("peers") for row in rows) == (kind in ("attention", "moe", "cache"))
    good, bad = whole.tables[-1]
    assert (good["ended"][0], bad["ended"][0]) == ("\N{CHECK MARK} well", "\N{BALLOT X} failed (3)")
    assert bad["last line"][0] == "1 failed | <b>"


def test_page_is_complete_in_itself(report: Path, whole: Page) -> None:
    """Nothing loaded from anywhere; ids once."""
    assert [path.name for path in report.iterdir()] == ["report.html"]
    assert not re.search(r"https?:|//[a-z]|@import|<link|\bsrc=|url\(", whole.source)
    assert all(link.startswith("#") for link in re.findall(r'(?<=href=")[^"]*', whole.source))
    assert whole.ids.most_common(1)[0][1] == 1
    assert set(re.findall(r'href="#([^"]+)', whole.source)) <= set(whole.ids)


def test_what_is_wrong_or_did_not_run_is_said(runs: dict[str, Json], tmp_path: Path) -> None:
    run = runs["attention"]
    run["rows"][0]["absent"] = {"vllm": "wrong: 3 elements off", "flex": "compiles"}
    changes = {"refused": {"c": "NaN <0>"}, "not_run": ["d", "e"], "absent": {"flashinfer": "not here"}}
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(run | changes))
    told = Page(page(load_runs([path])))
    for said in ("\N{BALLOT X} c: NaN <0>", "vllm: wrong: 3 elements off", "Not run: d, e.", "flashinfer: not here"):
        assert said in told.text
    assert "compiles" not in told.text


def test_results_that_are_kept_make_a_page() -> None:
    paths = sorted((gpu.ROOT / "bench" / "results").glob("*.json"))
    assert len(load_runs(paths)) == len(paths) > 5


@pytest.mark.parametrize("text", ["{", "[]", "\udcff"])
def test_what_is_no_json_is_an_error_that_writes_nothing(
    text: str, results: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "other.json", tmp_path / "out"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(SystemExit):
        main([str(results["cache"]), str(path), "--out", str(out)])
    assert f"ResultsError: {path}: " in capsys.readouterr().err
    assert not out.exists()
