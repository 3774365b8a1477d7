"""Build a page from benchmark results.

    python -m bench.report.build RESULTS.json [RESULTS.json ...] --out DIR

Reads the --json files of the benchmarks of attention, moe, kernels, cache and engine, of attention.tune and of
bench.gpu, for one device or several. Writes DIR/report.html, which needs no other file. Cases that did not run are not
in the tables.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError

from paged.bench.benchmark import option_parser
from paged.bench.report.results import TITLES, Json, ResultsError, Run, is_fault, read
from paged.printable import one_line


class Cell(NamedTuple):
    """text: what stands there. value: the number behind it, by which a column is sorted. note: shown when pointed at.

    marks: (met, text) a goal, which get a sign and a colour. bar: the share of the cell's width behind the text.
    """

    text: str = ""
    value: float | None = None
    note: str = ""
    marks: tuple[tuple[bool, str], ...] = ()
    bar: float | None = None


Column = tuple[str, Callable[[Json], Cell]]
"""A head, and the cell of a row."""


def _number(head: str, name: str, pattern: str = "{:,.1f}") -> Column:
    def cell(row: Json) -> Cell:
        value = row.get(name)
        return Cell() if value is None else Cell(pattern.format(value), value)

    return head, cell


def _share(row: Json) -> Cell:
    percent = row.get("percent")
    return Cell() if percent is None else Cell(f"{percent:,.1f}", percent, bar=max(0, min(percent / 100, 1)))


def _ratio(text: str, ratio: float) -> Cell:
    """Its bar fills half of the cell where both are equally fast, two thirds where one is twice as fast."""
    return Cell(text, ratio, bar=ratio / (1 + ratio))


def _peer(name: str) -> Column:
    def cell(row: Json) -> Cell:
        if peer := row.get("peers", {}).get(name):
            return _ratio(f"{peer['median_us']:,.1f} ({peer['ratio']:.2f}x)", peer["ratio"])
        reason = row.get("absent", {}).get(name, "")
        return Cell(reason.partition(":")[0] if is_fault(reason) else "", None, reason)

    return f"{name}, µs (over ours)", cell


def _over_chosen(row: Json) -> Cell:
    ratio = row.get("over_chosen")
    return Cell() if ratio is None else _ratio(f"{ratio:.3f}x", ratio)


def _goals(row: Json) -> Cell:
    judged = [goal for goal in row.get("goals", []) if None not in (goal["met"], goal["value"])]
    return Cell(marks=tuple((goal["met"], f"{goal['text']}: {goal['value']:.4g}") for goal in judged))


def _ended(row: Json) -> Cell:
    code = row.get("returncode")
    return Cell() if code is None else Cell(marks=((code == 0, "well" if code == 0 else f"failed ({code})"),))


def _named(head: str, name: str, pattern: str = "{}") -> Column:
    """A tile, or what a value is made of."""

    def cell(row: Json) -> Cell:
        found = row.get(name, "")
        if isinstance(found, dict):
            found = ", ".join(f"{each} {pattern.format(value)}" for each, value in found.items())
        return Cell(found)

    return head, cell


def columns(runs: Sequence[Run]) -> list[Column]:
    """Return every column that rows of one benchmark may have; `table` drops empty columns."""
    peers = dict.fromkeys(name for run in runs for name in run.ratios)
    return [
        ("case", lambda row: Cell(row["name"] + ("" if row.get("cold", True) else " (warm)"))),
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
    """Heads and lines of one benchmark's table, without empty columns."""
    rows = [row | {"device": run.about["device"], "date": run.about["date"][:10]} for run in runs for row in run.rows]
    cells = {head: [cell(row) for row in rows] for head, cell in columns(runs)}
    kept = {head: column for head, column in cells.items() if any(cell != Cell() for cell in column)}
    heads = [(head, any(cell.value is not None for cell in column)) for head, column in kept.items()]
    has_bars = any(cell.bar is not None for column in kept.values() for cell in column)
    return {"heads": heads, "lines": list(zip(*kept.values(), strict=True)), "has_bars": has_bars}


def page(runs: Sequence[Run]) -> str:
    """The whole HTML, which loads nothing."""
    sections = [
        {"id": benchmark, "title": title, "table": table(members), "runs": members}
        for benchmark, title in TITLES.items()
        if (members := [run for run in runs if run.benchmark == benchmark])
    ]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=StrictUndefined,
    )  # fmt: skip
    return environment.get_template("report.html").render(runs=runs, sections=sections, titles=TITLES)


def load_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs of all files, by benchmark, each of which makes a page.

    Raises:
        ResultsError: a file cannot be read, or does not hold what a benchmark writes.
    """
    runs = []
    for path in dict.fromkeys(paths):
        runs.append(read(path))
        try:
            page(runs[-1:])
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, TemplateError) as error:
            said = f"{type(error).__name__}: {str(error)[:200]}"
            raise ResultsError(f"{path}: not what the benchmark writes with --json: {said}") from error
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
