"""PAGED_CANARY=1 in an engine: a fault of the cache ends the request that it meets, and no other."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from paged import CanaryError, Engine, EngineConfig, KvCacheHandle, LlmExecutor, SpeculativeDecoder
from paged.serving.command_line.cli import RECALL
from tests.executors.engine_cases import EOS, TEN, TOKENIZER, check_empty, encode, recall_prompts, run, run_to_end

PARAMS = replace(TEN, ignore_eos=True)
BROKEN = 2  # the request that meets the fault


def make_engine(**config: Any) -> Engine:
    """An engine on the bundled checkpoint, with blocks of 4 tokens."""
    executor = LlmExecutor.from_pretrained(RECALL, num_blocks=200, block_size=4, cuda_graphs=config.pop("graphs", None))
    if config.pop("warm", False):
        executor.warmup()
    return Engine(executor, EngineConfig(**config), tokenizer=TOKENIZER, eos_token_ids=EOS, seed=5)


def make_decoder() -> Engine:
    """One whose target drafts for itself."""
    return SpeculativeDecoder(
        LlmExecutor.from_pretrained(RECALL, num_blocks=200, block_size=4),
        LlmExecutor.from_pretrained(RECALL, num_blocks=200, block_size=8),
        num_draft_tokens=3,
        eos_token_ids=EOS,
    )


ENGINES: dict[str, Callable[[], Engine]] = {
    "plain": make_engine,
    "overlap": lambda: make_engine(overlap=True),
    "in chunks": lambda: make_engine(chunk_size=5),
    "graphs": lambda: make_engine(graphs=(8,), warm=True),
    "drafts": make_decoder,
}


@pytest.fixture(autouse=True)
def _canaries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_CANARY", "1")
    monkeypatch.setenv("PAGED_BACKEND", "torch")


def prompts() -> list[list[int]]:
    return encode(recall_prompts(5, max_tokens=60))


def exchange_blocks(handle: KvCacheHandle) -> None:
    """Let the cache take a sequence's first block for its second, and the second for the first."""
    first, second, *rest = handle.blocks
    handle._state.blocks = (second, first, *rest)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("num_steps", [1, 4])
def test_a_fault_ends_its_request_alone(name: str, num_steps: int) -> None:
    expected = run(ENGINES[name](), prompts(), PARAMS)
    engine = ENGINES[name]()
    outputs = [engine.add_request(prompt, PARAMS, request_id=index) for index, prompt in enumerate(prompts())]
    if name == "drafts":
        num_steps = min(num_steps, 2)  # four tokens a step
    for _ in range(num_steps):
        engine.step()
    (seq_id,) = [seq_id for seq_id, owner in engine.sequence_names().items() if owner == f"{BROKEN}/0"]
    manager = engine.executor.kv_manager
    assert manager is not None
    handle = manager.get_handle(seq_id)
    assert handle is not None
    exchange_blocks(handle)
    with pytest.raises(CanaryError, match=r"position 0 \(block \d+, offset 0 of table 0\) holds token"):
        manager.check_integrity()
    run_to_end(engine)
    for index, output in enumerate(outputs):
        (completion,) = output.outputs
        if index == BROKEN:
            assert completion.finish_reason == "error"
            assert str(output.error).startswith(f"CanaryError: {seq_id!r}: position 0 (block ")
            assert completion.token_ids == expected[index][: len(completion.token_ids)]
        else:
            assert output.error is None
            assert completion.token_ids == expected[index]
    check_empty(engine)
    manager.check_integrity()


def test_a_fault_of_a_prefix_lasts_until_the_prefix_goes() -> None:
    """Its block is still published, so every request that begins with it ends."""
    engine = make_engine()
    (tokens,) = run(engine, prompts()[:1], PARAMS)
    manager = engine.executor.kv_manager
    assert manager is not None
    canaries = manager.tensors.canaries
    assert canaries is not None
    canaries[list(manager.cached_blocks())] ^= 1 << 40
    for _ in range(2):
        (output,) = engine.generate(prompts()[:1], PARAMS, progress=False)
        assert "CanaryError" in str(output.error)
    manager.clear_prefix_cache()
    assert run(engine, prompts()[:1], PARAMS) == [tokens]
