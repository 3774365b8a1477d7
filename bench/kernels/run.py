"""Every public kernel against its hardware limit.

    python -m bench.kernels.run [--json FILE] [--small] [--only NAME]

A GPU runs the Triton kernels in bfloat16 from a CUDA graph. A CPU runs what models run there, in float32 at small
sizes. Inputs are random and rotated so that they are not cached; rows of tiny operations with cached inputs say "warm".
Block tables are shuffled. An operation that differs from the float64 reference gets no row. --compiled sm_90 times
nothing: it counts what the kernels do, as compiled for that GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import NamedTuple

import torch

from paged.bench.benchmark import DEVICE, SHARED, Benchmark, Setting, Write, check_only, option_parser
from paged.bench.cards.card import Card, Row
from paged.bench.cards.cards import CARDS
from paged.bench.contest import OURS, Contest, Peer
from paged.bench.problems.arguments import Arguments
from paged.bench.timing import num_sets

# Largest number of tensor sets that a case rotates through, even if they do not fill the cache.
MAX_SETS = 512
PEERS: tuple[Peer, ...] = ()  # attention and experts have peers in benchmarks of their own


class Case(NamedTuple):
    """A row of a card."""

    card: Card
    row: Row

    @property
    def name(self) -> str:
        return self.card.row_name(self.row)

    def draw(self, scale: str, setting: Setting) -> Arguments:
        return self.card.problem(self.row, scale, setting.device, setting.dtype)


CASES = tuple(Case(card, row) for card in CARDS.values() for row in card.rows)


def contest(case: Case, setting: Setting) -> Contest:
    """Return the contest of a case, in which no peer takes part.

    Raises:
        WrongResultError: the operation differs from the definition.
    """
    card = case.card
    torch.manual_seed(0)
    for result in card.check(case.draw("check", setting)).values():
        result.check()
    arguments = case.draw(setting.scale, setting)
    cost = card.cost(card, arguments)
    # Tensors that change in place count twice as moved bytes, so a call may fill the cache with only half of num_bytes.
    count, is_cold = num_sets(cost.num_bytes // 2, setting.device, MAX_SETS)
    calls = [partial(card.operation, **arguments)]
    for _ in range(count - 1):
        calls.append(partial(card.operation, **case.draw(setting.scale, setting)))
    about = {"name": case.name, "size": case.row.size(setting.scale)}
    entries = Contest(about, setting, cost, is_cold)
    entries.add(OURS, calls, lambda _: None, capturable=case.row.capturable)
    return entries


BENCHMARK = Benchmark(
    "kernels",
    __doc__,
    lambda _: CASES,
    lambda case, setting: contest(case, setting).row(),
    {"cuda": 100, "cpu": 20},
)


def main(argv: Sequence[str] | None = None, write: Write = print) -> int:
    """Time the cases, or count what their kernels do."""
    parser = option_parser(__doc__, *SHARED, device=DEVICE, threads=None)
    parser.add_argument("--compiled", metavar="ARCH", help="count what kernels do as compiled for it, such as sm_90")
    args = parser.parse_args(argv)
    if args.compiled:
        return _count(args, write)
    return BENCHMARK.run(parser, args, write)


def _count(args: argparse.Namespace, write: Write) -> int:
    from paged.bench.compiled import profile  # needs Triton

    check_only(args.only, [case.name for case in CASES])
    chosen = [(case.card, case.row) for case in CASES if args.only in case.name]
    profiles = profile.run(chosen, args.compiled, write)
    if args.json:
        args.json.write_text(json.dumps(list(map(asdict, profiles)), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
