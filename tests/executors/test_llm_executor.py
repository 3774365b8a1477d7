"""LlmExecutor: a small Llama against transformers, and models of others that run one sequence at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paged.batch import GreedyArgmax, UnifiedBatchItem
from paged.errors import (
    CheckpointError,
    InvalidInputError,
    OutOfBlocksError,
    PagedError,
    SequenceTooLongError,
    StaleHandleError,
    UnsupportedError,
)
from paged.executors.llm_executor import LlmExecutor
from paged.executors.model_executor import ExecutorShutDownError
from paged.executors.types import ModelInfo
from paged.models.base import DecoderOnlyLLM, LlmRuntimeConfig
from paged.seq_id import SeqId
from tests.executors.oracle import batch, prompt, step
from tests.tolerance import assert_close

VOCAB = 61


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with a random Llama, and the model it came from."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture
def llama(checkpoint: tuple[Path, Any], device: torch.device) -> LlmExecutor:
    return LlmExecutor.from_pretrained(checkpoint[0], device=device, dtype=torch.float32, num_blocks=24, block_size=8)


@pytest.fixture
def want(checkpoint: tuple[Path, Any]) -> Any:
    """Logits of transformers after the last of some tokens."""

    def logits(tokens: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            row: torch.Tensor = checkpoint[1](torch.tensor([list(tokens)])).logits[0, -1]
        return row

    return logits


TOKENS = [(5 * i * i + 3 * i + 1) % VOCAB for i in range(40)]


def test_prefill_decode_verify_truncate(llama: LlmExecutor, want: Any) -> None:
    out = llama.prefill(prompt(TOKENS[:9], TOKENS[9:18]))
    assert out.logits.shape == (2, 1, VOCAB)
    for row, logits in enumerate(out.last_token_logits()):
        assert_close(logits, want(TOKENS[9 * row : 9 * row + 9]))
    handle = out.kv_caches[0]
    assert_close(llama.decode(step(handle, TOKENS[9])).logits[0], want(TOKENS[:10]))
    verified = llama.forward_verify([step(handle, token) for token in TOKENS[10:14]])
    for length, one in enumerate(verified, start=11):
        assert_close(one.logits[0], want(TOKENS[:length]))
    llama.truncate_kv_for_cache_id(handle.cache_id, 6)
    assert_close(llama.decode(step(handle, 7)).logits[0], want([*TOKENS[:6], 7]))
    llama.truncate_kv(handle, 3)
    out = llama.prefill(prompt(TOKENS[20:31], kv_caches=[handle]))
    assert_close(out.last_token_logits()[0], want([*TOKENS[:3], *TOKENS[20:31]]))


def test_mixed_batch_in_one_forward(llama: LlmExecutor, want: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert llama.supports_native_unified_decode()
    llama.unified_decode(
        batch(UnifiedBatchItem("a", TOKENS[:8]), UnifiedBatchItem("b", TOKENS[:5], is_final_chunk=False))
    )
    calls = count_calls(monkeypatch, llama.model, "unified_forward")
    a, b, none, token = llama.unified_decode(
        batch(
            UnifiedBatchItem("a", [TOKENS[8]], pos_offset=8),
            UnifiedBatchItem("b", TOKENS[5:17], pos_offset=5),
            UnifiedBatchItem("c", TOKENS[:3], is_final_chunk=False),
            UnifiedBatchItem("d", TOKENS[:4], logits_policy=GreedyArgmax()),
        )
    )
    assert calls == ["unified_forward"]
    assert none is None
    assert a is not None
    assert b is not None
    assert token is not None
    assert_close(a, want(TOKENS[:9]))
    assert_close(b, want(TOKENS[:17]))
    assert int(token) == int(want(TOKENS[:4]).argmax())
    status = llama.status()
    assert (status.prefill_count, status.decode_count, status.prefill_tokens) == (3, 1, 8 + 5 + 12 + 3 + 4)


def test_batch_decode_is_one_forward(llama: LlmExecutor, want: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_calls(monkeypatch, llama.model, "unified_forward")
    outs = llama.batch_prefill([prompt(TOKENS[: 3 + i]) for i in range(3)])
    decoded = llama.batch_decode([step(out.kv_cache, 11) for out in outs])
    assert calls == ["unified_forward"] * 2
    for i, out in enumerate(decoded):
        assert_close(out.logits[0], want([*TOKENS[: 3 + i], 11]))


@pytest.mark.parametrize("chunk", [4, 64])
def test_chunk_sizes_give_the_same_text(chunk: int, llama: LlmExecutor, checkpoint: tuple[Path, Any]) -> None:
    for start in range(0, 18, chunk):
        part = TOKENS[:18][start : start + chunk]
        item = UnifiedBatchItem(
            "r", part, pos_offset=start, is_final_chunk=start + chunk >= 18, logits_policy=GreedyArgmax()
        )
        [token] = llama.unified_decode(batch(item))
    tokens = TOKENS[:18]
    for _ in range(6):
        assert token is not None
        tokens.append(int(token))
        item = UnifiedBatchItem("r", tokens[-1:], pos_offset=len(tokens) - 1, logits_policy=GreedyArgmax())
        [token] = llama.unified_decode(batch(item))
    model = checkpoint[1]
    reference = model.generate(
        torch.tensor([TOKENS[:18]]), max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert tokens == reference[0].tolist()
    assert (llama.prefill_count, llama.decode_count) == (1, 6)


def test_failures_leave_the_cache_alone(llama: LlmExecutor, want: Any) -> None:
    llama.unified_decode(batch(UnifiedBatchItem("live", TOKENS[:9])))
    assert llama.kv_manager is not None
    stats = llama.kv_manager.stats()
    fine = UnifiedBatchItem("fine", [1, 2])
    for error, items in (
        (InvalidInputError, (fine, UnifiedBatchItem("x", [VOCAB]))),
        (InvalidInputError, (fine, UnifiedBatchItem("live", [1], pos_offset=8))),
        (SequenceTooLongError, (fine, UnifiedBatchItem("x", [1] * 65))),
        (
            OutOfBlocksError,
            (UnifiedBatchItem("live", [1], pos_offset=9), *(UnifiedBatchItem(i, [1] * 60) for i in range(3))),
        ),
        (PagedError, (fine, UnifiedBatchItem("live", [1], pos_offset=9, metadata={"lora_adapter": "unknown"}))),
    ):
        with pytest.raises(error):
            llama.unified_decode(batch(*items))
        assert replace(llama.kv_manager.stats(), allocation_failures=0) == stats
        llama.kv_manager.check_integrity()
    [logits] = llama.unified_decode(batch(UnifiedBatchItem("live", [TOKENS[9]], pos_offset=9)))
    assert logits is not None
    assert_close(logits, want(TOKENS[:10]))


def test_it_describes_the_model(llama: LlmExecutor, checkpoint: tuple[Path, Any]) -> None:
    folder, model = checkpoint
    info, capabilities = llama.info(), llama.capabilities()
    assert (info.model_id, info.model_type, info.num_heads, info.num_kv_heads) == (folder.name, "llama", 4, 2)
    assert info.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert info.max_sequence_length == capabilities.max_sequence_length == 64
    assert llama.kv_capacity() == 24 * 8
    assert capabilities.supports_truncate
    assert llama.status().memory_bytes == 4 * info.num_parameters
    llama.warmup()
    assert llama.status().prefill_count == 0
    handle = llama.prefill(prompt([1])).kv_cache
    assert llama.status().memory_bytes == 4 * info.num_parameters + llama.cache_metrics_snapshot()["bytes_per_block"]  # type: ignore[index]
    llama.shutdown()
    assert not handle.is_valid
    with pytest.raises(ExecutorShutDownError):
        llama.prefill(prompt([1]))


def test_from_pretrained_limits(checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    short = LlmExecutor.from_pretrained(str(checkpoint[0]), device="cpu", max_seq_len=8, num_blocks=4)
    short.prefill(prompt([1] * 8))
    with pytest.raises(SequenceTooLongError):
        short.prefill(prompt([1] * 9))
    with pytest.raises(CheckpointError):
        LlmExecutor.from_pretrained(tmp_path)


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
    config = model.config
    info = ModelInfo(
        model_id="parrot",
        model_type="parrot",
        num_parameters=10,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        num_heads=1,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_seq_len,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    return LlmExecutor(model, info)


def count_calls(monkeypatch: pytest.MonkeyPatch, target: Any, name: str) -> list[str]:
    """The list grows by `name` with every call."""
    method, calls = getattr(target, name), []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return method(*args, **kwargs)

    monkeypatch.setattr(target, name, counted)
    return calls


def test_unsupported_is_tried_once_then_taken_apart() -> None:
    model = UnsupportedParrot()
    executor = other_executor(model)
    assert executor.supports_native_unified_decode()
    first = executor.unified_decode(
        batch(
            UnifiedBatchItem("a", [1, 2]),
            UnifiedBatchItem("b", [3]),
            UnifiedBatchItem("c", [4, 5], is_final_chunk=False),
            UnifiedBatchItem("d", [6], is_final_chunk=False),
        )
    )
    assert model.calls == ["unified_forward", "prefill a 2", "prefill b 1", "prefill c 2", "prefill d 1"]
    assert not executor.supports_native_unified_decode()
    assert not executor.capabilities().supports_native_unified_decode
    assert [row is None for row in first] == [False, False, True, True]

    model.calls.clear()
    rows = executor.unified_decode(
        batch(
            UnifiedBatchItem("a", [7], pos_offset=2),
            UnifiedBatchItem("c", [8, 9], pos_offset=2),
            UnifiedBatchItem("d", [1], pos_offset=1, is_final_chunk=False),
            UnifiedBatchItem("b", [2], pos_offset=1, logits_policy=GreedyArgmax()),
        )
    )
    assert model.calls == ["decode_batch ['a', 'b']", "prefill c 2", "prefill d 1"]
    assert rows[0] is not None
    assert torch.equal(rows[0], parrot_logits([1, 2, 7]))
    assert rows[1] is not None
    assert torch.equal(rows[1], parrot_logits([4, 5, 8, 9]))
    assert rows[2] is None
    assert rows[3] is not None
    assert int(rows[3]) == 5
    assert executor.status().memory_bytes == (10 + 2 * 4 * (3 + 2 + 4 + 2)) * 4


@pytest.mark.parametrize("model_class", [Parrot, UnsupportedParrot, UnifiedParrot])
def test_all_calls_of_anothers_model(model_class: type[Parrot]) -> None:
    model = model_class()
    executor = other_executor(model)
    out = executor.prefill(prompt([1, 2, 3], [4, 5, 6]))
    assert torch.equal(out.last_token_logits()[1], parrot_logits([4, 5, 6]))
    left, right = out.kv_caches
    decoded = executor.batch_decode([step(left, 9), step(right, 9)])
    assert torch.equal(decoded[0].logits[0], parrot_logits([1, 2, 3, 9]))
    verified = executor.forward_verify([step(left, 1), step(left, 2, logits_policy=GreedyArgmax())])
    assert torch.equal(verified[0].logits[0], parrot_logits([1, 2, 3, 9, 1]))
    assert verified[1].logits.tolist() == [18]
    executor.truncate_kv(left, 2)
    assert left.num_tokens == 2
    with pytest.raises(InvalidInputError, match="new_len"):
        executor.truncate_kv_for_cache_id(left.cache_id, 3)
    assert torch.equal(executor.decode(step(left, 7)).logits[0], parrot_logits([1, 2, 7]))
    executor.release_cache(right.cache_id)
    assert list(model.caches) == [left.cache_id]
    with pytest.raises(StaleHandleError):
        executor.decode(step(right, 1))
    with pytest.raises(InvalidInputError, match="no cache"):
        executor.truncate_kv_for_cache_id(right.cache_id, 0)


@pytest.mark.parametrize("model_class", [Parrot, UnifiedParrot])
def test_failures_of_anothers_model(model_class: type[Parrot]) -> None:
    model = model_class()
    executor = other_executor(model)
    executor.unified_decode(batch(UnifiedBatchItem("a", [1, 2])))
    bad_batches = (
        (
            RuntimeError,
            (UnifiedBatchItem("a", [3], pos_offset=2), UnifiedBatchItem("n", [4]), UnifiedBatchItem("m", [60])),
        ),
        (InvalidInputError, (UnifiedBatchItem("n", [4]), UnifiedBatchItem("a", [3], pos_offset=1))),
        (SequenceTooLongError, (UnifiedBatchItem("n", [4]), UnifiedBatchItem("a", [3] * 19, pos_offset=2))),
        (UnsupportedError, (UnifiedBatchItem("n", [4], metadata={"lora_adapter": "x"}),)),
    )
    for count, (error, items) in enumerate(bad_batches, start=1):
        with pytest.raises(error):
            executor.unified_decode(batch(*items))
        assert model.caches == {"a": [1, 2]}
        assert executor.status().failed_calls == count
    assert executor.supports_native_unified_decode() == (model_class is UnifiedParrot)
    [row] = executor.unified_decode(batch(UnifiedBatchItem("a", [3] * 18, pos_offset=2)))
    assert row is not None
    assert torch.equal(row, parrot_logits([1, 2] + [3] * 18))


@pytest.mark.parametrize("answer", [lambda rows: rows[:-1], lambda rows: [None, *rows[1:]], lambda rows: []])
def test_too_few_results(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = UnifiedParrot()
    executor = other_executor(model)
    items = batch(UnifiedBatchItem("a", [1, 2]), UnifiedBatchItem("b", [3]))
    with monkeypatch.context() as patch:
        patch.setattr(model, "answer", answer)
        with pytest.raises(PagedError, match="results for 2 items"):
            executor.unified_decode(items)
    assert model.caches == {}
    assert executor.status().prefill_count == 0
    assert len(executor.unified_decode(items)) == 2


def test_adapters_reach_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Parrot()
    executor = other_executor(model)
    chosen: list[tuple[SeqId, str | None]] = []
    monkeypatch.setattr(model, "set_lora_adapter_for_cache", lambda *choice: chosen.append(choice))
    items = batch(UnifiedBatchItem("a", [1], metadata={"lora_adapter": "french"}), UnifiedBatchItem("b", [1]))
    executor.unified_decode(items)
    assert chosen == [("a", "french")]
