"""BlockSpace: preemption where blocks run out, and prefixes that are shared by those alone that may."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from paged import Engine, EngineConfig
from paged.models.recall.task import sample_pairs
from tests.executors.engine.answers import ANSWERS
from tests.executors.engine_cases import EOS, GREEDY, PROMPTS, TEN, TOKENIZER, recall_engine, run, run_to_end, spy
from tests.executors.oracle import make_executor


@pytest.mark.parametrize(
    "options", [{"preemption": "recompute", "admission_tokens": 0}, {"preemption": "swap", "admission_tokens": 0}, {}]
)
def test_five_requests_in_six_blocks(options: dict[str, Any], device: torch.device) -> None:
    """Each needs up to 4 blocks of 8; room for all that may come makes preemption needless."""
    engine = Engine(make_executor(device, num_blocks=6), EngineConfig(**{"admission_tokens": None} | options))
    assert run(engine, PROMPTS, TEN) == ANSWERS
    assert (engine.metrics.preempted["recompute"] > 0) == bool(options)
    assert options or engine.metrics.decode_tokens == 9 * len(PROMPTS)


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
        ([{}, {"metadata": {"tenant": "a"}}], [0, 16]),
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
    spy(monkeypatch, executor, lambda batch: seen.extend(item.metadata.get("lora_adapter") for item in batch.items))
    engine = Engine(executor)
    cached = []
    for one in options:
        output = engine.add_request([4] * 20, replace(TEN, max_tokens=1), **one)
        run_to_end(engine)
        cached.append(output.num_cached_tokens)
    assert cached == expected
    assert seen == [one.get("metadata", {}).get("lora_adapter") for one in options]
