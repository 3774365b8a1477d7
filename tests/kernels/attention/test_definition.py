"""The definitions' products of many queries against loops over rows and heads, both in float64, on drawn problems."""

import math
import random
from typing import Any

import pytest
import torch

from paged.bench.attention import problem as attention_problem
from paged.bench.mla import problem as latent_problem
from paged.bench.problems.arguments import without_how
from paged.kernels.attention import definition, latent_definition
from tests.kernels.attention import loops
from tests.tolerance import assert_within

CPU = torch.device("cpu")
Results = tuple[torch.Tensor, torch.Tensor]


def _lengths(draw: random.Random) -> tuple[tuple[int, int], ...]:
    """Decode steps, verify rows, chunks, prompts, no queries, no keys, and more queries than keys."""
    kinds = {
        "decode": lambda: (1, draw.randrange(1, 40)),
        "verify": lambda: (draw.randrange(2, 5), draw.randrange(5, 30)),
        "prompt": lambda: (length := draw.randrange(1, 9), length),
        "no queries": lambda: (0, draw.randrange(5)),
        "no keys": lambda: (draw.randrange(3), 0),
        "more queries than keys": lambda: (draw.randrange(3, 6), draw.randrange(3)),
    }
    names = draw.choices(list(kinds), weights=(6, 3, 3, 1, 1, 1), k=draw.randrange(0, 4))
    return tuple(kinds[name]() for name in names)


def attention_call(seed: int) -> dict[str, Any]:
    """Return the arguments of a drawn `paged_attention`, in every form of caches and with every option."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    lengths = _lengths(draw)
    num_kv_heads, head_dim = draw.choice((1, 2)), draw.choice((1, 3, 8))
    cache_dtype = draw.choice((None, None, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8))
    layout = draw.choice(("separate", "interleaved", "head_major", "shared"))
    causal: bool | tuple[bool, ...] = draw.random() < 0.6
    if lengths and draw.random() < 0.2:
        causal = tuple(draw.random() < 0.5 for _ in lengths)
    problem = attention_problem.Problem(
        "",
        lengths,
        heads=(num_kv_heads * draw.choice((1, 3)), num_kv_heads),
        head_dim=head_dim,
        v_head_dim=None if layout == "separate" else draw.randrange(1, head_dim + 1),
        block_size=draw.choice((1, 3, 16)),
        dtype=draw.choice((torch.float32, torch.float16, torch.bfloat16)),
        causal=causal,
        window_size=(draw.choice((-1, -1, 0, 5)), draw.choice((-1, -1, 0, 4))),
        chunk_size=draw.choice((0, 0, 0, 1, 7)),
        softcap=draw.choice((0.0, 0.0, 2.0)),
        softmax_scale=draw.choice((None, 0.0, 1.5)),
        padding_rows=draw.randrange(2),
        layout=layout,
        sinks=draw.random() < 0.3,
        alibi=draw.random() < 0.3,
        cache_dtype=cache_dtype,
        scales="" if cache_dtype in (None, torch.int8) else draw.choice(("", "tensor", "head")),
        tree=bool(lengths) and draw.random() < 0.3,
        chosen=draw.choice(((0, 0), (0, 0), (1, 5), (3, 2), (16, 1))),
    )
    return without_how(attention_problem.call_of(problem, CPU))


def latent_call(seed: int) -> dict[str, Any]:
    """Return the arguments of a drawn `paged_mla_attention`, in every form of its cache."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    form = draw.choice(("", "", "e4m3", "packed"))
    chosen = draw.choice((0, 0, 2, 9))
    window_size = (-1, -1)
    if not chosen:
        window_size = draw.choice(((-1, -1), (3, -1), (0, 2), (-1, 1)))
    problem = latent_problem.Problem(
        "",
        _lengths(draw),
        heads=draw.choice((1, 3)),
        sizes=(512, 64) if form == "packed" else draw.choice(((16, 0), (16, 16))),
        block_size=draw.choice((1, 3, 16)),
        dtype=draw.choice((torch.float32, torch.float16, torch.bfloat16)),
        form=form,
        chosen=chosen,
        causal=draw.random() < 0.7,
        window_size=window_size,
        sinks=draw.random() < 0.3,
        padding_rows=draw.randrange(2),
    )
    return latent_problem.make(problem, CPU)


def index_call(seed: int) -> dict[str, Any]:
    """Return the arguments of a drawn `choose_keys`; its queries come after a key."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    lengths = tuple((queries, max(queries, keys)) for queries, keys in _lengths(draw))
    dtype = draw.choice((torch.float32, torch.float16, torch.bfloat16))
    block_size = draw.choice((1, 3, 16))
    problem = attention_problem.Problem("", lengths, (draw.choice((1, 5)), 1), 16, None, block_size, dtype)
    return {
        **latent_problem.index_problem(problem, CPU, is_packed=draw.random() < 0.5),
        "top_k": draw.choice((1, 4, 100)),
    }


def states(seed: int) -> tuple[torch.Tensor, ...]:
    """Return two attention states with empty sides that hold NaN, and sides far apart."""
    torch.manual_seed(seed)
    out_a, out_b = torch.randn(2, 6, 3, 4).unbind()
    lse_a, lse_b = (torch.randn(2, 3, 6) * 10.0 ** torch.randint(4, (2, 3, 6))).unbind()
    for out, lse in ((out_a, lse_a), (out_b, lse_b)):
        is_empty = torch.rand(3, 6) < 0.3
        lse[is_empty] = torch.where(torch.rand(3, 6) < 0.5, math.inf, -math.inf)[is_empty]
        out[is_empty.T] = math.nan
    return out_a, lse_a, out_b, lse_b


def _assert_same(got: Results, want: Results) -> None:
    for result, expected in zip(got, want, strict=True):
        assert result.dtype == torch.float64
        assert_within(result, expected, 1e-12 * expected[expected.isfinite()].abs().clamp(min=1).sum())


@pytest.mark.parametrize("seed", range(120))
def test_attention(seed: int) -> None:
    arguments = attention_call(seed)
    _assert_same(definition.paged_attention(**arguments), loops.paged_attention(**arguments))


@pytest.mark.parametrize("seed", range(40))
def test_latents(seed: int) -> None:
    arguments = latent_call(seed)
    _assert_same(latent_definition.paged_mla_attention(**arguments), loops.paged_mla_attention(**arguments))


@pytest.mark.parametrize("seed", range(40))
def test_chosen_keys(seed: int) -> None:
    """Keys of equal scores are as good as each other, so scores are compared."""
    arguments = index_call(seed)
    top_k = arguments.pop("top_k")
    indices = latent_definition.choose_keys(**arguments, top_k=top_k)
    for row, scores in zip(indices, loops.index_scores(**arguments), strict=True):
        chosen = row[row >= 0].tolist()
        count = min(len(scores), len(row))
        assert row.tolist() == [-1] * (len(row) - count) + sorted({*chosen})
        best = scores.sort(descending=True).values[:count]
        assert_within(scores[chosen].sort(descending=True).values, best, 1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_merged_states(seed: int) -> None:
    _assert_same(definition.merge_attn_states(*states(seed)), loops.merge_attn_states(*states(seed)))
