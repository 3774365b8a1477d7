"""Sort routed entries by expert and pad them to whole blocks, so that every tile of a grouped GEMM has one expert."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..core.checks import check_contiguous, check_dtype, check_tensor
from ..core.compat import tl, triton
from ..core.device import use_triton
from ..core.errors import InvalidInputError, as_int, shown
from ..core.launch import Launch, wait_for_inputs
from ..core.operation import Run, operation
from . import definition
from .routing import MAX_EXPERTS

# Entries a tile: 16 a thread of 4 warps.
_TILE = 2048
# The most chunks of entries. Every program reads the counts of all chunks and experts, so there are few; 16 still fill
# an H200's SMs, see limits.md.
_MAX_CHUNKS = 16


class MoeAlignment(NamedTuple):
    """Routed entries sorted into blocks of one expert each; result of `moe_align_block_size`.

    Attributes:
        sorted_token_ids: int32 [max_num_blocks * block_size], indices into the flattened topk_ids; topk_ids.numel() in
            empty places.
        expert_ids: int32 [max_num_blocks], expert of each block; -1 for unused blocks.
        num_tokens_post_padded: int32 [1], block_size times the number of blocks in use.
    """

    sorted_token_ids: torch.Tensor
    expert_ids: torch.Tensor
    num_tokens_post_padded: torch.Tensor

    def pointers(self) -> dict[str, torch.Tensor]:
        """Return the tensors by the names of kernel arguments."""
        return {
            "sorted_token_ids_ptr": self.sorted_token_ids,
            "expert_ids_ptr": self.expert_ids,
            "num_tokens_post_padded_ptr": self.num_tokens_post_padded,
        }


def new_alignment(num_entries: int, block_size: int, num_experts: int, device: torch.device) -> MoeAlignment:
    """Return empty memory for an alignment, enough for any distribution of entries."""
    num_blocks = definition.max_num_blocks(num_entries, block_size, num_experts)
    sizes = (num_blocks * block_size, num_blocks, 1)
    return MoeAlignment(*[torch.empty(size, dtype=torch.int32, device=device) for size in sizes])


def num_mapped(expert_map: torch.Tensor | None) -> int:
    """Return the length of an expert map as kernels take it; 0 for None."""
    return 0 if expert_map is None else expert_map.numel()


@triton.jit
def expert_rows(ids, expert_map_ptr, num_mapped, NUM_EXPERTS: tl.constexpr):
    """Return rows of the weights for expert ids, -1 for experts that this rank does not hold."""
    if expert_map_ptr is not None:
        ids = tl.load(expert_map_ptr + ids, mask=(ids >= 0) & (ids < num_mapped), other=-1)
    return tl.where((ids >= 0) & (ids < NUM_EXPERTS), ids, -1)


@triton.jit(do_not_specialize=["num_entries", "max_num_tokens_padded", "max_num_blocks", "chunk_size"])
def _count_kernel(
    topk_ids_ptr,  # [num_entries]
    expert_map_ptr,  # [num_mapped], or None
    counts_ptr,  # [num_chunks, NUM_EXPERTS]
    sorted_token_ids_ptr,  # [max_num_tokens_padded]
    expert_ids_ptr,  # [max_num_blocks]
    num_entries,
    num_mapped,
    max_num_tokens_padded,
    max_num_blocks,
    chunk_size,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TILE: tl.constexpr,
):
    """Count each expert's entries of one chunk, and fill a share of the results with the values of unused places."""
    wait_for_inputs()
    chunk = tl.program_id(0)
    experts = tl.arange(0, BLOCK_E)
    counts = tl.zeros((BLOCK_E,), tl.int32)
    for start in range(0, chunk_size, TILE):
        entries = chunk * chunk_size + start + tl.arange(0, TILE)
        ids = tl.load(topk_ids_ptr + entries, mask=entries < num_entries, other=-1)
        rows = expert_rows(ids, expert_map_ptr, num_mapped, NUM_EXPERTS)
        counts += tl.histogram(rows, BLOCK_E, mask=rows >= 0)
    tl.store(counts_ptr + chunk * NUM_EXPERTS + experts, counts, mask=experts < NUM_EXPERTS)
    for start in range(chunk * TILE, max_num_tokens_padded, tl.num_programs(0) * TILE):
        offsets = start + tl.arange(0, TILE)
        tl.store(sorted_token_ids_ptr + offsets, num_entries, mask=offsets < max_num_tokens_padded)
        tl.store(expert_ids_ptr + offsets, -1, mask=offsets < max_num_blocks)


@triton.jit(do_not_specialize=["num_entries", "num_chunks", "chunk_size"])
def _place_kernel(
    topk_ids_ptr,  # [num_entries]
    expert_map_ptr,  # [num_mapped], or None
    counts_ptr,  # [num_chunks, NUM_EXPERTS]
    sorted_token_ids_ptr,  # [max_num_tokens_padded]
    expert_ids_ptr,  # [max_num_blocks]
    num_tokens_post_padded_ptr,  # [1]
    num_entries,
    num_mapped,
    num_chunks,
    chunk_size,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TILE: tl.constexpr,
):
    """Store one expert's entries of one chunk after the entries of smaller experts and of earlier chunks.

    Positions come from counts, not from atomics, so the order is the order of the entries in every run.
    """
    wait_for_inputs()
    expert = tl.program_id(0)
    chunk = tl.program_id(1)
    num_own = tl.load(counts_ptr + chunk * NUM_EXPERTS + expert)
    is_first = (expert == 0) & (chunk == 0)
    if (num_own == 0) & (not is_first):
        return
    experts = tl.arange(0, BLOCK_E)
    chunks = tl.arange(0, BLOCK_C)[:, None]
    mask = (experts[None, :] < NUM_EXPERTS) & (chunks < num_chunks)
    counts = tl.load(counts_ptr + chunks * NUM_EXPERTS + experts[None, :], mask=mask, other=0)
    num_blocks = (tl.sum(counts, axis=0) + BLOCK_SIZE - 1) // BLOCK_SIZE
    if is_first:
        tl.store(num_tokens_post_padded_ptr, tl.sum(num_blocks, axis=0) * BLOCK_SIZE)
    first_block = tl.sum(tl.where(experts < expert, num_blocks, 0), axis=0)
    num_before = tl.sum(tl.where((experts[None, :] == expert) & (chunks < chunk), counts, 0))

    # Write the expert's id for its blocks whose first entry is in this chunk.
    end = first_block + (num_before + num_own + BLOCK_SIZE - 1) // BLOCK_SIZE
    for start in range(first_block + (num_before + BLOCK_SIZE - 1) // BLOCK_SIZE, end, TILE):
        blocks = start + tl.arange(0, TILE)
        tl.store(expert_ids_ptr + blocks, expert, mask=blocks < end)

    position = first_block * BLOCK_SIZE + num_before
    for start in range(0, chunk_size, TILE):
        entries = chunk * chunk_size + start + tl.arange(0, TILE)
        ids = tl.load(topk_ids_ptr + entries, mask=entries < num_entries, other=-1)
        chosen = expert_rows(ids, expert_map_ptr, num_mapped, NUM_EXPERTS) == expert
        ranks = tl.cumsum(chosen.to(tl.int32), axis=0)
        tl.store(sorted_token_ids_ptr + position + ranks - 1, entries, mask=chosen)
        position += tl.max(ranks, axis=0)


def _new(topk_ids: torch.Tensor, block_size: int, num_experts: int, **_: object) -> MoeAlignment:
    return new_alignment(topk_ids.numel(), block_size, num_experts, topk_ids.device)


@operation(
    _new,
    results="Tensor sorted_token_ids, Tensor expert_ids, Tensor num_tokens_post_padded",
    finish=lambda _, results: MoeAlignment(*results),
)
def moe_align_block_size(
    topk_ids: torch.Tensor, block_size: int, num_experts: int, *, expert_map: torch.Tensor | None = None
) -> Run[MoeAlignment]:
    """Sort the entries of topk_ids by expert and pad each expert's entries to whole blocks.

    Entries are indices into the flattened topk_ids, in rising order within an expert. The host does not wait for the
    device: the results are large enough for any distribution of entries.

    Args:
        topk_ids: int32, any shape, contiguous. Ids outside [0, num_experts) appear in no block.
        block_size: entries in a block, 1 to 65,536.
        num_experts: number of experts, 1 to 65,536.
        expert_map: int32 [num_global_experts], contiguous: the expert that each id names. Values outside [0,
            num_experts), such as -1, and ids outside of the map name no expert. None if ids are experts.

    Returns:
        sorted_token_ids, expert_ids and num_tokens_post_padded, as `MoeAlignment` describes them.

    Raises:
        InvalidInputError: a dtype, device or stride does not fit, or a size is out of range.
    """
    block_size, num_experts = as_int("block_size", block_size, None), as_int("num_experts", num_experts, None)
    check_dtype("topk_ids", topk_ids, torch.int32)
    check_contiguous("topk_ids", topk_ids)
    check_sizes("num_experts", block_size, num_experts)
    num_entries, device = topk_ids.numel(), topk_ids.device
    check_expert_map(expert_map, device)
    by_triton = num_entries > 0 and use_triton(topk_ids)
    if by_triton:
        num_chunks, launches = _launches_for(num_entries, block_size, num_experts, num_mapped(expert_map))

    def run(topk_ids: torch.Tensor, *_: object, expert_map: torch.Tensor | None = None, **__: object) -> MoeAlignment:
        if not by_triton:
            return MoeAlignment(
                *definition.moe_align_block_size(topk_ids, block_size, num_experts, expert_map=expert_map)
            )
        aligned = new_alignment(num_entries, block_size, num_experts, device)
        tensors = {
            "topk_ids_ptr": topk_ids,
            "expert_map_ptr": expert_map,
            "counts_ptr": torch.empty((num_chunks, num_experts), dtype=torch.int32, device=device),
            **aligned.pointers(),
        }
        for launch in launches:
            launch(tensors)
        return aligned

    return run


def _chunks(num_entries: int) -> tuple[int, int]:
    """Return the number of chunks of the entries, and the entries of a chunk."""
    chunk_size = triton.cdiv(triton.cdiv(num_entries, _TILE), _MAX_CHUNKS) * _TILE
    return triton.cdiv(num_entries, chunk_size), chunk_size


def _launches_for(
    num_entries: int, block_size: int, num_experts: int, num_mapped: int
) -> tuple[int, tuple[Launch, Launch]]:
    """Return the number of chunks, and the launches."""
    num_chunks, chunk_size = _chunks(num_entries)
    num_blocks = definition.max_num_blocks(num_entries, block_size, num_experts)
    numbers = {
        "num_entries": num_entries,
        "num_mapped": num_mapped,
        "chunk_size": chunk_size,
        "NUM_EXPERTS": num_experts,
        "BLOCK_E": triton.next_power_of_2(num_experts),
        "TILE": _TILE,
    }
    filled = {
        "max_num_tokens_padded": num_blocks * block_size,
        "max_num_blocks": num_blocks,
    }
    placed = {"num_chunks": num_chunks, "BLOCK_SIZE": block_size, "BLOCK_C": _MAX_CHUNKS}
    return num_chunks, (
        Launch(_count_kernel, (num_chunks,), numbers | filled, num_warps=4),
        Launch(_place_kernel, (num_experts, num_chunks), numbers | placed, num_warps=4),
    )


def check_sizes(name: str, block_size: int, num_experts: int) -> None:
    """Raise InvalidInputError unless block_size and the number of experts, argument `name`, are 1 to MAX_EXPERTS."""
    if min(block_size, num_experts) < 1 or max(block_size, num_experts) > MAX_EXPERTS:
        sizes = f"{shown(block_size)}, {shown(num_experts)}"
        raise InvalidInputError(f"block_size, {name}: {sizes}, expected at least 1, and {MAX_EXPERTS} at most")


def check_expert_map(expert_map: torch.Tensor | None, device: torch.device) -> None:
    """Raise InvalidInputError unless the map is None or a contiguous int32 [num_global_experts]."""
    if expert_map is None:
        return
    check_tensor("expert_map", expert_map, ("num_global_experts",), (torch.int32,), device)
    check_contiguous("expert_map", expert_map)
