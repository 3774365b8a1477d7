"""The two products of low-rank adapters at the layers of Qwen3-8B."""

from __future__ import annotations

from typing import Any

from paged.bench.compilation.case import EVERY_CASE, CompileCase, kernel_case
from paged.kernels.common.device import Device
from paged.kernels.lora.add_lora import _lora_expand_kernel, _lora_shrink_kernel
from paged.kernels.lora.batch import FEW_ROWS, MANY_ROWS
from paged.kernels.lora.config import expand_tile, shrink_tile
from paged.kernels.lora.weights import MAX_PARTS

# in_features and the sizes of the parts.
QKV, GATE_UP, DOWN = (4096, (4096, 1024, 1024)), (4096, (12288, 12288)), (12288, (4096,))

_BYTES = {"bf16": 2, "fp32": 4}
KINDS = dict.fromkeys(("ranks_ptr", "rows_ptr", "slots_ptr"), "*i32") | {"scales_ptr": "*fp32", "shrunk_ptr": "*fp32"}


def cases() -> list[CompileCase]:
    """Few rows and many, in 2 bytes and 4; layers of one, two and three parts; the input whole and split."""
    cases = []
    for dtype in ("bf16", "fp32"):
        for block_m, splits in ((FEW_ROWS, (1, 2, 4, 8)), (MANY_ROWS, (1, 2))):
            for target in EVERY_CASE:
                for layer in (QKV, GATE_UP, DOWN):
                    cases.append(_shrink(target, dtype, block_m, *layer))
            cases.append(_shrink("sm_90", dtype, block_m, 4100, (4096,)))  # with a last step that is a tail
            for num_splits in splits:
                cases.append(_expand(dtype, block_m, num_splits, QKV[1]))
        cases.append(_expand(dtype, MANY_ROWS, 1, GATE_UP[1]))
        cases.append(_expand(dtype, MANY_ROWS, 1, DOWN[1]))
    return cases


def _shrink(target: str, dtype: str, block_m: int, in_features: int, part_sizes: tuple[int, ...]) -> CompileCase:
    num_parts = len(part_sizes)
    tile = shrink_tile(1, block_m, num_parts, 64, in_features, _BYTES[dtype], Device(target, 132))
    constexprs = {
        "NUM_PARTS": num_parts,
        "EVEN_K": in_features % (tile.block_k * tile.num_splits) == 0,
        "BLOCK_M": block_m,
        "BLOCK_R": tile.block_r,
        "BLOCK_K": tile.block_k,
    }
    return _case(
        f"lora shrink {dtype} {in_features} parts={num_parts} {block_m}x{tile.block_r}x{tile.block_k} for {target}",
        _lora_shrink_kernel,
        dtype,
        constexprs,
        aligned=in_features % 16 == 0,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        targets=(target,),
    )


def _expand(dtype: str, block_m: int, num_splits: int, part_sizes: tuple[int, ...]) -> CompileCase:
    tile = expand_tile(block_m, _BYTES[dtype])
    constexprs = {f"N_{part}": size for part, size in enumerate((*part_sizes, 0, 0)[:MAX_PARTS])} | {
        "NUM_PARTS": len(part_sizes),
        "NUM_SPLITS": num_splits,
        "BLOCK_M": block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_R": tile.block_r,
    }
    size = f"{block_m}x{tile.block_n}x{tile.block_r}"
    return _case(
        f"lora expand {dtype} {sum(part_sizes)} parts={len(part_sizes)} {size} splits={num_splits}",
        _lora_expand_kernel,
        dtype,
        constexprs,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _case(
    name: str, kernel: Any, dtype: str, constexprs: dict[str, Any], *, aligned: bool = True, **options: Any
) -> CompileCase:
    sizes = []
    for argument in kernel.arg_names:
        is_size = argument not in constexprs and not argument.endswith("_ptr")
        if is_size and (aligned or argument not in ("K", "stride_x_row")):
            sizes.append(argument)
    expect = {"sm_80": ("HMMA",), "sm_90": ("HMMA",), "gfx942": ("v_mfma",)}
    if constexprs["BLOCK_M"] >= 64:  # as wgmma needs
        expect["sm_90"] = ("HGMMA",)
    if dtype == "fp32":
        expect = {}
    return kernel_case(
        name,
        kernel,
        constexprs,
        KINDS,
        dtype=dtype,
        aligned=tuple(sizes),
        expect=expect,
        **options,
    )
