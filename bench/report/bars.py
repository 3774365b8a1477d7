"""Charts with a case a line: speed over peers, share of the limit, goals, tiles."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paged.bench.report.results import Json, Run, is_fault
from paged.bench.report.style import colour, system
from paged.bench.report.svg import log_axis, tips

_LINE = 0.175
"""Inches a case takes."""


def natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts 8 before 16, also inside of names."""
    return [(int(part) if part.isdigit() else -1, part) for part in re.split(r"(\d+)", name)]


def _panels(
    names: Sequence[str], titles: Sequence[str], width: float = 2.6
) -> tuple[Figure, list[Axes], dict[str, int]]:
    """Axes side by side over shared lines, one for each name from the top; gaps part groups of names alike at first."""
    groups = [name.partition(".")[0] for name in names]
    is_grouped = len(set(groups)) <= len(names) / 4
    lines, height = {}, 0
    for index, name in enumerate(names):
        height += is_grouped and index > 0 and groups[index] != groups[index - 1]
        lines[name] = height
        height += 1
    label = 0.075 * max(map(len, names))
    figure = Figure(figsize=(label + width * len(titles), 0.9 + _LINE * height), layout="constrained")
    panels = list(figure.subplots(1, len(titles), sharex=True, sharey=True, squeeze=False)[0])
    panels[0].set_yticks(list(lines.values()), list(lines))
    panels[0].set_ylim(height - 0.4, -0.6)
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title)
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
    return figure, panels, lines


def _ratio_axes(panels: Sequence[Axes], values: Iterable[float], text: str, *, room: float) -> None:
    """A logarithmic axis with a line at 1.0; `room`: of its length, for labels behind the longest bar."""
    found = [0.9, 1.1, *values]
    low, high = min(found) / 1.1, max(found)
    steps = (1, 2, 5) if high / low > 3 else (1, 1.2, 1.5, 2, 6, 8)
    ticks = [step * 10.0**power for power in range(-3, 4) for step in steps if low <= step * 10.0**power <= high]
    for axes in panels:
        log_axis(axes.xaxis)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.axvline(1.0, color=colour("ink"), linewidth=0.9, zorder=3)
        axes.set_xlabel(text)
    panels[0].set_xlim(low, high * (high / low) ** (room / (1 - room)))


def _bar(axes: Axes, line: int, end: float, tip: str, *, start: float = 1.0, **paint: Any) -> None:
    """A bar from `start` to `end` that shows `tip` when pointed at."""
    (bar,) = axes.barh(line, end - start, left=start, height=0.7, **paint)
    bar.set_gid(tips(tip))


def _label(axes: Axes, line: int, x: float, text: str, **style: Any) -> None:
    """A text behind x."""
    axes.annotate(text, (x, line), (4, 0), textcoords="offset points", va="center", size=8, **style)


def speed_over_peers(run: Run) -> tuple[str, Figure] | str:
    """Ours over every peer, a bar a case from the line of equal speed."""
    if not run.peers:
        return "no peer has a time in this file"
    means = {peer: run.geometric_mean(peer) for peer in run.peers}
    overall = "geometric mean"
    rows = {row["name"]: row for row in run.rows}
    names = [overall, *sorted((name for name, row in rows.items() if row.get("peers")), key=natural)]
    figure, panels, lines = _panels(names, [f"over {system(peer).label}" for peer in means])
    for axes, (peer, mean) in zip(panels, means.items(), strict=True):
        ratios = {name: rows[name]["peers"][peer]["ratio"] for name in names[1:] if peer in rows[name]["peers"]}
        paint = colour(system(peer).role)
        for name, ratio in {overall: mean, **ratios}.items():
            is_mean, tip = name == overall, f"{name}: {ratio:.3g} times {system(peer).label}"
            _bar(axes, lines[name], ratio, tip, color=paint, alpha=1 if is_mean else 0.7)
            _label(axes, lines[name], max(ratio, 1.0), f"{ratio:.2f}", weight="bold" if is_mean else "normal")
        for name in set(names[1:]) - set(ratios):
            if is_fault(reason := rows[name].get("absent", {}).get(peer, "")):
                axes.text(1.03, lines[name], reason.partition(":")[0], va="center", size=8, color=colour("muted"))
    every = [peer["ratio"] for row in run.rows for peer in row.get("peers", {}).values()]
    _ratio_axes(panels, every, "times as fast (its median over ours)", room=0.2)
    told = ", ".join(f"{mean:.2f} times {system(peer).label}" for peer, mean in means.items())
    return f"Speed over peers on {run.label}: in the geometric mean {told}", figure


def share_of_limit(runs: Sequence[Run]) -> tuple[str, Figure] | str:
    """What share of its least possible time a case reaches, devices side by side."""
    rows = [{row["name"]: row for row in run.rows if "percent" in row} for run in runs]
    names = sorted({name for run in rows for name in run}, key=natural)
    if not names:
        return "no rows"
    figure, panels, lines = _panels(names, [run.label for run in runs], 3.2)
    highest = max(row["percent"] for run in rows for row in run.values())
    for axes, run in zip(panels, rows, strict=True):
        for name, row in run.items():
            tip = f"{name}: {row['median_us']:,.1f} µs, at least {row['bound_us']:,.1f} µs by {row['bound_by']}"
            _bar(axes, lines[name], row["percent"], tip, start=0, color=colour("ours"), alpha=0.8)
            note = "" if row.get("cold", True) else ", warm"
            text = f"{row['percent']:.0f}  {row['bound_by']}{note}"
            _label(axes, lines[name], max(row["percent"], 100.0), text)
        axes.axvline(100, color=colour("ink"), linewidth=0.9, zorder=3)
        axes.set(xlim=(0, max(100.0, highest) * 1.45), xlabel="% of what the device was measured to reach")
        axes.set_xticks([0, 25, 50, 75, 100])
    medians = [f"{statistics.median(row['percent'] for row in run.values()):.0f} %" for run in rows if run]
    return f"Share of the limit, in the median case {' and '.join(medians)}", figure


def goals_reached(runs: Sequence[Run]) -> tuple[str, Figure] | str:
    """How far every goal is reached: bars that end beyond 1.0 have met it."""
    found: list[dict[tuple[str, str], Json]] = [
        {
            (row["name"], goal["text"]): goal
            for row in run.rows
            for goal in row.get("goals", [])
            if goal["met"] is not None and goal.get("reached")
        }
        for run in runs
    ]
    keys = list(dict.fromkeys(key for goals in found for key in goals))
    if not keys:
        return "no goal of these rows could be judged"
    names = {key: f"{key[0]}: {key[1]}" for key in keys}
    figure, panels, lines = _panels(list(names.values()), [run.label for run in runs], 3.6)
    for axes, goals in zip(panels, found, strict=True):
        for key, goal in goals.items():
            paint: dict[str, Any] = {"color": colour("ours"), "alpha": 0.8}
            if not goal["met"]:
                paint = {"facecolor": "none", "edgecolor": colour("ours"), "linewidth": 1.2}
            line, reached = lines[names[key]], goal["reached"]
            _bar(axes, line, reached, f"{names[key]}: {goal['value']:.4g}, {reached:.2f} of the goal", **paint)
            sign = "\N{CHECK MARK}" if goal["met"] else "\N{BALLOT X} missed"
            _label(axes, line, max(reached, 1.0), f"{goal['value']:.4g} {sign}")
    every = [goal["reached"] for goals in found for goal in goals.values()]
    _ratio_axes(panels, every, "share of the goal reached; 1 meets it", room=0.25)
    met = [goal["met"] for goals in found for goal in goals.values()]
    return f"Goals: {sum(met)} of {len(met)} met", figure


def tiles(run: Run) -> tuple[str, Figure] | str:
    """Every tile that was tried, beside the chooser's in the same batch."""
    cases: dict[str, list[Json]] = {}
    for row in run.rows:
        cases.setdefault(row["name"], []).append(row)
    chosen = {name: _chosen(rows) for name, rows in cases.items()}
    names = [name for name, time in chosen.items() if time]
    if not names:
        return "no case holds a time of the chooser's tile"
    figure, (axes,), lines = _panels(names, [f"{run.label}: a dot a tile, labelled: the fastest"], 7.0)
    gains, shares = [], []
    for name in names:
        share = [chosen[name] / row["median_us"] for row in cases[name]]
        texts = [f"{_tile_text(row['tile'])}: {row['median_us']:,.1f} µs" for row in cases[name]]
        dots = axes.scatter(share, [lines[name]] * len(share), s=14, color=colour("muted"), alpha=0.5, linewidths=0)
        dots.set_gid(tips(*texts))
        best = max(range(len(share)), key=lambda index: share[index])
        text = f"{share[best]:.2f}  {_tile_text(cases[name][best]['tile'])}"
        axes.scatter(share[best], lines[name], s=22, color=colour("ours"), zorder=4)
        _label(axes, lines[name], share[best], text)
        gains.append(share[best])
        shares += share
    _ratio_axes([axes], shares, "speed, the chooser's tile = 1", room=0.5)
    return f"Tiles: the fastest tried is at most {max(gains):.2f} times as fast as the chooser's", figure


def _chosen(rows: Sequence[Json]) -> float:
    """Mean time of the chooser's tile, which is timed first and last; 0 where it is not there."""
    times = [row["median_us"] for row in rows if isinstance(row["tile"], str)]
    return statistics.mean(times) if times else 0.0


def _tile_text(tile: Json | str) -> str:
    if isinstance(tile, str):
        return tile
    sizes = ", ".join(f"{name.removeprefix('num_')} {value}" for name, value in tile.items() if type(value) is int)
    return sizes + "".join(f", {name}" for name, value in tile.items() if value is True)
