"""How evenly paged attention's work lists fill a chip, by simulation: no GPU, the real planning kernel.

    TRITON_INTERPRET=1 python -m bench.attention.schedule [--sms 132 ...] [--heads 32/8 ...] [--only NAME]

The planning kernel runs in Triton's interpreter as if on a chip of so many SMs. Its programs, items times KV heads, are
then dealt to SMs in grid order, each to the first free SM, as the hardware does. No time in the table is measured.

What a program costs is assumed: a fixed start, then its key blocks at its share of the SM. Rates are an H200's, an SM
each 1/132 of 4.3 TB/s and of 790 TFLOP/s. A decode tile reads K and V from memory; neighbouring prefill tiles read the
same K and V, so theirs come from the L2 at twice that rate. Programs on one SM share it equally, also when fewer run
there than fit: in truth the others then go faster, so that makespans err on the high side.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from unittest import mock

import torch

from paged.bench.attention.cases import AttentionCase
from paged.bench.benchmark import option_parser
from paged.bench.limits import Ceilings
from paged.kernels.attention import plan as attention_plan
from paged.kernels.attention.call import NO_LIMIT
from paged.kernels.attention.config import AttentionTile
from paged.kernels.attention.plan import AttentionPlan, AttentionSchedule, AttentionShape
from paged.kernels.common.device import Device

Lengths = Sequence[tuple[int, int]]  # (query length, key length) a sequence
# The architecture whose tiles a chip of so many SMs gets: A100, H100 and H200, B200.
ARCH = {108: "sm_80", 132: "sm_90", 148: "sm_100"}

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


def makespan(launch: Launch, num_sms: int) -> float:
    """Seconds until the last program ends: programs start in order, each where one ends first."""
    ends = [0.0] * (num_sms * launch.tile.programs_per_sm)
    for seconds in launch.programs():
        heapq.heapreplace(ends, ends[0] + seconds)
    return max(ends)


HEADS = ("makespan", "ideal", "ratio", "roofline", "total", "items", "idle", "splits", "partials KB")


def simulate(launches: Sequence[Launch], num_sms: int, roofline_s: float = 0.0) -> dict[str, float]:
    """One batch on one chip, its launches one after the other, by the heads of the table; times in microseconds.

    makespan: the time in programs; ideal: in perfect balance; ratio: of these two; roofline: what memory and matrix
    units need at the least; total: with launches, idle programs and merges.
    """
    in_programs = sum(makespan(launch, num_sms) for launch in launches)
    around = sum(launch.idle_s(num_sms) + launch.merge_s(num_sms) + LAUNCH_S for launch in launches)
    ideal = sum(launch.ideal_s(num_sms) for launch in launches)
    values = (
        *(1e6 * in_programs, 1e6 * ideal, in_programs / ideal, 1e6 * roofline_s, 1e6 * (in_programs + around)),
        sum(len(launch.items) for launch in launches),
        sum(launch.num_idle for launch in launches),
        sum(launch.num_split_tiles for launch in launches),
        sum(launch.partial_bytes for launch in launches) // 1024,
    )
    return dict(zip(HEADS, values, strict=True))


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
        v_head_dim=HEAD_DIM,
        element_size=ELEMENT_SIZE,
        window=(NO_LIMIT, 0),
    )
    maxima = {"max_seqlen_q": int(q_lens.max()), "max_seqlen_k": int(seq_lens.max())}
    with mock.patch.object(attention_plan, "device_of", return_value=Device(ARCH[num_sms], num_sms)):
        schedules = AttentionPlan(offsets, seq_lens, **maxima).schedules(shape)
    launches = [
        _launch(kind, schedule, num_kv_heads) for kind, schedule in zip(("decode", "prefill"), schedules, strict=False)
    ]
    return [launch for launch in launches if launch.items]


def _launch(kind: str, schedule: AttentionSchedule, num_kv_heads: int) -> Launch:
    num_items, num_split_tiles = schedule.counts.tolist()
    items = schedule.items[:num_items].tolist()
    return Launch(
        kind=kind,
        tile=schedule.tile,
        num_kv_heads=num_kv_heads,
        items=[WorkItem(end - begin, slot >= 0) for _, _, begin, end, slot in items],
        num_tiles=len({(seq, tile) for seq, tile, *_ in items}),
        num_split_tiles=num_split_tiles,
        num_idle=(schedule.items.shape[0] - num_items) * num_kv_heads,
    )


def outcome(lengths: Lengths, heads: tuple[int, int], num_sms: int) -> dict[str, float]:
    """Plan and simulate one batch."""
    cost = AttentionCase("", "", (), heads, head_dim=HEAD_DIM).cost(torch.bfloat16, lengths)
    bandwidth = SM_BANDWIDTH * num_sms
    limits = Ceilings(copy=bandwidth, read=bandwidth, matmul=SM_FLOPS * num_sms)
    return simulate(plan(lengths, heads, num_sms), num_sms, limits.bound(cost)[0])


def _shown(head: str, value: float) -> str:
    if isinstance(value, int):
        return str(value)
    return f"{value:.3f}" if head == "ratio" else f"{value:.1f}us"


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    parser = option_parser(__doc__, "only")
    parser.add_argument("--sms", nargs="+", type=int, choices=list(ARCH), default=[132])
    parser.add_argument("--heads", nargs="+", default=["32/8"], help="query heads / KV heads")
    args = parser.parse_args(argv)
    cases = {name: lengths for name, lengths in (CASES | SWEEP).items() if args.only in name}
    print(f"{'case':36} {'heads':>5} {'SMs':>3} " + " ".join(f"{head:>11}" for head in HEADS))
    for num_sms, heads, (name, lengths) in itertools.product(args.sms, args.heads, cases.items()):
        num_q_heads, num_kv_heads = map(int, heads.split("/"))
        found = outcome(lengths, (num_q_heads, num_kv_heads), num_sms)
        cells = " ".join(f"{_shown(head, value):>11}" for head, value in found.items())
        print(f"{name:36} {heads:>5} {num_sms:3} {cells}")


if __name__ == "__main__":
    main()
