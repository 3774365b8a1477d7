"""How evenly paged attention's work lists fill a chip, by simulation: no GPU, the real planning kernel.

    TRITON_INTERPRET=1 python -m bench.attention.schedule [--sms 132 ...] [--heads 32/8 ...] [--only NAME]

The planning kernel runs in Triton's interpreter as if on a chip of so many SMs. Its programs, items times KV heads, are
then dealt to SMs in grid order, each to the first free SM, as the hardware does; `schedule_model` says what they are
assumed to cost. No time in the table is measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from unittest import mock

import torch

from paged.bench.attention.cases import AttentionCase
from paged.bench.attention.schedule_model import (
    ELEMENT_SIZE,
    HEAD_DIM,
    SM_BANDWIDTH,
    SM_FLOPS,
    Launch,
    Outcome,
    WorkItem,
    simulate,
)
from paged.bench.benchmark import option_parser
from paged.bench.limits import Ceilings
from paged.kernels.attention import plan as attention_plan
from paged.kernels.attention.call import NO_LIMIT
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


def outcome(lengths: Lengths, heads: tuple[int, int], num_sms: int) -> Outcome:
    """Plan and simulate one batch."""
    cost = AttentionCase("", "", (), heads, head_dim=HEAD_DIM).cost(torch.bfloat16, lengths)
    bandwidth = SM_BANDWIDTH * num_sms
    limits = Ceilings(copy=bandwidth, read=bandwidth, matmul=SM_FLOPS * num_sms)
    return simulate(plan(lengths, heads, num_sms), num_sms, limits.bound(cost)[0])


# Columns of the table: their heads, and what stands in them.
COLUMNS: dict[str, Callable[[Outcome], str]] = {
    "makespan": lambda found: f"{1e6 * found.makespan_s:.1f}us",
    "ideal": lambda found: f"{1e6 * found.ideal_s:.1f}us",
    "ratio": lambda found: f"{found.ratio:.3f}",
    "roofline": lambda found: f"{1e6 * found.roofline_s:.1f}us",
    "total": lambda found: f"{1e6 * found.total_s:.1f}us",
    "overlapped": lambda found: f"{1e6 * found.overlapped_s:.1f}us",
    "items": lambda found: str(found.num_items),
    "idle": lambda found: str(found.num_idle),
    "splits": lambda found: str(found.num_split_tiles),
    "partials KB": lambda found: str(found.partial_bytes // 1024),
}


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    parser = option_parser(__doc__, "only")
    parser.add_argument("--sms", nargs="+", type=int, choices=list(ARCH), default=[132])
    parser.add_argument("--heads", nargs="+", default=["32/8"], help="query heads / KV heads")
    args = parser.parse_args(argv)
    cases = {name: lengths for name, lengths in (CASES | SWEEP).items() if args.only in name}
    print(f"{'case':36} {'heads':>5} {'SMs':>3} " + " ".join(f"{name:>11}" for name in COLUMNS))
    for num_sms, heads, (name, lengths) in itertools.product(args.sms, args.heads, cases.items()):
        num_q_heads, num_kv_heads = map(int, heads.split("/"))
        found = outcome(lengths, (num_q_heads, num_kv_heads), num_sms)
        cells = " ".join(f"{cell(found):>11}" for cell in COLUMNS.values())
        print(f"{name:36} {heads:>5} {num_sms:3} {cells}")


if __name__ == "__main__":
    main()
