"""One prompt has one greedy answer: alone or batched, in any chunks, preempted or not, with or without speculation."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from paged import Engine, EngineConfig, LlmExecutor, SamplingParams, SpeculativeDecoder
from paged.serving.command_line.cli import RECALL
from tests.executors.engine_cases import EOS, TOKENIZER, check_pool_empty, encode, recall_prompts, run
from tests.models.drafts.heads import save_head
from tests.models.families import FAMILIES, VOCAB_SIZE, save_checkpoint, tokens
from tests.pairwise import rows_of_pairs

CHECKPOINTS = ["gpt_oss", "llama", "mistral", "qwen3_moe", "recall"]
TIGHT = {"num_blocks": "tight"}
SWAP = {"admission_tokens": 0, "preemption": "swap"}
SWAPPED = TIGHT | {"num_swap_blocks": 64}
# (engine configuration, executor options); without "tight" there are plenty of blocks.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "batched": ({}, {}),
    "two at a time": ({"max_num_seqs": 2}, {}),
    "chunks of 1": ({"chunk_size": 1}, {}),
    "chunks of 7": ({"chunk_size": 7}, {}),
    "chunks of 64": ({"chunk_size": 64}, {}),
    "budget of 9": ({"token_budget": 9}, {}),
    "no prefix cache": ({}, {"enable_prefix_cache": False}),
    "recompute": ({"admission_tokens": 0}, TIGHT),
    "recompute in chunks": ({"admission_tokens": 0, "chunk_size": 7}, TIGHT),
    "recompute without prefix cache": ({"admission_tokens": 0}, TIGHT | {"enable_prefix_cache": False}),
    "swap": (SWAP, SWAPPED),
    "swap without room": (SWAP, TIGHT | {"num_swap_blocks": 1}),
    "paced": ({"decode_stretch": 1.5}, {}),
    "ahead": ({"overlap": True}, {}),
    "ahead, two at a time": ({"overlap": True, "max_num_seqs": 2}, {}),
    "ahead, recompute": ({"overlap": True, "admission_tokens": 0}, TIGHT),
    "ahead, swap": (SWAP | {"overlap": True}, SWAPPED | {"cuda_graphs": (1, 2, 6)}),
    "graphs": ({}, {"cuda_graphs": (1, 2, 6)}),
    "graphs, recompute": ({"admission_tokens": 0}, TIGHT | {"cuda_graphs": True}),
    "graphs, swap": (SWAP, SWAPPED | {"cuda_graphs": (2, 3)}),
}


class Case:
    """A checkpoint, prompts, and the answer to each alone. `tight` blocks hold the prompts, not what follows."""

    def __init__(
        self, folder: Path, prompts: list[list[int]], *, max_tokens: int, tight: int, eos: list[int] | None = None
    ) -> None:
        self.folder, self.prompts, self.tight, self.eos = folder, prompts, tight, eos or []
        self.params = SamplingParams(temperature=0, max_tokens=max_tokens)
        engine = self.engine()
        self.tokens = [run(engine, [prompt], self.params)[0] for prompt in prompts]

    def executor(self, num_blocks: int | str = 256, block_size: int = 4, **options: Any) -> LlmExecutor:
        count = self.tight if num_blocks == "tight" else num_blocks
        executor = LlmExecutor.from_pretrained(self.folder, num_blocks=count, block_size=block_size, **options)
        if "cuda_graphs" in options:
            executor.warmup()
        return executor

    def engine(self, config: dict[str, Any] | None = None, options: dict[str, Any] | None = None) -> Engine:
        return Engine(self.executor(**(options or {})), EngineConfig(**(config or {})), eos_token_ids=self.eos, seed=1)

    def check(self, way: str) -> Engine:
        """The engine that gave the same tokens in a way."""
        config, options = WAYS[way]
        engine = self.engine(config, options)
        assert run(engine, self.prompts, self.params) == self.tokens
        status, preempted = engine.executor.status(), engine.metrics.preempted
        assert status.forwards >= engine.metrics.steps > status.graph_replays
        assert bool(status.graph_replays) == ("cuda_graphs" in options)
        assert bool(engine.metrics.overlapped_steps) == config.get("overlap", False)
        if "num_blocks" not in options:
            assert not preempted
        elif self.folder != RECALL:  # its answers take a block or two, and seldom the one too many
            assert preempted["swap" if way.endswith("swap") else "recompute"] > 0
        return engine


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """The case of a checkpoint, made once."""

    @cache
    def make(name: str) -> Case:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PAGED_BACKEND", "torch")
            if name == "recall":
                questions = recall_prompts(5, max_tokens=60)
                made = Case(RECALL, encode(questions), max_tokens=8, tight=42, eos=EOS)
                texts = [TOKENIZER.decode(ids[:-1]).strip() for ids in made.tokens]
                assert texts == [question.answer for question in questions]
                return made
            folder, config = tmp_path_factory.mktemp(name), FAMILIES[name.removeprefix("short ")]
            if name == "short llama":  # a forward of one layer takes a quarter of a second in the interpreter
                config.num_hidden_layers = 1
            save_checkpoint(config, folder)
            if name == "short llama":
                return Case(folder, [tokens(n, seed=n) for n in (4, 8)], max_tokens=4, tight=4)
            return Case(folder, [tokens(n, seed=n) for n in (1, 5, 17, 30, 23)], max_tokens=10, tight=23)

    return make


def _thorough(*row: str, unless: bool) -> Any:
    return pytest.param(*row, marks=[] if unless else pytest.mark.thorough)


# Each way with two of the four; the answers of recall are texts.
ROWS = [
    _thorough(CHECKPOINTS[(index + offset) % 4], way, unless=not offset)
    for index, way in enumerate(WAYS)
    for offset in (0, 2)
] + [("recall", way) for way in list(WAYS)[::8]]


@pytest.mark.parametrize(("name", "way"), ROWS)
def test_same_tokens(case_of: Callable[[str], Case], name: str, way: str) -> None:
    case_of(name).check(way)


CHECKED = "batched", "recompute in chunks", "swap", "ahead, recompute", "ahead, swap", "graphs, swap"


@pytest.mark.parametrize(
    ("name", "way"),
    [_thorough(name, way, unless=name == "gpt_oss" and way != "swap") for name in CHECKPOINTS[:4] for way in CHECKED],
)
def test_same_tokens_with_canaries(
    case_of: Callable[[str], Case], name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of(name)
    monkeypatch.setenv("PAGED_CANARY", "1")
    manager = case.check(way).executor.kv_manager
    assert manager is not None
    assert manager.canaries is not None
    manager.check_integrity()


AXES = CHECKPOINTS, ["batched", "chunks of 7", "recompute", "graphs, recompute"], ["itself", "random", "text", "head"]
DRAFTED = [[axis[at] for axis, at in zip(AXES, row, strict=True)] for row in rows_of_pairs(AXES)]


@pytest.mark.parametrize(
    ("name", "way", "draft"), [_thorough(*row, unless=index < 12) for index, row in enumerate(DRAFTED)]
)
def test_same_tokens_with_speculation(
    case_of: Callable[[str], Case], name: str, way: str, draft: str, tmp_path: Path
) -> None:
    case = case_of(name)
    config, options = WAYS[way]
    if draft == "head":
        save_head("eagle3", tmp_path, vocab_size=469 if name == "recall" else VOCAB_SIZE)
        options = options | {"draft": tmp_path}
    target, drafter = case.executor(**options), None
    if draft == "itself":
        drafter = case.executor()
    elif draft == "random":  # a model of the same vocabulary that knows nothing of the target
        other = FAMILIES["llama"]
        other.vocab_size, other.num_hidden_layers = target.info().vocab_size, 1
        other.max_position_embeddings = 1024
        save_checkpoint(other, tmp_path)
        drafter = LlmExecutor.from_pretrained(tmp_path, num_blocks=256, block_size=8)
    decoder = SpeculativeDecoder(
        target, drafter, num_draft_tokens=3, config=EngineConfig(**config), eos_token_ids=case.eos
    )
    assert run(decoder, case.prompts, case.params) == case.tokens
    if drafter is not None:
        check_pool_empty(drafter)
    metrics = decoder.metrics
    if draft == "itself" and way == "batched" and not case.eos:  # a token beyond the end is drafted in vain
        assert metrics.accepted_tokens == metrics.draft_tokens > 0
        assert decoder.acceptance_rate == 1
    if draft in ("random", "head"):
        assert metrics.accepted_tokens < metrics.draft_tokens


@pytest.mark.parametrize("name", [_thorough(name, unless=name == "mistral") for name in CHECKPOINTS])
def test_forks_are_the_same(case_of: Callable[[str], Case], name: str) -> None:
    case = case_of(name)
    engine = case.engine()
    params = SamplingParams(temperature=0, max_tokens=case.params.max_tokens, n=4)
    outputs = engine.generate(case.prompts, params, progress=False)
    assert [[one.token_ids for one in output.outputs] for output in outputs] == [[ids] * 4 for ids in case.tokens]
    assert engine.metrics.prefill_tokens == sum(map(len, case.prompts)), "the prompt runs once for all four"
    check_pool_empty(engine.executor)


@pytest.mark.parametrize("way", [_thorough(one, unless=one == "swap") for one in ("swap", "recompute", "ahead, swap")])
def test_ways_in_triton(case_of: Callable[[str], Case], way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of("short llama")
    monkeypatch.setenv("PAGED_BACKEND", "triton")
    case.check(way)
