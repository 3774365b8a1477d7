"""Picture of a KV cache as text or SVG: its blocks and the sequences that hold them."""

from __future__ import annotations

import itertools
import string
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal
from xml.sax.saxutils import escape

from paged.errors import InvalidInputError
from paged.tools.printable import one_line, xml_text

if TYPE_CHECKING:
    from paged.cache.manager import PagedKvCacheManager
    from paged.seq_id import SeqId

Kind = Literal["free", "cached", "own", "shared", "copy"]
_LETTERS = string.ascii_letters + string.digits
# Mark and meaning of each kind of block.
_KINDS: dict[Kind, tuple[str, str]] = {
    "free": (".", "free"),
    "cached": ("~", "free, holds K/V that a prompt may begin with"),
    "own": (" ", "held by one sequence"),
    "shared": ("+", "held by several sequences"),
    "copy": ("!", "held by several, copied when one of them writes its next token"),
}
_CELL, _LINE, _LETTER = 22, 18, 8  # pixels; a letter of size 12 is about 7 wide
_LONGEST_ID = 200  # in characters, of a request id or a namespace


@dataclass(frozen=True)
class BlockCell:
    """One block in a picture.

    Attributes:
        kind: "free", "cached", "own", "shared", or "copy" if it must be copied before the next write.
        holders: indices of the sequences that hold it.
        fill: fraction of its positions with valid K/V.
    """

    block: int
    kind: Kind
    holders: tuple[int, ...] = ()
    fill: float = 0.0


@dataclass(frozen=True)
class SequenceLine:
    """One sequence in a picture. `letter` marks its blocks, `num_swapped` counts its blocks in host memory."""

    letter: str
    request_id: SeqId
    namespace: Hashable
    num_tokens: int
    num_cached_tokens: int
    num_blocks: int
    num_swapped: int


@dataclass(frozen=True)
class CachePicture:
    """A KV cache at one moment.

    Attributes:
        cells: blocks 1 to num_blocks, in order.
        sequences: live sequences, oldest first.
        summary: the cache's counts as a sentence.
    """

    cells: tuple[BlockCell, ...]
    sequences: tuple[SequenceLine, ...]
    block_size: int
    summary: str

    def count(self, kind: Kind) -> int:
        """Return the number of blocks of a kind."""
        return sum(cell.kind == kind for cell in self.cells)

    def text(self, columns: int = 32) -> str:
        """Draw for a terminal. A cell shows the letter of the first sequence that holds the block, and a mark.

        Lines below the cells name all holders of shared blocks.
        """
        _check_columns(columns)
        cells: list[str] = []
        for cell in self.cells:
            letter = ""
            if cell.holders:
                letter = self.sequences[cell.holders[0]].letter
            cells.append((letter + _KINDS[cell.kind][0]).rjust(2))
        lines: list[str] = []
        width = len(str(len(cells)))
        for start in range(0, len(cells), columns):
            row = " ".join(cells[start : start + columns])
            lines.append(f"{start + 1:{width}}  {row}".rstrip())
        lines.append("")
        for kind, (mark, meaning) in _KINDS.items():
            example = mark.strip()
            if kind in ("own", "shared", "copy"):
                example = f"a{example}"
            lines.append(f"{example:3} {self.count(kind):4}  {meaning}")
        lines.append("")
        for text in (*map(_line, self.sequences), self.summary):
            lines.append(one_line(text))
        return "\n".join(lines + self._shared_lines())

    def _shared_lines(self) -> list[str]:
        """Return a line with the holders' letters for each run of shared blocks."""
        lines = []
        for holders, cells in itertools.groupby(self.cells, key=lambda cell: cell.holders):
            if len(holders) > 1:
                blocks = [cell.block for cell in cells]
                letters = " ".join(self.sequences[index].letter for index in holders)
                lines.append(f"shared: {blocks[0]}-{blocks[-1]}  {letters}")
        return lines

    def svg(self, columns: int = 32) -> str:
        """Draw as a stand-alone SVG. A cell has a stripe per holder, filled as far as the block is."""
        _check_columns(columns)
        num_rows = -(-len(self.cells) // columns)
        body: list[str] = []
        for index, cell in enumerate(self.cells):
            row, column = divmod(index, columns)
            body.append(self._svg_cell(cell, row, column))
        y = num_rows * _CELL + _LINE
        for index, sequence in enumerate(self.sequences):
            body.append(f'<rect x="2" y="{y - 11}" width="12" height="12" fill="{_colour(index)}"/>')
            body.append(f'<text x="20" y="{y}">{escape(xml_text(_line(sequence)))}</text>')
            y += _LINE
        body.append(f'<text x="2" y="{y}">{escape(xml_text(self.summary))}</text>')
        longest = len(self.summary)
        for sequence in self.sequences:
            longest = max(longest, len(_line(sequence)) + 3)
        width, height = max(columns * _CELL, longest * _LETTER) + 4, y + 8
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="monospace" font-size="12">\n'
            f'<rect width="{width}" height="{height}" fill="white"/>\n' + "\n".join(body) + "\n</svg>\n"
        )

    def _svg_cell(self, cell: BlockCell, row: int, column: int) -> str:
        x, y, size = 2 + column * _CELL, 2 + row * _CELL, _CELL - 3
        names = ", ".join(one_line(self.sequences[index].request_id, _LONGEST_ID) for index in cell.holders)
        title = f"block {cell.block}: {_KINDS[cell.kind][1]}"
        if names:
            title += f" ({names})"
        background = "#cfd8e6" if cell.kind == "cached" else "#f4f4f4"
        dashes = ' stroke-dasharray="3 2"' if cell.kind == "copy" else ""
        stroke = "black" if len(cell.holders) > 1 else "#999"
        stripes, width = [], size / max(len(cell.holders), 1)
        height = size * cell.fill if 0 <= cell.fill <= 1 else 0.0  # 0 for NaN as well
        for stripe, index in enumerate(cell.holders):
            stripes.append(
                f'<rect x="{x + stripe * width:.1f}" y="{y + size - height:.1f}" width="{width:.1f}" '
                f'height="{height:.1f}" fill="{_colour(index)}"/>'
            )
        frame = f'x="{x}" y="{y}" width="{size}" height="{size}"'
        return (
            f'<g><title>{escape(xml_text(title, 10_000))}</title><rect {frame} fill="{background}"/>{"".join(stripes)}'
            f'<rect {frame} fill="none" stroke="{stroke}"{dashes}/></g>'
        )


def cache_picture(manager: PagedKvCacheManager, names: Mapping[SeqId, str] | None = None) -> CachePicture:
    """Take a consistent picture of the cache, also while other threads use it.

    names: names to show in place of sequence ids, by these ids.
    """
    names, block_size, num_tables = names or {}, manager.config.block_size, len(manager.config.tables)
    with manager._guard:  # so that the cache does not change between the calls
        stats, pressure, cached = manager.stats(), manager.pressure, set(manager.cached_blocks())
        tables: list[tuple[tuple[int, ...], int]] = []
        lines: list[SequenceLine] = []
        for index, handle in enumerate(manager.handles()):
            blocks = handle.blocks
            tables.append((blocks, handle.num_tokens))
            line = SequenceLine(
                letter=_LETTERS[index : index + 1] or "?",
                request_id=names.get(handle.cache_id, handle.cache_id),
                namespace=handle.namespace,
                num_tokens=handle.num_tokens,
                num_cached_tokens=handle.num_cached_tokens,
                num_blocks=len(blocks) - blocks.count(0),
                num_swapped=handle.stats().swapped_blocks,
            )
            lines.append(line)
    holders: dict[int, list[int]] = {}
    filled: dict[int, int] = {}
    is_next: set[int] = set()  # blocks that the next tokens of sequences go into
    for index, (blocks, num_tokens) in enumerate(tables):
        for entry, block in enumerate(blocks):
            if block == 0:  # swapped out or behind the sliding window
                continue
            logical = entry // num_tables
            holders.setdefault(block, []).append(index)
            tokens = min(max(num_tokens - logical * block_size, 0), block_size)
            filled[block] = max(filled.get(block, 0), tokens)
            if logical == num_tokens // block_size:
                is_next.add(block)
    cells = []
    for block in range(1, manager.config.num_blocks + 1):
        block_holders = tuple(holders.get(block, ()))
        kind: Kind = "free"
        if len(block_holders) > 1:
            kind = "copy" if block in is_next else "shared"
        elif block_holders:
            kind = "own"
        elif block in cached:
            kind = "cached"
        cells.append(BlockCell(block, kind, block_holders, filled.get(block, 0) / block_size))
    summary = (
        f"{stats.used_blocks} of {stats.num_blocks} blocks of {block_size} tokens in use, {stats.shared_blocks} of "
        f"them shared, {stats.cached_blocks} cached; {stats.cow_copies} copied on write, {stats.prefix_hit_tokens} "
        f"tokens found in the cache, {stats.evictions} evicted; {pressure.name} pressure"
    )
    return CachePicture(tuple(cells), tuple(lines), block_size, summary)


def _line(sequence: SequenceLine) -> str:
    notes = [f"{sequence.num_tokens} tokens", f"{sequence.num_blocks} blocks"]
    if sequence.num_cached_tokens:
        notes.append(f"{sequence.num_cached_tokens} tokens found in the cache")
    if sequence.num_swapped:
        notes.append(f"{sequence.num_swapped} blocks in host memory")
    if sequence.namespace is not None:
        notes.append(f"namespace {one_line(repr(sequence.namespace), _LONGEST_ID)}")
    return f"{sequence.letter}  {one_line(sequence.request_id, _LONGEST_ID)}: {', '.join(notes)}"


def _check_columns(columns: int) -> None:
    if columns < 1:
        raise InvalidInputError(f"columns: {columns}, expected at least 1")


def _colour(index: int) -> str:
    """Return a colour by index. Consecutive hues are a golden angle apart, so neighbours always differ."""
    return f"hsl({index * 137.5 % 360:.0f} 65% 60%)"
