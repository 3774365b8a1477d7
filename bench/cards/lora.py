"""Card of low-rank adapters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

import paged
from paged.bench.bounds import products as bounds
from paged.bench.cards.card import Card, Edge, Row, named, same, whole
from paged.bench.cards.draw import Draw
from paged.bench.compilation.cases.case import EVERY_CASE, NUM_SMS, CompileCase
from paged.bench.compilation.cases.launches import SeenLaunch, empty, launch_case, launches_of
from paged.bench.limits import Cost
from paged.bench.problems.arguments import Arguments, num_bytes
from paged.kernels.lora import definition
from paged.kernels.lora.add_lora import add_lora
from paged.kernels.lora.batch import FEW_ROWS, MANY_ROWS

# Projections of Qwen3-8B.
_QKV = {"in_features": (4096, 1024, 4096), "part_sizes": ((4096, 1024, 1024), (1024, 256, 256), (4096, 1024, 1024))}
_FEW = {"tokens": (64, 32, 19), "num_adapters": (8, 4, 3), "rank": same(16), **_QKV}
_MANY = {"tokens": (4096, 256, 80), "num_adapters": (4, 2, 3), "rank": same(64), **_QKV}


def _adapters(
    draw: Draw, *, tokens: int, num_adapters: int, rank: int, in_features: int, part_sizes: tuple[int, ...]
) -> Arguments:
    """Draw adapters that each change every part. Every fifth row has none; the others take turns."""
    row_adapters = [row % num_adapters for row in range(tokens)]
    row_adapters[::5] = [-1] * len(row_adapters[::5])
    return _with_ranks(draw, row_adapters, in_features, part_sizes, [[rank] * len(part_sizes)] * num_adapters)


def _ragged_ranks(draw: Draw) -> Iterator[Arguments]:
    """Draw adapters of different ranks that leave parts alone, beside rows without an adapter."""
    ranks = ((4, 4, 4), (20, 0, 7), (0, 9, 0))
    yield _with_ranks(draw, [1, -1, 0, 2, 2, 1, -1, 0], 48, (40, 24, 24), ranks)


def _with_ranks(
    draw: Draw,
    row_adapters: list[int],
    in_features: int,
    part_sizes: tuple[int, ...],
    ranks: Sequence[Sequence[int]],
) -> Arguments:
    """Draw adapters with ranks[adapter][part]; rank 0 leaves a part alone, adapter -1 means none.

    Weights beyond an adapter's ranks are NaN.
    """
    num_adapters, num_parts, max_rank = len(ranks), len(part_sizes), max(map(max, ranks))
    x, out = draw.normal(len(row_adapters), in_features), draw.normal(len(row_adapters), sum(part_sizes))
    a = torch.full((num_adapters, num_parts, max_rank, in_features), math.nan, dtype=draw.dtype, device=draw.device)
    b = torch.full((num_adapters, max_rank, sum(part_sizes)), math.nan, dtype=draw.dtype, device=draw.device)
    scales = torch.rand(num_adapters, num_parts, device=draw.device) + 0.5
    for adapter, adapter_ranks in enumerate(ranks):
        ups = b[adapter].split(part_sizes, dim=-1)
        for part, rank in enumerate(adapter_ranks):
            if rank:
                a[adapter, part, :rank].normal_(0, in_features**-0.5)
                ups[part][:rank].normal_(0, rank**-0.5)
    rank_table = torch.tensor(ranks, dtype=torch.int32, device=draw.device)
    grouped = paged.LoraBatch.group(torch.tensor(row_adapters, dtype=torch.int32))
    return {
        "out": out,
        "x": x,
        "weights": paged.LoraWeights(a, b, rank_table, scales, part_sizes),
        "batch": paged.LoraBatch(grouped.rows.to(draw.device), grouped.slots.to(draw.device)),
    }


def _cost(_: Card, arguments: Arguments) -> Cost:
    """Count both products of every adapted row.

    Its input is read, its output read and written. Weights are read once.
    """
    x, weights, batch = arguments["x"], arguments["weights"], arguments["batch"]
    sizes = torch.tensor(weights.part_sizes)
    products = (weights.ranks.cpu() * (x.shape[1] + sizes)).sum(1)  # [num_adapters], multiplications for a row
    num_rows = (batch.rows >= 0).sum(1).cpu()  # [num_blocks]
    slots = batch.slots.cpu().long()
    num_rows = num_rows.masked_fill(slots < 0, 0)
    num_products = int((num_rows * products[slots.clamp(min=0)]).sum())
    row_bytes = (x.shape[1] + 2 * int(sizes.sum())) * x.element_size() + 4
    read = num_bytes(weights.a, weights.b, weights.ranks, weights.scales)
    return Cost(2 * num_products, int(num_rows.sum()) * row_bytes + read)


# Layers: in_features, and out_features of each part.
QKV, GATE_UP, DOWN = (4096, (4096, 1024, 1024)), (4096, (12288, 12288)), (12288, (4096,))

_SIZES = ("num_positions", "stride_x_row", "stride_out_row", "max_rank", "K", "split_size")


def _cases() -> list[CompileCase]:
    """Return cases of few and many rows, 2 and 4 bytes, layers of one to three parts, and whole and split input."""
    cases = []
    for dtype in ("bf16", "fp32"):
        for block_m, splits in ((FEW_ROWS, (1, 2, 4, 8)), (MANY_ROWS, (1, 2))):
            for target in EVERY_CASE:
                for layer in (QKV, GATE_UP, DOWN):
                    cases.append(_shrink(target, dtype, block_m, *layer))
            cases.append(_shrink("sm_90", dtype, block_m, 4100, (4096,)))  # the last step over K is incomplete
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
    # With adapters of low rank, this many blocks make two programs per SM.
    num_blocks = -(-2 * NUM_SMS["sm_90"] // (num_splits * len(part_sizes)))
    _, launch = _launches("sm_90", dtype, block_m, 4096, part_sizes, num_blocks=num_blocks, rank=16)
    size = "{BLOCK_M}x{BLOCK_N}x{BLOCK_R} splits={NUM_SPLITS}".format(**launch.arguments)
    return _case(f"lora expand {dtype} {sum(part_sizes)} parts={len(part_sizes)} {size}", launch, dtype)


def _launches(
    target: str, dtype: str, block_m: int, in_features: int, part_sizes: tuple[int, ...], *, num_blocks: int, rank: int
) -> list[SeenLaunch]:
    """Return both products of one adapter with blocks of block_m rows."""
    num_parts, out_features = len(part_sizes), sum(part_sizes)
    weights = paged.LoraWeights(
        empty(dtype, 1, num_parts, rank, in_features),
        empty(dtype, 1, rank, out_features),
        torch.full((1, num_parts), rank, dtype=torch.int32),
        empty("fp32", 1, num_parts),
        part_sizes,
    )
    no_rows = torch.full((num_blocks, block_m), -1, dtype=torch.int32)
    batch = paged.LoraBatch(no_rows, torch.zeros(num_blocks, dtype=torch.int32))
    out, x = empty(dtype, block_m, out_features), empty(dtype, block_m, in_features)
    return launches_of(target, add_lora, out, x, weights, batch)


def _case(
    name: str, launch: SeenLaunch, dtype: str, unaligned: tuple[str, ...] = (), targets: tuple[str, ...] = EVERY_CASE
) -> CompileCase:
    sizes = tuple(size for size in launch.kernel.arg_names if size in _SIZES and size not in unaligned)
    expect = {"sm_80": ("HMMA",), "sm_90": ("HMMA",), "gfx942": ("v_mfma",)}
    if launch.arguments["BLOCK_M"] >= 64:  # wgmma needs 64 rows
        expect["sm_90"] = ("HGMMA",)
    if dtype == "fp32":
        expect = {}
    return launch_case(name, launch, aligned=sizes, expect=expect, targets=targets)


CARDS = (
    Card(
        "add_lora",
        _adapters,
        lambda arguments: {"out": definition.add_lora(**arguments)},
        named("out"),
        errors=bounds.lora,
        writes=whole("out"),
        cost=_cost,
        rows=(Row(_FEW, "decode"), Row(_MANY, "prefill", is_quick=False)),
        edges=(Edge("ragged ranks", _ragged_ranks),),
        odd={
            "tokens": (0, 1, 7),
            "num_adapters": (1, 3),
            "rank": (1, 16, 5),
            "in_features": (40, 8),
            "part_sizes": ((16,), (24, 8, 8)),
        },
        compiled=_cases,
    ),
)
