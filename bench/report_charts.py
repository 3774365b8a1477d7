"""Which charts a report has: their titles, their figures, and why one is left out."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paged.bench.report_results import Run

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

    from paged.bench.report_svg import STYLE, inline_svg

    found = []
    with mpl.rc_context(STYLE):
        for section, name, drawn in _drawn(runs):
            if isinstance(drawn, str):
                found.append(Chart(section, f"{name} is left out: {drawn}."))
            else:
                title, figure = drawn
                slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
                found.append(Chart(section, title, slug, figure, inline_svg(figure, slug, title)))
    return found


def save_pngs(charts: Sequence[Chart], folder: Path) -> None:
    """A light picture of every chart, under its title."""
    for chart in charts:
        if chart.figure:
            chart.figure.suptitle(chart.title, x=0.01, ha="left", size=11, weight="bold")
            chart.figure.savefig(folder / f"{chart.name}.png", dpi=120, facecolor="white")


def _drawn(runs: Sequence[Run]) -> Iterator[tuple[str, str, Drawn]]:
    """Section, name and what was drawn; names are the files' names too, so each stands once."""
    from paged.bench import report_bars as bars
    from paged.bench import report_curves as curves

    def of(*benchmarks: str) -> list[Run]:
        return [run for run in runs if run.benchmark in benchmarks]

    if limited := of("attention", "moe", "kernels"):
        yield "roofline", "Roofline", curves.roofline(limited)
    for run in of("attention"):
        yield "attention", f"Attention over peers, {run.label}", bars.speed_over_peers(run)
    for benchmark in ("attention", "kernels"):
        if members := of(benchmark):
            yield benchmark, f"Share of the limit, {benchmark}", bars.share_of_limit(members)
    for run in of("attention"):
        yield "attention", f"Decode latency, {run.label}", curves.decode_latency(run)
    for run in of("moe"):
        for model, drawn in curves.experts(run).items():
            yield "moe", f"{model}, {run.label}", drawn
    for benchmark in ("cache", "engine"):
        if members := of(benchmark):
            yield benchmark, f"Goals, {benchmark}", bars.goals_reached(members)
    for run in of("tune_attention"):
        yield "tune_attention", f"Tiles, {run.label}", bars.tiles(run)
