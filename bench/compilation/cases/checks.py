"""Checks of ids, which every operation may launch."""

from __future__ import annotations

from paged.bench.compilation.cases.case import CompileCase
from paged.bench.compilation.cases.launches import empty, launch_case, launches_of, single_case
from paged.kernels.core.ids import Ids, Sequences, check_ids_on_device, check_sequences_on_device

_NUM_IDS = 64


def cases() -> list[CompileCase]:
    """Return cases of PAGED_CHECK=1: slots alone, slots and positions, a slot map with ranks; sequences."""
    arrays = {"slots": ("i64",), "slots and positions": ("i64", "i64"), "rows, slots and ranks": ("i32",) * 3}
    cases = []
    for name, kinds in arrays.items():
        ids = [
            Ids("", empty(kinds[0], _NUM_IDS), None, 1),
            *(Ids("", empty(kind, _NUM_IDS), 0, 1) for kind in kinds[1:]),
        ]
        cases.append(single_case(f"check ids: {name}", check_ids_on_device, "", *ids))
    tables = empty("i32", 1, 4), empty("i32", 2), empty("i32", 1)
    sequences = Sequences(*tables, 1, 4, 16, 1, 0, keys_at_once=128)
    (launch,) = launches_of("sm_90", check_sequences_on_device, sequences)
    return [*cases, launch_case("check sequences", launch, aligned=())]
