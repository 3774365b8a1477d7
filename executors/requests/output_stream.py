"""The output of a request, for a reader that takes it at its own pace."""

from __future__ import annotations

import asyncio

from paged.executors.requests.output import RequestOutput


class OutputStream:
    """Holds what the reader of a request has not taken yet: its newest state, and an error after that."""

    def __init__(self, output: RequestOutput) -> None:
        self.output = output
        self._newest: RequestOutput | None = None
        self._error: BaseException | None = None
        self._has_news = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Replace the newest state."""
        self._newest = output
        self._has_news.set()

    def fail(self, error: BaseException) -> None:
        """Raise this error after the newest state."""
        self._error = error
        self._has_news.set()

    async def newest(self) -> RequestOutput:
        """The newest state, once there is one that was not taken; else the error."""
        await self._has_news.wait()
        newest, self._newest = self._newest, None
        if newest is None:
            assert self._error is not None
            raise self._error
        if self._error is None:
            self._has_news.clear()
        return newest
