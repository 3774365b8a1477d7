"""One prompt has one greedy answer: alone or batched, in any chunks, preempted or not, with or without speculation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paged import Engine, EngineConfig, LlmExecutor, SamplingParams, SpeculativeDecoder
from paged.executors.command_line.cli import RECALL
from tests.executors.engine_cases import (
    EOS,
    TOKENIZER,
    check_empty,
    check_pool_empty,
    encode,
    recall_prompts,
    tokens_of,
)
from tests.models.families import FAMILIES, save_checkpoint, tokens

# (engine configuration, executor options); None for num_blocks means plenty.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "batched": ({}, {}),
    "two at a time": ({"max_num_seqs": 2}, {}),
    "chunks of 1": ({"chunk_size": 1}, {}),
    "chunks of 7": ({"chunk_size": 7}, {}),
    "chunks of 64": ({"chunk_size": 64}, {}),
    "budget of 9": ({"token_budget": 9}, {}),
    "no prefix cache": ({}, {"enable_prefix_cache": False}),
    "recompute": ({"admission_tokens": 0}, {"num_blocks": "tight"}),
    "recompute in chunks": ({"admission_tokens": 0, "chunk_size": 7}, {"num_blocks": "tight"}),
    "recompute without prefix cache": ({"admission_tokens": 0}, {"num_blocks": "tight", "enable_prefix_cache": False}),
    "swap": ({"admission_tokens": 0, "preemption": "swap"}, {"num_blocks": "tight", "num_swap_blocks": 64}),
    "swap without room": ({"admission_tokens": 0, "preemption": "swap"}, {"num_blocks": "tight", "num_swap_blocks": 1}),
    "paced": ({"decode_stretch": 1.5}, {}),
    "ahead": ({"prepare_ahead": True}, {}),
    "ahead, two at a time": ({"prepare_ahead": True, "max_num_seqs": 2}, {}),
    "ahead, recompute": ({"prepare_ahead": True, "admission_tokens": 0}, {"num_blocks": "tight"}),
    "ahead, swap": (
        {"prepare_ahead": True, "admission_tokens": 0, "preemption": "swap"},
        {"num_blocks": "tight", "num_swap_blocks": 64, "cuda_graphs": (1, 2, 6)},
    ),
    "graphs": ({}, {"cuda_graphs": (1, 2, 6)}),
    "graphs, recompute": ({"admission_tokens": 0}, {"cuda_graphs": True, "num_blocks": "tight"}),
    "graphs, swap": (
        {"admission_tokens": 0, "preemption": "swap"},
        {"cuda_graphs": (2, 3), "num_blocks": "tight", "num_swap_blocks": 64},
    ),
}


class Case:
    """A checkpoint, prompts, and the answer to each alone. `tight` blocks hold the prompts, not what follows."""

    def __init__(
        self, folder: Path, prompts: list[list[int]], params: SamplingParams, *, tight: int, eos: list[int]
    ) -> None:
        self.folder, self.prompts, self.params, self.tight, self.eos = folder, prompts, params, tight, eos
        self.expected = [self.engine().generate([prompt], params, progress=False)[0] for prompt in prompts]
        self.tokens = tokens_of(self.expected)

    def executor(self, num_blocks: int | str = 64, block_size: int = 4, **options: Any) -> LlmExecutor:
        count = self.tight if num_blocks == "tight" else int(num_blocks) * 4
        executor = LlmExecutor.from_pretrained(self.folder, num_blocks=count, block_size=block_size, **options)
        if "cuda_graphs" in options:
            executor.warmup()
        return executor

    def engine(self, config: dict[str, Any] | None = None, options: dict[str, Any] | None = None) -> Engine:
        return Engine(self.executor(**(options or {})), EngineConfig(**(config or {})), eos_token_ids=self.eos, seed=1)


@pytest.fixture(scope="module", params=["recall", "gpt_oss", "llama", "mistral", "qwen3_moe"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGED_BACKEND", "torch")
        if request.param == "recall":
            prompts = encode(recall_prompts(5, max_tokens=60))
            made = Case(RECALL, prompts, SamplingParams(temperature=0, max_tokens=8), tight=42, eos=EOS)
            texts = [TOKENIZER.decode(ids[:-1]).strip() for ids in made.tokens]
            assert texts == [prompt.answer for prompt in recall_prompts(5, max_tokens=60)]
            return made
        folder = tmp_path_factory.mktemp(request.param)
        save_checkpoint(FAMILIES[request.param], folder)
        prompts = [tokens(length, seed=length) for length in (1, 5, 17, 30, 23)]
        return Case(folder, prompts, SamplingParams(temperature=0, max_tokens=24), tight=23, eos=[])


@pytest.mark.parametrize("way", WAYS)
def test_same_tokens(case: Case, way: str) -> None:
    config, options = WAYS[way]
    engine = case.engine(config, options)
    assert tokens_of(engine.generate(case.prompts, case.params, progress=False)) == case.tokens
    check_empty(engine)
    status = engine.executor.status()
    assert status.forwards >= engine.metrics.steps > status.graph_replays
    assert bool(status.graph_replays) == ("cuda_graphs" in options)
    assert bool(engine.metrics.prepared_steps) == config.get("prepare_ahead", False)
    preempted = engine.metrics.preempted
    if "num_blocks" not in options:
        assert not preempted
    elif case.folder != RECALL:  # its answers take a block or two, and seldom the one too many
        assert preempted["swap" if way.endswith("swap") else "recompute"] > 0


@pytest.mark.parametrize("way", ["batched", "chunks of 7", "recompute", "graphs, recompute"])
@pytest.mark.parametrize("draft", ["itself", "random", "text"])
def test_same_tokens_with_speculation(case: Case, way: str, draft: str, tmp_path: Path) -> None:
    config, options = WAYS[way]
    target = case.executor(**options)
    drafts: dict[str, Callable[[], LlmExecutor | None]] = {
        "itself": case.executor,
        "random": lambda: _random_draft(case, tmp_path),
        "text": lambda: None,
    }
    drafter = drafts[draft]()
    decoder = SpeculativeDecoder(
        target, drafter, num_draft_tokens=3, config=EngineConfig(**config), eos_token_ids=case.eos
    )
    assert tokens_of(decoder.generate(case.prompts, case.params, progress=False)) == case.tokens
    check_empty(decoder)
    if drafter is not None:
        check_pool_empty(drafter)
    metrics = decoder.metrics
    if draft == "itself" and way == "batched" and not case.eos:  # a token beyond the end is drafted in vain
        assert metrics.accepted_tokens == metrics.draft_tokens > 0
        assert decoder.acceptance_rate == 1
    if draft == "random":
        assert metrics.accepted_tokens < metrics.draft_tokens


def _random_draft(case: Case, folder: Path) -> LlmExecutor:
    """A model of the same vocabulary that knows nothing of the target."""
    config = FAMILIES["llama"].__class__(
        **{**FAMILIES["llama"].to_diff_dict(), "vocab_size": case.executor().info().vocab_size, "num_hidden_layers": 1}
    )
    config.max_position_embeddings = 1024
    save_checkpoint(config, folder)
    return LlmExecutor.from_pretrained(folder, num_blocks=256, block_size=8)


def test_forks_are_the_same(case: Case) -> None:
    engine = case.engine()
    params = SamplingParams(temperature=0, max_tokens=case.params.max_tokens, n=4)
    outputs = engine.generate(case.prompts, params, progress=False)
    for output, expected in zip(outputs, case.tokens, strict=True):
        assert [one.token_ids for one in output.outputs] == [expected] * 4
    assert engine.metrics.prefill_tokens == sum(map(len, case.prompts)), "the prompt runs once for all four"
    check_empty(engine)


@pytest.fixture(scope="module")
def short_case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Few tokens, as a forward takes a third of a second in the interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGED_BACKEND", "torch")
        folder = tmp_path_factory.mktemp("llama")
        save_checkpoint(FAMILIES["llama"], folder)
        prompts = [tokens(length, seed=length) for length in (4, 8, 3)]
        return Case(folder, prompts, SamplingParams(temperature=0, max_tokens=6), tight=6, eos=[])


@pytest.mark.parametrize("way", ["chunks of 7", "recompute", "ahead, swap"])
def test_ways_on_both_backends(short_case: Case, backend: str, way: str) -> None:
    config, options = WAYS[way]
    engine = short_case.engine(config, options)
    assert tokens_of(engine.generate(short_case.prompts, short_case.params, progress=False)) == short_case.tokens
    assert bool(engine.metrics.preempted) == ("num_blocks" in options)
    check_empty(engine)


def test_all_at_once_on_both_backends(backend: str) -> None:
    """Drafts, chunks, swap, a prefix that comes again, and forks."""
    executor = LlmExecutor.from_pretrained(RECALL, num_blocks=16, num_swap_blocks=16)
    config = EngineConfig(chunk_size=16, max_num_seqs=2, preemption="swap", admission_tokens=0)
    engine = SpeculativeDecoder(executor, num_draft_tokens=2, config=config, tokenizer=TOKENIZER, eos_token_ids=EOS)
    params = [SamplingParams(temperature=0, max_tokens=6, n=n) for n in (1, 1, 1, 4)]
    prompts = recall_prompts(3, max_tokens=24, seed=2)
    prompts.append(prompts[0])
    outputs = engine.generate(encode(prompts), params, progress=False)
    for output, prompt in zip(outputs, prompts, strict=True):
        assert {one.text.strip() for one in output.outputs} == {prompt.answer}
    assert outputs[-1].num_cached_tokens > 0
    check_empty(engine)
