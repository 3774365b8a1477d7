"""paged_attention: every tile the chooser returns, for its target, and the planning and merging kernels."""

from __future__ import annotations

from bench.compile import TARGETS, CompileCase
from paged.kernels.attention_config import AttentionTile, decode_tile, padded_head_dim, prefill_tile
from paged.kernels.attention_kernels import _attention_kernel, _merge_splits_kernel
from paged.kernels.attention_plan import PLAN_LANES, PLAN_WARPS, _plan_kernel

_ELEMENT_SIZE = {"bf16": 2, "fp32": 4}
_TENSOR_CORES = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA", "gfx942": "v_mfma"}


def cases() -> list[CompileCase]:
    """Head sizes 64 to 256, with and without window and softcap, for each target's own tiles."""
    found = [_plan_case(), _merge_case(128), _merge_case(256)]
    for target in TARGETS:
        for head_dim in (64, 80, 128, 256):
            found += [_attention_case(target, kind, head_dim, "bf16") for kind in ("decode", "prefill")]
        found.append(_attention_case(target, "prefill", 128, "bf16", window_left=4095, softcap=True))
        found += [_attention_case(target, kind, 128, "fp32") for kind in ("decode", "prefill")]
    return found


def _attention_case(
    target: str, kind: str, head_dim: int, dtype: str, window_left: int = -1, softcap: bool = False
) -> CompileCase:
    choose = decode_tile if kind == "decode" else prefill_tile
    tile: AttentionTile = choose(head_dim, _ELEMENT_SIZE[dtype], target)
    tensors = dict.fromkeys(("q_ptr", "k_cache_ptr", "v_cache_ptr", "out_ptr"), f"*{dtype}")
    tensors["lse_ptr"] = "*fp32"
    tables = ("block_table_ptr", "cu_seqlens_q_ptr", "seq_lens_ptr", "items_ptr", "counts_ptr")
    tensors |= dict.fromkeys(tables, "*i32") | dict.fromkeys(("partial_out_ptr", "partial_lse_ptr"), "*fp32")
    strides = {
        f"stride_{name}": "i32"
        for name in (
            *("q_token", "q_head", "k_block", "k_slot", "k_head", "v_block", "v_slot", "v_head"),
            *("out_token", "out_head", "lse_head", "table_seq"),
        )
    }
    constexprs = {
        "GROUP": 4,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PADDED": padded_head_dim(head_dim),
        "KV_BLOCK_SIZE": 16,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "CAUSAL": True,
        "WINDOW_LEFT": window_left,
        "WINDOW_RIGHT": -1,
        "HAS_SOFTCAP": softcap,
        "CLEAR_PADDING": True,
    }
    scalars = {"num_tokens": "i32", "num_seqs": "i32", "scale": "fp32", "softcap": "fp32"}
    if dtype == "fp32":
        expect = {}
    elif kind == "decode" and target.startswith("sm"):
        expect = {target: ("HMMA", "LDGSTS")}
    else:
        expect = {target: (_TENSOR_CORES[target], *(("LDGSTS",) if target.startswith("sm") else ()))}
    name = f"paged_attention {kind} D={head_dim} {dtype}" + (" window softcap" if softcap else "")
    return CompileCase(
        name=f"{name} for {target}",
        kernel=_attention_kernel,
        signature=tensors | scalars | strides | dict.fromkeys(constexprs, "constexpr"),
        constexprs=constexprs,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        divisible_by_16=tuple(name for name in strides if name not in ("stride_lse_head", "stride_table_seq")),
        expect=expect,
        targets=(target,),
        programs_per_sm=tile.programs_per_sm,
    )


def _merge_case(head_dim: int) -> CompileCase:
    signature = {
        "out_ptr": "*bf16",
        "lse_ptr": "*fp32",
        "cu_seqlens_q_ptr": "*i32",
        "split_tiles_ptr": "*i32",
        "counts_ptr": "*i32",
        "partial_out_ptr": "*fp32",
        "partial_lse_ptr": "*fp32",
        "stride_out_token": "i32",
        "stride_out_head": "i32",
        "stride_lse_head": "i32",
    }
    constexprs = {"GROUP": 4, "HEAD_DIM": head_dim, "HEAD_DIM_PADDED": head_dim, "BLOCK_M": 128, "MERGE_M": 16}
    return CompileCase(
        name=f"paged_attention merge D={head_dim}",
        kernel=_merge_splits_kernel,
        signature=signature | dict.fromkeys(constexprs, "constexpr"),
        constexprs=constexprs,
        divisible_by_16=("stride_out_token", "stride_out_head"),
    )


def _plan_case() -> CompileCase:
    pointers = ("cu_seqlens_q_ptr", "seq_lens_ptr", "tile_starts_ptr", "items_ptr", "split_tiles_ptr", "counts_ptr")
    scalars = ("num_seqs", "search_steps", "min_rows", "max_rows", "num_kv_heads", "places")
    scalars += ("max_slots", "min_split_blocks", "piece_blocks")
    constexprs = {
        "GROUP": 4,
        "BLOCK_M": 128,
        "BLOCK_N": 64,
        "CAUSAL": True,
        "WINDOW_LEFT": 4095,
        "WINDOW_RIGHT": -1,
        "LANES": PLAN_LANES,
    }
    return CompileCase(
        name="paged_attention plan",
        kernel=_plan_kernel,
        signature=dict.fromkeys(pointers, "*i32")
        | dict.fromkeys(scalars, "i32")
        | dict.fromkeys(constexprs, "constexpr"),
        constexprs=constexprs,
        num_warps=PLAN_WARPS,
    )
