"""Embeddings: pooled hidden states of prompts, in forwards of their own."""

from __future__ import annotations

import secrets
from collections.abc import Generator, Sequence
from typing import Literal

import torch
from torch.nn import functional

from paged.batch import FullLogits, UnifiedBatch, UnifiedBatchItem, VerifyLogits
from paged.errors import OutOfBlocksError, PagedError
from paged.executors.engine.core import EngineCore

Pooling = Literal["last", "mean"]


def embed_prompts(
    core: EngineCore, prompts: Sequence[Sequence[int]], *, is_mean: bool, normalize: bool
) -> Generator[torch.Tensor | None]:
    """Yield None after every forward, then the mean or the last hidden state of each prompt, [n, hidden_size]."""
    executor, info, name = core.executor, core.executor.info(), f"embedding-{secrets.token_hex(8)}"
    pooled = torch.zeros(len(prompts), info.hidden_size, device=info.device)
    policy, budget = VerifyLogits() if is_mean else FullLogits(), core.config.token_budget
    first = start = 0  # the first prompt that is not done, and its tokens that have run
    generation = core.generation
    try:
        while first < len(prompts):
            if generation != core.generation:  # all rows are of the same weights
                generation, first, start = core.generation, 0, 0
                pooled.zero_()
            items: list[UnifiedBatchItem] = []
            tokens_left = budget
            begin = start
            for index in range(first, len(prompts)):
                chunk = list(prompts[index][begin : begin + tokens_left])
                is_wanted = is_mean or begin + len(chunk) == len(prompts[index])
                seq_id = f"{name}/{index}"
                items.append(UnifiedBatchItem(seq_id, chunk, None, begin, is_wanted, logits_policy=policy))
                core.own_seq_ids.add(seq_id)
                begin = 0
                tokens_left -= len(chunk)
                if not tokens_left:
                    break
            # Only a batch of one prompt preempts requests; larger ones are halved first.
            run = core.run_now if len(items) == 1 else executor.unified_decode
            try:
                answers = run(UnifiedBatch(items, returns_hidden=True))
            except OutOfBlocksError:
                num_tokens = sum(len(item.q_tokens) for item in items)
                if num_tokens == 1:
                    raise
                budget = num_tokens // 2
                continue
            for item, answer in zip(items, answers, strict=True):
                start = item.pos_offset + len(item.q_tokens)
                if answer is not None:
                    pooled[first] += answer.sum(0) / len(prompts[first]) if is_mean else answer
                if start == len(prompts[first]):
                    executor.release_cache(item.seq_id)
                    core.own_seq_ids.discard(item.seq_id)
                    first, start = first + 1, 0
            yield None
        is_finite = pooled.isfinite().all(1).tolist()
        if not all(is_finite):
            raise PagedError(f"prompts[{is_finite.index(False)}]: the model's hidden states are not finite")
        yield functional.normalize(pooled, dim=-1) if normalize else pooled
    finally:
        for index in range(first, len(prompts)):
            executor.release_cache(f"{name}/{index}")
            core.own_seq_ids.discard(f"{name}/{index}")
