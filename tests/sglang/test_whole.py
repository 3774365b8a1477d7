"""Greedy tokens of a whole SGLang with our attention beside those of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from paged.interop.sglang_plugin import register
from tests.models.families import FAMILIES, save_checkpoint, tokens
from tests.sglang.whole import run_sglang

pytestmark = pytest.mark.thorough

NUM_NEW = 5


@torch.no_grad()
def greedy(model: Any, prompt: list[int]) -> list[int]:
    token_ids = list(prompt)
    for _ in range(NUM_NEW):
        logits = model(torch.tensor([token_ids])).logits[0, -1]
        token_ids.append(int(logits.argmax()))
    return token_ids[len(prompt) :]


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
        for i, prompt in enumerate(prompts[:3]):
            sglang.add(str(i), prompt, NUM_NEW)
        while not sglang.outputs:
            sglang.step()
        sglang.add("3", prompts[3], NUM_NEW)
        while sglang.step():
            pass
        steps, outputs = sglang.steps, sglang.outputs
    modes = {mode for mode, _ in steps}
    assert modes == {"EXTEND", "MIXED", "DECODE"}
    assert any(32 in prefixes for _, prefixes in steps)  # pages of the third prompt
    for i, prompt in enumerate(prompts):
        assert outputs[str(i)] == greedy(model, prompt)
