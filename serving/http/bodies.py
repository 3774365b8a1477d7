"""Reading request bodies.

A body is read in one pass that stops at the first error. The values in the body are counted before, so that a malicious
body takes no longer to read than a useful one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Annotated, Any, ClassVar, TypeVar, get_type_hints

import msgspec
import numpy as np
from msgspec import Meta, Struct

from paged.serving.http.errors import ApiError

_MAX_LISTS = 1 << 15  # lists and objects of a body; a million would take 2 s in Python's garbage collector
_MAX_KEYS = 1 << 17
_MAX_DIGITS = 400  # digits of a number, which takes quadratic time to read
_AS_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_LONGEST_MESSAGE = 2000
_LONGEST_VALUE = 200
_PATH = re.compile(r"`\$(\S*)`$")
_UNKNOWN = re.compile(r"unknown field `(.*?)`")
_MISSING = re.compile(r"missing required field `(.*?)`")
_UNUSED = re.compile(r"^unused field `(\w+)`: ")
# For error messages: the client's argument by the name of the engine's argument that is derived from it.
OF_PROMPT = {"prompt_token_ids": "prompt", "text": "prompt", "prompt_logprobs": "echo", "lora_adapter": "model"}


def only(*values: Any) -> Meta:
    """Mark a field without effect: its value must be null or one of `values`, which request nothing.

    Some clients send such values. Any other value is an error that names the field, because it would be ignored.
    """
    return Meta(extra_json_schema={"enum": [None, *values]})


Null = Annotated[Any, only()]


@lru_cache(maxsize=64)
def _unused_fields(kind: type[Struct]) -> dict[str, list[Any]]:
    """Return the allowed values of each field of a struct that `only` marks."""
    fields: dict[str, list[Any]] = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        for mark in getattr(hint, "__metadata__", ()):
            if isinstance(mark, Meta) and mark.extra_json_schema is not None:
                fields[name] = mark.extra_json_schema["enum"]
    return fields


class Body(Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of request bodies. Unknown arguments are errors, because a misspelt one would be silently ignored.

    Attributes:
        max_values: maximum number of JSON values in the body.
        names: the client's argument by the engine's name, if the names differ.
    """

    max_values: ClassVar[int] = 1 << 20
    names: ClassVar[Mapping[str, str]] = OF_PROMPT

    def __post_init__(self) -> None:
        """Check the fields without effect; msgspec adds the path of this struct to the error."""
        for name, values in _unused_fields(type(self)).items():
            value = getattr(self, name)
            if value not in values:
                accepted = " or ".join(map(json.dumps, values))
                raise ValueError(f"unused field `{name}`: {json.dumps(value)[:_LONGEST_VALUE]}, expected {accepted}")


B = TypeVar("B", bound=Body)


def read_body(kind: type[B], body: bytes) -> B:
    """Parse a body as `kind`.

    Raises:
        ApiError: the body does not match, or would take too long to read.
    """
    if (excess := excess_of(body, kind.max_values)) is not None:
        param = None
        with suppress(msgspec.DecodeError, RecursionError):
            values = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
            param = max(values, key=lambda name: len(bytes(values[name])))
        raise ApiError(400, f"{param or 'the body'}: {excess}", param)
    try:
        return msgspec.json.decode(body, type=kind)
    except RecursionError:
        raise ApiError(400, "the body: nested too deeply") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise _as_api_error(str(error)) from None


def excess_of(text: bytes, max_values: int) -> str | None:
    """Return the reason why JSON would take too long to read, or None. Takes 8 ms per MB."""
    if len(text) < _MAX_LISTS:  # too short to exceed a limit
        return None
    plain = np.frombuffer(text.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    is_outside = ~np.logical_xor.accumulate(plain == ord('"'))
    outside = (plain * is_outside).tobytes()  # the text outside JSON strings
    num_lists = outside.count(b"[") + outside.count(b"{")
    num_values, num_keys = num_lists + outside.count(b","), outside.count(b":")
    if num_values > max_values or num_lists > _MAX_LISTS or num_keys > _MAX_KEYS:
        counts = f"{num_values} values, {num_lists} lists and objects, {num_keys} keys"
        return f"{counts}, expected at most {max_values}, {_MAX_LISTS} and {_MAX_KEYS}"
    if b"0" * _MAX_DIGITS in outside.translate(_AS_ZEROS):
        return f"a number of more than {_MAX_DIGITS} digits"
    return None


def _as_api_error(message: str) -> ApiError:
    """Convert msgspec's error, naming the argument."""
    if len(message) > _LONGEST_MESSAGE:  # cut it, because it may quote the client's input
        message = message[: _LONGEST_MESSAGE // 2] + message[-_LONGEST_MESSAGE // 2 :]
    path = _PATH.search(message)
    place = path[1] if path else ""
    reason = message.partition(" - at ")[0]
    unknown, missing, unused = _UNKNOWN.search(message), _MISSING.search(message), _UNUSED.search(message)
    if unused is not None:
        place += f".{unused[1]}"
        reason = reason[unused.end() :]
    elif unknown is not None:
        place += f".{unknown[1]}"
    elif missing is not None:
        place += f".{missing[1]}"
        reason = "Field required"
    elif reason.startswith("Invalid value "):
        reason = reason.removeprefix("Invalid value ") + " does not match any of the expected tags"
    param = re.sub(r"\[(\w+)\]", r".\1", place.replace("[...]", "")).lstrip(".")
    return ApiError(400, f"{param or 'the body'}: {reason}", param or None)
