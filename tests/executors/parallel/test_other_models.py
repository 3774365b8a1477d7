"""Models over several processes that each test loads: while a module holds one, the processes take no other."""

import shutil
from itertools import product
from pathlib import Path

import pytest
import torch

from paged.errors import CheckpointError, UnsupportedError
from paged.executors.llm_executor import LlmExecutor
from paged.step.batch import UnifiedBatchItem, VerifyLogits
from tests.executors.parallel.followers import OPTIONS, Followers
from tests.executors.parallel.spread import PROMPT, Case, cases_of, load_case
from tests.models.edits import edit_tensors
from tests.models.families import save_family, tokens

# What else layers are made of, each once. Where there are more processes than KV heads, some have the same ones.
OTHERS = cases_of(
    "gemma4_moe 2 experts",
    thorough="apertus 2, ernie4_5_moe 2 experts, exaone4 2, hunyuan_moe 2, nemotron 4, starcoder2 2, "
    "cohere 2, glm_moe_dsa 2, deepseek_v3 2 experts, laguna 2, mimo_v2_flash 2, phimoe 2, "
    "gemma4_shared_kv 2, glm4_moe 4 experts, gpt_oss 2 experts, granite_moe_shared 2, olmo2 2, "
    "llama4 2 experts, llama_biases_linear_rope 4, minimax_m2 4, minimax_m2 2 experts, minimax_m3 2, olmo3 4, phi3 2, "
    "qwen2_moe 2, qwen3_moe 4, lfm2_moe 2, lfm3 2, kimi_linear 2, bailing_hybrid 2, "
    "falcon_h1 2, granite_moe_hybrid 2 experts, nemotron_h 2, nemotron_h 2 experts, "
    "axk2 2, hy_v4 2, mistral_large4 2, olmo_hybrid 2, qwen3_next 2, qwen4_exp 2, rwkv7 2",
)


@pytest.mark.parametrize("name", OTHERS)
def test_other_layers(name: str, tmp_path: Path, followers: Followers) -> None:
    with load_case(name, tmp_path, followers) as case:
        case.same(UnifiedBatchItem("a", PROMPT[:12]), UnifiedBatchItem("b", PROMPT[:9], is_final_chunk=False))
        case.same(UnifiedBatchItem("a", [5], pos_offset=12), UnifiedBatchItem("b", PROMPT[9:], pos_offset=9))


@pytest.mark.parametrize("name", ["qwen3_5 2"])
def test_states_are_forked_taken_back_swapped_and_found(name: str, tmp_path: Path, followers: Followers) -> None:
    with load_case(name, tmp_path, followers) as case:
        case.same(UnifiedBatchItem("a", PROMPT[:20]))
        for manager in case.managers():
            manager.fork(manager.get_handle("a"), "b")
        drafts = UnifiedBatchItem("b", PROMPT[20:26], pos_offset=20, logits_policy=VerifyLogits())
        case.same(UnifiedBatchItem("a", tokens(9, 8), pos_offset=20), drafts)
        for executor in (case.alone, case.spread):
            executor.truncate_kv_for_cache_id("b", 22)
        for manager in case.managers():
            manager.swap_out(manager.get_handle("b"))
        for other in range(3):  # over what it left
            case.same(UnifiedBatchItem(other, tokens(24, other)))
        for manager in case.managers():
            manager.swap_in(manager.get_handle("b"))
        case.same(UnifiedBatchItem("b", PROMPT[22:], pos_offset=22))
        found = [manager.allocate("c", token_ids=PROMPT).num_cached_tokens for manager in case.managers()]
        assert found[0] == found[1] > 0
        case.same(UnifiedBatchItem("c", PROMPT[found[0] :], pos_offset=found[0]))


@pytest.mark.thorough
def test_scales_of_heads_for_nvfp4(tmp_path: Path, followers: Followers) -> None:
    """All ranks divide by the scale of all heads, so that they round as one process does."""
    save_family("llama", tmp_path)
    scales: dict[str, torch.Tensor] = {}
    for layer, letter in product(range(2), "kv"):
        scales[f"model.layers.{layer}.self_attn.{letter}_scale"] = torch.tensor([0.001, 0.02])
    edit_tensors(tmp_path, lambda tensors: tensors.update(scales))
    options = OPTIONS | {"kv_cache_dtype": "nvfp4"}
    with followers.load(tmp_path, 2, **options) as spread:
        Case(LlmExecutor.from_pretrained(tmp_path, **options), spread).same(UnifiedBatchItem("a", PROMPT[:9]))


def test_new_weights_reach_every_process(tmp_path: Path, followers: Followers) -> None:
    """Or none: a folder that cannot be read leaves the old ones everywhere."""
    item = UnifiedBatchItem("a", PROMPT)
    with load_case("llama 2", tmp_path / "old", followers) as case:
        shutil.copytree(tmp_path / "old", tmp_path / "new")
        edit_tensors(tmp_path / "new", lambda t: t.update({name: one.roll(1, 0) for name, one in t.items()}))
        (before,) = case.same(item)
        case.spread.model.reset()
        with pytest.raises(CheckpointError):
            case.spread.update_weights(tmp_path)
        with pytest.raises(UnsupportedError, match="a folder that every rank can read"):
            case.spread.update_weights([])
        case.alone.model.reset()
        case.same(item)
        for executor in (case.alone, case.spread):
            executor.model.reset()
            executor.update_weights(tmp_path / "new")
        (after,) = case.same(item)
        assert not torch.allclose(before, after, atol=0.01)
