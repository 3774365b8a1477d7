"""MiniMax-M3: what its indexer chooses, what its keys take in the cache, and settings that are refused."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from paged.errors import InvalidInputError, PagedError
from paged.models.layers.indexer import BlockIndexer
from paged.models.loading.hf_config import HfConfig
from paged.models.loading.weights import read_headers
from paged.models.registry import load_model, model_config
from paged.serving.command_line.checkpoint_summary import summarize
from tests.models.edits import edit_config
from tests.models.families import (
    FAMILIES,
    assert_logits_of,
    assert_same_logits,
    forward,
    logits_of,
    save_checkpoint,
    tokens,
    with_pictures,
)
from tests.models.published_settings.settings import published

PROMPT = tokens(40)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor | None]:
    """What indexers return."""
    results: list[torch.Tensor | None] = []
    forward_pass = BlockIndexer.forward

    def recorded(*arguments: Any) -> torch.Tensor | None:
        results.append(forward_pass(*arguments))
        return results[-1]

    monkeypatch.setattr(BlockIndexer, "forward", recorded)
    return results


def test_steps_with_few_blocks_are_dense(tmp_path: Path, chosen: list[torch.Tensor | None]) -> None:
    """A cache block holds 64 positions, which are 8 chosen blocks, of which a prompt of 40 sees five."""
    theirs = save_checkpoint(FAMILIES["minimax_m3"], tmp_path)
    logits = []
    for top_k in (7, 8):
        edit_config(tmp_path, index_topk_blocks=top_k)
        model = load_model(tmp_path, block_size=64, num_blocks=4)
        (last,) = forward(model, {"a": PROMPT})
        assert last is not None
        logits.append(last)
    first, second = chosen
    assert second is None
    assert first is not None
    assert first.shape == (1, 2, 7)  # of the row with logits
    assert_same_logits(*logits)
    assert (logits[0] - logits_of(theirs, PROMPT)[-1]).abs().max() > 1e-2, "two blocks give the same as all"


@pytest.mark.parametrize(
    ("dtype", "likeness"), [(None, 0.99), pytest.param("float8_e4m3fn", 0.95, marks=pytest.mark.thorough)]
)
def test_keys_in_16_and_8_bits(dtype: str | None, likeness: float, tmp_path: Path) -> None:
    """Keys of a cache in 16 bits are plain, in 8 bits they have scales; transformers' module has 0.992 in bfloat16."""
    theirs = save_checkpoint(FAMILIES["minimax_m3"], tmp_path)
    model = load_model(tmp_path, block_size=8, num_blocks=32, dtype=torch.bfloat16, kv_cache_dtype=dtype)
    logits = model.forward_verify("a", PROMPT)
    assert torch.nn.functional.cosine_similarity(logits, logits_of(theirs, PROMPT)).mean() > likeness
    with pytest.raises(InvalidInputError, match=r"kv_cache_dtype: torch.int8, expected .* beside an indexer"):
        load_model(tmp_path, block_size=8, num_blocks=32, kv_cache_dtype="int8")
    keys = model.network.layers[1].self_attn.indexer.key_cache
    if dtype is None:
        assert (keys.dtype, keys.shape[2]) == (torch.bfloat16, 24)
    else:
        assert (keys.dtype, keys.shape[2]) == (torch.uint8, 24 + 4)


def _published() -> dict[str, Any]:
    architecture = "MiniMaxM3VLForCausalLM"
    values = deepcopy(published("MiniMaxAI/MiniMax-M3")[2])
    return {**values, "architectures": [architecture], "model_type": "minimax_m3_vl_text"}


def test_published_names_of_tensors(tmp_path: Path) -> None:
    """transformers writes them for the model that reads pictures."""
    theirs = save_checkpoint(with_pictures("minimax_m3_vl", FAMILIES["minimax_m3"].to_dict()), tmp_path)
    names = read_headers(tmp_path)
    for name in ("self_attn.index_k_norm", "block_sparse_moe.experts.0.w3", "block_sparse_moe.shared_experts.up_proj"):
        assert f"language_model.model.layers.1.{name}.weight" in names
    model = load_model(tmp_path, block_size=8, num_blocks=32)
    assert_logits_of(model.forward_verify("a", PROMPT), theirs, PROMPT)


@pytest.mark.parametrize(
    ("dtype", "bytes_a_token"),
    [
        # 6 block tables of 10 layers of K/V, one of 57 layers of keys, 4 layers in the place of a layer's K.
        (torch.bfloat16, 7 * 20 * 4 * 128 * 2),
        (torch.float8_e4m3fn, 7 * 20 * 4 * 128),
    ],
)
def test_bytes_a_token_by_inspect(dtype: torch.dtype, bytes_a_token: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_published() | {"torch_dtype": "bfloat16"}))
    summary = summarize(tmp_path, kv_cache_dtype=dtype)
    assert summary["reason"] is None
    assert summary["kv_bytes_per_token"] == bytes_a_token


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"swiglu_limit": 10.0}, "swiglu_limit = 10.0 is not supported"),
        ({"n_shared_experts": 2}, "n_shared_experts = 2 is not supported"),
        ({"moe_layer_freq": [1] * 59}, "expected sparse or dense for each of 60 layers"),
        ({"moe_layer_freq": [2] * 60}, "expected sparse or dense for each of 60 layers"),
        ({"layer_types": ["full_attention"] * 60}, "sparse_attention_freq = .* but layer types say"),
        ({"num_key_value_heads": 8}, "index_n_heads 4, expected 8 KV heads"),
        ({"partial_rotary_factor": 1.0, "head_dim": 256}, "index_head_dim 128 is less than the rotated part"),
        ({"sparse_score_type": "mean"}, "sparse_score_type = 'mean' is not supported"),
        ({"sparse_topk_blocks": 0}, "sparse_topk_blocks = 0, expected a positive integer"),
        ({"sparse_local_block": 17}, "index_local_blocks 17 of 16 blocks"),
        ({"sparse_block_size": 512}, "blocks of 512 by heads of 128, supported are up to 256"),
        ({"sparse_disable_index_value": [0] * 60}, "sparse_disable_index_value"),
        ({"sparse_window": 4}, "'sparse_window' is unknown"),
    ],
)
def test_other_settings_are_refused(change: dict[str, Any], message: str) -> None:
    """Keys that begin with `sparse_` are of the section."""
    values = _published()
    assert model_config(HfConfig(values, ""))[1].attention[3].block_index is not None
    ((key, value),) = list(change.items())[:1]
    if key.startswith("sparse_"):
        values["sparse_attention_config"][key] = value
    else:
        values |= change
    with pytest.raises(PagedError, match=message):
        model_config(HfConfig(values, ""))
