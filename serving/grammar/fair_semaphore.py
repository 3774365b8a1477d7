"""Semaphore for expensive work, shared fairly among clients."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Hashable
from contextlib import asynccontextmanager


class QueueFullError(Exception):
    """Too many requests wait for a semaphore."""


class FairSemaphore:
    """Semaphore that clients get in turn. Requests of one client keep their order.

    Args:
        num_holders: maximum number of holders at the same time.
        max_waiting: maximum number of waiting requests. Beyond it, the newest request of the client with most waiting
            requests is refused.
    """

    def __init__(self, num_holders: int, max_waiting: int) -> None:
        self._num_free, self._max_waiting = num_holders, max_waiting
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}  # by client; the next client in turn is first

    @asynccontextmanager
    async def hold(self, client: Hashable) -> AsyncGenerator[None, None]:
        """Wait for the semaphore and hold it.

        Raises:
            QueueFullError: too many requests wait.
        """
        if self._num_free:
            self._num_free -= 1
        else:
            await self._wait(client)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, client: Hashable) -> None:
        self._make_room(client)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._pass_on()  # cancelled at the moment of its turn
            else:
                self._remove(client, turn)
            raise

    def _make_room(self, client: Hashable) -> None:
        """If too many wait, refuse the newest request of the client with most of them, which may be this client."""
        if sum(map(len, self._waiting.values())) < self._max_waiting:
            return
        largest = max(self._waiting, key=lambda other: len(self._waiting[other]), default=client)
        if len(self._waiting.get(largest, ())) <= len(self._waiting.get(client, ())) + 1:
            raise QueueFullError
        newest = self._waiting[largest].pop()
        if not newest.done():  # a cancelled request stays until its task runs
            newest.set_exception(QueueFullError())

    def _remove(self, client: Hashable, turn: asyncio.Future[None]) -> None:
        turns = self._waiting.get(client)
        if turns is not None and turn in turns:
            turns.remove(turn)
            if not turns:
                del self._waiting[client]

    def _pass_on(self) -> None:
        """Let the next waiting request hold the semaphore."""
        while self._waiting:
            client = next(iter(self._waiting))
            turns = self._waiting.pop(client)
            turn = turns.popleft()
            if turns:
                self._waiting[client] = turns  # after the other clients
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1
