"""`logprobs_mode="processed"`: log probabilities of the distribution that tokens are drawn from."""

from pathlib import Path
from typing import Any

import pytest
import torch

from paged import Engine, EngineConfig, InvalidInputError, LlmExecutor, SamplingParams
from tests.models.families import VOCAB_SIZE, tokens
from tests.tolerance import assert_logprobs


def test_temperature_and_top_k_are_in_them(llama_folder: Path) -> None:
    executor = LlmExecutor.from_pretrained(llama_folder, block_size=8, num_blocks=16)
    params = SamplingParams(temperature=0.7, top_k=5, seed=3, max_tokens=6, ignore_eos=True, logprobs=VOCAB_SIZE)
    modes: tuple[Any, ...] = ("raw", "processed")
    raw, processed = (
        Engine(executor, EngineConfig(logprobs_mode=mode)).generate([tokens(9)], params)[0].outputs[0] for mode in modes
    )
    assert [*raw.token_ids] == [*processed.token_ids]
    assert raw.logprobs is not None
    assert processed.logprobs is not None
    for token, given, found in zip(raw.token_ids, raw.logprobs, processed.logprobs, strict=True):
        best = torch.tensor([given[one] for one in range(VOCAB_SIZE)], dtype=torch.float64).div(0.7).topk(5)
        expected = dict(zip(best.indices.tolist(), best.values.log_softmax(0).tolist(), strict=True))
        kept = {token: value for token, value in found.items() if value > -1e30}
        assert kept.keys() == expected.keys()
        assert_logprobs([kept[token] for token in expected], list(expected.values()))
        assert token in expected


def test_others_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="logprobs_mode: 'logits', expected 'raw' or 'processed'"):
        EngineConfig(logprobs_mode="logits")  # type: ignore[arg-type]
