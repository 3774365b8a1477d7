"""Latent attention and its cache writes: every tile the chooser returns, for its target."""

from __future__ import annotations

from typing import Any

from paged.bench.compilation.case import TARGETS, TENSOR_CORES, CompileCase
from paged.bench.compilation.cases.attention import planned_launch
from paged.bench.compilation.launches import empty, launch_case, launch_of, launches_of
from paged.kernels.cache.concat_and_cache_mla import concat_and_cache_mla, mla_norm_rope_and_cache
from paged.kernels.mla.choose_keys import _index_scores_kernel, choose_keys
from paged.kernels.mla.paged_mla_attention import paged_mla_attention
from paged.kernels.mla.tile_kernel import _mla_attention_kernel

_ALIGNED = ("q_token", "q_head", "latent_block", "latent_slot", "rope_block", "rope_slot", "out_token", "out_head")
_NUM_BLOCKS, _BLOCK_SIZE = 4, 64
# Bytes of a row in the published fp8 form of 512 + 64.
_PACKED_ROW = 656


def cases() -> list[CompileCase]:
    """DeepSeek's sizes with 16, 32 and 128 heads, each kind of cache, chosen keys; a smaller latent; float32."""
    cases = []
    for kind in ("", "e4m3", "packed"):
        cases += [_write_case(kind, False), _write_case(kind, True)]
    for target in TARGETS:
        cases += [
            _case(target, 16),
            _case(target, 32),
            _case(target, 128),
            _case(target, 16, kind="e4m3"),
            _case(target, 16, kind="packed"),
            _case(target, 128, kind="e4m3"),
            _case(target, 128, kind="packed"),
            _case(target, 16, sparse=True),
            _case(target, 128, sparse=True),
            _case(target, 128, kind="packed", sparse=True),
            _case(target, 16, v_head_dim=256),
            _index_case(target, 32),
            _index_case(target, 64),
            _index_case(target, 64, dtype="fp32"),
            _case(target, 128, v_head_dim=256),
            _case(target, 128, rope=0),
            _case(target, 16, dtype="fp32"),
        ]
    return cases


def _cache(kind: str, size: int, dtype: str) -> Any:
    if kind == "packed":
        return empty("u8", _NUM_BLOCKS, _BLOCK_SIZE, _PACKED_ROW)
    return empty({"": dtype, "e4m3": "fp8e4nv"}[kind], _NUM_BLOCKS, _BLOCK_SIZE, size)


def _step() -> dict[str, Any]:
    """One decode."""
    return {
        "block_table": empty("i32", 1, _NUM_BLOCKS),
        "cu_seqlens_q": empty("i32", 2),
        "seq_lens": empty("i32", 1),
    }


def _case(
    target: str,
    heads: int,
    *,
    v_head_dim: int = 512,
    rope: int = 64,
    dtype: str = "bf16",
    kind: str = "",
    sparse: bool = False,
) -> CompileCase:
    size = v_head_dim + rope
    options = {**_step(), "v_head_dim": v_head_dim, "softmax_scale": 0.1, "max_seqlen_q": 1, "return_lse": True}
    if kind == "e4m3":
        options["k_scale"] = empty("fp32", 1)
    if sparse:
        options["indices"] = empty("i32", 1, 2048)
    q, cache = empty(dtype, 1, heads, size), _cache(kind, size, dtype)
    launch, programs_per_sm = planned_launch(_mla_attention_kernel, target, paged_mla_attention, q, cache, **options)
    block_m, block_n = launch.arguments["BLOCK_M"], launch.arguments["BLOCK_N"]
    expect: dict[str, tuple[str, ...]] = {}
    if dtype != "fp32":
        expect[target] = (TENSOR_CORES[target],)
        if block_m != 64 and target.startswith("sm"):  # wgmma and tcgen05 take 64 rows
            expect[target] = ("HMMA",)
    words = ["paged_mla_attention", f"{heads} heads {block_m} x {block_n} {v_head_dim} + {rope} {dtype}"]
    if kind:
        words.append(kind)
    if sparse:
        words.append("chosen")
    return launch_case(
        " ".join([*words, "for", target]),
        launch,
        aligned=tuple(f"stride_{name}" for name in _ALIGNED if not (kind == "packed" and "latent" in name)),
        expect=expect,
        targets=(target,),
        programs_per_sm=programs_per_sm,
    )


def _index_case(target: str, heads: int, *, dtype: str = "bf16") -> CompileCase:
    q, weights, cache = empty(dtype, 1, heads, 128), empty("fp32", 1, heads), empty("u8", 4, _BLOCK_SIZE, 128 + 4)
    expect: dict[str, tuple[str, ...]] = {target: (TENSOR_CORES[target],)}
    if heads < 64 and target != "gfx942":
        expect[target] = ("HMMA",)
    if dtype == "fp32":
        cache = empty("fp32", 4, _BLOCK_SIZE, 128)
        expect = {}
    return launch_case(
        f"choose_keys {heads} heads {dtype} for {target}",
        launch_of(_index_scores_kernel, target, choose_keys, q, weights, cache, **_step(), top_k=1),
        aligned=("stride_q_token", "stride_q_head", "stride_weights_token", "stride_out_token"),
        expect=expect,
        targets=(target,),
    )


def _write_case(kind: str, fused: bool) -> CompileCase:
    latent, k_rope, cache = empty("bf16", 1, 512), empty("bf16", 1, 64), _cache(kind, 576, "bf16")
    slots, scale = empty("i64", 1), None
    if kind == "e4m3":
        scale = empty("fp32", 1)
    write = latent, k_rope, cache, slots
    if fused:
        name = "mla_norm_rope_and_cache"
        q, rotation = empty("bf16", 1, 128, 64), (empty("i64", 1), empty("fp32", 1, 64), empty("bf16", 512))
        options = {"interleaved": True, "scale": scale}
        (launch,) = launches_of("sm_80", mla_norm_rope_and_cache, q, *write, *rotation, **options)
    else:
        name = "concat_and_cache_mla"
        (launch,) = launches_of("sm_80", concat_and_cache_mla, *write, scale=scale)
    return launch_case(f"{name} {kind or 'bf16'} cache", launch)
