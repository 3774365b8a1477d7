"""Adapters by the names that clients use, which an adapter keeps when it is replaced."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

from paged.errors import InvalidInputError, UnsupportedError
from paged.executors.engine.async_engine import AsyncEngine

_POLL_SECONDS = 0.1


class Adapters:
    """The adapters of an engine. One that is replaced ends its requests under another name of the engine's."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._engine_names: dict[str, str] = {}  # of adapters that are or were loaded here, by the clients' names
        self._ending: dict[str, asyncio.Task[None]] = {}  # by the engine's names
        self._num_loaded = 0

    def engine_name(self, name: str) -> str:
        """Return the engine's name of the adapter that now has a client's name."""
        return self._engine_names.get(name, name)

    async def names(self) -> tuple[str, ...]:
        """Return the clients' names of the adapters that requests can name; none if the executor takes none."""
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
            in_place: whether an adapter of this name is replaced. Both are loaded until its requests have ended, so
                this takes a free slot. If the new one cannot be loaded, the old one stays.

        Raises:
            InvalidInputError: the name is taken and is not to be replaced; or as `AsyncEngine.load_lora`.
            CheckpointError, UnsupportedError: as `AsyncEngine.load_lora`.
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
        """Unload an adapter. Errors are those of `AsyncEngine.unload_lora`."""
        await self._engine.unload_lora(self.engine_name(name))
        self._engine_names.pop(name, None)

    async def _end(self, engine_name: str) -> None:
        """Unload a replaced adapter once no request names it."""
        while self._engine.is_accepting:
            await asyncio.sleep(_POLL_SECONDS)
            with suppress(InvalidInputError):
                await self._engine.unload_lora(engine_name)
                break
        del self._ending[engine_name]
