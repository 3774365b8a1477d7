"""What a model gets that implements the four required methods alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from paged.batch import UnifiedBatchItem
from paged.errors import InvalidInputError, UnsupportedError
from paged.models.base import DecoderOnlyLLM, LlmRuntimeConfig
from paged.seq_id import SeqId


class Echo(DecoderOnlyLLM):
    """Logits hold the token and its position, at 0 and 1; it knows no lengths."""

    @property
    def config(self) -> LlmRuntimeConfig:
        return LlmRuntimeConfig(hidden_size=4, num_layers=1, num_kv_heads=1, head_dim=4, vocab_size=3, max_seq_len=50)

    def prefill(self, cache_id: SeqId, tokens: Sequence[int]) -> torch.Tensor:
        return self.decode(cache_id, tokens[-1], len(tokens) - 1)

    def decode(self, cache_id: SeqId, token: int, pos: int) -> torch.Tensor:
        return torch.tensor([float(token), float(pos), 0.0])

    def release(self, cache_id: SeqId) -> None:
        pass


def test_required_methods() -> None:
    assert DecoderOnlyLLM.__abstractmethods__ == {"config", "prefill", "decode", "release"}


def test_fifteen_methods() -> None:
    assert len([name for name in vars(DecoderOnlyLLM) if not name.startswith("_")]) == 15


def test_batches_are_loops_over_decode() -> None:
    items = [("a", 2, 7), ("b", 1, 0)]
    expected = torch.tensor([[2.0, 7.0, 0.0], [1.0, 0.0, 0.0]])
    assert torch.equal(Echo().decode_batch(items), expected)
    assert torch.equal(Echo().decode_batch_with_full_logits(items), expected)
    assert Echo().decode_batch([]).shape == (0, 3)


def test_verify_needs_to_be_told_the_length() -> None:
    rows = Echo().forward_verify("a", [2, 1], start_pos=5)
    assert torch.equal(rows, torch.tensor([[2.0, 5.0, 0.0], [1.0, 6.0, 0.0]]))
    with pytest.raises(UnsupportedError, match="Echo does not keep the length of cache 'a'"):
        Echo().forward_verify("a", [2])
    with pytest.raises(InvalidInputError, match="tokens: empty"):
        Echo().forward_verify("a", [], start_pos=5)


def test_defaults_of_the_rest() -> None:
    model = Echo()
    assert model.kv_capacity() == 50
    assert model.cache_metrics_snapshot() is None
    assert model.lora_metrics_snapshot() is None
    model.prepare()
    model.reset()
    model.set_lora_adapter_for_cache("a", None)
    for run in (
        lambda: model.set_lora_adapter_for_cache("a", "poetry"),
        lambda: model.truncate_kv("a", 0),
        lambda: model.unified_forward([UnifiedBatchItem("a", [1])]),
    ):
        with pytest.raises(UnsupportedError, match="Echo"):
            run()
