"""Qwen4-Exp's text model, beyond what all families are tested for."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from paged.errors import CheckpointError, UnsupportedError
from paged.models.registry import load_model
from paged.serving.command_line.checkpoint_summary import summarize
from tests.models.edits import Tensors, assert_refused, edit_config, edit_tensors
from tests.models.families import FAMILIES, Case, assert_same_logits, save_checkpoint, tokens

pytestmark = pytest.mark.usefixtures("bound_calls_are_alike")

POOL, BLOCK = 4, 8
_TABLES = "model.layers.0.ple.ple_embedding"


@pytest.mark.thorough
def test_cuts_at_every_position_of_a_pool(tmp_path: Path) -> None:
    """Chunks, forks and truncations, without recurrent layers: a sequence goes on from each position."""
    config = copy.deepcopy(FAMILIES["qwen4_exp"])
    config.layer_types, config.ple_layer_ids = ["indexed_attention"] * 2, []
    case = Case(save_checkpoint(config, tmp_path), load_model(tmp_path, block_size=BLOCK, num_blocks=96))
    model, manager = case.ours, case.ours.kv_manager
    ids = tokens(36)
    for length in range(27, 27 + POOL):
        others = ids[:length] + tokens(9, length)
        expected = case.expected(others)[length:]
        model.forward_verify("chunks", ids[:length])
        assert_same_logits(model.forward_verify("chunks", others[length:]), expected)
        model.forward_verify("cut", ids)
        handle = manager.get_handle("cut")
        assert handle is not None
        manager.truncate(manager.fork(handle, "fork"), length)
        assert_same_logits(model.forward_verify("fork", others[length:]), expected)
        manager.check_integrity()
        model.reset()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"eos_token_id": None}, CheckpointError, "eos_token_id None, expected an id"),
        ({"ple_layer_ids": [2]}, UnsupportedError, "ple_layer_ids has 2, expected a linear_attention layer"),
        ({"ple_embedding_dtype": "nvfp4"}, UnsupportedError, "ple_embedding_dtype = 'nvfp4' is not supported"),
        ({"indexer_kv_heads": 2}, UnsupportedError, "indexer_kv_heads = 2 is not supported"),
        ({"indexer_head_dim": 8}, CheckpointError, "indexer_head_dim 8 is less than the rotated part"),
        ({"seed": 99}, CheckpointError, "layer_multipliers: .* by config.json"),
    ],
)
def test_refused(changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path) -> None:
    save_checkpoint(FAMILIES["qwen4_exp"], tmp_path)
    edit_config(tmp_path, **changes)
    assert_refused(tmp_path, message, error)


def test_what_published_files_have_beside_the_weights(tmp_path: Path) -> None:
    """Statistics are skipped; numbers of the hash may be absent; the tables stay apart in the summary."""
    expected = save_checkpoint(FAMILIES["qwen4_exp"], tmp_path)

    def edit(stored: Tensors) -> None:
        stored[f"{_TABLES}.hashstats_counts"] = torch.zeros(3)
        stored["model.hyper_connection_mixer.block_inject_weight.weight"] = torch.zeros(3, 192)
        del stored[f"{_TABLES}.ngram_heads_offsets"]

    edit_tensors(tmp_path, edit)
    ids = tokens(9)
    case = Case(expected, load_model(tmp_path, num_blocks=16))
    assert_same_logits(case.ours.forward_verify("a", ids), case.expected(ids))
    num_rows = 53 + 59 + 61 + 67  # the primes from 50 on, here a multiple of 8
    assert summarize(tmp_path)["host_bytes"] == num_rows * 8 * 4
