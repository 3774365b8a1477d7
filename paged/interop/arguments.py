"""Translates the arguments of other libraries' functions to the names here, and errors back to theirs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from inspect import Parameter, Signature
from numbers import Real
from typing import Any, NamedTuple, TypeVar

import torch

from paged.errors import InvalidInputError, PagedError, UnsupportedError
from paged.kernels.common.scalars import as_int, shown

R = TypeVar("R")

# Other spellings of an argument, in FlashAttention 3 and 4, vLLM's fork and SGLang's.
_SPELLINGS = {
    "attention_chunk": "attention_chunk_size",
    "k_descale": "k_scale",
    "learnable_sink": "sinks",
    "page_table": "block_table",
    "q_descale": "q_scale",
    "return_softmax_lse": "return_lse",
    "s_aux": "sinks",
    "v_descale": "v_scale",
}


class Vocabulary(NamedTuple):
    """What a function takes: its own spellings of our keys, and the keys that are honoured."""

    spellings: Mapping[str, str]
    honoured: frozenset[str]


_ATTENTION_KEYS = frozenset(
    "alibi_slopes attention_chunk_size block_table causal cu_seqlens_k cu_seqlens_q k_cache k_scale max_seqlen_k "
    "max_seqlen_q out q q_scale return_attn_probs return_lse seq_lens seqused_q sinks softcap softmax_scale v_cache "
    "v_scale window_size".split()
)
# Of functions whose `k` and `v` are what is attended to, and of those where they are what is added to it.
ATTENTION = Vocabulary(
    {"k": "k_cache", "seqused_k": "seq_lens", "v": "v_cache"},
    _ATTENTION_KEYS | {"cu_seqlens", "kv", "max_seqlen", "num_heads_q", "qkv"},
)
CACHED_ATTENTION = Vocabulary(
    {"cache_seqlens": "seq_lens", "k": "key", "v": "value"},
    _ATTENTION_KEYS
    | frozenset(
        "cache_batch_idx cache_leftpad cu_seqlens_k_new key rotary_cos rotary_interleaved rotary_seqlens rotary_sin "
        "value".split()
    ),
)
# What says how to compute a result, not which: taken whatever its value.
_HINTS = frozenset("deterministic fa_version min_seqlen_k num_splits pack_gqa scheduler_metadata sm_margin ver".split())
# None, False and 0 turn an argument off that is not honoured here. For these it is another number.
_OFF = {"cp_world_size": 1, "window_size_left": -1, "window_size_right": -1}
# Beyond these a score of common queries and keys is no number of float32, or no different one.
LARGEST_SCALE = 1e30
_SMALLEST_SOFTCAP, _LARGEST_SOFTCAP = 1e-6, 1000.0


class Arguments:
    """The arguments of one call.

    Keys are the names that `paged_attention` and `reshape_and_cache` have for a thing, or FlashAttention's where they
    have none; `name` gives the caller's own for a message.
    """

    def __init__(self, function: str, given: Mapping[str, Any], vocabulary: Vocabulary) -> None:
        """given: by the caller's names.

        Raises:
            UnsupportedError: an argument that cannot be honoured, by name, with a value that asks for something.
            InvalidInputError: the same thing twice under two names.
        """
        self.function = function
        self._values: dict[str, Any] = {}
        self._names: dict[str, str] = {}
        for name, value in given.items():
            key = vocabulary.spellings.get(name) or _SPELLINGS.get(name, name)
            if key not in vocabulary.honoured:
                if name not in _HINTS and not _is_off(name, value):
                    raise UnsupportedError(f"{name}: {shown(value)}, {function} here takes only {_expected(name)}")
                continue
            before = self._values.get(key)
            if key in self._names and before is not None and before is not False:
                if value is None or value is False:
                    continue
                raise InvalidInputError(f"{self._names[key]}, {name}: both given, expected one of them")
            self._values[key], self._names[key] = value, name

    def name(self, key: str) -> str:
        """The caller's name for `key`."""
        return self._names.get(key, key)

    def put(self, key: str, value: Any, name: str) -> None:
        """Derive `key` from the caller's argument `name`."""
        self._values[key], self._names[key] = value, name

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None

    def need(self, *keys: str) -> None:
        """Raise InvalidInputError unless all of them are given."""
        for key in keys:
            if not self.has(key):
                raise InvalidInputError(f"{self.name(key)}: None, expected one: {self.function} needs it")

    def tensor(self, key: str) -> torch.Tensor:
        self.need(key)
        value = self._values[key]
        if not isinstance(value, torch.Tensor):
            raise InvalidInputError(f"{self.name(key)}: {shown(value)}, expected a tensor")
        if value.layout != torch.strided or value.is_nested:
            raise InvalidInputError(f"{self.name(key)}: a sparse or nested tensor, expected a dense one")
        return value

    def optional_tensor(self, key: str) -> torch.Tensor | None:
        return self.tensor(key) if self.has(key) else None

    def refuse_gradients(self) -> None:
        """Raise UnsupportedError for the first tensor that a gradient would have to reach."""
        if not torch.is_grad_enabled():
            return
        for key, value in self._values.items():
            if isinstance(value, torch.Tensor) and value.requires_grad:
                raise UnsupportedError(f"{self.name(key)}: requires a gradient, {self.function} here computes none")

    def flag(self, key: str, default: bool = False) -> bool:
        """True or False, or 1 or 0, of any library."""
        value = _scalar(self._values.get(key))
        if value is None:
            return default
        if not isinstance(value, bool) and not (isinstance(value, int) and value in (0, 1)):
            raise InvalidInputError(f"{self.name(key)}: {shown(value)}, expected True or False")
        return bool(value)

    def integer(self, key: str) -> int | None:
        """An integer of any library, 0 or more."""
        if not self.has(key):
            return None
        return as_int(self.name(key), self._values[key])

    def is_number(self, key: str) -> bool:
        """Whether it is no tensor with an axis, that is one value for all."""
        value = self._values.get(key)
        return value is not None and not (isinstance(value, torch.Tensor) and value.dim())

    def number(self, key: str, most: float) -> float | None:
        """A number of any library, 0 to `most`."""
        value = _scalar(self._values.get(key))
        if value is None:
            return None
        try:
            number = math.nan if isinstance(value, bool | str | bytes) else float(value)
        except Exception:
            number = math.nan
        if not 0.0 <= number <= most:
            raise InvalidInputError(f"{self.name(key)}: {shown(value)}, expected a number from 0 to {most}")
        return number

    def softcap(self) -> float:
        """0 where there is none; FlashAttention takes every negative one for none too."""
        value = _scalar(self._values.get("softcap"))
        if isinstance(value, Real) and value < 0:
            return 0.0
        softcap = self.number("softcap", _LARGEST_SOFTCAP) or 0.0
        if 0.0 < softcap < _SMALLEST_SOFTCAP:
            raise InvalidInputError(f"{self.name('softcap')}: {softcap}, expected 0 or at least {_SMALLEST_SOFTCAP}")
        return softcap

    def window(self) -> tuple[int, int]:
        """(left, right); None, a negative edge and an edge of None stand for no limit."""
        given = self._values.get("window_size")
        if given is None:
            return -1, -1
        name = self.name("window_size")
        try:
            left, right = given
        except Exception as error:
            raise InvalidInputError(f"{name}: {shown(given)}, expected two integers, (left, right)") from error
        edges = (-1 if edge is None else as_int(name, edge, low=-(1 << 63)) for edge in (left, right))
        return max(next(edges), -1), max(next(edges), -1)

    @contextmanager
    def in_callers_names(self) -> Iterator[None]:
        """Let errors of the operations inside speak of the caller's arguments."""
        try:
            yield
        except PagedError as error:
            head, colon, rest = str(error).partition(":")
            # Behind the colon a word such as "key" may be just that.
            rest = re.sub(r"\w+", lambda word: self.name(word[0]) if "_" in word[0] else word[0], rest)
            head = re.sub(r"\w+", lambda word: self.name(word[0]), head)
            raise type(error)(head + colon + rest) from error


def _is_off(name: str, value: Any) -> bool:
    if value is None or value is False:
        return True
    return isinstance(value, Real) and not isinstance(value, bool) and bool(value == _OFF.get(name, 0))


def _expected(name: str) -> str:
    return f"None, False or {_OFF.get(name, 0)}"


def _scalar(value: Any) -> Any:
    """A Python scalar for an array or tensor without an axis."""
    try:
        return value.item() if getattr(value, "ndim", None) == 0 else value
    except Exception:
        return value


def ordered(required: str, optional: Mapping[str, Any]) -> Callable[[Callable[[dict[str, Any]], R]], Callable[..., R]]:
    """Make a function of arguments by name one that takes them in an order, and any others by name.

    required: names that have no default, which come first. optional: those behind them, with their defaults.
    """
    first = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in required.split()]
    rest = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=value) for name, value in optional.items()]
    signature = Signature([*first, *rest, Parameter("others", Parameter.VAR_KEYWORD)])
    order, needed = (*required.split(), *optional), set(required.split())

    def decorate(function: Callable[[dict[str, Any]], R]) -> Callable[..., R]:
        @wraps(function)
        def call(*args: Any, **named: Any) -> R:
            placed = dict(zip(order, args, strict=False))
            if len(args) > len(order) or placed.keys() & named.keys() or needed - placed.keys() - named.keys():
                signature.bind(*args, **named)  # raises TypeError, which says why
            return function({**optional, **placed, **named})

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return decorate
