"""Rank 0's side of a model distributed over processes: sends its steps to the other ranks."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, RLock, Thread
from time import monotonic
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paged.cache.tiers.files import FileRead
from paged.errors import PagedError, RankFailedError
from paged.executors.parallel.messages import Channel, Kind, StepMessage
from paged.models.logits_policy import Draws
from paged.models.paged_lm import PagedCausalLM
from paged.step.step import Step

_LOG = logging.getLogger("paged")


class Driver:
    """Sends each step to the other ranks before rank 0 runs it, and each move of blocks before the step that needs it.

    Therefore one cache manager decides for all ranks. After idle time, it checks that all ranks respond. Thread-safe.

    lock: held while a message is sent and its work runs, so that all ranks work in the same order. The holder may call
    the cache, so code that the cache calls must not wait for the lock.

    Raises, in every method:
        RankFailedError: a rank has ended or does not answer.
    """

    def __init__(self, model: PagedCausalLM) -> None:
        self._ranks, self._tensors, self._files = model.ranks, model.kv_manager.tensors, model.kv_manager.files
        self._channel = Channel(model.ranks)
        self.lock = RLock()
        self._moves: deque[list[NDArray[Any]]] = deque()  # moves that are not sent yet
        self._num_steps = 0
        self._last_sent = monotonic()
        self._stopped = Event()
        model.lead = self._lead
        self._tensors.listener = self._keep_move
        if self._files is not None:
            self._files.tell, self._files.compare = self._keep_move, self._compare_read
        Thread(target=self._watch, name="paged-ranks", daemon=True).start()

    @contextmanager
    def alike(self, kind: Kind, *words: str) -> Iterator[None]:
        """Announce work that every rank does by itself, for the body of the context."""
        with self._running():
            self._send(kind, [np.frombuffer(word.encode(), np.uint8) for word in words])
            yield

    def stop(self) -> None:
        """Make the other ranks return from `serve`. May be repeated, also after a rank has failed."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        with self.lock:
            try:
                self._send(Kind.STOP, [])
                self._ranks.compare(self._channel.state)
            except RankFailedError as error:
                _LOG.warning("%s", error)
            self._ranks.close()

    @contextmanager
    def _lead(self, step: Step, row_adapters: NDArray[np.int32] | None, draws: Draws | None) -> Iterator[None]:
        with self._running():
            num_device_ids = 0
            if step.device_ids is not None:
                num_device_ids = len(step.device_ids)
            message = StepMessage(step, row_adapters, draws, num_device_ids)
            self._send(Kind.STEP, message.arrays())
            if step.device_ids is not None:
                self._ranks.broadcast(step.device_ids, on_device=True)
            yield
            self._num_steps += 1
            if self._num_steps % self._ranks.config.check_steps == 0:
                self._compare()

    def _keep_move(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Queue a move of blocks or work on files for the next message, because other ranks need it no earlier."""
        numbers = [np.array(argument, np.int64) for argument in arguments]
        self._moves.append([np.frombuffer(name.encode(), np.uint8), *numbers])

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Fail all ranks if this rank raises during work that they wait for."""
        with self.lock:
            try:
                yield
            except RankFailedError:
                raise
            except BaseException as error:
                self._ranks.fail(f"rank 0 failed within a step ({type(error).__name__}: {error})")
                raise

    def _send(self, kind: Kind, arrays: list[NDArray[Any]]) -> None:
        while self._moves:
            self._channel.send(Kind.MOVE_BLOCKS, self._moves.popleft())
        self._channel.send(kind, arrays)
        self._last_sent = monotonic()

    def _compare(self) -> None:
        """Check that all ranks respond and have received the same messages.

        Raises:
            PagedError: a rank has received different messages.
        """
        self._send(Kind.COMPARE, [])
        compare_states(self._channel, self._ranks.compare(self._channel.state))

    def _compare_read(self, read: FileRead) -> list[torch.Tensor]:
        """Return `FileTier.progress` of a read on every rank. No rank waits for its folder."""
        assert self._files is not None
        with self._running():
            self._send(Kind.COMPARE_READ, [np.array([read.number, read.is_late], np.int64)])
            return self._ranks.compare(torch.from_numpy(self._files.progress(read)))

    def _watch(self) -> None:
        interval = self._ranks.config.timeout_s / 4
        try:
            while not self._stopped.wait(interval):
                with self._running():
                    if monotonic() - self._last_sent >= interval and not self._stopped.is_set():
                        self._compare()
        except PagedError as error:
            if not self._stopped.is_set():
                _LOG.warning("%s", error)


def compare_states(channel: Channel, states: list[Any]) -> None:
    """Raise PagedError unless all ranks have received the same messages."""
    out_of_step = [rank for rank, state in enumerate(states) if not state.equal(channel.state)]
    if out_of_step:
        raise PagedError(f"ranks {out_of_step} have received other messages than this rank")
