"""Router logits to weights, ids and their alignment, in one launch for small batches."""

from __future__ import annotations

from typing import Any

import torch

from ..core.checks import check_tensor, refuse_gradients
from ..core.compat import tl, triton
from ..core.custom_ops import in_fields
from ..core.device import use_triton
from ..core.errors import InvalidInputError, as_int, shown
from ..core.launch import Launch, wait_for_inputs
from ..core.operation import Run, operation
from . import definition
from .moe_align_block_size import (
    MoeAlignment,
    check_expert_map,
    check_sizes,
    expert_rows,
    moe_align_block_size,
    new_alignment,
    num_mapped,
)
from .route_tokens import bind_routing
from .routing import Routing, check_routing, choose_experts, new_routes

# The most tokens of one launch, in which one program sorts all entries. Larger batches gain more from many programs
# than from one launch. With 512 experts, a tile of 16 tokens takes 217 registers.
MAX_FUSED_TOKENS = 256
_BLOCK_T = 16
_MAX_TILES = MAX_FUSED_TOKENS // _BLOCK_T


@triton.jit(do_not_specialize=["num_tokens", "max_num_tokens_padded", "max_num_blocks"])
def _route_and_align_kernel(
    logits_ptr,  # [num_tokens, NUM_GROUPS * GROUP_SIZE]
    bias_ptr,  # [NUM_GROUPS * GROUP_SIZE] float32, or None
    expert_map_ptr,  # [num_mapped], or None
    weights_ptr,  # [num_tokens, TOP_K + NUM_SHARED] float32
    ids_ptr,  # [num_tokens, TOP_K + NUM_SHARED] int32
    ranks_ptr,  # [num_tokens, NUM_GROUPS * GROUP_SIZE + NUM_SHARED] int8
    counts_ptr,  # [num_programs, NUM_GROUPS * GROUP_SIZE + NUM_SHARED] int32
    sorted_token_ids_ptr,  # [max_num_tokens_padded]
    expert_ids_ptr,  # [max_num_blocks]
    num_tokens_post_padded_ptr,  # [1]
    ticket_ptr,  # [1] int32, 0
    num_tokens,
    num_mapped,
    max_num_tokens_padded,
    max_num_blocks,
    scaling_factor,
    stride_logits_token,
    stride_logits_expert,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SCORING: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    MAX_TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Route BLOCK_T tokens a program, count them by expert, and number the tokens of each expert.

    The program that finishes last adds up the counts. The position of an entry is its expert's first position, plus the
    counts of earlier tiles, plus its number within the tile. Positions come from counts, not from atomics, so the order
    is the order of the entries in every run.
    """
    wait_for_inputs()
    NUM_ROUTED: tl.constexpr = NUM_GROUPS * GROUP_SIZE
    NUM_COLUMNS: tl.constexpr = NUM_ROUTED + NUM_SHARED
    WIDTH: tl.constexpr = TOP_K + NUM_SHARED
    program = tl.program_id(0)
    tokens = program.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    for start in range(program * TILE, max_num_tokens_padded, tl.num_programs(0) * TILE):
        offsets = start + tl.arange(0, TILE)
        tl.store(sorted_token_ids_ptr + offsets, num_tokens * WIDTH, mask=offsets < max_num_tokens_padded)
        tl.store(expert_ids_ptr + offsets, -1, mask=offsets < max_num_blocks)
    experts, is_chosen, is_routed = choose_experts(
        logits_ptr, bias_ptr, weights_ptr, ids_ptr, tokens, num_tokens, scaling_factor, stride_logits_token,
        stride_logits_expert, NUM_GROUPS, TOPK_GROUPS, GROUP_SIZE, TOP_K, NUM_SHARED, RENORMALIZE, SCORING, BLOCK_G,
        BLOCK_S, BLOCK_K,
    )  # fmt: skip
    _number(ranks_ptr, counts_ptr, tokens, num_tokens, experts, is_chosen, NUM_COLUMNS)
    if NUM_SHARED > 0:
        shared = tl.arange(0, BLOCK_K)[None, :]
        shared = tl.where(shared < NUM_SHARED, NUM_ROUTED + shared, -1)
        _number(ranks_ptr, counts_ptr, tokens, num_tokens, shared, is_routed & (shared >= 0), NUM_COLUMNS)
    tl.debug_barrier()  # all threads must store before one takes a ticket
    if tl.num_programs(0) > 1:
        if tl.atomic_add(ticket_ptr, 1, sem="acq_rel") < tl.num_programs(0) - 1:
            return
        tl.store(ticket_ptr, 0)
    columns = tl.arange(0, BLOCK_C)
    tiles = tl.arange(0, MAX_TILES)[:, None]
    rows = expert_rows(tl.where(columns < NUM_COLUMNS, columns, -1), expert_map_ptr, num_mapped, NUM_EXPERTS)
    mask = (tiles < tl.num_programs(0)) & (rows >= 0)[None, :]
    counts_ptrs = counts_ptr + tiles * NUM_COLUMNS + columns[None, :]
    counts = tl.load(counts_ptrs, mask=mask, other=0)
    num_blocks = (tl.sum(counts, axis=0) + BLOCK_SIZE - 1) // BLOCK_SIZE
    first_blocks = tl.cumsum(num_blocks, axis=0) - num_blocks
    tl.store(num_tokens_post_padded_ptr, tl.sum(num_blocks, axis=0) * BLOCK_SIZE)
    for block in range(tl.max(num_blocks, axis=0)):
        tl.store(expert_ids_ptr + first_blocks + block, rows, mask=block < num_blocks)
    tl.store(counts_ptrs, first_blocks[None, :] * BLOCK_SIZE + tl.cumsum(counts, axis=0) - counts, mask=mask)
    tl.debug_barrier()  # all threads need the first positions of every tile
    for start in range(0, num_tokens * WIDTH, TILE):
        entries = start + tl.arange(0, TILE)
        token = entries // WIDTH
        ids = tl.load(ids_ptr + entries, mask=token < num_tokens, other=-1)
        is_here = expert_rows(ids, expert_map_ptr, num_mapped, NUM_EXPERTS) >= 0
        first_position = tl.load(counts_ptr + token // BLOCK_T * NUM_COLUMNS + ids, mask=is_here, other=0)
        number = tl.load(ranks_ptr + token * NUM_COLUMNS + ids, mask=is_here, other=0)
        tl.store(sorted_token_ids_ptr + first_position + number, entries, mask=is_here)


@triton.jit
def _number(ranks_ptr, counts_ptr, tokens, num_tokens, columns, is_chosen, NUM_COLUMNS: tl.constexpr):
    """Store how many earlier tokens of the tile, and how many of all, chose each column. Columns of -1 are skipped."""
    chosen = is_chosen.to(tl.int32)
    earlier = tl.cumsum(chosen, axis=0) - chosen
    tl.store(
        ranks_ptr + tokens * NUM_COLUMNS + columns, earlier.to(tl.int8), mask=(tokens < num_tokens) & (columns >= 0)
    )
    totals = tl.sum(chosen, axis=0)[None, :]
    tl.store(counts_ptr + tl.program_id(0) * NUM_COLUMNS + columns, totals, mask=columns >= 0)


def _new(
    router_logits: torch.Tensor,
    block_size: int,
    num_local_experts: int | None,
    ticket: Any,
    expert_map: Any,
    **routing: Any,
) -> tuple[Any, ...]:
    weights, ids = new_routes(router_logits, fields := Routing(**routing))
    num_experts = router_logits.shape[1] + fields.num_shared_experts
    size = num_experts if num_local_experts is None else num_local_experts
    return weights, ids, new_alignment(ids.numel(), block_size, size, ids.device)


@operation(
    _new,
    results="Tensor topk_weights, Tensor topk_ids, Tensor sorted_token_ids, Tensor expert_ids, "
    "Tensor num_tokens_post_padded",
    mutates=("ticket",),
    finish=lambda _, results: (*results[:2], MoeAlignment(*results[2:])),
    **in_fields(routing=Routing),
)
def route_and_align(
    router_logits: torch.Tensor,
    routing: Routing,
    block_size: int,
    *,
    expert_map: torch.Tensor | None = None,
    num_local_experts: int | None = None,
    ticket: torch.Tensor | None = None,
) -> Run[tuple[torch.Tensor, torch.Tensor, MoeAlignment]]:
    """Run `route_tokens` and sort its ids as `moe_align_block_size` does, in one launch for up to 256 tokens.

    Larger batches take three launches. With expert_map, experts may be sorted in another order than by
    `moe_align_block_size`: by their ids before the map. Nothing that reads an alignment depends on this order.

    Args:
        router_logits: [num_tokens, num_experts], as in `route_tokens`.
        routing: the other arguments of `route_tokens`.
        block_size: entries in a block.
        expert_map: as in `moe_align_block_size`; shared experts are mapped, too.
        num_local_experts: number of experts that blocks may name; None for all of them, shared ones included.
        ticket: int32 [1] on the device, 0 before and after the call. Calls that may overlap need one each. None makes
            one, which takes a second launch.

    Returns:
        (topk_weights, topk_ids, aligned).

    Raises:
        InvalidInputError: as for the two operations, or the ticket does not fit.
        UnsupportedError: an argument requires a gradient.
    """
    if not isinstance(routing, Routing):
        raise InvalidInputError(f"routing: {shown(routing)}, expected a Routing")
    refuse_gradients("route_and_align", routing.correction_bias)
    block_size = as_int("block_size", block_size, None)
    check_routing(router_logits, routing)
    (num_tokens, num_routed), device = router_logits.shape, router_logits.device
    num_columns = num_routed + routing.num_shared_experts
    num_experts = num_columns if num_local_experts is None else as_int("num_local_experts", num_local_experts, None)
    check_expert_map(expert_map, device)
    check_sizes("num_local_experts", block_size, num_experts)
    if ticket is not None:
        check_tensor("ticket", ticket, (1,), (torch.int32,), device)
    if num_tokens > MAX_FUSED_TOKENS or num_tokens == 0 or not use_triton(router_logits):
        return _in_turn(router_logits, routing, block_size, num_experts, expert_map)
    shape = num_tokens, routing.width
    num_programs, num_entries = -(-num_tokens // _BLOCK_T), num_tokens * routing.width
    num_blocks = definition.max_num_blocks(num_entries, block_size, num_experts)
    arguments = {
        **routing.arguments(router_logits),
        "num_mapped": num_mapped(expert_map),
        "max_num_tokens_padded": num_blocks * block_size,
        "max_num_blocks": num_blocks,
        "NUM_EXPERTS": num_experts,
        "BLOCK_SIZE": block_size,
        "BLOCK_T": _BLOCK_T,
        "BLOCK_C": triton.next_power_of_2(num_columns),
        "MAX_TILES": _MAX_TILES,
        "TILE": 1024,
    }
    launch = Launch(_route_and_align_kernel, (num_programs,), arguments, num_warps=8)

    def run(
        router_logits: torch.Tensor,
        routing: Routing,
        *_: object,
        expert_map: torch.Tensor | None = None,
        ticket: torch.Tensor | None = None,
        **__: object,
    ) -> tuple[torch.Tensor, torch.Tensor, MoeAlignment]:
        weights = torch.empty(shape, dtype=torch.float32, device=device)
        ids = torch.empty(shape, dtype=torch.int32, device=device)
        aligned = new_alignment(num_entries, block_size, num_experts, device)
        launch(
            {
                "logits_ptr": router_logits,
                "bias_ptr": routing.correction_bias,
                "weights_ptr": weights,
                "ids_ptr": ids,
                "expert_map_ptr": expert_map,
                "ranks_ptr": torch.empty((num_tokens, num_columns), dtype=torch.int8, device=device),
                "counts_ptr": torch.empty((num_programs, num_columns), dtype=torch.int32, device=device),
                **aligned.pointers(),
                "ticket_ptr": torch.zeros(1, dtype=torch.int32, device=device) if ticket is None else ticket,
            }
        )
        return weights, ids, aligned

    return run


def _in_turn(
    router_logits: torch.Tensor, routing: Routing, block_size: int, num_experts: int, expert_map: torch.Tensor | None
) -> Run[tuple[torch.Tensor, torch.Tensor, MoeAlignment]]:
    """Run the two operations one after the other."""
    route, (_, ids) = bind_routing(router_logits, routing), new_routes(router_logits, routing)
    align = moe_align_block_size.bind(ids, block_size, num_experts, expert_map=expert_map)

    def run(
        router_logits: torch.Tensor,
        routing: Routing,
        *_: object,
        expert_map: torch.Tensor | None = None,
        **__: object,
    ) -> tuple[torch.Tensor, torch.Tensor, MoeAlignment]:
        weights, ids = route(router_logits, correction_bias=routing.correction_bias)
        return weights, ids, align(ids, block_size, num_experts, expert_map=expert_map)

    return run
