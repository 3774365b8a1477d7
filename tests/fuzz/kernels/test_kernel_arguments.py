"""Every kernel wrapper with odd ids, numbers and tensors: a named error that changes nothing, or the right answer."""

import operator
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from paged.bench.problems.arguments import Tensors
from tests.fuzz.arguments import FORMS, call_or_refuse, has_values, odd
from tests.fuzz.arguments import without_memory as without_memory
from tests.fuzz.fuzzing import fuzz
from tests.fuzz.kernels.kernel_calls import CALLS, Arguments, Call, odd_problem
from tests.fuzz.values import VALUES
from tests.kernels.attention.loops import index_scores
from tests.tolerance import assert_close

EDGES = st.sampled_from([-1, -2, 0, 1, 2**20, 2**31 - 1, -(2**31), 2**40, -(2**40), 2**63 - 1, -(2**63)])
# Entries of a tensor of ids, at places modulo their number.
ENTRIES = st.lists(st.tuples(st.integers(0, 99), EDGES | st.integers(-50, 50)), min_size=1, max_size=3)


def _changes(name: str) -> st.SearchStrategy[list[Any]]:
    """[what, argument, with what]."""
    call, arguments = CALLS[name], _arguments(name, [])
    tensors = [name for name, each in arguments.items() if isinstance(each, torch.Tensor)]
    kinds = [st.tuples(st.just("tensor"), st.sampled_from(tensors), FORMS)]
    if ids := [name for name in tensors if arguments[name].dtype in (torch.int32, torch.int64)]:
        kinds += [st.tuples(st.just("ids"), st.sampled_from(ids), ENTRIES)] * 3
    if numbers := call.numbers():
        kinds += [st.tuples(st.just("any"), st.sampled_from(sorted(numbers)), VALUES)] * 2
    return st.tuples(st.just(name), st.lists(st.one_of(kinds), max_size=2))


def _arguments(name: str, changes: list[Any]) -> Arguments:
    torch.manual_seed(0)
    arguments = CALLS[name].arguments()
    for what, argument, payload in changes:
        given = arguments.get(argument)
        arguments[argument] = _with_ids(given, payload) if what == "ids" else odd(what, payload, given)
    return arguments


def _with_ids(given: Any, entries: list[tuple[int, int]]) -> Any:
    """As far as the dtype holds them; unchanged what is no longer a plain tensor of integers."""
    if not has_values(given) or given.is_floating_point() or given.dtype == torch.bool or not given.numel():
        return given
    changed, limits = given.clone(), torch.iinfo(given.dtype)
    for position, identity in entries:
        index = torch.unravel_index(torch.tensor(position % changed.numel()), changed.shape)  # of any strides
        changed[index] = min(max(identity, limits.min), limits.max)
    return changed


CASES = st.sampled_from(sorted(CALLS)).flatmap(_changes)


@fuzz(CASES, examples=80, thorough=250)
def test_odd_arguments(case: tuple[str, list[Any]]) -> None:
    _check(*case)


@pytest.mark.parametrize("name", sorted(CALLS))
def test_no_tensor_is_refused_or_left_out(name: str) -> None:
    """Each tensor in turn as None: a named error, or the right answer where it may be left out."""
    for argument, tensor in _arguments(name, []).items():
        if isinstance(tensor, torch.Tensor):
            _check(name, [("tensor", argument, "None")])


@fuzz(CASES, examples=10, thorough=40)
def test_odd_arguments_in_the_interpreter(case: tuple[str, list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_BACKEND", "triton")
    _check(*case)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(CALLS))
def test_odd_sizes_and_strides(name: str, dtype: torch.dtype) -> None:
    """Every combination of a card's odd sizes that four seeds draw, in tensors with NaN between their rows."""
    card = CALLS[name].card
    for seed in range(4):
        arguments = odd_problem(card, seed, dtype)
        for result in card.check(arguments).values():
            index = result.first_wrong()
            assert index is None, f"seed {seed}: {result.describe(index)}"


def _check(name: str, changes: list[Any]) -> None:
    call = CALLS[name]
    answer, error = call_or_refuse(call.run, _arguments(name, changes))
    if error is not None:
        assert changes, error
        return
    expected = _expected(call, _arguments(name, changes))
    for result, got in answer.items():
        want = expected[result]
        if name == "choose_keys":
            _check_chosen(got, want, _arguments(name, changes))
        elif got.is_floating_point():
            # Four roundings of the largest value: those of 16-bit inputs round what lies between as well.
            budget = 2e-4 if got.dtype == torch.float32 else 1e-5
            assert_close(got, want.double(), rounded=_rounded(got, want.double()), float32=budget)
        else:
            assert torch.equal(got.long(), want.long()), (got, want)


def _check_chosen(got: torch.Tensor, want: torch.Tensor, arguments: Arguments) -> None:
    """Either of two keys with scores alike may be chosen; NaN, which a block of others holds, has no rank."""
    del arguments["top_k"]
    for chosen, best, scores in zip(got.tolist(), want.tolist(), index_scores(**arguments), strict=True):
        if scores.isnan().any():
            continue
        keys = [key for key in chosen if key >= 0]
        best_keys = [key for key in best if key >= 0]
        assert keys == sorted(set(keys)), "each once, in order"
        assert_close(scores[keys].sort().values.float(), scores[best_keys].sort().values, float32=2e-4)


def _expected(call: Call, arguments: Arguments) -> Tensors:
    for name, kind in call.numbers().items():
        if arguments.get(name) is not None:
            arguments[name] = operator.index(arguments[name]) if kind is int else kind(arguments[name])
    return call.expected(**arguments)


def _rounded(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor | None:
    if got.dtype not in (torch.float16, torch.bfloat16) or not want.numel():
        return None
    return want + 4 * torch.finfo(got.dtype).eps * want.nan_to_num(0.0, 0.0, 0.0).abs().max()
