"""The two products of low-rank adapters at the layers of Qwen3-8B."""

from __future__ import annotations

import torch

from paged.bench.compilation.case import EVERY_CASE, NUM_SMS, CompileCase
from paged.bench.compilation.launches import SeenLaunch, empty, launch_case, launches_of
from paged.kernels.lora.add_lora import add_lora
from paged.kernels.lora.batch import FEW_ROWS, MANY_ROWS, LoraBatch
from paged.kernels.lora.weights import LoraWeights

# in_features and the sizes of the parts.
QKV, GATE_UP, DOWN = (4096, (4096, 1024, 1024)), (4096, (12288, 12288)), (12288, (4096,))

_SIZES = ("num_positions", "stride_x_row", "stride_out_row", "max_rank", "K", "split_size")


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
    launch, _ = _launches(target, dtype, block_m, in_features, part_sizes, num_blocks=1, rank=64)
    size = "{BLOCK_M}x{BLOCK_R}x{BLOCK_K}".format(**launch.arguments)
    name = f"lora shrink {dtype} {in_features} parts={len(part_sizes)} {size} for {target}"
    unaligned: tuple[str, ...] = ()
    if in_features % 16 != 0:
        unaligned = ("K", "stride_x_row")
    return _case(name, launch, dtype, unaligned, targets=(target,))


def _expand(dtype: str, block_m: int, num_splits: int, part_sizes: tuple[int, ...]) -> CompileCase:
    # So many blocks of few ranks make two programs an SM.
    num_blocks = -(-2 * NUM_SMS["sm_90"] // (num_splits * len(part_sizes)))
    _, launch = _launches("sm_90", dtype, block_m, 4096, part_sizes, num_blocks=num_blocks, rank=16)
    size = "{BLOCK_M}x{BLOCK_N}x{BLOCK_R} splits={NUM_SPLITS}".format(**launch.arguments)
    return _case(f"lora expand {dtype} {sum(part_sizes)} parts={len(part_sizes)} {size}", launch, dtype)


def _launches(
    target: str, dtype: str, block_m: int, in_features: int, part_sizes: tuple[int, ...], *, num_blocks: int, rank: int
) -> list[SeenLaunch]:
    """Return both products of one adapter with blocks of block_m rows."""
    num_parts, out_features = len(part_sizes), sum(part_sizes)
    weights = LoraWeights(
        empty(dtype, 1, num_parts, rank, in_features),
        empty(dtype, 1, rank, out_features),
        torch.full((1, num_parts), rank, dtype=torch.int32),
        empty("fp32", 1, num_parts),
        part_sizes,
    )
    no_rows = torch.full((num_blocks, block_m), -1, dtype=torch.int32)
    batch = LoraBatch(no_rows, torch.zeros(num_blocks, dtype=torch.int32))
    out, x = empty(dtype, block_m, out_features), empty(dtype, block_m, in_features)
    return launches_of(target, add_lora, out, x, weights, batch)


def _case(
    name: str, launch: SeenLaunch, dtype: str, unaligned: tuple[str, ...] = (), targets: tuple[str, ...] = EVERY_CASE
) -> CompileCase:
    sizes = tuple(size for size in launch.kernel.arg_names if size in _SIZES and size not in unaligned)
    expect = {"sm_80": ("HMMA",), "sm_90": ("HMMA",), "gfx942": ("v_mfma",)}
    if launch.arguments["BLOCK_M"] >= 64:  # as wgmma needs
        expect["sm_90"] = ("HGMMA",)
    if dtype == "fp32":
        expect = {}
    return launch_case(name, launch, aligned=sizes, expect=expect, targets=targets)
