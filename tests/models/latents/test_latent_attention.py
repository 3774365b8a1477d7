"""Latent attention in models: absorbed and expanded, on both sides of where one takes fewer operations."""

from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from paged.errors import InvalidInputError
from paged.models.cache_sizes import cache_config
from paged.models.drafts.later_attention import LaterLatentAttention
from paged.models.layers import expanded_latents, latent_attention
from paged.models.layers.attention_config import LatentConfig
from paged.models.layers.expanded_latents import expands
from paged.models.loading.hf_config import HfConfig
from paged.models.loading.load_options import KV_CACHE_DTYPES
from paged.models.registry import load_model, model_config
from paged.serving.command_line.checkpoint_summary import summarize
from tests.models.drafts.heads import save_published
from tests.models.drafts.test_draft_heads import drafts_after
from tests.models.families import FAMILIES, RECORDS, Case, assert_same_logits, forward, save_checkpoint, tokens
from tests.models.test_deepseek_v4 import check_records, nvfp4_error, swapped_codes
from tests.tolerance import assert_within

DEEPSEEK = LatentConfig(rank=512, q_rank=1536, nope_dim=128, rope_dim=64, v_head_dim=128)
# Of config.json of deepseek-ai/DeepSeek-V3 (2024).
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "attention_bias": False,
    "aux_loss_alpha": 0.001, "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3,
    "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    },
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": True,
    "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
    "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip


@pytest.fixture(scope="module", params=["deepseek_v3", pytest.param("deepseek_v2", marks=pytest.mark.thorough)])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    theirs = save_checkpoint(FAMILIES[request.param], folder)
    return Case(theirs, load_model(folder, block_size=8, num_blocks=64))


@pytest.mark.parametrize("chosen", ["none", "all", "long", "short"])
def test_absorbed_and_expanded_give_the_same_logits(case: Case, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, decodes and a prompt in a batch; contexts cut into pieces of one block each, across sequences."""
    rules = {"none": lambda q: False, "all": lambda q: True, "long": lambda q: q > 9, "short": lambda q: q <= 9}
    sizes: list[tuple[int, int]] = []

    def rule(q_len: int, seq_len: int, *_: object) -> bool:
        sizes.append((q_len, seq_len))
        return rules[chosen](q_len)

    monkeypatch.setattr(expanded_latents, "expands", rule)
    monkeypatch.setattr(expanded_latents, "PIECE_BYTES", 1)
    case.ours.reset()
    first, second = tokens(40), tokens(33)[::-1]
    for batch in (
        {"a": (0, 13)}, {"a": (13, 22), "b": (0, 17)}, {"b": (17, 18), "a": (22, 37)}, {"a": (37, 40), "b": (18, 33)}
    ):  # fmt: skip
        texts = {"a": first, "b": second}
        found = forward(case.ours, {name: texts[name][slice(*span)] for name, span in batch.items()})
        for (name, (_, end)), logits in zip(batch.items(), found, strict=True):
            assert_same_logits(logits, case.expected(texts[name][:end])[-1])
    assert (15, 37) in sizes
    assert (15, 33) in sizes


def test_what_expands_takes_fewer_operations() -> None:
    """By counting: 2,176 operations a pair and 262,144 a query against 640 and 262,144 a token that a query sees."""
    lengths = (2, 2), (170, 100_000), (172, 100_000), (100, 1000), (90, 1000), (4096, 4096), (1, 1), (800, 900)
    for (q_len, seq_len), window in product(lengths, (None, 1, 64, 512, 950)):
        pairs = sum(min(seq_len - q_len + i + 1, window or seq_len) for i in range(q_len))
        seen = min(seq_len, q_len + (window or seq_len) - 1)
        is_fewer = 640 * pairs + 262_144 * seen <= 2176 * pairs + 262_144 * q_len
        assert expands(q_len, seq_len, DEEPSEEK, window) == (is_fewer and q_len > 1)
    assert expands(172, 1 << 24, DEEPSEEK)
    assert not expands(170, 1 << 24, DEEPSEEK)


@pytest.mark.parametrize("way", ["host", "recording"])
def test_steps_that_run_again_absorb(case: Case, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("expanded")

    monkeypatch.setattr(latent_attention, "attend_expanded", refuse)
    case.ours.reset()
    with pytest.raises(AssertionError, match="expanded"):
        forward(case.ours, {"a": tokens(5)})
    if way == "recording":
        monkeypatch.setattr(latent_attention, "recording", lambda: "one")
    else:
        monkeypatch.setattr(latent_attention, "split_step", lambda *_: None)
    case.ours.reset()
    assert_same_logits(forward(case.ours, {"a": tokens(5)})[0], case.expected(tokens(5))[-1])


def test_deepseek_v3_as_published() -> None:
    """61 layers of 576 bfloat16 numbers are 70,272 bytes a token; scores grow by yarn's magnitude squared."""
    _, config = model_config(HfConfig(DEEPSEEK_V3, "config.json"))
    cache = cache_config(config, num_blocks=4)
    assert cache.token_bytes(torch.bfloat16) == 70_272 == 61 * 576 * 2
    layer = config.attention[5]
    assert layer.latent == DEEPSEEK
    assert layer.rope is not None
    assert layer.rope.interleaved
    assert layer.rope.attention_factor == 1.0
    magnitude = 0.1 * 3.6888794541139363 + 1  # ln 40
    assert layer.softmax_scale == pytest.approx(192**-0.5 * magnitude**2)
    assert [moe is None for moe in config.moe] == [True] * 3 + [False] * 58
    moe = config.moe[3]
    assert moe is not None
    assert (moe.num_experts, moe.top_k, moe.num_expert_groups, moe.topk_groups) == (256, 8, 8, 4)
    kimi = DEEPSEEK_V3 | {"model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64, "n_group": 1}
    _, other = model_config(HfConfig(kimi | {"topk_group": 1, "n_routed_experts": 384}, "config.json"))
    assert other.attention[0] == replace(layer, num_heads=64)


def test_a_cache_in_e4m3_has_the_checkpoints_scale(case: Case, tmp_path: Path) -> None:
    case.theirs.save_pretrained(tmp_path)
    model = load_model(tmp_path, block_size=8, num_blocks=16, kv_cache_dtype="float8_e4m3fn")
    assert model.kv_manager.k_cache(0).dtype == torch.float8_e4m3fn
    (logits,) = forward(model, {"a": tokens(20)})
    assert logits is not None
    want = case.expected(tokens(20))[-1]
    assert torch.nn.functional.cosine_similarity(logits, want, dim=0) > 0.97


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["torch"], indirect=True)
def test_latents_in_4_bits(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Latents of the published sizes, whole, in chunks and after a hit; all experts take part."""
    save_checkpoint(RECORDS["deepseek_v3"], tmp_path)
    check_records(tmp_path, "nvfp4", nvfp4_error, swapped_codes, monkeypatch)


@pytest.mark.thorough
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "nvfp4"])
def test_a_multi_token_layer_does_not_see_the_first_key(
    kv_cache_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key's share is taken off with the numbers of the cache; attention to chosen keys never reads it."""
    save_published("deepseek_v3", tmp_path, RECORDS)
    drafts = partial(drafts_after, tmp_path, "mtp", tokens(30), 9, 1, kv_cache_dtype=kv_cache_dtype)
    (found,) = drafts().logits

    def attend(module: Any, q: torch.Tensor, kv_cache: torch.Tensor, *, out: torch.Tensor, **options: Any) -> None:
        num_keys = options["block_table"].shape[1] * kv_cache.shape[1]
        others = torch.arange(1, num_keys, dtype=torch.int32, device=q.device).expand(len(q), -1)
        module._whole_attention(q, kv_cache, **options | {"indices": others}, out=out)

    monkeypatch.setattr(LaterLatentAttention, "_attend_from_1", attend)
    (expected,) = drafts().logits
    assert_within(found, expected, 1e-4 * expected.abs().max())


@pytest.mark.parametrize("dtype", ["fp8_e5m2", "int8", "nvfp4"])
def test_other_caches_are_refused_before_weights_are_read(dtype: str, case: Case, tmp_path: Path) -> None:
    case.theirs.config.save_pretrained(tmp_path)
    expected = r"expected torch.float32 or torch.float8_e4m3fn for latents other than 512 \+ 64"
    with pytest.raises(InvalidInputError, match=rf"kv_cache_dtype: torch\.\w+, {expected}$") as refusal:
        load_model(tmp_path, kv_cache_dtype=dtype)
    assert summarize(tmp_path, kv_cache_dtype=KV_CACHE_DTYPES[dtype])["reason"] == str(refusal.value)
