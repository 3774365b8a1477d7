"""FlashAttention's functions against the float64 reference, and what they refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from paged import InvalidInputError, UnsupportedError
from paged.bench.attention.problem import Problem, make
from paged.interop import flash_attn_varlen_func, flash_attn_with_kvcache
from paged.kernels.attention import reference as attention_reference
from paged.kernels.cache import reference as cache_reference
from paged.kernels.layers import reference as layers_reference
from tests.tolerance import assert_close

OPTIONS: list[dict[str, Any]] = [
    {"causal": True},
    {"causal": False, "softmax_scale": 0.3},
    {"causal": True, "window_size": (4, 2), "softcap": 5.0},
    {"causal": False, "window_size": [-7, 3]},
    {"causal": True, "s_aux": True},
    {"causal": True, "alibi_slopes": True},
]
HEADS = (4, 2)


def _theirs_and_ours(options: dict[str, Any], device: torch.device) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keywords of FlashAttention and of the reference."""
    theirs, ours = dict(options), dict(options)
    if "window_size" in options:
        left, right = options["window_size"]
        ours["window_size"] = max(left, -1), max(right, -1)
    if ours.pop("s_aux", None):
        theirs["s_aux"] = ours["sinks"] = torch.randn(HEADS[0], device=device)
    if ours.pop("alibi_slopes", None):
        ours["alibi_slopes"] = 0.5 ** torch.arange(1, HEADS[0] + 1, device=device)
        theirs["alibi_slopes"] = ours["alibi_slopes"].expand(2, -1)
    return theirs, ours


def _problem(device: torch.device) -> dict[str, torch.Tensor]:
    return vars(make(Problem("two", ((3, 20), (1, 9)), heads=HEADS, head_dim=16, block_size=8), device))


def _rows(cache: torch.Tensor, problem: dict[str, torch.Tensor], spare: int = 0) -> torch.Tensor:
    """The keys of all sequences one after the other, each followed by `spare` rows of NaN."""
    parts = []
    for blocks, length in zip(problem["block_table"].tolist(), problem["seq_lens"].tolist(), strict=True):
        used = blocks[: math.ceil(length / cache.shape[1])]
        rows = cache[used].flatten(0, 1)[:length]
        parts += [rows, rows.new_full((spare, *rows.shape[1:]), math.nan)]
    return torch.cat(parts)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("layout", ["paged", "packed", "packed, in part"])
def test_varlen(layout: str, options: dict[str, Any], backend: str, device: torch.device) -> None:
    problem = _problem(device)
    theirs, ours = _theirs_and_ours(options, device)
    want, want_lse = attention_reference.paged_attention(**problem, **ours)
    cu_seqlens_q, seq_lens = problem["cu_seqlens_q"], problem["seq_lens"]
    if layout == "paged":
        k, v = problem["k_cache"], problem["v_cache"]
        theirs |= {"block_table": problem["block_table"], "seqused_k": seq_lens, "max_seqlen_k": 20}
    else:
        spare = 0 if layout == "packed" else 2
        k, v = (_rows(problem[name], problem, spare) for name in ("k_cache", "v_cache"))
        starts = torch.nn.functional.pad((seq_lens + spare).cumsum(0, dtype=torch.int32), (1, 0))
        theirs |= {"cu_seqlens_k": starts, "max_seqlen_k": 20 + spare}
        theirs |= {"seqused_k": seq_lens} if spare else {}
    out = torch.full_like(problem["q"], math.nan)
    result, lse = flash_attn_varlen_func(
        problem["q"], k, v, cu_seqlens_q, max_seqlen_q=3, out=out, return_softmax_lse=True, num_splits=4, **theirs
    )
    assert result is out
    assert_close(result, want)
    assert_close(lse, want_lse)


def test_varlen_with_arguments_by_place(device: torch.device) -> None:
    """The order of FlashAttention 2: q, k, v, offsets, longest, dropout, scale, causal."""
    problem = _problem(device)
    k, v = (
        _rows(problem[name], problem).transpose(1, 2).contiguous().transpose(1, 2) for name in ("k_cache", "v_cache")
    )
    starts = torch.nn.functional.pad(problem["seq_lens"].cumsum(0, dtype=torch.int32), (1, 0))
    out = flash_attn_varlen_func(problem["q"], k, v, problem["cu_seqlens_q"], starts, 3, 20, 0.0, 0.3, True)
    assert isinstance(out, torch.Tensor)
    assert_close(out, attention_reference.paged_attention(**problem, softmax_scale=0.3)[0])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("is_paged", [True, False])
@pytest.mark.parametrize("rotary", [None, "interleaved", "halves"])
def test_with_kvcache(
    rotary: str | None, is_paged: bool, options: dict[str, Any], backend: str, device: torch.device
) -> None:
    """Two new tokens of two sequences, of 13 and 6 before; the cache gains them, rotated."""
    theirs, ours = _theirs_and_ours(options, device)
    batch, new, head_dim, block_size = 2, 2, 16, 8 if is_paged else 24
    q, k, v = (torch.randn(batch, new, heads, head_dim, device=device) for heads in (HEADS[0], HEADS[1], HEADS[1]))
    k_cache, v_cache = (torch.randn(7, block_size, HEADS[1], head_dim, device=device) for _ in range(2))
    table = torch.tensor([[6, 2, 0], [1, 4, 0]] if is_paged else [[3], [5]], dtype=torch.int32, device=device)
    before = torch.tensor([13, 6], dtype=torch.int32, device=device)
    positions = before.long()[:, None] + torch.arange(new, device=device)
    slots = (table.gather(1, positions // block_size).long() * block_size + positions % block_size).flatten()
    theirs |= {"block_table": table} if is_paged else {"cache_batch_idx": table[:, 0]}
    q_rows, k_rows, v_rows = (x.flatten(0, 1) for x in (q, k, v))
    if rotary:
        angles = torch.randn(30, 4, device=device)
        cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
        interleaved = rotary == "interleaved"
        theirs |= {"rotary_cos": cos_sin[:, :4], "rotary_sin": cos_sin[:, 4:], "rotary_interleaved": interleaved}
        in_order = options["causal"] or "window_size" in options
        of_q = positions if in_order else before.long()[:, None].expand(-1, new)
        q_rows = layers_reference.rotate(q_rows, of_q.flatten(), cos_sin, interleaved)
        k_rows = layers_reference.rotate(k_rows, positions.flatten(), cos_sin, interleaved)
    want_k, want_v = cache_reference.reshape_and_cache(k_rows.float(), v_rows, k_cache, v_cache, slots)
    want, want_lse = attention_reference.paged_attention(
        q_rows,
        want_k,
        want_v,
        block_table=table,
        cu_seqlens_q=torch.tensor([0, new, 2 * new]),
        seq_lens=before + new,
        **ours,
    )
    given = q.clone(), k.clone()
    result, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=before, return_softmax_lse=True, **theirs
    )
    assert_close(result, want.view(q.shape))
    assert_close(lse, want_lse.view(HEADS[0], batch, new).transpose(0, 1))
    assert_close(k_cache, want_k.double())
    assert_close(v_cache, want_v.double())
    assert torch.equal(q, given[0])
    assert torch.equal(k, given[1])


def test_with_kvcache_reads_only(device: torch.device) -> None:
    """One length for all, or the whole cache, and no new tokens."""
    q = torch.randn(3, 1, 4, 16, device=device)
    k_cache, v_cache = torch.randn(2, 3, 9, 2, 16, device=device).unbind(0)
    for cache_seqlens, length in ((5, 5), (None, 9)):
        want, _ = attention_reference.paged_attention(
            q.flatten(0, 1),
            k_cache,
            v_cache,
            block_table=torch.arange(3)[:, None],
            cu_seqlens_q=torch.arange(4),
            seq_lens=torch.full((3,), length),
        )
        out = torch.full_like(q, math.nan)
        result = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=cache_seqlens, causal=True, out=out)
        assert isinstance(result, torch.Tensor)
        assert result.data_ptr() == out.data_ptr()
        assert_close(result, want.view(q.shape))


def test_scales_of_an_8_bit_cache(device: torch.device) -> None:
    """One scale for each head, expanded over the sequences, or a row for each of them."""
    problem = _problem(device)
    caches = {name: problem[name].nan_to_num().to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
    k_scale, v_scale = torch.rand(2, 2, device=device) + 0.5
    arguments = {
        "cu_seqlens_q": problem["cu_seqlens_q"],
        "seqused_k": problem["seq_lens"],
        "block_table": problem["block_table"],
        "max_seqlen_q": 3,
        "causal": True,
    }
    out = flash_attn_varlen_func(
        problem["q"], *caches.values(), **arguments, k_descale=k_scale.expand(2, -1), v_descale=v_scale
    )
    assert isinstance(out, torch.Tensor)
    wide = {name: cache.float() for name, cache in caches.items()}
    assert_close(out, attention_reference.paged_attention(**{**problem, **wide}, k_scale=k_scale, v_scale=v_scale)[0])
    rows = torch.rand(2, 2, 2, device=device) + 0.5
    for k_rows, v_rows in (rows, rows[:, :1].repeat(1, 2, 1)):
        out = flash_attn_varlen_func(
            problem["q"], *caches.values(), **arguments, k_descale=k_rows, v_descale=v_rows, return_softmax_lse=True
        )
        for seq, mine in enumerate((slice(0, 3), slice(3, 4))):
            scales = {"k_scale": k_rows[seq], "v_scale": v_rows[seq]}
            want, want_lse = attention_reference.paged_attention(**{**problem, **wide}, **scales)
            assert_close(out[0][mine], want[mine])
            assert_close(out[1][:, mine], want_lse[:, mine])
    with pytest.raises(InvalidInputError, match=r"^v_descale: shape \[3, 2\]"):
        flash_attn_varlen_func(problem["q"], *caches.values(), **arguments, v_descale=torch.ones(3, 2, device=device))


def test_8_bit_queries(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of FlashAttention 3: the result is bfloat16, and a scale of q counts; of other queries there is none."""
    if device.type == "cpu":  # Triton's interpreter mishandles bfloat16
        monkeypatch.setenv("PAGED_BACKEND", "torch")
    problem = _problem(device)
    narrow = {name: problem[name].nan_to_num().to(torch.float8_e4m3fn) for name in ("q", "k_cache", "v_cache")}
    wide = {name: tensor.float() for name, tensor in narrow.items()}
    scales = torch.rand(2, 2, device=device) + 0.5
    arguments = {"seqused_k": problem["seq_lens"], "block_table": problem["block_table"], "max_seqlen_q": 3}
    arguments |= {
        "cu_seqlens_q": problem["cu_seqlens_q"],
        "q_descale": scales[:1].expand(2, -1),
        "k_descale": scales[1],
    }
    out = flash_attn_varlen_func(*narrow.values(), **arguments, causal=True)
    assert isinstance(out, torch.Tensor)
    assert out.dtype == torch.bfloat16
    assert_close(out, attention_reference.paged_attention(**{**problem, **wide}, k_scale=scales[0] * scales[1])[0])
    with pytest.raises(UnsupportedError, match=r"^q_descale: q is torch.float32"):
        flash_attn_varlen_func(*wide.values(), **arguments)


NEUTRAL = {
    "dropout_p": 0,
    "q_descale": None,
    "q_v": None,
    "cp_world_size": 1,
    "attention_chunk": 0,
    "mask_mod": None,
    "block_sparse_tensors": None,
    "window_size_left": -1,
    "no_such_argument": None,
    "nor_such": False,
    "nor_this": 0,
}
OTHERS = {
    "dropout_p": 0.1,
    "q_descale": torch.ones(1),
    "q_v": torch.ones(1),
    "cp_world_size": 2,
    "mask_mod": len,
    "window_size_left": 0,
    "window_size_right": torch.tensor(0),
    "rotary_cos": torch.ones(9, 4),
    "cache_leftpad": torch.zeros(2, dtype=torch.int32),
    "no_such_argument": 1,
    "nor_such": True,
}
HINTS = {
    "deterministic": True,
    "num_splits": 3,
    "scheduler_metadata": torch.ones(1),
    "fa_version": 3,
    "pack_gqa": False,
    "sm_margin": 8,
}


@pytest.mark.parametrize("name", OTHERS)
def test_varlen_refuses_by_name(name: str, device: torch.device) -> None:
    problem = _problem(device)
    arguments = {"block_table": problem["block_table"], "seqused_k": problem["seq_lens"], "max_seqlen_q": 3}
    call = problem["q"], problem["k_cache"], problem["v_cache"], problem["cu_seqlens_q"]
    flash_attn_varlen_func(*call, **arguments, **{**NEUTRAL, **HINTS})
    with pytest.raises(UnsupportedError, match=name):
        flash_attn_varlen_func(*call, **arguments, **{name: OTHERS[name]})


@pytest.mark.parametrize("missing", ["cu_seqlens_q", "max_seqlen_q", "cu_seqlens_k", "max_seqlen_k"])
def test_varlen_needs_lengths(missing: str, device: torch.device) -> None:
    starts = torch.tensor([0, 2, 5], dtype=torch.int32, device=device)
    arguments = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 3, "max_seqlen_k": 3}
    tensors = torch.randn(3, 5, 2, 16, device=device).unbind(0)
    flash_attn_varlen_func(*tensors, **arguments)
    del arguments[missing]
    with pytest.raises(InvalidInputError, match=missing):
        flash_attn_varlen_func(*tensors, **arguments)


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("v", {"v": None}, InvalidInputError),
        ("rotary_sin", {"rotary_sin": None}, InvalidInputError),
        ("rotary_cos", {"k": None, "v": None}, InvalidInputError),
        ("cache_seqlens", {"cache_seqlens": None}, InvalidInputError),
        ("q", {"q": torch.zeros(2, 4, 16)}, InvalidInputError),
        ("cache_leftpad", {"cache_leftpad": torch.zeros(2)}, UnsupportedError),
        ("cache_batch_idx", {"block_table": torch.zeros(2, 1, dtype=torch.int32)}, UnsupportedError),
        ("cu_seqlens_q", {"cu_seqlens_q": torch.zeros(3)}, UnsupportedError),
        ("cache_seqlens", {"cache_seqlens": torch.tensor([3, 9], dtype=torch.int32)}, InvalidInputError),
        ("cache_seqlens", {"cache_seqlens": 9}, InvalidInputError),
        ("cache_seqlens", {"cache_seqlens": -1}, InvalidInputError),
        ("cache_batch_idx", {"cache_batch_idx": torch.tensor([2, 3])}, InvalidInputError),
        ("cache_batch_idx", {"cache_batch_idx": torch.tensor([2.0, 1.0])}, InvalidInputError),
        ("rotary_cos", {"rotary_cos": torch.ones(3, 4), "rotary_sin": torch.ones(3, 4)}, InvalidInputError),
        ("s_aux", {"s_aux": torch.zeros(3)}, InvalidInputError),
        ("alibi_slopes", {"alibi_slopes": torch.zeros(2, 3)}, InvalidInputError),
        ("k_descale", {"k_descale": torch.rand(2, 2)}, UnsupportedError),
        ("softcap", {"softcap": math.nan}, InvalidInputError),
        ("softmax_scale", {"softmax_scale": "1"}, InvalidInputError),
        ("window_size", {"window_size": (1, 2, 3)}, InvalidInputError),
        ("out", {"out": torch.zeros(2, 4, 16)}, InvalidInputError),
        ("q", {"q": torch.zeros(2, 1, 4, 16, requires_grad=True)}, UnsupportedError),
        ("k", {"k": torch.zeros(2, 1, 3, 16)}, InvalidInputError),
        ("learnable_sink", {"s_aux": torch.zeros(4), "learnable_sink": torch.zeros(4)}, InvalidInputError),
    ],
)
def test_with_kvcache_refuses_by_name(name: str, change: dict[str, Any], error: type, device: torch.device) -> None:
    cache = torch.zeros(3, 9, 2, 16, device=device)
    arguments: dict[str, Any] = {
        "q": torch.zeros(2, 1, 4, 16, device=device),
        "k": torch.ones(2, 1, 2, 16, device=device),
        "v": torch.ones(2, 1, 2, 16, device=device),
        "rotary_cos": torch.ones(9, 4, device=device),
        "rotary_sin": torch.zeros(9, 4, device=device),
        "cache_seqlens": 3,
        "cache_batch_idx": torch.tensor([2, 0], device=device),
    }
    change = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in change.items()}
    if (
        device.type == "cuda"
        and error is InvalidInputError
        and name in ("cache_seqlens", "cache_batch_idx", "rotary_cos")
    ):
        pytest.skip("values on a device are not read")
    with pytest.raises(error, match=rf"^([a-z_]+, )*{name}(, [a-z_]+)*: "):
        flash_attn_with_kvcache(**{**arguments, "k_cache": cache, "v_cache": cache, **change})
    assert not cache.any()
    flash_attn_with_kvcache(**arguments, k_cache=cache, v_cache=cache)
    assert cache.any()
