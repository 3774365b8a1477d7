"""What every wrapper's tensors must be: values that lie in memory as they are, and those that are written apart."""

from collections.abc import Callable
from itertools import product

import pytest
import torch

import paged
from paged import InvalidInputError, UnsupportedError
from paged.bench.attention.problem import Problem, make
from paged.bench.cards.cards import CARDS
from paged.kernels.core.checks import check_writable
from paged.kernels.core.errors import arguments_named
from tests.backends import BACKENDS
from tests.fuzz.arguments import without_memory
from tests.fuzz.kernels.kernel_calls import CALLS
from tests.tolerance import assert_close

ODD: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "negated": torch._neg_view,
    "no memory": without_memory,
    "zeros that are nowhere": lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype),
    "on meta": lambda t: t.to("meta"),
    "nested": lambda t: torch.nested.nested_tensor([t, t]),
}


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", sorted(CARDS))
def test_tensors_without_values_in_memory(name: str) -> None:
    """Every tensor of every operation: what reads memory would find other values there, or none."""
    call = CALLS[name]
    given = call.arguments()
    tensors = [argument for argument, each in given.items() if isinstance(each, torch.Tensor)]
    for argument, odd in product(tensors, ODD.values()):
        with pytest.raises((InvalidInputError, UnsupportedError)):
            call.run(**given | {argument: odd(given[argument])})
    call.run(**given)


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
@pytest.mark.usefixtures("backend")
def test_interleaved_tensors_are_apart() -> None:
    """Query, key and value of one projection, caches with K beside V, a norm and attention in place."""
    fused = torch.randn(3, 10, 16)
    query, key, value = fused[:, :6], fused[:, 6:8], fused[:, 8:]
    beside = torch.zeros(4, 2, 8, 2, 16)
    together = torch.zeros(4, 8, 2, 32)
    slots = torch.tensor([0, 5, 2])
    paged.rotary_embedding(slots, query, key, torch.rand(9, 8))
    paged.reshape_and_cache(key, value, beside[:, 0], beside[:, 1], slots)
    paged.reshape_and_cache(key, value, together[..., :16], together[..., 16:], slots)
    assert torch.equal(beside[0, :, 5], fused[1, 6:].view(2, 2, 16))
    assert torch.equal(together[0, 5], torch.cat([key[1], value[1]], -1))
    x, weight = torch.randn(3, 16), torch.ones(16)
    assert_close(paged.rms_norm(x.clone(), weight), paged.rms_norm(x, weight, out=x).double())
    given = CALLS["paged_attention"].arguments() | {"return_lse": False}
    expected = paged.paged_attention(**given)
    assert_close(paged.paged_attention(**given, out=given["q"]), expected.double())


def test_overlapping_strides() -> None:
    storage = torch.zeros(64)
    for shape, stride in [((4, 4), (1, 1)), ((4, 4), (3, 1)), ((2, 3), (0, 1)), ((2, 2, 2), (2, 2, 1))]:
        with pytest.raises(InvalidInputError, match="x: strides"):
            check_writable("x", storage.as_strided(shape, stride))
    matrices = ((4, 4), (4, 1)), ((4, 4), (1, 4)), ((1, 4), (0, 1)), ((0, 4), (0, 0))
    for shape, stride in (*matrices, ((2, 2, 2), (20, 3, 1))):
        check_writable("x", storage.as_strided(shape, stride))


def test_a_planned_launch_takes_no_other_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has run before with a plan finds its launch again by what its tensors look like."""
    monkeypatch.setenv("PAGED_BACKEND", "triton")
    given = CALLS["paged_attention"].arguments() | {"return_lse": False}
    plan = paged.AttentionPlan(given["cu_seqlens_q"], given["seq_lens"], max_seqlen_q=9, max_seqlen_k=64)
    expected = paged.paged_attention(**given, plan=plan)
    for odd, name in product(ODD.values(), ("q", "k_cache", "v_cache", "block_table")):
        with pytest.raises(InvalidInputError):
            paged.paged_attention(**given | {name: odd(given[name])}, plan=plan)
    assert torch.equal(paged.paged_attention(**given, plan=plan), expected)


@pytest.mark.usefixtures("backend")
def test_gradients_are_refused(device: torch.device) -> None:
    arguments = vars(make(Problem("", ((1, 40), (9, 30))), device)) | {"max_seqlen_q": 9}
    q, weight = arguments["q"].clone().requires_grad_(), torch.ones(32, device=device, requires_grad=True)
    for call in (
        lambda: paged.paged_attention(**{**arguments, "q": q}),
        lambda: paged.rms_norm(arguments["q"], weight),
        lambda: paged.silu_and_mul(q),
    ):
        with pytest.raises(UnsupportedError, match="has no gradients"):
            call()
        for quiet in (torch.no_grad, torch.inference_mode):
            with quiet():
                call()


def test_a_caller_names_its_own_arguments(device: torch.device) -> None:
    arguments = vars(make(Problem("", ((1, 40), (9, 30))), device)) | {"max_seqlen_q": 9}
    arguments["seq_lens"] = arguments["seq_lens"].long()
    with pytest.raises(InvalidInputError, match=r"^cache_seqlens: dtype"), arguments_named(seq_lens="cache_seqlens"):
        paged.paged_attention(**arguments)
    with pytest.raises(InvalidInputError, match=r"^seq_lens: dtype"), arguments_named(q="query"):
        paged.paged_attention(**arguments)
