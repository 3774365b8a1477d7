"""Build a page from benchmark results.

    python -m bench.report.build RESULTS.json [RESULTS.json ...] --out DIR

Reads the --json files of the benchmarks of attention, moe, kernels, cache and engine, of attention.tune and of
bench.gpu, for one device or several. Writes DIR/report.html, which needs no other file. Tables leave out cases that did
not run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError

from paged.bench.benchmark import option_parser
from paged.bench.limits import is_fault
from paged.bench.report.results import TITLES, Json, ResultsError, Run, read
from paged.tools.printable import one_line


class Cell(NamedTuple):
    """A cell of a table.

    value: number that sorts the column. note: tooltip. marks: (met, text) of each goal, shown with a sign and a colour.
    bar: filled share of the cell's width, behind the text.
    """

    text: str = ""
    value: float | None = None
    note: str = ""
    marks: tuple[tuple[bool, str], ...] = ()
    bar: float | None = None


Column = tuple[str, Callable[[Json], Cell]]
"""The head of a column, and a function that returns a row's cell."""


def _number(head: str, name: str, pattern: str = "{:,.1f}") -> Column:
    def cell(row: Json) -> Cell:
        value = row.get(name)
        if value is None:
            return Cell()
        return Cell(pattern.format(value), value)

    return head, cell


def _share(row: Json) -> Cell:
    percent = row.get("percent")
    if percent is None:
        return Cell()
    return Cell(f"{percent:,.1f}", percent, bar=max(0, min(percent / 100, 1)))


def _ratio(text: str, ratio: float) -> Cell:
    """Return a cell whose bar fills half of it if both are equally fast, two thirds if one is twice as fast."""
    return Cell(text, ratio, bar=ratio / (1 + ratio))


def _peer(name: str) -> Column:
    def cell(row: Json) -> Cell:
        peer = row.get("peers", {}).get(name)
        if peer:
            return _ratio(f"{peer['median_us']:,.1f} ({peer['ratio']:.2f}x)", peer["ratio"])
        reason = row.get("absent", {}).get(name, "")
        if is_fault(reason):
            return Cell(reason.partition(":")[0], note=reason)
        return Cell(note=reason)

    return f"{name}, µs (over ours)", cell


def _over_chosen(row: Json) -> Cell:
    ratio = row.get("over_chosen")
    if ratio is None:
        return Cell()
    return _ratio(f"{ratio:.3f}x", ratio)


def _goals(row: Json) -> Cell:
    marks = []
    for goal in row.get("goals", []):
        if None not in (goal["met"], goal["value"]):
            marks.append((goal["met"], f"{goal['text']}: {goal['value']:.4g}"))
    return Cell(marks=tuple(marks))


def _ended(row: Json) -> Cell:
    code = row.get("returncode")
    if code is None:
        return Cell()
    if code == 0:
        return Cell(marks=((True, "well"),))
    return Cell(marks=((False, f"failed ({code})"),))


def _named(head: str, name: str, pattern: str = "{}") -> Column:
    """Return a column of texts; a dictionary is shown as its items."""

    def cell(row: Json) -> Cell:
        text = row.get(name, "")
        if isinstance(text, dict):
            text = ", ".join(f"{part} {pattern.format(value)}" for part, value in text.items())
        return Cell(text)

    return head, cell


def _case_name(row: Json) -> Cell:
    name = row["name"]
    if not row.get("cold", True):
        name = f"{name} (warm)"
    return Cell(name)


def columns(runs: Sequence[Run]) -> list[Column]:
    """Return every column that rows of one benchmark may have; `table` drops empty columns."""
    peers: dict[str, float] = {}
    for run in runs:
        peers |= run.ratios
    return [
        ("case", _case_name),
        _named("tile", "tile"),
        ("speed over the chooser's", _over_chosen),
        _number("p20, µs", "p20_us"),
        _number("p50, µs", "median_us"),
        _number("p80, µs", "p80_us"),
        _number("limit, µs", "bound_us"),
        ("% of limit", _share),
        *map(_peer, peers),
        _number("value", "value", "{:,.4g}"),
        _named("unit", "unit"),
        ("goals", _goals),
        _named("made of", "detail", "{:,.4g}"),
        _named("loaded while timed", "late_kernels"),
        _named("limited by", "bound_by"),
        _number("GB/s", "gb_per_s", "{:,.0f}"),
        _number("TFLOP/s", "tflop_per_s", "{:,.4g}"),
        _number("planning, µs", "planning_us"),
        ("ended", _ended),
        _number("s", "seconds"),
        _named("last line", "summary"),
        _named("device", "device"),
        _named("date", "date"),
    ]


def table(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the heads and lines of one benchmark's table, without empty columns."""
    rows = []
    for run in runs:
        about = {"device": run.about["device"], "date": run.about["date"][:10]}
        rows += [row | about for row in run.rows]
    heads = []
    kept = []
    has_bars = False
    for head, cell_of in columns(runs):
        column = [cell_of(row) for row in rows]
        if all(cell == Cell() for cell in column):
            continue
        is_number = any(cell.value is not None for cell in column)
        has_bars = has_bars or any(cell.bar is not None for cell in column)
        heads.append((head, is_number))
        kept.append(column)
    return {"heads": heads, "lines": list(zip(*kept, strict=True)), "has_bars": has_bars}


def page(runs: Sequence[Run]) -> str:
    """Return the HTML, which loads no other file."""
    sections = []
    for benchmark, title in TITLES.items():
        members = [run for run in runs if run.benchmark == benchmark]
        if members:
            sections.append({"id": benchmark, "title": title, "table": table(members), "runs": members})
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=StrictUndefined,
    )  # fmt: skip
    return environment.get_template("report.html").render(runs=runs, sections=sections, titles=TITLES)


def load_runs(paths: Sequence[Path]) -> list[Run]:
    """Read the runs of all files, sorted by benchmark; check that each of them makes a page.

    Raises:
        ResultsError: a file cannot be read, or does not hold a benchmark's results.
    """
    runs = []
    for path in dict.fromkeys(paths):
        runs.append(read(path))
        try:
            page(runs[-1:])
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, TemplateError) as error:
            reason = f"{type(error).__name__}: {str(error)[:200]}"
            raise ResultsError(f"{path}: not what the benchmark writes with --json: {reason}") from error
    return sorted(runs, key=lambda run: list(TITLES).index(run.benchmark))


def main(argv: list[str] | None = None, write: Callable[[str], object] = print) -> int:
    """Write the report. If a file does not hold a benchmark's results, report an error and write nothing."""
    parser = option_parser(__doc__)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path())
    args = parser.parse_args(argv)
    try:
        runs = load_runs(args.results)
    except ResultsError as error:
        parser.error(one_line(f"{type(error).__name__}: {error}"))
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "report.html").write_text(page(runs), encoding="utf-8")
    except OSError as error:
        parser.error(one_line(f"--out {args.out}: {error.strerror or error}"))
    write(f"{args.out / 'report.html'}: {sum(len(run.rows) for run in runs)} rows of {len(runs)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
