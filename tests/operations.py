"""The public operations: what `paged` exports of the kernels, but for `check_ids`, which waits for their checks."""

from typing import Any

import pytest
import torch

import paged
from paged.kernels.core.operation import Bound

OPERATIONS = [
    name
    for module, names in paged._EXPORTS.items()
    for name in names
    if module.startswith("paged.kernels.") and name.islower() and name != "check_ids"
]


def stand_in(function: Any) -> Any:
    """A function in an operation's place."""
    function.bind = lambda *_args, **_kwargs: function
    function.check = function.step = None
    return function


# Arguments of other layouts in each call, which the operation reads anew.
_ANEW = {"write_pooled_entries": ("row_table", "cu_seqlens_q")}


def check_bound_calls(patch: pytest.MonkeyPatch) -> None:
    """Let a bound operation fail if a later call has other layouts or options than the call it was bound for."""
    bind = Bound._bind

    def bind_checked(bound: Any, key: object, *args: Any, **kwargs: Any) -> Any:
        run, name = bind(bound, key, *args, **kwargs), bound.operation.__name__
        expected = _layouts(bound, args, kwargs)

        def run_checked(*args: Any, **kwargs: Any) -> Any:
            layouts = _layouts(bound, args, kwargs)
            assert layouts == expected, f"{name} was bound for {expected}"
            return run(*args, **kwargs)

        return run_checked

    patch.setattr(Bound, "_bind", bind_checked)


def _layouts(bound: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[object, object]:
    """Return what a bound call keeps of its arguments: layouts of tensors, and options."""
    anew = (bound.step, *_ANEW.get(bound.operation.__name__, ()))
    layouts: dict[object, object] = {}
    for name, value in (*enumerate(args), *kwargs.items()):
        if isinstance(value, torch.Tensor) and name not in anew:
            strides = [stride for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1]
            layouts[name] = value.shape, strides, value.dtype, value.data_ptr() % 16
        elif isinstance(value, bool | int | float | str | None):
            layouts[name] = value
    return layouts
