"""Charts over a quantity: the roofline, decode latency over the context, experts over the number of tokens."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paged.bench.report.results import Json, Run
from paged.bench.report.style import OURS, colour, system
from paged.bench.report.svg import log_axis, tips

_MARKERS = {"attention": ("attention", "o"), "moe": ("experts", "s"), "kernels": ("other kernels", "^")}
End = tuple[float, float, str, str]
"""Where a line ends, its name and its colour."""


def roofline(runs: Sequence[Run]) -> tuple[str, Figure] | str:
    """Every row that has matrix products, under the ceilings measured in its run; a panel a device."""
    rows = [(run, row) for run in runs if run.ceilings for row in run.rows if row["tflop_per_s"] > 0]
    if not rows:
        return "no row with matrix products and measured ceilings"
    devices = list(dict.fromkeys(run.about["device"] for run, _ in rows))
    figure = Figure(figsize=(6.2 if len(devices) == 1 else 4.9 * len(devices), 4.2), layout="constrained")
    panels = figure.subplots(1, len(devices), sharex=True, sharey=True, squeeze=False)[0]
    points = [(run, row, 1e3 * row["tflop_per_s"] / row["gb_per_s"]) for run, row in rows]
    lowest, highest = (function(x for _, _, x in points) for function in (min, max))
    for axes, device in zip(panels, devices, strict=True):
        own = [point for point in points if point[0].about["device"] == device]
        bandwidth = max(run.ceilings[0] for run, _, _ in own if run.ceilings) / 1e3
        peak = max(run.ceilings[1] for run, _, _ in own if run.ceilings)
        ridge = peak / bandwidth
        ends = [min(lowest, ridge) / 2, ridge, max(highest, ridge) * 2]
        axes.plot(ends, [bandwidth * ends[0], peak, peak], color=colour("ink"), linewidth=1.2)
        label = {"textcoords": "offset points", "color": colour("muted"), "size": 8}
        axes.annotate(f"{peak:,.4g} TFLOP/s", (ends[2], peak), (0, 4), ha="right", **label)
        middle = math.sqrt(ends[0] * ridge)
        axes.annotate(f"{1e3 * bandwidth:,.4g} GB/s", (middle, bandwidth * middle), (-6, 4), ha="right", **label)
        for (benchmark, (_, marker)), cold in itertools.product(_MARKERS.items(), (True, False)):
            part = [(row, x) for run, row, x in own if run.benchmark == benchmark and row.get("cold", True) == cold]
            if part:
                dots = axes.scatter(
                    [x for _, x in part],
                    [row["tflop_per_s"] for row, _ in part],
                    s=20,
                    marker=marker,
                    facecolors=colour("ours") if cold else "none",
                    edgecolors=colour("ours"),
                    linewidths=0.8,
                    alpha=0.7,
                )
                dots.set_gid(
                    tips(
                        *(f"{row['name']}: {row['tflop_per_s']:.4g} TFLOP/s, {row['percent']:.0f} %" for row, _ in part)
                    )
                )
        axes.set(title=device, xlabel="FLOP a byte")
        log_axis(axes.xaxis)
        log_axis(axes.yaxis)
    panels[0].set_ylabel("TFLOP/s")
    present = {run.benchmark for run, _ in rows}
    for text, marker in (entry for name, entry in _MARKERS.items() if name in present):
        panels[0].scatter([], [], marker=marker, color=colour("ours"), s=20, label=text)
    if not all(row.get("cold", True) for _, row in rows):
        panels[0].scatter([], [], facecolors="none", edgecolors=colour("ours"), s=20, label="hollow: fits the cache")
    panels[0].legend(loc="lower right")
    share = statistics.median(row["percent"] for _, row in rows)
    return f"Roofline: the median of {len(rows)} rows reaches {share:.0f} % of its roof", figure


def decode_latency(run: Run) -> tuple[str, Figure] | str:
    """Time of a decode step over the context, a panel for each batch that was measured at several contexts."""
    batches: dict[tuple[int, str, int], list[Json]] = {}
    for row in run.rows:
        if row["kind"] == "decode" and len(row["groups"]) == 1:
            heads = "/".join(map(str, row["heads"]))
            batches.setdefault((row["groups"][0][0], heads, row["block_size"]), []).append(row)
    curves = sorted((key, rows) for key, rows in batches.items() if len({_context(row) for row in rows}) > 1)
    if not curves:
        return "no batch of decodes was measured at two contexts"
    figure = Figure(figsize=(max(5.0, 2.7 * len(curves)), 3.1), layout="constrained")
    panels = figure.subplots(1, len(curves), sharex=True, sharey=True, squeeze=False)[0]
    panels[0].set_ylabel("µs a layer, median")
    log_axis(panels[0].yaxis)
    ends = []
    for axes, ((count, heads, block_size), rows) in zip(panels, curves, strict=True):
        axes.set_title(f"{count} sequence{'s' * (count > 1)}, {heads} heads,\nblocks of {block_size}")
        axes.set_xlabel("context, tokens")
        ends.append([*_plot_systems(axes, rows, _context, _time, "µs"), _plot_limit(axes, rows, _context)])
    _count_axis(panels[0], [_context(row) for _, rows in curves for row in rows])
    _label_ends(figure, panels, ends)
    return f"Decode latency over the context, {run.label}", figure


def models(run: Run) -> dict[str, list[Json]]:
    """The rows of every model; of none where there are no rows."""
    found: dict[str, list[Json]] = {}
    for row in run.rows:
        parts = [part for part in row["name"].split(".") if part != row["routing"] and not part.isdigit()]
        found.setdefault(".".join(parts), []).append(row)
    return found or {"Experts": []}


def experts(model: str, rows: Sequence[Json], run: Run) -> tuple[str, Figure] | str:
    """Of one model: time, share of the limit and speed over peers, over the number of tokens and by routing."""
    if not rows:
        return "no rows"
    if len({row["tokens"] for row in rows}) < 2:
        return "measured at one number of tokens only"
    routings = sorted({row["routing"] for row in rows})
    width = 3 if any(row.get("peers") for row in rows) else 2
    figure = Figure(figsize=(3.45 * width, 0.6 + 2.4 * len(routings)), layout="constrained")
    grid = figure.subplots(len(routings), width, sharex=True, sharey="col", squeeze=False)
    ends = []
    for routing, (times, shares, *ratios) in zip(routings, grid, strict=True):
        part = [row for row in rows if row["routing"] == routing]
        times.set(title=f"{routing}: time, µs")
        ends.append(
            [
                *_plot_systems(times, part, itemgetter("tokens"), _time, "µs"),
                _plot_limit(times, part, itemgetter("tokens")),
            ]
        )
        shares.set(title=f"{routing}: % of the limit")
        ends.append(_plot_systems(shares, part, itemgetter("tokens"), _share, "%"))
        shares.axhline(100, color=colour("muted"), linewidth=1, linestyle=":")
        for axes in ratios:
            axes.set(title=f"{routing}: times as fast as")
            ends.append(_plot_systems(axes, part, itemgetter("tokens"), _ratio, "times", ours=False))
            axes.axhline(1, color=colour("ink"), linewidth=0.9)
    _count_axis(grid[0][0], [row["tokens"] for row in rows])
    log_axis(grid[0][0].yaxis)
    grid[0][1].set_ylim(bottom=0)
    for axes in grid[0][2:]:
        log_axis(axes.yaxis, (1.0, 2.0, 5.0))
    for axes in grid[-1]:
        axes.set_xlabel("tokens")
    _label_ends(figure, grid.flat, ends)
    share = statistics.median(row["percent"] for row in rows)
    return f"{model}: the median is {share:.0f} % of the limit, {run.label}", figure


def _context(row: Json) -> int:
    return int(row["groups"][0][2])


def _time(row: Json, own: Json) -> float:
    return float(row["median_us"])


def _share(row: Json, own: Json) -> float:
    return float(100 * own["bound_us"] / row["median_us"])


def _ratio(row: Json, own: Json) -> float:
    return float(row["median_us"] / own["median_us"])


def _plot_systems(
    axes: Axes,
    rows: Sequence[Json],
    x: Callable[[Json], int],
    y: Callable[[Json, Json], float],
    unit: str,
    *,
    ours: bool = True,
) -> list[End]:
    """A line for ours and for each peer of these rows; `y` is of a system's row and of ours in the same case."""
    ends = []
    peers = dict.fromkeys(name for row in rows for name in row.get("peers", {}))
    for name in [*([None] if ours else []), *peers]:
        who = system(name) if name else OURS
        pairs = [(row, row["peers"][name] if name else row) for row in rows if name is None or name in row["peers"]]
        points = sorted((x(row), y(times, row), row["name"]) for row, times in pairs)
        texts = [f"{who.label}, {case}: {value:,.4g} {unit}" for _, value, case in points]
        if len(points) < 2:
            continue  # a lone point is no line; it stands in the table
        xs, ys, _ = zip(*points, strict=True)
        (line,) = axes.plot(
            xs, ys, color=colour(who.role), marker=who.marker, linestyle=who.line, zorder=3 if name else 4
        )
        line.set_gid(tips(*texts))
        ends.append((xs[-1], ys[-1], who.label, colour(who.role)))
    return ends


def _plot_limit(axes: Axes, rows: Sequence[Json], x: Callable[[Json], int]) -> End:
    points = sorted((x(row), row["bound_us"]) for row in rows)
    axes.plot(*zip(*points, strict=True), color=colour("muted"), linewidth=1, linestyle=":")
    return (*points[-1], "limit", colour("muted"))


def _count_axis(axes: Axes, counts: Sequence[int]) -> None:
    """Ticks at every other power of two that was measured, and room at the right for the lines' names."""
    low, high = min(counts), max(counts)
    log_axis(axes.xaxis)
    ticks = [4**power for power in range(12) if low <= 4**power <= high] or sorted(set(counts))
    axes.set_xticks(ticks, [f"{tick >> 10}k" if tick >= 1024 else str(tick) for tick in ticks])
    axes.set_xlim(low / 1.3, high * (high / low) ** 0.5)


def _label_ends(figure: Figure, panels: Iterable[Axes], ends: Iterable[Sequence[End]]) -> None:
    """Names at the ends of lines, moved apart where they would overlap."""
    figure.draw_without_rendering()  # settles where the axes lie
    gap = 10 * figure.dpi / 72
    for axes, labels in zip(panels, ends, strict=True):
        ordered = sorted(labels, key=lambda end: end[1])
        heights = [float(axes.transData.transform(end[:2])[1]) for end in ordered]
        moved = list(itertools.accumulate(heights, lambda below, height: max(height, below + gap)))
        ceiling = axes.bbox.y1 + gap
        for index in reversed(range(len(moved))):
            ceiling = moved[index] = min(moved[index], ceiling - gap)
        for (x, y, text, paint), height, target in zip(ordered, heights, moved, strict=True):
            at = (6, (target - height) * 72 / figure.dpi)
            label = axes.annotate(text, (x, y), at, textcoords="offset points", va="center", size=8, color=paint)
            label.set_in_layout(False)
