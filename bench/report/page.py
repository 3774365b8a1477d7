"""The page of a report: its tables as the template takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from paged.bench.report.charts import COLOURS, Chart, system
from paged.bench.report.plot import HEIGHT, WIDTH
from paged.bench.report.results import SCHEMAS, Json, Run, is_fault, is_number

TITLES = {
    "attention": "Paged attention",
    "moe": "Experts",
    "kernels": "Kernels",
    "cache": "Cache, time on the host",
    "engine": "Engine",
    "tune_attention": "Tiles of attention",
    "gpu": "Steps of the run",
}


class Cell(NamedTuple):
    """text: what stands there. value: the number behind it, by which a column is sorted. note: shown when pointed at.

    marks: (met, text) a goal, which get a sign and a colour. bar: the share of the cell's width behind the text.
    """

    text: str = ""
    value: float | None = None
    note: str = ""
    marks: tuple[tuple[bool, str], ...] = ()
    bar: float | None = None


Column = tuple[str, Callable[[Json, Run], Cell]]
"""A head, and the cell of a row and its run."""


def _number(head: str, name: str, pattern: str = "{:,.1f}") -> Column:
    def cell(row: Json, _: Run) -> Cell:
        value = row.get(name)
        return Cell(pattern.format(value), value) if is_number(value) else Cell()

    return head, cell


def _text(head: str, text: Callable[[Json, Run], str]) -> Column:
    return head, lambda row, run: Cell(text(row, run))


def _share(row: Json, _: Run) -> Cell:
    percent = row.get("percent")
    return Cell(f"{percent:,.1f}", percent, bar=max(0, min(percent / 100, 1))) if is_number(percent) else Cell()


def _ratio(text: str, ratio: float) -> Cell:
    """Its bar fills half of the cell where both are equally fast, two thirds where one is twice as fast."""
    return Cell(text, ratio, bar=ratio / (1 + ratio))


def _peer(name: str) -> Column:
    def cell(row: Json, _: Run) -> Cell:
        if peer := row.get("peers", {}).get(name):
            return _ratio(f"{peer['median_us']:,.1f} ({peer['ratio']:.2f}x)", peer["ratio"])
        reason = row.get("absent", {}).get(name, "")
        return Cell(reason.partition(":")[0] if is_fault(reason) else "", None, reason)

    return f"{system(name).label}, µs (over ours)", cell


def _over_chooser(row: Json, run: Run) -> Cell:
    chosen = run.chosen_us.get(row["name"])
    return _ratio(f"{chosen / row['median_us']:.3f}x", chosen / row["median_us"]) if chosen else Cell()


def _goals(row: Json, _: Run) -> Cell:
    judged = [goal for goal in row.get("goals", []) if goal["met"] is not None]
    return Cell(marks=tuple((goal["met"], f"{goal['text']}: {goal['value']:.4g}") for goal in judged))


def _ended(row: Json, _: Run) -> Cell:
    if (code := row.get("returncode")) is None:
        return Cell()
    return Cell(marks=((code == 0, "well" if code == 0 else f"failed ({code})"),))


def _named(found: Any, pattern: str = "{}") -> str:
    """A tile, or what a value is made of."""
    pairs = found.items() if isinstance(found, dict) else ()
    return ", ".join(f"{name} {pattern.format(value)}" for name, value in pairs) or str(found or "")


def _experts(row: Json, _: Run) -> str:
    counts = row.get("active_experts"), row.get("local_experts")
    return "" if None in counts else "{} of {}".format(*counts)


def columns(runs: Sequence[Run]) -> list[Column]:
    """Every column that the rows of one benchmark may have; those that nothing stands in are dropped by `table`."""
    peers = dict.fromkeys(name for run in runs for name in run.peers)
    return [
        _text("case", lambda row, _: row["name"] + ("" if row.get("cold", True) else " (warm)")),
        _text("tile", lambda row, _: _named(row.get("tile"))),
        ("speed over the chooser's", _over_chooser),
        _number("p20, µs", "p20_us"),
        _number("p50, µs", "median_us"),
        _number("p80, µs", "p80_us"),
        _number("limit, µs", "bound_us"),
        ("% of limit", _share),
        *map(_peer, peers),
        _number("value", "value", "{:,.4g}"),
        _text("unit", lambda row, _: row.get("unit", "")),
        ("goals", _goals),
        _text("made of", lambda row, _: _named(row.get("detail"), "{:,.4g}")),
        _text("limited by", lambda row, _: row.get("bound_by", "")),
        _number("GB/s", "gb_per_s", "{:,.0f}"),
        _number("TFLOP/s", "tflop_per_s", "{:,.4g}"),
        _number("limit by sequence, µs", "per_sequence_bound_us"),
        _number("planning, µs", "planning_us"),
        _number("host, µs", "host_us"),
        _text("experts hit", _experts),
        ("ended", _ended),
        _number("s", "seconds"),
        _text("last line", lambda row, _: row.get("summary", "")),
        _text("device", lambda _, run: run.about["device"]),
        _text("date", lambda _, run: run.about["date"][:10]),
    ]


def table(runs: Sequence[Run]) -> dict[str, Any]:
    """Heads and lines of one benchmark's table, without empty columns."""
    cells = {head: [cell(row, run) for run in runs for row in run.rows] for head, cell in columns(runs)}
    kept = {head: column for head, column in cells.items() if any(cell != Cell() for cell in column)}
    heads = [(head, any(cell.value is not None for cell in column)) for head, column in kept.items()]
    has_bars = any(cell.bar is not None for column in kept.values() for cell in column)
    return {"heads": heads, "lines": list(zip(*kept.values(), strict=True)), "has_bars": has_bars}


def versions(run: Run) -> str:
    """Of everything that the run took part in."""
    named = {name: run.about[name] for name in ("python", "torch", "triton") if run.about.get(name)}
    return ", ".join(f"{name} {version}" for name, version in (named | run.about.get("peers", {})).items())


def notes(run: Run) -> list[str]:
    """What stands in no table: what is missing, refused, or said of the run as a whole."""
    found = [f"{name}: {factor:.2f} times as long." for name, factor in run.about.get("growth", {}).items()]
    found += [f"{system(name).label}: {reason}" for name, reason in run.about.get("absent", {}).items()]
    if not_run := run.about.get("not_run", []):
        found.append(f"Not run: {', '.join(map(str, not_run))}.")
    return found


def page(runs: Sequence[Run], charts: Sequence[Chart]) -> str:
    """The whole HTML, which loads nothing."""
    sections = [
        {
            "id": benchmark,
            "title": TITLES[benchmark],
            "table": table(members),
            "notes": [(run.label, notes(run), run.faults) for run in members],
            "charts": [chart for chart in charts if chart.section == benchmark],
        }
        for benchmark in SCHEMAS
        if (members := [run for run in runs if run.benchmark == benchmark])
    ]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=StrictUndefined,
    )  # fmt: skip
    environment.globals.update(versions=versions, system=system, titles=TITLES, width=WIDTH, height=HEIGHT)
    return environment.get_template("report.html").render(
        runs=runs,
        sections=sections,
        overview=[chart for chart in charts if chart.section == "roofline"],
        missing=[TITLES[benchmark] for benchmark in SCHEMAS if benchmark not in {run.benchmark for run in runs}],
        colours=COLOURS,
    )
