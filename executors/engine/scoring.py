"""Log probabilities of completions with the bits of the engine that would sample them, in one forward each."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from paged.batch import UnifiedBatch, UnifiedBatchItem, VerifyLogits
from paged.cache.manager import PagedKvCacheManager
from paged.executors.model_executor import ModelExecutor
from paged.executors.requests.request import whole_chunks
from paged.executors.sampling.logprobs import own_and_best
from paged.forward_step import prepare
from paged.kernels.sampling.sample_tokens import filter_logits
from paged.metadata import HostMetadata


def completion_logprobs(
    executor: ModelExecutor,
    manager: PagedKvCacheManager,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    temperature: float,
) -> torch.Tensor:
    """Return the log probability of each token of a completion, float32 [len(completion_ids)].

    The prompt runs in fixed chunks, as under `EngineConfig.batch_invariant`. The completion's tokens run together, each
    as a decode step of its own over the keys up to it. The executor has invariant rows.
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


def _run(executor: ModelExecutor, manager: PagedKvCacheManager, item: UnifiedBatchItem) -> torch.Tensor:
    """Run an item as an invariant step does, and publish nothing; return its logits [num_rows, V]."""
    batch = UnifiedBatch([item], is_stacked=True)
    prepare(manager, batch)
    step = batch.prepared
    assert step is not None
    step.is_invariant, step.published = True, None
    if isinstance(item.logits_policy, VerifyLogits):
        step.host = _as_decodes(step.host)
    answers = executor.unified_decode(batch)
    if isinstance(answers, torch.Tensor):
        return answers
    (rows,) = answers
    return torch.empty(0) if rows is None else torch.atleast_2d(rows)


def _as_decodes(host: HostMetadata) -> HostMetadata:
    """Return the metadata of a sequence's tokens as sequences of one query each, over the same blocks."""
    num_tokens = len(host.positions)
    return replace(
        host,
        seq_lens=(host.positions + 1).astype(np.int32),
        cu_seqlens_q=np.arange(num_tokens + 1, dtype=np.int32),
        block_tables=host.block_tables.repeat(num_tokens, axis=1),
        max_seqlen_q=1,
    )
