"""The report and a cache's picture take any text and any number: a page and pictures that parse, or a named error."""

import contextlib
import io
import json
import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import strategies as st

from paged import CachePicture, InvalidInputError
from paged.bench.report.build import load_runs, main, page
from paged.bench.report.results import TITLES, ResultsError
from paged.picture import BlockCell, SequenceLine
from tests.fuzz.children import call_in_child
from tests.fuzz.fuzzing import fuzz
from tests.fuzz.values import STEERING, changed

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
VOID = {"meta", "input", "br"}
TEXTS = st.text(max_size=12) | st.sampled_from([
    *("<script>alert(1)</script>", '"><img src=x>', "]]>", "&amp;", "$\\frac$", "\x00\x1b[2J", "\u202e", "�", "\ufffe"),
    *("url(#a)", 'id="a"', "¦", "a" * 5000, "{{ 7 }}", "--", "\r\n\t", "../../x", "%s", "wrong: x", "failed"),
])  # fmt: skip
NUMBERS = st.one_of(
    *(st.floats(), st.integers()),
    st.sampled_from([0, -1, 10**400, 1e308, 1e-308, 5e-324, 1e30, 1e-30, math.nan, math.inf]),
)
LISTS = st.lists(NUMBERS | TEXTS, max_size=3) | st.dictionaries(TEXTS, NUMBERS, max_size=2)
VALUES = st.one_of(TEXTS, NUMBERS, st.none(), st.booleans(), LISTS)


class Page(HTMLParser):
    """Fails where tags are not closed in order, or a text has become a tag."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag != "img"
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        assert self.open[-1:] != ["script"] or "alert" not in data


def _row(name: str, **values: Any) -> dict[str, Any]:
    speed = {"median_us": 20.0, "p20_us": 19.0, "p80_us": 21.0, "bound_us": 9.0, "percent": 45.0, "gb_per_s": 900.0}
    return {"name": name, **speed, "tflop_per_s": 3.5, "bound_by": "memory", **values}


def _base(kind: str) -> dict[str, Any]:
    """Results with few rows: those that are kept, or of the same form."""
    for path in sorted(RESULTS.glob("*.json")):
        results = json.loads(path.read_text())
        if results["benchmark"] == kind:
            return dict(results | {"rows": results["rows"][:4]})
    limits = {"copy_gb_per_s": 3000.0, "read_gb_per_s": 3100.0, "matmul_tflop_per_s": 700.0}
    run = {"benchmark": kind, "device": "a chip", "date": "2026-11-21T10:00:00", "torch": "2.9", **limits}
    if kind == "gpu":
        return {**run, "steps": [{"name": "tests", "returncode": 0, "seconds": 3.0, "summary": "8 passed"}]}
    batch = {"kind": "decode", "batch": "2x3k", "heads": [4, 2], "block_size": 16, "tile": "chosen"}
    peers = {"peers": {"vllm": {"median_us": 30.0, "ratio": 1.5}}, "absent": {"flex": "failed: no such mask"}}
    rows = [_row(f"decode.{size}", groups=[[2, 1, size]], **batch, **peers) for size in (1024, 4096)]
    return {**run, "rows": [*rows, _row("decode.1024", groups=[[1, 1, 1]], **batch | {"tile": {"num_warps": 4}})]}


BASES = {kind: _base(kind) for kind in TITLES}
CHANGES = st.tuples(st.lists(st.integers(0, 30), min_size=1, max_size=5), VALUES)
# A benchmark, and changes of its results: where, and to what.
CASES = st.fixed_dictionaries({"kind": st.sampled_from(sorted(BASES)), "changes": st.lists(CHANGES, max_size=4)})


def _written(case: Any, folder: Path) -> Path:
    results: Any = BASES[case["kind"]]
    for steps, new in case["changes"]:
        results = changed(results, steps, new)
    path = folder / "results.json"
    path.write_text(json.dumps(results))
    return path


def _check_page(source: str) -> None:
    assert not STEERING.search(source)
    assert not re.search("[\ufffe\uffff]", source)  # no XML
    Page(source)


@fuzz(CASES, examples=20, thorough=60)
def test_report_tables(case: Any, tmp_path: Path) -> None:
    try:
        runs = load_runs([_written(case, tmp_path)])
    except ResultsError:
        assert case["changes"]
        return
    _check_page(page(runs))


def test_files_without_end(tmp_path: Path) -> None:
    """Read as far as results may go, and no further."""
    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", 1 << 40)
    for path in (Path("/dev/zero"), tmp_path / "sparse"):
        assert re.fullmatch(r".*: more than 16777216 bytes.*", call_in_child(_error_of, path).result)
    assert "cannot be read" in _error_of(tmp_path / "absent")


def _error_of(path: Path) -> str:
    with pytest.raises(ResultsError) as caught:
        load_runs([path])
    return str(caught.value)


@fuzz(CASES, examples=2, thorough=10)
def test_report_command(case: Any, tmp_path: Path) -> None:
    """The same by the command line."""
    said: list[str] = []
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            main([str(_written(case, tmp_path)), "--out", str(tmp_path / "out")], said.append)
    except SystemExit:
        assert "ResultsError" in stderr.getvalue()
        assert case["changes"]
    else:
        source = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
        _check_page(source)
    assert not STEERING.search("\n".join([*said, stderr.getvalue()]))


PICTURES = st.fixed_dictionaries({
    "ids": st.lists(TEXTS | st.integers(), max_size=3), "fills": st.lists(NUMBERS, max_size=5), "summary": TEXTS,
    "namespace": TEXTS, "columns": st.integers(-1, 40),
})  # fmt: skip


@fuzz(PICTURES, examples=60)
def test_picture(case: Any) -> None:
    lines = tuple(SequenceLine("a", one, case["namespace"], 1, 0, 1, 0) for one in case["ids"])
    holders = tuple(range(len(lines)))
    cells = tuple(BlockCell(1 + index, "own", holders, fill) for index, fill in enumerate(case["fills"]))
    picture = CachePicture(cells, lines, 16, case["summary"])
    if case["columns"] < 1:
        with pytest.raises(InvalidInputError, match="columns"):
            picture.svg(case["columns"])
        return
    drawn = picture.svg(case["columns"])
    root = ElementTree.fromstring(drawn)
    numbers = [value for element in root.iter() for name, value in element.attrib.items() if name in ("y", "height")]
    assert all(math.isfinite(float(number)) for number in numbers)
    assert len(drawn) < 10_000 + 4000 * (len(cells) + 1)
    assert not STEERING.search(picture.text(case["columns"]))
