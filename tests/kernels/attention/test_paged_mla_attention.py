"""paged_mla_attention against float64: `paged_attention`'s rules of paging, and those of latents."""

from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
import torch

from paged import AttentionPlan, paged_attention, paged_mla_attention
from paged.bench.mla.problem import PROBLEMS, Problem, make
from paged.bench.problems.arguments import on_cpu
from paged.kernels.attention import latent_definition
from tests.kernels.attention.latent_problem import check
from tests.kernels.refusals import assert_refuses
from tests.tolerance import DTYPES, assert_close

_MIXED = Problem("", ((1, 17), (5, 18), (40, 40), (1, 700)))
ALL = (
    *PROBLEMS,
    *(replace(_MIXED, name=f"mixed batch {dtype}", dtype=dtype) for dtype in DTYPES if dtype != torch.float32),
    Problem("packed in float16", ((3, 40),), sizes=(512, 64), form="packed", dtype=torch.float16),
    Problem("nvfp4 in bfloat16", ((3, 40),), sizes=(512, 64), form="nvfp4", dtype=torch.bfloat16),
    Problem("e4m3 in float16, chosen", ((3, 40),), form="e4m3", dtype=torch.float16, chosen=20),
    Problem("64 verify rows", ((4, 90), (70, 70)), heads=16, block_size=64),
)
# What planted faults or the models' tests show too.
LATER = {
    *("mixed batch", "mixed batch torch.float16", "split", "split chosen keys", "16 heads", "128 heads", "one head"),
    *(
        "5 heads, no rotation, blocks of 1",
        "window on both sides",
        "sinks, not causal",
        "packed, chosen",
        "packed in float16",
        "nvfp4, chosen",
        "nvfp4, window",
    ),
    *("64 verify rows", "e4m3 in float16, chosen"),
}

# The interpreter takes 1 to 4 s for these.
INTERPRETED_LATER = pytest.mark.parametrize(
    "backend", ["torch", pytest.param("triton", marks=pytest.mark.thorough)], indirect=True
)


@pytest.mark.parametrize(
    "problem", [pytest.param(each, id=each.name, marks=[pytest.mark.thorough] * (each.name in LATER)) for each in ALL]
)
def test_kernels_match_reference(problem: Problem, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_BACKEND", "triton")
    check(problem, device)


@pytest.mark.parametrize("problem", ALL, ids=lambda problem: problem.name)
def test_pytorch_matches_reference(problem: Problem, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    check(problem, device)


@pytest.mark.usefixtures("backend")
@INTERPRETED_LATER
def test_is_paged_attention_over_one_head_whose_keys_begin_with_their_values(device: torch.device) -> None:
    """And choosing every key changes nothing."""
    given = make(Problem("", ((1, 30), (3, 20)), heads=3), device)
    cache, size = given["kv_cache"].unsqueeze(2), given["v_head_dim"]
    shared = {name: given[name] for name in ("block_table", "cu_seqlens_q", "seq_lens", "softmax_scale")}
    dense = paged_mla_attention(**given, max_seqlen_q=3)
    assert_close(dense, paged_attention(given["q"], cache, cache[..., :size], **shared, max_seqlen_q=3).double())
    every = torch.arange(32, dtype=torch.int32, device=device).expand(4, -1)
    assert_close(paged_mla_attention(**given, indices=every, max_seqlen_q=3), dense.double())


@pytest.mark.usefixtures("backend")
def test_strides_and_offsets_beyond_int32(device: torch.device) -> None:
    """Three blocks 2^30 elements apart, and queries and outputs inside of larger tensors."""
    storage = torch.empty(2**31 + 8 * 80, dtype=torch.float16, device=device)
    cache = storage.as_strided((3, 8, 80), (2**30, 80, 1))
    values = torch.randn(3, 8, 80, device=device).half()
    cache.copy_(values)
    ids = {"block_table": [[2, 1]], "cu_seqlens_q": [0, 2], "seq_lens": [14]}
    given: dict[str, Any] = {name: torch.tensor(x, dtype=torch.int32, device=device) for name, x in ids.items()}
    given |= {"v_head_dim": 64, "softmax_scale": 0.1, "max_seqlen_q": 2}
    q = torch.randn(2, 6, 100, device=device).half()[:, ::2, 8:88]
    out = torch.full((2, 6, 80), nan, device=device, dtype=torch.float16)[:, ::2, 8:72]
    far = paged_mla_attention(q, cache, **given, out=out)
    assert far is out
    assert_close(out, paged_mla_attention(q.contiguous(), values, **given).double())


@pytest.mark.usefixtures("backend")
def test_layers_share_a_plan(device: torch.device) -> None:
    given = make(Problem("", ((1, 20), (2, 20))), device) | {"max_seqlen_q": 2}
    plan = AttentionPlan(given["cu_seqlens_q"], given["seq_lens"], max_seqlen_q=2, max_seqlen_k=20)
    chosen = torch.randint(-1, 20, (3, 9), dtype=torch.int32, device=device)
    for changes in ({}, {"indices": chosen.flip(1)[:, :7], "causal": False}):
        layer = given | changes
        assert torch.equal(paged_mla_attention(**layer, plan=plan), paged_mla_attention(**layer))


@pytest.mark.usefixtures("backend")
def test_a_bound_call_takes_keys_that_a_later_step_chooses(device: torch.device) -> None:
    arguments = make(Problem("", ((2, 20),), chosen=5), device) | {"max_seqlen_q": 2}
    bound = paged_mla_attention.bind(**arguments | {"indices": None})
    assert torch.equal(bound(**arguments), paged_mla_attention(**arguments))


@pytest.mark.usefixtures("backend")
@INTERPRETED_LATER
@pytest.mark.parametrize("chosen", [0, 400])
def test_deterministic_results_do_not_depend_on_the_batch(chosen: int, device: torch.device) -> None:
    lengths = ((1, 600), *(((1, 50),) * 2), (2, 300))
    given = make(Problem("", lengths, chosen=chosen), device) | {"deterministic": True}
    starts, whole = given["cu_seqlens_q"].tolist(), paged_mla_attention(**given, max_seqlen_q=3)
    for seq in (0, 3):
        rows = slice(starts[seq], starts[seq + 1])
        own = {name: given[name][seq : seq + 1] for name in ("block_table", "seq_lens")}
        own |= {name: given[name][rows] for name in ("q", "indices") if name in given}
        own["cu_seqlens_q"] = given["cu_seqlens_q"][seq : seq + 2] - starts[seq]
        assert torch.equal(paged_mla_attention(**given | own, max_seqlen_q=3), whole[rows])


def test_rows_that_no_tile_covers_are_cleared(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence longer than said, where lengths are not checked: it and those after it give 0 and -inf."""
    monkeypatch.setenv("PAGED_BACKEND", "triton")
    monkeypatch.setattr("paged.kernels.attention.launches.check_sequences", lambda _: None)
    given = make(Problem("", ((2, 20), (20, 20), (1, 30)), padding_rows=3), device)
    expected, _ = latent_definition.paged_mla_attention(**on_cpu(given))
    for bound, num_covered in ((1, 0), (2, 2), (20, 23)):
        out = torch.full((26, 2, 64), nan, device=device)
        _, lse = paged_mla_attention(**given, max_seqlen_q=bound, out=out, return_lse=True)
        assert_close(out[:num_covered], expected[:num_covered])
        assert bool((out[num_covered:] == 0).all())
        assert bool((lse[:, num_covered:] == -inf).all())


@pytest.mark.usefixtures("backend")
def test_no_sequences_and_no_chosen_keys(device: torch.device) -> None:
    given = make(Problem("", ((1, 20),)), device)
    none: dict[str, Any] = {"block_table": given["block_table"][:0], "seq_lens": given["seq_lens"][:0]}
    none["cu_seqlens_q"] = given["cu_seqlens_q"][:1]
    for changes in (none, none | {"indices": torch.zeros(1, 3, dtype=torch.int32, device=device)}):
        assert not paged_mla_attention(**given | changes, max_seqlen_q=1).any()
    nothing = torch.full((1, 3), -1, dtype=torch.int32, device=device)
    assert not paged_mla_attention(**given, indices=nothing, max_seqlen_q=1).any()


def test_rejects_what_does_not_fit(device: torch.device) -> None:
    given = make(Problem("", ((1, 20), (3, 3)), heads=4), device)
    cache, ints = given["kv_cache"], torch.zeros(4, 3, dtype=torch.int32, device=device)
    options = {"sinks": torch.ones(4, device=device), "indices": ints}
    packed = torch.zeros(3, 4, 656, dtype=torch.uint8, device=device)
    assert_refuses(
        paged_mla_attention,
        {**given, **options, "max_seqlen_q": 3},
        ("q", given["q"][..., :64], "q: shape"),
        ("q", given["q"].transpose(1, 2).contiguous().transpose(1, 2), "q: last dimension"),
        ("kv_cache", cache.half(), "kv_cache: dtype"),
        ("kv_cache", cache[..., :70], "kv_cache: 70 numbers a token"),
        ("kv_cache", cache[:, :0], "kv_cache: block_size 0"),
        ("kv_cache", packed, "kv_cache: 656 bytes a token and v_head_dim 64, expected 656 or 352 and 512"),
        ("v_head_dim", 40, "v_head_dim: 40, expected a multiple of 16"),
        ("k_scale", torch.ones(1, device=device), "k_scale: given, expected None"),
        ("sinks", torch.ones(3, device=device), "sinks: shape"),
        ("indices", ints.long(), "indices: dtype"),
        ("indices", ints[:3], "indices: shape"),
        ("indices", ints[:, :0], "indices: 0 columns"),
        ("block_table", given["block_table"].long(), "block_table: dtype"),
        ("out", torch.empty(1, device=device), "out: shape"),
        ("plan", 1, "plan: 1, expected an AttentionPlan"),
        ("window_size", (3, -1), r"window_size: \(3, -1\) with indices"),
        ("softmax_scale", nan, "softmax_scale"),
    )
