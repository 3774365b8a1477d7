"""Tile sizes of both attention kernels: tables by chip.

To try another tile, edit or insert a row: the first row of a table that fits a call is taken. `bench/attention/tune.py`
times candidates on a GPU, and `make record` compiles what the tables hold and refuses tiles that spill.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from ..core.checks import MAX_HEAD_DIM
from ..core.device import LARGE_SHARED_MEMORY, SMALL_SHARED_MEMORY
from ..core.errors import UnsupportedError
from ..core.launch import ROW_COUNTS
from .plan import DECODE_MAX_ROWS, AttentionTile, padded_head_dim
from .union_kernel import MAX_ENTRIES, MAX_TOKENS

# The most keys of any tile below. A tile begins at a multiple of its keys, so it may read up to this many keys before
# the first key of a window.
MAX_KEYS_AT_ONCE = 128
# Most rows of a tile of latents that has a loop of its own for the blocks that every row sees whole. With 64 rows, the
# second loop would spill 100 registers on sm_90.
ONE_LOOP_ROWS = 32


class Row(NamedTuple):
    """A tile, and the calls that it fits: None fits all.

    Attributes:
        block_n: keys at a time, one number or one for each width.
        by_tma: keys are fetched in boxes if a cache block holds BLOCK_N of them.
        rows: most rows of a sequence, queries times heads of a group.
        width: most bytes of keys or values of a head in the dtype of q, padded to a power of two.
        v_width: most bytes of values.
        kinds: names of the cache's `KvKind`, or of both, see `kind_of_tile`.
        scores: whether softcap, ALiBi or a mask is given; they take registers for each score.
        padded: whether keys are narrower than `width`.
        boxed: whether a cache block holds BLOCK_N keys that the copy engine can fetch.
        chosen: whether each query chooses its keys; in DECODE, whether several that do share a tile.
        chips: architectures.
    """

    block_m: int
    block_n: int | Mapping[int, int]
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1
    by_tma: bool = False
    rows: int | None = None
    width: int | None = None
    v_width: int | None = None
    kinds: tuple[str, ...] | None = None
    scores: bool | None = None
    padded: bool | None = None
    boxed: bool | None = None
    chosen: bool | None = None
    chips: tuple[str, ...] | None = None


# BLOCK_N by the padded width of a key in bytes: as many keys as fill 16 KB, at most 128.
_16KB = {32: 128, 64: 128, 128: 128, 256: 64, 512: 32, 1024: 16}
# The same, with at most 64 keys, and with at most 32.
_64_KEYS = {32: 64, 64: 64, 128: 64, 256: 64, 512: 32, 1024: 16}
_32_KEYS = {32: 32, 64: 32, 128: 32, 256: 32, 512: 16, 1024: 16}
_NVFP4 = ("nvfp4",)
# Keys or values alone have scales or are 8-bit floats: the shared memory of plain ones, the registers of the others.
_HALF = ("half",)
_PLAIN, _E4M3, _INT4, _PACKED = ("",), ("e4m3",), ("int4", "nvfp4"), ("packed", "record", "mxfp8", "nvfp4_record")
_RECORDS = "record", "nvfp4_record"
# Codes of latents that become numbers of 16 bits without a product in float32.
_EXACT = "e4m3", "nvfp4_latent"
# Kinds with scales of rows.
_INT8 = ("int8", "e4m3_rows", *_INT4, *_HALF)
_FP8 = ("e4m3", "e5m2")
_NARROW = (*_FP8, *_INT8)

# Tiles for sequences with at most DECODE_MAX_ROWS rows. Reading K and V takes the time, so tiles are as small as tensor
# cores allow. If a verify step has more than 16 rows, one tile of 32 or 64 rows reads K and V once. Columns: BLOCK_M,
# BLOCK_N, warps, stages, programs on an SM, then the calls that fit. Comments beside rows give the registers of a
# thread that a tile takes, or that a larger tile (BLOCK_M x BLOCK_N) would spill. "All options" are softcap, ALiBi and
# a mask.
DECODE: dict[str, tuple[Row, ...]] = {
    # At head_dim 128 on sm_90, these take 158 registers and 72 KB of shared memory, so three programs share an SM.
    "large": (
        Row(16, _16KB, 4, 3, 3, by_tma=True, rows=16, width=256, scores=False, kinds=_PLAIN),
        Row(16, _16KB, 4, 3, 3, by_tma=True, rows=16, width=256, scores=False, kinds=_FP8, boxed=True),
        # This takes up to 254 registers, so two programs share an SM.
        Row(16, _16KB, 4, 3, 2, by_tma=True, rows=16, width=256),
        # With all options at head_dim 192, 4 warps would spill 12 registers.
        Row(16, _16KB, 8, 3, 1, by_tma=True, rows=16, scores=True, padded=True),
        # With 4 warps, ptxas limits a thread to 168 registers, so that three programs fit, and spills 10.
        Row(16, _16KB, 8, 3, 2, by_tma=True, rows=16, width=512, kinds=_PLAIN, boxed=True),
        Row(16, _16KB, 4, 3, 2, by_tma=True, rows=16),
        Row(32, _16KB, 8, 3, 1, scores=True, kinds=_INT8, chosen=True),  # 4 warps would spill 22 registers
        Row(32, _16KB, 4, 3, 2, by_tma=True, rows=32, width=256),
        Row(32, _16KB, 4, 3, 2, by_tma=True, width=256, scores=True),
        # On sm_100, 4 warps would spill 8 registers over blocks of 24, and 31 over int8 caches.
        Row(64, _16KB, 8, 3, 1, width=256, chosen=True, chips=("sm_100", "sm_103")),
        Row(64, _16KB, 4, 3, 2, by_tma=True, width=256),  # at head_dim 256, 64 rows would spill 24 registers
        Row(32, _16KB, 8, 3, 1, by_tma=True, scores=True, padded=True),
        Row(32, _16KB, 4, 3, 2, by_tma=True, width=512),
        Row(32, _16KB, 8, 3, 1, by_tma=True),  # 4 warps would spill 16 registers at head_dim 512
    ),
    # sm_80. Over 8-bit caches, 4 warps spill 6 registers. With all options, 8 warps spill 13.
    "middle": (
        Row(16, _16KB, 4, 3, 1, rows=16, width=256, scores=True, kinds=_INT8),
        Row(16, _16KB, 4, 3, 2, rows=16, width=256, scores=True),
        Row(16, _16KB, 8, 2, 1, rows=16, scores=True, padded=True),  # 3 stages would spill 15 registers at head_dim 192
        Row(16, _16KB, 8, 3, 1, rows=16, scores=True),
        Row(16, _16KB, 8, 3, 1, rows=16, kinds=_INT8),
        Row(16, _16KB, 8, 3, 2, rows=16),
        Row(32, _16KB, 8, 3, 1, width=256, scores=True, kinds=_NARROW, chosen=True),  # 4 warps would spill 18 registers
        Row(32, _16KB, 4, 3, 1, width=256, scores=True, kinds=_INT8),
        Row(32, _16KB, 4, 3, 2, width=256, scores=True),
        Row(32, _16KB, 4, 3, 2, rows=32, width=256, kinds=_PLAIN, chosen=True),  # of 8 warps, one would fit an SM
        Row(32, _16KB, 8, 3, 1, rows=32, width=256, kinds=_INT8),
        Row(32, _16KB, 8, 3, 2, rows=32, width=256),
        Row(64, _16KB, 8, 3, 1, width=256),
        Row(32, _16KB, 8, 2, 1, scores=True, padded=True),
        Row(32, _16KB, 8, 3, 1),
    ),
    # Consumer GPUs, whose programs have 99 KB of shared memory. limits.md has the spills of other tiles.
    "small": (
        Row(16, _16KB, 4, 3, 1, rows=16, width=256, scores=True, kinds=(*_E4M3, *_INT8)),
        Row(16, _16KB, 4, 3, 1, rows=16, width=256, kinds=_HALF),
        Row(16, _16KB, 4, 3, 2, rows=16, width=256, kinds=(*_E4M3, *_INT8)),
        Row(16, _16KB, 8, 2, 1, rows=16, width=512, scores=True, kinds=_INT4),  # 4 warps would spill 12 registers
        Row(16, _16KB, 4, 2, 1, rows=16, width=512, scores=True),
        Row(16, _16KB, 4, 2, 2, rows=16, width=256),
        Row(16, _16KB, 4, 2, 2, rows=16, width=512, kinds=_PLAIN),
        Row(16, _16KB, 8, 2, 1, rows=16, width=512, kinds=_INT8),
        Row(16, _16KB, 8, 2, 2, rows=16, width=512),
        # On sm_120, 8 warps would spill 6 registers over int8 caches at head_dim 512.
        Row(16, _16KB, 4, 2, 1, rows=16, kinds=_INT8),
        Row(16, _16KB, 8, 2, 1, rows=16, scores=True),
        Row(16, _16KB, 8, 2, 2, rows=16),
        Row(32, _16KB, 8, 2, width=256, scores=True, kinds=_NARROW, chosen=True),  # 4 warps would spill 34 registers
        Row(32, _16KB, 4, 2, width=256, scores=True),  # 3 stages would spill 6 registers on sm_120
        Row(32, _16KB, 8, 2, rows=32),
        Row(64, _16KB, 8, 3, width=256),
        Row(32, _16KB, 8, 2),
    ),
    # AMD. The 64 KB of LDS of a compute unit hold one stage, and registers prefetch the next stage. limits.md has the
    # registers.
    "gfx": (
        Row(64, _32_KEYS, 4, 1, 1, width=512, chosen=True),
        Row(32, 16, 4, 1, 1, chosen=True),
        Row(16, _32_KEYS, 4, 1, 1, scores=True, kinds=_INT8),
        Row(16, _32_KEYS, 4, 1, 2, width=512, kinds=_INT8),
        Row(16, 16, 4, 1, 1, kinds=_INT8),
        Row(16, _64_KEYS, 4, 1, 2, width=512),
        Row(16, 16, 4, 1, 1, kinds=_FP8),
        Row(16, 16, 4, 1, 2),
    ),
}
# float32 runs outside the tensor cores, so its tiles have 8 warps: 4 would spill 286 registers at head_dim 128.
DECODE_FLOAT32: dict[str, tuple[Row, ...]] = {
    "large": (
        Row(16, 16, 8, 2, 1, kinds=_INT8),
        Row(16, 32, 8, 2, 3, width=512),
        Row(16, 16, 8, 2, 3, width=1024),
        Row(16, 16, 8, 2, 2),  # 97 KB of shared memory at head_dim 512
    ),
    "middle": (
        Row(16, 16, 8, 2, 1, kinds=_INT8),
        Row(16, 32, 8, 2, 3, width=512),
        Row(16, 16, 8, 2, 3, width=1024),
        Row(16, 16, 8, 2, 1),
    ),
    "small": (
        Row(16, 16, 8, 2, 1, kinds=_INT8),
        Row(16, 32, 8, 2, 3, width=256),
        Row(16, 32, 8, 2, 2, width=512),
        Row(16, 16, 8, 2, 1),
    ),
    "gfx": (
        Row(16, 32, 8, 1, width=512),
        Row(16, 16, 8, 1, width=1024),
        Row(16, 16, 4, 1),  # at head_dim 512, 8 warps would spill 137 registers
    ),
}

# Tiles for longer queries: 128 rows if registers allow, 64 for the wgmma of each of two warp groups. With 3 stages, two
# blocks of keys are under way while one is computed. Int8 caches get smaller tiles, because scales and conversions take
# registers. limits.md has the instructions of a tile.
PREFILL: dict[str, tuple[Row, ...]] = {
    "large": (
        # 128 x 64 would spill 20 registers with all options.
        Row(128, 32, 8, 3, width=256, scores=True, kinds=_INT8),
        Row(128, 64, 8, 3, by_tma=True, width=256, kinds=_INT8),  # 128 x 128 would spill 28 registers
        # A softcap would spill 10 registers. On sm_100, copies of tcgen05's accumulator would spill 70.
        Row(128, 128, 8, 3, by_tma=True, width=256, scores=False, boxed=True, chips=("sm_90", "cpu")),
        Row(128, 64, 8, 3, by_tma=True, width=256),  # 210 registers, 128 KB of shared memory
        Row(64, 16, 8, 3, width=512, scores=True, kinds=_INT8),  # 64 x 32 would spill 32 registers
        Row(64, 32, 8, 3, width=512, kinds=_INT8),  # 128 x 32 would spill 29 registers
        # Keys of 192 and values of 128 elements: 235 registers, 213 KB of shared memory.
        Row(128, 64, 8, 3, by_tma=True, width=512, v_width=256, scores=False, kinds=_PLAIN),
        Row(64, 32, 8, 3, width=512, scores=True),  # 128 x 32 would spill 8 registers on sm_100
        Row(128, 32, 8, 3, width=512),  # 128 x 64 would spill 24 registers
        Row(32, 16, 8, 2, scores=True, kinds=_INT8),  # 32 x 32 would spill 112 registers on sm_100
        # On sm_90, 64 x 16 would spill 14 registers with all options, and 399 over 8-bit caches.
        Row(32, 32, 8, 2, scores=True),
        Row(32, 32, 8, 2, kinds=_NARROW),
        Row(64, 16, 8, 3),  # 252 registers, 128 KB of shared memory
    ),
    # sm_80 has no wgmma, so operands pass through registers: at head_dim 128, 128 x 64 would spill 24.
    "middle": (
        Row(32, 32, 8, 3, width=256, scores=True, kinds=_NVFP4),  # 64 x 32 would spill 16 registers
        Row(64, 32, 8, 3, width=256, kinds=_INT8),  # 128 x 32 would spill 8 registers, and 32 with all options
        Row(128, 64, 8, 3, width=128),
        Row(128, 32, 8, 3, width=256),
        Row(32, 32, 8, 2, width=512, scores=True, kinds=_INT8),  # 64 x 16 would spill 24 registers
        Row(32, 32, 8, 2, width=512, kinds=_INT4),  # 64 x 32 would spill 2 registers
        Row(64, 32, 8, 2, width=512, kinds=_INT8),
        Row(64, 16, 8, 2, width=512, scores=True),
        Row(64, 32, 8, 2, width=512),
        Row(32, 16, 8, 2, scores=True, kinds=_INT8),
        Row(32, 32, 8, 2, scores=True),
        Row(32, 32, 8, 2, kinds=_NARROW),
        Row(64, 16, 8, 2),  # 253 registers, 98 KB of shared memory
    ),
    # Consumer GPUs. These tiles stay under their 99 KB of shared memory.
    "small": (
        Row(64, 32, 8, 3, width=256, kinds=_INT8),
        Row(128, 64, 8, 3, width=128),
        Row(64, 32, 8, 3, width=256, scores=True),  # 128 rows would spill 16 registers on sm_120
        Row(128, 32, 8, 3, width=256),
        Row(32, 32, 8, 2, width=512, scores=True, kinds=_INT8),
        Row(64, 32, 8, 2, width=512, kinds=_INT8),
        Row(64, 16, 8, 2, width=512, scores=True),
        Row(64, 32, 8, 2, width=512),
        Row(32, 16, 8, 2, scores=True, kinds=_INT8),  # 32 x 32 would spill 74 registers on sm_120
        Row(32, 32, 8, 2),  # 64 x 16 would spill 14 registers on sm_120
    ),
    "gfx": (
        Row(64, 32, 4, 1, width=256, scores=True, kinds=_INT8),
        Row(128, 32, 4, 1, width=256, kinds=_INT8),  # 128 x 64 would spill 6 registers
        Row(128, 64, 4, 1, width=256),
        Row(64, 16, 4, 1, width=512, scores=True, kinds=_INT8),  # 64 x 32 would spill 45 registers
        Row(64, 16, 4, 1, width=512, kinds=_INT4),  # 64 x 32 would spill a register
        Row(64, 32, 4, 1, width=512),
        Row(32, 16, 4, 1, kinds=_INT8),
        Row(64, 16, 4, 1),  # 342 registers and all 64 KB of LDS; 8 warps would spill 10 registers
    ),
}
# float32 at head_dim 128. Over int8 caches 32 x 16 would spill 244 registers, over other caches 32 x 32 would spill
# 251.
_PREFILL_FLOAT32 = (
    Row(16, 16, 8, 2, kinds=_INT8),
    Row(32, 16, 4, 2, width=256),
    Row(32, 16, 8, 2, width=1024),
    Row(16, 16, 8, 2),  # 112 registers, 97 KB of shared memory
)
PREFILL_FLOAT32: dict[str, tuple[Row, ...]] = {
    "large": _PREFILL_FLOAT32,
    "middle": _PREFILL_FLOAT32,
    "small": (
        Row(16, 16, 8, 2, kinds=_INT8),
        Row(32, 16, 8, 1, width=1024),
        Row(16, 16, 8, 2),
    ),
    "gfx": (
        Row(16, 16, 8, 2, width=1024, kinds=_INT8),
        Row(32, 16, 8, 1, width=1024),
        Row(16, 16, 4, 1),
    ),
}

# Tiles of latents. The sums of 64 rows of 512 elements take 128 registers of a thread in 8 warps, and their queries 72
# KB of shared memory. So one program fills an SM. Codes with scales ("packed", "record" and e4m3) pass through
# registers in float32, so their tiles have fewer rows: 64 rows of e4m3 would spill 75 registers. 64 rows of records
# would spill in the loop of a window: 133 times of 1,274 instructions on sm_90. limits.md has other targets.
LATENTS: dict[str, tuple[Row, ...]] = {
    # sm_90 takes 64 keys at once, because with 32 keys it would read the queries from shared memory twice as often for
    # each key. sm_100 takes 32 keys, because tcgen05 needs a copy of the latents in shared memory. See limits.md.
    "large": (
        Row(16, 16, 8, 2, kinds=_PACKED, chosen=True),
        Row(16, 16, 8, 3, kinds=_PACKED),
        Row(16, 32, 8, 2, rows=16, kinds=_EXACT, chosen=True),
        Row(16, 32, 8, 3, rows=16, kinds=_EXACT),  # 4 warps would spill 32 registers
        Row(16, 32, 4, 2, 2, rows=16, chosen=True),
        Row(16, 32, 4, 3, 2, rows=16),
        Row(32, 32, 8, 2, kinds=_EXACT, chosen=True),
        Row(32, 32, 8, 3, kinds=_EXACT),
        Row(32, 64, 8, 2, rows=32, chosen=True),
        Row(32, 64, 8, 3, rows=32),
        Row(64, 64, 8, 2, chosen=False, chips=("sm_90",)),  # positions of 64 chosen keys would spill 9 registers
        Row(64, 32, 8, 2),
    ),
    # sm_80. 64 rows and 32 keys take 115 KB of its 163 KB of shared memory.
    "middle": (
        Row(16, 16, 8, 2, kinds=_PACKED),
        Row(16, 32, 8, 2, rows=16, kinds=_EXACT),
        Row(16, 32, 4, 2, 2, rows=16),
        Row(32, 32, 8, 2, rows=32),
        Row(32, 32, 8, 2, kinds=_EXACT),
        Row(64, 32, 8, 2),
    ),
    # Consumer GPUs. 64 rows would take 106 KB of shared memory, more than their 99 KB.
    "small": (
        Row(16, 16, 8, 2, kinds=_PACKED),
        Row(16, 32, 8, 2, rows=16),
        Row(32, 16, 8, 2),
    ),
    "gfx": (
        Row(16, 16, 4, 1, rows=16, kinds=_PACKED),
        Row(32, 16, 4, 1, rows=32, kinds=_RECORDS),
        Row(64, 16, 4, 1, kinds=_RECORDS),  # up to 310 registers, all 64 KB of LDS
        Row(16, 16, 4, 1, kinds=_PACKED),
        Row(16, 32, 4, 1, rows=16),
        Row(32, 16, 4, 1, rows=32),
        Row(32, 16, 4, 1, kinds=_EXACT),
        Row(64, 16, 4, 1),
    ),
}
# Latents above 512 elements. The sums of 16 rows of 1,024 take 64 registers of a thread in 8 warps.
# With e4m3 caches, sm_100, sm_103 and sm_120 spill 7 to 9 registers in a loop of 1,600 instructions. So do tiles of
# other stages, and tiles of 16 warps spill 77.
WIDE_LATENTS: dict[str, tuple[Row, ...]] = dict.fromkeys(("large", "middle", "small"), (Row(16, 16, 8, 2),))
WIDE_LATENTS["gfx"] = (Row(16, 16, 4, 1),)
# Queries and latents in float32 take 139 KB of shared memory. Where that does not fit, there is no tile.
WIDE_LATENTS_FLOAT32: dict[str, tuple[Row, ...]] = dict.fromkeys(("large", "middle"), (Row(16, 16, 8, 2),))
LATENTS_FLOAT32: dict[str, tuple[Row, ...]] = {
    "large": (Row(16, 16, 8, 2),),
    "middle": (Row(16, 16, 8, 2),),
    "small": (Row(16, 16, 8, 2),),
    "gfx": (Row(16, 16, 4, 1),),
}


class _Call(NamedTuple):
    """The properties of a call that rows of the tables name."""

    arch: str
    rows: int
    width: int
    v_width: int
    kind: str
    scores: bool = False
    padded: bool = False
    box: int = 0
    chosen: bool = False


def _fits(row: Row, call: _Call, block_n: int) -> bool:
    limits = (row.rows, call.rows), (row.width, call.width), (row.v_width, call.v_width)
    for limit, value in limits:
        if limit is not None and value > limit:
            return False
    names = (row.kinds, call.kind), (row.chips, call.arch)
    for allowed, name in names:
        if allowed is not None and name not in allowed:
            return False
    is_boxed = call.box >= block_n
    flags = (row.scores, call.scores), (row.padded, call.padded), (row.boxed, is_boxed), (row.chosen, call.chosen)
    return all(expected is None or flag == expected for expected, flag in flags)


def _choose(table: Mapping[str, Sequence[Row]], call: _Call) -> AttentionTile:
    """Return the tile of the first row that fits."""
    for row in table[_chip(call.arch)]:
        block_n = row.block_n
        if not isinstance(block_n, int):
            block_n = block_n[call.width]
        if _fits(row, call, block_n):
            by_tma = row.by_tma and call.box >= block_n
            return AttentionTile(row.block_m, block_n, row.num_warps, row.num_stages, row.programs_per_sm, by_tma)
    raise AssertionError(f"no tile for {call}")


def _chip(arch: str) -> str:
    """Return the kind of chip: AMD's, server GPUs from sm_90 on, consumer GPUs, or others, such as sm_80."""
    if arch.startswith("gfx"):
        return "gfx"
    if arch in LARGE_SHARED_MEMORY:
        return "large"
    if arch in SMALL_SHARED_MEMORY:
        return "small"
    return "middle"


@lru_cache(1024)
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
    union: bool = False,
) -> AttentionTile:
    """Return the tile of sequences with at most DECODE_MAX_ROWS rows.

    Args:
        element_size: bytes of an element of q.
        box: keys that the copy engine can fetch from one cache block, a power of two, or 0.
        rows: most rows of any sequence of the batch. A batch with prompts has 16-row tiles.
        more_scores, kind: `scores` and one of `kinds` in `Row`.
        union: whether the rows are of tokens that choose their blocks.
    """
    if rows > DECODE_MAX_ROWS:
        rows = 16
    width = padded_head_dim(max(head_dim, v_head_dim)) * element_size
    v_width = padded_head_dim(v_head_dim) * element_size
    padded = width > head_dim * element_size
    table = DECODE_FLOAT32 if element_size == 4 else DECODE
    return _choose(table, _Call(arch, rows, width, v_width, kind, more_scores, padded, box, union))


@lru_cache(1024)
def bundle_tokens(
    head_dim: int,
    v_head_dim: int,
    element_size: int,
    arch: str,
    *,
    group: int,
    num_queries: int,
    num_chosen: int,
    more_scores: bool,
    kind: str,
    deterministic: bool,
) -> int:
    """Return how many tokens share a tile over the union of their chosen blocks; 1 if none do.

    A tile of 64 rows waits for its keys, not for its products, even if no two tokens choose the same block, see
    limits.md. So a union never costs more than lists of single tokens, and the tile is as tall as DECODE has it.

    Args:
        group: query heads for each KV head.
        num_queries: upper bound of the longest query.
        num_chosen: entries of a token's list.
        deterministic: whether the result must not depend on other sequences, and so not on the bound.
    """
    most_tokens = min(MAX_TOKENS, MAX_ENTRIES // num_chosen)
    if num_queries < 2 or most_tokens < 2:
        return 1
    if not deterministic:
        most_tokens = min(most_tokens, num_queries)
    rows = min(most_tokens * group, DECODE_MAX_ROWS)
    options: dict[str, Any] = {"more_scores": more_scores, "kind": kind, "union": True}
    tile = decode_tile(head_dim, v_head_dim, element_size, arch, rows=rows, **options)
    return max(1, min(most_tokens, tile.block_m // group))


@lru_cache(1024)
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
    """Return the tile of longer queries; the arguments are those of `decode_tile`."""
    width = padded_head_dim(max(head_dim, v_head_dim)) * element_size
    v_width = padded_head_dim(v_head_dim) * element_size
    table = PREFILL_FLOAT32 if element_size == 4 else PREFILL
    return _choose(table, _Call(arch, 0, width, v_width, kind, more_scores, box=box))


@lru_cache(1024)
def mla_tile(
    v_head_dim: int, element_size: int, arch: str, *, rows: int, kind: str = "", chosen: bool = False
) -> AttentionTile:
    """Return the tile of latents for sequences with at most `rows` rows, queries times heads; kind: `latent_kind`.

    Raises:
        UnsupportedError: latents above 512 are float32, and the chip lacks the shared memory.
    """
    width = v_head_dim * element_size
    if v_head_dim > MAX_HEAD_DIM and element_size == 4 and _chip(arch) not in WIDE_LATENTS_FLOAT32:
        raise UnsupportedError(
            f"v_head_dim: {v_head_dim} in float32 on {arch}, supported are up to {MAX_HEAD_DIM}, or 16 bits"
        )
    if v_head_dim > MAX_HEAD_DIM:
        table = WIDE_LATENTS_FLOAT32 if element_size == 4 else WIDE_LATENTS
    else:
        table = LATENTS_FLOAT32 if element_size == 4 else LATENTS
    return _choose(table, _Call(arch, rows, width, width, kind, chosen=chosen))


def kind_of_tile(k_kind: str, v_kind: str) -> str:
    """Return the name in `Row.kinds` for keys and values of these kinds."""
    if k_kind != v_kind and "" in (k_kind, v_kind):
        return "half"
    kinds = ("", *_FP8, *_INT4, "e4m3_rows", "int8")  # by the registers that they take at head_dim 128
    return kinds[max(kinds.index(k_kind), kinds.index(v_kind))]


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
    `PREFILL`). With 16, prefixes are shared in finer steps.
    """
    has_tma = arch in LARGE_SHARED_MEMORY and arch.startswith("sm_")
    return 64 if has_tma else 16
