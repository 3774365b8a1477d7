"""Adapters through LlmExecutor: named by an item, loaded and unloaded between forwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paged.batch import UnifiedBatchItem
from paged.errors import CheckpointError, InvalidInputError, UnsupportedError
from paged.executors.engine.config import EngineConfig
from paged.executors.engine.engine import Engine
from paged.executors.llm_executor import LlmExecutor
from paged.executors.model_executor import ExecutorShutDownError
from paged.executors.requests.sampling_params import SamplingParams
from tests.executors.oracle import batch, prompt, step
from tests.executors.parrot import Parrot, other_executor
from tests.models.families import FAMILIES, assert_same_logits, save_checkpoint, tokens
from tests.models.lora.folders import Adapter

FRENCH = Adapter(("q_proj", "k_proj", "gate_proj", "down_proj"), seed=1)
IDS = tokens(12)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The base model, an adapter of it, and both in one."""
    root = tmp_path_factory.mktemp("lora")
    save_checkpoint(FAMILIES["llama"], root / "base")
    adapter = FRENCH.save(root / "french", root / "base")
    return {"base": root / "base", "french": adapter, "merged": FRENCH.merge(adapter, root / "base", root / "merged")}


@pytest.fixture
def executor(folders: dict[str, Path], device: torch.device) -> LlmExecutor:
    return LlmExecutor.from_pretrained(folders["base"], device=device, num_blocks=16, block_size=8, max_loras=2)


@pytest.fixture
def merged(folders: dict[str, Path], device: torch.device) -> LlmExecutor:
    return LlmExecutor.from_pretrained(folders["merged"], device=device, num_blocks=16, block_size=8)


def item(seq_id: str, ids: list[int], **fields: Any) -> UnifiedBatchItem:
    return UnifiedBatchItem(seq_id, ids, metadata={"lora_adapter": "french"}, **fields)


def test_items_name_their_adapter(executor: LlmExecutor, merged: LlmExecutor, folders: dict[str, Path]) -> None:
    """Later items of the sequence need not, and a prompt's row without it is the base model's."""
    executor.load_lora("french", folders["french"])
    assert executor.list_loras() == ("french",)
    base = executor.prefill(prompt(IDS)).logits[0, 0]
    french, plain = executor.unified_decode(batch(item("a", IDS[:8]), UnifiedBatchItem("b", IDS)))
    assert_same_logits(french, merged.prefill(prompt(IDS[:8])).logits[0, 0].cpu())
    assert_same_logits(plain, base.cpu())
    (french,) = executor.unified_decode(batch(UnifiedBatchItem("a", IDS[8:], pos_offset=8)))
    assert_same_logits(french, merged.prefill(prompt(IDS)).logits[0, 0].cpu())
    handle = executor.model.kv_manager.get_handle("a")
    verified = executor.forward_verify([step(handle, token) for token in IDS[:3]])
    assert_same_logits(verified[-1].logits[0], merged.prefill(prompt(IDS + IDS[:3])).logits[0, 0].cpu())


def test_a_failed_batch_leaves_no_sequence(executor: LlmExecutor, folders: dict[str, Path]) -> None:
    executor.load_lora("french", folders["french"])
    unknown = UnifiedBatchItem("b", IDS, metadata={"lora_adapter": "poetry"})
    with pytest.raises(InvalidInputError, match="'poetry': not loaded"):
        executor.unified_decode(batch(item("a", IDS), unknown))
    assert executor.model.kv_manager.handles() == ()
    executor.unload_lora("french")
    with pytest.raises(InvalidInputError, match="'french': not loaded"):
        executor.unified_decode(batch(item("a", IDS)))


def test_load_and_unload_while_sequences_run(executor: LlmExecutor, folders: dict[str, Path]) -> None:
    """What one adapter's sequences give does not depend on those that come and go."""
    expected = LlmExecutor.from_pretrained(folders["merged"], device="cpu").prefill(prompt(IDS)).logits[0, 0]
    executor.load_lora("french", folders["french"])
    executor.unified_decode(batch(item("a", IDS[:10])))
    executor.load_lora("other", folders["french"])
    with pytest.raises(InvalidInputError, match="slots are taken"):
        executor.load_lora("third", folders["french"])
    executor.unload_lora("other")
    with pytest.raises(InvalidInputError, match="'french': 1 sequences hold it"):
        executor.unload_lora("french")
    (row,) = executor.unified_decode(batch(item("a", IDS[10:], pos_offset=10)))
    assert_same_logits(row, expected)
    executor.release_cache("a")
    executor.unload_lora("french")
    assert executor.list_loras() == ()


def test_metrics_and_capabilities(executor: LlmExecutor, folders: dict[str, Path]) -> None:
    assert executor.capabilities().supports_lora
    executor.load_lora("french", folders["french"])
    executor.unified_decode(batch(item("a", IDS), UnifiedBatchItem("b", IDS)))
    metrics = executor.lora_metrics_snapshot()
    assert metrics is not None
    assert metrics["adapters"]["french"]["tokens"] == len(IDS)


def test_errors(executor: LlmExecutor, folders: dict[str, Path]) -> None:
    with pytest.raises(CheckpointError, match=r"adapter_config\.json: missing"):
        executor.load_lora("french", folders["base"])
    other = other_executor(Parrot())
    assert other.list_loras() == ()
    with pytest.raises(UnsupportedError, match="Parrot takes no adapters"):
        other.load_lora("french", folders["french"])
    executor.shutdown()
    with pytest.raises(ExecutorShutDownError):
        executor.load_lora("french", folders["french"])


def test_requests_of_an_engine(executor: LlmExecutor, merged: LlmExecutor, folders: dict[str, Path]) -> None:
    """Chunks, forks, cached prefixes and decodes of an adapter's requests beside the base model's, with an adapter that
    is replaced by another of the same name between them."""
    plain = LlmExecutor.from_pretrained(folders["base"], device=executor.info().device, num_blocks=16, block_size=8)
    executor.load_lora("french", folders["french"])
    params, metadata = SamplingParams(temperature=0.0, max_tokens=4, n=2), {"lora_adapter": "french"}
    engine = Engine(executor, EngineConfig(chunk_size=5))

    def run(metadata: dict[str, str]) -> list[list[int]]:
        outputs = [engine.add_request(IDS, params, metadata=one) for one in (metadata, {})]
        while engine.num_unfinished:
            engine.step()
        assert all(output.outputs[0].token_ids == output.outputs[1].token_ids for output in outputs)
        return [list(output.outputs[0].token_ids) for output in outputs]

    french, base = (list(Engine(one).generate([IDS], params)[0].outputs[0].token_ids) for one in (merged, plain))
    assert french != base
    for _ in range(2):
        assert run(metadata) == [french, base]
    assert executor.kv_manager is not None
    assert executor.kv_manager.stats().prefix_hits >= 2
    executor.unload_lora("french")
    executor.load_lora(
        "french", Adapter(("q_proj",), alpha=1e-9, seed=1).save(folders["base"].parent / "nothing", folders["base"])
    )
    assert run(metadata) == [base, base]
