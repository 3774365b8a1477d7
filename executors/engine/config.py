"""Policy of an engine: how requests share its steps and its cache."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from paged.errors import InvalidInputError, PagedError
from paged.kernels.common.scalars import as_bool, as_float, as_int, shown


class QueueFullError(PagedError):
    """`EngineConfig.max_waiting` completions wait already; nothing was queued."""


@dataclass(frozen=True)
class EngineConfig:
    """Policy of an engine.

    Attributes:
        token_budget: tokens of a step. Decodes come first, prompt chunks take the rest, as far as blocks are free.
        chunk_size: tokens of one prompt in a step; None for the rest of the budget.
        max_num_seqs: sequences that hold cache at the same time. A request with more completions runs alone.
        max_waiting: completions in the queue, preempted ones included, before `add_request` raises QueueFullError; also
            prompts that wait in `AsyncEngine.embed`. None for no limit.
        preemption: if the cache is full, "recompute" frees K/V and computes them again later; "swap" moves them to host
            memory if they fit. The sequence that ranks last is preempted, see priority_requests.
        admission_tokens: a prompt starts if the cache can hold it and this many more tokens of it and of every running
            sequence. None for as many as they may generate, which makes preemption rare.
        priority_requests: a priority higher by one counts like an arrival this many requests earlier, so none waits
            forever.
        decode_stretch: while sequences decode, prompt chunks are cut so that a step takes at most this many times as
            long as one without prompts, by measured times. None cuts by the budget alone.
        overlap: whether the next step is launched before the tokens of the last one are read, so that the device never
            waits for the host. None does so on GPUs only. Needs `ExecutorCapabilities.supports_device_ids` and a cache
            manager; without effect beside a proposer, which reads the tokens.
        logprobs_mode: what `SamplingParams.logprobs` are of: "raw", the model's distribution; or "processed", the one
            that tokens are drawn from, after penalties, biases, masks, temperature and filters. Prompts' are raw.
        batch_invariant: whether a request's logits, log probabilities and tokens have the same bits whatever runs
            beside it, in any order, budget or preemption. Sequences then run in fixed chunks: the prompt's pieces of
            256 tokens, which may exceed the budget, then one token each. If the executor has no invariant rows (see
            `ExecutorCapabilities`), each is a forward of its own. Only full chunks of prompts are taken from the
            prefix cache, steps do not overlap, and there is no speculation. On a CPU, `warmup` of its own executor
            chooses other kernels, for engines made after it; that of others does not.
        profiler_ranges: whether a step marks its parts for PyTorch's profiler, and through it for NVTX:
            "paged.schedule", "paged.forward", "paged.sample" and "paged.update".

    Raises:
        InvalidInputError: a value has another type or is out of range.
    """

    token_budget: int = 2048
    chunk_size: int | None = None
    max_num_seqs: int = 256
    max_waiting: int | None = None
    preemption: Literal["recompute", "swap"] = "recompute"
    admission_tokens: int | None = 64
    priority_requests: int = 1000
    decode_stretch: float | None = None
    overlap: bool | None = None
    logprobs_mode: Literal["raw", "processed"] = "raw"
    batch_invariant: bool = False
    profiler_ranges: bool = False

    def __post_init__(self) -> None:
        """Check every value and convert it to Python's own types."""
        for name, minimum in _MINIMA.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                object.__setattr__(self, name, as_int(name, value, low=minimum, high=_MOST))
        if self.preemption not in ("recompute", "swap"):
            raise InvalidInputError(f"preemption: {shown(self.preemption)}, expected 'recompute' or 'swap'")
        if self.logprobs_mode not in ("raw", "processed"):
            raise InvalidInputError(f"logprobs_mode: {shown(self.logprobs_mode)}, expected 'raw' or 'processed'")
        if self.decode_stretch is not None:
            stretch = as_float("decode_stretch", self.decode_stretch, math.nextafter(1, 2))
            object.__setattr__(self, "decode_stretch", stretch)
        if self.overlap is not None:
            object.__setattr__(self, "overlap", as_bool("overlap", self.overlap))
        for name in ("batch_invariant", "profiler_ranges"):
            object.__setattr__(self, name, as_bool(name, getattr(self, name)))


_MINIMA = {"token_budget": 1, "chunk_size": 1, "max_num_seqs": 1, "max_waiting": 0, "priority_requests": 1}
_MINIMA |= {"admission_tokens": 0}
_OPTIONAL = ("chunk_size", "max_waiting", "admission_tokens")
_MOST = 1 << 31
