"""The bundled checkpoint: within its size, and right on held-out prompts."""

import pytest
import torch
from tokenizers import Tokenizer

from paged import Engine, EngineConfig, LlmExecutor, SamplingParams
from paged.executors.command_line.cli import RECALL
from paged.models.loading.hf_config import read_eos_token_ids
from paged.models.recall.task import sample_prompts


def test_size() -> None:
    assert sum(path.stat().st_size for path in RECALL.iterdir() if path.is_file()) <= 2_000_000


# The interpreter takes seconds a prompt of 512 tokens, the PyTorch implementations a tenth of that.
@pytest.mark.parametrize(
    ("backend", "dtype", "count", "max_tokens"),
    [
        ("torch", torch.float32, 200, 512),
        ("torch", torch.bfloat16, 200, 512),
        pytest.param("triton", torch.float32, 2, 96, marks=pytest.mark.thorough),
    ],
)
def test_answers_held_out_prompts(
    backend: str, dtype: torch.dtype, count: int, max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At least 99 % exact, the whole answer with its end; none of the few prompts of the slow backend may be wrong."""
    monkeypatch.setenv("PAGED_BACKEND", backend)
    executor = LlmExecutor.from_pretrained(RECALL, dtype=dtype, num_blocks=1024)
    tokenizer = Tokenizer.from_file(str(RECALL / "tokenizer.json"))
    eos = read_eos_token_ids(RECALL)
    prompts = sample_prompts(20_261, count, max_tokens=max_tokens)
    engine = Engine(executor, EngineConfig(token_budget=1024), tokenizer=tokenizer, eos_token_ids=eos)
    outputs = engine.generate(
        [tokenizer.encode(prompt.text).ids for prompt in prompts],
        SamplingParams(temperature=0, max_tokens=8),
        progress=False,
    )
    right = sum(
        output.outputs[0].finish_reason == "stop" and output.outputs[0].text.strip() == prompt.answer
        for output, prompt in zip(outputs, prompts, strict=True)
    )
    assert right >= 0.99 * count
