"""Right results lie below half of their bounds, and results of faulty problems beyond twice."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from paged.bench.bounds.first_order import gamma
from paged.bench.cards.card import Card
from paged.bench.cards.cards import CARDS
from paged.bench.cards.draw import Draw
from paged.bench.check import WrongResultError, error_shares
from paged.bench.problems.arguments import Arguments, map_tensors
from tests.backends import needs_numba
from tests.fuzz.kernels.kernel_calls import odd_problem
from tests.tolerance import DTYPES

CPU = torch.device("cpu")


def quick_problems(card: Card, dtype: torch.dtype) -> Iterator[Arguments]:
    """Draw every row and edge of a card that a quick verify has; `test_every_row_is_right` has all."""
    draw = Draw(CPU, dtype)
    for row in card.rows:
        if row.is_quick:
            yield card.problem(row, "check", CPU, dtype)
    for edge in card.edges:
        if edge.is_quick:
            yield from edge.problems(draw)


def assert_below_half(operation: str, dtype: torch.dtype) -> None:
    card = CARDS[operation]
    for arguments in quick_problems(card, dtype):
        for name, result in card.check(arguments).items():
            assert not result.got.numel() or result.shares().max() < 0.5, name


def test_whole_numbers_are_compared_exactly() -> None:
    """Also those that float64 rounds to the same number."""
    want = torch.tensor([2**62, 5])
    assert error_shares(want + torch.tensor([1, 0]), want, None).tolist() == [math.inf, 0.0]
    assert error_shares(want.clone(), want, None).tolist() == [0.0, 0.0]


def test_sums_of_few_terms_are_bounded_for_certain() -> None:
    assert gamma(30) == 30 * 2.0**-24
    assert gamma(3600) == 360 * 2.0**-24


@needs_numba
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("operation", CARDS)
def test_right_results_of_numba(operation: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_BACKEND", "numba")
    assert_below_half(operation, dtype)


@pytest.mark.parametrize("operation", ["merge_attn_states", "rotary_embedding", "gated_delta_rule", "mamba2_scan"])
def test_right_results_of_triton(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_BACKEND", "triton")
    assert_below_half(operation, torch.bfloat16)


def _spoiled(arguments: Arguments, name: str, value: float) -> Arguments:
    """Return the arguments with one number of a tensor replaced by NaN, an infinity or 0."""
    spoiled = arguments[name].clone()
    spoiled[(-1,) * spoiled.dim()] = value
    return {**arguments, name: spoiled}


# Operation and the tensors in which one number is spoiled.
SPOILED = (
    ("gated_rms_norm", ("x", "z")),
    ("qk_norm_rope_and_cache", ("q", "k", "v", "k_cache", "v_cache")),
    ("gated_delta_rule", ("mixed", "a", "b", "A_log")),
    ("mamba2_scan", ("mixed", "dt", "A_log", "dt_bias")),
)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("operation", "names"), SPOILED)
@pytest.mark.usefixtures("by_pytorch")
def test_finite_results_beside_a_number_that_is_not_finite(
    operation: str, names: tuple[str, ...], value: float
) -> None:
    """Have finite bounds, and are right. A snapshot is taken before the last token."""
    card = CARDS[operation]
    for name in names:
        arguments = _spoiled(odd_problem(card, 0, torch.float32), name, value)
        want = card.want(map_tensors(torch.clone, arguments))
        limits = card.bounds(arguments, want)
        for result, expected in want.items():
            limit = limits[result]
            assert limit is None or limit[expected.isfinite()].isfinite().all(), (name, result)
        for result in card.beside(arguments, card.call(arguments), want, limits).values():
            assert result.first_wrong() is None, name


def test_a_latent_with_the_score_minus_infinity() -> None:
    """Has the weight 0, and leaves the bound finite."""
    card = CARDS["paged_mla_attention"]
    torch.manual_seed(0)
    arguments = card.draw(Draw(CPU, torch.float32), lengths=((1, 9),), heads=1, sizes=(32, 16))
    arguments["q"][..., -1] = -1
    arguments["kv_cache"][arguments["block_table"][0, 0], 3, -1] = torch.inf
    want = card.want(arguments)
    assert want["out"].isfinite().all()
    assert all(limit is not None and limit.isfinite().all() for limit in card.bounds(arguments, want).values())


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.usefixtures("by_pytorch")
def test_exponents_beyond_float32(activation: str) -> None:
    """A gate is 0 where exp(-gate) overflows."""
    gates = -torch.linspace(80, 110, 128)
    x = torch.cat([gates, torch.ones(128)])[None]
    problems = [("silu_and_mul", {"x": x, "activation": "silu"})]
    for norm_first in (True, False):
        rows = {"x": torch.ones(1, 1, 128), "z": gates.view(1, 1, 128), "weight": torch.ones(128)}
        problems.append(("gated_rms_norm", {**rows, "norm_first": norm_first, "activation": activation}))
    for operation, arguments in problems:
        for result in CARDS[operation].check(arguments).values():
            assert result.shares().max() < 0.5


def test_slots_that_are_not_written_are_equal() -> None:
    card = CARDS["reshape_and_cache"]
    torch.manual_seed(0)
    arguments = card.draw(Draw(CPU, torch.float32), tokens=3, num_kv_heads=2, dim=16)
    arguments["slot_mapping"][1] = -1
    want = card.want(map_tensors(torch.clone, arguments))
    limits = card.bounds(arguments, want)
    for cache in ("k_cache", "v_cache"):
        assert int((limits[cache] > 0).flatten(0, 1).any(-1).any(-1).sum()) == 2


def test_a_result_that_is_too_large_for_its_dtype_is_infinite() -> None:
    want = torch.tensor([70000.0, -70000.0, 70000.0, 70000.0, 65000.0], dtype=torch.float64)
    got = torch.tensor([torch.inf, -torch.inf, -torch.inf, 65504.0, torch.inf]).half()
    assert (error_shares(got, want, 2.0**-11 * want.abs()) <= 1).tolist() == [True, True, False, False, False]


def test_floats_are_no_whole_numbers() -> None:
    with pytest.raises(WrongResultError, match=r"dtype torch.float32, expected whole numbers"):
        error_shares(torch.ones(2), torch.ones(2, dtype=torch.int64), None)


def _scaled(name: str, factor: float) -> Callable[[Arguments], Arguments]:
    return lambda arguments: {**arguments, name: arguments[name] * factor}


def _rolled(name: str, dim: int) -> Callable[[Arguments], Arguments]:
    return lambda arguments: {**arguments, name: arguments[name].roll(1, dim)}


def _replaced(name: str, value: Any) -> Callable[[Arguments], Arguments]:
    return lambda arguments: {**arguments, name: value}


def _weight_scale_of_the_neighbour(arguments: Arguments) -> Arguments:
    weight = arguments["weight"]
    return {**arguments, "weight": dataclasses.replace(weight, scale=weight.scale.roll(1, -1))}


def _last_key_dropped(arguments: Arguments) -> Arguments:
    return {**arguments, "seq_lens": arguments["seq_lens"] - 1}


# Operation, row, fault, and the problem that has it.
FAULTS = (
    ("paged_attention", 0, "the scale is 5 % off", _replaced("softmax_scale", 1.05 * 128**-0.5)),
    ("paged_attention", 1, "the last key is dropped", _last_key_dropped),
    ("paged_attention", 0, "a softcap", _replaced("softcap", 2.0)),
    ("paged_attention", 0, "a window one key short", _replaced("window_size", (30, -1))),
    ("paged_mla_attention", 0, "the scale is 5 % off", _scaled("softmax_scale", 1.05)),
    ("merge_attn_states", 0, "log-sum-exps in base 2", _scaled("lse_a", 1.44)),
    ("reshape_and_cache", 1, "the scale of another head", _rolled("k_scale", 0)),
    ("reshape_and_cache", 1, "the scale is 5 % off", _scaled("k_scale", 1.05)),
    ("qk_norm_rope_and_cache", 1, "the scale is 5 % off", _scaled("k_scale", 1.05)),
    ("qk_norm_rope_and_cache", 2, "the signs of the neighbour", _rolled("hadamard_signs", 0)),
    ("rms_norm", 0, "the weight of the neighbour", _rolled("weight", 0)),
    ("rms_norm", 0, "eps a tenth of the square", _replaced("eps", 0.1)),
    ("fused_add_rms_norm", 0, "the weight of the neighbour", _rolled("weight", 0)),
    ("rotary_embedding", 0, "the next position", _rolled("positions", 0)),
    ("rotary_embedding", 0, "the other order of pairs", _replaced("interleaved", True)),
    ("silu_and_mul", 0, "gelu for silu", _replaced("activation", "gelu")),
    ("quantized_linear", 0, "the scale of the neighbour", _weight_scale_of_the_neighbour),
    ("quantized_linear", 2, "the scale of the neighbour", _weight_scale_of_the_neighbour),
    ("fused_moe", 0, "the weights of other entries", _rolled("topk_weights", 1)),
    ("fused_moe", 0, "the next expert", _rolled("w2", 0)),
    ("gated_delta_rule", 0, "eps of the norm", _replaced("eps", 1.0)),
    ("gated_delta_rule", 1, "beta is doubled", _replaced("beta_scale", 2.0)),
    ("gated_delta_rule", 0, "the gate of another head", _rolled("dt_bias", 0)),
    ("gated_delta_rule", 2, "the gate of another channel", _rolled("dt_bias", 1)),
    ("gated_delta_rule", 3, "beta is doubled", _replaced("beta_scale", 2.0)),
    ("gated_delta_rule", 4, "another channel is erased", _rolled("erase_read", 2)),
    ("gated_delta_rule", 5, "another channel is written", _rolled("erase_write", 2)),
    ("mamba2_scan", 0, "the gate of another head", _rolled("dt_bias", 0)),
    ("mamba2_scan", 1, "D of another head", _rolled("D", 0)),
    ("causal_conv1d", 1, "taps in another order", _rolled("weight", 1)),
    ("gated_rms_norm", 0, "the norm behind the gate", _replaced("norm_first", False)),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("operation", "row", "fault", "change"), FAULTS)
def test_faults_exceed_twice_their_bound(
    operation: str, row: int, fault: str, change: Callable[[Arguments], Arguments], dtype: torch.dtype
) -> None:
    del fault  # part of the test's name
    card = CARDS[operation]
    arguments = card.problem(card.rows[row], "check", CPU, dtype)
    want = card.want(map_tensors(torch.clone, arguments))
    limits = card.bounds(arguments, want)
    wrong = card.want(change(arguments))
    for name in ("k_cache", "v_cache"):
        if name in wrong and arguments[name].dtype.itemsize == 1:
            wrong[name] = wrong[name].to(arguments[name].dtype)  # faults show in codes
    results = card.beside(arguments, wrong, want, limits).values()
    assert max(float(result.shares().max()) for result in results) > 2
