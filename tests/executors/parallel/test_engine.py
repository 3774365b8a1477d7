"""An engine whose model is spread over processes gives every request the tokens of one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from paged import DraftModel, Engine, EngineConfig, LlmExecutor, PromptLookup, SamplingParams
from tests.executors.engine_cases import check_empty, tokens_of
from tests.executors.parallel.followers import Followers
from tests.models.families import FAMILIES, save_checkpoint, tokens
from tests.models.lora.folders import Adapter

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
OPTIONS = {"block_size": 4, "num_blocks": 96, "num_swap_blocks": 64, "max_loras": 2, "max_lora_rank": 8}
CONFIG = EngineConfig(admission_tokens=0, token_budget=96, chunk_size=16, preemption="swap")
NUM_REQUESTS = 200


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("engine")
    save_checkpoint(FAMILIES["llama"], root / "base")
    for seed in (1, 2):
        Adapter(TARGETS, rank=4 * seed, seed=seed).save(root / f"adapter{seed}", root / "base")
    return {path.name: path for path in root.iterdir()}


@pytest.fixture(scope="module")
def executors(folders: dict[str, Path], followers: Followers) -> Iterator[list[LlmExecutor]]:
    """One process, and two."""
    with followers.load(folders["base"], 2, **OPTIONS) as spread:
        both = [LlmExecutor.from_pretrained(folders["base"], **OPTIONS), spread]
        for executor in both:
            for name in ("adapter1", "adapter2"):
                executor.load_lora(name, folders[name])
        yield both


def _run(engine: Engine) -> list[list[int]]:
    outputs = []
    for index in range(NUM_REQUESTS):
        prompt = tokens(24, index % 3)[: 8 + index % 17] + tokens(1 + index % 9, index)
        params = SamplingParams(temperature=float(index % 2), top_p=0.9, max_tokens=3 + index % 5, seed=index)
        adapter = (None, "adapter1", "adapter2", None)[index % 4]
        metadata = None if adapter is None else {"lora_adapter": adapter}
        outputs.append(engine.add_request(prompt, params, metadata=metadata))
    while engine.num_unfinished:
        engine.step()
    check_empty(engine)
    return tokens_of(outputs)


def test_same_tokens_with_preemption_prefixes_adapters_and_drafts(executors: list[LlmExecutor]) -> None:
    found = []
    for executor in executors:
        engine = Engine(executor, CONFIG, eos_token_ids=(), proposer=PromptLookup(3))
        found.append(_run(engine))
        assert engine.metrics.preempted["swap"] > 0
        assert engine.metrics.accepted_tokens > 0
        assert executor.kv_manager is not None
        assert executor.kv_manager.stats().prefix_hits > 0
    assert found[0] == found[1]


def test_plain_requests_send_no_logits(executors: list[LlmExecutor]) -> None:
    found = []
    for executor in executors:
        ranks = executor.model.ranks
        before = ranks.num_bytes["gather"]
        engine = Engine(executor, EngineConfig(prepare_ahead=True, chunk_size=7), eos_token_ids=())
        params = [SamplingParams(temperature=index % 3 / 2, max_tokens=9, seed=index) for index in range(9)]
        outputs = [engine.add_request(tokens(3 + 2 * i, i), one) for i, one in enumerate(params)]
        while engine.num_unfinished:
            engine.step()
        assert ranks.num_bytes["gather"] - before == (9 * 9 * 32 if ranks.size > 1 else 0)
        outputs += engine.generate([tokens(5)] * 2, SamplingParams(n=2, max_tokens=3, seed=1), progress=False)
        check_empty(engine)
        found.append(tokens_of(outputs))
    assert found[0] == found[1]


def test_filters_send_no_logits_where_a_few_candidates_decide(executors: list[LlmExecutor]) -> None:
    few = [
        {"top_k": 1 + seed % 5, "top_p": (1.0, 0.7)[seed % 2], "min_p": (0.0, 0.1, 0.0)[seed % 3]} for seed in range(9)
    ]
    found = []
    for executor in executors:
        engine, sent = Engine(executor, eos_token_ids=()), executor.model.ranks.num_bytes
        for filters, each in (
            (few, {"gather": 32, "gather_everywhere": 16 * 4}),
            ([{"min_p": 0.05}] * 9, {"gather": 32, "gather_everywhere": 16 * 4}),
            ([*few[:8], {"top_p": 0.7}], {"gather": 64 * 4}),
            ([*few[:8], {"top_k": 3, "frequency_penalty": 1.0}], {"gather": 64 * 4}),
        ):
            before = sent.copy()
            params = [
                SamplingParams(temperature=0.5 + i / 9, max_tokens=7, seed=i, **one) for i, one in enumerate(filters)
            ]
            outputs = engine.generate([tokens(3 + i, i) for i in range(9)], params, progress=False)
            found.append(tokens_of(outputs))
            gathered = {kind: count for kind, count in (sent - before).items() if kind.startswith("gather")}
            assert gathered == ({kind: 9 * 7 * size for kind, size in each.items()} if len(found) > 4 else {})
    assert found[:4] == found[4:]


def test_a_draft_model_over_processes(executors: list[LlmExecutor]) -> None:
    """Its drafts stay on the device, which alone knows them from step to step."""
    alone, spread = executors
    params = SamplingParams(temperature=0, max_tokens=9)
    prompts = [tokens(length, length) for length in (3, 11, 20)]
    expected = tokens_of(Engine(alone, eos_token_ids=()).generate(prompts, params, progress=False))
    engine = Engine(alone, eos_token_ids=(), proposer=DraftModel(spread, 3))
    assert tokens_of(engine.generate(prompts, params, progress=False)) == expected
    assert engine.metrics.accepted_tokens == engine.metrics.draft_tokens > 0
