"""paged_attention against float64: every rule of paging that other projects have broken, on both backends."""

from __future__ import annotations

import math

import pytest
import torch

from paged import InvalidInputError, paged_attention
from paged.bench.attention import problems as attention_problems
from paged.bench.attention.problem import Problem, make
from paged.kernels.attention import reference
from paged.kernels.attention.plan import AttentionPlan
from paged.kernels.attention.torch_ops import batches as attention_batches
from tests.kernels.attention.problem import check
from tests.tolerance import assert_close, dtypes

PROBLEMS = (
    *attention_problems.PROBLEMS,
    *(
        Problem(f"mixed batch {dtype}", ((1, 17), (5, 18), (40, 40), (1, 700)), dtype=dtype, head_dim=64)
        for dtype in dtypes()
        if dtype != torch.float32
    ),
)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_matches_reference(
    problem: Problem, device: torch.device, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(problem, device)
    if backend != "triton":
        check(problem, device, return_lse=False)  # neither fused attention nor numba's loops give the log-sum-exp
    if backend == "torch":
        for max_rows in (0, 1000):  # all keys gathered, and all read in place where that can be
            monkeypatch.setattr(attention_batches, "_MAX_ROWS_IN_PLACE", max_rows)
            check(problem, device)
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


def test_layers_share_batches_of_the_pytorch_implementation(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    tensors = make(Problem("", attention_problems.MIXED), device)
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
    layer(causal=torch.arange(len(attention_problems.MIXED), device=device) < 3)
    layer(block_table=tensors.block_table.clone())
    layer(k_cache=torch.stack((tensors.k_cache,) * 2, 1)[:, 0])
    assert len(plan.batches) == (5 if device.type == "cpu" else 4)


def test_layers_share_a_plan(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_BACKEND", "triton")
    tensors = make(Problem("", attention_problems.MIXED), device)
    plan = AttentionPlan(tensors.cu_seqlens_q, tensors.seq_lens, max_seqlen_q=40, max_seqlen_k=70)
    first = paged_attention(**vars(tensors), max_seqlen_q=40, plan=plan)
    schedules = dict(plan._schedules)
    second = paged_attention(**vars(tensors), max_seqlen_q=40, plan=plan)
    assert torch.equal(first, second)
    assert plan._schedules == schedules
    paged_attention(**vars(tensors), max_seqlen_q=40, plan=plan, window_size=(8, -1))
    assert len(plan._schedules) == 2
    for v_cache in (tensors.v_cache, tensors.k_cache, tensors.v_cache.neg()):  # whose second are the keys themselves
        layer = {**vars(tensors), "q": tensors.q.neg(), "v_cache": v_cache}
        shared = paged_attention(**layer, max_seqlen_q=40, plan=plan)
        assert torch.equal(shared, paged_attention(**layer, max_seqlen_q=40))


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
        ("v_cache", tensors["v_cache"].repeat(1, 1, 1, 17), "v_cache: v_head_dim 544, expected 1 to 512"),
        ("v_cache", tensors["v_cache"][..., :0], "v_cache: v_head_dim 0"),
        ("block_table", tensors["block_table"].long(), "block_table: dtype"),
        ("block_table", tensors["block_table"][:1], "block_table: shape"),
        ("cu_seqlens_q", tensors["cu_seqlens_q"][:-1], "cu_seqlens_q: shape"),
        ("seq_lens", tensors["seq_lens"].to("meta"), "seq_lens: on meta"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            paged_attention(**{**tensors, name: changed}, max_seqlen_q=3)
    for name, value in (("max_seqlen_q", -1), ("window_size", (-2, 0)), ("softcap", -1.0), ("softcap", math.nan),
        ("attention_chunk_size", -1), ("attention_chunk_size", 0.5)):  # fmt: skip
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


def test_deterministic_results_do_not_depend_on_the_batch(backend: str, device: torch.device) -> None:
    lengths = ((1, 3000), *(((1, 400),) * 9), (70, 200), (3, 1500))
    if backend != "triton":  # where it is padding that would show
        lengths = ((1, 299), (1, 263), (1, 177), (3, 50), (3, 31), (70, 200), (61, 181))
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
    assert (differing_rows() > 0) == (backend != "numba")  # its loops always are


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("sinks", [None, -1e9])
def test_weights_of_large_scores_sum_to_one(sinks: float | None, device: torch.device) -> None:
    """Scores of -46,341, whose log-sum-exp float32 rounds by 2e-3: values of 1 must still give 1."""
    q, cache = torch.full((1, 1, 128), 64.0, device=device), torch.full((1, 8, 1, 128), -64.0, device=device)
    int32 = {"dtype": torch.int32, "device": device}
    out, _ = paged_attention(
        q,
        cache,
        torch.ones_like(cache),
        block_table=torch.zeros(1, 1, **int32),
        cu_seqlens_q=torch.tensor([0, 1], **int32),
        seq_lens=torch.tensor([5], **int32),
        max_seqlen_q=1,
        sinks=None if sinks is None else torch.full((1,), sinks, device=device),
        return_lse=True,
    )
    assert_close(out, torch.ones(1, 1, 128).double())


def test_rows_that_no_tile_covers_are_cleared(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence longer than said, where lengths are not checked: it and those after it give 0 and -inf."""
    monkeypatch.setenv("PAGED_BACKEND", "triton")
    monkeypatch.setattr("paged.kernels.attention.paged_attention.check_sequences", lambda _: None)
    lengths = ((2, 20), (1, 9), (70, 70), (1, 30))
    tensors = vars(make(Problem("", lengths, padding_rows=3), device))
    expected, _ = reference.paged_attention(**{name: each.cpu() for name, each in tensors.items()})
    for bound, num_covered in ((1, 0), (2, 3), (69, 3), (70, 74), (10**9, 74)):
        out = torch.full_like(tensors["q"], math.nan)
        _, lse = paged_attention(**tensors, max_seqlen_q=bound, out=out, return_lse=True)
        assert_close(out[:num_covered], expected[:num_covered])
        assert bool((out[num_covered:] == 0).all())
        assert bool((lse[:, num_covered:] == -math.inf).all())
        assert bool(lse[:, :num_covered].isfinite().all())
