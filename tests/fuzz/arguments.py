"""Calls with a hostile value for an argument: tensors replaced by others made of them, everything by anything."""

import re
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

from paged.errors import PagedError
from tests.fuzz.values import VALUES, expressions, value

# What becomes of a tensor x: another shape, dtype or layout of the same numbers, or other numbers.
FORMS = expressions("""
    x[:1]; x[:0]; x[1:]; x[0]; x[None]; x[..., :1]; x[..., :-1]; x[..., None]; x.reshape(-1); x.new_zeros(()); None; [];
    x.double(); x.half(); x.long(); x.int(); x.bool(); x.to(torch.complex64); x.tolist(); x.numpy(); x.to('meta');
    x.flip(0); x.flip(-1); x.mT; x.transpose(0, -1); x[:1].expand_as(x); x.expand(2, *x.shape); x.to_sparse();
    x.repeat(2, *[1] * (x.dim() - 1)); x.repeat_interleave(2, -1)[..., ::2]; x.as_strided(x.shape, [1] * x.dim());
    torch._neg_view(x); torch._efficientzerotensor(x.shape, dtype=x.dtype); without_memory(x);
    torch.nested.nested_tensor([x, x]); torch.nn.Parameter(x, requires_grad=False);
    torch.quantize_per_tensor(x.float(), 0.1, 0, torch.quint8)
""")
_NUMBERS = expressions("""
    x + 100; x - 100; -x; x * 0; x * 2**20; x.long() * 2**40; x.clone().float().requires_grad_()
""")
ODD_ARGUMENTS = st.tuples(st.just("any"), VALUES) | st.tuples(st.just("tensor"), FORMS | _NUMBERS)


def odd(kind: str, expression: str, given: Any) -> Any:
    """What an argument is replaced with: itself where it is no tensor, or has no such neighbour."""
    if kind == "any":
        return value(expression)
    if not isinstance(given, torch.Tensor):
        return given
    try:
        made = value(expression, x=given, without_memory=without_memory)
        is_negated = isinstance(made, torch.Tensor) and made.dtype == torch.bool and made.is_neg()
        return given if is_negated else made  # PyTorch itself cannot read such
    except (RuntimeError, IndexError, TypeError):  # NotImplementedError is one of the first
        return given


def without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """One whose storage was given back, as sharded training does between steps."""
    freed = torch.empty_like(tensor)  # which reads nothing, as `tensor` may have no memory either
    freed.untyped_storage().resize_(0)
    return freed


def call_or_refuse(function: Callable[..., Any], given: dict[str, Any]) -> tuple[Any, str | None]:
    """What it returns, or what the PagedError says that it raises and that leaves all tensors as they were."""
    before = {name: one.clone() for name, one in given.items() if has_values(one)}
    try:
        return function(**given), None
    except PagedError as raised:
        error = str(raised)
    for name, one in before.items():
        assert torch.equal(one.double().nan_to_num(7.5), given[name].double().nan_to_num(7.5)), (name, error)
    return None, error


def call_with_odd(function: Callable[..., Any], given: dict[str, Any], name: str, replacement: tuple[str, str], *,
                  names: set[str]) -> None:  # fmt: skip
    """Call with argument `name` replaced: a result without NaN, or an error that speaks of arguments in `names`.

    It speaks of `name` itself, unless that is a tensor, which may not fit to another.
    """
    x, given = given.get(name), given | {name: odd(*replacement, given.get(name))}
    result, error = call_or_refuse(function, given)
    if error is None:
        tensors = [one for one in (result if isinstance(result, tuple) else (result,)) if one is not None]
        assert not any(one.isnan().any() for one in tensors), name
        return
    spoken_of = set(re.split(", ?", re.sub(r"\[\d+\]", "", error.partition(":")[0])))
    assert spoken_of <= names, error
    is_tensor = isinstance(x, torch.Tensor) or isinstance(given[name], torch.Tensor)
    assert is_tensor or name in spoken_of, f"{name}: {error}"


def has_values(given: Any) -> bool:
    """Whether it is a tensor whose numbers lie in this process's memory."""
    if not isinstance(given, torch.Tensor) or given.is_nested or given.layout is not torch.strided:
        return False
    has_numbers = not given.is_quantized and not given.is_complex()
    return has_numbers and given.device.type == "cpu" and (given.numel() == 0 or given.data_ptr() != 0)
