"""A cache's picture takes any text and any number: text and SVG that parse, or a named error."""

import math
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import strategies as st

from paged import CachePicture, InvalidInputError
from paged.tools.picture import BlockCell, SequenceLine
from tests.fuzz.fuzzing import fuzz
from tests.fuzz.values import STEERING

TEXTS = st.text(max_size=12) | st.sampled_from([
    *("<script>alert(1)</script>", '"><img src=x>', "]]>", "&amp;", "$\\frac$", "\x00\x1b[2J", "\u202e", "�", "\ufffe"),
    *("url(#a)", 'id="a"', "¦", "a" * 5000, "{{ 7 }}", "--", "\r\n\t", "../../x", "%s", "wrong: x", "failed"),
])  # fmt: skip
NUMBERS = st.one_of(
    *(st.floats(), st.integers()),
    st.sampled_from([0, -1, 10**400, 1e308, 1e-308, 5e-324, 1e30, 1e-30, math.nan, math.inf]),
)
PICTURES = st.fixed_dictionaries({
    "ids": st.lists(TEXTS | st.integers(), max_size=3), "fills": st.lists(NUMBERS, max_size=5), "summary": TEXTS,
    "namespace": TEXTS, "columns": st.integers(-1, 40),
})  # fmt: skip


@fuzz(PICTURES, examples=60)
def test_picture(case: Any) -> None:
    lines = tuple(SequenceLine("a", one, case["namespace"], 1, 0, 1, 0) for one in case["ids"])
    holders = tuple(range(len(lines)))
    cells = tuple(BlockCell(1 + index, "own", holders, fill) for index, fill in enumerate(case["fills"]))
    picture = CachePicture(cells, lines, 16, case["summary"])
    if case["columns"] < 1:
        with pytest.raises(InvalidInputError, match="columns"):
            picture.svg(case["columns"])
        return
    drawn = picture.svg(case["columns"])
    root = ElementTree.fromstring(drawn)
    numbers = [value for element in root.iter() for name, value in element.attrib.items() if name in ("y", "height")]
    assert all(math.isfinite(float(number)) for number in numbers)
    assert len(drawn) < 10_000 + 4000 * (len(cells) + 1)
    assert not STEERING.search(picture.text(case["columns"]))
