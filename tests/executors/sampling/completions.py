"""Completions in the middle of their output."""

from __future__ import annotations

import random
from collections.abc import Sequence

from paged import RequestOutput, SamplingParams
from paged.executors.requests.output import CompletionOutput
from paged.executors.requests.request import Completion, Request

VOCAB = 12
PROMPT, OUTPUT = [1, 2, 2, 8], [3, 3, 4, 9, 3]


def completion(
    params: SamplingParams, prompt: Sequence[int] = (1,), output: Sequence[int] = (), seed: int = 0
) -> Completion:
    """A completion in the middle of its output."""
    outputs = RequestOutput("r", list(prompt), [CompletionOutput(0, list(output))])
    ends = frozenset(params.stop_token_ids)
    name = str(random.random())
    request = Request("r", list(prompt), params, (0, 0), {}, 1000, ends, outputs, 0.0, name)
    return Completion(request, 0, seed, None)
