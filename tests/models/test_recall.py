"""The bundled checkpoint: within its size, and right on held-out prompts."""

import os
import sys
from pathlib import Path
from types import FrameType

import pytest
import torch
from tokenizers import Tokenizer

import paged
from paged import Engine, EngineConfig, LlmExecutor, SamplingParams, UnifiedBatch, UnifiedBatchItem
from paged.models.families.decoder_layer import DecoderLayer
from paged.models.loading.hf_config import read_eos_token_ids
from paged.models.recall.task import sample_prompts
from paged.serving.command_line.cli import RECALL


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


def test_a_layer_is_few_calls_of_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer of a decode step by definitions: 77, one for each piece of a formula.

    The first layer also prepares the step.
    """
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    executor = LlmExecutor.from_pretrained(RECALL, num_blocks=8)
    root = Path(paged.__file__).resolve().parent.parent
    folders = tuple(f"{root / name}/" for name in ("kernels", "models", "paged"))
    layer_code = DecoderLayer.forward.__code__
    calls: list[int] = []  # of each layer

    def count(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event == "call" and code is layer_code:
            calls.append(0)
        if event == "call" and calls and os.path.realpath(code.co_filename).startswith(folders):
            calls[-1] += 1
        if event == "return" and code is layer_code:
            calls.append(0)

    for position in range(3):
        calls.clear()
        sys.setprofile(count)
        try:
            executor.unified_decode(UnifiedBatch([UnifiedBatchItem(0, [5], pos_offset=position)]))
        finally:
            sys.setprofile(None)
    assert 20 < calls[-2] <= 90
