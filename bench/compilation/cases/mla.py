"""Latent attention and its cache writes: every tile the chooser returns, for its target."""

from __future__ import annotations

from typing import Any

from paged.bench.compilation.cases.attention import planned_launch
from paged.bench.compilation.cases.case import EVERY_CASE, NATIVE_FP8, TARGETS, TENSOR_CORES, CompileCase
from paged.bench.compilation.cases.launches import empty, launch_case, launch_of, launches_of, single_case
from paged.kernels.attention.choose_blocks import _block_ranks_kernel, choose_blocks
from paged.kernels.attention.choose_keys import _index_scores_kernel, choose_keys
from paged.kernels.attention.latent_kernel import _mla_attention_kernel
from paged.kernels.attention.paged_mla_attention import paged_mla_attention
from paged.kernels.cache.concat_and_cache_mla import concat_and_cache_mla, mla_norm_rope_and_cache
from paged.kernels.cache.latent_cache import (
    MXFP8_BYTES,
    NVFP4_BYTES,
    NVFP4_LATENT_BYTES,
    PACKED_BYTES,
    RECORD_BYTES,
    RECORD_DIM,
)
from paged.kernels.cache.write_pooled_entries import write_pooled_entries

_ALIGNED = ("q_token", "q_head", "latent_block", "latent_slot", "rope_block", "rope_slot", "out_token", "out_head")
_NUM_BLOCKS, _BLOCK_SIZE = 4, 64
_RECORDS = {"packed": PACKED_BYTES, "nvfp4": NVFP4_LATENT_BYTES}


def attention_cases() -> list[CompileCase]:
    """Return cases of DeepSeek's sizes with each number of heads and cache, chosen keys, small latents, and float32."""
    cases = []
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
            _case(target, 16, kind="nvfp4"),
            _case(target, 128, kind="nvfp4"),
            _case(target, 128, kind="nvfp4", sparse=True),
            _case(target, 16, v_head_dim=256),
            _case(target, 128, v_head_dim=256),
            _case(target, 128, rope=0),
            _case(target, 16, window=True),
            _case(target, 64, v_head_dim=1024, window=True),
            _case(target, 64, v_head_dim=1024, window=True, kind="e4m3"),
            _case(target, 128, window=True),
            _case(target, 16, dtype="fp32"),
        ]
        if target in ("sm_80", "sm_90", "sm_100", "sm_103"):
            cases.append(_case(target, 64, v_head_dim=1024, dtype="fp32"))
    return cases


def index_cases() -> list[CompileCase]:
    """Return scores of 32 and 64 heads, over packed keys, also with scales last, and keys in float32."""
    cases = []
    for target in TARGETS:
        cases += [_index_case(target, 32), _index_case(target, 64), _index_case(target, 64, dtype="fp32")]
        cases += [_index_case(target, 64, pool_size=4), _index_case(target, 64, candidate_size=64)]
        cases += [_index_case(target, 64, scales_last=True)]
    return cases


def block_index_cases() -> list[CompileCase]:
    """Return scores of blocks: a list of each head, also of packed keys, means, pools with weights, and float32."""
    cases = []
    for target in TARGETS:
        cases += [
            _block_index_case(target, 4, size=128),
            _block_index_case(target, 16, size=24, reduction="mean"),
            _block_index_case(target, 16, size=16, pool_size=16, is_weighted=True),
            _block_index_case(target, 64, size=128, is_packed=True, is_weighted=True),
            _block_index_case(target, 4, size=128, is_packed=True),
            _block_index_case(target, 4, size=128, dtype="fp32"),
        ]
    return cases


def pool_cases() -> list[CompileCase]:
    """Return GLM-5.3's pools, QSA's means, and DeepSeek-V4's sizes in each form of entries."""
    native = tuple(target for target in EVERY_CASE if target in NATIVE_FP8)
    without_fp8 = tuple(target for target in EVERY_CASE if target not in NATIVE_FP8)
    rotated: dict[str, Any] = {"is_normed": True, "rotary_dim": 64}
    last = {**rotated, "interleaved": True, "rotates_last": True}
    cases = [
        _pool_case("bf16", 16, 128, EVERY_CASE),
        _pool_case("fp32", 16, 128, EVERY_CASE),
        _pool_case("bf16", 24, 128, EVERY_CASE),
        _pool_case("bf16", 4, 256, EVERY_CASE, has_gates=False, **rotated),
        _pool_case("fp32", 128, 512, EVERY_CASE, entry="bf16", **last),
        _pool_case("bf16", 1, 512, EVERY_CASE, has_gates=False, **last),  # rows of DeepSeek-V4's windows
    ]
    for targets in (native, without_fp8):
        cases.append(_pool_case("bf16", 16, 128, targets, entry="u8"))
        cases.append(_pool_case("fp32", 128, 512, targets, entry="u8", **last))
        cases.append(_pool_case("fp32", 128, 512, targets, entry="u8", in_rings=True, **last))
        cases.append(_pool_case("fp32", 4, 512, targets, entry="u8", overlaps=True, **last))
        for record_bytes in (RECORD_BYTES, MXFP8_BYTES, NVFP4_BYTES):
            cases.append(
                _pool_case("bf16", 1, 512, targets, entry="u8", has_gates=False, record_bytes=record_bytes, **last)
            )
    return cases


def _pool_case(
    dtype: str,
    pool_size: int,
    head_dim: int,
    targets: tuple[str, ...],
    *,
    entry: str = "",
    has_gates: bool = True,
    is_normed: bool = False,
    rotary_dim: int = 0,
    overlaps: bool = False,
    record_bytes: int = RECORD_BYTES,
    **options: Any,
) -> CompileCase:
    words = [f"write_pooled_entries {dtype} pools of {pool_size} x {head_dim}", *options]
    size = head_dim
    if entry == "u8":
        size = record_bytes if head_dim == RECORD_DIM else head_dim + 4
        if record_bytes != RECORD_BYTES:
            words.append(f"records of {record_bytes}")
        words.append("native" if targets[0] in NATIVE_FP8 else "packed")
    row_size = head_dim
    if has_gates:
        row_size *= 2
        options["position_bias"] = empty(dtype, pool_size, head_dim)
    if overlaps:
        words.append("overlapping")
        row_size *= 2
        options |= {"position_bias": empty(dtype, pool_size, 2 * head_dim), "row_table": empty("i32", 1, 4)}
        options["cu_seqlens_q"] = empty("i32", 2)
    if is_normed:
        options["norm_weight"] = empty("fp32", head_dim)
    if rotary_dim:
        options |= {"positions": empty("i64", 1), "cos_sin_cache": empty("fp32", 1, rotary_dim)}
    block_size = 4 * pool_size
    if options.get("in_rings"):
        block_size = pool_size + 63
    rows, entries = empty(dtype, 4, block_size, row_size), empty(entry or dtype, 4, 4, size)
    slots = empty("i64", 1)
    return single_case(
        " ".join(words),
        write_pooled_entries,
        rows,
        entries,
        slots,
        slots,
        targets=targets,
        pool_size=pool_size,
        **options,
    )


def _block_index_case(
    target: str,
    heads: int,
    *,
    size: int,
    dtype: str = "bf16",
    is_weighted: bool = False,
    is_packed: bool = False,
    **options: Any,
) -> CompileCase:
    q, cache = empty(dtype, 1, heads, 128), empty(dtype, 4, _BLOCK_SIZE, 128)
    words = [f"{heads} heads {dtype} blocks of {size}", *(f"{name}={value}" for name, value in options.items())]
    if is_packed:
        cache = empty("u8", 4, _BLOCK_SIZE, 128 + 4)
        words.append("packed")
    if is_weighted:
        options["weights"] = empty("fp32", 1, heads)
        words.append("weights")
    options |= {"top_k": 1, "chosen_block_size": size}
    expect: dict[str, tuple[str, ...]] = {}
    if dtype != "fp32":
        expect[target] = (TENSOR_CORES[target] if heads >= 64 or target == "gfx942" else "HMMA",)
    return launch_case(
        f"choose_blocks {' '.join(words)} for {target}",
        launch_of(_block_ranks_kernel, target, choose_blocks, q, cache, **_step(), **options),
        aligned=("stride_q_token", "stride_q_head", "stride_weights_token"),
        expect=expect,
        targets=(target,),
    )


def write_cases(*, fused: bool) -> list[CompileCase]:
    """Return writes to each kind of cache. fused: with norm and rotation."""
    cases = [_write_case(kind, fused) for kind in ("", "e4m3", *_RECORDS)]
    if fused:
        cases.append(_write_case("", fused, rotates=False))
    return cases


def _cache(kind: str, size: int, dtype: str) -> Any:
    if kind in _RECORDS:
        return empty("u8", _NUM_BLOCKS, _BLOCK_SIZE, _RECORDS[kind])
    return empty({"": dtype, "e4m3": "fp8e4nv"}[kind], _NUM_BLOCKS, _BLOCK_SIZE, size)


def _step() -> dict[str, Any]:
    """Return the arguments of one decode step."""
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
    window: bool = False,
) -> CompileCase:
    size = v_head_dim + rope
    options = {**_step(), "v_head_dim": v_head_dim, "softmax_scale": 0.1, "max_seqlen_q": 1, "return_lse": True}
    if kind == "e4m3":
        options["k_scale"] = empty("fp32", 1)
    if sparse:
        options["indices"] = empty("i32", 1, 2048)
    if window:
        options["window_size"] = (127, -1)
    q, cache = empty(dtype, 1, heads, size), _cache(kind, size, dtype)
    launch, programs_per_sm = planned_launch(_mla_attention_kernel, target, paged_mla_attention, q, cache, **options)
    block_m, block_n = launch.arguments["BLOCK_M"], launch.arguments["BLOCK_N"]
    expect: dict[str, tuple[str, ...]] = {}
    if dtype != "fp32":
        expect[target] = (TENSOR_CORES[target],)
        if block_m != 64 and target.startswith("sm"):  # wgmma and tcgen05 need 64 rows
            expect[target] = ("HMMA",)
    words = ["paged_mla_attention", f"{heads} heads {block_m} x {block_n} {v_head_dim} + {rope} {dtype}"]
    if kind:
        words.append(kind)
    if sparse:
        words.append("chosen")
    if window:
        words.append("window")
    return launch_case(
        " ".join([*words, "for", target]),
        launch,
        aligned=tuple(f"stride_{name}" for name in _ALIGNED if launch.arguments[f"stride_{name}"] % 16 == 0),
        expect=expect,
        targets=(target,),
        programs_per_sm=programs_per_sm,
        may_spill=kind == "e4m3" and v_head_dim > 512,  # see `WIDE_LATENTS`
    )


def _index_case(
    target: str,
    heads: int,
    *,
    dtype: str = "bf16",
    pool_size: int = 1,
    candidate_size: int = 0,
    scales_last: bool = False,
) -> CompileCase:
    q, weights, cache = empty(dtype, 1, heads, 128), empty("fp32", 1, heads), empty("u8", 4, _BLOCK_SIZE, 128 + 4)
    expect: dict[str, tuple[str, ...]] = {target: (TENSOR_CORES[target],)}
    if heads < 64 and target != "gfx942":
        expect[target] = ("HMMA",)
    if dtype == "fp32":
        cache = empty("fp32", 4, _BLOCK_SIZE, 128)
        expect = {}
    words = [f"{heads} heads {dtype} pools of {pool_size}"]
    options: dict[str, Any] = {"top_k": 1, "pool_size": pool_size}
    if scales_last:
        cache = cache.flatten(1)
        words.append("scales last")
    if candidate_size:
        words.append(f"candidates of {candidate_size}")
        options |= {"candidates": empty("i32", 1, 256), "candidate_size": candidate_size}
    return launch_case(
        f"choose_keys {' '.join(words)} for {target}",
        launch_of(_index_scores_kernel, target, choose_keys, q, weights, cache, **_step(), **options),
        aligned=("stride_q_token", "stride_q_head", "stride_weights_token", "stride_out_token"),
        expect=expect,
        targets=(target,),
    )


def _write_case(kind: str, fused: bool, *, rotates: bool = True) -> CompileCase:
    latent, k_rope, cache = empty("bf16", 1, 512), empty("bf16", 1, 64), _cache(kind, 576, "bf16")
    slots, scale = empty("i64", 1), None
    if kind == "e4m3":
        scale = empty("fp32", 1)
    write = latent, k_rope, cache, slots
    if fused:
        name = "mla_norm_rope_and_cache"
        if not rotates:
            name += " unrotated"
        table = empty("fp32", 1, 64 if rotates else 0)
        q, rotation = empty("bf16", 1, 128, 64), (empty("i64", 1), table, empty("bf16", 512))
        options = {"interleaved": True, "scale": scale}
        (launch,) = launches_of("sm_80", mla_norm_rope_and_cache, q, *write, *rotation, **options)
    else:
        name = "concat_and_cache_mla"
        (launch,) = launches_of("sm_80", concat_and_cache_mla, *write, scale=scale)
    return launch_case(f"{name} {kind or 'bf16'} cache", launch)
