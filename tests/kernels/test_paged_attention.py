"""paged_attention against float64: every rule of paging that has bitten somebody, on both backends."""

from __future__ import annotations

import math

import pytest
import torch

from paged import InvalidInputError, UnsupportedError, paged_attention
from paged.kernels import reference
from paged.kernels.attention_plan import AttentionPlan
from tests.kernels.attention_problem import Problem, check, make
from tests.tolerance import assert_close, dtypes

MIXED = ((1, 1), (1, 15), (1, 16), (1, 17), (5, 18), (40, 40), (0, 9), (33, 70), (3, 3))

PROBLEMS = (
    Problem("mixed batch", MIXED),
    Problem("block size 8", MIXED, block_size=8),
    Problem("block size 24, three heads a group", ((1, 23), (1, 24), (9, 49)), heads=(3, 1), block_size=24),
    Problem("block size 64, head_dim 64", ((1, 130), (70, 70)), head_dim=64, block_size=64),
    Problem("one head a group", ((1, 40), (70, 90)), heads=(2, 2)),
    Problem("five heads a group", ((1, 40), (17, 20)), heads=(5, 1)),
    Problem("seven heads a group", ((2, 40), (17, 20)), heads=(14, 2)),
    Problem("head_dim 80", ((1, 33), (20, 20)), head_dim=80),
    Problem("head_dim 96", ((1, 33), (20, 20)), heads=(2, 1), head_dim=96),
    Problem("head_dim 256", ((1, 33), (5, 37)), heads=(2, 1), head_dim=256),
    Problem("head_dim 8", MIXED[:5], head_dim=8),
    Problem("split decodes", ((1, 1328), (1, 523), (4, 300)), heads=(2, 1)),
    Problem("a split chunk beside short ones", ((17, 2300), (1, 37)), heads=(4, 1)),
    Problem("left window", ((1, 60), (50, 50), (7, 90)), window_size=(16, -1)),
    Problem("left window of itself alone", ((1, 60), (20, 20)), window_size=(0, -1)),
    Problem("wide window", ((1, 200), (70, 200)), window_size=(64, -1)),
    Problem("two-sided window", ((1, 60), (50, 70)), causal=False, window_size=(9, 12)),
    Problem("split window", ((1, 1500), (2, 900)), heads=(2, 1), window_size=(1100, -1)),
    Problem("not causal", MIXED, causal=False),
    Problem("softcap", ((1, 60), (50, 50)), softcap=5.0),
    Problem("own scale", ((1, 60), (50, 50)), softmax_scale=0.7),
    Problem("queries longer than the keys", ((5, 3), (40, 10), (2, 0), (1, 0))),
    Problem("no sequence", (), padding_rows=3),
    Problem("nothing at all", ()),
    Problem("empty queries alone", ((0, 5), (0, 0)), padding_rows=2),
    Problem("padded rows", ((1, 20), (3, 3), (30, 30)), padding_rows=7),
    Problem("interleaved K and V", MIXED, layout="interleaved"),
    Problem("head-major blocks", MIXED, layout="head_major"),
    Problem("coverage", ((1, 2011), (1, 37), (25, 64)), heads=(1, 1), head_dim=64, coverage=True),
    *(
        Problem(f"mixed batch {dtype}", ((1, 17), (5, 18), (40, 40), (1, 700)), dtype=dtype, head_dim=64)
        for dtype in dtypes()
        if dtype != torch.float32
    ),
)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_matches_reference(problem: Problem, device: torch.device) -> None:
    check(problem, device)


@pytest.mark.usefixtures("backend")
def test_equal_keys_give_the_mean_of_the_values(device: torch.device) -> None:
    tensors = make(Problem("", ((1, 37),)), device)
    owned = tensors.block_table[0].long()
    tensors.k_cache[owned] = 1.0
    out = paged_attention(**vars(tensors), max_seqlen_q=1)
    values = tensors.v_cache[owned].flatten(0, 1)[:37]
    assert_close(out[0, ::2], values.double().mean(0))


@pytest.mark.usefixtures("backend")
def test_first_token_sees_itself_alone(device: torch.device) -> None:
    tensors = make(Problem("", ((6, 6),)), device)
    out = paged_attention(**vars(tensors), max_seqlen_q=6)
    assert_close(out[0, ::2], tensors.v_cache[tensors.block_table[0, 0].long(), 0].double())


@pytest.mark.usefixtures("backend")
def test_strided_query_and_output(device: torch.device) -> None:
    tensors = make(Problem("", ((3, 20), (20, 20))), device)
    wide = torch.randn(23, 9, 40, device=device)
    q, out = wide[:, 2:6, :32], torch.full((23, 8, 64), math.nan, device=device)[:, ::2, 8:40]
    arguments = {**vars(tensors), "q": q}
    paged_attention(**arguments, max_seqlen_q=20, out=out)
    assert_close(out, reference.paged_attention(**{name: t.cpu() for name, t in arguments.items()})[0])


@pytest.mark.usefixtures("backend")
def test_block_offsets_beyond_int32(device: torch.device) -> None:
    """Three blocks 2^30 elements apart: the last one's offset needs 64 bits. Only the pages touched take memory."""
    shape, stride = (3, 8, 1, 32), (2**30, 32, 32, 1)
    storage = torch.empty(2**31 + 8 * 32, dtype=torch.float16, device=device)
    cache = storage.as_strided(shape, stride)
    values = torch.randn(3, 8, 1, 32, device=device).half()
    cache.copy_(values)
    arguments = {
        "q": torch.randn(2, 2, 32, device=device).half(),
        "block_table": torch.tensor([[2, 1]], dtype=torch.int32, device=device),
        "cu_seqlens_q": torch.tensor([0, 2], dtype=torch.int32, device=device),
        "seq_lens": torch.tensor([14], dtype=torch.int32, device=device),
    }
    far = paged_attention(**arguments, k_cache=cache, v_cache=cache, max_seqlen_q=2)
    near = paged_attention(**arguments, k_cache=values, v_cache=values, max_seqlen_q=2)
    assert torch.equal(far, near)


def test_layers_share_a_plan(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_BACKEND", "triton")
    tensors = make(Problem("", MIXED), device)
    plan = AttentionPlan(tensors.cu_seqlens_q, tensors.seq_lens, max_seqlen_q=40, max_seqlen_k=70)
    first = paged_attention(**vars(tensors), max_seqlen_q=40, plan=plan)
    schedules = dict(plan._schedules)
    second = paged_attention(**vars(tensors), max_seqlen_q=40, plan=plan)
    assert torch.equal(first, second)
    assert plan._schedules == schedules
    paged_attention(**vars(tensors), max_seqlen_q=40, plan=plan, window_size=(8, -1))
    assert len(plan._schedules) == 2


def test_rejects_what_does_not_fit(device: torch.device) -> None:
    tensors = vars(make(Problem("", ((1, 20), (3, 3))), device))
    paged_attention(**tensors, max_seqlen_q=3)
    for name, changed, message in (
        ("q", tensors["q"][0], "q: shape"),
        ("q", tensors["q"].double(), "q: dtype"),
        ("q", tensors["q"][:, :3], "q: 3 heads, expected a multiple"),
        ("q", tensors["q"].transpose(1, 2).contiguous().transpose(1, 2), "q: last dimension"),
        ("k_cache", tensors["k_cache"].half(), "k_cache: dtype"),
        ("v_cache", tensors["v_cache"][:-1], "v_cache: shape"),
        ("block_table", tensors["block_table"].long(), "block_table: dtype"),
        ("block_table", tensors["block_table"][:1], "block_table: shape"),
        ("cu_seqlens_q", tensors["cu_seqlens_q"][:-1], "cu_seqlens_q: shape"),
        ("seq_lens", tensors["seq_lens"].to("meta"), "seq_lens: on meta"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            paged_attention(**{**tensors, name: changed}, max_seqlen_q=3)
    for name, value in (("max_seqlen_q", -1), ("window_size", (-2, 0)), ("softcap", -1.0), ("softcap", math.nan)):
        with pytest.raises(InvalidInputError, match=name):
            paged_attention(**{**tensors, "max_seqlen_q": 3, name: value})
    with pytest.raises(InvalidInputError, match="out: shape"):
        paged_attention(**tensors, max_seqlen_q=3, out=torch.empty(1, device=device))
    for name in ("sinks", "alibi_slopes", "k_scale", "v_scale"):
        with pytest.raises(UnsupportedError, match=name):
            paged_attention(**tensors, max_seqlen_q=3, **{name: torch.ones(4, device=device)})
