"""Run kernels with atomics in every order of their CTAs.

python -m paged.bench.compiled.orders [--arch sm_90]

A kernel without races depends on the schedule only through the order of its atomics on one place. Each kernel here
takes the value of one atomic a CTA (a ticket, a place in a list); its other atomics add whole numbers whose sum alone
counts. So one CTA after the other, in every order of the CTAs, covers every schedule of a grid. Each run also ends,
which shows that no CTA waits for a later one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import permutations
from typing import NamedTuple

import torch

from paged.bench.cards.card import Row, same
from paged.bench.cards.cards import CARDS
from paged.bench.compiled.device import ARCHS, CompiledDevice
from paged.bench.compiled.faults import Problem
from paged.errors import InvalidInputError
from paged.kernels.core.ids import LANES, Ids, check_ids, check_ids_on_device

# Small grids, of at most four CTAs.
ROWS = (
    ("route_and_align", {"tokens": 64, "num_experts": 16, "top_k": 4, "block_size": 16}),
    ("sample_tokens", {"rows": 1, "vocab_size": 9000, "top_p": 0.95}),
)


class InOrder(NamedTuple):
    """What a call returned. order: of the CTAs of a kernel; None if CTAs ran in a random order."""

    kernel: str
    order: tuple[int, ...] | None
    result: object


def in_every_order(device: CompiledDevice, call: Callable[[], object]) -> Iterator[InOrder]:
    """Call once, then for every order of the CTAs of each kernel with atomics that the call launches."""
    grids: dict[str, int] = {}

    def note(kernel: str, num_ctas: int) -> None:
        grids[kernel] = num_ctas

    with device.ordered(note):
        yield InOrder("", None, call())
    with_atomics = set()
    for translation in device.translations:
        if any(i.op in ("atom", "red") for i in translation.sites):
            with_atomics.add(translation.kernel.name)
    for kernel in sorted(with_atomics & grids.keys()):
        for order in permutations(range(grids[kernel])):
            with device.ordered(_only(kernel, order)):
                yield InOrder(kernel, order, call())


def _only(kernel: str, order: tuple[int, ...]) -> Callable[[str, int], tuple[int, ...] | None]:
    """Return an order for one kernel; others run by the device's schedule."""

    def order_of(name: str, _: int) -> tuple[int, ...] | None:
        if name == kernel:
            return order
        return None

    return order_of


def _is_right(problem: Problem) -> bool:
    return all(result.first_wrong() is None for result in problem.run()[0])


def _refuses_ids() -> bool:
    """Return whether a check of ids of three CTAs, each with a wrong one, reports one of them whole."""
    ids = torch.zeros(3 * LANES, dtype=torch.int64)
    ids[[5, LANES + 7, 3 * LANES - 1]] = torch.tensor([101, 102, 103])
    check_ids_on_device("rotary_embedding", Ids("positions", ids, 0, 9))
    try:
        check_ids()
    except InvalidInputError as error:
        places = ("[5]: 101,", f"[{LANES + 7}]: 102,", f"[{3 * LANES - 1}]: 103,")
        return any(place in str(error) for place in places)
    return False


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each kernel; the exit code is 1 if an order gives a wrong result or a fault."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arch", choices=ARCHS, default="sm_90")
    args = parser.parse_args(argv)
    num_wrong = 0
    with CompiledDevice(args.arch, num_sms=3) as device:
        calls: list[tuple[str, Callable[[], bool]]] = [("check_ids", _refuses_ids)]
        for name, sizes in ROWS:
            problem = Problem(CARDS[name], Row({key: same(value) for key, value in sizes.items()}))
            calls.append((name, partial(_is_right, problem)))
        for name, call in calls:
            counts: dict[str, list[int]] = {}
            for run in in_every_order(device, call):
                is_wrong = run.result is not True or bool(device.report.lines())
                count = counts.setdefault(run.kernel, [0, 0])
                count[0] += 1
                count[1] += is_wrong
            for kernel, (num_orders, wrong) in counts.items():
                if kernel:
                    print(f"{name}: {kernel}, {num_orders} orders, {wrong} wrong", flush=True)
                num_wrong += wrong
        for line in device.report.lines():
            print(line)
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
