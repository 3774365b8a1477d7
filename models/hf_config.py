"""config.json of a checkpoint, read with errors that name the key and the file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paged.errors import CheckpointError

_REQUIRED: Any = object()


class HfConfig:
    """The values of a config.json, or of a section of one. A key that is absent or null takes the default."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    @classmethod
    def read(cls, folder: Path, name: str = "config.json") -> HfConfig:
        """The folder's config.json, or another file of its kind.

        Raises:
            CheckpointError: it is missing, or not a JSON object.
        """
        file = folder / name
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{file}: missing") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file}: unreadable ({error})") from error
        if not isinstance(values, dict):
            raise CheckpointError(f"{file}: holds a {type(values).__name__}, expected an object")
        return cls(values, str(file))

    def integer(self, key: str, default: int = _REQUIRED) -> int:
        """A positive integer."""
        return int(self._get(key, default, "a positive integer", int))

    def optional_integer(self, key: str) -> int | None:
        """A positive integer, or None where absent or null."""
        return None if self.values.get(key) is None else self.integer(key)

    def number(self, key: str, default: float = _REQUIRED) -> float:
        """A positive number."""
        return float(self._get(key, default, "a positive number", int, float))

    def flag(self, key: str, default: bool = False) -> bool:
        """true or false."""
        return bool(self._get(key, default, "true or false", bool))

    def text(self, key: str, default: str = _REQUIRED) -> str:
        """A string."""
        return str(self._get(key, default, "a string", str))

    def items(self, key: str, kind: type) -> list[Any]:
        """A list of values of one kind; empty where absent."""
        values = self._get(key, [], "a list", list)
        if not all(type(value) is kind for value in values):
            raise CheckpointError(f"{self.source}: {key} = {values!r}, expected a list of {kind.__name__}")
        return list(values)

    def section(self, key: str) -> HfConfig | None:
        """An object within, or None."""
        values = self._get(key, None, "an object", dict)
        return None if values is None else HfConfig(values, self.source)

    def _get(self, key: str, default: Any, expected: str, *kinds: type) -> Any:
        value = self.values.get(key)
        if value is None:
            if default is _REQUIRED:
                raise CheckpointError(f"{self.source}: {key} is missing, expected {expected}")
            return default
        # bool is a kind of int in Python; JSON knows better.
        if type(value) not in kinds or (type(value) in (int, float) and not value > 0):
            raise CheckpointError(f"{self.source}: {key} = {value!r}, expected {expected}")
        return value
