"""Every kernel wrapper with odd ids, numbers and tensors: a named error that changes nothing, or the right answer."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from paged import PagedError
from tests.fuzz.fuzzing import fuzz
from tests.fuzz.kernels.kernel_calls import CALLS, Answer, Arguments, Call
from tests.fuzz.values import VALUES, value
from tests.tolerance import assert_close

# What becomes of a tensor, called t here.
TENSORS = st.sampled_from(
    (
        *("t.half()", "t.double()", "t.long()", "t.int()", "t.bool()", "t[:0]", "t[:1]", "t[1:]", "t[None]"),
        *("t[..., :-1]", "t.repeat_interleave(2, -1)[..., ::2]", "t.flip(-1)", "t.mT", "t.new_empty(())", "None", "[]"),
        *("t.to('meta')", "t.to_sparse()", "t.tolist()", "t.numpy()", "t[:1].expand_as(t)", "t.reshape(-1)"),
        *("torch._neg_view(t)", "torch._efficientzerotensor(t.shape, dtype=t.dtype)", "without_memory(t)"),
        *("torch.nested.nested_tensor([t, t])", "torch.nn.Parameter(t, requires_grad=False)", "t.to(torch.complex64)"),
        *("torch.quantize_per_tensor(t.float(), 0.1, 0, torch.quint8)", "t.as_strided(t.shape, [1] * t.dim())"),
    )
)
IDS = st.one_of(
    st.sampled_from([-1, -2, 0, 1, 2**20, 2**31 - 1, -(2**31), 2**40, -(2**40), 2**63 - 1, -(2**63)]),
    st.integers(-50, 50),
)


def _changes(name: str) -> st.SearchStrategy[list[Any]]:
    """[what, argument, with what]."""
    call = CALLS[name]
    torch.manual_seed(0)
    arguments = call.arguments()
    tensors = [name for name, each in arguments.items() if isinstance(each, torch.Tensor)]
    ids = [name for name in tensors if arguments[name].dtype in (torch.int32, torch.int64)]
    kinds = [st.tuples(st.just("tensor"), st.sampled_from(tensors), TENSORS)]
    if ids:
        entry = st.lists(st.tuples(st.integers(0, 99), IDS), min_size=1, max_size=3)
        kinds += [st.tuples(st.just("ids"), st.sampled_from(ids), entry)] * 3
    if call.numbers:
        kinds += [st.tuples(st.just("number"), st.sampled_from(sorted(call.numbers)), VALUES)] * 2
    return st.tuples(st.just(name), st.lists(st.one_of(kinds), max_size=2))


CASES = st.sampled_from(sorted(CALLS)).flatmap(_changes)


@fuzz(CASES, examples=250)
def test_odd_arguments(case: tuple[str, list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    _check(*case)


@fuzz(CASES, examples=40)
def test_odd_arguments_in_the_interpreter(case: tuple[str, list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_BACKEND", "triton")
    _check(*case)


def _check(name: str, changes: list[Any]) -> None:
    call = CALLS[name]
    torch.manual_seed(0)
    arguments = call.arguments()
    for what, argument, payload in changes:
        arguments[argument] = _changed(what, arguments.get(argument), payload)
    before = {name: each.clone() for name, each in arguments.items() if _has_values(each)}
    answer = None
    try:
        answer = call.run(**arguments)
    except PagedError as error:
        refused = str(error)
    if answer is None:
        assert changes, refused
        for argument, given in before.items():
            assert torch.equal(given.nan_to_num(), arguments[argument].nan_to_num()), (argument, refused)
        return
    for got, want in zip(answer, _expected(call, arguments | before), strict=True):
        if got.is_floating_point():
            # Four roundings of the largest value: those of 16-bit inputs round what lies between as well.
            budget = 2e-4 if got.dtype == torch.float32 else 1e-5
            assert_close(got, want.double(), rounded=_rounded(got, want.double()), float32=budget)
        else:
            assert torch.equal(got.long(), want.long()), (got, want)


def _changed(what: str, given: Any, payload: Any) -> Any:
    if what == "number":
        return value(payload)
    if not isinstance(given, torch.Tensor):
        return given
    if what == "tensor":
        try:
            return eval(payload, {"t": given, "torch": torch, "without_memory": without_memory})
        except (RuntimeError, TypeError, IndexError, NotImplementedError):  # no such tensor can be made of this one
            return given
    changed = given.clone()
    for position, identity in payload:
        if changed.numel():
            limits = (
                torch.iinfo(changed.dtype) if not changed.is_floating_point() and changed.dtype != torch.bool else None
            )
            if limits is not None and changed.layout is torch.strided and changed.device.type == "cpu":
                changed.view(-1)[position % changed.numel()] = min(max(identity, limits.min), limits.max)
    return changed


def without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """One whose storage was given back, as sharded training does between steps."""
    freed = tensor.clone()
    freed.untyped_storage().resize_(0)
    return freed


def _has_values(given: Any) -> bool:
    if not isinstance(given, torch.Tensor) or given.is_nested or given.layout is not torch.strided:
        return False
    has_numbers = not given.is_quantized and not given.is_complex()
    return has_numbers and given.device.type == "cpu" and (given.numel() == 0 or given.data_ptr() != 0)


def _expected(call: Call, arguments: Arguments) -> Answer:
    plain = dict(arguments)
    for name, kind in call.numbers.items():
        if name in plain and not (name == "softmax_scale" and plain[name] is None):
            plain[name] = operator.index(plain[name]) if kind is int else kind(plain[name])
    return call.expected(**plain)


def _rounded(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor | None:
    if got.dtype not in (torch.float16, torch.bfloat16) or not want.numel():
        return None
    return want + 4 * torch.finfo(got.dtype).eps * want.nan_to_num(0.0, 0.0, 0.0).abs().max()
