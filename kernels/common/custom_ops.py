"""Operations as `torch.library` custom ops, `torch.ops.paged.<operation>`: what torch.compile sees of them.

A plain call goes straight to the operation. One that Dynamo traces goes to the op, so that a graph holds one node where
the operation checks, plans and launches. `is_dynamo_compiling` tells them apart, not `is_compiling`, which holds in all
threads while one compiles: an op that runs meanwhile would call itself.

Each family defines its ops in a file of its own, with the operation's arguments but for these differences: tensors that
are written and returned are only written; operations that may write to `out` are two ops, one of them
`<operation>_out`; attention always gives (out, lse), and takes a flag for each sequence as `is_causal`; an alignment is
three tensors, and the objects `Routing`, `LoraWeights` and `LoraBatch` are their fields.

No plan crosses the border: the op makes its own, one launch more a layer. A plan holds the schedule of one step, so a
graph, a captured one above all, that held on to it would run later steps on the lengths of the first.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

ops = torch.ops.paged

CACHE_SCALES = "Tensor? k_scale=None, Tensor? v_scale=None"


def define(
    op: str,
    module: str,
    arguments: str,
    returns: str = "()",
    *,
    mutates: tuple[str, ...] = (),
    prepare: Callable[[dict[str, Any]], None] | None = None,
    results: Callable[[Any], Any] | None = None,
) -> Callable[..., Any]:
    """Define an op of these arguments and results, whose fake implementation is the function decorated.

    module: holds the operation of the op's name, without "_out"; it imports the file that defines, so it is imported at
    the first call. prepare: changes the op's arguments, by name, to the operation's. results: of the operation's, what
    the op returns; the same where None.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        schema = getattr(ops, op).default._schema
        named = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
        if prepare is not None:
            prepare(named)
        result = getattr(importlib.import_module(module), op.removesuffix("_out"))(**named)
        if not schema.returns:
            return None
        return result if results is None else results(result)

    def with_fake(fake: Callable[..., Any]) -> Callable[..., Any]:
        schema = f"({arguments}) -> {returns}"
        torch.library.custom_op(f"paged::{op}", run, mutates_args=mutates, schema=schema).register_fake(fake)
        return fake

    return with_fake


def writes_only(*_args: Any, **_kwargs: Any) -> None:
    """The fake of an op without results."""


def like_the_first(x: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    """The fake of an op whose result has the shape of its first argument."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
