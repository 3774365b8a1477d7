"""Figures as SVG that take their colours from the page, so that they follow its theme."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from paged.bench.report.style import COLOURS

STYLE: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": COLOURS["muted"][0],
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": COLOURS["muted"][0],
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "font.size": 9,
    "grid.color": COLOURS["grid"][0],
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "svg.fonttype": "none",
    "text.parse_math": False,  # a dollar sign in a name is one
    "text.color": COLOURS["ink"][0],
    "xtick.color": COLOURS["muted"][0],
    "ytick.color": COLOURS["muted"][0],
}
_TIP = "\N{BROKEN BAR}"
_UNUSED = ("metadata", "style")


def tips(*texts: str) -> str:
    """A `gid` for an artist whose marks show one text each when pointed at."""
    return _TIP + _TIP.join(texts)


def log_axis(axis: Axis, steps: Sequence[float] = (1.0,)) -> None:
    """Logarithmic, with plain numbers at `steps` of every decade and no ticks between them."""
    setter = axis.axes.set_xscale if axis is axis.axes.xaxis else axis.axes.set_yscale
    setter("log")
    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axis.set_minor_locator(NullLocator())


def inline_svg(figure: Figure, name: str, title: str) -> str:
    """The figure for a page that has the colours as CSS variables; `name` makes its ids the only ones in the page."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    root = ElementTree.fromstring(buffer.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.rpartition("}")[2] in _UNUSED:
                parent.remove(child)
    for element in list(root.iter()):
        element.tag = element.tag.rpartition("}")[2]
        element.attrib = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
        if element.get("id", "").startswith(_TIP):
            _show(element, element.attrib.pop("id").split(_TIP)[1:])
    width = float(root.get("viewBox", "0 0 0 0").split()[2])
    # A point of the figure is 4 / 3 px where there is room and never less than 1, where the text would be too small.
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": title}
    root.set("style", f"min-width: {width:.0f}px; max-width: {width * 4 / 3:.0f}px")
    text = ElementTree.tostring(root, encoding="unicode")
    text = re.sub(r">\s+<", "><", text)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text)
    for role, (light, _) in COLOURS.items():
        text = text.replace(light, f"var(--{role})")
    return text


def _show(group: ElementTree.Element, texts: list[str]) -> None:
    """Put a title into every mark of a group, or into the group itself where it is one mark."""
    marks = [element for element in group.iter() if element.tag.rpartition("}")[2] == "use"]
    for mark, text in zip(marks if len(marks) == len(texts) else [group], texts, strict=False):
        title = ElementTree.Element("title")
        title.text = text
        mark.insert(0, title)
