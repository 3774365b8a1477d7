"""BlockSpace: what is accepted runs, preemption where blocks run out, and prefixes shared by those alone that may."""

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paged import (
    Engine,
    EngineConfig,
    InvalidInputError,
    LlmExecutor,
    PromptEmbeds,
    RequestOutput,
    Retention,
    SamplingParams,
)
from paged.executors.engine.cache_space import BlockSpace
from paged.executors.requests import request
from paged.executors.requests.request import Completion, State
from paged.executors.speculation.draft_model import DraftModel
from paged.executors.speculation.prompt_lookup import PromptLookup
from paged.models.recall.task import sample_pairs
from paged.prompt_embeds import EmbedsLimits
from tests.cache.test_groups import random_groups
from tests.executors.engine_cases import (
    EOS,
    GREEDY,
    PROMPTS,
    TEN,
    TOKENIZER,
    check_empty,
    recall_engine,
    run,
    run_to_end,
    spy,
)
from tests.executors.oracle import EchoExecutor, make_executor
from tests.models.families import FAMILIES, save_checkpoint, tokens


def test_preemptions_are_counted_and_told(device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    """By request, with the tokens that ran twice; one line says what was lacking, however many there are."""
    engine = Engine(make_executor(device, num_blocks=6), EngineConfig(admission_tokens=0))
    outputs = engine.generate(PROMPTS, TEN, progress=False)
    metrics = [output.metrics for output in outputs]
    assert sum(one.preemptions for one in metrics) == engine.metrics.preempted["recompute"] > 1
    # The newest token of a preempted one had not run: it is computed once, with the prompt's.
    computed = sum(map(len, PROMPTS)) - engine.metrics.cached_tokens + engine.metrics.preempted["recompute"]
    assert sum(one.recomputed_tokens for one in metrics) == engine.metrics.prefill_tokens - computed > 0
    assert all(bool(one.recomputed_tokens) <= bool(one.preemptions) for one in metrics)
    reasons = {one.preemption_reason for one in metrics if one.preemptions}
    assert "needs 1 block, 0 of 6 free" in reasons
    (line,) = [record.getMessage() for record in caplog.records]
    assert re.search(r"was preempted \(recompute\): needs 1 block, 0 of 6 free; see admission_tokens", line)


def test_swap_needs_blocks_of_the_host(device: torch.device) -> None:
    with pytest.raises(InvalidInputError, match="num_swap_blocks"):
        Engine(make_executor(device), EngineConfig(preemption="swap"))
    Engine(make_executor(device, num_swap_blocks=1), EngineConfig(preemption="swap"))


def test_blocks_held_by_others(device: torch.device) -> None:
    """A request that would fit an empty cache says why it does not run, or waits if it can."""
    executor = make_executor(device, num_blocks=4)
    other = executor.kv_manager.allocate("other", 20)
    engine = Engine(executor)
    blocked, small = engine.generate([[1] * 20, [2] * 5], replace(TEN, max_tokens=2), progress=False)
    assert blocked.error == "the cache has no room for it, and no request here holds any"
    assert small.error is None
    executor.kv_manager.free(other)
    assert run(engine, [[1] * 20], TEN) == [[1] * 10]
    alone = engine.add_request([1] * 8, TEN)
    engine.step()
    executor.kv_manager.allocate("other", executor.kv_manager.stats().free_blocks * 8)
    while engine.num_unfinished:
        engine.step()
    assert str(alone.error).startswith("OutOfBlocksError")


@pytest.mark.parametrize("is_repeated", [False, True])
def test_an_admission_that_fails_late_holds_nothing(
    is_repeated: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, also for one that is swapped out: each runs all the same. Twice: the error is the reason."""
    config = EngineConfig(admission_tokens=0, preemption="swap")
    expected = run(Engine(make_executor(device, num_blocks=6, num_swap_blocks=40), config), PROMPTS, TEN)
    engine = Engine(make_executor(device, num_blocks=6, num_swap_blocks=40), config)
    growth_of = BlockSpace._growth_of
    calls = []

    def failing(space: BlockSpace, completion: Completion) -> int:
        if completion.state is State.WAITING:
            calls.append(completion)
            if is_repeated or len(calls) % 2:
                raise MemoryError("full")
        return growth_of(space, completion)

    monkeypatch.setattr(BlockSpace, "_growth_of", failing)
    outputs = engine.generate(PROMPTS, TEN, progress=False)
    if is_repeated:
        assert {output.error for output in outputs} == {"MemoryError: full"}
    else:
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert engine.metrics.preempted["swap"] > 0
    check_empty(engine)


@pytest.mark.parametrize("num_blocks", [256, 160])
def test_a_prefix_of_many_prompts_is_computed_once(num_blocks: int) -> None:
    """A checkpoint's right answers to 32 prompts, 405 tokens of which are alike; 160 blocks hold the prompts alone."""
    pairs = sample_pairs(random.Random("prefix reuse"), 405)
    context = " ".join(" ".join(pair[:-1]) + pair[-1] for pair in pairs)
    prompts = [TOKENIZER.encode(f"{context} {key}").ids for key, *_ in pairs[:32]]
    assert {len(prompt) for prompt in prompts} == {406}
    options = {"block_size": 4, "num_swap_blocks": 64}
    engine = recall_engine(num_blocks, options=options, preemption="swap", admission_tokens=0)
    for _ in range(2):
        outputs = [engine.add_request(prompts[0], replace(GREEDY, ignore_eos=True))]
        engine.step()
        outputs += [engine.add_request(prompt, replace(GREEDY, ignore_eos=True)) for prompt in prompts[1:]]
        engine.step()
        assert engine.status().used_blocks == 101 + 32
        run_to_end(engine)
        answers = [ids[: ids.index(EOS[0])] for ids in (output.outputs[0].token_ids for output in outputs)]
        assert [TOKENIZER.decode(ids).strip() for ids in answers] == [" ".join(value) for _, *value, _ in pairs[:32]]
        assert [output.num_cached_tokens for output in outputs[1:]] == [404] * 31
    assert engine.metrics.prefill_tokens == 406 + 63 * 2, "also where some were swapped out"
    assert bool(engine.metrics.preempted["swap"]) == (num_blocks == 160)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([{"metadata": {"lora_adapter": "french"}}, {}, {"metadata": {"lora_adapter": "french"}}], [0, 0, 16]),
        ([{}, {"metadata": {"lora_adapter": None}}, {"adapter": "french"}], [0, 16, 0]),
        ([{}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a"}, {}], [0, 0, 0, 16, 16]),
    ],
)
def test_adapters_and_salts_part_prefixes(
    options: list[dict[str, Any]], expected: list[int], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And adapters reach the items."""
    executor = make_executor(device)
    monkeypatch.setattr(executor, "_choose_adapters", lambda items: None)
    takes = replace(executor.capabilities(), supports_lora=True)
    monkeypatch.setattr(executor, "capabilities", lambda: takes)
    seen: list[Any] = []
    spy(monkeypatch, executor, lambda step: seen.extend(item.metadata.get("lora_adapter") for item in step.items))
    engine = Engine(executor)
    cached = []
    for one in options:
        output = engine.add_request([4] * 20, replace(TEN, max_tokens=1), **one)
        run_to_end(engine)
        cached.append(output.num_cached_tokens)
    assert cached == expected
    assert seen == [one.get("adapter") or one.get("metadata", {}).get("lora_adapter") for one in options]


def test_kept_prefixes_of_requests(device: torch.device) -> None:
    """By a priority or a pin they outlive other prompts; a salt's prefixes are forgotten together, its pins too."""
    engine = Engine(make_executor(device, num_blocks=16, max_pinned_fraction=0.3))
    one_token = replace(TEN, max_tokens=1)

    def cached(first: int, **options: Any) -> int:
        output = engine.add_request([first] * 20, one_token, **options)
        run_to_end(engine)
        return output.num_cached_tokens

    cached(1, retention=Retention(num_tokens=16), cache_salt="a")
    cached(2, cache_salt="a")
    pin = engine.pin_prefix([2] * 20, cache_salt="a")
    assert (engine.status().retained_blocks, engine.status().pinned_blocks) == (2, 2)
    for first in range(3, 13):
        cached(first)
    assert [cached(first, cache_salt="a") for first in (1, 2)] == [16, 16]
    engine.forget_prefixes("a")
    assert [cached(first, cache_salt="a") for first in (1, 2)] == [0, 0]
    assert not pin.is_held
    with pytest.raises(InvalidInputError, match="retention: 3, expected a Retention"):
        engine.add_request([1], one_token, retention=3)  # type: ignore[arg-type]
    check_empty(engine)


def random_engine(draw: random.Random, device: torch.device) -> Engine:
    """Over layers with and without windows, in a small cache: every way of running that takes blocks."""
    size, num_layers = draw.choice((1, 2, 4, 8, 16)), draw.randint(1, 6)
    options: dict[str, Any] = {"groups": random_groups(draw, num_layers), "num_layers": num_layers, "num_heads": 1}
    options |= {"num_kv_heads": 1, "max_sequence_length": 10_000, "num_swap_blocks": draw.choice((0, 30))}
    way = draw.choice(("plain", "plain", "overlap", "invariant", "lookup", "draft", "head", "recurrent"))
    slots = {"num_slots": draw.choice((2, 3, 16)), "num_swap_slots": draw.choice((0, 8))}
    states = slots if way == "recurrent" else None
    num_blocks = draw.randint(1, 60)
    executor = make_executor(
        device, kind=EchoExecutor, num_blocks=num_blocks, block_size=size, states=states, **options
    )
    if way == "head":
        able = replace(executor.capabilities(), has_draft_head=True)
        executor.capabilities = lambda: able
    if states is None:  # no model has recurrent layers and spans
        executor.embeds_limits = EmbedsLimits(8, num_layers, 10_000, False, None)
    proposer = {"lookup": PromptLookup(3), "draft": DraftModel(executor, 3)}.get(way)
    ways = ("swap" if options["num_swap_blocks"] else "recompute", "recompute")
    config = EngineConfig(
        token_budget=draw.choice((4, 16, 64, 300, 2048)),
        chunk_size=draw.choice((None, None, 5)),
        admission_tokens=draw.choice((0, 5, None)),
        preemption=draw.choice(ways),
        overlap=way == "overlap",
        batch_invariant=way == "invariant",
    )
    return Engine(executor, config, proposer=proposer)


def random_request(engine: Engine, draw: random.Random, *, is_longest: bool) -> RequestOutput | None:
    """A request of what the cache can hold, or of less; None if it is refused."""
    room = engine.executor.kv_manager.config.capacity_tokens
    if room == 0:
        return None
    max_tokens = min(draw.randint(1, 12), room)
    length = room - max_tokens + 1
    if not is_longest:
        length = draw.randint(1, length)
    options: dict[str, Any] = {"n": draw.choice((1, 1, 3)), "prompt_logprobs": draw.choice((None, None, 1))}
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, **options)
    begin, embeds = draw.randrange(length), None
    if draw.random() < 0.3 and engine.executor.embeds_limits is not None:
        end = draw.randint(begin + 1, min(begin + engine.config.token_budget, length))
        embeds = PromptEmbeds(range(begin, end), torch.zeros(end - begin, 8), spans=[(begin, end)])
    try:
        return engine.add_request([draw.randrange(3)] * length, params, prompt_embeds=embeds)
    except InvalidInputError:
        assert embeds is not None or engine.config.batch_invariant, "parts of it may have any size"
        return None


@pytest.mark.parametrize(
    "seed", [*range(20), *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(20, 200))]
)
def test_what_is_accepted_runs(seed: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, up to the last token that the cache can hold, and beside others, whatever a step may run."""
    draw = random.Random(seed)
    monkeypatch.setattr(request, "FIXED_CHUNK", draw.choice((4, 16, 256)))
    engine = random_engine(draw, device)
    for is_longest in (True, False):
        outputs = [random_request(engine, draw, is_longest=is_longest) for _ in range(1 if is_longest else 4)]
        run_to_end(engine)
        for output in outputs:
            assert output is None or output.error is None
        check_empty(engine)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layer with a window and one without."""
    save_checkpoint(FAMILIES["gemma3"], folder := tmp_path_factory.mktemp("gemma3"))
    return folder


def test_the_longest_prompt_in_any_budget(gemma: Path) -> None:
    """Same tokens, embeddings and beams as in a cache that lacks no blocks."""
    small, large = (LlmExecutor.from_pretrained(gemma, block_size=4, num_blocks=count) for count in (20, 400))
    room = small.kv_capacity()
    assert room < small.info().max_sequence_length
    prompt, params = tokens(room - 3, 1), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    roomy = Engine(large, EngineConfig(token_budget=16))
    expected = run(roomy, [prompt], params)
    beams = [one.token_ids for one in roomy.beam_search(prompt[:-8], 1, 4)]
    rows = roomy.embed([prompt, prompt[:9]])
    for token_budget in (16, 64, 2048):
        engine = Engine(small, EngineConfig(token_budget=token_budget))
        assert run(engine, [prompt], params) == expected
        assert [one.token_ids for one in engine.beam_search(prompt[:-8], 1, 4)] == beams
        torch.testing.assert_close(engine.embed([prompt, prompt[:9]]), rows, atol=1e-4, rtol=0)
        check_empty(engine)
