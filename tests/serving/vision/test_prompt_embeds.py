"""Prompts with images through the engine: as transformers, and the same tokens however they run."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from paged import (
    Engine,
    EngineConfig,
    InvalidInputError,
    LlmExecutor,
    PromptEmbeds,
    PromptLookup,
    SamplingParams,
    UnifiedBatch,
    UnifiedBatchItem,
    UnsupportedError,
    VerifyLogits,
)
from tests.executors.engine_cases import check_empty, run_to_end, tokens_of
from tests.executors.oracle import make_executor
from tests.models.families import FAMILIES, assert_same_logits, save_checkpoint, tokens
from tests.models.lora.folders import Adapter
from tests.serving.vision.towers import Prompt, Tower
from tests.tolerance import assert_logprobs

SIZES: dict[str, Any] = {"block_size": 4, "num_blocks": 96, "num_swap_blocks": 96, "progress": False}
TEN = SamplingParams(temperature=0, max_tokens=10)
FAST = ("qwen3_vl", "gemma3")
OTHERS = [
    pytest.param(name, marks=pytest.mark.thorough) for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl_moe", "llava")
]
MakeTower = Callable[[str], Tower]


def two_images(tower: Tower) -> Prompt:
    return tower.prompt(tokens(7), 1, tokens(5, 1), 2, tokens(6, 2))


def executor_of(tower: Tower, **options: Any) -> LlmExecutor:
    return LlmExecutor.from_pretrained(tower.folder, **SIZES | options)


def generate(engine: Engine, *prompts: Prompt, params: SamplingParams = TEN) -> list[list[int]]:
    outputs = [engine.add_request(one.ids, params, prompt_embeds=one.embeds) for one in prompts]
    run_to_end(engine)
    return tokens_of(outputs)


@pytest.mark.parametrize("name", [*FAST, *OTHERS])
def test_logits_and_tokens_are_those_of_transformers(tower: MakeTower, name: str) -> None:
    """Two images and text in turns: in one forward, and in chunks whose boundaries fall into images."""
    with_images = two_images(tower(name))
    executor = executor_of(tower(name), enable_prefix_cache=False)
    item = UnifiedBatchItem("a", with_images.ids, embeds=with_images.embeds, logits_policy=VerifyLogits())
    assert_same_logits(executor.unified_decode(UnifiedBatch([item]))[0], tower(name).logits(with_images))
    executor.release_cache("a")
    expected = tower(name).greedy(with_images, 10)
    assert len(set(expected)) > 1
    for budget in (64, 10):
        engine = Engine(executor, EngineConfig(token_budget=budget), eos_token_ids=())
        assert generate(engine, with_images) == [expected]


@pytest.mark.parametrize("name", ["qwen3_vl", pytest.param("gemma3", marks=pytest.mark.thorough)])
def test_equal_images_share_and_others_do_not(tower: MakeTower, name: str) -> None:
    """Also with an answer and another image after them, as in a conversation's next turn; and never with plain text."""
    first, other = two_images(tower(name)), tower(name).prompt(tokens(7), 4, tokens(5, 1), 2, tokens(6, 2))
    assert first.ids[: len(tokens(7)) + 4] == other.ids[: len(tokens(7)) + 4]
    engine = Engine(executor_of(tower(name)), eos_token_ids=())
    answer = generate(engine, first)[0]
    next_turn = tower(name).prompt(tokens(7), 1, tokens(5, 1), 2, [*tokens(6, 2), *answer], 3, tokens(4, 3))
    before_image, whole = 8 // 4 * 4, min(len(first.ids) // 4 * 4, len(first.ids) - 1)
    for prompt, cached in [(first, whole), (other, before_image), (next_turn, (len(first.ids) + 9) // 4 * 4)]:
        output = engine.add_request(prompt.ids, TEN, prompt_embeds=prompt.embeds)
        run_to_end(engine)
        assert output.num_cached_tokens == cached
        assert output.outputs[0].token_ids == tower(name).greedy(prompt, 10)
    as_text = engine.add_request(first.ids, TEN)
    run_to_end(engine)
    assert as_text.num_cached_tokens == before_image
    assert as_text.outputs[0].token_ids != answer


WAYS: dict[str, dict[str, Any]] = {
    "recompute": {"preemption": "recompute"},
    "swap": {"preemption": "swap"},
    "overlap": {"overlap": True},
    "paced": {"decode_stretch": 1.1, "token_budget": 12},
}


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize(("way", "num_blocks"), [("recompute", 22), ("swap", 22), ("overlap", 96), ("paced", 96)])
@pytest.mark.thorough
def test_tokens_do_not_depend_on_how_it_runs(tower: MakeTower, name: str, way: str, num_blocks: int) -> None:
    prompts = [two_images(tower(name)), tower(name).prompt(3, tokens(9)), tower(name).prompt(tokens(9, 5), 2, [1])]
    config = EngineConfig(**{"token_budget": 16, "admission_tokens": 0} | WAYS[way])
    executor = executor_of(tower(name), num_blocks=num_blocks)
    engine = Engine(executor, config, eos_token_ids=())
    text = engine.add_request(tokens(5, 8), replace(TEN, max_tokens=24))
    assert generate(engine, *prompts) == [tower(name).greedy(one, 10) for one in prompts]
    assert engine.metrics.mixed_steps > 0
    assert engine.metrics.preempted[way] > 0 if way in ("recompute", "swap") else True
    assert bool(engine.metrics.overlapped_steps) == (way == "overlap")
    assert generate_text(engine, tokens(5, 8)) == text.outputs[0].token_ids


def generate_text(engine: Engine, prompt: list[int]) -> list[int]:
    output = engine.add_request(prompt, replace(TEN, max_tokens=24))
    run_to_end(engine)
    return output.outputs[0].token_ids


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAST)
def test_forks_drafts_and_prompt_logprobs(tower: MakeTower, name: str) -> None:
    prompt = two_images(tower(name))
    engine = Engine(executor_of(tower(name)), eos_token_ids=(), proposer=PromptLookup(3))
    params = SamplingParams(n=3, max_tokens=20, temperature=0, prompt_logprobs=1)
    output = engine.add_request(prompt.ids, params, prompt_embeds=prompt.embeds)
    run_to_end(engine)
    expected = tower(name).greedy(prompt, 20)
    assert [one.token_ids for one in output.outputs] == [expected] * 3
    scores = tower(name).logits(prompt).log_softmax(-1)
    table = output.prompt_logprobs
    assert table is not None
    found = [row[token] for row, token in zip(table[1:], prompt.ids[1:], strict=True) if row is not None]
    wanted = scores[range(len(prompt.ids) - 1), prompt.ids[1:]]
    assert_logprobs(found, wanted)


def test_a_span_runs_in_one_step(tower: MakeTower) -> None:
    """It waits for the decodes that leave it no room; one that no step holds is refused, and so is a cut one."""
    prompt = tower("gemma3").prompt([1, 2], 1, [3])
    executor = executor_of(tower("gemma3"))
    engine = Engine(executor, EngineConfig(token_budget=4), eos_token_ids=())
    texts = [engine.add_request([5 + index], replace(TEN, max_tokens=4 + index)) for index in range(3)]
    engine.step()
    assert generate(engine, prompt) == [tower("gemma3").greedy(prompt, 10)]
    assert [len(text.outputs[0].token_ids) for text in texts] == [4, 5, 6]
    with pytest.raises(InvalidInputError, match="the token budget"):
        Engine(executor, EngineConfig(token_budget=3)).add_request(prompt.ids, TEN, prompt_embeds=prompt.embeds)
    with pytest.raises(InvalidInputError, match="within the span"):
        executor.unified_decode(UnifiedBatch([UnifiedBatchItem("a", prompt.ids[:4], embeds=prompt.embeds)]))
    check_empty(engine)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LlmExecutor:
    """With an adapter, "one"."""
    folder = tmp_path_factory.mktemp("llama")
    save_checkpoint(FAMILIES["llama"], folder / "base")
    executor = LlmExecutor.from_pretrained(folder / "base", **SIZES, cuda_graphs=[4])
    Adapter(("q_proj", "v_proj", "down_proj"), rank=4, seed=1).save(folder / "one", folder / "base")
    executor.load_lora("one", folder / "one")
    return executor


def as_rows(executor: LlmExecutor, ids: list[int]) -> tuple[list[int], PromptEmbeds]:
    """A prompt with the embeddings of every third token in place of it."""
    positions = range(1, len(ids), 3)
    table = executor.model.network.embed_tokens.detach()
    placeholders = [0 if position in positions else token for position, token in enumerate(ids)]
    return placeholders, PromptEmbeds(positions, table[[ids[position] for position in positions]])


def test_rows_that_are_token_embeddings_change_nothing(llama: LlmExecutor) -> None:
    """Beside text and in recorded steps, and with an adapter; what follows the prompt is text, with or without rows
    before it."""
    llama.warmup(progress=False)
    ids, engine = tokens(30, 4), Engine(llama, EngineConfig(token_budget=16), eos_token_ids=())
    placeholders, embeds = as_rows(llama, ids)
    outputs = []
    for metadata in ({}, {"lora_adapter": "one"}):
        outputs.append(engine.add_request(ids, TEN, metadata=metadata))
        outputs.append(engine.add_request(placeholders, TEN, prompt_embeds=embeds, metadata=metadata))
    replays = llama.status().graph_replays
    run_to_end(engine)
    plain, embedded, adapted, embedded_and_adapted = tokens_of(outputs)
    assert embedded == plain != adapted == embedded_and_adapted
    assert [output.num_cached_tokens for output in outputs] == [0] * 4
    assert llama.status().graph_replays > replays


def test_what_does_not_fit_is_refused_and_leaves_nothing(llama: LlmExecutor) -> None:
    engine = Engine(llama)
    rows = torch.zeros(2, llama.info().hidden_size)
    engine.add_request([1, 2, 3], TEN, prompt_embeds=PromptEmbeds([0, 1], rows))
    for wrong in ("rows", rows, PromptEmbeds([0, 1], rows[:, 1:]), PromptEmbeds([0, 3], rows)):
        with pytest.raises(InvalidInputError):
            engine.add_request([1, 2, 3], TEN, prompt_embeds=wrong)  # type: ignore[arg-type]
    rope, oracle = torch.arange(3).expand(3, 3), make_executor(torch.device("cpu"), num_blocks=8)
    with pytest.raises(UnsupportedError, match="one axis"):
        engine.add_request([1, 2, 3], TEN, prompt_embeds=PromptEmbeds([0, 1], rows, rope_positions=rope))
    with pytest.raises(UnsupportedError, match="token ids only"):
        oracle.unified_decode(UnifiedBatch([UnifiedBatchItem("a", [1], embeds=PromptEmbeds([0], rows[:1]))]))
    assert engine.num_unfinished == 1
    run_to_end(engine)
