"""paged_attention against float64: every rule of paging that other projects have broken, on all backends."""

import weakref
from dataclasses import replace
from itertools import cycle, permutations, product
from math import inf, nan
from typing import Any
from unittest import mock

import pytest
import torch

from paged import paged_attention
from paged.bench.attention import problems as attention_problems
from paged.bench.attention.problem import Problem, make
from paged.bench.verification.cases import CHECKS
from paged.kernels.attention import definition, without_triton
from paged.kernels.attention.plan import AttentionPlan
from tests.backends import BACKENDS
from tests.kernels.attention.problem import check
from tests.kernels.refusals import assert_refuses
from tests.tolerance import DTYPES, assert_close

_MIXED = Problem("", ((1, 17), (5, 18), (40, 40), (1, 700)), head_dim=64)
PROBLEMS = (
    *attention_problems.PROBLEMS,
    *(replace(_MIXED, name=f"mixed batch {dtype}", dtype=dtype) for dtype in DTYPES if dtype != torch.float32),
)


# What the interpreter takes long for, where others show the same rules, or planted faults that they are seen.
LATER = """a split chunk beside short ones|int8 heads of 512|large tree|boxes and a tree|block size 8|sinks|boxes of 128
values of 128, keys of 192|head-major blocks|chunks that no tile is a multiple of|block size 64, head_dim 64
interleaved K and V|values wider than keys|split chunks|wide window|not causal|boxes and chunks|int8 cache
boxes in blocks of 192|whole chunks|e5m2 cache|ALiBi of both sides|boxes of padded heads|boxes of unequal heads
mixed batch torch.float16|head_dim 360|boxes of e5m2|boxes and a window|scales|one head a group|softcap|left window
chunks, a window and a tree|boxes of fp8|boxes of int8|coverage|split window|sinks of split sequences|fp8 cache|ALiBi
causal or not by sequence|chunks|scales of each head|two-sided window|keys that are values|own scale|one head a group
int8 cache, all options|verify rows in a tile of 64|keys twice as wide as their value|boxes of keys that are values
seven heads a group|head_dim 512 in float32|padded rows|chosen blocks and a window|chosen blocks of int8
split chosen blocks|chosen keys|chosen blocks of 128|chosen blocks, not causal|chosen blocks of fp8
chosen blocks of 70 heads a group""".replace("\n", "|").split("|")


@pytest.mark.parametrize(
    "problem",
    [pytest.param(each, id=each.name, marks=[pytest.mark.thorough] * (each.name in LATER)) for each in PROBLEMS],
)
def test_kernels_match_reference(problem: Problem, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_BACKEND", "triton")
    check(problem, device)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_pytorch_matches_reference(problem: Problem, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fused attention too, which does not give the log-sum-exp, and cut into small groups."""
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    solved = check(problem, device)
    check(problem, device, return_lse=False, solved=solved)
    monkeypatch.setattr(definition, "_MAX_QUERIES", 7)
    monkeypatch.setattr(definition, "_MAX_NUMBERS", 1000)
    check(problem, device, solved=solved)
    check(problem, device, return_lse=False, solved=solved)


@pytest.mark.usefixtures("backend")
def test_equal_keys_give_the_mean_of_the_values_and_a_first_token_sees_itself_alone(device: torch.device) -> None:
    tensors = make(Problem("", ((1, 37), (6, 6))), device)
    first, second = (tensors.block_table[seq].clamp(max=len(tensors.k_cache) - 1).long() for seq in range(2))
    tensors.k_cache[first] = 1.0
    out = paged_attention(**vars(tensors), max_seqlen_q=6)
    assert_close(out[0, ::2], tensors.v_cache[first].flatten(0, 1)[:37].double().mean(0))
    assert_close(out[1, ::2], tensors.v_cache[second[0], 0].double())


@pytest.mark.usefixtures("backend")
def test_strided_query_and_output(device: torch.device) -> None:
    tensors = make(Problem("", ((3, 20), (20, 20))), device)
    q, out = torch.randn(23, 9, 40, device=device)[:, 2:6, :32], torch.full((23, 8, 64), nan, device=device)
    arguments, out = {**vars(tensors), "q": q}, out[:, ::2, 8:40]
    paged_attention(**arguments, max_seqlen_q=20, out=out)
    assert_close(out, definition.paged_attention(**{name: t.cpu() for name, t in arguments.items()})[0])


@pytest.mark.usefixtures("backend")
def test_block_offsets_beyond_int32(device: torch.device) -> None:
    """As `paged verify` checks them."""
    (check_offsets,) = (check for check in CHECKS if check.name == "paged_attention: block offsets beyond 2^31")
    for result in check_offsets.results(device, torch.float16):
        result.check()


@pytest.mark.usefixtures("backend")
def test_layers_share_a_plan(device: torch.device) -> None:
    """Whatever they differ in but the lengths."""
    tensors = vars(make(Problem("", ((1, 20), (5, 20), (20, 20))), device))
    plan = AttentionPlan(tensors["cu_seqlens_q"], tensors["seq_lens"], max_seqlen_q=20, max_seqlen_k=20)
    beside = torch.stack((tensors["k_cache"],) * 2, 1)[:, 0]
    for changes in (
        {},
        {"q": torch.randn_like(tensors["q"]), "v_cache": tensors["k_cache"]},
        {"window_size": (8, -1)},
        {"causal": torch.arange(3, device=device) < 2},
        {"block_table": tensors["block_table"].flip(0)},
        {"k_cache": beside},
    ):
        layer = {**tensors, **changes, "max_seqlen_q": 20}
        assert torch.equal(paged_attention(**layer, plan=plan), paged_attention(**layer))


def test_rejects_what_does_not_fit(device: torch.device) -> None:
    tensors = vars(make(Problem("", ((1, 20), (3, 3))), device))
    q, table, v_cache = tensors["q"], tensors["block_table"], tensors["v_cache"]
    good, flags = torch.ones(4, device=device), torch.ones(4, 3, dtype=torch.bool, device=device)
    blocks = torch.zeros(4, 2, 3, dtype=torch.int32, device=device)
    chosen = {"chosen_blocks": blocks, "chosen_block_size": 16}
    options = {"sinks": good, "alibi_slopes": good, "k_scale": good[:2], "v_scale": good[:1], "mask": flags}
    wrong_numbers = {"max_seqlen_q": (-1,), "window_size": ((-2, 0),), "softcap": (-1.0, nan)}
    wrong_numbers["attention_chunk_size"] = -1, 0.5
    assert_refuses(
        paged_attention,
        {**tensors, **options, **chosen, "causal": flags[0, :2], "max_seqlen_q": 3},
        ("q", q[:, :3], "q: 3 heads, expected a multiple"),
        ("q", q.transpose(1, 2).contiguous().transpose(1, 2), "q: last dimension"),
        ("k_cache", tensors["k_cache"].half(), "k_cache: dtype"),
        ("v_cache", v_cache[:-1], "v_cache: shape"),
        ("v_cache", v_cache.repeat(1, 1, 1, 17), "v_cache: v_head_dim 544, expected 1 to 512"),
        ("block_table", table.long(), "block_table: dtype"),
        ("cu_seqlens_q", tensors["cu_seqlens_q"][:-1], "cu_seqlens_q: shape"),
        ("seq_lens", tensors["seq_lens"].to("meta"), "seq_lens: on meta"),
        ("out", torch.empty(1, device=device), "out: shape"),
        ("sinks", good[:3], "sinks: shape"),
        ("k_scale", good[:3], "k_scale: shape"),
        ("mask", flags[:, :2], "mask: 2 columns, expected at least 3"),
        ("causal", flags[:1, :1], "causal: shape"),
        ("chosen_blocks", blocks[:3], "chosen_blocks: shape"),
        ("chosen_blocks", blocks.long(), "chosen_blocks: dtype"),
        ("chosen_blocks", blocks[..., :0], "chosen_blocks: 0 columns"),
        ("chosen_blocks", blocks.repeat(1, 1, 2)[..., ::2], "chosen_blocks: last dimension"),
        ("chosen_blocks", None, "chosen_block_size: 16, expected 0 without"),
        ("chosen_block_size", 0, "chosen_block_size: 0, expected 1 to 256 with"),
        ("chosen_block_size", 257, "chosen_block_size: 257"),
        *((name, value, name) for name, values in wrong_numbers.items() for value in values),
    )


@pytest.mark.parametrize("backend", [pytest.param("triton", marks=pytest.mark.thorough), *BACKENDS[1:]], indirect=True)
def test_deterministic_results_do_not_depend_on_the_batch(backend: str, device: torch.device) -> None:
    lengths = ((1, 3000), *(((1, 400),) * 9), (70, 200), (3, 1500))
    if backend != "triton":  # padding may show, where the library's order of sums depends on it
        lengths = ((1, 3000), (1, 1299), (1, 1263), (1, 177), (3, 50), (3, 31), (70, 200), (61, 181))
    tensors = make(Problem("", lengths, heads=(2, 1)), device)
    starts, caches = tensors.cu_seqlens_q.tolist(), (tensors.k_cache, tensors.v_cache)

    def differing_rows(**options: bool) -> int:
        whole = paged_attention(**vars(tensors), max_seqlen_q=70, **options)
        differing = 0
        for seq, (q_len, _) in enumerate(lengths):
            rows = slice(starts[seq], starts[seq + 1])
            offsets = tensors.cu_seqlens_q[seq : seq + 2] - starts[seq]
            ids = {"block_table": tensors.block_table[seq : seq + 1], "seq_lens": tensors.seq_lens[seq : seq + 1]}
            alone = paged_attention(
                tensors.q[rows], *caches, **ids, cu_seqlens_q=offsets, max_seqlen_q=q_len, **options
            )
            differing += int((alone != whole[rows]).flatten(1).any(1).sum())
        return differing

    assert differing_rows(deterministic=True) == 0
    if backend == "triton":
        assert differing_rows() > 0, "splits show without the option"
    if backend == "numba":
        assert differing_rows() == 0, "its kernels always are"


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("sinks", [None, -1e9])
def test_weights_of_large_scores_sum_to_one(sinks: float | None, device: torch.device) -> None:
    """Scores of -46,341, whose log-sum-exp float32 rounds by 2e-3: values of 1 must still give 1."""
    tensors = make(Problem("", ((1, 5),), heads=(1, 1), head_dim=128), device)
    for tensor, value in ((tensors.q, 64.0), (tensors.k_cache, -64.0), (tensors.v_cache, 1.0)):
        tensor.fill_(value)
    given = {"sinks": None if sinks is None else torch.full((1,), sinks, device=device), "return_lse": True}
    out, _ = paged_attention(**vars(tensors), **given, max_seqlen_q=1)
    assert_close(out, torch.ones(1, 1, 128).double())


def test_rows_that_no_tile_covers_are_cleared(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence longer than said, where lengths are not checked: it and those after it give 0 and -inf."""
    monkeypatch.setenv("PAGED_BACKEND", "triton")
    monkeypatch.setattr("paged.kernels.attention.launches.check_sequences", lambda _: None)
    tensors = vars(make(Problem("", ((2, 20), (1, 9), (40, 40), (1, 30)), padding_rows=3), device))
    expected, _ = definition.paged_attention(**{name: each.cpu() for name, each in tensors.items()})
    for bound, num_covered in ((1, 0), (2, 3), (39, 3), (40, 44), (10**9, 44)):
        out = torch.full_like(tensors["q"], nan)
        _, lse = paged_attention(**tensors, max_seqlen_q=bound, out=out, return_lse=True)
        assert_close(out[:num_covered], expected[:num_covered])
        assert bool((out[num_covered:] == 0).all())
        assert bool((lse[:, num_covered:] == -inf).all())
        assert bool(lse[:, :num_covered].isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("lengths", [((1, 37), (1, 60)), ((5, 40), (20, 20))], ids=str)
def test_interleaved_caches_give_what_separate_ones_give(
    lengths: tuple[tuple[int, int], ...], dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values of a row, of a position or of a block side by side, in every order of the dimensions."""
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    tensors = make(Problem("", lengths, dtype=dtype), device)
    options = {**vars(tensors), "max_seqlen_q": max(q_len for q_len, _ in lengths)}
    plan = AttentionPlan(tensors.cu_seqlens_q, tensors.seq_lens, max_seqlen_q=20, max_seqlen_k=60)
    wanted = paged_attention(**options)
    both = torch.stack([tensors.k_cache, tensors.v_cache])
    for order in permutations(range(4)):  # of keys and values, blocks, positions and heads
        laid_out = both.permute(*order, 4).contiguous().permute(*(order.index(axis) for axis in range(4)), 4)
        k_cache, v_cache = laid_out.unbind(0)
        for _ in range(2):  # the layers of a step share a plan, whatever each one's layout
            out = paged_attention(**{**options, "k_cache": k_cache, "v_cache": v_cache}, plan=plan)
            assert_close(out, wanted.double())
    assert len(plan.query_groups) == 1


def test_masks_of_a_long_prompt_are_not_kept(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """They grow with the square of its length, so each layer makes them, one group after another."""
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    monkeypatch.setattr(definition, "_MAX_NUMBERS", 1000)
    tensors = vars(make(Problem("", ((50, 60), (1, 9))), device))
    wanted = paged_attention(**tensors, max_seqlen_q=50)
    masks, alive = [], []
    make_group = definition._group

    def count_alive(*arguments: Any) -> definition.QueryGroup:
        group = make_group(*arguments)
        masks.append(weakref.ref(group.visible))
        alive.append(sum(mask() is not None for mask in masks))
        return group

    monkeypatch.setattr(definition, "_group", count_alive)
    monkeypatch.setattr(without_triton, "_MAX_KEPT", 50 * 60)
    plan = AttentionPlan(tensors["cu_seqlens_q"], tensors["seq_lens"], max_seqlen_q=50, max_seqlen_k=60)
    for _ in range(2):
        assert paged_attention(**tensors, max_seqlen_q=50, plan=plan).equal(wanted)
    assert plan.query_groups == {}
    assert len(alive) >= 16
    assert max(alive) <= 2  # one in use, one being made


@pytest.mark.parametrize(("return_lse", "num_chunks"), [(True, 8), (False, 4)])
def test_fused_attention_gathers_keys_less_often(
    return_lse: bool, num_chunks: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of 5 queries have as many scores as fit, for 8 heads; without scores, chunks of 10 have as many masks."""
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    monkeypatch.setattr(definition, "_MAX_NUMBERS", 5 * 60 * 8)
    tensors = vars(make(Problem("", ((40, 60),), heads=(8, 2)), device))
    with mock.patch.object(definition, "_numbers", wraps=definition._numbers) as gather:
        paged_attention(**tensors, max_seqlen_q=40, return_lse=return_lse)
    assert gather.call_count == 2 * num_chunks  # keys and values


_LENGTHS = (((1, 1328), (5, 18), (129, 463)), ((1, 523), (1, 37), (1, 2011)))
_HEADS = ((4, 4), (8, 2), (5, 1))
WINDOWS = (-1, 63, 127, 255)  # a window of 64 is the own position and 63 before it

# The matrix of lengths, heads and head sizes in vLLM's and FlashInfer's tests of paged attention:
# everything but products of what no code connects: block sizes take turns, windows and softcaps have one shape.
_SHAPES = [
    *product(_LENGTHS, _HEADS, (64, 80, 96, 128, 256, 512), (-1,), (0.0,), DTYPES),
    *product(_LENGTHS, _HEADS[1:2], (128,), WINDOWS, (0.0, 50.0), DTYPES),
]
MATRIX = [
    Problem("", *(lengths, heads, head_dim, None, block_size, dtype), window_size=(window, -1), softcap=softcap)
    for (lengths, heads, head_dim, window, softcap, dtype), block_size in zip(
        _SHAPES, cycle((16, 64, 128)), strict=False
    )
]
_SLICE = MATRIX[5::23]


@pytest.mark.thorough
@pytest.mark.parametrize("problem", MATRIX if torch.cuda.is_available() else _SLICE)
def test_matrix_matches_reference(problem: Problem, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice of it in the interpreter, all of it on a GPU."""
    monkeypatch.setenv("PAGED_BACKEND", "triton")
    check(problem, device)
