"""Scheduler: a step runs decodes first, then prompt chunks, oldest first, within a token budget.

If a step's capacity cannot be reserved in full, `shrink` preempts a completion, and the step is reserved without it.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from time import perf_counter

from paged.errors import OutOfBlocksError
from paged.executors.engine.cache_space import BlockSpace
from paged.executors.engine.config import EngineConfig
from paged.executors.engine.metrics import EngineMetrics
from paged.executors.engine.step import DecodeGroup, EngineStep
from paged.executors.engine.step_pacer import StepPacer
from paged.executors.isolation import attempt, describe, once_more, quietly, raise_exit
from paged.executors.requests.request import Completion, State
from paged.executors.speculation.drafting import Drafter

_LOG = logging.getLogger("paged")
_TURN = attrgetter("turn")
# Longest wait of a step for token masks that are computed in another thread. Most arrive within 0.2 ms.
_MASK_WAIT_S = 0.005
# Number of completions that may read files at the same time.
_MOST_READING = 8
# A step's longest wait for a completion that reads files, if nothing else runs.
_FILE_WAIT_S = 0.005


class Scheduler:
    """Queue, running sequences and preemption.

    Earlier turns run first. A waiting completion is never overtaken by a later turn, unless it waits for files.
    Therefore the first completion that does not fit blocks all behind it, and none starves. After a preemption, or when
    the first does not fit, none is admitted until a running completion has finished.

    Args:
        drafter: drafts tokens for decoding sequences, or None.
        ask_for_tokens: makes the executor choose the tokens of completions if it can; None if logits are cheaper.
        decode_cost: maximum number of tokens of a decoding sequence in a step: 1 plus its drafts.
        prompt_rows: maximum number of prompt tokens in a step that have logits.

    Attributes:
        awaits_masks: whether the last step left out decodes whose masks had not arrived.
        awaits_files: whether the last step admitted none because blocks are being read from files.
        refused: (completion, reason) of completions that cannot run. The caller ends them and empties the list.
    """

    def __init__(
        self,
        config: EngineConfig,
        space: BlockSpace,
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
        self._group: DecodeGroup | None = None
        self._masked: set[Completion] = set()  # completions whose masks are computed in another thread
        self._decode_cost = decode_cost
        self._prompt_rows = prompt_rows
        self._is_full = self._has_begun = False
        self._budget = _Budget(0, 0, 0)
        self._num_missing, self._shortage = 0, ""  # blocks that the last `reserve` lacked, and its error
        self._num_unpublished = 0  # steps since the last `publish`
        self.awaits_masks = self.awaits_files = False

    @property
    def num_running(self) -> int:
        """Number of completions that hold cache on the device."""
        return len(self.prefilling) + len(self.decoding)

    @property
    def num_swapped(self) -> int:
        """Number of completions in the queue whose K/V are in host memory."""
        return sum(completion.is_swapped for completion in self.waiting)

    def add(self, completion: Completion) -> None:
        """Queue a completion."""
        completion.state = State.WAITING
        self._note_mask(completion)
        insort(self.waiting, completion, key=_TURN)

    def add_decoding(self, completion: Completion) -> None:
        """Start decoding a completion that already holds its prompt's K/V, such as a fork."""
        completion.state = State.DECODE
        self._note_mask(completion)
        self.decoding.append(completion)
        self._group = None

    def _note_mask(self, completion: Completion) -> None:
        if completion.awaited_mask is not None:
            self._masked.add(completion)

    def group_of(self, completions: list[Completion]) -> DecodeGroup:
        """Return the group of decoding completions. It is reused until a completion joins or leaves."""
        group = self._group
        if group is None or group.completions != completions:
            group = self._group = DecodeGroup(completions)
        return group

    def drop_group(self) -> None:
        """Make a new group in the next step, because the current one may be sampled in parts."""
        self._group = None

    def current_group(self, completions: list[Completion]) -> DecodeGroup | None:
        """Return the group of these completions; None if one has joined or left since it was made."""
        if self._group is not None and self._group.completions == completions:
            return self._group
        return None

    def plan(self, *, is_ahead: bool) -> EngineStep | None:
        """Choose the next step, with its drafts; return None if no completion can run.

        is_ahead: whether the tokens of the step before are not known yet. If not, blocks are freed until a completion
            can run, or the first one of the queue is refused.
        """
        while not self.refused:
            step = self.next_step()
            if step.completions:
                if self._drafter is not None and step.num_decodes:
                    step.drafts = self._drafter.draft(step.decodes)
                if step.drafts is not None:
                    self._metrics.draft_tokens += sum(map(len, step.drafts.token_ids))
                return step
            if is_ahead:
                return None
            if not self.prefilling or not self.make_room():
                self._refuse_first()
                return None
        return None

    def reserve(self, step: EngineStep, last: EngineStep | None) -> bool:
        """Set the tokens of a step and reserve their capacity; return False if blocks are short.

        last: the step before if its tokens are not known yet.
        """
        self._fill(step, last)
        try:
            if step.only_decodes:
                self._space.manager.reserve_for(step)
            else:
                self._space.reserve(step)
        except OutOfBlocksError as error:
            self._num_missing, self._shortage = error.needed, describe(error)
            return False
        if step.runs_apart:  # each completion reserves again; this has checked that all fit
            step.rollback()
        return True

    def shrink(self, step: EngineStep) -> EngineStep | None:
        """Free blocks after `reserve` has returned False: the drafts' if there are any, else those of the last turn.

        Return what is left of the step, or another step if nothing is; None if no blocks can be freed. The completions
        are then refused.
        """
        if step.drafts is not None:
            step.drafts = None
            for completion in step.decodes:
                completion.follow()
            return step
        if not self.make_room(self._num_missing):
            for completion in step.completions:
                self.refused.append((completion, self._shortage))
            return None
        step.drop_preempted()  # no new drafts, which would take the blocks again
        if step.completions:
            return step
        return self.plan(is_ahead=False)

    def publish(self) -> None:
        """Count a step; at the interval of `publish_every`, publish the blocks that decodes have filled."""
        self._num_unpublished += 1
        if self._num_unpublished >= self._space.publish_every:
            self._num_unpublished = 0
            self._space.publish(self.decoding)

    def make_room(self, num_needed: int = 1) -> bool:
        """Free the blocks of drafts, else preempt the completion whose turn is last; return False if there is none.

        num_needed: number of missing blocks, for the log.
        """
        if self._drafter is not None and self._drafter.make_room():
            return True
        free = self._space.free_blocks
        victim = self.preempt()
        if victim is None:
            return False
        kind = "swap" if victim.is_swapped else "recompute"
        # Warn once only, because a cache that is too small preempts in every step.
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
        """Refuse the first completion of the queue if nothing runs and no blocks can be freed for it."""
        if self.awaits_masks or self.awaits_files or self.refused or not self.waiting or self.preempt() is not None:
            return
        reason = "the cache has no room for it, and no request here holds any"
        self.refused.append((self.waiting[0], reason))

    def _fill(self, step: EngineStep, last: EngineStep | None) -> None:
        """Set the sequences and tokens of a step from its completions; `last` as in `reserve`."""
        space, completions = self._space, step.completions
        step.device = space.device
        if self._config.batch_invariant:
            step.is_invariant = space.is_invariant
            step.runs_apart = space.runs_apart(completions)
        takes_group = not (space.executor.takes_items or step.runs_apart) and self._ask_for_tokens is None
        if takes_group and step.num_prefill_tokens == 0 and step.drafts is None:
            group = self.group_of(completions)
            newest = None
            if last is not None:
                newest = last.newest_of(completions, space.device)
            if group.fills_steps and (newest is not None or last is None):
                group.fill(step, newest)
                return
        if step.drafts is None:
            for completion in step.decodes:
                completion.follow()
        device_ids = None
        if last is not None:
            late = [completion for completion in step.decodes if completion.is_behind]
            known = [completion for completion in completions if not completion.is_behind]
            completions = [*late, *known]
            if late:
                device_ids = last.newest_of(late, space.device)
        if self._ask_for_tokens is not None and step.drafts is None:
            self._ask_for_tokens(completions)
        step.take_chunks(completions, device_ids)

    def next_step(self) -> EngineStep:
        """Choose the next step and admit completions that fit."""
        config = self._config
        decodes = self._next_decodes()
        step = EngineStep(completions=decodes, num_decodes=len(decodes))
        tokens_left = config.token_budget - step.num_decodes * self._decode_cost
        if decodes and self.pacer is not None:
            tokens_left = min(tokens_left, self.pacer.max_prefill_tokens)
        max_chunk = min(tokens_left, config.chunk_size or tokens_left)
        budget = self._budget = _Budget(tokens_left, max_chunk, self._prompt_rows)
        self._has_begun = self.awaits_files = False
        index = 0
        while budget.tokens_left > 0:
            if index == len(self.prefilling):
                if not self.waiting or not self._admit_next(budget.tokens_left):
                    break
                if index == len(self.prefilling):  # the admitted completion was swapped in and decodes
                    step.add_decode(self.decoding[-1])
                    budget.tokens_left -= self._decode_cost
                    continue
            completion = self.prefilling[index]
            index += 1
            if config.batch_invariant:
                self._add_fixed_chunk(completion, step)
            else:
                self._add_chunk(completion, step)
        return step

    def _next_decodes(self) -> list[Completion]:
        """Return the decodes of the next step, as many as the budget allows; the others run in later steps."""
        group = self._group
        if group is not None and group.steps_left > 0 and group.completions == self.decoding:
            unfinished = self.decoding.copy()  # fast path: no completion has all its tokens yet
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
        if len(decodes) > max_decodes:  # take turns: the decodes of this step go to the end of the list
            decodes = decodes[:max_decodes]
            running = set(decodes)
            resting = [completion for completion in self.decoding if completion not in running]
            self.decoding = resting + decodes
        return decodes

    def _add_fixed_chunk(self, completion: Completion, step: EngineStep) -> None:
        """Add the next chunk of a prompt under `batch_invariant`; its size depends only on its request."""
        budget, count = self._budget, completion.fixed_chunk
        if step.num_prefill_tokens and (count > budget.tokens_left or completion.wants_prompt_rows):
            budget.close()  # it does not fit; the next step begins with it
        elif self._fitting(completion, count, step) < count and self.num_running > 1:
            budget.close()
        else:
            self._add_tokens(completion, count, step)

    def _add_chunk(self, completion: Completion, step: EngineStep) -> None:
        """Add the prompt's next tokens that fit. If blocks are short, close the step, so that no other overtakes it."""
        config, budget = self._config, self._budget
        max_count = min(completion.num_to_prefill, budget.tokens_left, config.chunk_size or budget.tokens_left)
        num_fitting = self._fitting(completion, max_count, step)
        if num_fitting == 0:
            budget.close()
            return
        count = num_fitting
        if completion.wants_prompt_rows:
            count = min(count, budget.prompt_rows_left)
            budget.prompt_rows_left -= count
        num_uncut = completion.whole_spans(count)
        if num_uncut > count:  # a span may exceed the pacer's limit and chunk_size, but not the token budget
            budget_left = config.token_budget - self._decode_cost * step.num_decodes - step.num_prefill_tokens
            lacks_blocks = self._fitting(completion, num_uncut, step) < num_uncut and self.num_running > 1
            if lacks_blocks or num_uncut > budget_left:
                budget.close()
                return
        if num_uncut == 0:
            return
        # If other sequences can make progress, let this one wait rather than end its chunk between two multiples of
        # SCAN_CHUNK, where recurrent layers cannot keep their state for other prompts.
        may_wait = step.completions or (num_fitting < max_count and self.num_running > 1)
        max_chunk = budget.max_chunk if may_wait else 0
        count = self._space.chunk(completion, num_uncut, max_chunk=max_chunk)
        if count:
            self._add_tokens(completion, count, step)

    def _add_tokens(self, completion: Completion, count: int, step: EngineStep) -> None:
        step.add_chunk(completion, count)
        self._budget.tokens_left -= count

    def _fitting(self, completion: Completion, count: int, step: EngineStep) -> int:
        """Return how many of the next `count` prompt tokens have free blocks, at least 1 if nothing else runs."""
        scheduled = [(decode, self._decode_cost) for decode in step.decodes]
        scheduled += [(prefill, len(prefill.chunk)) for prefill in step.chunks]
        num_fitting = self._space.fitting(completion, count, scheduled)
        if self.num_running == 1:
            num_fitting = max(num_fitting, 1)
        return num_fitting

    def to_decoding(self, completion: Completion) -> None:
        """Start decoding a completion whose prompt has run."""
        self.prefilling.remove(completion)
        self.add_decoding(completion)

    def remove(self, completion: Completion) -> None:
        """Remove a finished completion and free its cache."""
        self._leave(completion)
        completion.state = State.FINISHED
        self._masked.discard(completion)
        self._is_full = False
        for _ in range(2):  # twice, because the first call may fail halfway; otherwise the second does nothing
            quietly(self._space.release, completion)

    def preempt(self) -> Completion | None:
        """Preempt the running completion whose turn is last, queue it again, and return it.

        If only one runs, the last swapped-out completion instead loses the shared blocks that it holds on the device.
        Return None if there is no such completion either.
        """
        running = self.prefilling + self.decoding
        victims = running
        if len(running) < 2:
            victims = [completion for completion in self.waiting if completion.is_swapped]
        if not victims:
            return None
        victim = max(victims, key=_TURN)
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
        """Drop the K/V of all completions; queue the running completions again."""
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
        """Admit the first completion of the queue if it fits the cache and, if it decodes at once, the budget."""
        while self.waiting and not (self._is_full and self.num_running):
            first = self._first_to_admit()
            if first is None:
                return False
            if not self._may_run(first) or (first.is_decoding and tokens_left < self._decode_cost):
                return False
            if not self._has_begun:
                self._space.publish(self.decoding)  # the prompt of `first` may begin with blocks of decodes
                self._space.begin(self.prefilling + self.decoding)
                self._has_begun = True
            is_alone = self.num_running == 0
            try:
                is_admitted = once_more(self._space.admit, first, is_alone=is_alone)
            except BaseException as error:
                raise_exit(error)
                self.refused.append((first, describe(error)))
                self._leave(first)  # so that the completions behind it do not wait
                continue
            if not is_admitted:
                self._is_full = True
                return False
            self._leave(first)
            if first.is_decoding:
                first.tokens = first.tokens[: first.cached]  # the newest token runs as a decode
                self.add_decoding(first)
            else:
                first.state = State.PREFILL
                self.prefilling.append(first)
            return True
        return False

    def _first_to_admit(self) -> Completion | None:
        """Return the first completion of the queue that does not wait for files; None if all must wait."""
        for completion in self.waiting[:_MOST_READING]:
            if not self._space.is_reading(completion, 0.0):
                return completion
        # If nothing else runs, wait here, so that the caller does not spin.
        wait_s = 0.0 if self.num_running else _FILE_WAIT_S
        self.awaits_files = self._space.is_reading(self.waiting[0], wait_s)
        return None if self.awaits_files else self.waiting[0]

    def _may_run(self, completion: Completion) -> bool:
        """Return whether `max_num_seqs` allows a completion with all its future forks."""
        running = len(self.decoding) + sum(completion.num_sequences for completion in self.prefilling)
        return running == 0 or running + completion.num_sequences <= self._config.max_num_seqs

    def _leave(self, completion: Completion) -> None:
        """Remove a completion from its list, if any."""
        self._group = None
        if completion.state is State.WAITING:  # search by turn, because a queue may hold 40,000
            index = bisect_left(self.waiting, completion.turn, key=_TURN)
            if self.waiting[index : index + 1] == [completion]:
                del self.waiting[index]
        elif completion.state is not State.FINISHED:
            running = self.prefilling if completion.state is State.PREFILL else self.decoding
            with suppress(ValueError):  # after an error while it moved between lists, it is in none
                running.remove(completion)


@dataclass
class _Budget:
    """Prompt tokens that may still join a step.

    Attributes:
        tokens_left: number of prompt tokens; 0 after `close`.
        max_chunk: largest number of prompt tokens of one completion.
        prompt_rows_left: number of prompt tokens whose logits may be requested.
    """

    tokens_left: int
    max_chunk: int
    prompt_rows_left: int

    def close(self) -> None:
        """Let no more prompt tokens join."""
        self.tokens_left = 0
