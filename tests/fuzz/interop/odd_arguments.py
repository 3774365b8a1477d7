"""Calls with one argument replaced: tensors by others made of them, everything by anything."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

from paged.errors import PagedError
from tests.fuzz.values import VALUES, value

# Instead of a tensor x.
_TENSORS = (
    "x[:1]", "x[:0]", "x[..., :1]", "x[..., None]", "x[0]", "x.double()", "x.half()", "x.long()", "x.int()", "x.bool()",
    "x + 100", "x - 100", "x.flip(0)", "x.mT", "x.transpose(0, -1)", "x.expand(2, *x.shape)", "x.tolist()", "x.numpy()",
    "x.to('meta')", "x.to_sparse()", "x.clone().float().requires_grad_()", "x.repeat(2, *[1] * (x.dim() - 1))",
    "x.repeat_interleave(2, -1)[..., ::2]", "-x", "x * 0", "x * 2**20", "x.long() * 2**40", "x.to(torch.complex64)",
)  # fmt: skip
ODD_ARGUMENTS = VALUES | st.sampled_from(_TENSORS)


def call_with_odd(
    function: Callable[..., Any],
    given: dict[str, Any],
    name: str,
    expression: str,
    names: set[str],
    *,
    anywhere: set[str] = frozenset(),  # type: ignore[assignment]
) -> None:
    """Call with argument `name` replaced: a result without NaN, or a PagedError that speaks of arguments in `names`.

    It speaks of `name` itself, unless that is a tensor, which may not fit to another, or one of `anywhere`. A failed
    call leaves all tensors as they were.
    """
    x, given = given.get(name), dict(given)
    if re.match(r"-?x\b", expression):
        if not isinstance(x, torch.Tensor):
            return
        try:
            given[name] = eval(expression, {"x": x, "torch": torch})
        except (RuntimeError, IndexError, TypeError):  # x has no such neighbour
            return
    else:
        given[name] = value(expression)
    others = [one for key, one in given.items() if isinstance(one, torch.Tensor) and key != name]
    before = [one.clone() for one in others]
    error = None
    try:
        result = function(**given)
    except PagedError as raised:
        error = str(raised)
    if error is None:
        tensors = [one for one in (result if isinstance(result, tuple) else (result,)) if one is not None]
        assert not any(one.isnan().any() for one in tensors), name
        return
    spoken_of = set(re.split(", ?", error.partition(":")[0]))
    assert spoken_of <= names, error
    is_tensor = isinstance(x, torch.Tensor) or isinstance(given[name], torch.Tensor)
    assert is_tensor or name in spoken_of | anywhere, f"{name}: {error}"
    for one, copy in zip(others, before, strict=True):
        assert torch.equal(one.float().nan_to_num(7.5), copy.float().nan_to_num(7.5)), error
