"""LlmExecutor: a small Llama against transformers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from paged.errors import CheckpointError, SequenceTooLongError
from paged.executors import llm_executor
from paged.executors.llm_executor import LlmExecutor
from paged.executors.model_executor import ExecutorShutDownError
from paged.models.paged_lm import PagedCausalLM
from paged.seq_id import SeqId
from paged.step.batch import GreedyArgmax, VerifyLogits
from tests.executors.oracle import chunk, forward, item, prompt, step
from tests.executors.parrot import VOCAB, Parrot, other_executor
from tests.models.families import assert_same_logits

Want = Callable[[Sequence[int]], torch.Tensor]
TOKENS = [(5 * i * i + 3 * i + 1) % VOCAB for i in range(40)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with a random Llama, and the model it came from."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, initializer_range=0.2)).eval()
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture
def llama(checkpoint: tuple[Path, Any], device: torch.device) -> LlmExecutor:
    return LlmExecutor.from_pretrained(checkpoint[0], device=device, dtype=torch.float32, num_blocks=24, block_size=8)


@pytest.fixture
def want(checkpoint: tuple[Path, Any]) -> Want:
    """Logits of transformers after the last of some tokens."""

    @torch.no_grad()
    def logits(tokens: Sequence[int]) -> torch.Tensor:
        row: torch.Tensor = checkpoint[1](torch.tensor([list(tokens)])).logits[0, -1]
        return row

    return logits


def test_prefill_decode_truncate(llama: LlmExecutor, want: Want) -> None:
    out = llama.prefill(prompt(TOKENS[:9], TOKENS[9:18]))
    assert out.logits.shape == (2, 1, VOCAB)
    for row, logits in enumerate(out.last_token_logits()):
        assert_same_logits(logits, want(TOKENS[9 * row : 9 * row + 9]))
    handle = out.kv_caches[0]
    llama.truncate_kv_for_cache_id(handle.cache_id, 6)
    assert_same_logits(llama.decode(step(handle, 7)).logits[0], want([*TOKENS[:6], 7]))
    verified = llama.forward_verify([step(handle, token) for token in TOKENS[10:14]])
    assert_same_logits(verified[-1].logits[0], want([*TOKENS[:6], 7, *TOKENS[10:14]]))
    llama.truncate_kv(handle, 3)
    out = llama.prefill(prompt(TOKENS[20:31], kv_caches=[handle]))
    assert_same_logits(out.last_token_logits()[0], want([*TOKENS[:3], *TOKENS[20:31]]))


def test_a_batch_is_one_forward(llama: LlmExecutor, want: Want, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of mixed items, of prompts or of decodes."""
    assert llama.supports_native_unified_decode()
    forward(llama, item("a", TOKENS[:8]), chunk("b", TOKENS[:5]), item("e", TOKENS[:6]))
    calls = Mock(wraps=llama.model.run_step)
    monkeypatch.setattr(llama.model, "run_step", calls)
    a, b, none, token, verified = forward(
        llama,
        item("a", [TOKENS[8]], 8),
        item("b", TOKENS[5:17], 5),
        chunk("c", TOKENS[:3]),
        item("d", TOKENS[:4], logits_policy=GreedyArgmax()),
        item("e", TOKENS[6:9], 6, logits_policy=VerifyLogits()),
    )
    assert calls.call_count == 1
    assert none is None
    assert_same_logits(a, want(TOKENS[:9]))
    assert_same_logits(b, want(TOKENS[:17]))
    assert int(token) == int(want(TOKENS[:4]).argmax())
    for length in range(3):
        assert_same_logits(verified[length], want(TOKENS[: 7 + length]))
    status = llama.status()
    assert (status.prefill_count, status.decode_count) == (4, 1 + 3)
    assert status.prefill_tokens == 8 + 5 + 12 + 3 + 4 + 6

    outs = llama.batch_prefill([prompt(TOKENS[: 3 + i]) for i in range(3)])
    decoded = llama.batch_decode([step(out.kv_cache, 11) for out in outs])
    assert calls.call_count == 3
    for i, out in enumerate(decoded):
        assert_same_logits(out.logits[0], want([*TOKENS[: 3 + i], 11]))


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
    assert llama.status().memory_bytes == 4 * info.num_parameters + llama.cache_metrics_snapshot()["bytes_per_block"]
    llama.shutdown()
    assert not handle.is_valid
    with pytest.raises(ExecutorShutDownError):
        llama.prefill(prompt([1]))


def test_limits_of_loading(checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    short = LlmExecutor.from_pretrained(str(checkpoint[0]), device="cpu", max_seq_len=8, num_blocks=4)
    short.prefill(prompt([1] * 8))
    with pytest.raises(SequenceTooLongError):
        short.prefill(prompt([1] * 9))
    with pytest.raises(CheckpointError):
        LlmExecutor.from_pretrained(tmp_path)


def test_packs_what_is_worth_it_as_it_loads(checkpoint: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[PagedCausalLM] = []
    monkeypatch.setattr(PagedCausalLM, "pack", lambda model, _: packed.append(model))
    size = LlmExecutor.from_pretrained(checkpoint[0], device="cpu").capabilities().memory_requirements.weight_bytes
    assert packed == []
    for threshold, is_packed in ((size + 1, False), (size, True)):
        monkeypatch.setattr(llm_executor, "_PACKED_BYTES", threshold)
        executor = LlmExecutor.from_pretrained(checkpoint[0], device="cpu")
        assert packed == [executor.model] * is_packed


def test_adapters_reach_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Parrot()
    chosen: list[tuple[SeqId, str | None]] = []
    monkeypatch.setattr(model, "set_lora_adapter_for_cache", lambda *choice: chosen.append(choice))
    forward(other_executor(model), item("a", [1], metadata={"lora_adapter": "french"}), item("b", [1]))
    assert chosen == [("a", "french")]
