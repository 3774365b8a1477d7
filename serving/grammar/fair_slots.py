"""Slots for work that costs memory and time, waited for in turn."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Hashable
from contextlib import asynccontextmanager


class QueueFullError(Exception):
    """More wait for a slot than may."""


class FairSlots:
    """A number of slots: clients get them in turn, and what one client asks for keeps its order.

    Args:
        max_waiting: beyond, the client of whom most waits has its newest request refused.
    """

    def __init__(self, num_slots: int, max_waiting: int) -> None:
        self._num_free, self._max_waiting = num_slots, max_waiting
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}  # by client, the next in turn first

    @asynccontextmanager
    async def slot(self, client: Hashable) -> AsyncGenerator[None, None]:
        """Wait for a slot and hold it.

        Raises:
            QueueFullError: too many wait.
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
                self._pass_on()  # the slot came at the same moment
            else:
                self._remove(client, turn)
            raise

    def _make_room(self, client: Hashable) -> None:
        """Refuse a request if too many wait: the newest of the client with most of them, which may be this one."""
        if sum(map(len, self._waiting.values())) < self._max_waiting:
            return
        largest = max(self._waiting, key=lambda other: len(self._waiting[other]), default=client)
        if len(self._waiting.get(largest, ())) <= len(self._waiting.get(client, ())) + 1:
            raise QueueFullError
        newest = self._waiting[largest].pop()
        if not newest.done():  # a request that was cancelled leaves only when its task runs
            newest.set_exception(QueueFullError())

    def _remove(self, client: Hashable, turn: asyncio.Future[None]) -> None:
        turns = self._waiting.get(client)
        if turns is not None and turn in turns:
            turns.remove(turn)
            if not turns:
                del self._waiting[client]

    def _pass_on(self) -> None:
        """Give a slot that is free to whoever is next and still waits."""
        while self._waiting:
            client = next(iter(self._waiting))
            turns = self._waiting.pop(client)
            turn = turns.popleft()
            if turns:
                self._waiting[client] = turns  # behind the other clients
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1
