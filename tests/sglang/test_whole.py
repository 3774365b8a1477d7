"""Greedy tokens of a whole SGLang with our attention beside those of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

pytest.importorskip("sglang")

from paged.interop import sglang_sparse_latents
from paged.interop.sglang_plugin import register
from paged.kernels.cache.latent_cache import encode_index_keys, index_keys
from tests.models.drafts.heads import save_published
from tests.models.edits import edit_config
from tests.models.families import FAMILIES, save_checkpoint, tokens
from tests.sglang.whole import Sglang, drafting_kernels, run_sglang

pytestmark = pytest.mark.thorough

NUM_NEW = 5


@torch.no_grad()
def greedy(model: Any, prompt: list[int], num_new: int = NUM_NEW) -> list[int]:
    token_ids = list(prompt)
    for _ in range(num_new):
        logits = model(torch.tensor([token_ids])).logits[0, -1]
        token_ids.append(int(logits.argmax()))
    return token_ids[len(prompt) :]


def run_prompts(
    sglang: Sglang, prompts: list[list[int]], num_new: int = NUM_NEW
) -> tuple[list[tuple[str, list[int]]], dict[str, list[int]]]:
    """Return the steps and tokens of prompts; the last one comes after the first token of the others."""
    last = len(prompts) - 1
    for i, prompt in enumerate(prompts[:last]):
        sglang.add(str(i), prompt, num_new)
    while not sglang.outputs:
        sglang.step()
    sglang.add(str(last), prompts[last], num_new)
    while sglang.step():
        pass
    return sglang.steps, sglang.outputs


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "deepseek_v3"])
def test_greedy_tokens_equal_those_of_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain attention; windows in a pool of their own, and sinks; latents. Prompts in chunks, mixed, with a prefix."""
    monkeypatch.setenv("PAGED_BACKEND", "triton")
    register()
    model = save_checkpoint(FAMILIES[family], tmp_path)
    prompts = [tokens(21, 1), tokens(7, 2), tokens(40, 3)]
    prompts.append(prompts[2][:36] + tokens(5, 4))
    with run_sglang(family, tmp_path, attention_backend="paged") as sglang:
        steps, outputs = run_prompts(sglang, prompts)
    modes = {mode for mode, _ in steps}
    assert modes == {"EXTEND", "MIXED", "DECODE"}
    assert any(32 in prefixes for _, prefixes in steps)  # pages of the third prompt
    for i, prompt in enumerate(prompts):
        assert outputs[str(i)] == greedy(model, prompt)


@pytest.mark.parametrize(("family", "backend"), [("deepseek_v32", "triton"), ("glm_moe_dsa", "torch")])
def test_greedy_tokens_of_chosen_latents_equal_those_of_transformers(
    family: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Indexers choose 5 of up to 80 keys, in GLM-5 for the next layer too, and rotate either way.

    SGLang rounds index keys to e4m3 and their weights to bfloat16. Prompts in chunks, mixed, with a prefix.
    """
    monkeypatch.setenv("PAGED_BACKEND", backend)
    register()
    config = FAMILIES[family]
    config.index_head_dim = 128  # SGLang's pool has keys of this size alone
    config.rope_parameters = FAMILIES["deepseek_v32"].rope_parameters  # the only ones of SGLang on a CPU
    model = save_checkpoint(config, tmp_path)
    prompts = [tokens(7, 1), tokens(75, 2)]
    prompts.append(prompts[1][:70] + tokens(5, 3))
    pages = {"page_size": 64, "chunked_prefill_size": 128}
    with run_sglang(family, tmp_path, attention_backend="paged", **pages) as sglang:
        steps, outputs = run_prompts(sglang, prompts)
    assert {mode for mode, _ in steps} == {"EXTEND", "MIXED", "DECODE"}
    assert any(64 in prefixes for _, prefixes in steps)

    for name, module in model.named_modules():
        if name.endswith("indexer.weights_proj"):
            module.bfloat16()
    monkeypatch.setattr(
        DynamicCache, "update_indexer", lambda cache, keys, layer: index_keys(encode_index_keys(keys), 128)
    )
    for i, prompt in enumerate(prompts):
        assert outputs[str(i)] == greedy(model, prompt)


@pytest.mark.parametrize(("family", "algorithm"), [("llama", "STANDALONE"), ("deepseek_v3", "EAGLE")])
def test_drafts_equal_those_of_sglangs_own_backend(
    family: str, algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft model that is its target, of which SGLang hides the first token, and a random multi-token head.

    Some drafts of the former are right.
    """
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    register()
    config = FAMILIES[family]
    if algorithm == "EAGLE":
        config.kv_lora_rank, config.qk_rope_head_dim, config.head_dim = 512, 64, 64  # the sizes of SGLang's kernels
        config.qk_head_dim = config.qk_nope_head_dim + 64
        model, _ = save_published(family, tmp_path, {family: config})
        edit_config(tmp_path, num_nextn_predict_layers=1)
    else:
        model = save_checkpoint(config, tmp_path)
    prompts = [tokens(30, 2), tokens(7, 1)]
    options: dict[str, Any] = {"speculative_algorithm": algorithm, "speculative_draft_model_path": str(tmp_path)}
    options |= {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
    drafts = []
    for draft_backend in ("paged", "triton"):
        options["speculative_draft_attention_backend"] = draft_backend
        with drafting_kernels() as chains, run_sglang(family, tmp_path, attention_backend="paged", **options) as sglang:
            _, outputs = run_prompts(sglang, prompts, num_new=8)
        drafts.append(chains)
        for i, prompt in enumerate(prompts):
            assert outputs[str(i)] == greedy(model, prompt, 8)
    assert drafts[0] == drafts[1]
    num_verified = sum(len(step) for step in drafts[0])
    num_tokens = len(prompts) * 7  # without those that the prompts give
    assert num_verified < num_tokens or algorithm == "EAGLE", "no draft was right"


def test_drafts_choose_among_the_drafts_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head of DeepSeek-V3.2 drafts the same, whether it chooses all of up to 63 keys or does not choose."""
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    register()
    choose, modes = sglang_sparse_latents._choose, set()

    def choose_recorded(indexer: Any, x: Any, q_lora: Any, positions: Any, batch: Any, layer_id: int) -> Any:
        chosen = choose(indexer, x, q_lora, positions, batch, layer_id)
        if chosen is not None:
            modes.add(batch.forward_mode.name)
            assert torch.equal(chosen[:, -1], positions.int())
            assert torch.equal((chosen >= 0).sum(1), positions + 1)
        return chosen

    monkeypatch.setattr(sglang_sparse_latents, "_choose", choose_recorded)
    config = FAMILIES["deepseek_v32"]
    config.index_head_dim, config.index_topk = 128, 64
    model, _ = save_published("deepseek_v3", tmp_path, {"deepseek_v3": config})
    prompts = [tokens(30, 2), tokens(7, 1)]
    options: dict[str, Any] = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": str(tmp_path)}
    options |= {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
    options |= {"page_size": 64, "chunked_prefill_size": 128, "attention_backend": "paged"}
    drafts = []
    for top_k in (63, 64):  # a page has 64 keys, so all are seen without a choice
        edit_config(tmp_path, num_nextn_predict_layers=1, index_topk=top_k)
        with drafting_kernels() as chains, run_sglang("deepseek_v32", tmp_path, **options) as sglang:
            _, outputs = run_prompts(sglang, prompts, num_new=8)
        drafts.append(chains)
        for i, prompt in enumerate(prompts):
            assert outputs[str(i)] == greedy(model, prompt, 8)
    assert drafts[0] == drafts[1]
    assert modes == {"EXTEND", "TARGET_VERIFY", "DRAFT_EXTEND_V2", "DECODE"}
