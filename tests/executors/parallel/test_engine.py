"""An engine whose model is spread over processes gives every request the tokens of one process."""

from collections.abc import Iterator
from typing import Any

import pytest

from paged import DraftModel, Engine, EngineConfig, LlmExecutor, PromptLookup, SamplingParams
from tests.executors.engine_cases import check_empty, run, run_to_end, tokens_of
from tests.executors.parallel.followers import Followers
from tests.models.families import FAMILIES, save_checkpoint, tokens
from tests.models.lora.folders import Adapter
from tests.tolerance import assert_logprobs, assert_within

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
OPTIONS = {"block_size": 4, "num_blocks": 64, "num_swap_blocks": 64, "max_loras": 2, "max_lora_rank": 8}
CONFIG = EngineConfig(admission_tokens=0, token_budget=96, chunk_size=16, preemption="swap")


@pytest.fixture(scope="module")
def executors(tmp_path_factory: pytest.TempPathFactory, followers: Followers) -> Iterator[list[LlmExecutor]]:
    """One process, and two that also have a tier for evicted prefixes, with two adapters."""
    root = tmp_path_factory.mktemp("engine")
    save_checkpoint(FAMILIES["llama"], root / "base")
    with followers.load(root / "base", 2, **OPTIONS, host_cache_bytes=1 << 20) as spread:
        both = [LlmExecutor.from_pretrained(root / "base", **OPTIONS), spread]
        for seed, name in enumerate(("adapter1", "adapter2"), start=1):
            Adapter(TARGETS, rank=4 * seed, seed=seed).save(root / name, root / "base")
            for executor in both:
                executor.load_lora(name, root / name)
        yield both


@pytest.mark.parametrize("count", [60, pytest.param(200, marks=pytest.mark.thorough)])
def test_same_tokens_with_preemption_prefixes_adapters_and_drafts(executors: list[LlmExecutor], count: int) -> None:
    found = []
    for executor in executors:
        engine = Engine(executor, CONFIG, eos_token_ids=(), proposer=PromptLookup(3))
        outputs = []
        for index in range(count):
            prompt = tokens(24, index % 3)[: 8 + index % 17] + tokens(1 + index % 9, index)
            params = SamplingParams(temperature=float(index % 2), top_p=0.9, max_tokens=3 + index % 5, seed=index)
            metadata = ({}, {"lora_adapter": "adapter1"}, {"lora_adapter": "adapter2"}, {})[index % 4]
            outputs.append(engine.add_request(prompt, params, metadata=metadata))
        run_to_end(engine)
        found.append(tokens_of(outputs))
        assert engine.metrics.preempted["swap"] > 0
        assert engine.metrics.accepted_tokens > 0
        assert executor.kv_manager.stats().prefix_hits > 0
    assert found[0] == found[1]
    assert executors[1].kv_manager.stats().host_loaded_blocks > 0


FEW = [{"top_k": 1 + seed % 5, "top_p": (1.0, 0.7)[seed % 2], "min_p": (0.0, 0.1, 0.0)[seed % 3]} for seed in range(9)]


@pytest.mark.parametrize(
    ("filters", "sent"),
    [
        ([{"temperature": index % 3 / 2} for index in range(9)], {"gather": 32}),
        (FEW, {"gather": 32, "gather_everywhere": 16 * 4}),
        ([{"min_p": 0.05}] * 9, {"gather": 32, "gather_everywhere": 16 * 4}),
        ([*FEW[:8], {"top_p": 0.7}], {"gather": 64 * 4}),
        ([*FEW[:8], {"top_k": 3, "frequency_penalty": 1.0}], {"gather": 64 * 4}),
    ],
    ids=["plain", "few", "min_p", "top_p", "penalty"],
)
def test_logits_are_sent_only_where_a_few_candidates_do_not_decide(
    executors: list[LlmExecutor], filters: list[dict[str, Any]], sent: dict[str, int]
) -> None:
    found = []
    for executor in executors:
        num_bytes = executor.model.ranks.num_bytes
        engine = Engine(executor, EngineConfig(overlap=True, chunk_size=7), eos_token_ids=())
        prompts = [tokens(3 + 2 * i, i) for i in range(9)]
        engine.generate(prompts, SamplingParams(max_tokens=1), progress=False)  # so that all begin in one step below
        before = num_bytes.copy()
        params = [
            SamplingParams(**{"temperature": 0.5 + i / 9, "max_tokens": 7, "seed": i} | one)
            for i, one in enumerate(filters)
        ]
        outputs = engine.generate(prompts, params, progress=False)
        gathered = {kind: count for kind, count in (num_bytes - before).items() if kind.startswith("gather")}
        is_spread = executor.model.ranks.size > 1
        assert gathered == ({kind: 9 * 7 * size for kind, size in sent.items()} if is_spread else {})
        outputs += engine.generate([tokens(5)] * 2, SamplingParams(n=2, max_tokens=3, seed=1), progress=False)
        check_empty(engine)
        found.append(tokens_of(outputs))
    assert found[0] == found[1]


def test_a_draft_model_over_processes(executors: list[LlmExecutor]) -> None:
    """Its drafts stay on the device, which alone knows them from step to step."""
    alone, spread = executors
    params = SamplingParams(temperature=0, max_tokens=9)
    prompts = [tokens(length, length) for length in (3, 11, 20)]
    expected = run(Engine(alone, eos_token_ids=()), prompts, params)
    engine = Engine(alone, eos_token_ids=(), proposer=DraftModel(spread, 3))
    assert run(engine, prompts, params) == expected
    assert engine.metrics.accepted_tokens == engine.metrics.draft_tokens > 0


def test_log_probabilities_of_prompts_and_embeddings(executors: list[LlmExecutor]) -> None:
    """Ranks compute logits of every row, or none; a draw of the step before stands for neither."""
    found, pooled, states = [], [], []
    for executor in executors:
        engine = Engine(executor, EngineConfig(chunk_size=7), eos_token_ids=())
        outputs = [engine.add_request(tokens(5), SamplingParams(seed=1, max_tokens=9))]
        for _ in range(3):
            engine.step()
        params = SamplingParams(temperature=0, max_tokens=3, n=2, prompt_logprobs=2, return_hidden_states=True)
        outputs.append(engine.add_request(tokens(20), params))
        pooled.append(engine.embed([tokens(9, 1), tokens(40, 2)], pooling="mean"))
        run_to_end(engine)
        states.append(outputs[1].outputs[1].hidden_states)
        found.append((tokens_of(outputs), outputs[1].prompt_logprobs))
    assert found[0][0] == found[1][0]
    tables = [[list(table.items()) for table in one[1][1:]] for one in found]
    assert_logprobs(tables[0], tables[1])
    assert_within(*pooled, 1e-5)
    assert_within(*states, 1e-4 * states[1].abs().max())
