"""The rollout function of TRL's `GRPOTrainer`, with what it reads of a trainer."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paged import Engine, EngineConfig, LlmExecutor, SamplingParams
from paged.executors.requests import request
from paged.interop.trl import RolloutError, RolloutFunction
from tests.backends import needs_numba
from tests.models.families import FAMILIES, logits_of, save_checkpoint, tokens
from tests.tolerance import assert_logprobs

pytestmark = pytest.mark.thorough  # imports transformers
ARGS = {"temperature": 0.8, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's operations in place of Triton's interpreter."""
    monkeypatch.setenv("PAGED_BACKEND", "torch")


@pytest.mark.parametrize("name", ["llama_tied", "qwen3_moe"])
def test_completions_of_the_newest_weights(name: str, tmp_path: Path) -> None:
    """Experts are stacked in transformers' modules; a group is one request; log probabilities have the temperature."""
    theirs = save_checkpoint(FAMILIES[name], tmp_path)
    executor = LlmExecutor.from_pretrained(tmp_path, block_size=8, num_blocks=64)
    engine = Engine(executor, EngineConfig(logprobs_mode="processed"), eos_token_ids=(), seed=3)
    trainer = SimpleNamespace(
        model=theirs,
        accelerator=SimpleNamespace(unwrap_model=lambda model: model),
        args=SimpleNamespace(**ARGS, max_completion_length=5),
        state=SimpleNamespace(global_step=0),
    )
    roll_out, prompts = RolloutFunction(engine), [tokens(7)] * 3 + [tokens(4, 1)] * 2
    for step in (0, 1, 1):
        if step > trainer.state.global_step:
            with torch.no_grad():
                for weight in theirs.parameters():
                    weight.mul_(1.1)
        trainer.state.global_step = step
        found = roll_out(prompts, trainer)
        assert found["prompt_ids"] == prompts
        assert len({tuple(ids) for ids in found["completion_ids"]}) == 5  # drawn, each for itself
        for prompt, ids, logprobs in zip(*found.values(), strict=True):
            rows = (logits_of(theirs, prompt + ids)[len(prompt) - 1 : -1] / 0.8).log_softmax(-1)
            own = rows.gather(1, torch.tensor(ids)[:, None])[:, 0]
            assert_logprobs(logprobs, own)
    assert engine.metrics.requests == 6


@needs_numba
@pytest.mark.parametrize(("family", "quantization"), [("llama", None), ("qwen3_moe", None), ("llama", "int4")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_have_the_bits_of_the_rollout(
    family: str, quantization: str | None, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward of whole completions, against their decode steps in one batch."""
    monkeypatch.setenv("PAGED_BACKEND", "numba")
    monkeypatch.setattr(request, "FIXED_CHUNK", 16)
    save_checkpoint(FAMILIES[family], tmp_path)
    executor = LlmExecutor.from_pretrained(
        tmp_path, dtype=dtype, block_size=8, num_blocks=200, quantization=quantization, progress=False
    )
    if quantization is not None and not executor.capabilities().has_invariant_rows:
        pytest.skip("no numba kernels of blocks")
    engine = Engine(executor, EngineConfig(batch_invariant=True, logprobs_mode="processed"), eos_token_ids=())
    trainer: Any = SimpleNamespace(state=SimpleNamespace(global_step=0))
    params = SamplingParams(temperature=0.8, max_tokens=40, seed=1)
    roll_out = RolloutFunction(engine, params, weights=lambda _: tmp_path)
    rollout = roll_out([tokens(7)] * 3 + [tokens(50, 1)], trainer)
    forwards = executor.status().forwards
    scores = roll_out.score(rollout["prompt_ids"], rollout["completion_ids"], trainer)
    assert scores == rollout["logprobs"]
    assert executor.status().forwards - forwards == 3 * (1 + 1) + (4 + 1)  # chunks of prompts, and completions


def test_failed_completions_and_seeds(tmp_path: Path) -> None:
    save_checkpoint(FAMILIES["llama"], tmp_path)
    engine = Engine(LlmExecutor.from_pretrained(tmp_path, block_size=8, num_blocks=64), eos_token_ids=())
    trainer: Any = SimpleNamespace(state=SimpleNamespace(global_step=0))

    def roll_out(**options: Any) -> RolloutFunction:
        return RolloutFunction(engine, SamplingParams(max_tokens=9, **options), weights=lambda _: tmp_path)

    with pytest.raises(RolloutError, match="no token to choose"):
        roll_out(allowed_token_ids=[7], stop_token_ids=[7], min_tokens=2)([[5, 3]], trainer)
    first, other = roll_out(seed=1), roll_out(seed=1)
    texts = [one([[5, 3]], trainer)["completion_ids"] for one in (first, first, other)]
    assert texts[0] == texts[2] != texts[1]
