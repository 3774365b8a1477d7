"""paged_attention: every tile the chooser returns, for its target, and the planning and merging kernels."""

from __future__ import annotations

from typing import Any

from paged.bench.compilation.case import EVERY_CASE, NATIVE_FP8, TARGETS, CompileCase, kernel_case
from paged.kernels.attention.config import decode_tile, prefill_tile
from paged.kernels.attention.tile_kernels import _attention_kernel
from paged.kernels.common.attention.keys import _pack_mask_kernel
from paged.kernels.common.attention.merge_splits import _merge_splits_kernel, merged_rows
from paged.kernels.common.attention.plan import padded_head_dim
from paged.kernels.common.attention.plan_kernel import PLAN_LANES, PLAN_WARPS, _plan_kernel
from paged.kernels.common.device import LARGE_SHARED_MEMORY

ELEMENT_SIZE = {"bf16": 2, "fp32": 4}
TENSOR_CORES = {"sm_90": "HGMMA", "sm_100": "UTCHMMA", "sm_103": "UTCHMMA", "gfx942": "v_mfma"}
TENSOR_CORES |= dict.fromkeys(("sm_80", "sm_89", "sm_120"), "HMMA")
_ALIGNED = ("q_token", "q_head", "k_block", "k_slot", "k_head", "v_block", "v_slot", "v_head", "out_token", "out_head")
_TABLES = ("block_table_ptr", "cu_seqlens_q_ptr", "seq_lens_ptr", "items_ptr", "counts_ptr", "first_padding_ptr")
_KINDS = dict.fromkeys((*_TABLES, "split_tiles_ptr", "tile_starts_ptr"), "*i32")
_KINDS |= dict.fromkeys(("lse_ptr", "partial_out_ptr", "partial_lse_ptr"), "*fp32")
_KINDS |= {"scale": "fp32", "softcap": "fp32"}
_ELEMENTS = {"e4m3": "u8", "e5m2": "u8", "int8": "i8"}
_OPTIONS = {  # argument -> type when given
    "is_causal_ptr": "*i1",
    "sinks_ptr": "*bf16",
    "alibi_slopes_ptr": "*fp32",
    "k_scale_ptr": "*fp32",
    "v_scale_ptr": "*fp32",
    "mask_ptr": "*i64",
}


def cases() -> list[CompileCase]:
    """Head sizes 64 to 512, K wider than V, gathered, in boxes, 8-bit caches, all options: each target's own tiles."""
    plan = {"GROUP": 4, "CHUNK_SIZE": 0, "BLOCK_M": 128, "BLOCK_N": 64, "LANES": PLAN_LANES, "DETERMINISTIC": False}
    merge = {"GROUP": 4, "BLOCK_M": 128}
    masks = {"mask_ptr": "*i1", "words_ptr": "*i64"}
    outs = ("stride_out_token", "stride_out_head")
    cases = [
        kernel_case("paged_attention plan", _plan_kernel, plan, _KINDS | _OPTIONS, num_warps=PLAN_WARPS),
        kernel_case("paged_attention mask", _pack_mask_kernel, {}, _KINDS | masks, aligned=()),
    ]
    copies = dict.fromkeys(("sm_80", "sm_90", "sm_100"), ("LDGSTS.128",))
    for head_dim in (128, 256, 512):
        sizes = {**merge, "MERGE_M": merged_rows(128, head_dim), "V_HEAD_DIM": head_dim, "V_HEAD_DIM_PADDED": head_dim}
        name = f"paged_attention merge D={head_dim}"
        cases.append(
            kernel_case(name, _merge_splits_kernel, sizes, _KINDS, aligned=outs, expect=copies, programs_per_sm=4)
        )
    everything: dict[str, Any] = {"window": True, "options": tuple(_OPTIONS)}
    for target in TARGETS:
        for head_dim in (128, 256):
            for rows in (32, 64):
                cases.append(_attention_case(target, "decode", head_dim, rows=rows, box=64))
        cases.append(_attention_case(target, "decode", 512, rows=32))
        cases.append(_attention_case(target, "decode", 512, box=16, rows=16))
        cases.append(_attention_case(target, "decode", 128, rows=64))
        cases.append(_attention_case(target, "decode", 128, rows=64, **everything))
        boxes: tuple[int, ...] = (0,)
        if target in LARGE_SHARED_MEMORY:
            boxes = (0, 64, 128)
        head_dims: tuple[int, ...] = (128, 256)
        if target in EVERY_CASE:
            head_dims = (64, 80, 128, 256)
        for kind in ("decode", "prefill"):
            for box in boxes:
                for head_dim in head_dims:
                    cases.append(_attention_case(target, kind, head_dim, box=box))
                for cache in _ELEMENTS:
                    cases.append(_attention_case(target, kind, 128, cache=cache, box=box))
            for head_dim in (64, 128, 256):
                cases.append(_attention_case(target, kind, head_dim, dtype="fp32"))
            cases += [
                _attention_case(target, kind, 128, window=True, box=boxes[-1]),
                _attention_case(target, kind, 128, window=True, softcap=True, box=boxes[-1]),
                _attention_case(target, kind, 128, dtype="fp32", softcap=True),
                _attention_case(target, kind, 128, **everything),
                _attention_case(target, kind, 256, **everything),
                _attention_case(target, kind, 512, **everything),
                _attention_case(target, kind, 384),
                _attention_case(target, kind, 512),
                _attention_case(target, kind, 512, cache="e4m3"),
                _attention_case(target, kind, 256, cache="int8"),
                _attention_case(target, kind, 512, cache="int8"),
                _attention_case(target, kind, 128, cache="int8", **everything),
                _attention_case(target, kind, 256, cache="int8", **everything),
                _attention_case(target, kind, 512, cache="int8", **everything),
                _attention_case(target, kind, 128, cache="int8", dtype="fp32"),
                _attention_case(target, kind, 512, cache="int8", shared=True),
                _attention_case(target, kind, 512, dtype="fp32"),
                _attention_case(target, kind, 192, v_head_dim=128),
                _attention_case(target, kind, 192, v_head_dim=128, **everything),
                _attention_case(target, kind, 128, chunk_size=8192),
                _attention_case(target, kind, 512, shared=True),
            ]
    # Some tiles are chosen for boxes and without them.
    return list({(case.name, case.targets): case for case in cases}.values())


def _attention_case(
    target: str,
    kind: str,
    head_dim: int,
    *,
    v_head_dim: int | None = None,
    dtype: str = "bf16",
    cache: str | None = None,
    box: int = 0,
    rows: int = 16,
    window: bool = False,
    chunk_size: int = 0,
    shared: bool = False,
    softcap: bool = False,
    options: tuple[str, ...] = (),
) -> CompileCase:
    v_head_dim = v_head_dim or head_dim
    sizes = head_dim, v_head_dim, ELEMENT_SIZE[dtype], target, box
    more_scores = softcap or "mask_ptr" in options
    if kind == "decode":
        tile = decode_tile(*sizes, rows=rows, more_scores=more_scores, kind=cache or "")
    else:
        tile = prefill_tile(*sizes, more_scores=more_scores, kind=cache or "")
    by_tma = tile.by_tma
    width, v_width = padded_head_dim(head_dim), padded_head_dim(v_head_dim)
    element = _ELEMENTS.get(cache or "", dtype)
    absent = set(_OPTIONS) - set(options)
    if cache == "int8":
        absent -= {"k_scale_ptr", "v_scale_ptr"}
    kinds = _KINDS | _OPTIONS
    block_size = 16
    kinds["k_cache"] = kinds["v_cache"] = f"*{element}"
    if by_tma:
        block_size = box
        kinds["k_cache"] = f"tensordesc<{element}[1, {tile.block_n}, 1, {width}]>"
        kinds["v_cache"] = f"tensordesc<{element}[1, {tile.block_n}, 1, {v_width}]>"
    constexprs: dict[str, Any] = {
        **{name: None for name in _OPTIONS if name in absent},
        "GROUP": 4,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PADDED": width,
        "V_HEAD_DIM": v_head_dim,
        "V_HEAD_DIM_PADDED": v_width,
        "KV_BLOCK_SIZE": block_size,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "HAS_WINDOW": window or chunk_size > 0,
        "CHUNK_SIZE": chunk_size,
        "HAS_SOFTCAP": softcap,
        "USE_TMA": by_tma,
        "SAME_STRIDES": v_head_dim == head_dim,
        "SHARED_KV": shared,
        "KIND": cache or "",
        "NATIVE_FP8": target in NATIVE_FP8,
        "CLEAR_PADDING": True,
        "EDGE_STAGES": tile.edge_stages,
    }
    copy = "load_dwordx4"
    matrix = TENSOR_CORES[target]
    if target.startswith("sm"):
        copy = "UTMALDG" if by_tma else "LDGSTS.128"
        if tile.block_m < 64:
            matrix = "HMMA"
    expect: dict[str, tuple[str, ...]] = {}
    if dtype != "fp32":
        expect[target] = (matrix, copy)
        if shared and cache:  # Triton does not copy ahead what is loaded once and decoded twice
            expect[target] = (matrix,)
    words = [f"{tile.block_m} x {tile.block_n}", f"D={head_dim}", dtype]
    if v_head_dim != head_dim:
        words[1] = f"D={head_dim},{v_head_dim}"
    if cache:
        words.append(f"{cache} cache")
    flags = {
        "boxes": by_tma,
        "window": window,
        "chunk": chunk_size > 0,
        "shared K and V": shared,
        "softcap": softcap,
        "options": bool(options),
    }
    words += [word for word, is_set in flags.items() if is_set]
    return kernel_case(
        f"paged_attention {kind} {' '.join(words)} for {target}",
        _attention_kernel,
        constexprs,
        kinds,
        dtype=dtype,
        aligned=tuple(f"stride_{name}" for name in _ALIGNED),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        expect=expect,
        targets=(target,),
        programs_per_sm=tile.programs_per_sm,
        may_spill=dtype == "fp32",
    )
