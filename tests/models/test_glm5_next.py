"""GLM-5.3-Flash's text model, beyond the keys that its indexer chooses."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from paged import silu_and_mul
from paged.errors import UnsupportedError
from paged.models.layers.recurrent_config import KimiDeltaConfig
from paged.models.loading.hf_config import HfConfig
from paged.models.registry import load_model, model_config
from tests.models.edits import assert_refused, edit_config
from tests.models.families import PARTS, Case, assert_same_logits, save_checkpoint, tokens

POOL, BLOCK = 4, 8


@pytest.fixture(scope="module")
def pooled(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A model without recurrent layers, whose sequences may be cut and shared anywhere; one layer shares a choice."""
    config = copy.deepcopy(PARTS["glm5_next"])
    config.layer_types = ["indexed_attention"] * 2
    config.indexer_types = ["full", "shared"]
    folder = tmp_path_factory.mktemp("pooled")
    theirs = save_checkpoint(config, folder)
    return Case(theirs, load_model(folder, block_size=BLOCK, num_blocks=96, num_swap_blocks=32))


def test_cuts_at_every_position_of_a_pool(pooled: Case) -> None:
    """Chunks, forks, truncations and hits: a sequence goes on from each position with other tokens."""
    model, manager = pooled.ours, pooled.ours.kv_manager
    ids = tokens(40)
    for length in range(31, 31 + POOL + 1):
        others = ids[:length] + tokens(9, length)
        expected = pooled.expected(others)[length:]
        model.forward_verify("chunks", ids[:length])
        assert_same_logits(model.forward_verify("chunks", others[length:]), expected)
        model.forward_verify("cut", ids)
        fork = manager.fork(manager.get_handle("cut"), "fork")
        manager.truncate(fork, length)
        assert_same_logits(model.forward_verify("fork", others[length:]), expected)
        model.truncate_kv("cut", length)
        assert_same_logits(model.forward_verify("cut", others[length:]), expected)
        manager.check_integrity()
        model.reset()
    model.forward_verify("known", ids)
    handle = manager.get_handle("known")
    assert handle is not None
    manager.commit(handle, ids)
    for length, cached in ((32, 31), (37, 32), (40, 39)):
        others = ids[:length] + tokens(9, length)
        assert manager.allocate(length, token_ids=ids[:length]).num_cached_tokens == cached
        assert_same_logits(model.forward_verify(length, others[cached:]), pooled.expected(others)[cached:])
    model.reset()


@pytest.mark.thorough
def test_pools_by_the_kernels(pooled: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_BACKEND", "triton")
    ids = tokens(27)
    expected = pooled.expected(ids)
    assert_same_logits(pooled.ours.forward_verify("a", ids[:22]), expected[:22])
    assert_same_logits(pooled.ours.forward_verify("a", ids[22:]), expected[22:])
    pooled.ours.reset()


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
