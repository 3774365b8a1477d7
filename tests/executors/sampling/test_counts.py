"""TokenCounts follow the output of each completion."""

from __future__ import annotations

import torch

from paged import SamplingParams
from tests.executors.sampling.completions import PROMPT, VOCAB, completion
from tests.executors.sampling.test_sampler import sampler


def test_counts_follow_the_output(device: torch.device) -> None:
    """The same sampler step after step gives what a fresh one gives, after others have come and gone."""
    torch.manual_seed(0)
    params = SamplingParams(temperature=0, frequency_penalty=1.0, repetition_penalty=1.3, max_tokens=1000)
    kept, rows = sampler(device), [completion(params, PROMPT, seed=i) for i in range(3)]
    for step in range(8):
        logits = torch.randn(3, VOCAB, device=device)
        tokens = kept.sample(logits, rows).token_ids
        assert tokens == sampler(device).sample(logits, rows).token_ids
        for row, ids in zip(rows, tokens, strict=True):
            row.token_ids += ids
        if step == 3:
            kept.forget(rows[1])
            rows[1] = completion(params, [5, 6], [7], seed=9)
