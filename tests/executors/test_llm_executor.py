"""LlmExecutor: a small Llama against transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paged.batch import GreedyArgmax, UnifiedBatchItem
from paged.errors import CheckpointError, InvalidInputError, OutOfBlocksError, PagedError, SequenceTooLongError
from paged.executors import llm_executor
from paged.executors.llm_executor import LlmExecutor
from paged.executors.model_executor import ExecutorShutDownError
from paged.models.paged_lm import PagedCausalLM
from paged.seq_id import SeqId
from tests.executors.oracle import batch, prompt, step
from tests.executors.parrot import VOCAB, Parrot, other_executor
from tests.executors.test_model_calls import count_calls
from tests.tolerance import assert_close


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


def test_packs_what_is_worth_it_as_it_loads(checkpoint: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[PagedCausalLM] = []
    monkeypatch.setattr(PagedCausalLM, "pack", lambda model: packed.append(model))
    size = LlmExecutor.from_pretrained(checkpoint[0], device="cpu").capabilities().memory_requirements.weight_bytes
    assert packed == []
    for threshold, is_packed in ((size + 1, False), (size, True)):
        monkeypatch.setattr(llm_executor, "_PACKED_BYTES", threshold)
        executor = LlmExecutor.from_pretrained(checkpoint[0], device="cpu")
        assert packed == [executor.model] * is_packed


def test_adapters_reach_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Parrot()
    executor = other_executor(model)
    chosen: list[tuple[SeqId, str | None]] = []
    monkeypatch.setattr(model, "set_lora_adapter_for_cache", lambda *choice: chosen.append(choice))
    items = batch(UnifiedBatchItem("a", [1], metadata={"lora_adapter": "french"}), UnifiedBatchItem("b", [1]))
    executor.unified_decode(items)
    assert chosen == [("a", "french")]
