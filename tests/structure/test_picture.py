"""The picture of the folders is that of the sources, and can be read: no box on another, no text beyond its box."""

from itertools import combinations
from xml.etree import ElementTree

import pytest

from tests.structure import step
from tests.structure.imports import folder_files, folder_imports, reduced
from tests.structure.picture import HOLDS, PATH, picture

SVG = "{http://www.w3.org/2000/svg}"
# Of a letter in Helvetica, in the mean over English text 0.5 of the size; bold letters are a tenth wider.
LETTER = 0.52


def test_it_is_of_the_sources_as_they_are() -> None:
    assert PATH.read_text() == picture(), "make picture"


@pytest.mark.thorough  # loads a checkpoint
def test_step_is_as_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    assert step.PATH.read_text() == step.draw(), "make picture"


def test_every_folder_is_described_once() -> None:
    assert HOLDS.keys() == folder_files().keys()


def test_boxes_stand_apart_and_hold_their_texts() -> None:
    boxes = []
    for group in ElementTree.fromstring(picture()).findall(f"{SVG}g"):
        rectangle, *texts = group
        x, y, width, height = (float(rectangle.attrib[name]) for name in ("x", "y", "width", "height"))
        boxes.append((x, y, x + width, y + height))
        name, count, line = (len(text.text or "") * float(text.attrib["font-size"]) * LETTER for text in texts)
        assert 1.1 * name + count + 24 < width, texts[0].text
        assert line + 16 < width, texts[2].text
    assert len(boxes) == len(HOLDS)
    for one, other in combinations(boxes, 2):
        assert one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]


def test_reduction_leaves_out_what_others_imply() -> None:
    assert reduced({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == {"a": {"b"}, "b": {"c"}, "c": set()}
    left = reduced(folder_imports())
    assert "executors/speculation" in left["executors/engine"]
    assert "executors/requests" not in left["executors/engine"]
