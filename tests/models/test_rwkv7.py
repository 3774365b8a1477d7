"""RWKV-7 in other layouts and over ranks, and options that are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from paged.errors import CheckpointError, PagedError, UnsupportedError
from paged.models.cache_sizes import cache_config
from paged.models.registry import load_model, read_model_config
from tests.models.edits import Tensors, assert_refused, edit_config, edit_tensors
from tests.models.families import FAMILIES, Families, assert_same_logits, logits_of, save_checkpoint, tokens

PROMPT = tokens(20)


def test_weights_of_shifts_in_one_tensor(tmp_path: Path) -> None:
    """As files of the first layout have them."""
    theirs = save_checkpoint(FAMILIES["rwkv7"], tmp_path)

    def stack(stored: Tensors) -> None:
        for layer in range(3):
            prefix = f"model.layers.{layer}.attn.x_"
            stored[f"{prefix}x"] = torch.cat([stored.pop(f"{prefix}{name}")[0] for name in "rwkvag"])

    edit_tensors(tmp_path, stack)
    assert_same_logits(load_model(tmp_path, num_blocks=32).forward_verify("a", PROMPT), logits_of(theirs, PROMPT))


def test_other_options(tmp_path: Path) -> None:
    """Values wider than keys, other norms, a tied head, and the size of MLPs by their ratio."""
    words = """Rwkv7 head_dim=32 value_dim=128 norm_first=False norm_bias=False fuse_norm=False tied
        intermediate_size=None hidden_ratio=1.7 pad_token_id=0"""
    theirs = save_checkpoint(Families(model=words)["model"], tmp_path)
    assert_same_logits(load_model(tmp_path, num_blocks=32).forward_verify("a", PROMPT), logits_of(theirs, PROMPT))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"attn": {"layers": [1]}}, UnsupportedError, "attn = .*, expected null: no layers attend"),
        ({"value_dim": [64, 64, 128]}, UnsupportedError, "value_dim = .*, expected the same size in all layers"),
        ({"value_dim": 96}, CheckpointError, "value_dim = 96, expected multiples of hidden_size 64 for 3 layers"),
        ({"head_dim": 48}, CheckpointError, "hidden_size 64 is not a multiple of head_dim 48"),
        ({"head_dim": None}, CheckpointError, "neither head_dim nor num_heads, expected one"),
        ({"hidden_act": "relu"}, UnsupportedError, "hidden_act = 'relu' is not supported, known are sqrelu"),
    ],
)
def test_options_that_are_refused(
    changed: dict[str, Any], error: type[PagedError], message: str, tmp_path: Path
) -> None:
    save_checkpoint(FAMILIES["rwkv7"], tmp_path)
    edit_config(tmp_path, **changed)
    assert_refused(tmp_path, message, error)


def test_sizes_of_states(tmp_path: Path) -> None:
    """Both shifts of a layer keep a row, and time mixing a state."""
    save_checkpoint(FAMILIES["rwkv7"], tmp_path)
    states = cache_config(read_model_config(tmp_path)[1]).recurrent
    assert states is not None
    assert (states.layers, states.conv_layers) == ((0, 1, 2), (3, 4, 5))
    assert states.state_bytes == 3 * 4 * 16 * 16 * 4
    assert states.conv_bytes(torch.bfloat16) == 6 * 64 * 2
    assert (
        states.slot_bytes(torch.bfloat16)
        == load_model(tmp_path, dtype=torch.bfloat16).kv_manager.stats().bytes_per_state
    )
