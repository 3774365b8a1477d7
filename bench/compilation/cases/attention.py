"""paged_attention: every tile the chooser returns, for its target, and the planning and merging kernels."""

from __future__ import annotations

from typing import Any

from paged.bench.compilation.case import EVERY_CASE, NATIVE_FP8, TARGETS, CompileCase, kernel_case
from paged.kernels.attention.config import decode_tile, padded_head_dim, prefill_tile
from paged.kernels.attention.mask import _pack_mask_kernel
from paged.kernels.attention.plan_kernel import PLAN_LANES, PLAN_WARPS, _plan_kernel
from paged.kernels.attention.tile_kernels import _attention_kernel, _merge_splits_kernel
from paged.kernels.common.device import LARGE_SHARED_MEMORY

_ELEMENT_SIZE = {"bf16": 2, "fp32": 4}
_TENSOR_CORES = {"sm_90": "HGMMA", "sm_100": "UTCHMMA", "sm_103": "UTCHMMA", "gfx942": "v_mfma"}
_TENSOR_CORES |= dict.fromkeys(("sm_80", "sm_89", "sm_120"), "HMMA")
_ALIGNED = ("q_token", "q_head", "k_block", "k_slot", "k_head", "v_block", "v_slot", "v_head", "out_token", "out_head")
_TABLES = ("block_table_ptr", "cu_seqlens_q_ptr", "seq_lens_ptr", "items_ptr", "counts_ptr", "first_padding_ptr")
_KINDS = dict.fromkeys((*_TABLES, "split_tiles_ptr", "tile_starts_ptr"), "*i32")
_KINDS |= dict.fromkeys(("lse_ptr", "partial_out_ptr", "partial_lse_ptr"), "*fp32")
_KINDS |= {"scale": "fp32", "softcap": "fp32"}
_OPTIONS = {  # argument -> type when given
    "is_causal_ptr": "*i1",
    "sinks_ptr": "*bf16",
    "alibi_slopes_ptr": "*fp32",
    "k_scale_ptr": "*fp32",
    "v_scale_ptr": "*fp32",
    "mask_ptr": "*i64",
}


def cases() -> list[CompileCase]:
    """Head sizes 64 to 256, gathered and in boxes, fp8 caches, and all options at once, for each target's own tiles."""
    plan = {"GROUP": 4, "BLOCK_M": 128, "BLOCK_N": 64, "LANES": PLAN_LANES, "DETERMINISTIC": False}
    merge = {"GROUP": 4, "BLOCK_M": 128, "MERGE_M": 16}
    masks = {"mask_ptr": "*i1", "words_ptr": "*i64"}
    outs = ("stride_out_token", "stride_out_head")
    found = [
        kernel_case("paged_attention plan", _plan_kernel, plan, _KINDS | _OPTIONS, num_warps=PLAN_WARPS),
        kernel_case("paged_attention mask", _pack_mask_kernel, {}, _KINDS | masks, aligned=()),
    ]
    for head_dim in (128, 256):
        sizes = {**merge, "HEAD_DIM": head_dim, "HEAD_DIM_PADDED": head_dim}
        name = f"paged_attention merge D={head_dim}"
        found.append(kernel_case(name, _merge_splits_kernel, sizes, _KINDS, aligned=outs))
    for target in TARGETS:
        for head_dim in (128, 256):
            found += [_attention_case(target, "decode", head_dim, rows=rows, box=64) for rows in (32, 64)]
        found.append(_attention_case(target, "decode", 128, rows=64))
        found.append(_attention_case(target, "decode", 128, rows=64, window=True, options=tuple(_OPTIONS)))
        boxes = (0, 64, 128) if target in LARGE_SHARED_MEMORY else (0,)
        for kind in ("decode", "prefill"):
            for box in boxes:
                dims = (64, 80, 128, 256) if target in EVERY_CASE else (128, 256)
                found += [_attention_case(target, kind, head_dim, box=box) for head_dim in dims]
                found.append(_attention_case(target, kind, 128, cache="u8", box=box))
            found += [
                *(_attention_case(target, kind, head_dim, dtype="fp32") for head_dim in (64, 128, 256)),
                _attention_case(target, kind, 128, window=True, box=boxes[-1]),
                _attention_case(target, kind, 128, window=True, softcap=True, box=boxes[-1]),
                _attention_case(target, kind, 128, dtype="fp32", softcap=True),
                *(_attention_case(target, kind, dim, window=True, options=tuple(_OPTIONS)) for dim in (128, 256)),
            ]
    return list({(case.name, case.targets): case for case in found}.values())


def _attention_case(
    target: str,
    kind: str,
    head_dim: int,
    *,
    dtype: str = "bf16",
    cache: str | None = None,
    box: int = 0,
    rows: int = 16,
    window: bool = False,
    softcap: bool = False,
    options: tuple[str, ...] = (),
) -> CompileCase:
    sizes = head_dim, _ELEMENT_SIZE[dtype], target, box
    more_scores = softcap or "mask_ptr" in options
    if kind == "decode":
        tile = decode_tile(*sizes, rows=rows, more_scores=more_scores, fp8=cache is not None)
    else:
        tile = prefill_tile(*sizes, more_scores=more_scores)
    by_tma = tile.by_tma
    width = padded_head_dim(head_dim)
    element = cache or dtype
    cached = f"tensordesc<{element}[1, {tile.block_n}, 1, {width}]>" if by_tma else f"*{element}"
    kinds = _KINDS | _OPTIONS | {"k_cache": cached, "v_cache": cached}
    constexprs: dict[str, Any] = {
        **{name: None for name in _OPTIONS if name not in options},
        "GROUP": 4,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PADDED": width,
        "KV_BLOCK_SIZE": box if by_tma else 16,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "HAS_WINDOW": window,
        "HAS_SOFTCAP": softcap,
        "USE_TMA": by_tma,
        "SAME_STRIDES": True,
        "FP8": cache == "u8",
        "NATIVE_FP8": target in NATIVE_FP8,
        "CLEAR_PADDING": True,
    }
    copies = ("UTMALDG" if by_tma else "LDGSTS.128",) if target.startswith("sm") else ("load_dwordx4",)
    if dtype == "fp32":
        expect = {}
    elif tile.block_m < 64 and target.startswith("sm"):
        expect = {target: ("HMMA", *copies)}
    else:
        expect = {target: (_TENSOR_CORES[target], *copies)}
    words = [f"{tile.block_m} x {tile.block_n}", f"D={head_dim}", dtype, *([f"{cache} cache"] if cache else [])]
    flags = {"boxes": by_tma, "window": window, "softcap": softcap, "options": bool(options)}
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
    )
