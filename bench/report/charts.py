"""Which charts a report has: their titles, their figures, and why one is left out."""

from __future__ import annotations

import importlib.util
import itertools
import re
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from paged.bench.report.results import Run
from paged.printable import xml_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Drawn = tuple[str, "Figure"] | str
"""A title and its figure, or why there is none."""


@dataclass(frozen=True)
class Chart:
    """section: the benchmark that it is of, or "roofline". svg: None where the title says why the chart is left out."""

    section: str
    title: str
    name: str = ""
    figure: Figure | None = None
    svg: str | None = None


def charts(runs: Sequence[Run]) -> list[Chart]:
    """Every chart that these runs have rows for, and a sentence for each that they have not."""
    if importlib.util.find_spec("matplotlib") is None:
        return [Chart("", "Charts are left out: matplotlib is not installed.")]
    import matplotlib as mpl

    from paged.bench.report.svg import STYLE, inline_svg

    found: list[Chart] = []
    with mpl.rc_context(STYLE):
        for section, name, draw in _drawn(runs):
            slug = _slug(name, {chart.name for chart in found})
            try:
                drawn = draw()
                if isinstance(drawn, str):
                    found.append(Chart(section, f"{name} is left out: {drawn}."))
                    continue
                title, figure = drawn
                found.append(Chart(section, title, slug, figure, inline_svg(figure, slug, title)))
            except (ValueError, ArithmeticError, MemoryError) as error:
                # Numbers that no axis takes, a time of 1e-30 beside one of 1e30, do not take the page with them.
                found.append(Chart(section, xml_text(f"{name} is left out: it cannot be drawn ({error}).")))
    return found


def _slug(name: str, taken: Container[str]) -> str:
    """A name for a file, of a length that all systems take, and no other chart's."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:100]
    return next(one for number in itertools.count() if (one := f"{slug}-{number}" if number else slug) not in taken)


def save_pngs(charts: Sequence[Chart], folder: Path) -> None:
    """A light picture of every chart, under its title."""
    for chart in charts:
        if chart.figure:
            chart.figure.suptitle(chart.title, x=0.01, ha="left", size=11, weight="bold")
            # A picture has 65,535 pixels at the most.
            dpi = min(120.0, 60_000 / max(chart.figure.get_size_inches()))
            chart.figure.savefig(folder / f"{chart.name}.png", dpi=dpi, facecolor="white")


def _drawn(runs: Sequence[Run]) -> Iterator[tuple[str, str, Callable[[], Drawn]]]:
    """Section, name and what draws it; names are the files' names too, so each stands once."""
    from paged.bench.report import bars, curves

    def of(*benchmarks: str) -> list[Run]:
        return [run for run in runs if run.benchmark in benchmarks]

    if limited := of("attention", "moe", "kernels"):
        yield "roofline", "Roofline", partial(curves.roofline, limited)
    for run in of("attention"):
        yield "attention", f"Attention over peers, {run.label}", partial(bars.speed_over_peers, run)
    for run in of("engine"):
        if run.peers:
            yield "engine", f"Engines over peers, {run.label}", partial(bars.speed_over_peers, run)
    for benchmark in ("attention", "kernels"):
        if members := of(benchmark):
            yield benchmark, f"Share of the limit, {benchmark}", partial(bars.share_of_limit, members)
    if members := [run for run in of("engine") if any("percent" in row for row in run.rows)]:
        yield "engine", "Share of the limit, engine", partial(bars.share_of_limit, members)
    for run in of("attention"):
        yield "attention", f"Decode latency, {run.label}", partial(curves.decode_latency, run)
    for run in of("moe"):
        for model, rows in curves.models(run).items():
            yield "moe", f"{model}, {run.label}", partial(curves.experts, model, rows, run)
    for benchmark in ("cache", "engine"):
        if members := of(benchmark):
            yield benchmark, f"Goals, {benchmark}", partial(bars.goals_reached, members)
    for run in of("tune_attention"):
        yield "tune_attention", f"Tiles, {run.label}", partial(bars.tiles, run)
