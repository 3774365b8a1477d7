"""HeadProposer: the target's text whatever the head drafts, and the same drafts however a sequence came about."""

import os
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from examples.train_draft_head import save, train
from paged import (
    Engine,
    EngineConfig,
    HeadProposer,
    InvalidInputError,
    LlmExecutor,
    SamplingParams,
    SpeculativeDecoder,
    UnifiedBatch,
    UnifiedBatchItem,
    UnsupportedError,
)
from paged.serving.command_line.cli import RECALL
from tests.executors.engine_cases import EOS, check_pool_empty, encode, recall_prompts, run, run_to_end, tokens_of
from tests.executors.sampling.completions import chi_square_p
from tests.executors.speculation.noting import NotingProposer
from tests.models.drafts.heads import save_head, save_published
from tests.models.families import FAMILIES, save_checkpoint, tokens
from tests.models.lora.folders import Adapter

GREEDY = SamplingParams(temperature=0, max_tokens=6)


def load(kind: str, folder: Path, num_blocks: int = 256, **options: Any) -> LlmExecutor:
    target, draft = (folder, "mtp") if kind == "mtp" else (RECALL, folder)
    return LlmExecutor.from_pretrained(target, draft=draft, num_blocks=num_blocks, block_size=8, **options)


@pytest.mark.parametrize("kind", ["eagle3", pytest.param("mtp", marks=pytest.mark.thorough)])
def test_the_same_drafts_in_every_way(kind: str, tmp_path: Path) -> None:
    """In chunks, after a cached prefix, a fork, a swap, a preemption and rejected drafts; and the same tokens."""
    save_head(kind, tmp_path)
    questions = encode(recall_prompts(3, max_tokens=40, seed=3))
    prompts = [*questions, *([*questions[0], 1, *one[:9]] for one in questions)]
    executor = load(kind, tmp_path, enable_prefix_cache=False)
    alone = NotingProposer(HeadProposer(executor, 3))
    engine = Engine(executor, proposer=alone, eos_token_ids=())
    expected = [run(engine, [prompt], GREEDY)[0] for prompt in prompts]
    plain = Engine(LlmExecutor.from_pretrained(RECALL, num_blocks=256), eos_token_ids=())
    assert expected == [run(plain, [prompt], GREEDY)[0] for prompt in prompts]
    ways: list[tuple[dict[str, Any], dict[str, Any], int]] = [
        ({"chunk_size": 7, "token_budget": 24}, {}, 1),
        ({"overlap": True}, {}, 3),
        ({"admission_tokens": 0, "preemption": "swap"}, {"num_blocks": 16, "num_swap_blocks": 64}, 1),
        ({"admission_tokens": 0}, {"num_blocks": 16}, 2),
    ]
    for config, options, n in ways:
        executor = load(kind, tmp_path, **options)
        noting = NotingProposer(HeadProposer(executor, 3))
        engine = Engine(executor, EngineConfig(**config), proposer=noting, eos_token_ids=())
        params = SamplingParams(temperature=0, max_tokens=6, n=n)
        outputs = engine.generate(prompts, params, progress=False)
        assert [[one.token_ids for one in output.outputs] for output in outputs] == [[ids] * n for ids in expected]
        assert bool(engine.metrics.preempted) == ("num_blocks" in options)
        assert any(output.num_cached_tokens for output in outputs) or "chunk_size" not in config
        # Without blocks for drafts in one step, the next one begins with another text.
        common = {text: ids for text, ids in noting.drafted.items() if ids and alone.drafted.get(text)}
        assert {text: alone.drafted[text] for text in common} == common
        assert len(common) > len(prompts)
        check_pool_empty(executor)


@pytest.mark.thorough
def test_drafts_beside_recurrent_layers(tmp_path: Path) -> None:
    """The text without drafts: rejected drafts, chunks, prefix hits, preemption, and snapshots that are evicted."""
    save_published("qwen3_5", tmp_path)
    beginning = tokens(40, seed=9)
    prompts = [*(tokens(23, seed=seed) for seed in range(3)), *([*beginning, *tokens(9, seed=i)] for i in range(3))]
    params = SamplingParams(temperature=0, max_tokens=12)
    plain = Engine(LlmExecutor.from_pretrained(tmp_path, num_blocks=256, block_size=8), eos_token_ids=())
    expected = [run(plain, [prompt], params)[0] for prompt in prompts]
    ways: list[tuple[EngineConfig, dict[str, Any]]] = [
        (EngineConfig(chunk_size=16, token_budget=40), {"num_state_slots": 9}),
        (EngineConfig(admission_tokens=0), {"num_blocks": 20}),
    ]
    for config, options in ways:
        executor = load("mtp", tmp_path, **options)
        engine = Engine(executor, config, proposer=HeadProposer(executor, 3), eos_token_ids=())
        assert run(engine, prompts, params) == expected
        assert run(engine, prompts[3:], params) == expected[3:]
        assert engine.metrics.draft_tokens > engine.metrics.accepted_tokens
        assert bool(engine.metrics.preempted) == ("num_blocks" in options)
        check_pool_empty(executor)


def test_an_adapter_changes_the_target_alone(tmp_path: Path) -> None:
    adapter = Adapter(("q_proj", "o_proj"), alpha=100, seed=1).save(tmp_path / "adapter", RECALL)
    save_head("eagle3", tmp_path / "head")
    executors = load("eagle3", tmp_path / "head"), LlmExecutor.from_pretrained(RECALL, num_blocks=256)
    found = []
    for executor in executors:
        executor.load_lora("a", adapter)
        engine = SpeculativeDecoder(executor, num_draft_tokens=2, eos_token_ids=())
        (prompt,) = encode(recall_prompts(1, max_tokens=40))
        outputs = [engine.add_request(prompt, GREEDY, metadata=one) for one in ({}, {"lora_adapter": "a"})]
        run_to_end(engine)
        found.append(tokens_of(outputs))
        assert engine.metrics.draft_tokens
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


@pytest.mark.thorough
def test_sampled_output_has_the_targets_distribution(tmp_path: Path) -> None:
    """With a head whose vocabulary is a part of the target's."""
    config = FAMILIES["llama"]
    config.vocab_size = 6
    save_checkpoint(config, tmp_path / "target")
    save_head("eagle3", tmp_path / "head", vocab_size=6, draft_ids=[1, 2, 5])
    executor = LlmExecutor.from_pretrained(tmp_path / "target", draft=tmp_path / "head", num_blocks=1024, block_size=8)
    prompt, shares = [1, 2, 1, 3, 1], {(): 1.0}
    params = [SamplingParams(temperature=0.7, max_tokens=4, seed=seed) for seed in range(500)]
    engine = SpeculativeDecoder(
        executor, num_draft_tokens=2, config=EngineConfig(token_budget=8192, max_num_seqs=500), eos_token_ids=()
    )
    outputs = engine.generate([prompt] * len(params), params, progress=False)
    counts = Counter(tuple(ids[:3]) for ids in tokens_of(outputs))
    assert 0.05 < engine.acceptance_rate < 0.95
    for _ in range(3):
        texts = list(shares)
        items = [UnifiedBatchItem(f"{ids}", [*prompt, *ids]) for ids in texts]
        answers = executor.unified_decode(UnifiedBatch(items))
        for item in items:
            executor.release_cache(item.seq_id)
        shares = {
            (*ids, token): shares[ids] * chance
            for ids, row in zip(texts, answers, strict=True)
            if row is not None
            for token, chance in enumerate((row / 0.7).softmax(0).tolist())
        }
    common = [ids for ids, share in shares.items() if share * len(params) >= 10]
    assert len(common) > 8
    found, expected = ([each[ids] for ids in common] for each in (counts, shares))
    assert chi_square_p([*found, len(params) - sum(found)], [*expected, 1 - sum(expected)]) > 1e-4


@cache  # not a fixture of the module: that runs before the one that sets the backend, in Triton's interpreter
def prompts_and_texts() -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, 500 in `make soak`, and the target's texts."""
    prompts = encode(recall_prompts(500 if "SOAK" in os.environ else 80, max_tokens=32))
    return prompts, run(Engine(LlmExecutor.from_pretrained(RECALL, num_blocks=1024), eos_token_ids=EOS), prompts)


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "steps"), [("eagle3", 60), ("mtp", 120)])
def test_trained_heads(kind: str, steps: int, tmp_path: Path) -> None:
    """The target's text, in more than 1.5 tokens a step, or 1.3 without blocks for all drafts."""
    save(kind, *train(kind, steps=steps, longest=32), tmp_path)
    prompts, expected = prompts_and_texts()
    for num_blocks, least in ((1024, 1.5), (40, 1.3)):
        executor = load(kind, tmp_path, num_blocks)
        config = EngineConfig(chunk_size=32, admission_tokens=0 if num_blocks == 40 else None)
        engine = SpeculativeDecoder(executor, num_draft_tokens=3, config=config, eos_token_ids=EOS)
        assert run(engine, prompts) == expected
        metrics = engine.metrics
        assert 1 + metrics.accepted_tokens / (metrics.decode_tokens - metrics.draft_tokens) > least
        assert bool(metrics.preempted) == (num_blocks == 40)


def test_what_cannot_draft_is_refused(tmp_path: Path) -> None:
    executor = LlmExecutor.from_pretrained(RECALL, num_blocks=16)
    with pytest.raises(UnsupportedError, match="no draft head; load it with draft="):
        HeadProposer(executor)
    save_head("eagle3", tmp_path)
    executor = load("eagle3", tmp_path)
    with pytest.raises(InvalidInputError, match="num_tokens: 0"):
        HeadProposer(executor, 0)
    with pytest.raises(InvalidInputError, match=r"min_probability: 1\.5, expected a number in 0"):
        HeadProposer(executor, min_probability=1.5)
