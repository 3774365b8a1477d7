"""The attention plan: one step's work, cut into equal items on the device; the host does not know the lengths.

A tile is BLOCK_M query rows of one sequence. Its work is the keys it sees, in blocks of BLOCK_N. Short sequences
(decode, verify) and long ones (prefill) are two phases, each with its own tile size and schedule. Tiles of a phase are
split along their keys, so that all items fill whole waves of the programs that the device runs at once. The only extra
work is to merge partial results. `_plan_kernel` (`plan_kernel.py`) chooses how many splits a tile gets; the numbers
below are its bounds. Sizes depend on upper bounds known to the host, so a captured step can be replayed with other
lengths.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ..core.checks import check_tensor
from ..core.compat import cdiv, triton
from ..core.device import device_of
from ..core.errors import InvalidInputError, as_int, shown
from ..core.launch import launch
from .keys import pack_mask
from .plan_kernel import ITEM_SIZE, PLAN_LANES, PLAN_WARPS, SPLIT_TILE_SIZE, _plan_kernel

# Most rows (query tokens times heads of a GQA group) of a sequence in the decode phase, whose tiles are small. With
# more rows, reading K and V again for every small tile would cost more than the idle rows of a large tile.
DECODE_MAX_ROWS = 64
_INT32_MAX = 2**31 - 1
# Cost of a split besides its keys: its start, and the write of a partial result. The unit is the time of one block of
# keys, see limits.md.
_SPLIT_OVERHEAD = {"decode": 1, "prefill": 4}
# Room for partial results, for each program that the device runs at once. More would gain nothing, see limits.md. A
# step with few tiles gets room for one wave of programs a tile at most, so that a graph of one sequence launches no
# programs without work.
_SLOTS_PER_PROGRAM = {"decode": 5, "prefill": 2}
# Fewest keys of a split. The partial result of a shorter split would cost more (write, read, merge) than the split
# saves, see limits.md.
_MIN_SPLIT_KEYS = {"decode": 256, "prefill": 1024}
# Most splits of a tile if its own length alone decides their number. Prefill has many tiles without splits, and its
# partial results would take gigabytes, see limits.md.
_DETERMINISTIC_SPLITS = {"decode": 8, "prefill": 1}


@dataclass(frozen=True)
class AttentionTile:
    """Shape of one program: BLOCK_M query rows (tokens times GQA group) against BLOCK_N keys at a time.

    Attributes:
        programs_per_sm: least number of programs that an SM holds at once, limited by registers and shared memory
            (`make compile`).
        by_tma: whether the copy engine fetches the keys as one box; they lie in one cache block.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1
    by_tma: bool = False

    @property
    def edge_stages(self) -> int:
        """Pipeline stages of the loops with masks: at most two, because these loops have one or two blocks of keys."""
        return min(self.num_stages, 2)


@cache
def padded_head_dim(head_dim: int) -> int:
    """Return the tile's width: the next power of two, at least 16, the smallest operand of a matrix instruction."""
    return max(16, int(triton.next_power_of_2(head_dim)))


@dataclass(frozen=True)
class AttentionSchedule:
    """The work list of the tiles of one phase on the device, and the upper bounds of its launches.

    Attributes:
        phase: "decode" or "prefill".
        items: int32 [max_items, 5]: sequence, tile in it, first and one past the last block of BLOCK_N keys, slot of
            the partial result or -1 if the tile is not split.
        split_tiles: int32 [max_split_tiles, 4]: sequence, tile, first slot, number of slots.
        counts: int32 [2], how many items and split tiles are filled.
        first_padding: int32 [1], the row behind the last one that tiles cover: the first of a sequence with more
            queries than the upper bound, if there is one.
        partial_out: float32 [max_slots, num_kv_heads, BLOCK_M, v_head_dim], workspace that layers share.
        partial_lse: float32 [max_slots, num_kv_heads, BLOCK_M], base 2, likewise.
    """

    phase: str
    tile: AttentionTile
    items: torch.Tensor
    split_tiles: torch.Tensor
    counts: torch.Tensor
    first_padding: torch.Tensor
    partial_out: torch.Tensor
    partial_lse: torch.Tensor


@dataclass(frozen=True)
class PlanShape:
    """Everything besides the lengths that a schedule depends on.

    Attributes:
        group: query heads for each KV head.
        element_size: bytes of an element of q.
        window: positions that a query sees left and right of its own.
        chunk_size: of local attention, 0 for no limit.
        kind: name of the cache's `KvKind`.
        deterministic: a sequence is split by its own length alone, so that its results have the same bits in any batch.
    """

    num_tokens: int
    num_kv_heads: int
    group: int
    head_dim: int
    v_head_dim: int
    element_size: int
    window: tuple[int, int]
    chunk_size: int = 0
    kind: str = ""
    deterministic: bool = False

    @property
    def decode_rows(self) -> int:
        """Most rows of a sequence that takes the tile of "decode" if there is one of "prefill"."""
        return DECODE_MAX_ROWS

    def tiles(self, arch: str, rows: int) -> dict[str, AttentionTile]:
        """Return the tile of "decode" and, for sequences with more than `decode_rows` rows, the tile of "prefill".

        Without "prefill", all sequences take the tile of "decode".

        rows: most rows of a sequence, queries times heads of a group.
        """
        raise NotImplementedError


class AttentionPlan:
    """Work split of one step, made once and shared by all layers.

    Schedules are made on first use, one set for each head layout and window.

    Args:
        cu_seqlens_q: int32 [num_seqs + 1], query offsets.
        seq_lens: int32 [num_seqs], KV lengths, on the same device.
        max_seqlen_q, max_seqlen_k: upper bounds of the longest query and KV length, known to the host.

    Raises:
        InvalidInputError: a shape, dtype or device does not fit, or a maximum is no integer from 0 to 2^31 - 1.
    """

    def __init__(
        self, cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor, *, max_seqlen_q: int, max_seqlen_k: int
    ) -> None:
        """Check the lengths and keep them; nothing is launched yet."""
        check_tensor("seq_lens", seq_lens, ("num_seqs",), (torch.int32,), seq_lens.device)
        check_tensor("cu_seqlens_q", cu_seqlens_q, (len(seq_lens) + 1,), (torch.int32,), seq_lens.device)
        max_seqlen_q = as_int("max_seqlen_q", max_seqlen_q, 0, _INT32_MAX)
        max_seqlen_k = as_int("max_seqlen_k", max_seqlen_k, 0, _INT32_MAX)
        self._keep(cu_seqlens_q.contiguous(), seq_lens.contiguous(), max_seqlen_q, max_seqlen_k)

    @classmethod
    def of_step(
        cls, cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor, *, max_seqlen_q: int, max_seqlen_k: int
    ) -> AttentionPlan:
        """Return the plan of contiguous lengths without checks, for lengths of the cache manager."""
        plan = cls.__new__(cls)
        plan._keep(cu_seqlens_q, seq_lens, max_seqlen_q, max_seqlen_k)
        return plan

    def _keep(self, cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int) -> None:
        self.cu_seqlens_q = cu_seqlens_q
        self.seq_lens = seq_lens
        self.max_seqlen_q = max_seqlen_q
        self.max_seqlen_k = max_seqlen_k
        # Packed masks by the `id` of the given tensor. The given tensor is kept, too, so that no other tensor gets its
        # `id`.
        self._masks: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        # Functions that each `Bound` has bound to this step, and values that models compute once a step.
        self.runs: dict[Any, dict[Any, Any]] = {}
        # Groups of queries of the definition, which all layers share.
        self.query_groups: dict[Any, Any] = {}
        self._token_plans: dict[tuple[int, ...], tuple[AttentionPlan, torch.Tensor]] = {}
        self._bundle_plans: dict[tuple[int, ...], tuple[AttentionPlan, torch.Tensor]] = {}
        self._schedules: dict[tuple[PlanShape, int], tuple[list[AttentionSchedule], torch.Tensor | None]] = {}

    def schedules(self, shape: PlanShape, is_causal: torch.Tensor | None = None) -> list[AttentionSchedule]:
        """Return the schedules that cover the batch: for short sequences, and for long ones if there may be any.

        is_causal: bool [num_seqs]; a query of a sequence with True sees nothing right of its own position.
        """
        key = shape, id(is_causal)
        if key not in self._schedules:
            rows = self.most_rows(shape)
            tiles = shape.tiles(device_of(self.seq_lens.device).arch, rows)
            limit = shape.decode_rows if "prefill" in tiles else rows
            bounds = {"decode": (1, min(rows, limit)), "prefill": (limit + 1, rows)}
            schedules = [self._schedule(phase, tile, shape, is_causal, *bounds[phase]) for phase, tile in tiles.items()]
            self._schedules[key] = schedules, is_causal
        return self._schedules[key][0]

    def most_rows(self, shape: PlanShape) -> int:
        """Return the upper bound of a sequence's rows, queries times heads of a group."""
        return min(self.max_seqlen_q, shape.num_tokens) * shape.group

    def mask_words(self, mask: torch.Tensor) -> torch.Tensor:
        """Return `pack_mask` of a mask over the new keys, packed once a step."""
        if id(mask) not in self._masks:
            self._masks[id(mask)] = pack_mask(mask, self.cu_seqlens_q, self.seq_lens, self.max_seqlen_q), mask
        return self._masks[id(mask)][0]

    def _schedule(
        self,
        phase: str,
        tile: AttentionTile,
        shape: PlanShape,
        is_causal: torch.Tensor | None,
        min_rows: int,
        max_rows: int,
    ) -> AttentionSchedule:
        device, num_seqs = self.seq_lens.device, self.seq_lens.shape[0]
        num_programs = device_of(device).num_sms * tile.programs_per_sm
        min_split_blocks = cdiv(_MIN_SPLIT_KEYS[phase], tile.block_n)
        # The last tile of a sequence may be partly filled. So there are at most as many tiles as full ones, plus one
        # for each sequence that has enough rows for this phase.
        full_tiles = shape.num_tokens * shape.group // tile.block_m
        most_seqs = min(num_seqs, shape.num_tokens // cdiv(min_rows, shape.group))
        max_tiles = min(most_seqs * cdiv(max_rows, tile.block_m), most_seqs + full_tiles)
        max_splits = cdiv(self.max_seqlen_k, min_split_blocks * tile.block_n)
        max_slots = cdiv(num_programs * min(_SLOTS_PER_PROGRAM[phase], max_tiles), shape.num_kv_heads)
        if shape.deterministic:
            max_splits = min(max_splits, _DETERMINISTIC_SPLITS[phase])
            max_slots = max_tiles * max_splits
        max_slots = min(max_slots, max_tiles * max_splits)
        if max_splits <= 1:
            max_slots = 0
        max_items = max_tiles + max_slots
        if max_tiles == 0:
            max_items = 0

        def int32(*size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.int32, device=device)

        def float32(*size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.float32, device=device)

        schedule = AttentionSchedule(
            phase=phase,
            tile=tile,
            items=int32(max_items, ITEM_SIZE.value),
            split_tiles=int32(min(max_tiles, max_slots // 2), SPLIT_TILE_SIZE.value),
            counts=int32(2),
            first_padding=int32(1),
            partial_out=float32(max_slots, shape.num_kv_heads, tile.block_m, shape.v_head_dim),
            partial_lse=float32(max_slots, shape.num_kv_heads, tile.block_m),
        )
        launch(
            _plan_kernel,
            (1,),
            cu_seqlens_q_ptr=self.cu_seqlens_q,
            seq_lens_ptr=self.seq_lens,
            is_causal_ptr=is_causal,
            tile_starts_ptr=int32(num_seqs + 1),
            items_ptr=schedule.items,
            split_tiles_ptr=schedule.split_tiles,
            counts_ptr=schedule.counts,
            first_padding_ptr=schedule.first_padding,
            num_seqs=num_seqs,
            search_steps=num_seqs.bit_length(),
            min_rows=min_rows,
            max_rows=max_rows,
            most_rows=self.most_rows(shape),
            num_kv_heads=shape.num_kv_heads,
            num_programs=num_programs,
            max_slots=max_slots,
            min_split_blocks=min_split_blocks,
            split_overhead=_SPLIT_OVERHEAD[phase],
            max_splits=max_splits,
            window_left=shape.window[0],
            window_right=shape.window[1],
            GROUP=shape.group,
            CHUNK_SIZE=shape.chunk_size,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            LANES=PLAN_LANES,
            DETERMINISTIC=shape.deterministic,
            num_warps=PLAN_WARPS,
        )
        return schedule


def plan_of_tokens(
    step: AttentionPlan, num_tokens: int, num_keys: int, *, causal: bool
) -> tuple[AttentionPlan, torch.Tensor]:
    """Return a plan in which each token is a sequence of one query and `num_keys` keys, made once a step.

    Also return int32 [2, num_tokens]: each token's sequence, and one past the last position that it sees.
    """
    key = num_tokens, num_keys, causal
    if key not in step._token_plans:
        token_keys = _token_keys(step, num_tokens, causal=causal)
        plan = _token_plan(step, torch.full_like(token_keys[0], num_keys), num_keys)
        step._token_plans[key] = plan, token_keys
    return step._token_plans[key]


def plan_of_bundles(
    step: AttentionPlan, num_tokens: int, num_keys: int, bundle_tokens: int
) -> tuple[AttentionPlan, torch.Tensor]:
    """Return a plan in which each bundle of tokens is a sequence with `num_keys` keys, made once a step.

    A bundle is up to `bundle_tokens` consecutive tokens of a sequence. Also return int32 [num_bundles], each bundle's
    sequence.
    """
    key = num_tokens, num_keys, bundle_tokens
    if key not in step._bundle_plans:
        offsets, num_seqs = step.cu_seqlens_q, len(step.seq_lens)
        # The last bundle of a sequence may be partly filled, and each bundle has a token.
        num_bundles = min(num_tokens, num_tokens // bundle_tokens + num_seqs)
        bundles_of_seq = (offsets.diff() + bundle_tokens - 1) // bundle_tokens
        ends_of_seq = bundles_of_seq.cumsum(0)
        bundles = torch.arange(num_bundles + 1, device=offsets.device)
        seqs = torch.searchsorted(ends_of_seq, bundles, right=True).clamp_(max=num_seqs - 1)
        index = bundles - (ends_of_seq - bundles_of_seq)[seqs]  # of the bundle in its sequence
        starts = (offsets[seqs] + index * bundle_tokens).minimum(offsets[seqs + 1])  # padding rows are in no bundle
        plan = AttentionPlan(
            starts.to(torch.int32),
            torch.full((num_bundles,), num_keys, dtype=torch.int32, device=offsets.device),
            max_seqlen_q=bundle_tokens,
            max_seqlen_k=num_keys,
        )
        step._bundle_plans[key] = plan, seqs[:-1].to(torch.int32)
    return step._bundle_plans[key]


def plan_of_entries(
    step: AttentionPlan, num_tokens: int, *, sliding_window: int, block_n: int, pool_size: int, num_indices: int
) -> tuple[AttentionPlan, torch.Tensor]:
    """Return a plan like `plan_of_tokens` in which a token's keys are those of its window, and then its entries.

    The window takes the whole blocks of block_n keys that it touches, so that entries begin a block.

    num_indices: entries that each token chooses; 0 for all entries of closed pools. pool_size: 0 for no entries.
    """
    key = num_tokens, sliding_window, block_n, pool_size, num_indices
    if key not in step._token_plans:
        token_keys = _token_keys(step, num_tokens, causal=True)
        ends = token_keys[1].clamp(min=0)
        first_blocks = (ends - sliding_window).clamp(min=0) // block_n
        lengths = ((ends + block_n - 1) // block_n - first_blocks) * block_n
        most_entries = num_indices
        if num_indices:
            lengths = lengths + num_indices
        elif pool_size:
            lengths = lengths + ends // pool_size
            most_entries = step.max_seqlen_k // pool_size
        most_keys = min(sliding_window, step.max_seqlen_k) + 2 * block_n + most_entries
        step._token_plans[key] = _token_plan(step, lengths, most_keys), token_keys
    return step._token_plans[key]


def _token_keys(step: AttentionPlan, num_tokens: int, *, causal: bool) -> torch.Tensor:
    """Return int32 [2, num_tokens]: each token's sequence, and one past the last position that it sees."""
    offsets, lengths = step.cu_seqlens_q, step.seq_lens
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=offsets.device)
    seqs = torch.searchsorted(offsets[1:], tokens, right=True).clamp_(max=len(lengths) - 1)
    ends = lengths[seqs]
    if causal:
        ends = ends.minimum(ends - offsets[seqs + 1] + tokens + 1)
    return torch.stack([seqs.to(torch.int32), ends])


def _token_plan(step: AttentionPlan, lengths: torch.Tensor, max_seqlen_k: int) -> AttentionPlan:
    """Return a plan of sequences of one query; rows of padding have none. lengths: int32 [num_tokens]."""
    tokens = torch.arange(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
    return AttentionPlan(tokens.minimum(step.cu_seqlens_q[-1]), lengths, max_seqlen_q=1, max_seqlen_k=max_seqlen_k)


def check_plan(
    plan: AttentionPlan | None, cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor, max_seqlen_q: int
) -> None:
    """Raise InvalidInputError if the plan is of another batch, as far as the host knows without waiting."""
    if plan is None:
        return
    if not isinstance(plan, AttentionPlan):
        raise InvalidInputError(f"plan: {shown(plan)}, expected an AttentionPlan")
    lengths = {"cu_seqlens_q": (plan.cu_seqlens_q, cu_seqlens_q), "seq_lens": (plan.seq_lens, seq_lens)}
    for name, (planned, tensor) in lengths.items():
        is_same = planned.shape == tensor.shape and planned.device == tensor.device
        if is_same and planned is not tensor and tensor.device.type == "cpu":
            is_same = torch.equal(planned, tensor)
        if not is_same:
            raise InvalidInputError(f"plan: made for other {name}, of shape {list(planned.shape)} on {planned.device}")
    if plan.max_seqlen_q < max_seqlen_q:
        raise InvalidInputError(f"plan: made for max_seqlen_q {plan.max_seqlen_q}, expected at least {max_seqlen_q}")


def reference_to(plan: AttentionPlan | None) -> Callable[[], AttentionPlan | None]:
    """Return a function that returns the plan while it lives.

    A plan keeps the functions that are bound to it. If they kept the plan, its workspace would stay in memory until
    Python's garbage collector runs.
    """
    if plan is None:
        return lambda: None
    return weakref.ref(plan)


def outputs(
    q: torch.Tensor, v_head_dim: int, out: torch.Tensor | None, *, return_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return tensors for the output and, with return_lse, for the log-sum-exp; a new output if `out` is None."""
    num_tokens, num_heads, _ = q.shape
    if out is None:
        out = torch.empty(num_tokens, num_heads, v_head_dim, dtype=q.dtype, device=q.device)
    lse = None
    if return_lse:
        lse = torch.empty(num_heads, num_tokens, dtype=torch.float32, device=q.device)
    return out, lse
