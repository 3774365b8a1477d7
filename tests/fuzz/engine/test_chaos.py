"""Random schedules of everything at once: what each request gets is what it gets alone. SOAK=1 runs 10,000 of them."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from paged import Engine, EngineConfig, InvalidInputError, RequestOutput, SamplingParams
from paged.executors.speculation.draft_model import DraftModel
from paged.executors.speculation.prompt_lookup import PromptLookup
from tests.executors.engine.test_token_rules import Rising
from tests.executors.engine_cases import check_empty
from tests.executors.oracle import make_executor

SIZES = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "embedding": "sinusoidal"}
SEEDS = 10_000 if "SOAK" in os.environ else 16
# Logits of another batch differ by rounding. Where two tokens are nearer than this, either may come.
TIE = 1e-4
NUM_LOGPROBS = 200  # enough for tokens behind those that a mask excludes


def random_engine(draw: random.Random, device: torch.device) -> Engine:
    """With a cache that is nearly always too small."""
    way = draw.choice(("plain", "overlap", "overlap", "lookup", "draft", "recurrent", "recurrent overlap", "apart"))
    states = None
    if "recurrent" in way:
        states = {"num_slots": draw.choice((4, 6, 16)), "num_swap_slots": draw.choice((0, 8))}
    num_swap_blocks = draw.choice((0, 4, 40))
    executor = make_executor(
        device,
        num_blocks=draw.randint(10, 40),
        block_size=draw.choice((4, 8)),
        num_swap_blocks=num_swap_blocks,
        states=states,
        **SIZES,
    )
    config = EngineConfig(
        token_budget=draw.choice((8, 16, 64, 2048)),
        chunk_size=draw.choice((None, 5)),
        max_num_seqs=draw.choice((2, 4, 16)),
        admission_tokens=draw.choice((0, 4, None)),
        preemption=draw.choice(("swap", "recompute")) if num_swap_blocks else "recompute",
        overlap="overlap" in way,
        batch_invariant=way == "apart",
    )
    proposer = {"lookup": PromptLookup(3), "draft": DraftModel(executor, 3)}.get(way)
    return Engine(executor, config, proposer=proposer, eos_token_ids=())


def random_request(draw: random.Random) -> dict[str, Any]:
    """Arguments of `add_request`; prompts begin alike, so that they share blocks."""
    common = [3, 1, 4, 1, 5, 9, 2, 6] * draw.choice((0, 0, 1, 2))
    prompt = common + [draw.randrange(200) for _ in range(draw.randint(1, 12))]
    params = SamplingParams(
        temperature=0,
        n=draw.choice((1, 1, 1, 2)),
        max_tokens=draw.randint(1, 10),
        presence_penalty=draw.choice((0.0, 0.0, 0.5)),
        min_tokens=draw.choice((0, 1)),
        prompt_logprobs=draw.choice((None, None, None, 1)),
    )
    return {
        "prompt_token_ids": prompt,
        "params": params,
        "priority": draw.choice((0, 0, 1)),
        "token_mask": draw.choice((None, None, None, Rising)),
    }


def add(engine: Engine, request: dict[str, Any]) -> RequestOutput | None:
    """The request's output; None if it does not fit the cache or the configuration."""
    mask = request["token_mask"]
    try:
        return engine.add_request(**request | {"token_mask": mask and mask()})
    except InvalidInputError:
        return None


@contextmanager
def reference(device: torch.device, *, is_recurrent: bool) -> Iterator[Engine]:
    """An engine with room for one request at a time."""
    states = {"num_slots": 8} if is_recurrent else None
    executor = make_executor(device, num_blocks=64, states=states, **SIZES)
    yield Engine(executor, EngineConfig(overlap=False), eos_token_ids=())


def check_like_alone(alone: Engine, request: dict[str, Any], output: RequestOutput) -> None:
    """Equal tokens, up to a tie of two."""
    params = request["params"]
    fields = {name: getattr(params, name) for name in ("max_tokens", "presence_penalty", "min_tokens")}
    changed = request | {"params": SamplingParams(temperature=0, logprobs=NUM_LOGPROBS, **fields)}
    expected = add(alone, changed)
    assert expected is not None
    while alone.num_unfinished:
        alone.step()
    (completion,) = expected.outputs
    logprobs = completion.logprobs
    assert logprobs is not None
    for answer in output.outputs:
        if answer.finish_reason == "abort":
            continue
        assert answer.finish_reason in ("stop", "length")
        first = _first_difference(completion.token_ids, answer.token_ids)
        if first is None:
            assert answer.token_ids == completion.token_ids
            continue
        scores = []
        for token in (completion.token_ids[first], answer.token_ids[first]):
            is_repeated = token in completion.token_ids[:first]
            scores.append(logprobs[first][token] - params.presence_penalty * is_repeated)
        assert scores[0] - scores[1] < TIE


def _first_difference(tokens: list[int], others: list[int]) -> int | None:
    for index, (token, other) in enumerate(zip(tokens, others, strict=False)):
        if token != other:
            return index
    return None


@pytest.mark.parametrize("part", range(4))
def test_random_schedules(part: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over chunks, forks, masks, drafts, states, swaps, preemptions and aborts, in a cache that is too small and that
    others take blocks of."""
    monkeypatch.setenv("PAGED_CHECK", "1")
    for seed in range(part, SEEDS, 4):
        draw = random.Random(seed)
        engine = random_engine(draw, device)
        manager = engine.executor.kv_manager
        assert manager is not None
        ran: list[tuple[dict[str, Any], RequestOutput]] = []
        ended: list[Any] = []
        aborted: set[Any] = set()
        left = draw.randint(2, 7)
        while left or engine.num_unfinished:
            while left and draw.random() < 0.5:
                left -= 1
                request = random_request(draw)
                output = add(engine, request)
                if output is not None:
                    ran.append((request, output))
            if manager.get_handle("another's") is not None:
                manager.free(manager.get_handle("another's"))
            elif draw.random() < 0.2 and manager.can_allocate(16):
                manager.allocate("another's", 16)
            finished = [output for output in engine.step() if output.finished]
            ended += [output.request_id for output in finished]
            if manager.get_handle("another's") is None:
                assert not any(output.error for output in finished), "they have the cache to themselves"
            if ran and draw.random() < 0.04:
                victim = draw.choice(ran)[1].request_id
                if engine.abort(victim):
                    ended.append(victim)
                    aborted.add(victim)
                assert not engine.abort(victim)
        handle = manager.get_handle("another's")
        if handle is not None:
            manager.free(handle)
        assert sorted(ended, key=str) == sorted((output.request_id for _, output in ran), key=str), "each ends once"
        check_empty(engine)
        recurrent = manager.config.recurrent
        with reference(device, is_recurrent=recurrent is not None) as alone:
            for request, output in ran:
                if output.error is not None:  # others hold the blocks that it, or the next token of the only one, needs
                    assert "no request here holds any" in output.error or "OutOfBlocksError" in output.error
                else:
                    has_aborted = any(answer.finish_reason == "abort" for answer in output.outputs)
                    assert has_aborted == (output.request_id in aborted)
                    check_like_alone(alone, request, output)
