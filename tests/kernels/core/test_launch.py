"""What is bound gives what a plain call gives, of other values and layouts. A repeated launch hands the compiled kernel
what a first one would, with the new tensors."""

import weakref
from collections.abc import Callable
from dataclasses import make_dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

import paged
from paged.kernels.cache.canaries import check_canaries
from paged.kernels.core.launch import Box, Launch
from paged.kernels.core.operation import Bound
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


def _rms_norm(v: Variant, p: Any) -> list[torch.Tensor]:
    out = v.rows(16).contiguous() if v.option else None
    return [p.rms_norm(v.rows(16), v.tensor(16), v.eps, out=out)]


def _fused_add_rms_norm(v: Variant, p: Any) -> list[torch.Tensor]:
    both = (v.rows(16).contiguous() if v.layout == "apart" else v.rows(16) for _ in range(2))
    return list(p.fused_add_rms_norm(*both, v.tensor(16), v.eps))


def _silu_and_mul(v: Variant, p: Any) -> list[torch.Tensor]:
    return [p.silu_and_mul(v.rows(16), activation="gelu" if v.option else "silu")]


def _rotary_embedding(v: Variant, p: Any) -> list[torch.Tensor]:
    positions, angles = v.ids(64, v.num_tokens), v.tensor(64, HEAD_DIM, dtype=torch.float32)
    return list(p.rotary_embedding(positions, *v.heads[:2], angles, interleaved=bool(v.option)))


def _qk_norm_rope_and_cache(v: Variant, p: Any) -> list[torch.Tensor]:
    weight = v.tensor(HEAD_DIM) if v.option else None
    caches, where = v.caches, (v.slots, v.ids(64, v.num_tokens), v.tensor(64, HEAD_DIM, dtype=torch.float32))
    q = p.qk_norm_rope_and_cache(*v.heads, *caches, *where, q_weight=weight, k_weight=weight, eps=v.eps)
    return [q, *caches]


def _reshape_and_cache(v: Variant, p: Any) -> list[torch.Tensor]:
    caches, (_, key, value) = v.caches, v.heads
    scale = torch.rand(2, device=DEVICE) + 1 if v.option else None
    p.reshape_and_cache(key, value, *caches, v.slots, k_scale=scale)
    return caches


def _greedy_argmax(v: Variant, p: Any) -> list[torch.Tensor]:
    mask = torch.rand(v.num_tokens, 16, device=DEVICE) < 0.5 if v.layout == "apart" else v.ids(2, 16).bool()
    return [p.greedy_argmax(v.rows(16), token_mask=mask if v.option else None)]


def _merge_attn_states(v: Variant, p: Any) -> list[torch.Tensor]:
    sides = [(v.rows(2, HEAD_DIM), v.tensor(2, v.num_tokens, dtype=torch.float32)) for _ in range(2)]
    return list(p.merge_attn_states(*sides[0], *sides[1]))


def _paged_attention(v: Variant, p: Any) -> list[torch.Tensor]:
    """Layers of one step, which differ in all but the lengths."""
    num_seqs = v.num_tokens
    offsets = torch.arange(num_seqs + 1, dtype=torch.int32, device=DEVICE)
    lengths = torch.full((num_seqs,), 13, dtype=torch.int32, device=DEVICE)
    plan = _PLANS.setdefault(num_seqs, paged.AttentionPlan(offsets, lengths, max_seqlen_q=1, max_seqlen_k=16))
    batch = {"cu_seqlens_q": plan.cu_seqlens_q, "seq_lens": plan.seq_lens, "max_seqlen_q": 1, "plan": plan}
    batch["block_table"] = v.ids(4, num_seqs, 2, dtype=torch.int32)
    options = {"sinks": v.tensor(4)}, {"softcap": 5.0}, {"window_size": (3, 0)}, {"attention_chunk_size": 4}
    options = {}, *options, {"causal": False}
    return [p.paged_attention(v.heads[0], *v.caches, **batch, softmax_scale=v.eps, **options[v.option])]


_PLANS: dict[int, paged.AttentionPlan] = {}


def _route_tokens(v: Variant, p: Any) -> list[torch.Tensor]:
    bias = v.tensor(8, dtype=torch.float32).contiguous() if v.option else None
    return list(p.route_tokens(v.rows(8), 2, correction_bias=bias, routed_scaling_factor=v.eps))


def _route_and_align(v: Variant, p: Any) -> list[torch.Tensor]:
    bias = v.tensor(8, dtype=torch.float32).contiguous() if v.option else None
    routing = paged.Routing(2, correction_bias=bias, routed_scaling_factor=v.eps)
    weights, ids, aligned = p.route_and_align(v.rows(8), routing, 4)
    return [weights, ids, *aligned]


def _fused_moe(v: Variant, p: Any) -> list[torch.Tensor]:
    ids, weights = v.ids(4, v.num_tokens, 2, dtype=torch.int32), torch.rand(v.num_tokens, 2, device=DEVICE)
    tensors = v.rows(32), v.tensor(4, 32, 32), v.tensor(4, 32, 16)
    return [p.fused_moe(*tensors, weights, ids, activation="gelu" if v.option else "silu")]


OPERATIONS = (
    _rms_norm, _fused_add_rms_norm, _silu_and_mul, _rotary_embedding, _qk_norm_rope_and_cache, _reshape_and_cache,
    _greedy_argmax, _merge_attn_states, _paged_attention, _route_tokens, _route_and_align, _fused_moe,
)  # fmt: skip
LAYOUTS = ({}, {"num_tokens": 8}, {"dtype": torch.float16}, {"layout": "apart"}, {"layout": "late"})


class _BoundOperations:
    """`paged`, whose operations are bound once for each layout."""

    def __getattr__(self, name: str) -> Any:
        bound = Bound(getattr(paged, name), by=1 if name == "rotary_embedding" else 0)
        setattr(self, name, bound)
        return bound


@pytest.mark.parametrize("backend", LAUNCHED, indirect=True)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__.strip("_"))
def test_bound_gives_what_a_call_gives(operation: Callable[[Variant, Any], list[torch.Tensor]], backend: str) -> None:
    """Of several layouts in turns, the first again with other values; and with another option."""
    for option, layouts in ((0, [*LAYOUTS, LAYOUTS[0]]), (1, LAYOUTS[:1] * 2)):
        bound = _BoundOperations()
        for seed, fields in enumerate(layouts):
            results = []
            for namespace in (paged, bound):
                torch.manual_seed(seed)
                results.append(operation(Variant(option=option)._replace(**fields), namespace))
            assert all(map(torch.equal, *results)), fields


def test_bound_binds_once_a_layout_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    norm, weight, count = paged.rms_norm, torch.randn(8, device=DEVICE), 0

    def bind(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return norm.bind(*args, **kwargs)

    bound = Bound(norm)
    monkeypatch.setattr(bound, "operation", SimpleNamespace(bind=bind))
    for _ in range(3):
        for rows in (2, 3):
            bound(torch.randn(rows, 8, device=DEVICE), weight)
    assert count == 2
    monkeypatch.setattr("paged.kernels.core.operation._MOST_LAYOUTS", 4)
    for rows in range(9):
        bound(torch.randn(rows, 8, device=DEVICE), weight)
        assert len(bound._runs) <= 4
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    found = bound(x := torch.randn(8, 8, device=DEVICE), weight)
    assert torch.equal(found, norm(x, weight))


def test_a_plan_keeps_what_is_bound_to_it() -> None:
    """Another step's plan, of as many tokens, has work lists of its own, and the step a table of other strides."""
    attend, caches = Bound(paged.paged_attention), torch.randn(2, 4, 8, 2, 8, device=DEVICE).unbind()
    q, table = torch.randn(2, 4, 8, device=DEVICE), torch.tensor([[0, 1], [2, 3]], dtype=torch.int32, device=DEVICE)
    offsets = torch.arange(3, dtype=torch.int32, device=DEVICE)
    for lengths, columns in (([3, 16], 2), ([9, 1], 5)):
        seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        plan = paged.AttentionPlan(offsets, seq_lens, max_seqlen_q=1, max_seqlen_k=16)
        wide = torch.zeros(2, columns, dtype=torch.int32, device=DEVICE)
        wide[:, :2] = table
        batch = {"block_table": wide, "cu_seqlens_q": offsets, "seq_lens": seq_lens, "max_seqlen_q": 1}
        found = [attend(q, *caches, **batch, plan=plan) for _ in range(2)]
        expected = paged.paged_attention(q, *caches, **batch)
        assert all(torch.equal(each, expected) for each in found)
        assert [len(runs) for runs in plan.runs.values()] == [len(attend._runs)] == [1]
        reference = weakref.ref(plan)
        del plan
        assert reference() is None, "its workspace would wait for the collector"


@pytest.mark.parametrize("backend", LAUNCHED, indirect=True)
def test_bound_attention_follows_its_lengths(backend: str) -> None:
    """It takes the plan of any step, and binds once a plan; without a plan it takes the lengths of each call."""
    q, caches = torch.randn(1, 4, 8, device=DEVICE), torch.randn(2, 4, 8, 2, 8, device=DEVICE).unbind()
    offsets = torch.arange(2, dtype=torch.int32, device=DEVICE)
    table = torch.tensor([[1, 2]], dtype=torch.int32, device=DEVICE)
    bound = None
    for length in (3, 16):
        seq_lens = torch.tensor([length], dtype=torch.int32, device=DEVICE)
        plan = paged.AttentionPlan(offsets, seq_lens, max_seqlen_q=1, max_seqlen_k=16)
        batch = {"block_table": table, "cu_seqlens_q": offsets, "seq_lens": seq_lens, "max_seqlen_q": 1}
        expected = paged.paged_attention(q, *caches, **batch)
        if bound is None:
            bound = paged.paged_attention.bind(q, *caches, **batch, plan=plan)
        for _ in range(2):
            assert torch.equal(bound(q, *caches, **batch, plan=plan), expected)
            assert torch.equal(bound(q, *caches, **batch), expected)
        assert len(plan.runs) == 1
        assert torch.equal(paged.paged_attention(q, *caches, **batch, plan=plan), expected)
        assert len(plan.runs) == 1, "a plain call leaves nothing in its plan"


def test_faults_are_refused() -> None:
    x, weight = torch.randn(4, 8, device=DEVICE), torch.randn(8, device=DEVICE)
    for wrong in (weight[:4], weight.to("meta"), "weight"):
        with pytest.raises(paged.PagedError, match="weight"):
            paged.rms_norm(x, wrong)  # type: ignore[arg-type]
    for call in (paged.rms_norm, paged.rms_norm.bind):
        with pytest.raises(paged.UnsupportedError, match="gradients"):
            call(x.clone().requires_grad_(), weight)
    with pytest.raises(paged.InvalidInputError, match="eps"):
        paged.rms_norm(x, weight, True)
    with pytest.raises(paged.InvalidInputError, match="check_canaries takes a block table"):
        Bound(check_canaries)
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
    monkeypatch.setattr("paged.kernels.core.launch.TensorDescriptor", descriptor)
    kernel = _Kernel()
    launch = Launch(kernel, (3,), {"n": 7, "BLOCK": 16, "y_ptr": None}, boxes={"x_ptr": Box((4, 8), (8, 1), (2, 8))})
    tensors = [torch.zeros(4, 8) for _ in range(3)]
    for x in tensors:
        launch({"x_ptr": x})
    described = [run[1] for run in kernel.runs]
    assert all(each.base is x for each, x in zip(described, tensors, strict=True))
    assert {(*each.shape, *each.strides, *each.block_shape) for each in described} == {(4, 8, 8, 1, 2, 8)}
    assert not any(isinstance(kept, torch.Tensor) for _, _, fields in launch._descriptors for kept in fields.values())
