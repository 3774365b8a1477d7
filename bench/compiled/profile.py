"""A profile of kernels without a GPU: what their compiled code does, counted in a run at the sizes of "check".

`paged bench kernels --compiled sm_90` prints a line for each kernel that a case launches. See `counters` for sectors
and wavefronts. Bytes and operations are those of all kernels of the case, over the least that its card counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from paged.bench.cards.card import Card, Row
from paged.bench.compiled.counters import Counters, Requests
from paged.bench.compiled.device import CompiledDevice
from paged.bench.compiled.errors import NotModelledError
from paged.bench.limits import Cost
from paged.bench.problems.arguments import map_tensors

_SECTOR_BYTES = 32
HEAD = (
    f"{'case':28} {'kernel':32} {'CTAs':>6} {'loads':>6} {'L2':>6} {'stores':>6} {'banks':>6} {'barriers':>8} "
    f"{'bytes':>6} {'flops':>6}  instructions of a CTA"
)


@dataclass(frozen=True)
class Profile:
    """What one kernel did in a case.

    loads, stores: sectors over the least. fetched: sectors from the L2 cache over the least. banks: wavefronts of
    shared memory over the least. barriers: of a CTA.
    bytes, flops: of all kernels of the case over the least; None if the least is 0. instructions: by kind, of a CTA.
    """

    case: str
    kernel: str
    ctas: int
    loads: float
    fetched: float
    stores: float
    banks: float
    barriers: float
    bytes: float | None
    flops: float | None
    instructions: dict[str, float]
    lines: dict[str, float]

    def line(self) -> str:
        kinds = " ".join(f"{name}:{number:.0f}" for name, number in self.instructions.items())
        return (
            f"{self.case:28} {self.kernel:32} {self.ctas:6} {self.loads:6.2f} {self.fetched:6.2f} {self.stores:6.2f} "
            f"{self.banks:6.2f} {self.barriers:8.1f} {_ratio(self.bytes):>6} {_ratio(self.flops):>6}  {kinds}"
        )


def _ratio(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}"


def profiles(card: Card, row: Row, device: CompiledDevice) -> Iterator[Profile]:
    """Run a case, and yield the profile of each kernel."""
    torch.manual_seed(0)
    arguments = card.problem(row, "check", torch.device("cpu"), torch.bfloat16)
    cost = card.cost(card, map_tensors(torch.clone, arguments))
    device.counters.clear()
    card.call(arguments)
    all_counters = list(device.counters.values())
    for name, counters in device.counters.items():
        yield _profile(card.row_name(row), name, counters, all_counters, cost)


def _profile(case: str, kernel: str, counters: Counters, of_case: list[Counters], cost: Cost) -> Profile:
    sectors = sum(_total(part.loads.values()).fetched + _total(part.stores.values()).taken for part in of_case)
    num_flops = sum(part.flops for part in of_case)
    conflicts = {}
    for kind, by_line in (("load", counters.loads), ("store", counters.stores), ("bank", counters.shared)):
        for line, requests in by_line.items():
            if requests.ratio > 1.1:
                conflicts[f"{kind} {line}"] = round(requests.ratio, 2)
            if requests.fetched_ratio > 1.1:
                conflicts[f"L2 {line}"] = round(requests.fetched_ratio, 2)
    return Profile(
        case=case,
        kernel=kernel.strip("_").removesuffix("_kernel"),
        ctas=counters.ctas,
        loads=_total(counters.loads.values()).ratio,
        fetched=_total(counters.loads.values()).fetched_ratio,
        stores=_total(counters.stores.values()).ratio,
        banks=_total(counters.shared.values()).ratio,
        barriers=counters.barriers / counters.ctas,
        bytes=sectors * _SECTOR_BYTES / cost.num_bytes if cost.num_bytes else None,
        flops=num_flops / cost.flops if cost.flops else None,
        instructions={name: count / counters.ctas for name, count in counters.instructions.most_common()},
        lines=conflicts,
    )


def _total(requests: Iterable[Requests]) -> Requests:
    total = Requests()
    for request in requests:
        total.add(request.count, request.taken, request.least)
        total.fetched += request.fetched
        total.needed += request.needed
    return total


def run(cases: Iterable[tuple[Card, Row]], arch: str, write: Callable[[str], object]) -> list[Profile]:
    """Print and return the profiles of cases; below a kernel stand the lines that exceed the least by a tenth."""
    all_profiles = []
    write(HEAD)
    with CompiledDevice(arch, counts=True) as device:
        for card, row in cases:
            try:
                of_case = list(profiles(card, row, device))
            except NotModelledError as error:
                write(f"{card.row_name(row):28} not modelled: {error}")
                continue
            for profile in of_case:
                write(profile.line())
                for line, ratio in sorted(profile.lines.items(), key=lambda pair: -pair[1])[:4]:
                    write(f"    {ratio:6.2f}  {line}")
            all_profiles += of_case
    return all_profiles
