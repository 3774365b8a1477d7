"""Draws docs/folders.svg: every folder, what it holds, and who imports whom. `make picture` runs it.

Each package has a frame, from the top down as they may import; in it, arrows between its folders. What other arrows
imply is left out.
"""

from functools import cache
from html import escape
from itertools import accumulate, combinations, pairwise

from tests.structure.imports import MAY_IMPORT, ROOT, Graph, folder_files, folder_imports, reduced

PATH = ROOT / "docs" / "folders.svg"
WIDTH = 1080
BOX_WIDTH, BOX_HEIGHT, PASS_WIDTH = 202, 42, 20
GAP, ROW_GAP, FRAME_HEAD, FRAME_GAP = 16, 24, 30, 30
NAME_SIZE, LINE_SIZE = 12, 11
# What stands in a row: a box, by its name, or a line that passes between boxes, by the two that it joins.
Entry = str | tuple[str, str]
Row = list[Entry]
# One line of what a folder holds.
HOLDS = {
    "bench": "timing, contests, GPU run",
    "bench/attention": "rows, peers, tuning",
    "bench/cache": "the cache without a model",
    "bench/compilation": "machine code without a GPU",
    "bench/compilation/cases": "every configuration compiled",
    "bench/engine": "throughput of whole models",
    "bench/kernels": "every other kernel's rows",
    "bench/mla": "latent attention's rows",
    "bench/micro": "rows by pytest-benchmark",
    "bench/moe": "rows, peers, tuned tables",
    "bench/report": "results as one page",
    "bench/verification": "paged verify",
    "executors": "the contract, two executors",
    "executors/command_line": "generate, info, inspect, bench",
    "executors/engine": "who runs when: the scheduler",
    "executors/parallel": "several processes, one driver",
    "executors/requests": "a request and its parameters",
    "executors/sampling": "logits to tokens",
    "executors/serving": "HTTP: paged serve, its page",
    "executors/speculation": "draft models and heads, lookup",
    "executors/text": "chat templates, detokenizer",
    "executors/vision": "images by transformers' towers",
    "kernels/attention": "paged attention",
    "kernels/cache": "writes to the cache, copies",
    "kernels/common": "devices, checks, launches",
    "kernels/common/attention": "plan, masks, merge of splits",
    "kernels/common/packed": "packed codes, their products",
    "kernels/layers": "norms, rotary, activations",
    "kernels/lora": "low-rank adapters",
    "kernels/mla": "attention over latents",
    "kernels/moe": "routing, experts, tuned tables",
    "kernels/quantization": "layers with packed weights",
    "kernels/recurrent": "convolution, delta rule, Mamba-2",
    "kernels/sampling": "tokens out of logits",
    "models": "the contract, registry, graphs",
    "models/families": "Llama, Qwen3, Mixtral, ...",
    "models/generic": "transformers' own modules",
    "models/layers": "a decoder layer and its parts",
    "models/loading": "checkpoints read and checked",
    "models/lora": "adapters read and applied",
    "models/parallel": "a rank's share of a model",
    "models/quantization": "packed checkpoints, by format",
    "models/recall": "the bundled checkpoint",
    "paged": "batches, metadata, errors",
    "paged, above the cache": "the forward step",
    "paged/cache": "the manager, blocks, prefixes",
    "paged/interop": "others' functions, on ours",
    "paged/interop/vllm_engine": "a backend in vLLM",
}
# Colours by what they fill: light, dark.
COLOURS = {
    ".page": ("#ffffff", "#0d1117"),
    ".frame": ("#f0f2f5", "#161b22"),
    ".box": ("#ffffff", "#262c36"),
    ".name": ("#1f2328", "#e6edf3"),
    ".text": ("#59636e", "#9da7b3"),
    ".head": ("#7d8590", "#7d8590"),
}


@cache
def picture() -> str:
    """The SVG of the sources as they are."""
    imports, parts, top = folder_imports(), [], GAP
    frames = {package: [name for name in imports if _package(name) == package] for package in reversed(MAY_IMPORT)}
    for index, (package, names) in enumerate(frames.items()):
        within = reduced({name: imports[name] & {*names} for name in names})
        frame, bottom = _frame(package, within, top)
        parts.append(frame)
        if index + 1 < len(frames):
            parts.append(_line([(WIDTH / 2, bottom), (WIDTH / 2, bottom + FRAME_GAP)]))
        top = bottom + FRAME_GAP
    height = top - FRAME_GAP + GAP
    light, dark = (" ".join(f"{name} {{ fill: {pair[mode]} }}" for name, pair in COLOURS.items()) for mode in (0, 1))
    style = f"text {{ font-family: Helvetica, Arial, sans-serif }} .name {{ font-weight: bold }} {light}"
    lines = ".line { fill: none; stroke-width: 1.4 } .line, .box { stroke: #7d8590 }"
    marker = '<marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            "<title>The folders, and which imports which</title>",
            f"<style>{style} {lines}\n@media (prefers-color-scheme: dark) {{ {dark} }}</style>",
            f'<defs>{marker}<path class="head" d="M0 0L8 4L0 8z"/></marker></defs>',
            f'<rect width="{WIDTH}" height="{height}" class="page"/>',
            *parts,
            "</svg>\n",
        )
    )


def _package(folder: str) -> str:
    return folder.replace(",", "/").split("/")[0]


def _frame(package: str, graph: Graph, top: int) -> tuple[str, int]:
    """A package's folders from `top` on, and where its frame ends."""
    rows, parts = _rows(graph), []
    lefts: list[list[float]] = []
    for row in rows:
        ends = [*accumulate((_width(entry) + GAP for entry in row), initial=0)]
        lefts.append([(WIDTH - ends[-1] + GAP) / 2 + end for end in ends[:-1]])
    tops = [top + FRAME_HEAD + index * (BOX_HEIGHT + ROW_GAP) for index in range(len(rows))]
    bottom = tops[-1] + BOX_HEIGHT + GAP
    for index, (upper, lower) in enumerate(pairwise(rows)):
        for above, left in zip(upper, lefts[index], strict=True):
            for below, left_below in zip(lower, lefts[index + 1], strict=True):
                if _are_joined(graph, above, below):
                    start = left + _width(above) / 2, tops[index] + BOX_HEIGHT
                    end = left_below + _width(below) / 2, tops[index + 1]
                    through = [] if isinstance(below, str) else [(end[0], end[1] + BOX_HEIGHT)]
                    parts.append(_line([start, end, *through], has_head=isinstance(below, str)))
    boxes = [
        _box(entry, x, y)
        for row, xs, y in zip(rows, lefts, tops, strict=True)
        for entry, x in zip(row, xs, strict=True)
        if isinstance(entry, str)
    ]
    heading = f'<text class="name" x="{2 * GAP}" y="{top + 20}" font-size="15">{package}/</text>'
    outline = f'<rect x="{GAP}" y="{top}" width="{WIDTH - 2 * GAP}" height="{bottom - top}" rx="8" class="frame"/>'
    return "\n".join([outline, heading, *parts, *boxes]), bottom


def _rows(graph: Graph) -> list[Row]:
    """Rows from the top down: what others need stands further down, with as few crossings as are found."""
    heights: dict[str, int] = {}

    def height(name: str) -> int:
        if name not in heights:
            heights[name] = 1 + max(map(height, graph[name]), default=-1)
        return heights[name]

    rows: list[Row] = [[] for _ in range(1 + max(map(height, graph)))]
    for name in sorted(graph):
        rows[-1 - heights[name]].append(name)
        for end in sorted(graph[name]):
            for between in range(heights[end] + 1, heights[name]):
                rows[-1 - between].append((name, end))
    for index in [*range(len(rows))] * 6:
        row, near = rows[index], rows[max(index - 1, 0) : index + 2]
        for first, second in combinations(range(len(row)), 2):
            before = _badness(graph, near)
            row[first], row[second] = row[second], row[first]
            if _badness(graph, near) >= before:
                row[first], row[second] = row[second], row[first]
    return rows


def _are_joined(graph: Graph, upper: Entry, lower: Entry) -> bool:
    """Whether a line leads from an entry of one row to one of the next."""
    if isinstance(upper, tuple):
        return lower in (upper, upper[1])
    return lower[0] == upper if isinstance(lower, tuple) else lower in graph[upper]


def _badness(graph: Graph, rows: list[Row]) -> tuple[int, float]:
    """Crossings, then the distance that the lines go to the side where every row is centred."""
    crossings, distance = 0, 0.0
    for upper, lower in pairwise(rows):
        lines = [(a, b) for a, x in enumerate(upper) for b, y in enumerate(lower) if _are_joined(graph, x, y)]
        crossings += sum((a - c) * (b - d) < 0 for (a, b), (c, d) in combinations(lines, 2))
        distance += sum(abs((a - (len(upper) - 1) / 2) - (b - (len(lower) - 1) / 2)) for a, b in lines)
    return crossings, distance


def _width(entry: Entry) -> int:
    return BOX_WIDTH if isinstance(entry, str) else PASS_WIDTH


def _line(points: list[tuple[float, float]], *, has_head: bool = True) -> str:
    """From the first point to the second in a curve that begins and ends upright, then straight."""
    (x, y), (to_x, to_y), *rest = points
    middle = (y + to_y) / 2
    path = f"M{x:g} {y:g}C{x:g} {middle:g} {to_x:g} {middle:g} {to_x:g} {to_y:g}"
    path += "".join(f"L{x:g} {y:g}" for x, y in rest)
    head = ' marker-end="url(#arrow)"' if has_head else ""
    return f'<path class="line" d="{path}"{head}/>'


def _box(folder: str, x: float, y: float) -> str:
    count, right = len(folder_files()[folder]), x + BOX_WIDTH - 8
    rectangle = f'<rect class="box" x="{x:g}" y="{y:g}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="5"/>'
    return (
        f'<g>{rectangle}<text class="name" x="{x + 8:g}" y="{y + 17:g}" font-size="{NAME_SIZE}">{folder}</text>'
        f'<text class="text" x="{right:g}" y="{y + 17:g}" font-size="{LINE_SIZE}" text-anchor="end">{count}</text>'
        f'<text class="text" x="{x + 8:g}" y="{y + 33:g}" font-size="{LINE_SIZE}">{escape(HOLDS[folder])}</text></g>'
    )


if __name__ == "__main__":
    PATH.write_text(picture())
