"""Completions in the middle of their output, and how likely counts are, if they were drawn from a distribution."""

import random
from collections.abc import Sequence

import torch

from paged import RequestOutput, SamplingParams
from paged.executors.requests.output import CompletionOutput, Growth
from paged.executors.requests.request import Completion, Request

VOCAB = 12
PROMPT, OUTPUT = [1, 2, 2, 8], [3, 3, 4, 9, 3]


def completion(
    params: SamplingParams, prompt: Sequence[int] = (1,), output: Sequence[int] = (), seed: int = 0
) -> Completion:
    """A completion in the middle of its output."""
    outputs = RequestOutput("r", list(prompt), [CompletionOutput(0, Growth(list(output), [], None))])
    ends = frozenset(params.stop_token_ids)
    name = str(random.random())
    request = Request("r", list(prompt), params, (0, 0), {}, 1000, ends, outputs, 0.0, name)
    made = Completion(request, 0, seed, None)
    made.num_sampled = len(output)
    return made


def chi_square_p(counts: Sequence[int], expected: Sequence[float]) -> float:
    """p-value of Pearson's test (1900): the share of samples of `expected` that fit it no better than `counts`."""
    total = sum(counts)
    pairs = [(count, share * total) for count, share in zip(counts, expected, strict=True) if share > 0]
    if total != sum(count for count, _ in pairs):
        return 0.0
    statistic = sum((count - mean) ** 2 / mean for count, mean in pairs)
    if len(pairs) < 2:
        return 1.0
    half = torch.tensor([(len(pairs) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
