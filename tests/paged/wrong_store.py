"""Paged attention that stores one element of its last row wrongly."""

import importlib
from collections.abc import Callable
from typing import Any


def plant(set_attribute: Callable[[Any, str, Any], None] = setattr) -> None:
    """For the rest of the process, or as long as `set_attribute` has it."""
    module = importlib.import_module("paged.kernels.attention.paged_attention")
    for backend in (module.launches, module.without_triton):
        set_attribute(backend, "bind", _storing_wrongly(backend.bind))


def _storing_wrongly(right: Callable[..., Any]) -> Callable[..., Any]:
    def bind(call: Any, plan: Any) -> Callable[..., Any]:
        bound = right(call, plan)

        def run(*args: Any, **kwargs: Any) -> Any:
            results = bound(*args, **kwargs)
            out = results[0] if call.return_lse else results
            out[-1, 1, 2] += 1
            return results

        return run

    return bind
