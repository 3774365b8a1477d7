"""Translation of FlashAttention's arguments to this project's names, and of errors back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import Parameter, Signature, signature
from numbers import Real
from typing import Any, TypeVar

import torch

from paged.errors import InvalidInputError, UnsupportedError
from paged.kernels.core.checks import refuse_gradients
from paged.kernels.core.errors import as_bool, as_float, as_index, as_int, shown

R = TypeVar("R")

_KEYS = (
    "alibi_slopes attention_chunk_size block_table causal cu_seqlens_k cu_seqlens_q k_cache k_scale max_seqlen_k "
    "max_seqlen_q out q q_scale return_attn_probs return_lse seq_lens seqused_q sinks softcap softmax_scale v_cache "
    "v_scale window_size "
)
# Other names of an argument in FlashAttention 3 and 4 and in the forks of vLLM and SGLang.
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


def _honoured(more: str, spellings: dict[str, str]) -> dict[str, str]:
    return {name: name for name in (_KEYS + more).split()} | _SPELLINGS | spellings


# Supported arguments by the callers' names, for functions that attend to `k` and `v`.
_ATTENTION = _honoured(
    "cu_seqlens kv max_seqlen num_heads_q qkv", {"k": "k_cache", "seqused_k": "seq_lens", "v": "v_cache"}
)
# The same for functions that append `k` and `v` to a cache.
_CACHED_ATTENTION = _honoured(
    "cache_batch_idx cache_leftpad cu_seqlens_k_new key rotary_cos rotary_interleaved rotary_seqlens rotary_sin value",
    {"cache_seqlens": "seq_lens", "k": "key", "v": "value"},
)
# Arguments that change how a result is computed but not the result; any value is accepted.
_HINTS = frozenset(
    "deterministic disable_scheduler_metadata fa_version min_seqlen_k num_splits pack_gqa scheduler_metadata "
    "seqlen_k_per_split sm_margin ver".split()
)
# Values of unsupported arguments that have no effect, besides None, False and 0.
_OFF = {"cp_world_size": 1, "window_size_left": -1, "window_size_right": -1}


def as_flag(name: str, value: Any, default: bool = False) -> bool:
    """Convert True, False, 1 or 0 of any library to a bool, and None to `default`."""
    if value is None:
        return default
    number = as_index(value)
    return bool(number) if number in (0, 1) else as_bool(name, value)


class Arguments(dict[str, Any]):
    """The arguments of one call that are not None.

    Keys are the argument names of `paged_attention` and `reshape_and_cache`, or FlashAttention's where these have none.
    Errors name the key; `names` maps the key to the caller's own name.
    """

    def __init__(self, function: str, arguments: Mapping[str, Any]) -> None:
        """Read arguments by the caller's names.

        Raises:
            UnsupportedError: an unsupported argument has a value that is not neutral.
            InvalidInputError: an argument is given twice under two names.
        """
        super().__init__()
        self.function = function
        self.adds_keys = function == "flash_attn_with_kvcache"
        self.names: dict[str, str] = {}
        honoured = _CACHED_ATTENTION if self.adds_keys else _ATTENTION
        for name, value in arguments.items():
            key = honoured.get(name)
            if key is None or (key == "num_heads_q" and "qkv" not in arguments):
                off = _OFF.get(name, 0)
                is_number = isinstance(value, Real) and not isinstance(value, bool)
                if name not in _HINTS and value is not None and value is not False and not (is_number and value == off):
                    raise UnsupportedError(f"{name}: {shown(value)}, {function} here takes only None, False or {off}")
                continue
            if self.get(key, False) is False:
                self.put(key, value, name)
            elif value is not None and value is not False:
                raise InvalidInputError(f"{self.names[key]}, {name}: both given, expected one of them")

    def put(self, key: str, value: Any, name: str) -> None:
        """Set `key` to a value derived from the caller's argument `name`."""
        self.names[key] = name
        if value is not None:
            self[key] = value

    def tensor(self, key: str) -> torch.Tensor:
        if key not in self:
            raise InvalidInputError(f"{key}: None, expected a tensor: {self.function} needs it")
        value = self[key]
        if not isinstance(value, torch.Tensor):
            raise InvalidInputError(f"{key}: {shown(value)}, expected a tensor")
        if value.layout != torch.strided or value.is_nested:
            raise InvalidInputError(f"{key}: a sparse or nested tensor, expected a dense one")
        return value

    def optional_tensor(self, key: str) -> torch.Tensor | None:
        return self.tensor(key) if key in self else None

    def refuse_gradients(self) -> None:
        """Raise UnsupportedError for the first tensor that requires a gradient."""
        for key, value in self.items():
            if isinstance(value, torch.Tensor) and value.requires_grad:
                refuse_gradients(f"{key}: requires a gradient, {self.function} here", value)

    def flag(self, key: str, default: bool = False) -> bool:
        return as_flag(key, self.get(key), default)

    def integer(self, key: str) -> int | None:
        """Return a non-negative integer argument of any library as an int, or None."""
        return as_int(key, self[key]) if key in self else None

    def softmax_scale(self) -> float | None:
        if "softmax_scale" not in self:
            return None
        return as_float("softmax_scale", self["softmax_scale"], 0.0, 1e30)

    def softcap(self) -> float:
        """Return the softcap; 0 and negative numbers mean none, as in FlashAttention."""
        softcap = as_float("softcap", self.get("softcap", 0.0), -math.inf, 1000.0)
        if 0.0 < softcap < 1e-6:
            raise InvalidInputError(f"softcap: {softcap}, expected 0 or at least 1e-06")
        return max(softcap, 0.0)

    def window(self) -> tuple[int | None, int | None]:
        """Return the window (left, right) as given, None for no limit."""
        window = self.get("window_size", (None, None))
        try:
            window_left, window_right = window
        except Exception as error:
            raise InvalidInputError(f"window_size: {shown(window)}, expected two integers, (left, right)") from error
        if window_left is not None:
            window_left = as_int("window_size", window_left, None)
        if window_right is not None:
            window_right = as_int("window_size", window_right, None)
        return window_left, window_right


def takes(needed: str, options: Callable[..., None]) -> Callable[[Callable[[dict[str, Any]], R]], Callable[..., R]]:
    """Decorate a function of a dict, to take `needed` arguments (not None), `options`, and any keyword."""
    first = needed.split()
    leading = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in first]
    optional = signature(options).parameters
    defaults = {name: parameter.default for name, parameter in optional.items()}
    keywords = Parameter("others", Parameter.VAR_KEYWORD)
    table = Signature([*leading, *optional.values(), keywords])
    order = (*first, *defaults)

    def decorate(function: Callable[[dict[str, Any]], R]) -> Callable[..., R]:
        @wraps(function)
        def call(*args: Any, **named: Any) -> R:
            placed = dict(zip(order, args, strict=False))
            arguments = {**defaults, **placed, **named}
            if len(args) > len(order) or placed.keys() & named.keys() or not arguments.keys() >= set(first):
                table.bind(*args, **named)  # raises TypeError with the reason
            for name in first:
                if arguments[name] is None:
                    raise InvalidInputError(f"{name}: None, but {function.__name__} needs it")
            return function(arguments)

        call.__signature__ = table  # type: ignore[attr-defined]
        return call

    return decorate
