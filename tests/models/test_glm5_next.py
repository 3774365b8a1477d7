"""GLM-5.3-Flash's text model up to the longest sequence whose keys its indexer would all choose."""

from pathlib import Path
from typing import Any

import pytest
import torch

from paged import silu_and_mul
from paged.errors import InvalidInputError, UnsupportedError
from paged.models.layers.recurrent_config import KimiDeltaConfig
from paged.models.loading.hf_config import HfConfig
from paged.models.registry import load_model, model_config
from tests.models.edits import assert_refused, edit_config
from tests.models.families import PARTS, assert_same_logits, logits_of, save_checkpoint, tokens


def test_the_longest_sequence(tmp_path: Path) -> None:
    theirs = save_checkpoint(PARTS["glm5_next"], tmp_path)
    model = load_model(tmp_path, block_size=8, num_blocks=32)
    assert model.config.max_seq_len == 64
    ids = tokens(64)
    assert_same_logits(model.forward_verify("a", ids), logits_of(theirs, ids))
    with pytest.raises(InvalidInputError, match="max_seq_len: 65, expected 1 to 64"):
        load_model(tmp_path, max_seq_len=65)


def test_another_limit_of_the_activation_is_refused(tmp_path: Path) -> None:
    config = PARTS["glm5_next"]
    config.swiglu_limit = 7.0
    save_checkpoint(config, tmp_path)
    assert_refused(tmp_path, "swiglu_limit = 7.0 is not supported, known are 10.0", UnsupportedError)
    edit_config(tmp_path, text_config=None)
    assert_refused(tmp_path, "Glm5NextForConditionalGeneration", UnsupportedError)


@pytest.mark.parametrize(
    ("section", "bound"),
    [
        ({"gate_lower_bound": -3.0}, -3.0),
        ({"gate_lower_bound": None}, -5.0),
        ({"gate_lower_bound": None, "safe_gate": False}, None),
        ({"head_dim": 16}, -4.0),
    ],
)
def test_bounds_of_the_decay_are_those_of_transformers(section: dict[str, Any], bound: float | None) -> None:
    """By either name of the key."""
    from transformers import Glm5NextTextConfig

    theirs = Glm5NextTextConfig(linear_lower_bound=-4.0, linear_attn_config=section)
    text = {"linear_lower_bound": -4.0, "linear_attn_config": section}
    values = {"architectures": ["Glm5NextForConditionalGeneration"], "text_config": text}
    layer = model_config(HfConfig(values, "config.json"))[1].recurrent[0]
    assert isinstance(layer, KimiDeltaConfig)
    assert layer.lower_bound == theirs.linear_lower_bound == bound


def test_both_halves_of_the_activation_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    x = torch.tensor([[12.0, 1.0, -20.0, -1.0, 30.0, -30.0]])
    gate, up = torch.tensor([10.0, 1.0, -20.0]), torch.tensor([-1.0, 10.0, -10.0])
    torch.testing.assert_close(silu_and_mul(x, activation="silu_10"), (gate * gate.sigmoid() * up)[None])
