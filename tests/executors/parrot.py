"""Models of others, which keep their own KV, and whose logits follow from the tokens."""

from collections.abc import Sequence

import torch

from paged.errors import UnsupportedError
from paged.executors.llm_executor import LlmExecutor
from paged.executors.types import ModelInfo
from paged.models.base import DecoderOnlyLLM, LlmRuntimeConfig
from paged.seq_id import SeqId
from paged.step.batch import UnifiedBatchItem

VOCAB = 61
INFO = ModelInfo(
    model_id="parrot", model_type="parrot", num_parameters=10, hidden_size=4, num_layers=1, num_heads=1, num_kv_heads=1,
    head_dim=4, vocab_size=VOCAB, max_sequence_length=20, dtype=torch.float32, device=torch.device("cpu"),
)  # fmt: skip


class Parrot(DecoderOnlyLLM):
    """Another's model: keeps its tokens itself, and its logits say how many it has seen and what they add up to."""

    config = LlmRuntimeConfig(hidden_size=4, num_layers=1, num_kv_heads=1, head_dim=4, vocab_size=VOCAB, max_seq_len=20)

    def __init__(self) -> None:
        self.caches: dict[SeqId, list[int]] = {}
        self.calls: list[str] = []

    def prefill(self, cache_id: SeqId, tokens: Sequence[int]) -> torch.Tensor:
        self.calls.append(f"prefill {cache_id} {len(tokens)}")
        return self._run(cache_id, tokens)

    def decode(self, cache_id: SeqId, token: int, pos: int) -> torch.Tensor:
        assert len(self.caches[cache_id]) == pos
        return self._run(cache_id, [token])

    def decode_batch(self, items: Sequence[tuple[SeqId, int, int]]) -> torch.Tensor:
        self.calls.append(f"decode_batch {[cache_id for cache_id, _, _ in items]}")
        return super().decode_batch(items)

    def release(self, cache_id: SeqId) -> None:
        self.caches.pop(cache_id, None)

    def truncate_kv(self, cache_id: SeqId, new_len: int) -> None:
        del self.caches[cache_id][new_len:]

    def _run(self, cache_id: SeqId, tokens: Sequence[int]) -> torch.Tensor:
        seen = self.caches.setdefault(cache_id, [])
        seen += tokens
        if 60 in tokens:
            raise RuntimeError("60 breaks it")
        return parrot_logits(seen)


class UnsupportedParrot(Parrot):
    def unified_forward(self, items: Sequence[UnifiedBatchItem]) -> list[torch.Tensor | None]:
        self.calls.append("unified_forward")
        raise UnsupportedError("one at a time")


class UnifiedParrot(Parrot):
    """Has a unified forward of its own; `answer` changes what it returns."""

    def answer(self, rows: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        return rows

    def unified_forward(self, items: Sequence[UnifiedBatchItem]) -> list[torch.Tensor | None]:
        self.calls.append("unified_forward")
        return self.answer([self._run(item.seq_id, item.q_tokens) if item.is_final_chunk else None for item in items])


def parrot_logits(tokens: Sequence[int]) -> torch.Tensor:
    logits = torch.zeros(VOCAB)
    logits[sum(tokens) % VOCAB] = len(tokens)
    return logits


def other_executor(model: Parrot) -> LlmExecutor:
    return LlmExecutor(model, INFO)
