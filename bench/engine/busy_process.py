"""Decode steps of a small model in a process with threads of its own, which `busy.py` starts.

    python -m paged.bench.engine.busy_process MODEL DTYPE chosen|all

The last argument says whether the engine chooses the number of threads, or all threads run every step. For each line of
stdin with `sequences`, `seconds` and `is_invariant` it runs decode steps for this many seconds, and writes the mean
seconds of a step.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from time import perf_counter
from unittest import mock

import torch

import paged
from paged.bench.engine.models import MODELS, random_executor
from paged.models.step_threads import StepThreads

_CONTEXT, _NEW_TOKENS = 32, 224
MOST_SEQUENCES = 64
# Number of untimed steps, and the least number of timed ones. Untimed steps come first, because the first invariant
# step records its kernels, and the threads of the last turn's process must fall asleep.
_UNTIMED, _LEAST_STEPS = 3, 5


def decode(executor: paged.LlmExecutor, sequences: int, seconds: float, is_invariant: bool) -> float:
    """Run decode steps for some seconds, and return the mean of their seconds."""
    engine = paged.Engine(executor, paged.EngineConfig(batch_invariant=is_invariant), eos_token_ids=())
    taken: list[float] = []
    while len(taken) < _LEAST_STEPS or sum(taken) < seconds:
        if engine.status().decoding < sequences:
            _begin(engine, sequences)
        start = perf_counter()
        engine.step()
        taken.append(perf_counter() - start)
    _end(engine)
    return sum(taken) / len(taken)


def _begin(engine: paged.Engine, sequences: int) -> None:
    """Let this many new sequences decode."""
    _end(engine)
    params = paged.SamplingParams(temperature=0, max_tokens=_NEW_TOKENS)
    for sequence in range(sequences):
        prompt = list(range(sequence, sequence + _CONTEXT))
        engine.add_request(prompt, params, request_id=str(sequence))
    while engine.status().decoding < sequences:
        engine.step()
    for _ in range(_UNTIMED):
        engine.step()


def _end(engine: paged.Engine) -> None:
    for sequence in range(MOST_SEQUENCES):
        engine.abort(str(sequence))
    while engine.num_unfinished:
        engine.step()


def main(model: str, dtype: str, threads: str) -> None:
    """Answer the lines of stdin."""
    with ExitStack() as stack:
        if threads == "all":
            stack.enter_context(mock.patch.object(StepThreads, "run", _run_on_all))
        _answer(model, dtype)


def _run_on_all(_threads: StepThreads, step: Callable[[], None]) -> None:
    step()


def _answer(model: str, dtype: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output must not mix with answers
    num_tokens = MOST_SEQUENCES * (_CONTEXT + _NEW_TOKENS)
    executor = random_executor(MODELS[model], torch.device("cpu"), num_tokens, dtype=getattr(torch, dtype))
    executor.warmup(progress=False)
    print(json.dumps({"threads": torch.get_num_threads()}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(decode(executor, **json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
