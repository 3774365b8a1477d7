"""Whatever was launched before, a call gives what it gives alone: no key lacks what its launch depends on. A repeated
launch hands the compiled kernel what a first one would, with the new tensors."""

from collections.abc import Callable
from dataclasses import make_dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import pytest
import torch

import paged
from paged.kernels.common import launch
from paged.kernels.common.launch import Box, Launch, call_key, forget_launches, keep, known
from tests.backends import needs_numba
from tests.conftest import DEVICE

pytest.importorskip("triton", reason="without it nothing is launched")

HEAD_DIM, BLOCK_SIZE = 8, 8
LAUNCHED = ["triton", pytest.param("numba", marks=[needs_numba, pytest.mark.thorough])]


class Variant(NamedTuple):
    """What calls differ in. layout: "plain", "apart" for rows with room between them, "late" for one element's offset.
    option: of the operation's own, an activation, a flag or a tensor that may be left out."""

    num_tokens: int = 3
    dtype: torch.dtype = torch.float32
    layout: str = "plain"
    eps: float = 1e-6
    option: int = 0

    def tensor(self, *size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        extra = 4 if self.layout == "apart" else 0
        offset = 1 if self.layout == "late" else 0
        wide = torch.randn(offset + torch.Size((*size[:-1], size[-1] + extra)).numel(), device=DEVICE)
        values = wide.to(dtype or self.dtype)[offset:].view(*size[:-1], size[-1] + extra)
        return values[..., : size[-1]]

    def rows(self, *size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.tensor(self.num_tokens, *size, dtype=dtype)

    def ids(self, high: int, *size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(high, size, device=DEVICE).to(dtype)

    @property
    def caches(self) -> list[torch.Tensor]:
        return [self.tensor(4, BLOCK_SIZE, 2, HEAD_DIM) for _ in range(2)]

    @property
    def heads(self) -> list[torch.Tensor]:
        """Query, key and value."""
        return [self.rows(num_heads, HEAD_DIM) for num_heads in (4, 2, 2)]

    @property
    def slots(self) -> torch.Tensor:
        return torch.randperm(4 * BLOCK_SIZE, device=DEVICE)[: self.num_tokens]


def _rms_norm(v: Variant) -> list[torch.Tensor]:
    out = v.rows(16).contiguous() if v.option else None
    return [paged.rms_norm(v.rows(16), v.tensor(16), v.eps, out=out)]


def _fused_add_rms_norm(v: Variant) -> list[torch.Tensor]:
    both = (v.rows(16).contiguous() if v.layout == "apart" else v.rows(16) for _ in range(2))
    return list(paged.fused_add_rms_norm(*both, v.tensor(16), v.eps))


def _silu_and_mul(v: Variant) -> list[torch.Tensor]:
    return [paged.silu_and_mul(v.rows(16), activation="gelu" if v.option else "silu")]


def _rotary_embedding(v: Variant) -> list[torch.Tensor]:
    positions, angles = v.ids(64, v.num_tokens), v.tensor(64, HEAD_DIM, dtype=torch.float32)
    return list(paged.rotary_embedding(positions, *v.heads[:2], angles, interleaved=bool(v.option)))


def _qk_norm_rope_and_cache(v: Variant) -> list[torch.Tensor]:
    weight = v.tensor(HEAD_DIM) if v.option else None
    caches, where = v.caches, (v.slots, v.ids(64, v.num_tokens), v.tensor(64, HEAD_DIM, dtype=torch.float32))
    q = paged.qk_norm_rope_and_cache(*v.heads, *caches, *where, q_weight=weight, k_weight=weight, eps=v.eps)
    return [q, *caches]


def _reshape_and_cache(v: Variant) -> list[torch.Tensor]:
    caches, (_, key, value) = v.caches, v.heads
    scale = torch.rand(2, device=DEVICE) + 1 if v.option else None
    paged.reshape_and_cache(key, value, *caches, v.slots, k_scale=scale)
    return caches


def _greedy_argmax(v: Variant) -> list[torch.Tensor]:
    mask = torch.rand(v.num_tokens, 16, device=DEVICE) < 0.5 if v.layout == "apart" else v.ids(2, 16).bool()
    return [paged.greedy_argmax(v.rows(16), token_mask=mask if v.option else None)]


def _merge_attn_states(v: Variant) -> list[torch.Tensor]:
    sides = [(v.rows(2, HEAD_DIM), v.tensor(2, v.num_tokens, dtype=torch.float32)) for _ in range(2)]
    return list(paged.merge_attn_states(*sides[0], *sides[1]))


def _paged_attention(v: Variant) -> list[torch.Tensor]:
    """Layers of one step, which differ in all but the lengths."""
    num_seqs = v.num_tokens
    offsets = torch.arange(num_seqs + 1, dtype=torch.int32, device=DEVICE)
    lengths = torch.full((num_seqs,), 13, dtype=torch.int32, device=DEVICE)
    plan = _PLANS.setdefault(num_seqs, paged.AttentionPlan(offsets, lengths, max_seqlen_q=1, max_seqlen_k=16))
    batch = {"cu_seqlens_q": plan.cu_seqlens_q, "seq_lens": plan.seq_lens, "max_seqlen_q": 1, "plan": plan}
    batch["block_table"] = v.ids(4, num_seqs, 2, dtype=torch.int32)
    options = {"sinks": v.tensor(4)}, {"softcap": 5.0}, {"window_size": (3, 0)}, {"attention_chunk_size": 4}
    options = {}, *options, {"causal": False}
    return [paged.paged_attention(v.heads[0], *v.caches, **batch, softmax_scale=v.eps, **options[v.option])]


_PLANS: dict[int, paged.AttentionPlan] = {}


def _route_tokens(v: Variant) -> list[torch.Tensor]:
    return list(paged.route_tokens(v.rows(8), 2, renormalize=bool(v.option), routed_scaling_factor=v.eps))


def _route_and_align(v: Variant) -> list[torch.Tensor]:
    bias = v.tensor(8, dtype=torch.float32).contiguous() if v.option else None
    routing = paged.Routing(2, correction_bias=bias, routed_scaling_factor=v.eps)
    weights, ids, aligned = paged.route_and_align(v.rows(8), routing, 4)
    return [weights, ids, *aligned]


def _fused_moe(v: Variant) -> list[torch.Tensor]:
    ids, weights = v.ids(4, v.num_tokens, 2, dtype=torch.int32), torch.rand(v.num_tokens, 2, device=DEVICE)
    tensors = v.rows(32), v.tensor(4, 32, 32), v.tensor(4, 32, 16)
    return [paged.fused_moe(*tensors, weights, ids, activation="gelu" if v.option else "silu")]


OPERATIONS = (
    _rms_norm, _fused_add_rms_norm, _silu_and_mul, _rotary_embedding, _qk_norm_rope_and_cache, _reshape_and_cache,
    _greedy_argmax, _merge_attn_states, _paged_attention, _route_tokens, _route_and_align, _fused_moe,
)  # fmt: skip
FIELDS = {"num_tokens": (8,), "dtype": (torch.float16,), "layout": ("apart", "late"), "eps": (0.5,), "option": (1,)}


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


@pytest.mark.parametrize("backend", LAUNCHED, indirect=True)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__.strip("_"))
def test_a_call_gives_what_it_gives_alone(operation: Callable[[Variant], list[torch.Tensor]], backend: str) -> None:
    """Among calls that differ in one thing, and one that differs in all."""
    has_options = operation is _paged_attention and backend == "numba"
    fields = FIELDS | {"option": range(1, 6)} if has_options else FIELDS
    others = [Variant()._replace(**{name: value}) for name, values in fields.items() for value in values]
    assert not _differs(operation, [Variant(), *others, Variant(1, torch.float16, "apart", 0.5, 1)])


@pytest.mark.parametrize("missing", ["strides", "values", "shape"])
def test_a_key_without_something_is_found(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above is worth: with a part of the key left out, a launch is stale."""
    whole, first = launch.signatures, Variant()
    others = {"strides": first._replace(layout="apart"), "values": first._replace(eps=0.5)}
    if missing == "values":
        norm = paged.kernels.layers.rms_norm
        monkeypatch.setattr(norm, "call_key", lambda name, tensors, *_: call_key(name, tensors))
    else:
        end = ("shape", "strides").index(missing)

        def shortened(tensors: Any) -> Any:
            return tuple(one and one[:end] + one[2:] for one in whole(tensors))

        monkeypatch.setattr(launch, "signatures", shortened)
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
    for eps in (torch.tensor(1e-6), Fraction(1), [1e-6]):  # which may be another number by the next call
        assert call_key("rms_norm", (x, weight), eps) is None
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    assert call_key("rms_norm", (x, weight), 1e-6) != key


def test_faults_are_refused_where_a_sound_call_is_known() -> None:
    x, weight = torch.randn(4, 8, device=DEVICE), torch.randn(8, device=DEVICE)
    paged.rms_norm(x, weight)
    paged.rms_norm(x, weight, 1.0)  # equal to True, and of the same hash
    for wrong in (weight[:4], weight.to("meta"), "weight"):
        with pytest.raises(paged.PagedError, match="weight"):
            paged.rms_norm(x, wrong)  # type: ignore[arg-type]
    with pytest.raises(paged.UnsupportedError, match="gradients"):
        paged.rms_norm(x.clone().requires_grad_(), weight)
    with pytest.raises(paged.InvalidInputError, match="eps"):
        paged.rms_norm(x, weight, True)
    with torch.no_grad():
        paged.rms_norm(x.clone().requires_grad_(), weight)


class _Kernel:
    """A jitted function that notes what its compiled form is run with."""

    arg_names = ("x_ptr", "n", "y_ptr", "BLOCK")

    def __init__(self) -> None:
        self.compiled = 0
        self.runs: list[tuple[Any, ...]] = []

    def run(self, *, grid: tuple[int, ...], warmup: bool, **arguments: Any) -> Any:
        assert not warmup
        self.compiled += 1
        self[grid](*(arguments[name] for name in self.arg_names))
        return self

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.runs.append((grid, *arguments))


def test_repeats_with_other_tensors() -> None:
    kernel = _Kernel()
    launch = Launch(kernel, (3,), {"n": 7, "BLOCK": 16}, num_warps=4)
    tensors = [torch.zeros(2) for _ in range(3)]
    for x in tensors:
        launch({"x_ptr": x, "y_ptr": None, "unknown": 0})
        assert not any(isinstance(kept, torch.Tensor) for kept in launch._ordered), "it would keep a layer's alive"
    assert kernel.compiled == 1
    assert [run[0] for run in kernel.runs] == [(3, 1, 1)] * 3
    assert all(run[1] is x and run[2:] == (7, None, 16) for run, x in zip(kernel.runs, tensors, strict=True))


def test_a_descriptor_repeats_with_another_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor = make_dataclass("Descriptor", ["base", "shape", "strides", "block_shape"])
    monkeypatch.setattr("paged.kernels.common.launch.TensorDescriptor", descriptor)
    kernel = _Kernel()
    launch = Launch(kernel, (3,), {"n": 7, "BLOCK": 16, "y_ptr": None}, boxes={"x_ptr": Box((4, 8), (8, 1), (2, 8))})
    tensors = [torch.zeros(4, 8) for _ in range(3)]
    for x in tensors:
        launch({"x_ptr": x})
    described = [run[1] for run in kernel.runs]
    assert all(each.base is x for each, x in zip(described, tensors, strict=True))
    assert {(*each.shape, *each.strides, *each.block_shape) for each in described} == {(4, 8, 8, 1, 2, 8)}
    assert not any(isinstance(kept, torch.Tensor) for _, _, fields in launch._descriptors for kept in fields.values())
