"""A call of paged attention, and the tile sizes of its kernels: shape and device in, configuration out.

box: the result of `box_keys` for the caches. more_scores: whether softcap, ALiBi or a mask is given; they take
registers for each score. kind: dtype of the caches, as `cache_kinds` names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..common.attention.plan import DECODE_MAX_ROWS, AttentionTile, PlanShape, padded_head_dim
from ..common.device import LARGE_SHARED_MEMORY, SMALL_SHARED_MEMORY
from ..common.launch import ROW_COUNTS

# The most keys of any tile below, which begins at a multiple of them: what is read before the first key of a window.
MAX_KEYS_AT_ONCE = 128


class AttentionCall(NamedTuple):
    """Arguments of `kernels.attention.paged_attention.paged_attention`, checked, with defaults filled in.

    Attributes:
        window: positions that a query sees left and right of its own; NO_LIMIT for all. Causal is 0 on the right.
        chunk_size: `attention_chunk_size`; 0 for no limit.
        is_causal: bool [num_seqs]; True sets the right window of that sequence to 0.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    max_seqlen_q: int
    is_causal: torch.Tensor | None
    sinks: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    mask: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor | None
    softmax_scale: float
    window: tuple[int, int]
    chunk_size: int
    softcap: float
    deterministic: bool

    @property
    def head_scales(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """k_scale and v_scale for each head, [], [1] or [num_kv_heads]; None if each row has its own."""
        if self.k_cache.dtype == torch.int8:
            return None, None
        return self.k_scale, self.v_scale

    @property
    def row_scales(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """k_scale and v_scale for each row, [num_blocks, block_size, num_kv_heads]; None unless the cache is int8."""
        if self.k_cache.dtype == torch.int8:
            return self.k_scale, self.v_scale
        return None, None

    @property
    def shares_cache(self) -> bool:
        """Whether v_cache is a view of k_cache from its first element on, so that a key begins with its value."""
        k_cache, v_cache = self.k_cache, self.v_cache
        is_view = k_cache.data_ptr() == v_cache.data_ptr() and k_cache.stride() == v_cache.stride()
        return is_view and v_cache.shape[3] <= k_cache.shape[3]

    @property
    def num_products(self) -> Callable[[Mapping[str, Any]], int]:
        """A function that counts the multiplications of one query of each sequence, from `seq_lens` on the host."""
        products_of_a_key = self.q.shape[1] * (self.q.shape[2] + self.v_cache.shape[3])
        return lambda tensors: int(tensors["seq_lens"].sum()) * products_of_a_key


@dataclass(frozen=True, kw_only=True)
class AttentionShape(PlanShape):
    """Everything besides the lengths that a schedule of `paged_attention` depends on; see the module."""

    box: int = 0
    more_scores: bool = False

    def tiles(self, arch: str, rows: int) -> dict[str, AttentionTile]:
        sizes = (self.head_dim, self.v_head_dim, self.element_size, arch, self.box)
        options: dict[str, Any] = {"more_scores": self.more_scores, "kind": self.kind}
        tiles = {"decode": decode_tile(*sizes, rows=rows, **options)}
        if rows > DECODE_MAX_ROWS:
            tiles["prefill"] = prefill_tile(*sizes, **options)
        return tiles


def query_lengths(group: int) -> tuple[int, ...]:
    """Return longest query lengths, rising, that select every tile for `group` query heads to a KV head."""
    return tuple(sorted({max(rows // group, 1) for rows in (16, 32, DECODE_MAX_ROWS, DECODE_MAX_ROWS + group)}))


def step_sizes(groups: Iterable[int], longest: int) -> list[int]:
    """Return numbers of tokens, rising to `longest`, that select every tile of rows and of queries of `groups`."""
    sizes = {*ROW_COUNTS, *(length for group in groups for length in query_lengths(group))}
    return sorted(size for size in sizes if size <= longest)


def default_block_size(arch: str) -> int:
    """Return the default tokens of a cache block: 64 on server GPUs with TMA (sm_90, sm_100, sm_103), else 16.

    With 64, the copy engine fetches a block's keys as one box, which saves the threads their copies (see
    `prefill_tile`). With 16, prefixes are shared in finer steps.
    """
    has_tma = arch in LARGE_SHARED_MEMORY and arch.startswith("sm_")
    return 64 if has_tma else 16


def box_keys(cache: torch.Tensor, arch: str) -> int:
    """Return how many keys of a head the copy engine can fetch from one block of `cache`: a power of two, or 0.

    It needs addresses and strides in multiples of 16 bytes (CUDA driver API, cuTensorMapEncodeTiled).
    """
    if arch not in LARGE_SHARED_MEMORY or cache.data_ptr() % 16:
        return 0
    size = cache.element_size()
    for stride in cache.stride()[:3]:
        if stride <= 0 or stride * size % 16:
            return 0
    block_size = cache.shape[1]
    return block_size & -block_size  # its largest power of two


def decode_tile(
    head_dim: int,
    v_head_dim: int,
    element_size: int,
    arch: str,
    box: int = 0,
    *,
    rows: int = 16,
    more_scores: bool = False,
    kind: str = "",
) -> AttentionTile:
    """Return the tile of sequences with at most DECODE_MAX_ROWS rows: as small as tensor cores allow.

    Reading K and V takes the time there. rows: most rows of any sequence of the batch. For verify rows beyond 16, one
    tile of 32 or 64 reads K and V once. A batch with prompts has 16-row tiles.

    BLOCK_N rows of K take 16 KB, and V as much; of 3 stages two are under way. At head_dim 128 on sm_90, Triton 3.7.1
    then takes 158 registers and 72 KB of shared memory (121 registers with boxes), so three programs share an SM. Tiles
    of 32 rows take 164 registers with boxes, of 64 rows 254: two programs.
    """
    width = padded_head_dim(max(head_dim, v_head_dim)) * element_size
    is_padded = width > head_dim * element_size
    if element_size == 4:
        return _float32_decode_tile(width, arch, kind)
    if arch.startswith("gfx"):
        return _gfx_decode_tile(width, kind, more_scores=more_scores)
    block_m = 16
    if 16 < rows <= DECODE_MAX_ROWS:  # 64 rows spill 24 registers at head_dim 256, 8 with all options
        block_m = 32 if rows <= 32 or width > 256 or more_scores else 64
    if arch in LARGE_SHARED_MEMORY:
        return _large_decode_tile(width, block_m, box, kind, is_padded=is_padded, more_scores=more_scores)
    if arch in SMALL_SHARED_MEMORY:
        return _small_decode_tile(width, block_m, kind, is_padded=is_padded, more_scores=more_scores)
    return _middle_decode_tile(width, block_m, kind, is_padded=is_padded, more_scores=more_scores)


def _decode_keys(width: int) -> int:
    """Return BLOCK_N for rows of `width` bytes."""
    return min(128, 16384 // width)


def _float32_decode_tile(width: int, arch: str, kind: str) -> AttentionTile:
    """Return the tile of float32, which runs outside the tensor cores; 4 warps spill 286 registers at head_dim 128."""
    block_n = 32 if width <= 512 else 16
    if arch.startswith("gfx"):  # at head_dim 512 416 of 512 registers; 8 warps of 256 spill 137
        num_warps = 8 if width <= 1024 else 4
        return AttentionTile(16, block_n, num_warps, 1)
    if kind == "int8":  # 16 x 32 spills 170; 183 registers
        return AttentionTile(16, 16, 8, 2)
    programs = 1
    if arch in SMALL_SHARED_MEMORY:
        programs = max(1, min(3, 1024 // width))
    elif width <= 1024:
        programs = 3
    elif arch in LARGE_SHARED_MEMORY:  # 97 KB at head_dim 512
        programs = 2
    return AttentionTile(16, block_n, 8, 2, programs)


def _gfx_decode_tile(width: int, kind: str, *, more_scores: bool) -> AttentionTile:
    """Return the tile of AMD's GPUs: 64 KB of LDS a compute unit hold one stage, and registers prefetch the next."""
    block_n = min(_decode_keys(width), 64)
    if kind == "int8":  # 64 keys take 342 registers at head_dim 128, 32 take 203
        block_n //= 2
    is_large = (kind and width > 512) or (kind == "int8" and more_scores)  # 278 and 296 registers of 512
    programs = 1 if is_large else 2
    return AttentionTile(16, max(block_n, 16), 4, 1, programs)


def _large_decode_tile(
    width: int, block_m: int, box: int, kind: str, *, is_padded: bool, more_scores: bool
) -> AttentionTile:
    """Return the tile of server GPUs from sm_90 on."""
    block_n = _decode_keys(width)
    by_tma = box >= block_n
    if (width > 512 and block_m == 32) or (width > 256 and more_scores and is_padded):
        # 4 warps spill 16 registers beside the 128 of 32 x 512 sums, and 12 at head_dim 192 with all options; 8 warps
        # take 188 and 154.
        return AttentionTile(block_m, block_n, 8, 3, 1, by_tma)
    # Boxes at head_dim 256: ptxas keeps 4 warps to 168 registers, for a third program, and spills 10; 8 warps take 124.
    num_warps = 4
    if by_tma and block_m == 16 and 256 < width <= 512 and not kind:
        num_warps = 8
    # The others take 192 to 254 registers; int8 in boxes 168 by Triton 3.7.1 and 187 by 3.6.0.
    is_lean = width <= 256 and not more_scores and (not kind or (by_tma and kind != "int8"))
    programs = 3 if is_lean and block_m == 16 else 2
    return AttentionTile(block_m, block_n, num_warps, 3, programs, by_tma)


def _middle_decode_tile(width: int, block_m: int, kind: str, *, is_padded: bool, more_scores: bool) -> AttentionTile:
    """Return the tile of sm_80: 4 warps spill 6 registers over 8-bit caches, 8 warps 13 with all options."""
    num_warps = 4 if more_scores and width <= 256 else 8
    # At head_dim 192, whose columns are padded to 256, 3 stages spill 15 registers with all options.
    num_stages = 2 if is_padded and more_scores and num_warps == 8 else 3
    is_large = block_m == 64 or kind == "int8" or (width > 256 and (more_scores or block_m == 32))
    programs = 1 if is_large else 2
    return AttentionTile(block_m, _decode_keys(width), num_warps, num_stages, programs)


def _small_decode_tile(width: int, block_m: int, kind: str, *, is_padded: bool, more_scores: bool) -> AttentionTile:
    """Return the tile of consumer GPUs, whose programs have 99 KB."""
    block_n = _decode_keys(width)
    if block_m > 16:
        num_warps = 4 if more_scores and width <= 256 else 8
        # 32 rows spill 6 registers at 3 stages on sm_120.
        num_stages = 2 if block_m == 32 or (is_padded and more_scores and num_warps == 8) else 3
        return AttentionTile(block_m, block_n, num_warps, num_stages)
    # 8 warps spill 4 registers at head_dim 128, at 3 stages and head_dim 256, too; with all options 2 at 2 stages.
    # Over e5m2 3 stages spill 6 on sm_89.
    num_stages = 3 if width <= 256 and kind in ("e4m3", "int8") else 2
    # Over 16-bit caches and int8 of head_dim 512, 8 warps spill 9 and 6 on sm_120.
    has_few_warps = width <= 256 or (width <= 512 and (more_scores or not kind)) or (width > 512 and kind == "int8")
    num_warps = 4 if has_few_warps else 8
    is_large = more_scores or (kind == "int8" and width > 256)
    programs = 1 if is_large else 2
    return AttentionTile(16, block_n, num_warps, num_stages, programs)


def prefill_tile(
    head_dim: int,
    v_head_dim: int,
    element_size: int,
    arch: str,
    box: int = 0,
    *,
    more_scores: bool = False,
    kind: str = "",
) -> AttentionTile:
    """Return the tile of longer queries: 128 rows if registers allow, 64-row wgmma for each of two warp groups.

    Of 3 stages two tiles of keys are under way while one is computed. Instructions of a warp for 64 keys on sm_90 at
    head_dim 128: 384 with 64 gathered keys, 346 with boxes of 64, 249 with boxes of 128. The matrix unit needs 1,024
    cycles for them, and eight warps share four schedulers.
    """
    widest = padded_head_dim(max(head_dim, v_head_dim))
    width = widest * element_size
    if widest > 256:
        return _widest_prefill_tile(element_size, arch, kind, more_scores=more_scores)
    if kind == "int8":
        return _int8_prefill_tile(width, element_size, arch, box, more_scores=more_scores)
    if arch.startswith("gfx"):
        if element_size == 4:
            return AttentionTile(32, 16, 8, 1)
        if width <= 256:
            return AttentionTile(128, 64, 4, 1)
        return AttentionTile(64, 32, 4, 1)
    if element_size == 4:  # BLOCK_N 32 spills 251 registers at head_dim 128
        if arch in SMALL_SHARED_MEMORY:
            return AttentionTile(32, 16, 8, 1)
        num_warps = 4 if width <= 256 else 8
        return AttentionTile(32, 16, num_warps, 2)
    if arch in LARGE_SHARED_MEMORY:
        if width > 256 and padded_head_dim(v_head_dim) * element_size <= 256 and not more_scores and not kind:
            # keys of 192, values of 128: 235 registers, 203 with boxes, 213 KB
            return AttentionTile(128, 64, 8, 3, by_tma=box >= 64)
        if width > 256:  # 128 x 64 spills 24 registers, 128 x 32 with all options 8 on sm_100
            block_m = 64 if more_scores else 128
            return AttentionTile(block_m, 32, 8, 3)
        if box >= 128 and not more_scores and not arch.startswith("sm_10"):
            # 237 registers, 224 KB. A softcap would spill 10, tcgen05's copies of the accumulator 70.
            return AttentionTile(128, 128, 8, 3, by_tma=True)
        # 210 registers with gathered keys, 203 with boxes; 128 KB.
        return AttentionTile(128, 64, 8, 3, by_tma=box >= 64)
    # Without wgmma the operands pass through registers: 128 x 64 spills 24 of them at head_dim 128, 64 x 64 spills 28
    # at 256. These stay under the 99 KB of the consumer chips, too.
    if width <= 128:
        return AttentionTile(128, 64, 8, 3)
    if width <= 256:  # with all options 128 rows spill 16 registers on sm_120
        block_m = 64 if more_scores and arch in SMALL_SHARED_MEMORY else 128
        return AttentionTile(block_m, 32, 8, 3)
    block_n = 16 if more_scores else 32
    return AttentionTile(64, block_n, 8, 2)


def _int8_prefill_tile(width: int, element_size: int, arch: str, box: int, *, more_scores: bool) -> AttentionTile:
    """Return the tile over int8 caches: scales and conversions take registers, so the tiles of other dtypes spill."""
    if element_size == 4:  # 32 x 16 spills 244
        return AttentionTile(16, 16, 8, 2)
    block_n = 16 if more_scores else 32  # beyond 256 bytes a row
    if arch.startswith("gfx"):  # 128 x 64 spills 6, 64 x 32 with all options at head_dim 256 45
        if width <= 256:
            block_m = 64 if more_scores else 128
            return AttentionTile(block_m, 32, 4, 1)
        return AttentionTile(64, block_n, 4, 1)
    if arch in LARGE_SHARED_MEMORY:
        if width > 256:  # 128 x 32 spills 29, 64 x 32 with all options 32
            return AttentionTile(64, block_n, 8, 3)
        # 128 x 128 spills 28, 128 x 64 with all options 20; 255 registers, 232 with boxes, 97 KB
        if more_scores:
            return AttentionTile(128, 32, 8, 3)
        return AttentionTile(128, 64, 8, 3, by_tma=box >= 64)
    if width > 256:  # 64 x 16 with all options spills 24
        block_m = 32 if more_scores else 64
        return AttentionTile(block_m, 32, 8, 2)
    return AttentionTile(64, 32, 8, 3)  # 128 x 32 spills 8, with all options 32


def _widest_prefill_tile(element_size: int, arch: str, kind: str, *, more_scores: bool) -> AttentionTile:
    """Return the tile of heads above 256: sums of 64 x 512 in 8 warps take 128 of a thread's 255 registers.

    Beside them, 64 x 32 on sm_90 needs 16 pointers of gathered rows and spills 53 registers, with boxes 8. 16 warps may
    use 128 registers each and spill 215. Two programs with half of the values each would compute all scores twice.
    """
    if element_size == 4:  # 112 registers, 97 KB
        if arch.startswith("gfx"):
            return AttentionTile(16, 16, 4, 1)
        return AttentionTile(16, 16, 8, 2)
    if arch.startswith("gfx"):  # 342 of 512 registers, all 64 KB; in 8 warps of 256 all options spill 10, int8 in 4 1
        block_m = 32 if kind == "int8" else 64
        return AttentionTile(block_m, 16, 4, 1)
    if more_scores and kind == "int8":  # 32 x 32 spills 112 on sm_100 and 74 on sm_120
        return AttentionTile(32, 16, 8, 2)
    # 64 x 16 spills 14 with all options on sm_90, 399 over 8-bit caches, 14 on sm_120; these take 200 registers, 98 KB.
    if more_scores or kind or arch in SMALL_SHARED_MEMORY:
        return AttentionTile(32, 32, 8, 2)
    num_stages = 3 if arch in LARGE_SHARED_MEMORY else 2  # 252 registers, 128 KB; 253 and 98 KB
    return AttentionTile(64, 16, 8, num_stages)
