"""DraftModel: whatever becomes of it, the output is the same."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from paged import DraftModel, Engine, SamplingParams, UnifiedBatch
from paged.executors.closed_form import expected_logits
from tests.executors.engine_cases import check_pool_empty, tokens_of
from tests.executors.oracle import make_executor
from tests.executors.speculation.noting import NotingProposer


@pytest.mark.parametrize("trouble", ["no room", "raises", "raises later", "behind", "one cache", "no token"])
def test_a_draft_in_trouble_costs_nothing_but_drafts(
    trouble: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of NaN leave no token: found when drafts are read, before any of them is taken for one."""
    prompts = [[i, 3, i, 5, i] * 4 for i in range(6)]
    params = SamplingParams(temperature=0, max_tokens=12)
    expected = tokens_of(Engine(make_executor(device, num_blocks=64)).generate(prompts, params, progress=False))
    target = make_executor(device, num_blocks=24 if trouble == "one cache" else 64)
    draft = target if trouble == "one cache" else make_executor(device, num_blocks=7 if trouble == "no room" else 64)
    calls, forward = itertools.count(1), draft.unified_decode

    def failing(batch: UnifiedBatch) -> list[torch.Tensor | None]:
        if trouble == "raises" or (trouble == "raises later" and next(calls) % 3 == 0):
            raise RuntimeError("the draft model broke")
        return [row * torch.nan if trouble == "no token" and row is not None else row for row in forward(batch)]

    if trouble != "one cache":
        monkeypatch.setattr(draft, "unified_decode", failing)
    proposer = DraftModel(draft, 3, token_budget=8 if trouble == "behind" else 2048)
    engine = Engine(target, proposer=proposer)
    assert tokens_of(engine.generate(prompts, params, progress=False)) == expected
    assert (engine.metrics.draft_tokens > 0) == (trouble not in ("raises", "no token"))
    assert not engine.metrics.finished["error"]
    check_pool_empty(target)
    check_pool_empty(draft)


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_drafts_that_the_device_alone_knows(
    penalty: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the drafts, and leave the cache, of a draft model that takes ids of the host only."""
    params = [SamplingParams(temperature=0.5, repetition_penalty=penalty, max_tokens=9 + i, seed=i) for i in range(5)]
    prompts = [[i, 3, i, 5, i] * 4 for i in range(5)]
    runs = []
    for takes_device_ids in (True, False):
        draft = make_executor(device, num_blocks=64, embedding="sinusoidal")
        capabilities = replace(draft.capabilities(), supports_device_ids=takes_device_ids)
        monkeypatch.setattr(draft, "capabilities", lambda given=capabilities: given)
        engine = Engine(make_executor(device, num_blocks=64), proposer=DraftModel(draft, 3))
        tokens = tokens_of(engine.generate(prompts, params, progress=False))
        assert draft.kv_manager is not None
        assert 0 < engine.metrics.accepted_tokens < engine.metrics.draft_tokens
        check_pool_empty(draft)
        texts = [prompt + found for prompt, found in zip(prompts, tokens, strict=True)]
        cached = [draft.kv_manager.allocate(f"{text}", token_ids=text).num_cached_tokens for text in texts]
        runs.append((tokens, engine.metrics.draft_tokens, engine.metrics.accepted_tokens, cached))
    assert runs[0] == runs[1]
    assert max(runs[0][-1]) > len(prompts[0]), "generated tokens are published"


def test_unlikely_drafts_are_not_verified(device: torch.device) -> None:
    """Drafts end before the product of the largest probabilities falls below the option; the text is the same."""
    sizes: dict[str, Any] = {"vocab_size": 4, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "num_blocks": 64}
    draft = make_executor(device, head_dim=8, embedding="sinusoidal", **sizes)
    prompts, params = [[i, 3, i, 2, i] * 4 for i in range(4)], SamplingParams(temperature=0, max_tokens=24)
    target = make_executor(device, head_dim=4, **sizes)
    expected = tokens_of(Engine(target).generate(prompts, params, progress=False))
    proposer = NotingProposer(DraftModel(draft, 3, min_probability=0.14))
    engine = Engine(target, proposer=proposer)
    assert tokens_of(engine.generate(prompts, params, progress=False)) == expected
    for text, token_ids in proposer.drafted.items():
        ids, survival = [*text], 1.0
        for _ in range(min(3, len(prompts[0]) + 23 - len(text))):
            probs = expected_logits(draft.config, ids).softmax(0)
            survival *= float(probs.max())
            if survival < 0.14:
                break
            ids.append(int(probs.argmax()))
        assert token_ids == ids[len(text) :]
    counts = [len(token_ids) for token_ids in proposer.drafted.values()]
    assert {0, 1, 2, 3} == {*counts}
    metrics = engine.metrics
    assert metrics.draft_tokens == sum(counts) > metrics.accepted_tokens > 0
    assert metrics.decode_tokens == sum(counts) + len(counts)
    check_pool_empty(draft)
