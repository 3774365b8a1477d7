"""Embeddings of prompts and log probabilities of completions, in separate forwards."""

from __future__ import annotations

import secrets
from collections.abc import Generator, Sequence
from typing import Literal

import numpy as np
import torch
from torch.nn import functional

from paged.cache.manager import PagedKvCacheManager
from paged.errors import OutOfBlocksError, PagedError
from paged.executors.engine.core import EngineCore
from paged.executors.requests.request import whole_chunks
from paged.executors.sampling.logprobs import own_and_best
from paged.executors.unified_executor import UnifiedExecutor
from paged.kernels.sampling.sample_tokens import filter_logits
from paged.step.batch import FullLogits, UnifiedBatch, UnifiedBatchItem, VerifyLogits
from paged.step.batch_step import step_of
from paged.step.step import Step

Pooling = Literal["last", "mean"]


def embed_prompts(
    core: EngineCore, prompts: Sequence[Sequence[int]], *, is_mean: bool, normalize: bool
) -> Generator[torch.Tensor | None]:
    """Yield None after every forward, then the pooled hidden state of each prompt, [n, hidden_size]."""
    executor, info, name = core.executor, core.executor.info(), f"embedding-{secrets.token_hex(8)}"
    pooled = torch.zeros(len(prompts), info.hidden_size, device=info.device)
    policy = VerifyLogits() if is_mean else FullLogits()
    budget = core.config.token_budget
    first = start = 0  # index of the first unfinished prompt, and number of its tokens that have run
    generation = core.generation
    try:
        while first < len(prompts):
            if generation != core.generation:  # start again, so that all rows come from the same weights
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
            # Only a batch of one prompt preempts requests; a larger batch is halved first.
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
                if answer is not None and is_mean:
                    pooled[first] += answer.sum(0) / len(prompts[first])
                elif answer is not None:
                    pooled[first] += answer
                if start == len(prompts[first]):
                    executor.release_cache(item.seq_id)
                    core.own_seq_ids.discard(item.seq_id)
                    first, start = first + 1, 0
            yield None
        is_finite = pooled.isfinite().all(1).tolist()
        if not all(is_finite):
            raise PagedError(f"prompts[{is_finite.index(False)}]: the model's hidden states are not finite")
        if normalize:
            pooled = functional.normalize(pooled, dim=-1)
        yield pooled
    finally:
        for index in range(first, len(prompts)):
            executor.release_cache(f"{name}/{index}")
            core.own_seq_ids.discard(f"{name}/{index}")


def completion_logprobs(
    executor: UnifiedExecutor,
    manager: PagedKvCacheManager,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    temperature: float,
) -> torch.Tensor:
    """Return the log probability of each token of a completion, float32 [len(completion_ids)].

    The prompt runs in fixed chunks, as under `EngineConfig.batch_invariant`. The completion's tokens run in one
    forward, each as a decode step over the keys up to it. The executor must have invariant rows.
    """
    seq_id, num_prompt = f"score-{secrets.token_hex(8)}", len(prompt_ids)
    rows: list[torch.Tensor] = []
    try:
        for start, end in whole_chunks(num_prompt, None, is_fixed=True):
            chunk = UnifiedBatchItem(seq_id, prompt_ids[start:end], None, start, is_final_chunk=end == num_prompt)
            logits = _run(executor, manager, chunk)
        rows.append(logits)
        if len(completion_ids) > 1:
            policy = VerifyLogits()
            rows.append(
                _run(
                    executor,
                    manager,
                    UnifiedBatchItem(seq_id, completion_ids[:-1], None, num_prompt, logits_policy=policy),
                )
            )
    finally:
        executor.release_cache(seq_id)
    logits = torch.cat(rows)  # [len(completion_ids), V]
    scaled = filter_logits(logits, torch.full((len(logits),), temperature, device=logits.device))
    logprobs, _, _ = own_and_best(scaled, torch.tensor(completion_ids, device=logits.device), 1)
    return logprobs[:, 0]


def _run(executor: UnifiedExecutor, manager: PagedKvCacheManager, item: UnifiedBatchItem) -> torch.Tensor:
    """Run an item like an invariant step without publishing blocks; return its logits [num_rows, V]."""
    step = step_of(manager, [item])
    step.is_invariant, step.published = True, None
    if isinstance(item.logits_policy, VerifyLogits):
        _as_decodes(step)
    logits = executor.run(step)
    assert isinstance(logits, torch.Tensor)
    return logits


def _as_decodes(step: Step) -> None:
    """Make each token of a step of one sequence a sequence with one query, over the same blocks."""
    num_tokens = len(step.positions)
    step.seq_lens = (step.positions + 1).astype(np.int32)
    step.cu_seqlens_q = np.arange(num_tokens + 1, dtype=np.int32)
    step.block_tables = step.block_tables.repeat(num_tokens, axis=1)
    step.max_seqlen_q = 1
    step.only_decodes = True
