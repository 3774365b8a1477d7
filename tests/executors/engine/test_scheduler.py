"""The scheduler on a cache that is a number: budgets, order, fairness, preemption; and what paces its prompts."""

from collections.abc import Sequence
from typing import Any

import pytest

from paged import EngineConfig, RequestOutput, SamplingParams
from paged.executors.engine.metrics import EngineMetrics
from paged.executors.engine.scheduler import Scheduler
from paged.executors.engine.step import DecodeGroup, EngineStep
from paged.executors.engine.step_pacer import StepPacer
from paged.executors.requests.output import CompletionOutput
from paged.executors.requests.request import Completion, Request, State


class Numbers:
    """A cache of so many tokens; `host` sequences can be swapped out."""

    def __init__(self, room: int, host: int = 0) -> None:
        self.room, self.host = room, host
        self.held: dict[Completion, int] = {}

    def begin(self, running: Sequence[Completion]) -> None: ...

    def is_reading(self, completion: Completion, wait_s: float) -> bool:
        return False

    def admit(self, completion: Completion, *, is_alone: bool) -> bool:
        if completion.num_tokens > self.room - sum(self.held.values()):
            return False
        self.held[completion] = completion.num_tokens
        completion.is_swapped = False
        return True

    def fitting(self, completion: Completion, count: int, scheduled: Sequence[tuple[Completion, int]]) -> int:
        return count

    def chunk(self, completion: Completion, count: int, *, max_chunk: int) -> int:
        return count

    def publish(self, completions: Sequence[Completion]) -> None: ...

    def release(self, completion: Completion) -> None:
        self.held.pop(completion, None)

    def swap_out(self, completion: Completion) -> bool:
        if self.host == 0:
            return False
        self.host -= 1
        self.release(completion)
        return True


def make(number: int, length: int = 10, *, priority: int = 0, max_tokens: int = 99) -> Completion:
    """The `number`-th request."""
    output = RequestOutput(number, [1] * length, [CompletionOutput(0)])
    turn = (number - 1000 * priority, number)
    return Completion(
        Request(number, [1] * length, SamplingParams(), turn, {}, max_tokens, frozenset(), output, 0.0), 0, 0, None
    )


def scheduler_of(
    *lengths: int, room: int = 1000, host: int = 0, decode_cost: int = 1, **config: Any
) -> tuple[Scheduler, Numbers]:
    """A scheduler to which requests of these lengths were added, and its cache."""
    space = Numbers(room, host)
    scheduler = Scheduler(EngineConfig(**config), space, EngineMetrics(), decode_cost=decode_cost)
    for number, length in enumerate(lengths):
        scheduler.add(make(number, length))
    return scheduler, space


def finish_step(scheduler: Scheduler, step: EngineStep) -> list[Completion]:
    """What the engine does after a forward; those that got a token."""
    ended = []
    for completion in [*step.decodes, *step.chunks]:
        if completion.state is State.PREFILL:
            completion.prefilled = completion.chunk_start + len(completion.chunk)
        if completion.is_final or completion.state is State.DECODE:
            if completion.state is State.PREFILL:
                scheduler.to_decoding(completion)
            ended.append(completion)
            completion.num_sampled += 1
            DecodeGroup([completion]).advance([[1]])
    return ended


def rows(step: EngineStep) -> dict[int, int]:
    """How many tokens of each request run."""
    pairs = [(one, 1) for one in step.decodes] + [(one, len(one.chunk)) for one in step.chunks]
    return {int(one.request.request_id): count for one, count in pairs}


def test_decodes_first_then_chunks_within_the_budget() -> None:
    scheduler, _ = scheduler_of(3, 20, 4, token_budget=8, chunk_size=6)
    steps = []
    for _ in range(6):
        step = scheduler.next_step()
        steps.append(rows(step))
        finish_step(scheduler, step)
    full = [{0: 3, 1: 5}, {0: 1, 1: 6, 2: 1}, {0: 1, 1: 6, 2: 1}]
    assert steps == [*full, {0: 1, 1: 3, 2: 2}, {0: 1, 1: 1, 2: 1}, {0: 1, 1: 1, 2: 1}]


def test_more_decodes_than_budget_take_turns() -> None:
    scheduler, _ = scheduler_of(token_budget=4, decode_cost=2)
    for number in range(5):
        scheduler.add_decoding(make(number))
    served = [number for _ in range(5) for number in rows(scheduler.next_step())]
    assert sorted(served) == sorted([*range(5)] * 2)


def test_an_order_by_arrival_and_priority_without_starvation() -> None:
    scheduler, _ = scheduler_of(max_num_seqs=1)
    for number, priority in [(0, 0), (5, 1), (900, 1), (1100, 1)]:
        scheduler.add(make(number, priority=priority))
    order = []
    for _ in range(4):
        step = scheduler.next_step()
        order += [one.request.request_id for one in step.chunks]
        scheduler.remove(step.chunks[0])
    assert order == [5, 900, 0, 1100], "a level of priority is worth a thousand requests, not more"


def test_a_large_request_is_not_passed_by() -> None:
    scheduler, _ = scheduler_of(20, 25, 5, room=30)
    first = scheduler.next_step()
    assert rows(first) == {0: 20}
    finish_step(scheduler, first)
    assert rows(scheduler.next_step()) == {0: 1}
    scheduler.remove(first.chunks[0])
    assert rows(scheduler.next_step()) == {1: 25, 2: 5}


def test_the_last_in_rank_is_preempted_and_waits_for_an_end() -> None:
    scheduler, space = scheduler_of()
    for number, priority in [(0, 0), (1, 0), (2, 1)]:
        scheduler.add(make(number, priority=priority))
    finish_step(scheduler, scheduler.next_step())
    victim = scheduler.preempt()
    assert (victim.request.request_id, victim.state, victim.cached, victim.handle) == (1, State.WAITING, 0, None)
    assert victim not in space.held
    assert rows(scheduler.next_step()) == {2: 1, 0: 1}, "there is room, but it was too little"
    first = scheduler.preempt()
    assert first.request.request_id == 0
    assert scheduler.preempt() is None, "one must run on"
    scheduler.remove(scheduler.decoding[0])
    assert rows(scheduler.next_step()) == {0: 11, 1: 11}, "with the tokens they had"


def test_what_is_swapped_decodes_on() -> None:
    scheduler, space = scheduler_of(10, 10, 10, host=1, decode_cost=3, preemption="swap", token_budget=40)
    finish_step(scheduler, scheduler.next_step())
    swapped, recomputed = scheduler.preempt(), scheduler.preempt()
    assert (swapped.is_swapped, swapped.cached, recomputed.is_swapped, recomputed.cached) == (True, 10, False, 0)
    assert scheduler.preempt() is swapped, "it may hold shared blocks that the one which runs needs"
    assert not swapped.is_swapped
    scheduler.remove(scheduler.decoding[0])
    assert rows(scheduler.next_step()) == {1: 11, 2: 11}
    space.host = 1
    assert scheduler.preempt() is swapped
    scheduler.remove(recomputed)
    swapped.prefilled, swapped.is_swapped = 10, True
    step = scheduler.next_step()
    assert (step.decodes, step.chunks) == ([swapped], [])


def test_pacer_keeps_steps_within_the_stretch() -> None:
    """On a machine where a decode step takes 10 ms and a prompt token 0.1 ms at first, 0.3 ms later."""
    pacer = StepPacer(2.0)
    assert pacer.max_prefill_tokens == 0, "one step shows what decodes take"
    pacer.observe(0.010, 0)
    taken = []
    for step in range(40):
        count = pacer.max_prefill_tokens
        seconds = 0.010 + count * (0.0001 + 0.0002 * step / 40)
        assert seconds <= 0.020
        taken.append(count)
        pacer.observe(seconds, count)
    assert taken[0] == 8
    assert max(taken) > 50
    assert taken[-1] == pytest.approx(0.6 * 0.010 / 0.000295, rel=0.2)
