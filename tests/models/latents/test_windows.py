"""Latents of dots3-note's layers with a window, in sequences that are many windows long."""

from pathlib import Path

import pytest

from paged.models.layers import expanded_latents
from paged.models.registry import load_model
from tests.models.families import FAMILIES, Case, assert_same_logits, save_checkpoint, tokens

BLOCK = 8
CHUNKS = ((0, 97), (97, 100), (100, 128))


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder: Path = tmp_path_factory.mktemp("dots3_note")
    theirs = save_checkpoint(FAMILIES["dots3_note"], folder)
    return Case(theirs, load_model(folder, block_size=BLOCK, num_blocks=64))


@pytest.mark.parametrize("expands", [False, True])
def test_chunks_behind_freed_blocks(case: Case, expands: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another sequence writes to the blocks that the window has left; a prefix hit brings the window alone."""
    monkeypatch.setattr(expanded_latents, "expands", lambda *_: expands)
    model, manager, ids = case.ours, case.ours.kv_manager, tokens(128)
    expected = case.expected(ids)
    for start, end in CHUNKS:
        assert_same_logits(model.forward_verify("a", ids[start:end]), expected[start:end])
        model.forward_verify("b", tokens(40, start))
        model.release("b")
    handle = manager.get_handle("a")
    assert handle is not None
    manager.commit(handle, ids)
    others = ids[:120] + tokens(8, 1)
    assert manager.allocate("c", token_ids=others[:121]).num_cached_tokens == 120
    assert_same_logits(model.forward_verify("c", others[120:]), case.expected(others)[120:])
    model.reset()
    manager.clear_prefix_cache()
