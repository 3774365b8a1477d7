"""The names of another package that this one relies on, recorded, and what an installed version changed."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib
import inspect
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple


class Line(NamedTuple):
    """Recorded name with a function's parameters or a class's fields. digest: hash of the body, "" if none."""

    text: str
    digest: str = ""
    is_used: bool = True


class Interface:
    """Names of another package, with the lines that were recorded of them.

    Attributes:
        names: "module:name" or "module:Class.member". An entry without a member means the class with all its public
            members.
        derived: our own classes that derive from its classes, as "module:Class", because importing them imports the
            package.
        expected: the recorded lines.
    """

    def __init__(self, names: tuple[str, ...], derived: tuple[str, ...], expected: Path) -> None:
        self.names, self.derived, self.expected = names, derived, expected

    def gone(self, names: tuple[str, ...] | None = None) -> list[str]:
        """Return the recorded lines of `names`, by default all, that are relied on and not installed."""
        if names is None:
            names = self.names
        installed = {line.text for line in self._installed(names)}
        recorded = []
        for line in self._recorded():
            name = line.text.partition("(")[0].partition(" ")[0]
            is_asked = name in names or name.rpartition(".")[0] in names
            if is_asked and line.is_used and line.text not in installed:
                recorded.append(line.text)
        return recorded

    def main(self, description: str | None) -> int:
        """Run the command line: print what the installed version changed, or with --record write `expected`."""
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--record", action="store_true", help="what is installed is what the backend relies on")
        is_recorded = parser.parse_args().record
        package = self.names[0].partition(".")[0]
        try:
            importlib.import_module(package)
        except ImportError as error:
            print(f"{package} cannot be imported: {error}")
            return 1
        if is_recorded:
            self.record()
            return 0
        expected = {line.text: line for line in self._recorded()}
        installed = {line.text: line for line in self._installed(self.names)}
        for text in sorted({**expected, **installed}):
            mark = "!" if text in expected and expected[text].is_used else " "
            if text not in installed:
                print(f"-{mark}", text)
            elif text not in expected:
                print("+ ", text)
            elif expected[text].digest != installed[text].digest:
                print(f"~{mark}", text)
        return 1 if self.gone() else 0

    def record(self) -> None:
        """Write the installed version's lines to `expected`."""
        marks = {True: "!", False: " "}
        lines = self._with_uses(self._installed(self.names))
        self.expected.write_text("".join(f"{marks[line.is_used]}\t{line.text}\t{line.digest}\n" for line in lines))

    def _recorded(self) -> list[Line]:
        lines = []
        for line in self.expected.read_text().splitlines():
            mark, text, digest = line.split("\t")
            lines.append(Line(text, digest, mark == "!"))
        return lines

    def _installed(self, names: tuple[str, ...]) -> Iterator[Line]:
        for name in names:
            module, _, path = name.partition(":")
            class_name, _, member = path.partition(".")
            try:
                value = getattr(importlib.import_module(module), class_name)
            except (ImportError, AttributeError):
                continue
            if not inspect.isclass(value):
                yield _line(name, value)
            elif not member:
                yield from _class_lines(name, value)
            elif hasattr(value, member):
                yield _line(name, getattr(value, member))
            elif member in _fields(value):
                yield Line(name)

    def _with_uses(self, lines: Iterator[Line]) -> Iterator[Line]:
        """Mark class members as unused unless `names` has them or a derived class also has them."""
        members: dict[str, set[str]] = {}
        for path in self.derived:
            module, _, class_name = path.partition(":")
            bases = getattr(importlib.import_module(module), class_name).__mro__
            own_names = {name for base in bases if base.__module__.startswith("paged.") for name in vars(base)}
            for base in bases:
                members.setdefault(base.__name__, set()).update(own_names)
        for line in lines:
            name = line.text.partition("(")[0]
            class_name, _, member = name.partition(":")[2].partition(".")
            is_used = not member or name in self.names or member in members.get(class_name, ())
            yield line._replace(is_used=is_used)


def _class_lines(name: str, value: Any) -> Iterator[Line]:
    fields = _fields(value)
    if fields:
        yield Line(f"{name} has {' '.join(fields)}")
    required = sorted(getattr(value, "__abstractmethods__", ()))
    if required:
        yield Line(f"{name} requires {' '.join(required)}")
    if issubclass(value, Enum | tuple):
        return
    for member in sorted(dir(value)):
        if not member.startswith("_") and member not in fields:
            yield _line(f"{name}.{member}", getattr(value, member))


def _fields(value: Any) -> list[str]:
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    if issubclass(value, Enum):
        return list(value.__members__)
    return list(getattr(value, "_fields", ()))


def _line(name: str, value: Any) -> Line:
    """Return a function's name with its parameters ("=" marks a default) and the digest of its body."""
    if not inspect.isroutine(value):
        return Line(name)
    try:
        parameters = inspect.signature(value).parameters.values()
        source = inspect.getsource(value)
    except (TypeError, ValueError, OSError):  # functions written in C have no signature
        return Line(name)
    stars: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    words = []
    for parameter in parameters:
        default = "" if parameter.default is inspect.Parameter.empty else "="
        words.append(stars.get(parameter.kind, "") + parameter.name + default)
    return Line(f"{name}({', '.join(words)})", hashlib.sha256(source.encode()).hexdigest()[:8])
