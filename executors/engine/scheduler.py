"""Selection of what a step runs: decodes first, then prompt chunks, oldest first, within a token budget.

Either all capacity of a step is reserved, or a completion is preempted and the step is reserved without it.
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

from paged.batch import UnifiedBatch
from paged.errors import OutOfBlocksError
from paged.executors.engine.batch import Rows, StepBatch, StepOutput
from paged.executors.engine.cache_space import BlockSpace, TokenSpace
from paged.executors.engine.config import EngineConfig
from paged.executors.engine.metrics import EngineMetrics
from paged.executors.isolation import attempt, describe, once_more, quietly, raise_exit
from paged.executors.requests.request import Completion, State
from paged.executors.speculation.drafting import Drafter

_LOG = logging.getLogger("paged")
_RANK = attrgetter("rank")
# Weight of the newest measurement: the costs drift with the lengths of the sequences.
_NEWEST = 0.3
# Safety factor: plan with 80 % of a step's time limit. A measured cost is that of the chunk before, and beside other
# work on its machine a step takes up to 1.5 times as long as planned.
_MARGIN = 0.8
# Longest wait of a step for masks that are computed elsewhere. Most arrive within 0.2 ms.
_MASK_WAIT_S = 0.005
# Most completions that read files at a time, and the longest wait of a step for them if nothing else runs.
_MOST_READING = 8
_FILE_WAIT_S = 0.005
# Fewest prompt tokens that the pacer allows, so that every prompt progresses.
_SMALLEST_CHUNK = 8


class Scheduler:
    """Queue, running sequences and preemption.

    Lower ranks run first. No waiting completion is overtaken by one of higher rank, except while it waits for files:
    the first that does not fit holds up the others, so none starves. After a preemption, or when the first does not
    fit, nothing is admitted until something has finished.

    Args:
        drafter: drafts for sequences that decode, or None.
        ask_for_tokens: lets the executor choose the tokens of completions if it can; None if logits are cheaper.
        decode_cost: most tokens of a decoding sequence: 1 and its drafts.
        prompt_rows: most prompt tokens of a step with logits for each.

    Attributes:
        awaits_masks: whether the last plan left out decodes whose masks had not arrived.
        awaits_files: whether the last plan admitted nothing because blocks are to come from files.
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
        self._rows: Rows | None = None
        self._masked: set[Completion] = set()  # those whose masks are computed elsewhere
        self._decode_cost = decode_cost
        self._prompt_rows = prompt_rows
        self._is_full = self._has_begun = False
        self._num_unpublished = 0  # steps
        self.awaits_masks = self.awaits_files = False

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
        self._note_mask(completion)
        insort(self.waiting, completion, key=_RANK)

    def add_decoding(self, completion: Completion) -> None:
        """Start decoding a completion that holds the K/V of its prompt already, as a fork does."""
        completion.state = State.DECODE
        self._note_mask(completion)
        self.decoding.append(completion)
        self._rows = None

    def _note_mask(self, completion: Completion) -> None:
        if completion.awaited_mask is not None:
            self._masked.add(completion)

    def rows_of(self, completions: list[Completion]) -> Rows:
        """Return the rows of completions that decode; they persist until a completion joins or leaves."""
        rows = self._rows
        if rows is None or rows.completions != completions:
            rows = self._rows = Rows(completions)
        return rows

    def drop_rows(self) -> None:
        """Make rows anew in the next step, as these may be sampled in parts."""
        self._rows = None

    def are_current(self, rows: Rows) -> bool:
        """Return whether no completion has joined or left since these rows were made: then none of them has ended."""
        return rows is self._rows

    def schedule(self, in_flight: StepOutput | None) -> StepBatch | None:
        """Plan the next step and reserve its capacity; None if nothing can run.

        in_flight: the step whose tokens are not known yet. Until they are, nothing is preempted or refused; completions
        that cannot run are planned again in the next step.
        """
        while not self.refused:
            step = self.plan()
            if step.decodes or step.chunks:
                if self._reserve(step, in_flight):
                    return step
                if in_flight is not None:
                    return None
            elif in_flight is not None:
                return None
            elif not self.prefilling or not self.make_room():
                self._refuse_first()
                return None
        return None

    def publish(self) -> None:
        """Count a step, and publish the blocks that its decodes and those before it have filled, if it is time."""
        self._num_unpublished += 1
        if self._num_unpublished >= self._space.publish_every:
            self._num_unpublished = 0
            self._space.publish(self.decoding)

    def make_room(self, num_needed: int = 1) -> bool:
        """Free blocks: first those of drafts, then those of the completion that ranks last; False if there are none.

        num_needed: the missing blocks, for the log.
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
        reason = f"needs {blocks}, {free} free"
        _LOG.log(level, "%r was preempted (%s): %s; see admission_tokens", victim, kind, reason)
        self._metrics.preempted[kind] += 1
        request = victim.request
        request.num_preemptions += 1
        request.output.metrics = replace(
            request.output.metrics, preemptions=request.num_preemptions, preemption_reason=reason
        )
        if self._drafter is not None:
            self._drafter.forget(victim)
        return True

    def _refuse_first(self) -> None:
        """Refuse the first of the queue if nothing runs and nothing can make room for it."""
        if self.awaits_masks or self.awaits_files or self.refused or not self.waiting or self.preempt() is not None:
            return
        reason = "the cache has no room for it, and no request here holds any"
        self.refused.append((self.waiting[0], reason))

    def _reserve(self, step: StepBatch, in_flight: StepOutput | None) -> bool:
        """Reserve the capacity of a step, without completions preempted for it; return whether any remains to run."""
        if self._drafter is not None and step.decodes:
            step.drafts = self._drafter.draft(step.decodes)
            if step.drafts is not None:
                self._metrics.draft_tokens += sum(map(len, step.drafts.token_ids))
        while step.decodes or step.chunks:
            try:
                self._make_batch(step, in_flight)
                return True
            except OutOfBlocksError as error:
                if in_flight is not None:
                    return False
                if step.drafts is not None:  # run without drafts
                    for completion in step.decodes:
                        completion.follow()
                    step.drafts = None
                    continue
                if not self.make_room(error.needed):
                    reason = describe(error)
                    for completion in [*step.decodes, *step.chunks]:
                        self.refused.append((completion, reason))
                    return False
                step.drop_preempted()  # without new drafts, which would take the blocks again
            except BaseException as error:  # of one completion; each then reserves its capacity alone
                raise_exit(error)
                self._metrics.failed_forwards += 1
                if in_flight is not None:
                    return False
                if step.drafts is None:
                    for completion in step.decodes:
                        completion.follow()
                step.completions = [*step.decodes, *step.chunks]
                step.batch = step.rows = None
                return True
        return False

    def _make_batch(self, step: StepBatch, in_flight: StepOutput | None) -> None:
        """Make the batch of a step, with its capacity.

        Raises:
            OutOfBlocksError: the cache has too few free blocks.
        """
        step.is_ahead = in_flight is not None
        decodes = step.decodes
        runs_apart = self._config.batch_invariant and self._space.runs_apart([*decodes, *step.chunks])
        takes_rows = self._space.takes_rows and not runs_apart
        if not step.chunks and step.drafts is None and takes_rows and self._ask_for_tokens is None:
            rows = self.rows_of(decodes)
            newest = None
            if in_flight is not None:
                newest = in_flight.newest_of(decodes, self._space.device)
            if rows.takes_batches and (newest is not None or in_flight is None):
                assert self._space.manager is not None
                step.batch = rows.next_batch(
                    self._space.manager, self._space.device, newest, is_invariant=self._space.is_invariant
                )
                step.completions, step.rows = decodes, rows
                return
        if step.drafts is None:
            for completion in decodes:
                completion.follow()
        completions = [*decodes, *step.chunks]
        device_ids = None
        if in_flight is not None:
            late = [completion for completion in decodes if completion.is_behind]
            known = [completion for completion in completions if not completion.is_behind]
            completions = [*late, *known]
            if late:
                device_ids = in_flight.newest_of(late, self._space.device)
        if self._ask_for_tokens is not None and step.drafts is None:
            self._ask_for_tokens(completions)
        batch: UnifiedBatch | None = self._space.reserve(completions, device_ids)
        if runs_apart:  # each is a forward of its own; this reservation checked that all fit
            if batch is not None and batch.prepared is not None:
                batch.prepared.rollback()
            batch = None
        step.completions, step.batch, step.rows = completions, batch, None

    def plan(self) -> StepBatch:
        """Plan the next step, and admit what fits."""
        config = self._config
        decodes = self._next_decodes()
        tokens_left = config.token_budget - len(decodes) * self._decode_cost
        if decodes and self.pacer is not None:
            tokens_left = min(tokens_left, self.pacer.max_prefill_tokens)
        max_chunk = min(tokens_left, config.chunk_size or tokens_left)
        step = StepBatch(decodes, tokens_left, max_chunk, self._prompt_rows)
        self._has_begun = self.awaits_files = False
        index = 0
        while step.tokens_left > 0:
            if index == len(self.prefilling):
                if not self.waiting or not self._admit_next(step.tokens_left):
                    break
                if index == len(self.prefilling):  # the admitted one was swapped in, and decodes
                    step.decodes.append(self.decoding[-1])
                    step.tokens_left -= self._decode_cost
                    continue
            completion = self.prefilling[index]
            index += 1
            if config.batch_invariant:
                self._add_fixed_chunk(completion, step)
            else:
                self._add_chunk(completion, step)
        return step

    def _next_decodes(self) -> list[Completion]:
        """Return the decodes of the next step, as many as the budget allows; the others run in the steps after it."""
        rows = self._rows
        if rows is not None and rows.steps_left > 0 and rows.completions == self.decoding:
            unfinished = self.decoding.copy()  # no loop: none of them has all its tokens
        else:
            unfinished = [completion for completion in self.decoding if completion.num_sampled < completion.max_tokens]
        decodes = unfinished
        deadline = perf_counter() + _MASK_WAIT_S
        if self._masked:
            decodes = [completion for completion in unfinished if completion.has_mask(deadline)]
        if not (decodes or self.prefilling):
            decodes = [completion for completion in unfinished if completion.has_mask(deadline, is_alone=True)]
        self.awaits_masks = len(decodes) < len(unfinished)
        max_decodes = max(self._config.token_budget // self._decode_cost, 1)
        if len(decodes) > max_decodes:  # take turns: those that run now go last
            decodes = decodes[:max_decodes]
            running = set(decodes)
            resting = [completion for completion in self.decoding if completion not in running]
            self.decoding = resting + decodes
        return decodes

    def _add_fixed_chunk(self, completion: Completion, step: StepBatch) -> None:
        """Add the next chunk of a prompt under `batch_invariant`, whose size depends on its request alone."""
        count = completion.fixed_chunk
        if step.chunks and (count > step.tokens_left or completion.wants_prompt_rows):
            step.close()  # the next step begins with it
        elif self._fitting(completion, count, step) < count and self.num_running > 1:
            step.close()
        else:
            step.add_chunk(completion, count)

    def _add_chunk(self, completion: Completion, step: StepBatch) -> None:
        """Add as many of a prompt's next tokens as fit. If blocks are short, close the plan: nothing overtakes it."""
        config = self._config
        max_count = min(completion.num_to_prefill, step.tokens_left, config.chunk_size or step.tokens_left)
        num_fitting = self._fitting(completion, max_count, step)
        if num_fitting == 0:
            step.close()
            return
        count = num_fitting
        if completion.wants_prompt_rows:
            count = min(count, step.prompt_rows_left)
            step.prompt_rows_left -= count
        num_uncut = completion.whole_spans(count)
        if num_uncut > count:  # above the pacer's limit or chunk_size; allowed within the token budget
            budget_left = config.token_budget - self._decode_cost * len(step.decodes) - step.num_prefill_tokens
            lacks_blocks = self._fitting(completion, num_uncut, step) < num_uncut and self.num_running > 1
            if lacks_blocks or num_uncut > budget_left:
                step.close()
                return
        if num_uncut == 0:
            return
        # If blocks are short beside other sequences, wait rather than leave the grid.
        may_wait = step.decodes or step.chunks or (num_fitting < max_count and self.num_running > 1)
        max_chunk = step.max_chunk if may_wait else 0
        count = self._space.chunk(completion, num_uncut, max_chunk=max_chunk)
        if count:
            step.add_chunk(completion, count)

    def _fitting(self, completion: Completion, count: int, step: StepBatch) -> int:
        """Return how many of the next `count` prompt tokens have free blocks; at least 1 if nothing else runs."""
        planned = [(decode, self._decode_cost) for decode in step.decodes]
        planned += [(prefill, len(prefill.chunk)) for prefill in step.chunks]
        num_fitting = self._space.fitting(completion, count, planned)
        if self.num_running == 1:
            num_fitting = max(num_fitting, 1)
        return num_fitting

    def to_decoding(self, completion: Completion) -> None:
        """Start decoding a completion whose prompt is done."""
        self.prefilling.remove(completion)
        self.add_decoding(completion)

    def remove(self, completion: Completion) -> None:
        """Remove a finished completion and free what it holds."""
        self._leave(completion)
        completion.state = State.FINISHED
        self._masked.discard(completion)
        self._is_full = False
        for _ in range(2):  # a second time, as the first may have failed halfway; else it does nothing
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
        self._space.publish([victim])
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
        """Drop the K/V of all completions, and queue those that held some again."""
        swapped = [completion for completion in self.waiting if completion.is_swapped]
        for completion in [*self.prefilling, *self.decoding, *swapped]:
            self._leave(completion)
            completion.is_swapped = False
            self._queue_again(completion)

    def _queue_again(self, completion: Completion) -> None:
        if not completion.is_swapped:
            quietly(self._space.release, completion)
            completion.requeue()
        self.add(completion)

    def _admit_next(self, tokens_left: int) -> bool:
        """Admit the first of the queue if it fits the cache; one that decodes at once must fit the budget, too."""
        while self.waiting and not (self._is_full and self.num_running):
            first = self._first_to_admit()
            if first is None:
                return False
            if not self._has_slot(first) or (first.is_decoding and tokens_left < self._decode_cost):
                return False
            if not self._has_begun:
                self._space.publish(self.decoding)  # it may begin with blocks that they have filled
                self._space.begin(self.prefilling + self.decoding)
                self._has_begun = True
            is_alone = self.num_running == 0
            try:
                is_admitted = once_more(self._space.admit, first, is_alone=is_alone)
            except BaseException as error:
                raise_exit(error)
                self.refused.append((first, describe(error)))
                self._leave(first)  # so that those behind it do not wait
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

    def _first_to_admit(self) -> Completion | None:
        """Return the first of the queue for which no blocks are to come from files, None if that is soon."""
        for completion in self.waiting[:_MOST_READING]:
            if not self._space.is_reading(completion, 0.0):
                return completion
        # If nothing else runs, the step waits here, so that its caller does not spin.
        wait_s = 0.0 if self.num_running else _FILE_WAIT_S
        self.awaits_files = self._space.is_reading(self.waiting[0], wait_s)
        return None if self.awaits_files else self.waiting[0]

    def _has_slot(self, completion: Completion) -> bool:
        """Return whether it may run beside the others, counting all forks to come."""
        running = len(self.decoding) + sum(completion.num_sequences for completion in self.prefilling)
        return running == 0 or running + completion.num_sequences <= self._config.max_num_seqs

    def _leave(self, completion: Completion) -> None:
        """Remove it from the list it is in, if any."""
        self._rows = None
        if completion.state is State.WAITING:  # by its rank: a queue may hold 40,000
            index = bisect_left(self.waiting, completion.rank, key=_RANK)
            if self.waiting[index : index + 1] == [completion]:
                del self.waiting[index]
        elif completion.state is not State.FINISHED:
            running = self.prefilling if completion.state is State.PREFILL else self.decoding
            with suppress(ValueError):  # an error while it changed lists leaves it in none
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
            if self._per_token is None or cost > self._per_token:
                self._per_token = cost
            else:
                self._per_token = _blend(self._per_token, cost)
            self._largest = max(self._largest, num_prefill_tokens)


def _blend(old: float | None, new: float) -> float:
    return new if old is None else old + _NEWEST * (new - old)
