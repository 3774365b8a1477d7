"""FlashAttention's functions of each version: the order of their arguments, what they return, and packed inputs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paged import InvalidInputError, UnsupportedError
from paged.interop import flash_attention, flash_attention_3, flash_attention_4
from paged.kernels.attention import reference
from tests.tolerance import assert_close

_TAIL_2 = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"
_PACKED = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
_TAIL_3 = "window_size attention_chunk softcap num_splits pack_gqa deterministic sm_margin return_attn_probs"
_DESCALE = "q_descale k_descale v_descale"
_TAIL_4 = "window_size learnable_sink softcap num_splits pack_gqa deterministic score_mod score_mod_bwd mask_mod"
# As they stand in flash_attn 2.8, in its folders hopper (3) and flash_attn/cute (4).
ORDERS = [
    (flash_attention.flash_attn_func, f"q k v {_TAIL_2}"),
    (flash_attention.flash_attn_kvpacked_func, f"q kv {_TAIL_2}"),
    (flash_attention.flash_attn_qkvpacked_func, f"qkv {_TAIL_2}"),
    (flash_attention.flash_attn_varlen_func, f"q k v {_PACKED} {_TAIL_2} block_table"),
    (flash_attention.flash_attn_varlen_kvpacked_func, f"q kv {_PACKED} {_TAIL_2}"),
    (flash_attention.flash_attn_varlen_qkvpacked_func, f"qkv cu_seqlens max_seqlen {_TAIL_2}"),
    (
        flash_attention.flash_attn_with_kvcache,
        "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad block_table "
        "softmax_scale causal window_size softcap rotary_interleaved alibi_slopes num_splits return_softmax_lse",
    ),
    (flash_attention_3.flash_attn_func, f"q k v softmax_scale causal qv {_DESCALE} {_TAIL_3}"),
    (
        flash_attention_3.flash_attn_qkvpacked_func,
        f"qkv softmax_scale causal {_DESCALE} window_size attention_chunk softcap deterministic num_heads_q sm_margin "
        "return_attn_probs",
    ),
    (
        flash_attention_3.flash_attn_varlen_func,
        f"q k v {_PACKED} seqused_q seqused_k softmax_scale causal qv {_DESCALE} {_TAIL_3}",
    ),
    (
        flash_attention_3.flash_attn_with_kvcache,
        "q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad page_table "
        f"cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens {_DESCALE} softmax_scale causal window_size "
        "attention_chunk softcap rotary_interleaved scheduler_metadata num_splits pack_gqa sm_margin "
        "return_softmax_lse",
    ),
    (flash_attention_4.flash_attn_func, f"q k v qv gather_kv_indices softmax_scale causal {_TAIL_4}"),
    (
        flash_attention_4.flash_attn_varlen_func,
        f"q k v qv {_PACKED} min_seqlen_k seqused_q seqused_k gather_kv_indices page_table softmax_scale causal "
        f"{_TAIL_4}",
    ),
]


@pytest.mark.parametrize(("function", "order"), ORDERS, ids=lambda one: getattr(one, "__module__", "")[-1:])
def test_arguments_stand_in_the_order_of_their_version(function: Callable[..., Any], order: str) -> None:
    names = list(inspect.signature(function).parameters)
    assert names[: len(order.split())] == order.split()


def _tensors(device: torch.device) -> tuple[torch.Tensor, ...]:
    """q, k and v of two sequences of 3 and 5 tokens, their offsets, and the result and log-sum-exp of a causal call."""
    q, k, v = (torch.randn(8, heads, 16, device=device) for heads in (4, 2, 2))
    offsets = torch.tensor([0, 3, 8], dtype=torch.int32, device=device)
    table = torch.tensor([[0, 1, 2, 0, 0], [3, 4, 5, 6, 7]])
    out, lse = reference.paged_attention(
        q, k[:, None], v[:, None], block_table=table, cu_seqlens_q=offsets, seq_lens=offsets.diff()
    )
    return q, k, v, offsets, out, lse


def test_each_version_returns_what_it_does(device: torch.device) -> None:
    q, k, v, offsets, want, want_lse = _tensors(device)
    packed = q, k, v, offsets, offsets, 5, 5
    second = flash_attention.flash_attn_varlen_func(*packed, 0.0, None, True, return_attn_probs=True)
    third = flash_attention_3.flash_attn_varlen_func(*packed, None, None, None, True, return_attn_probs=True)
    fourth = flash_attention_4.flash_attn_varlen_func(q, k, v, None, *packed[3:], causal=True, return_lse=True)
    assert [len(second), len(third), len(fourth)] == [3, 2, 2]
    assert second[2:] == (None,)
    for result in (second, third, fourth):
        assert_close(result[0], want)
        assert_close(result[1], want_lse)
    plain = flash_attention_4.flash_attn_varlen_func(q, k, v, None, *packed[3:], causal=True)
    assert plain[1] is None
    assert isinstance(flash_attention.flash_attn_varlen_func(*packed), torch.Tensor)
    assert isinstance(flash_attention_3.flash_attn_varlen_func(*packed), torch.Tensor)
    cached = q[:2, None], k[None], v[None]
    cached = cached[0], *(x.expand(2, -1, -1, -1) for x in cached[1:])
    assert len(flash_attention.flash_attn_with_kvcache(*cached, return_softmax_lse=True)) == 2
    assert len(flash_attention_3.flash_attn_with_kvcache(*cached, return_softmax_lse=True)) == 4


def test_values_of_another_size_and_chunks(device: torch.device) -> None:
    """Packed, padded behind a left padding, and appended to a cache; chunks by the name of version 3."""
    lengths, chunk = torch.tensor([9, 6], dtype=torch.int32, device=device), 4
    q, k, v = (torch.randn(2, 9, heads, size, device=device) for heads, size in ((4, 24), (2, 24), (2, 40)))
    table = torch.arange(2, dtype=torch.int32, device=device)[:, None]
    offsets = torch.tensor([0, 9, 18], dtype=torch.int32, device=device)
    want, want_lse = reference.paged_attention(
        q.flatten(0, 1), k, v, block_table=table, cu_seqlens_q=offsets, seq_lens=lengths, attention_chunk_size=chunk
    )
    options: dict[str, Any] = {"causal": True, "attention_chunk": chunk}
    packed = (x.flatten(0, 1) for x in (q, k, v))
    varlen = offsets, offsets, 9, 9
    out, lse = flash_attention_3.flash_attn_varlen_func(
        *packed, *varlen, seqused_k=lengths, return_attn_probs=True, **options
    )
    assert_close(out, want)
    assert_close(lse, want_lse)
    pad = [torch.cat([torch.full_like(x[:, :2], math.nan), x], 1) for x in (k, v)]
    paddings = {"cache_leftpad": torch.full_like(lengths, 2), "cache_seqlens": lengths + 2}
    assert_close(flash_attention_3.flash_attn_with_kvcache(q, *pad, **paddings, **options).flatten(0, 1), want)
    caches, rows = [torch.cat([x[:, :5], torch.full_like(x[:, :4], math.nan)], 1) for x in (k, v)], lengths * 0 + 5
    out = flash_attention_3.flash_attn_with_kvcache(
        q[:, 8:], *caches, k[:, 5:6], v[:, 5:6], cache_seqlens=rows, **options
    )
    assert_close(out[1], want[9 + 8 :])
    with pytest.raises(InvalidInputError, match="attention_chunk: -1"):
        flash_attention_3.flash_attn_func(q, k, v, attention_chunk=-1)
    with pytest.raises(InvalidInputError, match=r"v: shape \[2, 8"):
        flash_attention_3.flash_attn_func(q, k, v[:, :8])
    with pytest.raises(InvalidInputError, match="v: head_dim 520, expected 1 to 512"):
        flash_attention_3.flash_attn_func(q, k, torch.ones(2, 9, 2, 520, device=device))


def test_offsets_of_new_keys_without_any(device: torch.device) -> None:
    """As SGLang gives them in every step."""
    q, k, v, offsets, want, _ = _tensors(device)
    pages = torch.tensor([[0, 1, 2, 0, 0], [3, 4, 5, 6, 7]], dtype=torch.int32, device=device)
    given = {
        "page_table": pages, "cache_seqlens": offsets.diff(), "cu_seqlens_q": offsets, "max_seqlen_q": 5,
        "causal": True, "window_size": (-1, -1), "softcap": 0.0, "num_splits": 0, "k_descale": None, "v_descale": None,
    }  # fmt: skip
    for new in ({}, {"cu_seqlens_k_new": offsets}):
        out = flash_attention_3.flash_attn_with_kvcache(q, k[:, None], v[:, None], **given, **new)
        assert_close(out, want)


def test_packed_inputs(device: torch.device) -> None:
    """kv and qkv in one tensor, sequences of one length and of different ones, and 3's with fewer heads of keys."""
    q, k, v, offsets, want, _ = _tensors(device)
    kv = torch.stack([k, v], 1)
    out = flash_attention.flash_attn_varlen_kvpacked_func(q, kv, offsets, offsets, 5, 5, causal=True)
    assert_close(out, want)
    mine = flash_attention.flash_attn_kvpacked_func(q[None, 3:], kv[None, 3:], causal=True)
    assert_close(mine[0], want[3:])
    all_heads = torch.cat([q, k, v], 1)
    third = flash_attention_3.flash_attn_qkvpacked_func(all_heads[None, 3:], causal=True, num_heads_q=4)
    assert_close(third[0], want[3:])
    qkv = torch.stack([q, q, q], 1)
    same = flash_attention.flash_attn_func(q[None, 3:], q[None, 3:], q[None, 3:], causal=True)
    torch.testing.assert_close(flash_attention.flash_attn_qkvpacked_func(qkv[None, 3:], causal=True), same)
    varlen = flash_attention.flash_attn_varlen_qkvpacked_func(qkv, offsets, 5, causal=True)
    torch.testing.assert_close(varlen[3:], same[0])
    with pytest.raises(InvalidInputError, match=r"^qkv: shape"):
        flash_attention.flash_attn_qkvpacked_func(kv[None])


def test_queries_and_keys_that_do_not_count(device: torch.device) -> None:
    """The first 2 and 4 of 3 and 5 queries and keys; the others give 0 and -inf."""
    q, k, v, offsets, _, _ = _tensors(device)
    used = torch.tensor([2, 4], dtype=torch.int32, device=device)
    options: dict[str, Any] = {"causal": True, "seqused_q": used, "seqused_k": used, "return_softmax_lse": True}
    out, lse = flash_attention.flash_attn_varlen_func(q, k, v, offsets, offsets, 5, 5, **options)
    fewer = torch.tensor([0, 1, 3, 4, 5, 6], device=device)
    short = torch.tensor([0, 2, 6], dtype=torch.int32, device=device)
    want, want_lse = flash_attention.flash_attn_varlen_func(
        q[fewer], k[fewer], v[fewer], short, short, 4, 4, causal=True, return_softmax_lse=True
    )
    torch.testing.assert_close(out[fewer], want)
    torch.testing.assert_close(lse[:, fewer], want_lse)
    assert not out[[2, 7]].any()
    assert (lse[:, [2, 7]] == -math.inf).all()


def test_padding_on_the_left(device: torch.device) -> None:
    """A cache whose rows begin with padding that no query sees, of NaN, in blocks too, and interleaved in memory."""
    q, _, _, _, _, _ = _tensors(device)
    padding = torch.tensor([0, 2, 5], dtype=torch.int32, device=device)
    pool = torch.randn(6, 2, 8, 2, 16, device=device)
    table = torch.tensor([[5, 0], [3, 1], [2, 4]], dtype=torch.int32, device=device)
    k_cache, v_cache = pool.unbind(1)
    for seq, n in enumerate(padding.tolist()):
        pool[table[seq, 0].item(), :, :n] = math.nan
    lens = torch.tensor([3, 9, 16], dtype=torch.int32, device=device)
    queries = q[:6].view(3, 2, 4, 16)
    out = flash_attention.flash_attn_with_kvcache(
        queries, k_cache, v_cache, cache_seqlens=lens, cache_leftpad=padding, block_table=table, causal=True
    )
    for seq, n in enumerate(padding.tolist()):
        rows = [x[table[seq].long()].flatten(0, 1)[None, n : lens[seq]] for x in (k_cache, v_cache)]
        torch.testing.assert_close(
            out[seq : seq + 1], flash_attention.flash_attn_func(queries[seq : seq + 1], *rows, causal=True)
        )
    odd = torch.as_strided(torch.zeros(500, device=device), (3, 8, 2, 2), (37, 4, 2, 1))
    with pytest.raises(UnsupportedError, match=r"^cache_leftpad: a cache of strides"):
        flash_attention.flash_attn_with_kvcache(queries[..., :2], odd, odd, cache_leftpad=padding)


def _offsets(*offsets: int) -> torch.Tensor:
    return torch.tensor(offsets, dtype=torch.int32)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("max_seqlen_q", {"max_seqlen_q": 4}),
        ("max_seqlen_k", {"max_seqlen_k": 4}),
        ("cu_seqlens_q", {"cu_seqlens_q": _offsets(0, 5, 3)}),
        ("cu_seqlens_q", {"cu_seqlens_q": _offsets(1, 3, 8)}),
        ("cu_seqlens_k", {"cu_seqlens_k": _offsets(0, 3, 9)}),
        ("cu_seqlens_k", {"cu_seqlens_k": _offsets(-1, 3, 8)}),
        ("seqused_q", {"seqused_q": _offsets(4, 4)}),
        ("seqused_k", {"seqused_k": _offsets(-1, 4)}),
        ("page_table", {"page_table": _offsets(1, 8)[:, None], "seqused_k": _offsets(1, 1)}),
    ],
)
def test_values_on_the_host_that_do_not_fit(name: str, change: dict[str, Any], backend: str) -> None:
    """Lengths, offsets and ids of a caller, named as it names them."""
    q, k, v, offsets, _, _ = _tensors(torch.device("cpu"))
    arguments: dict[str, Any] = {"q": q, "k": k, "v": v, "cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    arguments |= {"max_seqlen_q": 5, "max_seqlen_k": 5}
    flash_attention.flash_attn_varlen_func(**arguments)
    if "page_table" in change:
        arguments |= {"k": k[:, None], "v": v[:, None]}
    with pytest.raises(InvalidInputError, match=rf"^{name}: "):
        flash_attention.flash_attn_varlen_func(**{**arguments, **change})
