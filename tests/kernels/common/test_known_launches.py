"""Whatever was launched before, a call gives what it gives alone: no key lacks what its launch depends on."""

from __future__ import annotations

import os
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import paged
from paged import InvalidInputError
from paged.kernels.common import launch
from paged.kernels.common.compat import setting
from paged.kernels.common.launch import call_key, forget_launches, keep, known
from tests.conftest import DEVICE

pytest.importorskip("triton", reason="without it nothing is launched")

HEAD_DIM, BLOCK_SIZE = 8, 8


class Variant(NamedTuple):
    """What calls differ in. layout: "plain", "apart" for rows with room between them, "late" for one element's offset.
    option: of the operation's own, an activation, a flag or a tensor that may be left out."""

    num_tokens: int
    dtype: torch.dtype
    layout: str
    eps: float
    option: bool

    def tensor(self, *size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        extra = 4 if self.layout == "apart" else 0
        offset = 1 if self.layout == "late" else 0
        wide = torch.randn(offset + torch.Size((*size[:-1], size[-1] + extra)).numel(), device=DEVICE)
        values = wide.to(dtype or self.dtype)[offset:].view(*size[:-1], size[-1] + extra)
        return values[..., : size[-1]]

    def ids(self, high: int, *size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(high, size, device=DEVICE).to(dtype)

    @property
    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        k_cache, v_cache = (self.tensor(4, BLOCK_SIZE, 2, HEAD_DIM) for _ in range(2))
        return k_cache, v_cache

    @property
    def heads(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query, key, value = (self.tensor(self.num_tokens, num_heads, HEAD_DIM) for num_heads in (4, 2, 2))
        return query, key, value

    @property
    def slots(self) -> torch.Tensor:
        return torch.randperm(4 * BLOCK_SIZE, device=DEVICE)[: self.num_tokens]


def _rms_norm(v: Variant) -> list[torch.Tensor]:
    out = v.tensor(v.num_tokens, 16).contiguous() if v.option else None
    return [paged.rms_norm(v.tensor(v.num_tokens, 16), v.tensor(16), v.eps, out=out)]


def _fused_add_rms_norm(v: Variant) -> list[torch.Tensor]:
    x, residual = (v.tensor(v.num_tokens, 16) for _ in range(2))
    if v.layout == "apart":
        x, residual = x.contiguous(), residual.contiguous()
    return list(paged.fused_add_rms_norm(x, residual, v.tensor(16), v.eps))


def _silu_and_mul(v: Variant) -> list[torch.Tensor]:
    return [paged.silu_and_mul(v.tensor(v.num_tokens, 16), activation="gelu" if v.option else "silu")]


def _rotary_embedding(v: Variant) -> list[torch.Tensor]:
    query, key, _ = v.heads
    angles = v.tensor(64, HEAD_DIM, dtype=torch.float32)
    paged.rotary_embedding(v.ids(64, v.num_tokens), query, key, angles, interleaved=v.option)
    return [query, key]


def _qk_norm_rope_and_cache(v: Variant) -> list[torch.Tensor]:
    weight = v.tensor(HEAD_DIM) if v.option else None
    caches, angles = v.caches, v.tensor(64, HEAD_DIM, dtype=torch.float32)
    q = paged.qk_norm_rope_and_cache(
        *v.heads, *caches, v.slots, v.ids(64, v.num_tokens), angles, q_weight=weight, k_weight=weight, eps=v.eps
    )
    return [q, *caches]


def _reshape_and_cache(v: Variant) -> list[torch.Tensor]:
    caches, (_, key, value) = v.caches, v.heads
    scale = torch.rand(2, device=DEVICE) + 1 if v.option else None
    paged.reshape_and_cache(key, value, *caches, v.slots, k_scale=scale)
    return list(caches)


def _greedy_argmax(v: Variant) -> list[torch.Tensor]:
    mask = torch.rand(v.num_tokens, 16, device=DEVICE) < 0.5 if v.layout == "apart" else v.ids(2, 16).bool()
    return [paged.greedy_argmax(v.tensor(v.num_tokens, 16), token_mask=mask if v.option else None)]


def _merge_attn_states(v: Variant) -> list[torch.Tensor]:
    outs = [v.tensor(v.num_tokens, 2, HEAD_DIM) for _ in range(2)]
    lses = [v.tensor(2, v.num_tokens, dtype=torch.float32) for _ in range(2)]
    return list(paged.merge_attn_states(outs[0], lses[0], outs[1], lses[1]))


def _paged_attention(v: Variant) -> list[torch.Tensor]:
    """Layers of one step, which differ in all but the lengths."""
    num_seqs = v.num_tokens
    offsets = torch.arange(num_seqs + 1, dtype=torch.int32, device=DEVICE)
    lengths = torch.full((num_seqs,), 13, dtype=torch.int32, device=DEVICE)
    plan = _PLANS.setdefault(num_seqs, paged.AttentionPlan(offsets, lengths, max_seqlen_q=1, max_seqlen_k=16))
    batch = {"cu_seqlens_q": plan.cu_seqlens_q, "seq_lens": plan.seq_lens, "max_seqlen_q": 1, "plan": plan}
    table, (query, _, _) = v.ids(4, num_seqs, 2, dtype=torch.int32), v.heads
    sinks = v.tensor(4) if v.option else None
    return [paged.paged_attention(query, *v.caches, block_table=table, softcap=10 * v.eps, sinks=sinks, **batch)]


_PLANS: dict[int, paged.AttentionPlan] = {}


def _route_tokens(v: Variant) -> list[torch.Tensor]:
    return list(paged.route_tokens(v.tensor(v.num_tokens, 8), 2, renormalize=v.option, routed_scaling_factor=v.eps))


def _route_and_align(v: Variant) -> list[torch.Tensor]:
    bias = v.tensor(8, dtype=torch.float32) if v.option else None
    routing = paged.Routing(2, correction_bias=None if bias is None else bias.contiguous(), routed_scaling_factor=v.eps)
    weights, ids, aligned = paged.route_and_align(v.tensor(v.num_tokens, 8), routing, 4)
    return [weights, ids, *aligned]


def _fused_moe(v: Variant) -> list[torch.Tensor]:
    ids = v.ids(4, v.num_tokens, 2, dtype=torch.int32)
    weights = torch.rand(v.num_tokens, 2, device=DEVICE)
    x, w1, w2 = v.tensor(v.num_tokens, 32), v.tensor(4, 32, 32), v.tensor(4, 32, 16)
    return [paged.fused_moe(x, w1, w2, weights, ids, activation="gelu" if v.option else "silu")]


OPERATIONS = (
    _rms_norm, _fused_add_rms_norm, _silu_and_mul, _rotary_embedding, _qk_norm_rope_and_cache, _reshape_and_cache,
    _greedy_argmax, _merge_attn_states, _paged_attention, _route_tokens, _route_and_align, _fused_moe,
)  # fmt: skip
VARIANTS = st.builds(
    Variant,
    st.sampled_from((1, 3, 8)),
    st.sampled_from((torch.float32, torch.float16)),
    st.sampled_from(("plain", "apart", "late")),
    st.sampled_from((1e-6, 0.5)),
    st.booleans(),
)


def _differs(operation: Callable[[Variant], list[torch.Tensor]], variants: list[Variant]) -> bool:
    """Whether a call after others gives another result, or refuses, than the same call with nothing kept."""

    def run(variant: Variant) -> list[torch.Tensor]:
        torch.manual_seed(0)
        return operation(variant)

    alone = []
    for variant in variants:
        forget_launches()
        _PLANS.clear()
        alone.append(run(variant))
    rounds = [*zip(variants, alone, strict=True)]
    return any(
        not torch.equal(got, want)
        for variant, wanted in (*rounds, rounds[0])
        for got, want in zip(run(variant), wanted, strict=True)
    )


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__.strip("_"))
@settings(max_examples=4, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(first=VARIANTS, other=VARIANTS, field=st.sampled_from(Variant._fields))
def test_a_call_gives_what_it_gives_alone(
    operation: Callable[[Variant], list[torch.Tensor]], first: Variant, other: Variant, field: str
) -> None:
    """Between calls that differ in one thing, or in all."""
    assert not _differs(operation, [first, first._replace(**{field: getattr(other, field)}), other])


@pytest.mark.parametrize("missing", ["strides", "values", "shape"])
def test_a_key_without_something_is_found(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above is worth: with a part of the key left out, a launch is stale."""
    whole, first = launch.signatures, Variant(3, torch.float32, "plain", 1e-6, False)
    others = {"strides": first._replace(layout="apart"), "values": first._replace(eps=0.5)}
    if missing == "values":
        monkeypatch.setattr(
            paged.kernels.layers.rms_norm, "call_key", lambda name, tensors, *_: call_key(name, tensors)
        )
    else:
        dropped = ("shape", "strides").index(missing)
        monkeypatch.setattr(
            launch,
            "signatures",
            lambda tensors: tuple(one and one[:dropped] + one[2:] for one in whole(tensors)),
        )
    # The first of the two then runs by what the second one left, of fewer or closer rows: inside of its tensors.
    assert _differs(_rms_norm, [others.get(missing, first._replace(num_tokens=8)), first])
    monkeypatch.undo()
    forget_launches()


def test_what_is_kept_is_bounded_and_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_MAX_KNOWN", 4)
    forget_launches()
    for number in range(9):
        assert keep(number, number + 0.5) == number + 0.5
        assert len(launch._KNOWN) <= 4
    assert known(8) == 8.5
    assert keep(None, "nothing") == "nothing"
    assert known(None) is None
    forget_launches()
    assert known(8) is None


def test_a_tensor_of_another_kind_has_another_key_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(4, 8, device=DEVICE), torch.randn(8, device=DEVICE)
    key = call_key("rms_norm", (x, weight), 1e-6)
    assert key == call_key("rms_norm", (x.clone(), weight), 1e-6)
    negated = torch.complex(weight, weight).conj().imag
    emptied = x.clone()
    emptied.untyped_storage().resize_(0)
    for other in (x.half(), x.t(), x[:, :4], negated, emptied, x.flatten()[1:29], x.to("meta"), None):
        assert call_key("rms_norm", (x, other), 1e-6) != key
    for no_tensor in ("x", 3, x.to_sparse()):
        assert call_key("rms_norm", (x, no_tensor), 1e-6) is None
        assert call_key("rms_norm", (no_tensor, x), 1e-6) is None
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    assert call_key("rms_norm", (x, weight), 1e-6) != key


@pytest.mark.parametrize("known_as", [1.0, np.float64(1), 1])
def test_a_number_of_another_type_is_not_the_known_one(known_as: Any) -> None:
    """Of equal hashes and equal, but each to be refused, or another number by the time of the next call."""
    x, weight = torch.randn(4, 8, device=DEVICE), torch.randn(8, device=DEVICE)
    known_result = paged.rms_norm(x, weight, known_as)
    with pytest.raises(InvalidInputError, match="eps: True"):
        paged.rms_norm(x, weight, True)
    for eps in (torch.tensor(1.0), Fraction(1), [1.0]):
        assert call_key("rms_norm", (x, weight), eps) is None
    assert call_key("rms_norm", (x, weight), np.int32(1), np.bool_(True)) is not None
    eps = torch.tensor(1.0)
    assert torch.equal(paged.rms_norm(x, weight, eps), known_result)
    eps.fill_(2.0)
    assert torch.equal(paged.rms_norm(x, weight, eps), paged.rms_norm(x, weight, 2))


def test_a_setting_is_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "PAGED_NO_SUCH_SETTING"
    assert setting(name) == ""
    for value in ("torch", "", "\udce4"):
        monkeypatch.setenv(name, value)
        assert setting(name) == os.environ[name] == value
    monkeypatch.delenv(name)
    assert setting(name) == ""
    monkeypatch.setattr(os, "environ", {name: "another"})
    assert setting(name) == "another"


def test_faults_are_refused_where_a_sound_call_is_known() -> None:
    x, weight = torch.randn(4, 8, device=DEVICE), torch.randn(8, device=DEVICE)
    paged.rms_norm(x, weight)
    for wrong in (weight[:4], weight.to("meta"), "weight"):
        with pytest.raises(paged.PagedError, match="weight"):
            paged.rms_norm(x, wrong)  # type: ignore[arg-type]
    with pytest.raises(paged.UnsupportedError, match="gradients"):
        paged.rms_norm(x.clone().requires_grad_(), weight)
    with pytest.raises(paged.InvalidInputError, match="eps"):
        paged.rms_norm(x, weight, True)
    with torch.no_grad():
        paged.rms_norm(x.clone().requires_grad_(), weight)
