"""The bundled checkpoint: within its size, and right on held-out prompts in both types and on both backends."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer

from paged import LlmExecutor
from paged.executors.cli import RECALL, _eos_token_ids
from paged.executors.generate import Generation, generate_steps
from paged.models.recall.task import sample_prompts


def test_size() -> None:
    assert sum(path.stat().st_size for path in RECALL.iterdir() if path.is_file()) <= 2_000_000


# The interpreter takes seconds a prompt of 512 tokens, the PyTorch twins a tenth of that.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("backend", "count", "max_tokens"), [("torch", 200, 512), ("triton", 4, 96)])
def test_answers_held_out_prompts(
    backend: str, count: int, max_tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At least 99 % exact, the whole answer with its end; none of the few prompts of the slow backend may be wrong."""
    monkeypatch.setenv("PAGED_BACKEND", backend)
    executor = LlmExecutor.from_pretrained(RECALL, dtype=dtype, num_blocks=1024)
    tokenizer = Tokenizer.from_file(str(RECALL / "tokenizer.json"))
    eos = _eos_token_ids(RECALL)
    prompts = sample_prompts(20_261, count, max_tokens=max_tokens)
    generations = [Generation(str(i), tokenizer.encode(prompt.text).ids, 8) for i, prompt in enumerate(prompts)]
    for _ in generate_steps(executor, generations, eos_token_ids=eos, chunk_size=96, token_budget=1024):
        pass
    right = sum(
        generation.token_ids[-1] in eos and tokenizer.decode(generation.token_ids[:-1]).strip() == prompt.answer
        for generation, prompt in zip(generations, prompts, strict=True)
    )
    assert right >= 0.99 * count
