"""The engine under load and in trouble: everything ends, nothing leaks, and a failure takes nobody with it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from paged import (
    Engine,
    EngineConfig,
    InvalidInputError,
    PagedAttentionExecutor,
    RequestOutput,
    SamplingParams,
    SequenceTooLongError,
    UnifiedBatch,
)
from paged.executors.command_line.closed_form import expected_logits
from paged.executors.model_executor import ExecutorShutDownError
from tests.executors.engine_cases import (
    EOS,
    GREEDY,
    TOKENIZER,
    check_empty,
    encode,
    recall_engine,
    recall_prompts,
    run,
    tokens_of,
)
from tests.executors.minimal_executor import MinimalExecutor
from tests.executors.oracle import make_executor
from tests.executors.test_llm_executor import Parrot, UnifiedParrot, UnsupportedParrot, other_executor, parrot_logits

PROMPTS = [[(7 * i + j * j) % 11 for j in range(3 + 5 * i)] for i in range(5)]
TEN = SamplingParams(temperature=0, max_tokens=10)


def expected_tokens(prompt: list[int], count: int) -> list[int]:
    """The oracle's greedy answer, from its formula."""
    config, tokens = make_executor(torch.device("cpu"), num_blocks=1).config, list(prompt)
    for _ in range(count):
        tokens.append(int(expected_logits(config, tokens).float().argmax()))
    return tokens[len(prompt) :]


def spy(monkeypatch: pytest.MonkeyPatch, executor: Any, before: Callable[[UnifiedBatch], None]) -> None:
    """Calls `before` with every batch that goes to the executor."""
    forward = executor.unified_decode

    def unified_decode(batch: UnifiedBatch) -> Any:
        before(batch)
        return forward(batch)

    monkeypatch.setattr(executor, "unified_decode", unified_decode)


@pytest.mark.parametrize("length", [1, 2, 30])
@pytest.mark.parametrize("chunk_size", [4, 64, None])
def test_n_tokens_are_one_prefill_and_the_decodes(length: int, chunk_size: int | None, device: torch.device) -> None:
    executor = make_executor(device)
    prompt = [(3 * i + 1) % 11 for i in range(length)]
    engine = Engine(executor, EngineConfig(chunk_size=chunk_size))
    [output] = engine.generate([prompt], TEN, progress=False)
    assert output.outputs[0].token_ids == expected_tokens(prompt, 10)
    assert (executor.prefill_count, executor.decode_count) == (1, 9)
    metrics = engine.metrics
    assert (metrics.prefill_tokens, metrics.decode_tokens, metrics.generated_tokens) == (length, 9, 10)
    assert metrics.steps == math.ceil(length / (chunk_size or length)) + 9
    check_empty(engine)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_five_requests_in_six_blocks(preemption: Any, device: torch.device) -> None:
    """Each needs up to 4 blocks of 8."""
    executor = make_executor(device, num_blocks=6)
    engine = Engine(executor, EngineConfig(preemption=preemption, admission_tokens=0))
    assert tokens_of(engine.generate(PROMPTS, TEN, progress=False)) == [expected_tokens(p, 10) for p in PROMPTS]
    assert engine.metrics.preempted["recompute"] > 0
    check_empty(engine)


def test_room_for_all_that_may_come_makes_preemption_needless(device: torch.device) -> None:
    engine = Engine(make_executor(device, num_blocks=6), EngineConfig(admission_tokens=None))
    assert tokens_of(engine.generate(PROMPTS, TEN, progress=False)) == [expected_tokens(p, 10) for p in PROMPTS]
    assert not engine.metrics.preempted
    assert engine.metrics.decode_tokens == 9 * len(PROMPTS)


def test_a_reservation_that_fails_runs_nothing(device: torch.device) -> None:
    """With swap nothing is computed twice, so the executor's counts are exact whatever was refused in between."""
    prompts = [[i] * 16 for i in range(1, 6)]
    executor = make_executor(device, num_blocks=12, num_swap_blocks=32)
    engine = Engine(executor, EngineConfig(preemption="swap", admission_tokens=0))
    assert tokens_of(engine.generate(prompts, TEN, progress=False)) == [expected_tokens(p, 10) for p in prompts]
    assert engine.metrics.preempted["swap"] > 0
    assert not engine.metrics.preempted["recompute"]
    assert (executor.prefill_count, executor.decode_count) == (5, 45)
    assert executor.status().prefill_tokens == engine.metrics.prefill_tokens == 80
    assert executor.kv_manager.stats().allocation_failures > 0
    check_empty(engine)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_poisson_arrivals_with_aborts(preemption: Any, device: torch.device) -> None:
    rng = random.Random(5)
    executor = make_executor(device, num_blocks=40, num_swap_blocks=20)
    config = EngineConfig(token_budget=48, max_num_seqs=24, preemption=preemption, admission_tokens=4)
    engine = Engine(executor, config, seed=1)
    outputs: list[RequestOutput] = []
    live: list[RequestOutput] = []
    aborted: set[Any] = set()
    reported: dict[Any, int] = {}
    next_arrival, step = 0.0, 0
    while len(outputs) < 200 or engine.num_unfinished:
        while len(outputs) < 200 and next_arrival <= step:
            params = SamplingParams(
                temperature=rng.choice([0.0, 1.0]), max_tokens=rng.randint(1, 30), n=rng.choice([1, 1, 3]), seed=3
            )
            prompt = [rng.randrange(11) for _ in range(rng.randint(1, 60))]
            outputs.append(engine.add_request(prompt, params, priority=rng.choice([0, 0, 1])))
            live.append(outputs[-1])
            next_arrival += rng.expovariate(1.2)
        if live and rng.random() < 0.2:
            victim = rng.choice(live)
            assert engine.abort(victim.request_id)
            assert victim.finished
            assert not engine.abort(victim.request_id)
            live.remove(victim)
            aborted.add(victim.request_id)
        for output in engine.step():
            if output.finished:
                assert output.request_id not in reported
                reported[output.request_id] = step
        live = [output for output in live if not output.finished]
        step += 1
        if step % 10 == 0:
            executor.kv_manager.check_integrity()
    assert len({output.request_id for output in outputs}) == 200
    assert all(output.finished and output.error is None for output in outputs)
    for output in outputs:
        reasons = {one.finish_reason for one in output.outputs}
        assert reasons <= ({"length", "abort"} if output.request_id in aborted else {"length"})
        assert (output.request_id in reported) != (output.request_id in aborted)
    assert sum(engine.metrics.finished.values()) == 200
    assert engine.metrics.finished["abort"] > 10
    assert engine.metrics.preempted
    assert not engine.metrics.failed_forwards
    check_empty(engine)


def test_one_that_cannot_run_fails_alone(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its third token breaks the forward it is in, whoever else is in that forward."""
    executor = make_executor(device)
    engine = Engine(executor)
    outputs = [engine.add_request(prompt, TEN, metadata={"place": at}) for at, prompt in enumerate(PROMPTS)]
    poisoned = outputs[2]

    def breaks(batch: UnifiedBatch) -> None:
        for item in batch.items:
            if item.metadata["place"] == 2 and len(poisoned.outputs[0].token_ids) == 3:
                raise RuntimeError("a bad token")

    spy(monkeypatch, executor, breaks)
    while engine.num_unfinished:
        engine.step()
    assert (poisoned.outputs[0].finish_reason, poisoned.error) == ("error", "RuntimeError: a bad token")
    assert poisoned.outputs[0].token_ids == expected_tokens(PROMPTS[2], 3)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        if output is not poisoned:
            assert output.error is None
            assert output.outputs[0].token_ids == expected_tokens(prompt, 10)
    assert engine.metrics.finished == {"length": 4, "error": 1}
    assert engine.metrics.failed_forwards == 3, "of five, of two, of one"
    check_empty(engine)


@pytest.mark.parametrize("n", [1, 3])
def test_an_error_that_does_not_come_again_costs_nobody(
    n: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = make_executor(device, num_blocks=64)
    engine = Engine(executor)
    calls = [0]

    def flaky(batch: UnifiedBatch) -> None:
        calls[0] += 1
        if calls[0] in (1, 4, 9):
            raise RuntimeError("a moment of weakness")

    spy(monkeypatch, executor, flaky)
    outputs = engine.generate(PROMPTS, replace(TEN, n=n), progress=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert [one.token_ids for one in output.outputs] == [expected_tokens(prompt, 10)] * n
    assert engine.metrics.failed_forwards == 3
    check_empty(engine)


def test_a_prompt_that_fails_takes_its_forks_along(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make_executor(device)
    engine = Engine(executor)

    def breaks(batch: UnifiedBatch) -> None:
        if any(5 in item.q_tokens for item in batch.items):
            raise RuntimeError("five")

    spy(monkeypatch, executor, breaks)
    bad, good = engine.generate([[1, 5], [1, 2]], SamplingParams(n=3, temperature=0, max_tokens=1), progress=False)
    assert [one.finish_reason for one in bad.outputs] == ["error"] * 3
    assert [one.finish_reason for one in good.outputs] == ["length"] * 3
    assert bad.error == "RuntimeError: five"
    check_empty(engine)


@pytest.mark.parametrize("change", [lambda rows: rows[:-1], lambda rows: [None, *rows[1:]], lambda rows: []])
def test_results_that_do_not_fit(
    change: Callable[[list[Any]], list[Any]], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an executor, which may have moved its caches on, or of a model, whose executor takes back what it did."""
    executor = make_executor(device)
    forward = executor.unified_decode
    monkeypatch.setattr(executor, "unified_decode", lambda batch: change(forward(batch)))
    engine = Engine(executor)
    for output in engine.generate(PROMPTS, TEN, progress=False):
        assert output.outputs[0].finish_reason == "error"
        assert output.error is not None
        assert "results for 5 items" in output.error
    assert engine.metrics.failed_forwards == 1
    check_empty(engine)

    model = UnifiedParrot()
    monkeypatch.setattr(model, "answer", change)
    for output in Engine(other_executor(model)).generate([[1], [2]], GREEDY, progress=False):
        assert output.error is not None
    assert model.caches == {}


def test_logits_that_say_nothing(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make_executor(device)
    forward = executor.unified_decode

    def unified_decode(batch: UnifiedBatch) -> Any:
        rows = forward(batch)
        return [row * math.nan if item.q_tokens[0] == 5 else row for row, item in zip(rows, batch.items, strict=True)]

    monkeypatch.setattr(executor, "unified_decode", unified_decode)
    engine = Engine(executor)
    bad, good = engine.generate([[5, 1], [1, 2]], replace(TEN, max_tokens=1), progress=False)
    assert (bad.outputs[0].token_ids, bad.error) == ([], "the logits left no token to choose")
    assert good.outputs[0].token_ids == expected_tokens([1, 2], 1)
    check_empty(engine)


def test_blocks_held_by_others(device: torch.device) -> None:
    """A request that would fit an empty cache says why it does not run, or waits if it can."""
    executor = make_executor(device, num_blocks=4)
    other = executor.kv_manager.allocate("other", 20)
    engine = Engine(executor)
    blocked, small = engine.generate([[1] * 20, [2] * 5], replace(TEN, max_tokens=2), progress=False)
    assert blocked.error == "the cache has no room for it, and no request here holds any"
    assert small.error is None
    executor.kv_manager.free(other)
    assert run(engine, [[1] * 20], TEN) == [expected_tokens([1] * 20, 10)]
    alone = engine.add_request([1] * 8, TEN)
    engine.step()
    executor.kv_manager.allocate("other", executor.kv_manager.stats().free_blocks * 8)
    while engine.num_unfinished:
        engine.step()
    assert alone.error is not None
    assert alone.error.startswith("OutOfBlocksError")


def test_a_long_prompt_does_not_stop_decodes(device: torch.device) -> None:
    executor = make_executor(device, num_blocks=128, max_sequence_length=600)
    engine = Engine(executor, EngineConfig(token_budget=32))
    short = [engine.add_request([i, 1, i], SamplingParams(temperature=0, max_tokens=40)) for i in range(8)]
    engine.step()
    long = engine.add_request([3] * 500, replace(TEN, max_tokens=2))
    for step in range(20):
        before = [len(output.outputs[0].token_ids) for output in short]
        rows = engine.metrics.prefill_tokens + engine.metrics.decode_tokens
        engine.step()
        assert [len(output.outputs[0].token_ids) for output in short] == [count + 1 for count in before]
        assert engine.metrics.prefill_tokens + engine.metrics.decode_tokens - rows == 32
        assert not long.outputs[0].token_ids, f"step {step}"
    while engine.num_unfinished:
        engine.step()
    check_empty(engine)


def test_prefixes_are_reused(device: torch.device) -> None:
    executor = make_executor(device, num_blocks=128)
    engine = Engine(executor)
    context = [(i * i) % 13 for i in range(50)]
    first = run(engine, [[*context, 1]], TEN)
    assert engine.metrics.prefill_tokens == 51
    [output] = engine.generate([[*context, 1]], TEN, progress=False)
    assert tokens_of([output]) == first
    assert (engine.metrics.prefill_tokens, engine.metrics.cached_tokens, output.num_cached_tokens) == (54, 48, 48)
    other = engine.add_request([*context, 1], TEN, metadata={"tenant": "a"})
    engine.step()
    assert other.num_cached_tokens == 48


def test_adapters_part_prefixes_and_reach_the_items(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make_executor(device)
    monkeypatch.setattr(executor, "_choose_adapters", lambda items: None)
    takes = replace(executor.capabilities(), supports_lora=True)
    monkeypatch.setattr(executor, "capabilities", lambda: takes)
    seen: list[Any] = []
    spy(monkeypatch, executor, lambda batch: seen.extend(item.metadata.get("lora_adapter") for item in batch.items))
    engine = Engine(executor)
    cached = []
    for adapter in ("french", None, "french"):
        metadata = None if adapter is None else {"lora_adapter": adapter}
        output = engine.add_request([4] * 20, replace(TEN, max_tokens=1), metadata=metadata)
        engine.step()
        cached.append(output.num_cached_tokens)
    assert cached == [0, 0, 16]
    assert seen == ["french", None, "french"]


def test_seeds_give_the_same_tokens_in_any_company(device: torch.device) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=42, max_tokens=12, n=2)
    alone = Engine(make_executor(device), seed=0).generate([PROMPTS[3]], params, progress=False)[0]
    first, second = (one.token_ids for one in alone.outputs)
    assert first != second
    executor = make_executor(device, num_blocks=12, num_swap_blocks=4)
    config = EngineConfig(chunk_size=3, admission_tokens=0, preemption="swap", token_budget=9)
    engine = Engine(executor, config, seed=99)
    others = [engine.add_request(prompt, replace(params, seed=None, max_tokens=20)) for prompt in PROMPTS]
    same = engine.add_request(PROMPTS[3], params)
    while engine.num_unfinished:
        engine.step()
    assert [one.token_ids for one in same.outputs] == [first, second]
    assert engine.metrics.preempted
    assert others[3].outputs[0].token_ids[:12] != first
    again = Engine(make_executor(device), seed=99).generate(PROMPTS, replace(params, seed=None), progress=False)
    assert [o.outputs[1].token_ids for o in again] == [o.outputs[1].token_ids[:12] for o in others], "the engine's seed"


def test_ends_of_a_text() -> None:
    """The answer is two words and a terminator, which is the end token."""
    [prompt] = [one for one in recall_prompts(20) if one.answer.count(" ") == 1][:1]
    ids, (first, second) = encode([prompt])[0], prompt.answer.split()
    engine = recall_engine()

    def ask(**fields: Any) -> Any:
        [output] = engine.generate([ids], replace(GREEDY, **fields), progress=False)
        check_empty(engine)
        return output.outputs[0]

    whole = ask()
    assert (whole.text.strip(), whole.finish_reason, whole.stop_reason) == (prompt.answer, "stop", EOS[0])
    assert len(whole.token_ids) == 3
    cut = ask(stop=[second[1:3], "never"])
    assert (cut.text.strip(), cut.stop_reason) == (f"{first} {second[0]}", second[1:3])
    assert cut.token_ids == whole.token_ids[:2]
    across = ask(stop=f"{first[-1]} {second[0]}")
    assert across.text.strip() == first[:-1]
    by_id = ask(stop_token_ids=[whole.token_ids[1]])
    assert (by_id.token_ids, by_id.text.strip(), by_id.stop_reason) == (whole.token_ids[:2], first, whole.token_ids[1])
    short = ask(max_tokens=1, stop=second)
    assert (short.text.strip(), short.finish_reason) == (first, "length")
    on = ask(ignore_eos=True, max_tokens=6)
    assert (len(on.token_ids), on.finish_reason) == (6, "length")
    assert on.token_ids[:3] == whole.token_ids
    later = ask(min_tokens=5, max_tokens=6)
    assert EOS[0] not in later.token_ids[:4]
    assert len(later.token_ids) >= 5
    forbidden = ask(logit_bias={EOS[0]: -1e9}, max_tokens=5)
    assert EOS[0] not in forbidden.token_ids


def test_streams_hold_back_what_may_be_a_stop() -> None:
    [prompt] = [one for one in recall_prompts(20) if one.answer.count(" ") == 1][:1]
    first, second = prompt.answer.split()
    engine = recall_engine()
    stop = f" {second}"
    texts = [output.outputs[0].text for output in engine.stream(encode([prompt])[0], replace(GREEDY, stop=stop))]
    assert texts[-1].strip() == first
    assert all(texts[-1].startswith(text) for text in texts)
    plain = [output.copy() for output in engine.stream(encode([prompt])[0], GREEDY)]
    assert [len(output.outputs[0].token_ids) for output in plain] == [1, 2, 3]
    assert [output.finished for output in plain] == [False, False, True]


def test_streams_in_turns_and_left_early(device: torch.device) -> None:
    engine = Engine(make_executor(device))
    streams = [engine.stream(prompt, TEN) for prompt in PROMPTS[:3]]
    last = [None] * 3
    for _ in range(12):
        for index, stream in enumerate(streams):
            last[index] = next(stream, last[index])  # type: ignore[assignment]
    for prompt, output in zip(PROMPTS, last, strict=False):
        assert output is not None
        assert output.finished
        assert output.outputs[0].token_ids == expected_tokens(prompt, 10)
    early = engine.stream(PROMPTS[0], TEN)
    next(early)
    assert engine.num_unfinished == 1
    early.close()
    check_empty(engine)
    with pytest.raises(InvalidInputError, match="expected one for each of 2 prompts"):
        engine.generate(PROMPTS[:2], [TEN])
    with pytest.raises(InvalidInputError, match="empty prompt"):
        engine.generate([[1], []], TEN)
    check_empty(engine)


def test_any_executor_will_do() -> None:
    """One with the five required calls, and another's model behind LlmExecutor: no forks, no prefixes, same answers."""
    prompts = [[1, 2, 3], [4], [5, 6]]

    def parrot_tokens(prompt: list[int]) -> list[int]:
        tokens = list(prompt)
        for _ in range(4):
            tokens.append(int(parrot_logits(tokens).argmax()))
        return tokens[len(prompt) :]

    params = SamplingParams(temperature=0, max_tokens=4, n=2)
    for executor in (MinimalExecutor(), other_executor(Parrot()), other_executor(UnsupportedParrot())):
        engine = Engine(executor, EngineConfig(chunk_size=2))
        for prompt, output in zip(prompts, engine.generate(prompts, params, progress=False), strict=True):
            assert output.error is None
            assert [one.token_ids for one in output.outputs] == [parrot_tokens(prompt)] * 2
        assert engine.num_unfinished == 0
        caches = executor.caches if isinstance(executor, MinimalExecutor) else executor.model.caches  # type: ignore[attr-defined]
        assert caches == {}


def test_a_minimal_executor_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = MinimalExecutor()
    outputs = Engine(executor).generate([[1, 2], [60], [3]], replace(GREEDY, max_tokens=3), progress=False)
    assert [output.error for output in outputs] == [None, "RuntimeError: 60 breaks it", None]
    assert executor.caches == {}


@pytest.mark.parametrize(
    ("error", "match", "prompt", "fields"),
    [
        (InvalidInputError, "empty prompt", [], {}),
        (InvalidInputError, "token id 256", [1, 256], {}),
        (InvalidInputError, "token id -1", [1, -1], {}),
        (InvalidInputError, "token id 300", [1], {"stop_token_ids": [300]}),
        (InvalidInputError, "token id 300", [1], {"logit_bias": {300: 1.0}}),
        (InvalidInputError, "tokenizer", [1], {"stop": "x"}),
        (InvalidInputError, "257 tokens .* the cache holds 256", [1] * 100, {"max_tokens": 158}),
        (SequenceTooLongError, "513 tokens .* the longest sequence is 512", [1] * 500, {"max_tokens": 14}),
    ],
)
def test_what_can_never_run_is_refused(
    error: type[Exception], match: str, prompt: list[int], fields: dict[str, Any], device: torch.device
) -> None:
    engine = Engine(make_executor(device))
    with pytest.raises(error, match=match):
        engine.add_request(prompt, replace(TEN, **fields))
    assert (engine.num_unfinished, engine.metrics.requests) == (0, 0)
    engine.add_request([1] * 100, replace(TEN, max_tokens=157), request_id="a")
    with pytest.raises(InvalidInputError, match="'a': its id is in use"):
        engine.add_request([1], TEN, request_id="a")
    engine.abort("a")
    engine.add_request([1], replace(TEN, max_tokens=None), request_id="a")
    assert engine.abort("a")
    assert not engine.abort("a")


def test_as_many_as_fit(device: torch.device) -> None:
    executor: PagedAttentionExecutor = make_executor(device, num_blocks=4)
    [output] = Engine(executor).generate([[1] * 30], replace(TEN, max_tokens=None), progress=False)
    assert len(output.outputs[0].token_ids) == 3, "two take the places up to 32, and the last needs none"


def test_after_the_executor_is_shut_down(device: torch.device) -> None:
    executor = make_executor(device)
    engine = Engine(executor)
    engine.add_request([1], TEN)
    executor.shutdown()
    with pytest.raises(ExecutorShutDownError):
        engine.step()


def test_bar_shows_what_is_done(capsys: pytest.CaptureFixture[str], device: torch.device) -> None:
    Engine(make_executor(device)).generate(PROMPTS, TEN)
    assert "5/5" in capsys.readouterr().err


def test_text_of_a_completion_is_the_tokenizers() -> None:
    prompts = recall_prompts(4)
    for output in recall_engine().generate(encode(prompts), replace(GREEDY, ignore_eos=True), progress=False):
        assert output.outputs[0].text == TOKENIZER.decode(output.outputs[0].token_ids)
