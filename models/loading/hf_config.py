"""A checkpoint's config.json, with errors that name the key and the file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from paged.errors import CheckpointError, UnsupportedError
from paged.kernels.core.errors import shown
from paged.models.loading.checkpoint_files import is_there, other_kind, read_json
from paged.tools.printable import one_line

_REQUIRED: Any = object()
# Limit of integers in config.json: above any model's sizes, and so small that a product of two fits into 64 bits.
_MAX_INTEGER = 2**31 - 1


class HfConfig:
    """Values of a config.json, or of a section in it.

    A key that is absent or null takes its default; a null flag is false.

    defaults: values of absent keys, by key; set once the family is known.
    own_names: names that a family's files use for common keys, by the common key; the family sets them.
    read_keys: keys that were read; the reader honours their values or knows that they have no effect.
    """

    defaults: Mapping[str, Any] = MappingProxyType({})
    own_names: Mapping[str, str] = MappingProxyType({})

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source
        self.read_keys: set[str] = set()

    @classmethod
    def read(cls, folder: Path, name: str = "config.json", *, may_lack: bool = False) -> HfConfig:
        """Read the folder's config.json or a similar file; with may_lack, a missing file counts as empty.

        Raises:
            CheckpointError: the file is missing, or not a JSON object.
        """
        file = folder / name
        if may_lack and not is_there(file):
            return cls({}, str(file))
        if folder.is_file() or (name == "config.json" and not is_there(file)):
            raise CheckpointError(f"{file}: missing{other_kind(folder)}")
        return cls(read_json(file), str(file))

    def value(self, key: str) -> Any:
        """Return any value, or None."""
        name = self._name(key)
        self.read_keys.add(name)
        return self.values.get(name, self.defaults.get(key))

    def overridden(self, values: Mapping[str, Any]) -> HfConfig:
        """Return a copy with other values for some keys. The copy notes its own read_keys."""
        config = HfConfig({**self.values, **values}, self.source)
        config.defaults, config.own_names = self.defaults, self.own_names
        return config

    def integer(self, key: str, default: int = _REQUIRED, *, minimum: int = 1, maximum: int = _MAX_INTEGER) -> int:
        """Return an integer in minimum..maximum."""
        expected = "a positive integer" if minimum == 1 else f"an integer of at least {minimum}"
        value = self._get(key, default, expected, int)
        if value < minimum:
            raise self._wrong(key, value, expected)
        if value > maximum:
            raise self._wrong(key, value, f"at most {maximum}")
        return int(value)

    def optional_integer(self, key: str) -> int | None:
        """Return a positive integer, or None if the key is null, or absent without a family default."""
        if self.value(key) is None:
            return None
        return self.integer(key)

    def number(self, key: str, default: float = _REQUIRED, *, may_be_zero: bool = False) -> float:
        """Return a positive, finite number."""
        expected = "a number of at least 0" if may_be_zero else "a positive number"
        value = self._get(key, default, expected, int, float)
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not 0 <= number < math.inf or (number == 0 and not may_be_zero):
            raise self._wrong(key, value, expected)
        return number

    def softcap(self, key: str) -> float:
        """Return the positive divisor of a soft cap; 0 if the key is null, or absent without a family default.

        Raises:
            UnsupportedError: the value is 0.
        """
        value = self.value(key)
        if value is None:
            return 0.0
        if self.number(key, may_be_zero=True) == 0:
            raise UnsupportedError(
                f"{self.source}: {key} = {shown(value)} is not supported: transformers divides by it; null means no cap"
            )
        return self.number(key)

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of positive, finite numbers."""
        values = self._get(key, _REQUIRED, "a list of positive numbers", list)
        return tuple(HfConfig({key: value}, self.source).number(key) for value in values)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return true or false. Null is false, as in model code that tests whether the value is true."""
        name = self._name(key)
        if name in self.values and self.values[name] is None:
            default = False
        return bool(self._get(key, default, "true or false", bool))

    def text(self, key: str, default: str = _REQUIRED) -> str:
        """Return a string."""
        return str(self._get(key, default, "a string", str))

    def choice(self, key: str, *known: Any) -> Any:
        """Return one of the known values, or None; words match in any letter case. Null takes the family's default.

        Raises:
            UnsupportedError: the value is not known.
        """
        value = self.value(key)
        if value is None:
            value = self.defaults.get(key)
        if value is None:
            return None
        for choice in known:
            if _are_equal(value, choice):
                return choice
        expected = ", ".join(map(str, known)) or "none"
        raise UnsupportedError(f"{self.source}: {key} = {shown(value)} is not supported, known are {expected}")

    def items(self, key: str, kind: type) -> list[Any]:
        """Return a list of values of one type; empty if absent."""
        values = self._get(key, [], "a list", list)
        if not all(type(value) is kind for value in values):
            raise self._wrong(key, values, f"a list of {kind.__name__}")
        return list(values)

    def section(self, key: str) -> HfConfig | None:
        """Return a nested object; if absent or null, the family's default, or None."""
        values = self._get(key, self.defaults.get(key), "an object", dict)
        if values is None:
            return None
        return HfConfig(values, f"{self.source}: {key}")

    def refuse_unread(self) -> None:
        """Raise UnsupportedError if there is a key that was not read; call it once a section has been read."""
        if unknown := sorted(self.values.keys() - self.read_keys):
            known = ", ".join(sorted(self.read_keys))
            raise UnsupportedError(f"{self.source}: {shown(unknown[0])} is unknown, known are {known}")

    def _get(self, key: str, default: Any, expected: str, *kinds: type) -> Any:
        value = self.value(key)
        if value is None:
            if default is _REQUIRED:
                raise CheckpointError(f"{self.source}: {self._name(key)} is missing, expected {expected}")
            return default
        # `type` instead of isinstance, because Python's bool is an int and JSON's is not.
        if type(value) not in kinds:
            raise self._wrong(key, value, expected)
        return value

    def _wrong(self, key: str, value: Any, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: {self._name(key)} = {shown(value)}, expected {expected}")

    def _name(self, key: str) -> str:
        """Return the name of a key in the file; a file may use the common name instead of the family's own."""
        if key in self.values:
            return key
        return self.own_names.get(key, key)


def _are_equal(value: Any, choice: Any) -> bool:
    """Return whether two JSON values are equal; words match in any letter case."""
    if isinstance(value, str) and isinstance(choice, str):
        return value.casefold() == choice.casefold()
    return isinstance(value, bool) == isinstance(choice, bool) and bool(value == choice)


def read_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Read the end tokens from generation_config.json, else config.json, else its `text_config`, as transformers does.

    Each place may hold one id or several.

    Raises:
        CheckpointError: a file is unreadable or malformed, or a value is not a token id.
    """
    for name in ("generation_config.json", "config.json"):
        if not is_there(folder / name):
            continue
        hf = HfConfig.read(folder, name)
        text = hf.section("text_config") or hf
        value = hf.value("eos_token_id")
        if value is None:
            value = text.value("eos_token_id")
        if value is None:
            continue
        ids = value
        if not isinstance(ids, list):
            ids = [ids]
        if not all(type(token) is int and 0 <= token < 2**31 for token in ids):
            text_of_value = one_line(repr(value), 200)
            raise CheckpointError(
                f"{folder / name}: eos_token_id = {text_of_value}, expected one token id or a list of them"
            )
        return tuple(ids)
    return ()
