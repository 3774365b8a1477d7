"""Latent attention and its cache writes: every tile the chooser returns, for its target."""

from __future__ import annotations

from typing import Any

from paged.bench.compilation.case import NATIVE_FP8, TARGETS, CompileCase, kernel_case
from paged.bench.compilation.cases.attention import ELEMENT_SIZE, TENSOR_CORES
from paged.kernels.cache.concat_and_cache_mla import _concat_and_cache_mla_kernel
from paged.kernels.common.attention.plan import padded_head_dim
from paged.kernels.mla.choose_keys import _index_scores_kernel, index_tile
from paged.kernels.mla.config import ONE_LOOP_ROWS, mla_tile
from paged.kernels.mla.tile_kernel import _mla_attention_kernel

_TABLES = (
    *("block_table_ptr", "cu_seqlens_q_ptr", "seq_lens_ptr", "items_ptr", "counts_ptr", "first_padding_ptr"),
    *("indices_ptr", "token_keys_ptr"),
)
_KINDS = dict.fromkeys(_TABLES, "*i32")
_KINDS |= dict.fromkeys(("lse_ptr", "partial_out_ptr", "partial_lse_ptr", "scales_ptr", "k_scale_ptr"), "*fp32")
_KINDS |= {"scale": "fp32"}
_ALIGNED = ("q_token", "q_head", "latent_block", "latent_slot", "rope_block", "rope_slot", "out_token", "out_head")


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
    tile = mla_tile(v_head_dim, ELEMENT_SIZE[dtype], target, rows=heads, kind=kind, chosen=sparse)
    kinds: dict[str, str | None] = dict(_KINDS)
    kinds["latent_ptr"] = {"": f"*{dtype}", "e4m3": "*u8", "packed": "*u8"}[kind]
    kinds["rope_ptr"] = {"": f"*{dtype}", "e4m3": "*u8", "packed": "*i16"}[kind]
    absent = {
        "sinks_ptr": True,
        "k_scale_ptr": kind != "e4m3",
        "scales_ptr": kind != "packed",
        "indices_ptr": not sparse,
        "token_keys_ptr": not sparse,
    }
    constexprs: dict[str, Any] = {
        **{name: None for name, is_absent in absent.items() if is_absent},
        "GROUP": heads,
        "V_HEAD_DIM": v_head_dim,
        "V_HEAD_DIM_PADDED": padded_head_dim(v_head_dim),
        "ROPE_DIM": rope,
        "ROPE_DIM_PADDED": padded_head_dim(rope),
        "KV_BLOCK_SIZE": 64,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "CAUSAL": True,
        "ONE_LOOP": sparse or tile.block_m > ONE_LOOP_ROWS,
        "KIND": kind,
        "NATIVE_FP8": target in NATIVE_FP8,
        "CLEAR_PADDING": True,
    }
    expect: dict[str, tuple[str, ...]] = {}
    if dtype != "fp32":
        expect[target] = (TENSOR_CORES[target],)
        if tile.block_m != 64 and target.startswith("sm"):  # wgmma and tcgen05 take 64 rows
            expect[target] = ("HMMA",)
    words = ["paged_mla_attention", f"{heads} heads {tile.block_m} x {tile.block_n} {v_head_dim} + {rope} {dtype}"]
    if kind:
        words.append(kind)
    if sparse:
        words.append("chosen")
    return kernel_case(
        " ".join([*words, "for", target]),
        _mla_attention_kernel,
        constexprs,
        kinds,
        dtype=dtype,
        aligned=tuple(f"stride_{name}" for name in _ALIGNED if not (kind == "packed" and "latent" in name)),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        expect=expect,
        targets=(target,),
        programs_per_sm=tile.programs_per_sm,
    )


def _index_case(target: str, heads: int, *, dtype: str = "bf16") -> CompileCase:
    block_n, num_warps = index_tile(ELEMENT_SIZE[dtype])
    kinds: dict[str, str | None] = {"key_ptr": "*u8", "scales_ptr": "*fp32"}
    expect: dict[str, tuple[str, ...]] = {target: (TENSOR_CORES[target],)}
    if heads < 64 and target != "gfx942":
        expect[target] = ("HMMA",)
    if dtype == "fp32":
        kinds = {"key_ptr": "*fp32", "scales_ptr": None}
        expect = {}
    kinds |= dict.fromkeys(("block_table_ptr", "cu_seqlens_q_ptr", "seq_lens_ptr"), "*i32")
    kinds |= dict.fromkeys(("weights_ptr", "out_ptr"), "*fp32")
    sizes = {"NUM_HEADS": heads, "HEADS_PADDED": heads, "HEAD_DIM": 128, "DIM_PADDED": 128, "KV_BLOCK_SIZE": 64}
    tile = {"BLOCK_N": block_n, "BLOCKS": 1024 // block_n, "NATIVE_FP8": target in NATIVE_FP8}
    aligned = ("q_token", "q_head", "weights_token", "out_token")
    return kernel_case(
        f"choose_keys {heads} heads {dtype} for {target}",
        _index_scores_kernel,
        {**sizes, **tile},
        kinds,
        dtype=dtype,
        aligned=tuple(f"stride_{name}" for name in aligned),
        num_warps=num_warps,
        num_stages=2,
        expect=expect,
        targets=(target,),
    )


def _write_case(kind: str, fused: bool) -> CompileCase:
    caches = {"": ("*bf16", "*bf16"), "e4m3": ("*u8", "*u8"), "packed": ("*u8", "*bf16")}[kind]
    kinds: dict[str, str | None] = dict(zip(("latent_cache_ptr", "rope_cache_ptr"), caches, strict=True))
    kinds |= {"slot_mapping_ptr": "*i64", "positions_ptr": "*i64", "cos_sin_cache_ptr": "*fp32", "eps": "fp32"}
    kinds |= {"scale_ptr": None, "scales_cache_ptr": None}
    if kind == "e4m3":
        kinds["scale_ptr"] = "*fp32"
    if kind == "packed":
        kinds["scales_cache_ptr"] = "*fp32"
    if not fused:
        kinds |= dict.fromkeys(("q_ptr", "positions_ptr", "cos_sin_cache_ptr", "weight_ptr"))
    sizes = {"LATENT": 512, "LATENT_PADDED": 512, "ROPE_DIM": 64, "KV_BLOCK_SIZE": 64, "NUM_KV_HEADS": 1}
    heads = {"NUM_Q_HEADS": 128, "ROTARY_DIM": 64, "BLOCK_HEADS": 32, "BLOCK_PAIRS": 32, "BLOCK_REST": 1}
    if not fused:
        heads = {"NUM_Q_HEADS": 1, "ROTARY_DIM": 1, "BLOCK_HEADS": 1, "BLOCK_PAIRS": 1, "BLOCK_REST": 64}
    flags = {"INTERLEAVED": fused, "KIND": kind, "NATIVE_FP8": False}
    name = "mla_norm_rope_and_cache" if fused else "concat_and_cache_mla"
    return kernel_case(
        f"{name} {kind or 'bf16'} cache", _concat_and_cache_mla_kernel, {**sizes, **heads, **flags}, kinds, num_warps=4
    )
