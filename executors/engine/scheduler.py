"""Selection of what a step runs: decodes first, then prompt chunks, oldest first, within a token budget.

This is the only place where blocks run out: a step is reserved whole, or something is preempted and it is planned anew.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter
from time import perf_counter
from typing import NamedTuple

from paged.batch import UnifiedBatch
from paged.errors import OutOfBlocksError
from paged.executors.engine.batch import Rows, StepBatch, StepOutput
from paged.executors.engine.cache_space import BlockSpace, TokenSpace
from paged.executors.engine.config import EngineConfig
from paged.executors.engine.metrics import EngineMetrics
from paged.executors.isolation import attempt, describe, quietly, raise_exit
from paged.executors.requests.request import Completion, State
from paged.executors.sampling.sampler import Drafts
from paged.executors.speculation.drafting import Drafter

_LOG = logging.getLogger("paged")
_RANK = attrgetter("rank")
# Weight of the newest measurement: the costs drift with the lengths of the sequences.
_NEWEST = 0.3
# Of the time that a step may take, how much is planned with: a measured cost is that of the chunk before, and beside
# other work on its machine a step takes up to a half longer than foreseen.
_MARGIN = 0.8
# Longest wait of a step for masks that are computed elsewhere. Most are there after 0.2 ms.
_MASK_WAIT_S = 0.005
# So that a prompt gets through, whatever a token of it costs.
_SMALLEST_CHUNK = 8


class Plan(NamedTuple):
    """The completions of a step, with their items set."""

    decodes: list[Completion]
    chunks: list[Completion]


class Scheduler:
    """Queue, running sequences and preemption.

    No waiting completion is overtaken by one of lower rank: the first that does not fit holds up the others, so none
    starves. After a preemption, or when the first does not fit, nothing is admitted until something has finished.

    Args:
        drafter: drafts for sequences that decode, or None.
        ask_for_tokens: lets the executor choose the tokens of completions if it can; None if logits are cheaper.
        decode_cost: most tokens of a decoding sequence: 1 and its drafts.
        prompt_rows: most prompt tokens of a step with logits for each.

    Attributes:
        awaits_masks: whether the last plan left out decodes whose masks were not there.
        refused: completions that cannot run, with the reason; the caller ends them and empties the list.
    """

    def __init__(
        self,
        config: EngineConfig,
        space: BlockSpace | TokenSpace,
        metrics: EngineMetrics,
        drafter: Drafter | None = None,
        ask_for_tokens: Callable[[list[Completion]], None] | None = None,
        *,
        decode_cost: int = 1,
        prompt_rows: int = 1,
    ) -> None:
        self.waiting: list[Completion] = []
        self.prefilling: list[Completion] = []
        self.decoding: list[Completion] = []
        self.pacer = None if config.decode_stretch is None else StepPacer(config.decode_stretch)
        self._config = config
        self._space = space
        self._metrics = metrics
        self._drafter = drafter
        self._ask_for_tokens = ask_for_tokens
        self.refused: list[tuple[Completion, str]] = []
        self._rows = Rows([])
        self._decode_cost = decode_cost
        self._prompt_rows = prompt_rows
        self._is_full = self._has_begun = False
        self.awaits_masks = False

    @property
    def num_running(self) -> int:
        """Completions that hold cache on the device."""
        return len(self.prefilling) + len(self.decoding)

    @property
    def num_swapped(self) -> int:
        """Completions of the queue whose K/V are in host memory."""
        return sum(completion.is_swapped for completion in self.waiting)

    def add(self, completion: Completion) -> None:
        """Queue a completion."""
        completion.state = State.WAITING
        insort(self.waiting, completion, key=_RANK)

    def add_decoding(self, completion: Completion) -> None:
        """Start decoding a completion that holds the K/V of its prompt already, as a fork does."""
        completion.state = State.DECODE
        self.decoding.append(completion)

    def rows_of(self, completions: list[Completion]) -> Rows:
        """Return the rows of completions, those of the last call if they are the same."""
        rows = self._rows
        if rows.completions != completions or rows.handles != [completion.handle for completion in completions]:
            rows = self._rows = Rows(completions)
        return rows

    def schedule(self, in_flight: StepOutput | None) -> StepBatch | None:
        """Plan the next step and reserve its capacity; None if nothing can run.

        in_flight: the step whose tokens are not known yet. Behind it nothing is preempted and nothing is refused: what
        cannot run then is planned again once they are.
        """
        while not self.refused:
            plan = self.plan()
            if plan.decodes or plan.chunks:
                step = self._reserve(plan, in_flight)
                if step is not None or in_flight is not None:
                    return step
            elif in_flight is not None:
                return None
            elif not self.prefilling or not self.make_room():
                self._refuse_first()
                return None
        return None

    def make_room(self, num_needed: int = 1) -> bool:
        """Free blocks: first those of drafts, then those of the completion that ranks last; False if there are none.

        num_needed: the blocks that lack, for the log.
        """
        if self._drafter is not None and self._drafter.make_room():
            return True
        free = self._space.free_blocks
        victim = self.preempt()
        if victim is None:
            return False
        kind = "swap" if victim.is_swapped else "recompute"
        # Once as a warning: a cache that is too small preempts at every step.
        level = logging.DEBUG if self._metrics.preempted.total() else logging.WARNING
        blocks = "1 block" if num_needed == 1 else f"{num_needed} blocks"
        _LOG.log(level, "%r was preempted (%s): needs %s, %s free; see admission_tokens", victim, kind, blocks, free)
        self._metrics.preempted[kind] += 1
        request = victim.request
        request.num_preemptions += 1
        request.output.metrics = replace(request.output.metrics, preemptions=request.num_preemptions)
        if self._drafter is not None:
            self._drafter.forget(victim)
        return True

    def _refuse_first(self) -> None:
        """Refuse the first of the queue if nothing runs and nothing can make room for it."""
        if self.awaits_masks or self.refused or not self.waiting or self.preempt() is not None:
            return
        reason = "the cache has no room for it, and no request here holds any"
        self.refused.append((self.waiting[0], reason))

    def _reserve(self, plan: Plan, in_flight: StepOutput | None) -> StepBatch | None:
        """Return the batch of a plan with its capacity, without what was preempted for it; None if nothing is left."""
        decodes, chunks = plan
        drafts = None
        if self._drafter is not None and decodes:
            drafts = self._drafter.draft(decodes)
        while True:
            try:
                return self._batch(decodes, chunks, drafts, in_flight)
            except OutOfBlocksError as error:
                if in_flight is not None:
                    return None
                if drafts is not None:  # run without drafts
                    for completion in decodes:
                        completion.follow()
                    drafts = None
                    continue
                if not self.make_room(error.needed):
                    self.refused += [(completion, describe(error)) for completion in [*decodes, *chunks]]
                    return None
                # Without new drafts, which would take the blocks again.
                decodes = [completion for completion in decodes if completion.state is State.DECODE]
                chunks = [completion for completion in chunks if completion.state is State.PREFILL]
                if not decodes and not chunks:
                    return None
            except BaseException as error:  # of one of them; each then takes its capacity by itself
                raise_exit(error)
                self._metrics.failed_forwards += 1
                if in_flight is not None:
                    return None
                return StepBatch([*decodes, *chunks], decodes, chunks, drafts, None, None, is_ahead=False)

    def _batch(
        self,
        decodes: list[Completion],
        chunks: list[Completion],
        drafts: Drafts | None,
        in_flight: StepOutput | None,
    ) -> StepBatch:
        """Return the batch of completions, with its capacity.

        Raises:
            OutOfBlocksError: the cache has too few free blocks.
        """
        is_ahead = in_flight is not None
        rows = None
        if not chunks and drafts is None and self._space.takes_rows and self._ask_for_tokens is None:
            rows = self.rows_of(decodes)
            newest = None if in_flight is None else in_flight.newest_of(decodes, self._space.device)
            if rows.takes_batches and (newest is not None or not is_ahead):
                assert self._space.manager is not None
                next_batch = rows.next_batch(self._space.manager, newest)
                return StepBatch(decodes, decodes, [], None, next_batch, rows, is_ahead)
        if drafts is None:
            for completion in decodes:
                completion.follow()
        completions = [*decodes, *chunks]
        device_ids = None
        if in_flight is not None:
            late = [completion for completion in decodes if completion.is_behind]
            known = [completion for completion in completions if not completion.is_behind]
            completions = [*late, *known]
            if late:
                device_ids = in_flight.newest_of(late, self._space.device)
        if self._ask_for_tokens is not None and drafts is None:
            self._ask_for_tokens(completions)
        batch: UnifiedBatch | None = self._space.reserve(completions, device_ids)
        if self._config.batch_invariant:  # each is a forward of its own; this was to see that all fit
            if batch is not None and batch.prepared is not None:
                batch.prepared.rollback()
            batch = None
        num_prefill_tokens = sum(len(completion.chunk) for completion in chunks)
        return StepBatch(completions, decodes, chunks, drafts, batch, None, is_ahead, num_prefill_tokens)

    def plan(self) -> Plan:
        """Plan the next step, and admit what fits."""
        config, cost = self._config, self._decode_cost
        fitting = max(config.token_budget // cost, 1)
        unfinished = [one for one in self.decoding if one.num_sampled < one.max_tokens]
        deadline = perf_counter() + _MASK_WAIT_S
        decodes = [one for one in unfinished if one.awaited_mask is None or one.has_mask(deadline)]
        if not (decodes or self.prefilling):
            decodes = [one for one in unfinished if one.has_mask(deadline, is_alone=True)]
        self.awaits_masks = len(decodes) < len(unfinished)
        if len(decodes) > fitting:  # in turns
            decodes = decodes[:fitting]
            turn = set(decodes)
            self.decoding = [one for one in self.decoding if one not in turn] + decodes
        left = max(config.token_budget - len(decodes) * cost, 0 if decodes else 1)
        if decodes and self.pacer is not None:
            left = min(left, self.pacer.max_prefill_tokens)
        self._has_begun = False
        chunks: list[Completion] = []
        index, rows_left, most_left = 0, self._prompt_rows, left
        while left > 0 and (index < len(self.prefilling) or (self.waiting and self._admit_next(left))):
            if index == len(self.prefilling):  # it came back from the host, and decodes
                decodes.append(self.decoding[-1])
                left -= cost
                continue
            completion = self.prefilling[index]
            most = min(completion.num_to_prefill, left, config.chunk_size or left)
            index += 1
            if config.batch_invariant:
                count = completion.fixed_chunk
                if chunks and (count > left or completion.wants_prompt_rows):
                    break  # the next step begins with it
                if self._fitting(completion, count, decodes, chunks) < count and self.num_running > 1:
                    break
                completion.take_chunk(count)
                chunks.append(completion)
                left -= count
                continue
            count = fitting = self._fitting(completion, most, decodes, chunks)
            if not count:
                break  # others end, or are preempted; meanwhile nothing overtakes it
            if completion.wants_prompt_rows:
                count = min(count, rows_left)
                rows_left -= count
            whole = completion.whole_spans(count)
            if whole > count:  # more than was planned for, but not more than a step may run
                room = config.token_budget - cost * len(decodes) - sum(len(one.chunk) for one in chunks)
                if self._fitting(completion, whole, decodes, chunks) < whole and self.num_running > 1:
                    break
                count, left = (whole, whole) if whole <= room else (0, 0)
            elif count:
                count = whole
            if count:
                # What lacks blocks beside others had better wait than leave the grid.
                may_wait = bool(decodes or chunks) or (fitting < most and self.num_running > 1)
                most_here = min(most_left, config.chunk_size or most_left) if may_wait else 0
                count = self._space.chunk(completion, count, most=most_here)
            if count:
                completion.take_chunk(count)
                chunks.append(completion)
                left -= count
        return Plan(decodes, chunks)

    def _fitting(self, completion: Completion, count: int, decodes: list[Completion], chunks: list[Completion]) -> int:
        """Return how many of the next `count` prompt tokens have free blocks; at least 1 if nothing else runs."""
        planned = [(one, self._decode_cost) for one in decodes]
        planned += [(one, len(one.chunk)) for one in chunks]
        fitting = self._space.fitting(completion, count, planned)
        return max(fitting, 1) if self.num_running == 1 else fitting

    def to_decoding(self, completion: Completion) -> None:
        """Start decoding a completion whose prompt is done."""
        self.prefilling.remove(completion)
        self.add_decoding(completion)

    def remove(self, completion: Completion) -> None:
        """Remove a finished completion and free what it holds."""
        self._leave(completion)
        completion.state = State.FINISHED
        self._is_full = False
        for _ in range(2):  # again where it failed halfway, as by a lack of memory; else there is nothing left
            quietly(self._space.release, completion)

    def preempt(self) -> Completion | None:
        """Preempt the running completion that ranks last, and queue it again.

        If only one runs, the last of the swapped-out completions loses the shared blocks that it holds on the device.
        None if there is no such completion either.
        """
        running = self.prefilling + self.decoding
        victims = running
        if len(running) < 2:
            victims = [completion for completion in self.waiting if completion.is_swapped]
        if not victims:
            return None
        victim = max(victims, key=_RANK)
        was_swapped = victim.is_swapped
        self._leave(victim)
        victim.is_swapped = False
        if self._config.preemption == "swap" and not was_swapped:
            warn = partial(_LOG.warning, "%r was not swapped out: %s", victim)
            victim.is_swapped = bool(attempt(warn, self._space.swap_out, victim))
        self._queue_again(victim)
        self._is_full = True
        return victim

    def preempt_all(self) -> None:
        """Queue everything that holds K/V again, without them."""
        for one in [*self.prefilling, *self.decoding, *(one for one in self.waiting if one.is_swapped)]:
            self._leave(one)
            one.is_swapped = False
            self._queue_again(one)

    def _queue_again(self, completion: Completion) -> None:
        if not completion.is_swapped:
            quietly(self._space.release, completion)
            completion.requeue()
        self.add(completion)

    def _admit_next(self, left: int) -> bool:
        """Admit the first of the queue if it fits the cache and, if it decodes at once, the rest of the budget."""
        while self.waiting and not (self._is_full and self.num_running):
            first = self.waiting[0]
            if not self._has_slot(first) or (first.is_decoding and left < self._decode_cost):
                return False
            if not self._has_begun:
                self._space.begin(self.prefilling + self.decoding)
                self._has_begun = True
            is_alone = self.num_running == 0
            try:
                is_admitted = self._space.admit(first, is_alone=is_alone)
            except BaseException as error:
                raise_exit(error)
                self.refused.append((first, describe(error)))
                self._leave(first)  # those behind it need not wait
                continue
            if not is_admitted:
                self._is_full = True
                return False
            self._leave(first)
            if first.is_decoding:
                first.tokens = first.tokens[: first.cached]  # the newest runs as a decode
                self.add_decoding(first)
            else:
                first.state = State.PREFILL
                self.prefilling.append(first)
            return True
        return False

    def _has_slot(self, completion: Completion) -> bool:
        """Return whether it may run beside the others, counting all forks to come."""
        running = len(self.decoding) + sum(one.num_sequences for one in self.prefilling)
        return running == 0 or running + completion.num_sequences <= self._config.max_num_seqs

    def _leave(self, completion: Completion) -> None:
        """Remove it from the list it is in, if any."""
        if completion.state is State.WAITING:  # by its rank: a queue may hold 40,000
            index = bisect_left(self.waiting, completion.rank, key=_RANK)
            if self.waiting[index : index + 1] == [completion]:
                del self.waiting[index]
        elif completion.state is not State.FINISHED:
            running = self.prefilling if completion.state is State.PREFILL else self.decoding
            with suppress(ValueError):  # after an error that came while it was on its way there it is in none
                running.remove(completion)


class StepPacer:
    """Learns from step times the time of a step without prompts, and the time that a prompt token adds.

    Args:
        stretch: a step takes at most this many times as long as one without prompt tokens, unless 8 of them take
            longer.
    """

    def __init__(self, stretch: float) -> None:
        self._stretch = stretch
        self._steady: float | None = None
        self._per_token: float | None = None
        self._largest = _SMALLEST_CHUNK

    @property
    def max_prefill_tokens(self) -> int:
        """Prompt tokens that the next step may run; at most twice the largest number that was measured."""
        if self._steady is None:
            return 0  # one step of decodes tells
        if self._per_token is None:
            return _SMALLEST_CHUNK
        spare = (self._stretch * _MARGIN - 1) * self._steady
        return max(_SMALLEST_CHUNK, min(int(spare / self._per_token), 2 * self._largest))

    def observe(self, seconds: float, num_prefill_tokens: int) -> None:
        """Record that a step with decodes took `seconds`."""
        if num_prefill_tokens == 0:
            self._steady = _blend(self._steady, seconds)
        elif self._steady is not None:
            cost = max(seconds - self._steady, 0.01 * self._steady) / num_prefill_tokens
            # A cost that rises counts at once, one that falls slowly: the limit is for every step, not for the mean.
            is_higher = self._per_token is None or cost > self._per_token
            self._per_token = cost if is_higher else _blend(self._per_token, cost)
            self._largest = max(self._largest, num_prefill_tokens)


def _blend(old: float | None, new: float) -> float:
    return new if old is None else old + _NEWEST * (new - old)
