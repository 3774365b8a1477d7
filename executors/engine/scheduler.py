"""Who runs in a step: decodes first, then prompt chunks, oldest first, within a budget of tokens."""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import NamedTuple, Protocol

from paged.executors.engine.config import EngineConfig
from paged.executors.isolation import attempt, quietly
from paged.executors.requests.request import Completion, State

_LOG = logging.getLogger("paged")
_RANK = attrgetter("rank")


class CacheSpace(Protocol):
    """The scheduler's view of the KV cache."""

    def begin(self, running: Sequence[Completion]) -> None:
        """Count what those that run may take, once for all that are admitted beside them."""

    def admit(self, completion: Completion, *, is_alone: bool) -> bool:
        """Give a waiting completion what it takes to run; False where there is not as much. Alone it need not grow."""

    def release(self, completion: Completion) -> None:
        """Take back what a completion holds, if anything, through the executor, which may know more of it."""

    def swap_out(self, completion: Completion) -> bool:
        """Move what it holds alone to host memory; False where that has not as much, or is not known."""


class Plan(NamedTuple):
    """The completions of a step, whose items are set; `num_prefill_tokens` rows are of chunks."""

    decodes: list[Completion]
    chunks: list[Completion]
    num_prefill_tokens: int


class Scheduler:
    """Queue, running sequences, preemption. Knows no model and no tensors.

    A waiting completion is passed by none of higher rank: the first that does not fit holds up the others, so none
    starves. After a preemption, or when the first does not fit, nothing is admitted until something has finished.

    fail: end a completion that cannot be admitted for a reason, by `remove` at last.
    decode_cost: rows of a decoding sequence: 1, and its drafts at the most.
    """

    def __init__(
        self,
        config: EngineConfig,
        space: CacheSpace,
        fail: Callable[[Completion, str], None],
        *,
        decode_cost: int = 1,
    ) -> None:
        self.waiting: list[Completion] = []
        self.prefilling: list[Completion] = []
        self.decoding: list[Completion] = []
        self._config = config
        self._space = space
        self._fail = fail
        self._decode_cost = decode_cost
        self._is_full = self._has_begun = False
        self._swapped: set[Completion] = set()

    @property
    def num_running(self) -> int:
        """Completions that hold cache on the device."""
        return len(self.prefilling) + len(self.decoding)

    @property
    def num_swapped(self) -> int:
        """Completions of the queue whose K/V are in host memory."""
        return len(self._swapped)

    def add(self, completion: Completion) -> None:
        """Queue a completion."""
        completion.state = State.WAITING
        insort(self.waiting, completion, key=_RANK)

    def add_decoding(self, completion: Completion) -> None:
        """Have a completion decode that holds the K/V of its prompt already, as a fork does."""
        completion.state = State.DECODE
        self.decoding.append(completion)

    def plan(self, *, max_prefill_tokens: int | None = None) -> Plan:
        """Plan the next step, and admit what fits. `max_prefill_tokens` bounds the chunks where something decodes."""
        config, cost = self._config, self._decode_cost
        fitting = max(config.token_budget // cost, 1)
        if len(self.decoding) > fitting:  # in turns
            decodes = self.decoding[:fitting]
            self.decoding = self.decoding[fitting:] + decodes
        else:
            decodes = self.decoding.copy()
        left = max(config.token_budget - len(decodes) * cost, 0 if decodes else 1)
        if decodes and max_prefill_tokens is not None:
            left = min(left, max_prefill_tokens)
        self._has_begun = False
        chunks: list[Completion] = []
        index = 0
        while left > 0 and (index < len(self.prefilling) or self._admit_next(left)):
            if index == len(self.prefilling):  # it came back from the host, and decodes
                decodes.append(self.decoding[-1])
                left -= cost
                continue
            completion = self.prefilling[index]
            count = min(completion.num_to_prefill, left, config.chunk_size or left)
            completion.take_chunk(count)
            chunks.append(completion)
            left -= count
            index += 1
        return Plan(decodes, chunks, sum(len(completion.item.q_tokens) for completion in chunks))

    def predict(self) -> list[Completion]:
        """The completions that decode in the next step, if all that run get a token and only those end that reach their
        max_tokens by it; none where others would run beside them, or not all of them.
        """
        budget, cost = self._config.token_budget, self._decode_cost
        staying = [completion for completion in self.decoding if not completion.is_ending]
        is_full = self._is_full and len(staying) == len(self.decoding)
        admits = self.waiting and not is_full and len(staying) < self._config.max_num_seqs
        has_others = (self.prefilling or admits) and len(staying) * cost < budget
        return [] if has_others or len(self.decoding) * cost > budget else staying

    def to_decoding(self, completion: Completion) -> None:
        """Have a completion decode whose prompt is done."""
        self.prefilling.remove(completion)
        self.add_decoding(completion)

    def remove(self, completion: Completion) -> None:
        """Take a finished completion out, and back what it holds."""
        self._leave(completion)
        completion.state = State.FINISHED
        self._is_full = False
        quietly(self._space.release, completion)

    def preempt(self, spared: Collection[Completion] = ()) -> Completion | None:
        """Take the room of the running completion that ranks last, but for those spared, and queue it again.

        None where only one runs; but others that were swapped out may hold shared blocks on the device, and then the
        last of those loses them.
        """
        running = self.prefilling + self.decoding
        victims = [completion for completion in running if completion not in spared] if len(running) > 1 else []
        victims = victims or list(self._swapped)
        if not victims:
            return None
        victim = max(victims, key=_RANK)
        was_swapped = victim.is_swapped
        self._leave(victim)
        victim.is_swapped = False
        if self._config.preemption == "swap" and not was_swapped:
            warn = partial(_LOG.warning, "%r was not swapped out: %s", victim)
            victim.is_swapped = bool(attempt(warn, self._space.swap_out, victim))
        if victim.is_swapped:
            self._swapped.add(victim)
        else:
            quietly(self._space.release, victim)
            victim.requeue()
        self.add(victim)
        self._is_full = True
        return victim

    def _admit_next(self, left: int) -> bool:
        """Admit the first of the queue, if it fits the cache and, where it decodes at once, the rest of the budget."""
        while self.waiting and not (self._is_full and self.num_running):
            first = self.waiting[0]
            if not self._has_slot(first) or (first.is_decoding and left < self._decode_cost):
                return False
            if not self._has_begun:
                self._space.begin(self.prefilling + self.decoding)
                self._has_begun = True
            is_alone = self.num_running == 0
            is_admitted = attempt(partial(self._fail, first), self._space.admit, first, is_alone=is_alone)
            if is_admitted is None:  # it has failed, and those behind it need not wait
                continue
            if not is_admitted:
                self._is_full = True
                return False
            self._leave(first)
            if first.is_decoding:
                first.follow()
                self.add_decoding(first)
            else:
                first.state = State.PREFILL
                self.prefilling.append(first)
            return True
        return False

    def _has_slot(self, completion: Completion) -> bool:
        """Whether it may run beside the others, with all that will fork from it and from them."""
        running = len(self.decoding) + sum(one.num_sequences for one in self.prefilling)
        return running == 0 or running + completion.num_sequences <= self._config.max_num_seqs

    def _leave(self, completion: Completion) -> None:
        """Take it out of the list that it stands in, if any."""
        self._swapped.discard(completion)
        if completion.state is State.WAITING:  # by its rank: a queue may hold 40,000
            index = bisect_left(self.waiting, completion.rank, key=_RANK)
            if self.waiting[index : index + 1] == [completion]:
                del self.waiting[index]
        elif completion.state is not State.FINISHED:
            running = self.prefilling if completion.state is State.PREFILL else self.decoding
            with suppress(ValueError):  # after an error that came while it was on its way there it is in none
                running.remove(completion)
