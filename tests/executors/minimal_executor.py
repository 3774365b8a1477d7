"""Executors of others: with the five required calls alone, and with a cache manager."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from paged.executors.model_executor import ModelExecutor
from paged.executors.paged_attention_executor import PagedAttentionExecutor
from paged.executors.types import ExecutorCapabilities, ExecutorStatus, ModelInfo
from paged.seq_id import SeqId
from paged.step.batch import DecodeInput, DecodeOutput, PrefillInput, PrefillOutput, UnifiedBatch
from tests.executors.parrot import INFO, Parrot, other_executor, parrot_logits


class OtherExecutor(ModelExecutor):
    """Another's executor with a cache manager: the oracle's, with `change` between it and who asks."""

    def __init__(self, oracle: PagedAttentionExecutor, change: Callable[[Any], Any] = lambda rows: rows) -> None:
        self._oracle, self._change = oracle, change
        self.kv_manager = oracle.kv_manager

    def info(self) -> ModelInfo:
        return self._oracle.info()

    def capabilities(self) -> ExecutorCapabilities:
        return self._oracle.capabilities()

    def status(self) -> ExecutorStatus:
        return self._oracle.status()

    def prefill(self, inputs: PrefillInput) -> PrefillOutput:
        return self._oracle.prefill(inputs)

    def decode(self, inputs: DecodeInput) -> DecodeOutput:
        return self._oracle.decode(inputs)

    def truncate_kv(self, kv_cache: Any, new_len: int) -> None:
        self._oracle.truncate_kv(kv_cache, new_len)

    def release_cache(self, seq_id: SeqId) -> None:
        self._oracle.release_cache(seq_id)

    def supports_native_unified_decode(self) -> bool:
        return True

    def unified_decode(self, batch: UnifiedBatch) -> list[torch.Tensor | None]:
        return self._change(self._oracle.unified_decode(batch))


class MinimalExecutor(ModelExecutor):
    """Answers as the parrot does, one sequence at a time."""

    def __init__(self) -> None:
        self.caches: dict[SeqId, list[int]] = {}
        self._ids = itertools.count()

    def info(self) -> ModelInfo:
        return INFO

    def prefill(self, inputs: PrefillInput) -> PrefillOutput:
        handle = SimpleNamespace(cache_id=next(self._ids)) if inputs.kv_caches is None else inputs.kv_caches[0]
        logits = self._run(handle.cache_id, inputs.input_ids[0].tolist())
        return PrefillOutput(logits[None, None], [handle])

    def decode(self, inputs: DecodeInput) -> DecodeOutput:
        logits = self._run(inputs.kv_cache.cache_id, inputs.input_ids[0].tolist())
        return DecodeOutput(logits[None], inputs.kv_cache)

    def capabilities(self) -> ExecutorCapabilities:
        return replace(other_executor(Parrot()).capabilities(), max_batch_size=2, supports_truncate=False)

    def status(self) -> ExecutorStatus:
        raise NotImplementedError

    def release_cache(self, seq_id: SeqId) -> None:
        self.caches.pop(seq_id, None)

    def _run(self, cache_id: SeqId, tokens: list[int]) -> torch.Tensor:
        if 60 in tokens:
            raise RuntimeError("60 breaks it")
        seen = self.caches.setdefault(cache_id, [])
        seen += tokens
        return parrot_logits(seen)
