"""How evenly paged attention's work lists fill a chip, by simulation: no GPU, the real planning kernel.

    TRITON_INTERPRET=1 python -m bench.schedule [--sms 132 ...] [--heads 32/8 ...] [--only NAME]

The planning kernel runs in Triton's interpreter as if on a chip of so many SMs. Its programs, items times KV heads, are
then dealt to SMs in grid order, each to the first free place, as the hardware does.

What a program costs is assumed, not measured: a fixed start, then its key blocks at its share of the SM. Rates are an
H200's, an SM each 1/132 of 4.3 TB/s and of 790 TFLOP/s. A decode tile reads K and V from memory; neighbouring prefill
tiles read the same K and V, so theirs come from the L2 at twice that rate. Programs on one SM share it equally, also
when some of its places are empty: in truth the others then go faster, so that makespans err on the high side.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from unittest import mock

import torch

from bench.limits import Ceilings, attention_cost
from paged.kernels import attention_plan
from paged.kernels.attention_config import AttentionTile
from paged.kernels.attention_plan import AttentionPlan, AttentionSchedule, AttentionShape
from paged.kernels.device import Device

Lengths = Sequence[tuple[int, int]]  # (query length, key length) a sequence
HEAD_DIM, ELEMENT_SIZE, BLOCK_SIZE = 128, 2, 16
# The architecture whose tiles a chip of so many SMs gets: A100, H100 and H200, B200.
ARCH = {108: "sm_80", 132: "sm_90", 148: "sm_100"}
# Programs that share an SM, by kind: what `bench.compile` reports of these tiles, on all three architectures.
RESIDENT = {"decode": 3, "prefill": 1}
SM_BANDWIDTH, SM_FLOPS, L2_SPEEDUP = 4.3e12 / 132, 790e12 / 132, 2
# A program's start: five dependent loads (count, item, lengths, block table, keys) and its epilogue. A kernel's launch:
# what performance models of decode attention allow between two kernels of a graph.
START_S, LAUNCH_S = 2e-6, 4e-6

CASES: dict[str, Lengths] = {
    "chunk of 2k + 63 decodes at 8k": [(2048, 2048)] + [(1, 8192)] * 63,
    "chunk of 2k at 8k + 63 decodes at 8k": [(2048, 10_240)] + [(1, 8192)] * 63,
    "1 x 128k + 31 x 4k decodes": [(1, 131_072)] + [(1, 4096)] * 31,
    "122 x 600 + 8 x 10,000 decodes": [(1, 600)] * 122 + [(1, 10_000)] * 8,
    "64 verify rows of 5 at 4k": [(5, 4096)] * 64,
}
SWEEP: dict[str, Lengths] = {
    f"{batch} decodes at {length // 1024}k": [(1, length)] * batch
    for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256)
    for length in (1024, 4096, 8192, 32_768)
}


@dataclass(frozen=True)
class Piece:
    """One item of a work list: so many key blocks of one tile, a partial result where the tile is split."""

    blocks: int
    is_partial: bool


@dataclass(frozen=True)
class Launch:
    """One kind's work list: its pieces in grid order, each run once a KV head, and how many tiles they were cut from."""

    kind: str
    tile: AttentionTile
    num_kv_heads: int
    pieces: list[Piece]
    num_tiles: int
    num_split_tiles: int

    @property
    def partial_bytes(self) -> int:
        """Size of the partial results, outputs and log-sum-exps in float32."""
        slots = sum(piece.is_partial for piece in self.pieces)
        return slots * self.num_kv_heads * self.tile.block_m * (HEAD_DIM + 1) * 4

    @property
    def block_s(self) -> float:
        """Seconds one key block takes where RESIDENT programs share the SM."""
        num_bytes = 2 * self.tile.block_n * HEAD_DIM * ELEMENT_SIZE
        memory = num_bytes / (SM_BANDWIDTH * (L2_SPEEDUP if self.kind == "prefill" else 1))
        matmul = 4 * self.tile.block_m * self.tile.block_n * HEAD_DIM / SM_FLOPS
        return max(memory, matmul) * RESIDENT[self.kind]

    def programs(self) -> list[float]:
        """Seconds of every program in grid order, where the KV head runs fastest."""
        partial_s = self.tile.block_m * (HEAD_DIM + 1) * 4 / SM_BANDWIDTH * RESIDENT[self.kind]
        return [
            START_S + piece.blocks * self.block_s + piece.is_partial * partial_s
            for piece in self.pieces
            for _ in range(self.num_kv_heads)
        ]

    def ideal_s(self, num_sms: int) -> float:
        """The tiles unsplit, spread evenly over every place of the chip: what splitting adds counts as imbalance."""
        blocks = sum(piece.blocks for piece in self.pieces)
        work = (self.num_tiles * START_S + blocks * self.block_s) * self.num_kv_heads
        return work / (num_sms * RESIDENT[self.kind])

    def merge_s(self, num_sms: int) -> float:
        """The merge of the split tiles: a launch, and the partial results read once."""
        return LAUNCH_S + self.partial_bytes / (SM_BANDWIDTH * num_sms) if self.num_split_tiles else 0.0


@dataclass(frozen=True)
class Outcome:
    """One batch on one chip; seconds. makespan is the time in programs, kinds one after the other; total_s adds launches
    and merges; overlapped_s is the total where the kinds run side by side; roofline_s is what memory and matrix units
    need at the least."""

    makespan_s: float
    ideal_s: float
    roofline_s: float
    total_s: float
    overlapped_s: float
    num_items: int
    num_split_tiles: int
    partial_bytes: int

    @property
    def ratio(self) -> float:
        """Makespan over perfect balance."""
        return self.makespan_s / self.ideal_s


def makespan(launches: Sequence[Launch], num_sms: int) -> float:
    """Seconds until the last program ends: programs start in order, each on the SM with the most room.

    A program needs 1 / RESIDENT of an SM; launches are dealt one after the other, without waiting in between.
    """
    units = 1
    for launch in launches:
        units *= RESIDENT[launch.kind]
    free = {sm: units for sm in range(num_sms)}
    room = [(-units, sm) for sm in range(num_sms)]  # a heap; entries whose room is no longer true are passed over
    running: list[tuple[float, int, int]] = []
    now = end = 0.0
    for launch in launches:
        need = units // RESIDENT[launch.kind]
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
    together = makespan(sorted(launches, key=lambda launch: RESIDENT[launch.kind]), num_sms)
    return Outcome(
        makespan_s=sum(alone),
        ideal_s=sum(launch.ideal_s(num_sms) for launch in launches),
        roofline_s=roofline_s,
        total_s=sum(alone) + sum(merges) + LAUNCH_S * len(launches),
        overlapped_s=together + max(merges) + LAUNCH_S,
        num_items=sum(len(launch.pieces) for launch in launches),
        num_split_tiles=sum(launch.num_split_tiles for launch in launches),
        partial_bytes=sum(launch.partial_bytes for launch in launches),
    )


def plan(lengths: Lengths, heads: tuple[int, int], num_sms: int) -> list[Launch]:
    """The work lists that the planning kernel writes for causal attention on a chip of `num_sms`, in the interpreter.

    The planner asks `device_of` for the chip; here it gets this answer instead.
    """
    num_q_heads, num_kv_heads = heads
    q_lens, seq_lens = (torch.tensor(column, dtype=torch.int32) for column in zip(*lengths, strict=True))
    offsets = torch.nn.functional.pad(q_lens.cumsum(0, dtype=torch.int32), (1, 0))
    shape = AttentionShape(
        num_tokens=int(offsets[-1]),
        num_kv_heads=num_kv_heads,
        group=num_q_heads // num_kv_heads,
        head_dim=HEAD_DIM,
        element_size=ELEMENT_SIZE,
        causal=True,
        window_size=(-1, -1),
    )
    maxima = {"max_seqlen_q": int(q_lens.max()), "max_seqlen_k": int(seq_lens.max())}
    with mock.patch.object(attention_plan, "device_of", return_value=Device(ARCH[num_sms], num_sms)):
        schedules = AttentionPlan(offsets, seq_lens, **maxima).schedules(shape)
    launches = [
        _launch(kind, schedule, num_kv_heads) for kind, schedule in zip(RESIDENT, schedules, strict=False)
    ]
    return [launch for launch in launches if launch.pieces]


def _launch(kind: str, schedule: AttentionSchedule, num_kv_heads: int) -> Launch:
    num_items, num_split_tiles = schedule.counts.tolist()
    items = schedule.items[:num_items].tolist()
    return Launch(
        kind=kind,
        tile=schedule.tile,
        num_kv_heads=num_kv_heads,
        pieces=[Piece(end - begin, slot >= 0) for _, _, begin, end, slot in items],
        num_tiles=len({(seq, tile) for seq, tile, *_ in items}),
        num_split_tiles=num_split_tiles,
    )


def outcome(lengths: Lengths, heads: tuple[int, int], num_sms: int) -> Outcome:
    """Plan and simulate one batch."""
    cost = attention_cost(
        lengths,
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=HEAD_DIM,
        block_size=BLOCK_SIZE,
        element_size=ELEMENT_SIZE,
    )
    bandwidth = SM_BANDWIDTH * num_sms
    limits = Ceilings(copy=bandwidth, read=bandwidth, matmul=SM_FLOPS * num_sms)
    return simulate(plan(lengths, heads, num_sms), num_sms, limits.bound(cost)[0])


def rows(cases: dict[str, Lengths], heads: Sequence[str], sms: Sequence[int]) -> Iterator[str]:
    """The table, a line at a time."""
    columns = ("makespan", "ideal", "ratio", "roofline", "total", "overlapped", "items", "splits", "partials KB")
    yield f"{'case':40} {'heads':>5} {'SMs':>3} " + " ".join(f"{name:>11}" for name in columns)
    for num_sms in sms:
        for pair in heads:
            num_q_heads, num_kv_heads = (int(number) for number in pair.split("/"))
            for name, lengths in cases.items():
                result = outcome(lengths, (num_q_heads, num_kv_heads), num_sms)
                times = (result.makespan_s, result.ideal_s, result.roofline_s, result.total_s, result.overlapped_s)
                span, ideal, roofline, total, overlapped = (f"{1e6 * seconds:9.1f}us" for seconds in times)
                yield (
                    f"{name:40} {pair:>5} {num_sms:3} {span} {ideal} {result.ratio:11.3f} {roofline} {total} {overlapped} "
                    f"{result.num_items:11} {result.num_split_tiles:11} {result.partial_bytes / 1024:11.0f}"
                )


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sms", nargs="+", type=int, choices=list(ARCH), default=[132])
    parser.add_argument("--heads", nargs="+", default=["32/8"], help="query heads / KV heads")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    args = parser.parse_args(argv)
    cases = {name: lengths for name, lengths in (CASES | SWEEP).items() if args.only in name}
    for line in rows(cases, args.heads, args.sms):
        print(line)


if __name__ == "__main__":
    main()
