"""A latent attention call, the shape that its schedule depends on, and its tile sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..common.attention.plan import DECODE_MAX_ROWS, AttentionTile, PlanShape
from ..common.device import LARGE_SHARED_MEMORY, SMALL_SHARED_MEMORY

# Rows up to which the blocks that every row sees whole have a loop of their own. The registers that two loops share
# beside sums of 64 x 512 spill: 100 on sm_90 with blocks of 64 keys.
ONE_LOOP_ROWS = 32


class MlaCall(NamedTuple):
    """Arguments of `paged_mla_attention`, checked, with defaults filled in."""

    q: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    max_seqlen_q: int
    sinks: torch.Tensor | None
    k_scale: torch.Tensor | None
    indices: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor | None
    v_head_dim: int
    softmax_scale: float
    causal: bool
    deterministic: bool


@dataclass(frozen=True, kw_only=True)
class MlaShape(PlanShape):
    """Everything besides the lengths that a schedule of `paged_mla_attention` depends on.

    kind: see `latent_kind`. chosen: whether each query chooses its keys.
    """

    chosen: bool = False

    def tiles(self, arch: str, rows: int) -> dict[str, AttentionTile]:
        """Return the tiles; if every query fills more than DECODE_MAX_ROWS rows, one is for all sequences.

        All of them are then split as decodes are, whose partial results are few beside a read of 512 numbers a key.
        """

        def tile(max_rows: int) -> AttentionTile:
            return mla_tile(self.v_head_dim, self.element_size, arch, rows=max_rows, kind=self.kind, chosen=self.chosen)

        if rows <= DECODE_MAX_ROWS or self.group > DECODE_MAX_ROWS:
            return {"decode": tile(rows)}
        return {"decode": tile(DECODE_MAX_ROWS), "prefill": tile(rows)}


def mla_tile(
    v_head_dim: int, element_size: int, arch: str, *, rows: int, kind: str = "", chosen: bool = False
) -> AttentionTile:
    """Return the tile for sequences with at most `rows` rows, queries times heads.

    The sums of 64 rows of 512 are 128 registers of a thread in 8 warps, and their queries 72 KB of shared memory, so
    one program fills an SM. On sm_90 64 rows of 512 + 64 meet 64 keys, 221 KB with two stages, of which the copies
    overlap with the products of values alone: 881 instructions a warp are 1,762 cycles of a scheduler, the matrix units
    take 3,328. Triton gives the scores of 64 rows to each of two warp groups, so all are computed twice, in wgmma of
    half as many columns as keys. Those read all queries from shared memory again, 16 cycles each: 72 for 64 keys of 32
    columns, but as many for 32 keys of 16 columns. So blocks of 32 keys, whose third stage would fetch two ahead (184
    KB), take 706 instructions and twice the reads a key. sm_80 has room for 32 keys (115 KB of 163 KB), consumer chips
    for 32 rows and 16 keys (56 KB of 99 KB), where 64 rows would take 106 KB. tcgen05 needs a copy of the latents, so
    sm_100 takes blocks of 32 keys (214 KB; 353 KB for 64).
    """
    num_stages = 3
    if chosen or arch not in LARGE_SHARED_MEMORY:
        num_stages = 2
    is_gfx = arch.startswith("gfx")
    if element_size == 4 or kind == "packed":
        # Scaled codes pass through registers in float32: 32 rows spill 226 on sm_90.
        if is_gfx:
            return AttentionTile(16, 16, 4, 1)
        if element_size == 4:
            num_stages = 2
        return AttentionTile(16, 16, 8, num_stages)
    is_small = arch in SMALL_SHARED_MEMORY
    max_block_m = 32 if kind or is_small else 64  # e4m3 with 64 rows spills 75 on sm_90
    block_m = 64
    if rows <= 16:
        block_m = 16
    elif rows <= 32:
        block_m = 32
    block_m = min(block_m, max_block_m)
    if is_gfx or is_small:
        block_n = 32 if block_m == 16 else 16
        if is_gfx:
            return AttentionTile(block_m, block_n, 4, 1)
        return AttentionTile(block_m, block_n, 8, 2)
    if block_m == 16:
        if kind:  # 4 warps over e4m3 spill 32, 8 take 176 registers
            return AttentionTile(16, 32, 8, num_stages)
        return AttentionTile(16, 32, 4, num_stages, 2)
    block_n = 32
    if block_m == 32:
        if arch in LARGE_SHARED_MEMORY and not kind:
            block_n = 64
        return AttentionTile(32, block_n, 8, num_stages)
    if arch == "sm_90" and not chosen:  # chosen keys' positions take registers: 64 of them spill 9
        block_n = 64
    return AttentionTile(64, block_n, 8, 2)
