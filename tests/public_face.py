"""What callers of `paged` rely on, a line each: names, signatures, methods, fields.

python -m tests.public_face    # write it anew, after a change that CHANGELOG announces
"""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paged

RECORDED = Path(__file__).with_name("public_face.txt")


def public_face() -> str:
    """Return every public name with its signature, and the members of every public class."""
    lines = []
    for name in sorted(paged.__all__):
        value = getattr(paged, name)
        if inspect.isclass(value):
            lines.append(f"class {name}({', '.join(base.__name__ for base in value.__bases__)})")
            lines += [f"    {member}" for member in _members(value)]
        elif callable(value):
            lines.append(f"{name}{_signature(value)}")
        elif not inspect.ismodule(value):
            lines.append(f"{name}: {value}")
    return "\n".join(lines) + "\n"


def _members(cls: type) -> Iterator[str]:
    """Yield the constructor, fields, properties and methods of a class and of its bases in this package."""
    constructor = inspect.getattr_static(cls, "__init__")
    if inspect.isfunction(constructor):  # not that of `object`, or of an exception
        yield f"__init__{_signature(constructor)}"
    fields: dict[str, Any] = {}
    methods: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("paged"):
            fields |= inspect.get_annotations(base)
            methods |= vars(base)
    for name in sorted({*fields, *methods}):
        if name.startswith("_"):
            continue
        method = inspect.getattr_static(cls, name, None)
        if isinstance(method, (classmethod, staticmethod)):
            yield f"{type(method).__name__} {name}{_signature(method.__func__)}"
        elif inspect.isfunction(method):
            yield f"{'async ' * inspect.iscoroutinefunction(method)}{name}{_signature(method)}"
        elif name in fields:
            yield f"{name}: {getattr(fields[name], '__forward_arg__', fields[name])}"
        else:
            yield name


def _signature(function: Any) -> str:
    """Return a signature with the annotations of the source, and with names for defaults that are functions."""
    signature = inspect.signature(function)
    parameters = []
    for parameter in signature.parameters.values():
        if inspect.isfunction(parameter.default):
            parameter = parameter.replace(default=parameter.default.__name__)
        parameters.append(parameter)
    return str(signature.replace(parameters=parameters)).replace("'", "")


if __name__ == "__main__":
    RECORDED.write_text(public_face())
