"""How every decoder of transformers runs here: no wrong one, no crash; and the page that says so."""

from collections import Counter

import pytest

from tests.models.generic.every_decoder import decoders, multimodal_models
from tests.models.generic.table import PAGE, page, results, saved_results


@pytest.mark.thorough
@pytest.mark.long
def test_every_decoder_is_right_or_refused() -> None:
    """Each as a tiny checkpoint, in a process with a deadline; -s prints the table."""
    pytest.importorskip("transformers")  # children inherit it: importing takes seconds
    lines = [f"{name} {result}" for name, result in results(decoders()).items()]
    print("\n".join(lines))
    assert [line for line in lines if " wrong: " in line or " crash: " in line] == []
    counts = Counter(line.split(" ")[1].rstrip(":") for line in lines)
    assert counts["native"] + counts["generic"] >= 100
    _assert_saved("decoders", lines)


@pytest.mark.thorough
@pytest.mark.long
def test_every_multimodal_model_is_right_or_refused() -> None:
    """Likewise, for text."""
    pytest.importorskip("transformers")
    lines = [f"{name} {result}" for name, result in results(multimodal_models()).items()]
    print("\n".join(lines))
    assert [line for line in lines if " wrong: " in line or " crash: " in line] == []
    counts = Counter(line.split(" ")[1].rstrip(":") for line in lines)
    assert counts["native"] + counts["generic"] >= 75
    _assert_saved("multimodal", lines)


def _assert_saved(kind: str, lines: list[str]) -> None:
    saved = [f"{name} {result}" for name, result in saved_results(kind).items()]
    kinds = [[line.partition(":")[0] for line in table] for table in (lines, saved)]
    assert kinds[0] == kinds[1], "python -m tests.models.generic.table --run"


def test_the_page_is_of_the_results() -> None:
    assert PAGE.read_text() == page(), "python -m tests.models.generic.table"
