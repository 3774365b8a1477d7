"""An executor with the five required calls alone."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import torch

from paged.batch import DecodeInput, DecodeOutput, PrefillInput, PrefillOutput
from paged.executors.model_executor import ModelExecutor
from paged.executors.types import ExecutorCapabilities, ExecutorStatus, ModelInfo
from paged.seq_id import SeqId
from tests.executors.parrot import INFO, Parrot, other_executor, parrot_logits


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
