"""How every decoder of transformers runs here: no wrong one, no crash; and the page that says so."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from paged.models.registry import load_model
from tests.models.families import assert_same_logits, logits_of
from tests.models.generic.every_decoder import PROMPT, decoders, multimodal_models, save
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


@pytest.mark.parametrize("name", ["Gemma4", "Gemma4Unified", "GraniteSpeech"])
def test_placeholders_without_pictures_are_padding(name: str, tmp_path: Path) -> None:
    """In prompts and in decode steps, recorded or not: the model embeds another token."""
    transformers = pytest.importorskip("transformers")
    theirs = save(getattr(transformers, f"{name}ForConditionalGeneration"), tmp_path)
    model = load_model(tmp_path, num_blocks=64)
    expected = logits_of(theirs, [*PROMPT, *PROMPT[:7]])
    for _ in range(2):
        model.prefill("a", PROMPT)
        decoded = [model.decode("a", PROMPT[index], 20 + index) for index in range(7)]
        assert_same_logits(torch.stack(decoded), expected[20:])
        model.reset()
        model.prepare()
