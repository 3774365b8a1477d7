"""Low-rank adapters (Hu et al., 2021) of several requests in one batch: two grouped products in each linear layer."""

from __future__ import annotations

import torch

from ..core.checks import check_device, check_last_dim_contiguous, check_tensor, check_writable, refuse_gradients
from ..core.compat import dot, tl, triton
from ..core.custom_ops import in_fields
from ..core.device import device_of, use_triton
from ..core.errors import InvalidInputError, shown
from ..core.ids import Ids, check_all_ids, checks_ids
from ..core.launch import Launch, wait_for_inputs
from ..core.operation import Run, operation
from . import definition
from .batch import LoraBatch
from .config import expand_tile, shrink_tile
from .weights import MAX_PARTS, LoraWeights


@triton.jit
def _lora_shrink_kernel(
    x_ptr,  # [num_rows, K]
    a_ptr,  # [num_slots, NUM_PARTS, max_rank, K]
    ranks_ptr,  # [num_slots, NUM_PARTS] int32
    rows_ptr,  # [num_blocks, BLOCK_M] int32
    slots_ptr,  # [num_blocks] int32
    shrunk_ptr,  # [num_splits, num_blocks * BLOCK_M, NUM_PARTS * max_rank] float32
    num_positions,  # num_blocks * BLOCK_M
    stride_x_row,
    max_rank,
    K,
    split_size,  # a multiple of BLOCK_K
    NUM_PARTS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """x[row] times BLOCK_R rows of its adapter's A, over the columns of one split, for one block of rows."""
    wait_for_inputs()
    block = tl.program_id(1)
    slot = tl.load(slots_ptr + block)
    if slot < 0:
        return
    # Parts alternate, so that programs that read the same rows of x run side by side.
    part = tl.program_id(0) % NUM_PARTS
    first_r = tl.program_id(0) // NUM_PARTS * BLOCK_R
    matrix = slot.to(tl.int64) * NUM_PARTS + part
    rank = tl.load(ranks_ptr + matrix)
    if first_r >= rank:
        return
    positions = block.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    # Positions without a row compute row 0, and ranks beyond the adapter's compute rank 0. So the loop needs no masks.
    # These results are not used. They are stored up to max_rank, because a mask by the adapter's rank would make every
    # store 4 bytes wide.
    rows = tl.maximum(tl.load(rows_ptr + positions), 0).to(tl.int64)
    offs_r = first_r + tl.arange(0, BLOCK_R)
    offs_k = tl.program_id(2) * split_size + tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + rows[:, None] * stride_x_row + offs_k[None, :]
    a_rows = matrix * max_rank + tl.where(offs_r < rank, offs_r, 0)
    a_ptrs = a_ptr + a_rows[None, :] * K + offs_k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for start in range(0, split_size, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs + start)
            a = tl.load(a_ptrs + start)
        else:
            x = tl.load(x_ptrs + start, mask=offs_k[None, :] < K - start, other=0.0)
            a = tl.load(a_ptrs + start, mask=offs_k[:, None] < K - start, other=0.0)
        acc = dot(x, a, acc)
    width = NUM_PARTS * max_rank
    shrunk_ptrs = shrunk_ptr + (tl.program_id(2) * num_positions + positions)[:, None] * width + part * max_rank
    tl.store(shrunk_ptrs + offs_r[None, :], acc, mask=offs_r[None, :] < max_rank)


@triton.jit
def _lora_expand_kernel(
    shrunk_ptr,  # [NUM_SPLITS, num_blocks * BLOCK_M, NUM_PARTS * max_rank] float32
    b_ptr,  # [num_slots, max_rank, N_0 + N_1 + N_2]
    ranks_ptr,  # [num_slots, NUM_PARTS] int32
    scales_ptr,  # [num_slots, NUM_PARTS] float32
    rows_ptr,  # [num_blocks, BLOCK_M] int32
    slots_ptr,  # [num_blocks] int32
    out_ptr,  # [num_rows, N_0 + N_1 + N_2]
    num_positions,  # num_blocks * BLOCK_M
    stride_out_row,
    max_rank,
    N_0: tl.constexpr,
    N_1: tl.constexpr,
    N_2: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """out[row] += scale * (sum of the splits) @ B^T, for one block of rows and BLOCK_N columns of one part."""
    wait_for_inputs()
    block = tl.program_id(1)
    slot = tl.load(slots_ptr + block)
    if slot < 0:
        return
    N: tl.constexpr = N_0 + N_1 + N_2
    second: tl.constexpr = (N_0 + BLOCK_N - 1) // BLOCK_N
    third: tl.constexpr = second + (N_1 + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0)
    not_first, is_third = (tile >= second).to(tl.int32), (tile >= third).to(tl.int32)
    part = not_first + is_third
    first_n = tile * BLOCK_N + not_first * (N_0 - second * BLOCK_N) + is_third * (N_1 - (third - second) * BLOCK_N)
    end_n = N_0 + not_first * N_1 + is_third * N_2
    matrix = slot.to(tl.int64) * NUM_PARTS + part
    rank = tl.load(ranks_ptr + matrix)
    if rank == 0:
        return
    positions = block.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = first_n + tl.arange(0, BLOCK_N)
    is_column = columns < end_n
    width = NUM_PARTS * max_rank
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first_r in range(0, rank, BLOCK_R):
        offs_r = first_r + tl.arange(0, BLOCK_R)
        is_rank = offs_r < rank
        shrunk_ptrs = shrunk_ptr + positions[:, None] * width + part * max_rank + offs_r[None, :]
        shrunk = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for split in tl.static_range(NUM_SPLITS):
            offset = num_positions.to(tl.int64) * split * width
            shrunk += tl.load(shrunk_ptrs + offset, mask=is_rank[None, :], other=0.0)
        b_ptrs = b_ptr + (slot.to(tl.int64) * max_rank + offs_r)[:, None] * N + columns[None, :]
        b = tl.load(b_ptrs, mask=is_rank[:, None] & is_column[None, :], other=0.0)
        acc = dot(shrunk.to(b.dtype), b, acc)
    rows = tl.load(rows_ptr + positions)
    out_ptrs = out_ptr + rows[:, None].to(tl.int64) * stride_out_row + columns[None, :]
    mask = (rows >= 0)[:, None] & is_column[None, :]
    out = tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32) + tl.load(scales_ptr + matrix) * acc
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)


@operation(
    mutates=("out",), **in_fields(weights=LoraWeights, batch=LoraBatch), finish=lambda arguments, _: arguments["out"]
)
def add_lora(out: torch.Tensor, x: torch.Tensor, weights: LoraWeights, batch: LoraBatch) -> Run[torch.Tensor]:
    """Add each row's adapter in place: out[row] += scale * B (A x[row]).

    Rows without an adapter keep their bits. Products are accumulated in float32. On a GPU, A x is rounded to the dtype
    of x before it is multiplied by B. The sum with `out` is rounded once. Results have the same bits in every run.

    Args:
        out: [num_rows, out_features], dtype of x, last dimension contiguous; the layer's output without adapters.
        x: [num_rows, in_features], float32, float16 or bfloat16, last dimension contiguous.
        weights: the layer's adapters, in the dtype of x.
        batch: adapter of each row. Rows, slots and ranks are checked on a CPU, and on a GPU with PAGED_CHECK=1.

    Returns:
        out.

    Raises:
        InvalidInputError: a shape, dtype, device or stride does not fit, or a row or slot does not exist.
        UnsupportedError: an argument requires a gradient.
    """
    if not (isinstance(weights, LoraWeights) and isinstance(batch, LoraBatch)):
        raise InvalidInputError(f"weights, batch: {shown(weights)}, {shown(batch)}, expected LoraWeights and LoraBatch")
    refuse_gradients("add_lora", weights.a, weights.b, weights.scales)
    dtype, device, in_features = weights.a.dtype, weights.a.device, weights.a.shape[3]
    check_tensor("x", x, ("num_rows", in_features), (dtype,), device)
    check_tensor("out", out, (x.shape[0], sum(weights.part_sizes)), (dtype,), device)
    check_device("batch", batch.rows, device)
    check_last_dim_contiguous("out", out)
    check_writable("out", out)
    check_last_dim_contiguous("x", x)
    by_triton = use_triton(x)
    launches = _launches_for(out, x, weights, batch) if by_triton and batch.rows.numel() else ()

    checks = not by_triton or checks_ids(x)

    def run(out: torch.Tensor, x: torch.Tensor, weights: LoraWeights, batch: LoraBatch) -> torch.Tensor:
        if checks:
            check_all_ids(
                "add_lora",
                Ids("rows", batch.rows, -1, len(x) - 1),
                Ids("slots", batch.slots, -1, len(weights.a) - 1),
                Ids("ranks", weights.ranks, 0, weights.a.shape[2]),
                by_triton=by_triton,
            )
        if not by_triton:
            for rows, columns, change in definition.changes(x, weights, batch, compute=torch.float32):
                out[rows, columns] = (out[rows, columns].float() + change).to(out.dtype)
            return out
        tensors = {
            "x_ptr": x,
            "out_ptr": out,
            "a_ptr": weights.a,
            "b_ptr": weights.b,
            "ranks_ptr": weights.ranks,
            "scales_ptr": weights.scales,
        }
        for launch in launches:
            launch(tensors)
        return out

    return run


def _launches_for(out: torch.Tensor, x: torch.Tensor, weights: LoraWeights, batch: LoraBatch) -> tuple[Launch, Launch]:
    """Return the two launches for layers of this shape. The layers run in turn and share one intermediate result."""
    num_blocks, block_m = batch.rows.shape
    _, num_parts, max_rank, in_features = weights.a.shape
    shrink = shrink_tile(num_blocks, block_m, num_parts, max_rank, in_features, x.element_size(), device_of(x.device))
    expand = expand_tile(block_m, x.element_size())
    sizes = (*weights.part_sizes, 0, 0)[:MAX_PARTS]
    split_size = triton.cdiv(triton.cdiv(in_features, shrink.block_k), shrink.num_splits) * shrink.block_k
    shared = {
        "rows_ptr": batch.rows,
        "slots_ptr": batch.slots,
        "shrunk_ptr": x.new_empty((shrink.num_splits, num_blocks * block_m, num_parts * max_rank), dtype=torch.float32),
        "num_positions": num_blocks * block_m,
        "max_rank": max_rank,
        "NUM_PARTS": num_parts,
        "BLOCK_M": block_m,
    }
    return (
        Launch(
            _lora_shrink_kernel,
            (num_parts * triton.cdiv(max_rank, shrink.block_r), num_blocks, shrink.num_splits),
            shared
            | {
                "stride_x_row": x.stride(0),
                "K": in_features,
                "split_size": split_size,
                "EVEN_K": split_size * shrink.num_splits == in_features,
                "BLOCK_R": shrink.block_r,
                "BLOCK_K": shrink.block_k,
            },
            num_warps=shrink.num_warps,
            num_stages=shrink.num_stages,
        ),
        Launch(
            _lora_expand_kernel,
            (sum(triton.cdiv(size, expand.block_n) for size in sizes), num_blocks),
            shared
            | {
                "stride_out_row": out.stride(0),
                "N_0": sizes[0],
                "N_1": sizes[1],
                "N_2": sizes[2],
                "NUM_SPLITS": shrink.num_splits,
                "BLOCK_N": expand.block_n,
                "BLOCK_R": expand.block_r,
            },
            num_warps=expand.num_warps,
            num_stages=expand.num_stages,
        ),
    )
