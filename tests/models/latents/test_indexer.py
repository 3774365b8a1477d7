"""Sparse attention in models: what the indexer chooses from, and what its keys take in the cache."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paged.errors import PagedError, UnsupportedError
from paged.kernels.cache.latent_cache import index_keys
from paged.models.cache_sizes import cache_config
from paged.models.layers.indexer import Indexer
from paged.models.loading.hf_config import HfConfig
from paged.models.registry import ARCHITECTURES, load_model, model_config
from paged.serving.command_line.checkpoint_summary import summarize
from tests.models.edits import assert_refused, edit_config
from tests.models.families import FAMILIES, assert_same_logits, forward, logits_of, save_checkpoint, tokens
from tests.models.published_settings.settings import published
from tests.tolerance import assert_within

PROMPT = tokens(40)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("deepseek_v32")
    return folder, save_checkpoint(FAMILIES["deepseek_v32"], folder)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor | None]:
    """What indexers return."""
    results: list[torch.Tensor | None] = []
    forward_pass = Indexer.forward

    def recorded(*arguments: Any) -> torch.Tensor | None:
        results.append(forward_pass(*arguments))
        return results[-1]

    monkeypatch.setattr(Indexer, "forward", recorded)
    return results


def test_an_indexer_that_chooses_all_equals_dense_attention(
    checkpoint: tuple[Path, Any], chosen: list[torch.Tensor | None]
) -> None:
    folder, theirs = checkpoint
    own = theirs.config.index_topk
    logits = []
    try:
        for top_k in (63, 64):  # a block holds 64 positions, of which a prompt of 40 sees all
            edit_config(folder, index_topk=top_k)
            model = load_model(folder, block_size=64, num_blocks=4)
            (last,) = forward(model, {"a": PROMPT})
            assert last is not None
            logits.append(last)
    finally:
        edit_config(folder, index_topk=own)
    assert [each is None for each in chosen] == [False, False, True, True]
    assert chosen[0] is not None
    assert chosen[0].shape == (40, 63)
    assert_same_logits(*logits)
    assert (logits[0] - logits_of(theirs, PROMPT)[-1]).abs().max() > 1e-2, "five keys give the same as all"


@pytest.mark.thorough
def test_steps_of_as_many_tokens_of_other_sequences(
    checkpoint: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of one step's keys is kept for the next, in Triton kernels."""
    folder, theirs = checkpoint
    monkeypatch.setenv("PAGED_BACKEND", "triton")
    model, begun = load_model(folder, block_size=4, num_blocks=16), {"a": 0, "b": 0}
    for step in ({"a": 4}, {"a": 2, "b": 2}, {"b": 4}):
        chunks = {name: PROMPT[begun[name] : begun[name] + count] for name, count in step.items()}
        for name, logits in zip(step, forward(model, chunks), strict=True):
            begun[name] += step[name]
            assert_same_logits(logits, logits_of(theirs, PROMPT[: begun[name]])[-1])


def test_cached_keys_are_rounded_in_16_bits(checkpoint: tuple[Path, Any], chosen: list[torch.Tensor | None]) -> None:
    """By 2^-4 of a number at most, beside bfloat16's own rounding; the keys chosen from them are nearly the same."""
    folder, theirs = checkpoint
    models = [load_model(folder, block_size=8, num_blocks=16, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    for model in models:
        forward(model, {"a": PROMPT[:23]})
        (logits,) = forward(model, {"a": PROMPT[23:]})
    assert logits is not None
    assert torch.nn.functional.cosine_similarity(logits, logits_of(theirs, PROMPT)[-1], dim=0) > 0.95
    indexers = [model.network.layers[0].self_attn.indexer for model in models]
    exact, rounded = (
        index_keys(one.key_cache, 32)[model.kv_manager.get_handle("a").blocks[one.table]]  # positions 0 to 7
        for one, model in zip(indexers, models, strict=True)
    )
    assert_within(rounded, exact, (2**-4 + 2**-6) * exact.abs().max(), is_exact=True)
    assert not torch.equal(exact, rounded)
    shared = [len({*one} & {*other}) for one, other in zip(*(chosen[at][-8:].tolist() for at in (0, 4)), strict=True)]
    assert sum(shared) > 0.8 * 8 * 5


@pytest.mark.parametrize(
    ("name", "dtype", "bytes_a_token"),
    [
        ("deepseek-ai/DeepSeek-V3", torch.bfloat16, 70_272),  # 61 layers of 576
        # 8 block tables of 9 slots: 7 hold 61 layers of latents, one the 61 layers of keys, 8 layers in a slot.
        ("deepseek-ai/DeepSeek-V3.2-Exp", torch.bfloat16, 8 * 9 * 576 * 2),
        # Of keys beside latents of one byte, 4 layers are in a slot.
        ("deepseek-ai/DeepSeek-V3.2-Exp", torch.float8_e4m3fn, 5 * 16 * 576),
        ("deepseek-ai/DeepSeek-V3", torch.float4_e2m1fn_x2, 61 * 352),
        # Of keys of 132 bytes beside records of 352, 2 layers are in a slot: 3 block tables of 31.
        ("deepseek-ai/DeepSeek-V3.2-Exp", torch.float4_e2m1fn_x2, 3 * 31 * 352),
        # 14 block tables of 6 slots: 13 hold 78 layers of latents, one the 21 layers of keys.
        ("zai-org/GLM-5.2", torch.bfloat16, 14 * 6 * 576 * 2),
    ],
)
def test_bytes_a_token_by_inspect(name: str, dtype: torch.dtype, bytes_a_token: int, tmp_path: Path) -> None:
    architecture, _, values = published(name)
    own = {"architectures": [architecture], "model_type": ARCHITECTURES[architecture].model_type}
    config = values | own | {"torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    summary = summarize(tmp_path, kv_cache_dtype=dtype)
    assert summary["reason"] is None
    assert summary["kv_bytes_per_token"] == bytes_a_token


def test_latents_in_8_bits_beside_an_indexer(checkpoint: tuple[Path, Any]) -> None:
    """With keys in 8 bits too: half of a prompt's keys are chosen nearly alike."""
    folder, theirs = checkpoint
    indexers = [layer.self_attn.indexer for layer in theirs.model.layers]
    few = theirs.config.index_topk
    try:
        edit_config(folder, index_topk=20)
        for indexer in indexers:
            indexer.index_topk = 20
        model = load_model(folder, block_size=8, num_blocks=64, kv_cache_dtype="float8_e4m3fn")
        expected = logits_of(theirs, PROMPT)
    finally:
        edit_config(folder, index_topk=few)
        for indexer in indexers:
            indexer.index_topk = few
    assert model.kv_manager.k_cache(0).dtype == torch.float8_e4m3fn
    likeness = torch.nn.functional.cosine_similarity(model.forward_verify("a", PROMPT), expected)
    assert 0.98 < likeness.mean() < 1 - 1e-5


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_keys_whose_scales_would_not_be_aligned_are_refused(dtype: str, tmp_path: Path) -> None:
    """By loading and by inspect; in float32 keys have no scales."""
    config = FAMILIES["deepseek_v32"]
    config.index_head_dim = 30
    theirs = save_checkpoint(config, tmp_path)
    message = f"index_head_dim 30 with a KV cache of torch.{dtype}, supported are multiples of 4"
    options = {"block_size": 8, "num_blocks": 16}
    narrow = {"kv_cache_dtype": dtype, "dtype": torch.bfloat16}
    assert_refused(tmp_path, message, UnsupportedError, **options, **narrow)
    assert summarize(tmp_path, dtype=torch.bfloat16, kv_cache_dtype=getattr(torch, dtype))["reason"] == message
    assert summarize(tmp_path)["supported"]
    assert_same_logits(load_model(tmp_path, **options).prefill("a", PROMPT), logits_of(theirs, PROMPT)[-1])


GLM_DSA = {"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "num_hidden_layers": 8}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"index_topk_freq": 4},
        {"index_topk_freq": 3, "index_skip_topk_offset": 3},
        {"index_topk_freq": 2, "index_skip_topk_offset": 1},
        {"index_topk_pattern": "FSSFSSSF", "index_topk_freq": 1},
        {"index_topk_pattern": ["full", "shared"] * 4},
        {"indexer_types": ["full"] * 7 + ["shared"], "index_topk_pattern": "FSSFSSSF"},
    ],
)
def test_layers_have_the_indexers_that_transformers_gives_them(change: dict[str, Any]) -> None:
    """One group of the cache holds the keys of these layers' indexers alone."""
    from transformers import GlmMoeDsaConfig

    _, config = model_config(HfConfig(GLM_DSA | change, ""))
    types = GlmMoeDsaConfig(num_hidden_layers=8, **change).indexer_types
    latents = [layer.latent for layer in config.attention]
    assert ["full" if latent and latent.index else "shared" for latent in latents] == types
    with_indexer = [8 + index for index, kind in enumerate(types) if kind == "full"]
    assert [list(group.layers) for group in cache_config(config).groups] == [list(range(8)), with_indexer]


@pytest.mark.parametrize(
    "change",
    [
        {"indexer_types": ["shared", *["full"] * 7]},
        {"indexer_types": ["full"] * 7},
        {"index_topk_pattern": "FFFFFFFX"},
        {"layer_types": [*["indexed_attention"] * 7, "full_attention"]},
    ],
)
def test_layers_without_a_choice_of_keys_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(PagedError, match=r"indexer types|layer type"):
        model_config(HfConfig(GLM_DSA | change, ""))
