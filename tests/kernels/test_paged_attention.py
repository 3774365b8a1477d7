"""paged_attention against float64: every rule of paging that has bitten somebody, on both backends."""

from __future__ import annotations

import math

import pytest
import torch

from paged import InvalidInputError, paged_attention
from paged.kernels import reference
from paged.kernels.attention_plan import AttentionPlan
from tests.kernels.attention_problem import Problem, check, make
from tests.tolerance import assert_close, dtypes

FP8 = torch.float8_e4m3fn
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
    Problem("sinks", ((1, 60), (40, 50), (3, 2), (2, 0)), sinks=True, padding_rows=2),
    Problem("sinks of split sequences", ((1, 1328), (2, 523)), heads=(2, 1), sinks=True, window_size=(900, -1)),
    Problem("ALiBi", ((1, 60), (40, 50)), alibi=True),
    Problem("ALiBi of both sides", ((3, 60), (40, 50)), alibi=True, causal=False, softcap=4.0),
    Problem("causal or not by sequence", ((3, 30), (40, 50), (20, 20), (1, 9)), causal=(True, False, True, False)),
    Problem("tree", ((5, 37), (1, 20), (9, 9), (0, 4)), tree=True, padding_rows=2),
    Problem("tree in a tile of 32", ((5, 37), (8, 20)), tree=True, dtype=torch.float16),
    Problem("verify rows in a tile of 64", ((12, 137), (16, 20), (1, 90)), dtype=torch.float16, sinks=True),
    Problem("large tree", ((70, 130), (20, 40)), heads=(2, 2), tree=True, causal=False, window_size=(50, -1)),
    Problem("scales", ((1, 60), (40, 50)), scales="tensor"),
    Problem("scales of each head", ((1, 60), (40, 50)), scales="head"),
    Problem("fp8 cache", ((1, 60), (40, 50), (5, 18)), cache_dtype=FP8, scales="head"),
    Problem("fp8 cache of a float16 model", ((1, 60), (40, 50)), cache_dtype=FP8, dtype=torch.float16, scales="tensor"),
    # Blocks of 64 keys and more are fetched as boxes, in 16-bit types and fp8.
    Problem("boxes of 64", ((1, 600), (40, 50), (5, 18)), block_size=64, dtype=torch.float16),
    Problem("boxes of 128", ((1, 300), (70, 200), (3, 129)), block_size=128, dtype=torch.float16, head_dim=64),
    Problem("boxes in blocks of 192", ((1, 300), (70, 200)), block_size=192, dtype=torch.float16, layout="head_major"),
    Problem("boxes of padded heads", ((2, 300), (70, 200)), head_dim=80, block_size=128, dtype=torch.float16),
    Problem("boxes of fp8", ((1, 600), (70, 90)), cache_dtype=FP8, block_size=128, dtype=torch.float16, scales="head"),
    Problem("boxes and a window", ((1, 300), (70, 200)), block_size=128, dtype=torch.float16, window_size=(90, -1)),
    Problem("boxes and a tree", ((5, 300), (70, 200)), block_size=128, dtype=torch.float16, tree=True, heads=(8, 2)),
    Problem("boxes, interleaved K and V", MIXED, block_size=64, dtype=torch.float16, layout="interleaved"),
    Problem("deterministic", ((1, 2500), (1, 700), (40, 90)), heads=(2, 1), deterministic=True),
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


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_matches_reference(problem: Problem, device: torch.device, backend: str) -> None:
    check(problem, device)
    if backend == "torch":  # whose fused attention gives no log-sum-exp
        check(problem, device, return_lse=False)


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


def test_layers_share_batches_of_the_twin(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    tensors = make(Problem("", MIXED), device)
    plan = AttentionPlan(tensors.cu_seqlens_q, tensors.seq_lens, max_seqlen_q=40, max_seqlen_k=70)

    def layer(**options: object) -> None:
        """Another layer's tensors, and the same lengths."""
        changed = {**vars(tensors), "q": torch.randn_like(tensors.q), "k_cache": tensors.k_cache.clone(), **options}
        out = paged_attention(**changed, max_seqlen_q=40, plan=plan)
        assert torch.equal(out, paged_attention(**changed, max_seqlen_q=40))

    layer()
    [(batches, _)] = plan.batches.values()
    layer()
    assert [shared for shared, _ in plan.batches.values()] == [batches]
    layer(window_size=(8, -1))
    layer(causal=torch.arange(len(MIXED), device=device) < 3)
    layer(block_table=tensors.block_table.clone())
    assert len(plan.batches) == 4


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
    layer = {**vars(tensors), "q": tensors.q.clone().neg(), "k_cache": tensors.k_cache.clone()}
    assert torch.equal(paged_attention(**layer, max_seqlen_q=40, plan=plan), paged_attention(**layer, max_seqlen_q=40))


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
    good, flags = torch.ones(4, device=device), torch.ones(4, 3, dtype=torch.bool, device=device)
    options = {"sinks": good, "alibi_slopes": good, "k_scale": good[:2], "v_scale": good[:1], "mask": flags}
    options["causal"] = flags[0, :2]
    paged_attention(**tensors, max_seqlen_q=3, **options)
    for name, changed, message in (
        ("sinks", good[:3], "sinks: shape"),
        ("alibi_slopes", good.double(), "alibi_slopes: dtype"),
        ("k_scale", good[:3], "k_scale: shape"),
        ("v_scale", good[:1].half(), "v_scale: dtype"),
        ("mask", flags.int(), "mask: dtype"),
        ("mask", flags[:, :2], "mask: 2 columns, expected at least 3"),
        ("causal", flags[:1, :1], "causal: shape"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            paged_attention(**tensors, max_seqlen_q=3, **{**options, name: changed})


def test_deterministic_results_do_not_depend_on_the_batch(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGED_BACKEND", "triton")
    lengths = ((1, 3000), *(((1, 400),) * 9), (70, 200), (3, 1500))
    tensors = make(Problem("", lengths, heads=(2, 1)), device)
    starts = tensors.cu_seqlens_q.tolist()

    def differing_rows(**options: bool) -> int:
        whole = paged_attention(**vars(tensors), max_seqlen_q=70, **options)
        differing = 0
        for seq in range(len(lengths)):
            rows = slice(starts[seq], starts[seq + 1])
            alone = paged_attention(
                tensors.q[rows],
                tensors.k_cache,
                tensors.v_cache,
                block_table=tensors.block_table[seq : seq + 1],
                cu_seqlens_q=tensors.cu_seqlens_q[seq : seq + 2] - starts[seq],
                seq_lens=tensors.seq_lens[seq : seq + 1],
                max_seqlen_q=lengths[seq][0],
                **options,
            )
            differing += int((alone != whole[rows]).flatten(1).any(1).sum())
        return differing

    assert differing_rows(deterministic=True) == 0
    assert differing_rows() > 0
