"""FlashAttention's functions of each version: what they refuse, and what tests/fuzz/interop leaves out."""

import inspect
import math
from typing import Any

import pytest
import torch

from paged import InvalidInputError, UnsupportedError
from paged.bench.attention.problem import Problem, make
from paged.interop import flash_attention, flash_attention_3, flash_attention_4
from paged.interop.flash_attention import flash_attn_varlen_func, flash_attn_with_kvcache
from paged.kernels.attention import reference as attention_reference
from tests.tolerance import assert_close


def _problem(device: torch.device) -> dict[str, torch.Tensor]:
    return vars(make(Problem("two", ((3, 20), (1, 9)), heads=(4, 2), head_dim=16, block_size=8), device))


def _paged(problem: dict[str, torch.Tensor]) -> dict[str, Any]:
    """FlashAttention's keywords of a problem in pages, for its varlen function."""
    names = {"cu_seqlens_q": "cu_seqlens_q", "seqused_k": "seq_lens", "block_table": "block_table"}
    return {theirs: problem[ours] for theirs, ours in names.items()} | {"max_seqlen_q": 3}


@pytest.mark.parametrize(("cache_seqlens", "length"), [(5, 5), (None, 9)])
def test_with_kvcache_reads_only(cache_seqlens: int | None, length: int, device: torch.device) -> None:
    """One length for all, or the whole cache, and no new tokens."""
    q, (k_cache, v_cache) = torch.randn(3, 1, 4, 16, device=device), torch.randn(2, 3, 9, 2, 16, device=device)
    lengths = {"cu_seqlens_q": torch.arange(4), "seq_lens": torch.full((3,), length)}
    table = torch.arange(3)[:, None]
    want, _ = attention_reference.paged_attention(q.flatten(0, 1), k_cache, v_cache, block_table=table, **lengths)
    out = torch.full_like(q, math.nan)
    result = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=cache_seqlens, causal=True, out=out)
    assert result.data_ptr() == out.data_ptr()
    assert_close(result, want.view(q.shape))


def test_what_is_rotated_stays_as_it_was_given(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache gains the rotated keys, the same ones from both backends."""
    given = [torch.randn(2, 2, heads, 16, device=device) for heads in (4, 2, 2)]
    angles, results = torch.randn(9, 4, device=device), []
    for kernels in ("triton", "torch"):
        monkeypatch.setenv("PAGED_BACKEND", kernels)
        (q, k, v), caches = [x.clone() for x in given], torch.zeros(2, 3, 9, 2, 16, device=device)
        options = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "cache_seqlens": 3, "causal": True}
        out = flash_attn_with_kvcache(q, *caches, k, v, cache_batch_idx=torch.tensor([2, 0], device=device), **options)
        assert all(torch.equal(x, before) for x, before in zip((q, k, v), given, strict=True))
        results.append((out, caches))
    torch.testing.assert_close(*results)


def test_8_bit_queries(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of FlashAttention 3: the result is bfloat16, and a scale of q counts; of other queries there is none."""
    if device.type == "cpu":  # Triton's interpreter mishandles bfloat16
        monkeypatch.setenv("PAGED_BACKEND", "torch")
    problem = _problem(device)
    narrow = {name: problem[name].nan_to_num().to(torch.float8_e4m3fn) for name in ("q", "k_cache", "v_cache")}
    wide = {name: tensor.float() for name, tensor in narrow.items()}
    scales = torch.rand(2, 2, device=device) + 0.5
    arguments = _paged(problem) | {"q_descale": scales[:1].expand(2, -1), "k_descale": scales[1]}
    out = flash_attn_varlen_func(*narrow.values(), **arguments, causal=True)
    assert out.dtype == torch.bfloat16
    assert_close(out, attention_reference.paged_attention(**{**problem, **wide}, k_scale=scales[0] * scales[1])[0])
    with pytest.raises(UnsupportedError, match=r"^q_descale: q is torch.float32"):
        flash_attn_varlen_func(*wide.values(), **arguments)


# What changes nothing: others' defaults, and hints.
NEUTRAL = dict.fromkeys(("q_descale", "q_v", "mask_mod", "block_sparse_tensors", "no_such_argument"))
NEUTRAL |= dict.fromkeys(("dropout_p", "attention_chunk", "nor_this"), 0) | {"nor_such": False, "window_size_left": -1}
NEUTRAL |= {"cp_world_size": 1, "deterministic": True, "num_splits": 3, "scheduler_metadata": torch.ones(1)}
NEUTRAL |= {"fa_version": 3, "pack_gqa": False, "sm_margin": 8}
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


def test_varlen_refuses_by_name(device: torch.device) -> None:
    problem = _problem(device)
    call = problem["q"], problem["k_cache"], problem["v_cache"]
    flash_attn_varlen_func(*call, **_paged(problem), **NEUTRAL)
    for name, value in OTHERS.items():
        with pytest.raises(UnsupportedError, match=name):
            flash_attn_varlen_func(*call, **_paged(problem), **{name: value})
    with pytest.raises(InvalidInputError, match=r"^v_descale: shape \[3, 2\]"):
        flash_attn_varlen_func(*call, **_paged(problem), v_descale=torch.ones(3, 2, device=device))


def test_varlen_needs_lengths(device: torch.device) -> None:
    starts = torch.tensor([0, 2, 5], dtype=torch.int32, device=device)
    arguments = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 3, "max_seqlen_k": 3}
    tensors = torch.randn(3, 5, 2, 16, device=device).unbind(0)
    flash_attn_varlen_func(*tensors, **arguments)
    for missing in arguments:
        with pytest.raises(InvalidInputError, match=missing):
            flash_attn_varlen_func(*tensors, **{name: each for name, each in arguments.items() if name != missing})


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("v", {"v": None}),
        ("rotary_sin", {"rotary_sin": None}),
        ("rotary_cos", {"k": None, "v": None}),
        ("cache_seqlens", {"cache_seqlens": None}),
        ("q", {"q": torch.zeros(2, 4, 16)}),
        ("cache_seqlens", {"cache_seqlens": torch.tensor([3, 9], dtype=torch.int32)}),
        ("cache_batch_idx", {"cache_batch_idx": torch.tensor([2, 3])}),
        ("rotary_cos", {"rotary_cos": torch.ones(3, 4), "rotary_sin": torch.ones(3, 4)}),
        ("k", {"k": torch.zeros(2, 1, 3, 16)}),
        ("learnable_sink", {"s_aux": torch.zeros(4), "learnable_sink": torch.zeros(4)}),
        ("cache_leftpad", {"cache_leftpad": torch.zeros(2)}),
        ("unsupported: cache_batch_idx", {"block_table": torch.zeros(2, 1, dtype=torch.int32)}),
        ("unsupported: cu_seqlens_q", {"cu_seqlens_q": torch.zeros(3)}),
        ("unsupported: q", {"q": torch.zeros(2, 1, 4, 16, requires_grad=True)}),
    ],
)
def test_with_kvcache_refuses_by_name(name: str, change: dict[str, Any], device: torch.device) -> None:
    unsupported, _, name = name.rpartition(": ")
    if device.type == "cuda" and not unsupported and name in ("cache_seqlens", "cache_batch_idx", "rotary_cos"):
        pytest.skip("values on a device are not read")
    cache = torch.zeros(3, 9, 2, 16, device=device)
    arguments: dict[str, Any] = {
        "q": torch.zeros(2, 1, 4, 16, device=device),
        "k": torch.ones(2, 1, 2, 16, device=device),
        "v": torch.ones(2, 1, 2, 16, device=device),
        "rotary_cos": torch.ones(9, 4, device=device),
        "rotary_sin": torch.zeros(9, 4, device=device),
        "cache_seqlens": 3,
        "cache_batch_idx": torch.tensor([2, 0], device=device),
        "k_cache": cache,
        "v_cache": cache,
    }
    change = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in change.items()}
    error = UnsupportedError if unsupported else InvalidInputError
    with pytest.raises(error, match=rf"^([a-z_]+, )*{name}(, [a-z_]+|\[\d[\d, ]*\])*: "):
        flash_attn_with_kvcache(**arguments | change)
    assert not cache.any()
    if name == "v":
        flash_attn_with_kvcache(**arguments)
        assert cache.any(), "without the change it writes"


_TAIL_2 = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"
_PACKED = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
_TAIL_3 = "window_size attention_chunk softcap num_splits pack_gqa deterministic sm_margin return_attn_probs"
_DESCALE = "q_descale k_descale v_descale"
_TAIL_4 = "window_size learnable_sink softcap num_splits pack_gqa deterministic score_mod score_mod_bwd mask_mod"
_CACHED = "rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad"
# As they stand in flash_attn 2.8, in its folders hopper (3) and flash_attn/cute (4).
ORDERS = {
    flash_attention: {
        "flash_attn_func": f"q k v {_TAIL_2}",
        "flash_attn_kvpacked_func": f"q kv {_TAIL_2}",
        "flash_attn_qkvpacked_func": f"qkv {_TAIL_2}",
        "flash_attn_varlen_func": f"q k v {_PACKED} {_TAIL_2} block_table",
        "flash_attn_varlen_kvpacked_func": f"q kv {_PACKED} {_TAIL_2}",
        "flash_attn_varlen_qkvpacked_func": f"qkv cu_seqlens max_seqlen {_TAIL_2}",
        "flash_attn_with_kvcache": f"q k_cache v_cache k v {_CACHED} block_table softmax_scale causal window_size "
        "softcap rotary_interleaved alibi_slopes num_splits return_softmax_lse",
    },
    flash_attention_3: {
        "flash_attn_func": f"q k v softmax_scale causal qv {_DESCALE} {_TAIL_3}",
        "flash_attn_qkvpacked_func": f"qkv softmax_scale causal {_DESCALE} window_size attention_chunk softcap "
        "deterministic num_heads_q sm_margin return_attn_probs",
        "flash_attn_varlen_func": f"q k v {_PACKED} seqused_q seqused_k softmax_scale causal qv {_DESCALE} {_TAIL_3}",
        "flash_attn_with_kvcache": f"q k_cache v_cache k v qv {_CACHED} page_table cu_seqlens_q cu_seqlens_k_new "
        f"max_seqlen_q rotary_seqlens {_DESCALE} softmax_scale causal window_size attention_chunk softcap "
        "rotary_interleaved scheduler_metadata num_splits pack_gqa sm_margin return_softmax_lse",
    },
    flash_attention_4: {
        "flash_attn_func": f"q k v qv gather_kv_indices softmax_scale causal {_TAIL_4}",
        "flash_attn_varlen_func": f"q k v qv {_PACKED} min_seqlen_k seqused_q seqused_k gather_kv_indices page_table "
        f"softmax_scale causal {_TAIL_4}",
    },
}


@pytest.mark.parametrize("module", ORDERS, ids=lambda module: module.__name__[-1])
def test_arguments_stand_in_the_order_of_their_version(module: Any) -> None:
    for name, order in ORDERS[module].items():
        names = list(inspect.signature(getattr(module, name)).parameters)
        assert names[: len(order.split())] == order.split(), name


def test_values_of_another_size_and_chunks(device: torch.device) -> None:
    """Packed, and appended to a cache; chunks by the name of version 3."""
    lengths, chunk = torch.tensor([9, 6], dtype=torch.int32, device=device), 4
    q, k, v = (torch.randn(2, 9, heads, size, device=device) for heads, size in ((4, 24), (2, 24), (2, 40)))
    table = torch.arange(2, dtype=torch.int32, device=device)[:, None]
    offsets = torch.tensor([0, 9, 18], dtype=torch.int32, device=device)
    want, want_lse = attention_reference.paged_attention(
        q.flatten(0, 1), k, v, block_table=table, cu_seqlens_q=offsets, seq_lens=lengths, attention_chunk_size=chunk
    )
    options: dict[str, Any] = {"causal": True, "attention_chunk": chunk}
    packed = (x.flatten(0, 1) for x in (q, k, v))
    varlen = offsets, offsets, 9, 9
    used = options | {"seqused_k": lengths, "return_attn_probs": True}
    out, lse = flash_attention_3.flash_attn_varlen_func(*packed, *varlen, **used)
    assert_close(out, want)
    assert_close(lse, want_lse)
    caches = [torch.cat([x[:, :5], torch.full_like(x[:, :4], math.nan)], 1) for x in (k, v)]
    new = q[:, 8:], *caches, k[:, 5:6], v[:, 5:6]
    out = flash_attention_3.flash_attn_with_kvcache(*new, cache_seqlens=torch.full_like(lengths, 5), **options)
    assert_close(out[1], want[9 + 8 :])
    with pytest.raises(InvalidInputError, match="attention_chunk: -1"):
        flash_attention_3.flash_attn_func(q, k, v, attention_chunk=-1)


def test_layouts_that_are_refused(device: torch.device) -> None:
    q, padding = torch.zeros(3, 2, 4, 2, device=device), torch.tensor([0, 2, 5], dtype=torch.int32, device=device)
    cache = torch.as_strided(torch.zeros(500, device=device), (3, 8, 2, 2), (37, 4, 2, 1))
    with pytest.raises(UnsupportedError, match=r"^cache_leftpad: a cache of strides"):
        flash_attn_with_kvcache(q, cache, cache, cache_leftpad=padding)
    with pytest.raises(InvalidInputError, match=r"^qkv: shape"):
        flash_attention.flash_attn_qkvpacked_func(torch.randn(1, 8, 2, 2, 16, device=device))


def _offsets(*offsets: int) -> torch.Tensor:
    return torch.tensor(offsets, dtype=torch.int32)


WRONG: list[dict[str, Any]] = [
    {"max_seqlen_q": 4},
    {"max_seqlen_k": 4},
    {"cu_seqlens_q": _offsets(0, 5, 3)},
    {"cu_seqlens_q": _offsets(1, 3, 8)},
    {"cu_seqlens_k": _offsets(0, 3, 9)},
    {"cu_seqlens_k": _offsets(-1, 3, 8)},
    {"seqused_q": _offsets(4, 4)},
    {"seqused_k": _offsets(-1, 4)},
    {"page_table": _offsets(1, 8)[:, None], "seqused_k": _offsets(1, 1)},
]


def test_values_on_the_host_that_do_not_fit(backend: str) -> None:
    """Lengths, offsets and ids of a caller, named as it names them."""
    q, k, v = (torch.randn(8, heads, 16) for heads in (4, 2, 2))
    offsets = _offsets(0, 3, 8)
    arguments: dict[str, Any] = {"q": q, "k": k, "v": v, "cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    arguments |= {"max_seqlen_q": 5, "max_seqlen_k": 5}
    flash_attn_varlen_func(**arguments)
    for change in WRONG:
        pages = {"k": k[:, None], "v": v[:, None]} if "page_table" in change else {}
        with pytest.raises(InvalidInputError, match=rf"^{next(iter(change))}(\[\d[\d, ]*\])?: "):
            flash_attn_varlen_func(**arguments | pages | change)
