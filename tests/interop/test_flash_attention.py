"""FlashAttention's functions of each version: what they refuse, and what tests/fuzz/interop leaves out."""

import inspect
import math
from typing import Any

import pytest
import torch

from paged import InvalidInputError, UnsupportedError
from paged.bench.attention.problem import Problem, make
from paged.bench.problems.arguments import on_cpu
from paged.interop import flash_attention, flash_attention_3, flash_attention_4
from paged.interop.flash_attention import flash_attn_varlen_func, flash_attn_with_kvcache
from paged.kernels.attention.definition import paged_attention as attention_definition
from paged.kernels.layers.definition import rotate
from tests.kernels.attention.problem import with_weight_errors
from tests.tolerance import assert_close, assert_within


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
    want, _ = attention_definition(q.flatten(0, 1).cpu(), k_cache.cpu(), v_cache.cpu(), block_table=table, **lengths)
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
    for by_triton, by_torch in zip(*results, strict=True):
        assert_close(by_triton, by_torch.double())


def test_8_bit_queries(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of FlashAttention 3: the result is bfloat16, and a scale of q counts; beside wider values no scale is read."""
    problem = _problem(device)
    narrow = {name: problem[name].nan_to_num().to(torch.float8_e4m3fn) for name in ("q", "k_cache", "v_cache")}
    wide = {name: tensor.float() for name, tensor in narrow.items()}
    scales = torch.rand(2, 2, device=device) + 0.5
    arguments = _paged(problem) | {"q_descale": scales[:1].expand(2, -1), "k_descale": scales[1]}
    out = flash_attn_varlen_func(*narrow.values(), **arguments, causal=True)
    assert out.dtype == torch.bfloat16
    call = {**problem, **wide, "k_scale": scales[0] * scales[1]}
    rounded = call | {"v_cache": with_weight_errors(wide["v_cache"].double(), out.dtype)}
    want, with_errors = (attention_definition(**on_cpu(one))[0] for one in (call, rounded))
    assert_close(out, want, rounded=with_errors)
    plain = flash_attn_varlen_func(*wide.values(), **_paged(problem), causal=True)
    assert torch.equal(flash_attn_varlen_func(*wide.values(), **arguments, causal=True), plain)
    new = {"k": narrow["q"][None, :1, :2], "v": narrow["q"][None, :1, :2], "cache_seqlens": 2}
    with pytest.raises(InvalidInputError, match=r"^k: dtype"):  # a cache that cannot hold them as they are
        flash_attn_with_kvcache(wide["q"][None, :1], wide["k_cache"][:1], wide["v_cache"][:1], **new)


@pytest.mark.parametrize("is_rotated", [False, True])
def test_8_bit_keys_are_added_to_8_bit_caches(
    is_rotated: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As FlashAttention 3 takes them: not divided by scales, those of sequences included, rounded once if rotated."""
    dtype, before = torch.float8_e4m3fn, torch.tensor([5, 2], dtype=torch.int32, device=device)
    q, k, v = (torch.randn(2, 2, heads, 16, device=device).to(dtype) for heads in (4, 2, 2))
    caches = torch.randn(2, 2, 9, 2, 16, device=device).to(dtype).unbind(0)
    scales = {name: torch.rand(2, 2, device=device) + 0.5 for name in ("k_descale", "v_descale")}
    rotary, want_q, want_k = {}, q.double(), k.double()
    if is_rotated:
        angles = torch.randn(9, 8, device=device)
        table = [angles.cos().to(dtype), angles.sin().to(dtype)]
        rotary = dict(zip(("rotary_cos", "rotary_sin"), table, strict=True))
        positions = before[:, None] + torch.arange(2, device=device)
        turned = [
            rotate(x.flatten(0, 1), positions.flatten(), torch.cat(table, 1).float(), interleaved=True) for x in (q, k)
        ]
        want_q, want_k = (x.view(2, 2, -1, 16).to(device) for x in turned)
        want_q = want_q.bfloat16().double()
    keys, values = (cache.double() for cache in caches)
    for seq, n in enumerate(before.tolist()):
        keys[seq, n : n + 2], values[seq, n : n + 2] = want_k[seq].float().to(dtype).double(), v[seq].double()
    out = flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=before, causal=True, **rotary, **scales)
    assert torch.equal(caches[1].double(), values)
    assert_within(caches[0], keys, 2**-9 + 2**-3 * keys.abs(), is_exact=True)  # a step of e4m3
    for seq in range(2):
        k_seq, v_seq = (
            x[seq] * scales[f"{y}_descale"][seq][:, None] for x, y in ((caches[0].double(), "k"), (values, "v"))
        )
        ends = {"cu_seqlens_q": torch.tensor([0, 2]), "seq_lens": before[seq : seq + 1].cpu() + 2}
        block = torch.zeros(1, 1, dtype=torch.long)
        want, with_errors = (
            attention_definition(want_q[seq].cpu(), k_seq[None].cpu(), v_of[None].cpu(), block_table=block, **ends)[0]
            for v_of in (v_seq, with_weight_errors(v_seq, out.dtype))
        )
        assert_close(out[seq], want, rounded=with_errors)


@pytest.mark.parametrize("module", [flash_attention_3, flash_attention_4])
@pytest.mark.parametrize("leading", [(2, 3), (5,)])
def test_combine(leading: tuple[int, ...], module: Any, device: torch.device) -> None:
    """Any number of parts, in any strides, parts and rows without keys included."""
    for num_parts in (0, 1, 3, 7):
        parts = torch.randn(2 * num_parts, *leading[:-1], 4, leading[-1], 8, device=device).transpose(-2, -3)
        lses = torch.randn(2 * num_parts, *leading[:-1], 4, leading[-1], device=device).transpose(-1, -2)
        parts, lses = parts[:num_parts], lses[:num_parts]
        lses[num_parts // 2 :, :1] = -math.inf
        parts[num_parts // 2 :, :1] = math.nan
        lse = lses.double().logsumexp(0)
        weights = (lses.double() - lse).exp().nan_to_num(0.0).unsqueeze(-1)
        want = (weights * parts.double().nan_to_num()).sum(0)
        out, got = module.flash_attn_combine(parts, lses)
        assert_close(out, want)
        assert_close(got, lse)
        given = torch.full_like(out, math.nan, dtype=torch.float16)
        result = module.flash_attn_combine(parts, lses, out=given, seqused=torch.ones(2), return_lse=False)
        assert result[0] is given
        assert result[1] is None
        assert_close(given, want)
    for name, change in {"lse_partial": (parts, lses[1:]), "out_partial": (parts.double(), lses)}.items():
        with pytest.raises(InvalidInputError, match=f"^{name}: "):
            module.flash_attn_combine(*change)
    for options in ({"out": given, "out_dtype": torch.float32}, {"out_dtype": torch.int8}):
        with pytest.raises(InvalidInputError, match=r"^out"):
            module.flash_attn_combine(parts, lses, **options)


def test_scheduler_metadata_is_taken(device: torch.device) -> None:
    problem = _problem(device)
    call, lengths = [problem[name] for name in ("q", "k_cache", "v_cache")], problem["seq_lens"]
    ahead = [
        flash_attention_3.get_scheduler_metadata(2, 3, 20, 4, 2, 16, lengths, torch.float32, page_size=8, num_splits=3),
        flash_attention_4.get_scheduler_metadata(2, 3, 20, 4, 2, 16, 3, 64, 64, seqused_k=lengths),
    ]
    assert ahead[0].dtype == torch.int32
    assert ahead[0].device == lengths.device
    want = flash_attn_varlen_func(*call, **_paged(problem))
    for metadata in ahead:
        assert torch.equal(flash_attn_varlen_func(*call, **_paged(problem), scheduler_metadata=metadata), want)


# What changes nothing: others' defaults, and hints.
NEUTRAL = dict.fromkeys(("q_v", "mask_mod", "block_sparse_tensors", "no_such_argument"))
NEUTRAL |= dict.fromkeys(("dropout_p", "attention_chunk", "nor_this"), 0) | {"nor_such": False, "window_size_left": -1}
NEUTRAL |= {"cp_world_size": 1, "deterministic": True, "num_splits": 3, "scheduler_metadata": torch.ones(1)}
NEUTRAL |= {"fa_version": 3, "pack_gqa": False, "sm_margin": 8, "seqlen_k_per_split": 64}
NEUTRAL |= {"q_descale": torch.ones(3, 2), "disable_scheduler_metadata": True}
OTHERS = {
    "dropout_p": 0.1,
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
    narrow = [tensor.to(torch.float8_e4m3fn) for tensor in call[1:]]
    with pytest.raises(InvalidInputError, match=r"^v_descale: shape \[3, 2\]"):
        flash_attn_varlen_func(call[0], *narrow, **_paged(problem), v_descale=torch.ones(3, 2, device=device))


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
        ("cache_batch_idx", {"block_table": torch.zeros(2, 1, dtype=torch.int32)}),
        ("block_table", {"block_table": torch.zeros(2, dtype=torch.int32)}),
        ("k_cache", {"k_cache": torch.zeros(3, 9, 16, 2).transpose(2, 3)}),
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
        "flash_attn_combine": "out_partial lse_partial out out_dtype",
        "get_scheduler_metadata": "batch_size max_seqlen_q max_seqlen_k num_heads_q num_heads_kv headdim cache_seqlens "
        "qkv_dtype headdim_v cu_seqlens_q cu_seqlens_k_new cache_leftpad page_size max_seqlen_k_new causal window_size "
        "attention_chunk has_softcap num_splits pack_gqa sm_margin",
    },
    flash_attention_4: {
        "flash_attn_func": f"q k v qv gather_kv_indices softmax_scale causal {_TAIL_4}",
        "flash_attn_varlen_func": f"q k v qv {_PACKED} min_seqlen_k seqused_q seqused_k gather_kv_indices page_table "
        f"softmax_scale causal {_TAIL_4} block_sparse_tensors aux_tensors aux_scalars return_lse scheduler_metadata "
        "seqlen_k_per_split disable_scheduler_metadata",
        "flash_attn_combine": "out_partial lse_partial out out_dtype cu_seqlens seqused varlen_batch_idx return_lse",
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
    want, want_lse = attention_definition(
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


def test_heads_of_queries_keys_and_values_in_one_tensor(device: torch.device) -> None:
    """Of version 3: fewer heads of keys than of queries."""
    qkv = torch.randn(2, 5, 8, 16, device=device)
    want = flash_attention_3.flash_attn_func(*qkv.split((4, 2, 2), 2), causal=True)
    assert torch.equal(flash_attention_3.flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=4), want)
    for heads in (3, 8, 9):
        with pytest.raises(InvalidInputError, match=rf"^num_heads_q: {heads}, qkv has 8 heads"):
            flash_attention_3.flash_attn_qkvpacked_func(qkv, num_heads_q=heads)
    with pytest.raises(UnsupportedError, match=r"^num_heads_q: 4, "):
        flash_attention_3.flash_attn_func(*qkv.split((4, 2, 2), 2), num_heads_q=4)


def test_layouts_that_are_refused(device: torch.device) -> None:
    q, padding = torch.zeros(3, 2, 4, 2, device=device), torch.tensor([0, 2, 5], dtype=torch.int32, device=device)
    cache = torch.as_strided(torch.zeros(500, device=device), (3, 8, 2, 2), (37, 4, 2, 1))
    with pytest.raises(UnsupportedError, match=r"^cache_leftpad: cannot cut a cache with strides"):
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
