"""What the weight loader takes, and what it refuses by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paged.models.registry import load_model
from tests.models.edits import WEIGHTS, Tensors, assert_refused, edit_tensors
from tests.models.families import FAMILIES, assert_same_logits, logits_of, save_checkpoint, tokens

NORM = "model.norm.weight"


@pytest.fixture
def sharded(folder: Path) -> Path:
    """The checkpoint in two shards: the final norm, and everything else."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    write_index(folder, {name: "norm.safetensors" if name == NORM else "rest.safetensors" for name in tensors})
    save_file({NORM: tensors.pop(NORM)}, folder / "norm.safetensors")
    save_file(tensors, folder / "rest.safetensors")
    return folder


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def move_norm(folder: Path, entry: Any) -> None:
    """Make the index name another file for the final norm."""
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    write_index(folder, weight_map | {NORM: entry})


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "llama_tied", "qwen2", "qwen3_moe"])
def test_shards_written_by_transformers(family: str, tmp_path: Path) -> None:
    theirs = save_checkpoint(FAMILIES[family], tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert_same_logits(load_model(tmp_path).prefill("a", tokens(9)), logits_of(theirs, tokens(9))[-1])


def test_buffers_of_old_files_and_repeated_tied_heads_are_no_surprise(folder: Path, tmp_path: Path) -> None:
    edit_tensors(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}))
    load_model(folder)
    save_checkpoint(FAMILIES["llama_tied"], tmp_path / "tied")
    edit_tensors(tmp_path / "tied", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
    load_model(tmp_path / "tied")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NORM), rf"{NORM}: missing in .*copy \(1 of 21 tensors"),
        (lambda t: t.update({"model.extra.weight": t[NORM]}), "model.extra.weight: unexpected tensor in .*model.safe"),
        (lambda t: t.update({NORM: t[NORM][:32]}), rf"{NORM}: shape \[32\] in .*model.safe.*, expected \[64\]"),
        (lambda t: t.update({NORM: t[NORM].int()}), rf"{NORM}: dtype I32 in .*model.safetensors, expected F64"),
    ],
)
def test_wrong_tensors(folder: Path, change: Callable[[Tensors], object], message: str) -> None:
    load_model(folder)
    edit_tensors(folder, change)
    assert_refused(folder, message)


def test_truncated_file(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    for keep in (-4, 300, 5, 0):
        (folder / WEIGHTS).write_bytes(content[:keep])
        assert_refused(folder, r"model.safetensors: missing, unreadable or truncated")


def test_pickled_weights_are_never_opened(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"not even a pickle")
    load_model(folder)
    (folder / WEIGHTS).unlink()
    assert_refused(folder, r"only pytorch_model.bin, and pickled weights are never loaded")
    (folder / "pytorch_model.bin").unlink()
    assert_refused(folder, "there is neither")


def test_index_may_name_files_inside(sharded: Path, tmp_path: Path) -> None:
    load_model(sharded)
    # The Hub's cache: plain names that are symlinks to blobs elsewhere.
    shutil.move(sharded / "norm.safetensors", tmp_path / "blob")
    (sharded / "norm.safetensors").symlink_to(tmp_path / "blob")
    load_model(sharded)
    (sharded / "deeper").mkdir()
    shutil.copy(tmp_path / "blob", sharded / "deeper" / "norm.safetensors")
    move_norm(sharded, "deeper/norm.safetensors")
    load_model(sharded)


def test_index_may_not_name_files_outside(sharded: Path, tmp_path: Path) -> None:
    outside = tmp_path / "norm.safetensors"
    shutil.move(sharded / "norm.safetensors", outside)
    (sharded / "link").symlink_to(tmp_path)
    for entry in ("../norm.safetensors", "link/norm.safetensors", "rest/../../norm.safetensors"):
        move_norm(sharded, entry)
        assert_refused(sharded, rf"{NORM}: '{entry}' in .*index.json lies outside")
    for entry in (str(outside), "norm\0.safetensors", ["norm.safetensors"]):
        move_norm(sharded, entry)
        assert_refused(sharded, f"{NORM}: .* is not a relative file name")


def test_index_that_does_not_match_its_files(sharded: Path) -> None:
    move_norm(sharded, "rest.safetensors")
    assert_refused(sharded, rf"{NORM}: not in .*rest.safetensors, which the index names")
    move_norm(sharded, "gone.safetensors")
    assert_refused(sharded, r"gone.safetensors: missing")


def test_tensor_in_two_shards(sharded: Path) -> None:
    rest = load_file(sharded / "rest.safetensors")
    save_file(rest | load_file(sharded / "norm.safetensors"), sharded / "rest.safetensors")
    assert_refused(sharded, rf"{NORM}: stored twice, again in")


def test_malformed_index(sharded: Path) -> None:
    for text in ("{", "[]", "{}", '{"weight_map": ["model.norm.weight"]}'):
        (sharded / "model.safetensors.index.json").write_text(text)
        assert_refused(sharded, r"index.json: (unreadable|holds a list|no weight_map object)")
