"""An executor with the five required calls alone."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from paged.batch import DecodeInput, DecodeOutput, PrefillInput, PrefillOutput
from paged.executors.model_executor import ModelExecutor
from paged.executors.types import ExecutorCapabilities, ExecutorStatus, MemoryRequirements, ModelInfo
from paged.seq_id import SeqId
from tests.executors.parrot import VOCAB, parrot_logits


@dataclass
class Handle:
    """What this executor calls a sequence."""

    cache_id: int


class MinimalExecutor(ModelExecutor):
    """Answers as the parrot does, one sequence at a time."""

    def __init__(self) -> None:
        self.caches: dict[SeqId, list[int]] = {}
        self._ids = itertools.count()

    def info(self) -> ModelInfo:
        return ModelInfo(
            model_id="minimal",
            model_type="parrot",
            num_parameters=0,
            hidden_size=1,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=1,
            vocab_size=VOCAB,
            max_sequence_length=20,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )

    def prefill(self, inputs: PrefillInput) -> PrefillOutput:
        handle = Handle(next(self._ids)) if inputs.kv_caches is None else inputs.kv_caches[0]
        logits = self._run(handle.cache_id, inputs.input_ids[0].tolist())
        return PrefillOutput(logits[None, None], [handle])  # type: ignore[list-item]

    def decode(self, inputs: DecodeInput) -> DecodeOutput:
        logits = self._run(inputs.kv_cache.cache_id, inputs.input_ids[0].tolist())  # type: ignore[union-attr]
        return DecodeOutput(logits[None], inputs.kv_cache)

    def capabilities(self) -> ExecutorCapabilities:
        return ExecutorCapabilities(
            max_batch_size=2,
            max_sequence_length=20,
            supports_native_unified_decode=False,
            supports_chunked_prefill=True,
            supports_truncate=False,
            supports_prefix_cache=False,
            supports_lora=False,
            memory_requirements=MemoryRequirements(
                weight_bytes=0, kv_bytes_per_token_per_layer=0, activation_bytes_per_token=0
            ),
        )

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
