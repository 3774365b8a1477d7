"""Simulate how evenly paged attention's work lists fill a GPU: needs no GPU, runs the real planning kernel.

    TRITON_INTERPRET=1 python -m bench.attention.schedule [--sms 132 ...] [--heads 32/8 ...] [--only NAME] [--latents]

The planning kernel runs in Triton's interpreter as if on a GPU with this many SMs. Its programs, items times KV heads,
are then dealt to SMs in grid order, each to the first free SM, as the hardware does. No time in the table is measured.

The cost of a program is assumed: a fixed start, then its key blocks at its share of the SM. Rates are an H200's: per SM
1/132 of 4.3 TB/s and of 790 TFLOP/s. A decode tile reads K and V from memory. Neighbouring prefill tiles read the same
K and V, so theirs come from the L2 cache at twice that rate. Programs on one SM share it equally, even if fewer run
there than fit; in reality the others then run faster, so the simulated makespan is too long rather than too short.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch

from paged.bench.attention.cases import AttentionCase
from paged.bench.benchmark import check_only, option_parser
from paged.bench.limits import Ceilings
from paged.kernels.attention.call import NO_LIMIT
from paged.kernels.attention.config import AttentionShape
from paged.kernels.common.attention import plan as attention_plan
from paged.kernels.common.attention.plan import AttentionPlan
from paged.kernels.common.attention.tile import AttentionTile
from paged.kernels.common.device import Device
from paged.kernels.mla.config import MlaShape

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
ELEMENT_SIZE = 2
SM_BANDWIDTH, SM_FLOPS, L2_SPEEDUP = 4.3e12 / 132, 790e12 / 132, 2
# A program's start: five dependent loads (count, item, lengths, block table, keys) and its epilogue; that of one which
# finds no item: one load. A kernel's launch, with the wait for the one before.
START_S, IDLE_S, LAUNCH_S = 2e-6, 0.7e-6, 4e-6


class Sizes(NamedTuple):
    """Numbers of a key and its value in a KV head, products of a query and a key it sees, numbers of an output."""

    key: int = 256
    products: int = 256
    out: int = 128


HEAD, LATENT = Sizes(), Sizes(576, 576 + 512, 512)


class Launch(NamedTuple):
    """One kind's work list in grid order, each item run once a KV head: its key blocks, and whether it gives a partial
    result of a tile that is split.

    num_tiles: those that the items were cut from. num_idle: programs of the grid, an upper bound known to the host,
    that find no item.
    """

    kind: str
    tile: AttentionTile
    num_kv_heads: int
    items: Sequence[tuple[int, bool]]
    num_tiles: int
    num_idle: int = 0
    sizes: Sizes = HEAD

    @property
    def partial_s(self) -> float:
        """Seconds in which one SM moves a partial result, outputs and log-sum-exps in float32."""
        return self.tile.block_m * (self.sizes.out + 1) * 4 / SM_BANDWIDTH

    @property
    def block_s(self) -> float:
        """Seconds one key block takes where as many programs as fit share the SM."""
        num_bytes = self.tile.block_n * self.sizes.key * ELEMENT_SIZE
        memory = num_bytes / (SM_BANDWIDTH * (L2_SPEEDUP if self.kind == "prefill" else 1))
        matmul = 2 * self.tile.block_m * self.tile.block_n * self.sizes.products / SM_FLOPS
        return max(memory, matmul) * self.tile.programs_per_sm

    def programs(self) -> list[float]:
        """Seconds of every program in grid order, where the KV head runs fastest."""
        partial_s = self.partial_s * self.tile.programs_per_sm
        items = [START_S + blocks * self.block_s + is_partial * partial_s for blocks, is_partial in self.items]
        return [seconds for seconds in items for _ in range(self.num_kv_heads)]


def makespan(launch: Launch, num_sms: int) -> float:
    """Seconds until the last program ends: programs start in order, each where one ends first."""
    ends = [0.0] * (num_sms * launch.tile.programs_per_sm)
    for seconds in launch.programs():
        heapq.heapreplace(ends, ends[0] + seconds)
    return max(ends)


def simulate(launches: Sequence[Launch], num_sms: int, roofline_s: float = 0.0) -> dict[str, float]:
    """One batch on one chip, its launches one after the other, by the heads of the table; times in microseconds.

    makespan: the time in programs; ideal: of the tiles unsplit, spread evenly over the chip, so that what splitting
    adds counts as imbalance; ratio: of these two; roofline: what memory and matrix units need at the least; total: with
    launches, idle programs and merges, each a launch that reads the partial results once.
    """
    ideal = around = 0.0
    for launch in launches:
        slots, heads = num_sms * launch.tile.programs_per_sm, launch.num_kv_heads
        blocks, partials = (sum(column) for column in zip(*launch.items, strict=True))
        ideal += (launch.num_tiles * START_S + blocks * launch.block_s) * heads / slots
        around += LAUNCH_S + launch.num_idle * IDLE_S / slots
        around += LAUNCH_S + partials * heads * launch.partial_s / num_sms if partials else 0.0
    in_programs = sum(makespan(launch, num_sms) for launch in launches)
    return {
        "makespan": 1e6 * in_programs,
        "ideal": 1e6 * ideal,
        "ratio": in_programs / ideal,
        "roofline": 1e6 * roofline_s,
        "total": 1e6 * (in_programs + around),
    }


def plan(lengths: Lengths, heads: tuple[int, int], num_sms: int, sizes: Sizes = HEAD) -> list[Launch]:
    """Return the work lists that the planning kernel writes for causal attention with `num_sms`, in the interpreter.

    The planner asks `device_of` for the chip; here it gets this answer instead.
    """
    num_q_heads, num_kv_heads = heads
    q_lens, seq_lens = (torch.tensor(column, dtype=torch.int32) for column in zip(*lengths, strict=True))
    offsets = torch.nn.functional.pad(q_lens.cumsum(0, dtype=torch.int32), (1, 0))
    shape = (MlaShape if sizes is LATENT else AttentionShape)(
        num_tokens=int(offsets[-1]),
        num_kv_heads=num_kv_heads,
        group=num_q_heads // num_kv_heads,
        head_dim=sizes.products - sizes.out,
        v_head_dim=sizes.out,
        element_size=ELEMENT_SIZE,
        window=(NO_LIMIT, 0),
    )
    maxima = {"max_seqlen_q": int(q_lens.max()), "max_seqlen_k": int(seq_lens.max())}
    with mock.patch.object(attention_plan, "device_of", return_value=Device(ARCH[num_sms], num_sms)):
        schedules = AttentionPlan(offsets, seq_lens, **maxima).schedules(shape)
    found = []
    for kind, schedule in zip(("decode", "prefill"), schedules, strict=False):
        if items := schedule.items[: int(schedule.counts[0])].tolist():
            blocks = [(end - begin, slot >= 0) for _, _, begin, end, slot in items]
            num_tiles = len({(seq, tile) for seq, tile, *_ in items})
            num_idle = (len(schedule.items) - len(items)) * num_kv_heads
            found.append(Launch(kind, schedule.tile, num_kv_heads, blocks, num_tiles, num_idle, sizes))
    return found


def outcome(lengths: Lengths, heads: tuple[int, int], num_sms: int, sizes: Sizes = HEAD) -> dict[str, float]:
    """Plan and simulate one batch."""
    options: Any = {"head_dim": sizes.products - sizes.out, "v_head_dim": sizes.out, "latent": sizes is LATENT}
    cost = AttentionCase("", "", (), heads, **options).cost(torch.bfloat16, lengths)
    bandwidth = SM_BANDWIDTH * num_sms
    limits = Ceilings(copy=bandwidth, read=bandwidth, matmul=SM_FLOPS * num_sms)
    return simulate(plan(lengths, heads, num_sms, sizes), num_sms, limits.bound(cost)[0])


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    parser = option_parser(__doc__, "only")
    parser.add_argument("--sms", nargs="+", type=int, choices=list(ARCH), default=[132])
    parser.add_argument("--heads", nargs="+", default=["32/8"], help="query heads / KV heads")
    parser.add_argument("--latents", action="store_true", help="of 512 + 64 numbers, such as --heads 128/1")
    args = parser.parse_args(argv)
    sizes = LATENT if args.latents else HEAD
    check_only(args.only, CASES | SWEEP)
    cases = {name: lengths for name, lengths in (CASES | SWEEP).items() if args.only in name}
    print(f"{'case, us':36} {'heads':>5} SMs    makespan       ideal       ratio    roofline       total")
    for num_sms, heads, (name, lengths) in itertools.product(args.sms, args.heads, cases.items()):
        num_q_heads, num_kv_heads = map(int, heads.split("/"))
        found = outcome(lengths, (num_q_heads, num_kv_heads), num_sms, sizes)
        print(f"{name:36} {heads:>5} {num_sms:3} " + " ".join(f"{value:11.3f}" for value in found.values()))


if __name__ == "__main__":
    main()
