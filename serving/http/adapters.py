"""Adapters by client name. A replaced adapter passes its client name on to its successor."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

from paged.errors import InvalidInputError, UnsupportedError
from paged.executors.engine.async_engine import AsyncEngine

_POLL_SECONDS = 0.1


class Adapters:
    """Adapters of an engine. A replaced adapter keeps its own engine name until its requests have ended."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._engine_names: dict[str, str] = {}  # engine name by client name, of adapters that are or were loaded here
        self._ending: dict[str, asyncio.Task[None]] = {}  # unloading tasks by engine name
        self._num_loaded = 0

    def engine_name(self, name: str) -> str:
        """Return the engine name of the adapter that currently has a client name."""
        return self._engine_names.get(name, name)

    async def names(self) -> tuple[str, ...]:
        """Return the client names of the adapters that requests can use; none if the executor has no adapters."""
        loaded: tuple[str, ...] = ()
        with suppress(UnsupportedError):
            loaded = await self._engine.list_loras()
        clients_names = {engine_name: name for name, engine_name in self._engine_names.items()}
        names = []
        for name in loaded:
            if name not in self._ending:
                names.append(clients_names.get(name, name))
        return tuple(names)

    async def load(self, name: str, path: Path, *, in_place: bool) -> None:
        """Load an adapter from a folder.

        Args:
            in_place: whether to replace an adapter of this name. The old one stays loaded until its requests have
                ended, so max_loras must allow one more. If loading fails, the old one stays.

        Raises:
            InvalidInputError: the name is in use without `in_place`; or see `AsyncEngine.load_lora`.
            CheckpointError, UnsupportedError: see `AsyncEngine.load_lora`.
        """
        is_loaded = name in await self.names()
        if is_loaded and not in_place:
            raise InvalidInputError(f"adapter {name!r}: already loaded, see load_inplace")
        self._num_loaded += 1
        new, old = name, self.engine_name(name)
        if is_loaded or name in self._ending:
            new = f"{name}@{self._num_loaded}"
        await self._engine.load_lora(new, path)
        self._engine_names[name] = new
        if is_loaded:
            self._ending[old] = asyncio.create_task(self._end(old))

    async def unload(self, name: str) -> None:
        """Unload an adapter; raises the errors of `AsyncEngine.unload_lora`."""
        await self._engine.unload_lora(self.engine_name(name))
        self._engine_names.pop(name, None)

    async def _end(self, engine_name: str) -> None:
        """Unload a replaced adapter once no request uses it."""
        while self._engine.is_accepting:
            await asyncio.sleep(_POLL_SECONDS)
            with suppress(InvalidInputError):
                await self._engine.unload_lora(engine_name)
                break
        del self._ending[engine_name]
