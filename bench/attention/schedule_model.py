"""A model of one attention kernel on a chip: what its programs cost, and when the last one ends.

What a program costs is assumed, not measured: a fixed start, then its key blocks at its share of the SM. Rates are an
H200's, an SM each 1/132 of 4.3 TB/s and of 790 TFLOP/s. A decode tile reads K and V from memory; neighbouring prefill
tiles read the same K and V, so theirs come from the L2 at twice that rate. Programs on one SM share it equally, also
when fewer run there than fit: in truth the others then go faster, so that makespans err on the high side.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from paged.kernels.attention.config import AttentionTile

HEAD_DIM, ELEMENT_SIZE = 128, 2
SM_BANDWIDTH, SM_FLOPS, L2_SPEEDUP = 4.3e12 / 132, 790e12 / 132, 2
# A program's start: five dependent loads (count, item, lengths, block table, keys) and its epilogue; that of one which
# finds no item: one load. A kernel's launch, with the wait for the one before.
START_S, IDLE_S, LAUNCH_S = 2e-6, 0.7e-6, 4e-6


@dataclass(frozen=True)
class WorkItem:
    """One item of a work list: so many key blocks of one tile, a partial result where the tile is split."""

    blocks: int
    is_partial: bool


@dataclass(frozen=True)
class Launch:
    """One kind's work list: its items in grid order, each run once a KV head, and how many tiles they were cut from.

    num_idle: programs of the grid, an upper bound known to the host, that find no item.
    """

    kind: str
    tile: AttentionTile
    num_kv_heads: int
    items: list[WorkItem]
    num_tiles: int
    num_split_tiles: int
    num_idle: int = 0

    @property
    def partial_bytes(self) -> int:
        """Size of the partial results, outputs and log-sum-exps in float32."""
        slots = sum(item.is_partial for item in self.items)
        return slots * self.num_kv_heads * self.tile.block_m * (HEAD_DIM + 1) * 4

    @property
    def block_s(self) -> float:
        """Seconds one key block takes where as many programs as fit share the SM."""
        num_bytes = 2 * self.tile.block_n * HEAD_DIM * ELEMENT_SIZE
        memory = num_bytes / (SM_BANDWIDTH * (L2_SPEEDUP if self.kind == "prefill" else 1))
        matmul = 4 * self.tile.block_m * self.tile.block_n * HEAD_DIM / SM_FLOPS
        return max(memory, matmul) * self.tile.programs_per_sm

    def programs(self) -> list[float]:
        """Seconds of every program in grid order, where the KV head runs fastest."""
        partial_s = self.tile.block_m * (HEAD_DIM + 1) * 4 / SM_BANDWIDTH * self.tile.programs_per_sm
        return [
            START_S + item.blocks * self.block_s + item.is_partial * partial_s
            for item in self.items
            for _ in range(self.num_kv_heads)
        ]

    def ideal_s(self, num_sms: int) -> float:
        """The tiles unsplit, spread evenly over the chip: what splitting adds counts as imbalance."""
        blocks = sum(item.blocks for item in self.items)
        work = (self.num_tiles * START_S + blocks * self.block_s) * self.num_kv_heads
        return work / (num_sms * self.tile.programs_per_sm)

    def idle_s(self, num_sms: int) -> float:
        """The programs that find nothing to do."""
        return self.num_idle * IDLE_S / (num_sms * self.tile.programs_per_sm)

    def merge_s(self, num_sms: int) -> float:
        """The merge of the split tiles: a launch, and the partial results read once."""
        return LAUNCH_S + self.partial_bytes / (SM_BANDWIDTH * num_sms) if self.num_split_tiles else 0.0


@dataclass(frozen=True)
class Outcome:
    """One batch on one chip, in seconds.

    makespan_s: the time in programs, kinds one after the other; total_s: with launches, idle programs and merges;
    overlapped_s: the total where the kinds run side by side; roofline_s: what memory and matrix units need
    at the least.
    """

    makespan_s: float
    ideal_s: float
    roofline_s: float
    total_s: float
    overlapped_s: float
    num_idle: int
    num_items: int
    num_split_tiles: int
    partial_bytes: int

    @property
    def ratio(self) -> float:
        """Makespan over perfect balance."""
        return self.makespan_s / self.ideal_s


def makespan(launches: Sequence[Launch], num_sms: int) -> float:
    """Seconds until the last program ends: programs start in order, each on the SM with the most room.

    A program needs 1 / programs_per_sm of an SM; launches are dealt one after the other, without waiting in between.
    """
    units = 1
    for launch in launches:
        units *= launch.tile.programs_per_sm
    free = dict.fromkeys(range(num_sms), units)
    room = [(-units, sm) for sm in range(num_sms)]  # a heap; entries whose room is no longer true are passed over
    running: list[tuple[float, int, int]] = []
    now = end = 0.0
    for launch in launches:
        need = units // launch.tile.programs_per_sm
        for seconds in launch.programs():
            while True:
                while room and -room[0][0] != free[room[0][1]]:
                    heapq.heappop(room)
                if room and -room[0][0] >= need:
                    break
                now, sm, released = heapq.heappop(running)
                free[sm] += released
                heapq.heappush(room, (-free[sm], sm))
            _, sm = heapq.heappop(room)
            free[sm] -= need
            heapq.heappush(room, (-free[sm], sm))
            heapq.heappush(running, (now + seconds, sm, need))
            end = max(end, now + seconds)
    return end


def simulate(launches: Sequence[Launch], num_sms: int, roofline_s: float = 0.0) -> Outcome:
    """Run the launches one after the other, and again side by side, the longer kind first."""
    alone = [makespan([launch], num_sms) for launch in launches]
    merges = [launch.merge_s(num_sms) for launch in launches]
    idle = sum(launch.idle_s(num_sms) for launch in launches)
    together = makespan(sorted(launches, key=lambda launch: launch.tile.programs_per_sm), num_sms)
    return Outcome(
        makespan_s=sum(alone),
        ideal_s=sum(launch.ideal_s(num_sms) for launch in launches),
        roofline_s=roofline_s,
        total_s=sum(alone) + idle + sum(merges) + LAUNCH_S * len(launches),
        overlapped_s=together + idle + max(merges) + LAUNCH_S,
        num_idle=sum(launch.num_idle for launch in launches),
        num_items=sum(len(launch.items) for launch in launches),
        num_split_tiles=sum(launch.num_split_tiles for launch in launches),
        partial_bytes=sum(launch.partial_bytes for launch in launches),
    )
