"""What a model gets that implements the four required methods alone."""

from collections.abc import Sequence

import pytest
import torch

from paged.errors import InvalidInputError, UnsupportedError
from paged.models.base import DecoderOnlyLLM, LlmRuntimeConfig
from paged.seq_id import SeqId
from paged.step.batch import UnifiedBatchItem


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


def test_batches_are_loops_over_decode() -> None:
    items = [("a", 2, 7), ("b", 1, 0)]
    expected = torch.tensor([[2.0, 7.0, 0.0], [1.0, 0.0, 0.0]])
    assert torch.equal(Echo().decode_batch(items), expected)
    assert torch.equal(Echo().decode_batch_with_full_logits(items), expected)


def test_verify_goes_on_from_the_end() -> None:
    model = Echo()
    assert torch.equal(model.forward_verify("a", [2, 1]), torch.tensor([[2.0, 0.0, 0.0], [1.0, 1.0, 0.0]]))
    model.prefill("a", [0, 0, 0])
    model.prefill("b", [1])
    model.decode_batch([("a", 1, 5), ("b", 1, 1)])
    assert torch.equal(model.forward_verify("a", [2, 1]), torch.tensor([[2.0, 6.0, 0.0], [1.0, 7.0, 0.0]]))
    assert model.forward_verify("b", [2])[0, 1] == 2.0
    model.release("a")
    assert model.forward_verify("a", [2])[0, 1] == 0.0
    assert model.forward_verify("a", [2, 1], start_pos=5)[:, 1].tolist() == [5.0, 6.0]
    for start_pos in (None, 5):
        with pytest.raises(InvalidInputError, match="tokens: empty"):
            model.forward_verify("a", [], start_pos=start_pos)


class Cached(Echo):
    """Keeps its tokens, and can go back; its prefill is that of its base class and more."""

    def __init__(self) -> None:
        self.tokens: dict[SeqId, list[int]] = {}

    def prefill(self, cache_id: SeqId, tokens: Sequence[int]) -> torch.Tensor:
        for token in tokens[:-1]:
            self.decode(cache_id, token, len(self.tokens.get(cache_id, [])))
        return self.decode(cache_id, tokens[-1], len(self.tokens.get(cache_id, [])))

    def decode(self, cache_id: SeqId, token: int, pos: int) -> torch.Tensor:
        if token == 2:
            raise RuntimeError("a token it cannot run")
        kept = self.tokens.setdefault(cache_id, [])
        assert pos == len(kept)
        kept.append(token)
        return super().decode(cache_id, token, pos)

    def truncate_kv(self, cache_id: SeqId, new_len: int) -> None:
        del self.tokens[cache_id][new_len:]

    def reset(self) -> None:
        self.tokens.clear()


def test_lengths_are_counted_once_and_only_of_what_ran() -> None:
    model, other = Cached(), Cached()
    model.prefill("a", [0, 1, 0])
    other.prefill("a", [1])
    with pytest.raises(RuntimeError):
        model.decode("a", 2, 3)
    assert model.forward_verify("a", [1, 0])[:, 1].tolist() == [3.0, 4.0]
    model.truncate_kv("a", 2)
    assert model.forward_verify(cache_id="a", tokens=[1])[:, 1].tolist() == [2.0]
    model.reset()
    assert model.forward_verify("a", [1])[:, 1].tolist() == [0.0]
    assert other.forward_verify("a", [1])[:, 1].tolist() == [1.0]


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
