"""DraftModel: whatever becomes of it, the output is the same."""

from __future__ import annotations

import pytest
import torch

from paged import DraftModel, Engine, SamplingParams
from tests.executors.engine_cases import check_pool_empty, tokens_of
from tests.executors.oracle import make_executor


@pytest.mark.parametrize("trouble", ["no room", "raises", "raises later", "behind", "one cache"])
def test_a_draft_in_trouble_costs_nothing_but_drafts(
    trouble: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[i, 3, i, 5, i] * 4 for i in range(6)]
    params = SamplingParams(temperature=0, max_tokens=12)
    expected = tokens_of(Engine(make_executor(device, num_blocks=64)).generate(prompts, params, progress=False))
    target = make_executor(device, num_blocks=24 if trouble == "one cache" else 64)
    draft = make_executor(device, num_blocks=7 if trouble == "no room" else 64)
    if trouble == "one cache":
        draft = target
    if trouble.startswith("raises"):
        calls, forward = [0], draft.unified_decode

        def failing(batch: object) -> object:
            calls[0] += 1
            if trouble == "raises" or calls[0] % 3 == 0:
                raise RuntimeError("the draft model broke")
            return forward(batch)  # type: ignore[arg-type]

        monkeypatch.setattr(draft, "unified_decode", failing)
    proposer = DraftModel(draft, 3, token_budget=8 if trouble == "behind" else 2048)
    engine = Engine(target, proposer=proposer)
    assert tokens_of(engine.generate(prompts, params, progress=False)) == expected
    assert (engine.metrics.draft_tokens > 0) == (trouble != "raises")
    assert not engine.metrics.finished["error"]
    check_pool_empty(target)
    check_pool_empty(draft)
