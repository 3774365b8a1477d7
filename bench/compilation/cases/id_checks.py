"""The kernels of PAGED_CHECK=1: ids of one, two and three arrays, and the sequences of attention."""

from __future__ import annotations

from paged.bench.compilation.case import CompileCase, kernel_case
from paged.kernels.common.id_check_kernels import _check_ids_kernel, _check_sequences_kernel
from paged.kernels.common.id_checks import LANES

_KINDS = dict.fromkeys(("ticket_ptr", "block_table_ptr", "cu_seqlens_q_ptr", "seq_lens_ptr"), "*i32")
_KINDS |= {"record_ptr": "*i64", "low_0": "i64"}


def cases() -> list[CompileCase]:
    """As the operations launch them: slots alone, slots and positions, a slot map with ranks; one window or none."""
    arrays = {"slots": ("*i64",), "slots and positions": ("*i64", "*i64"), "rows, slots and ranks": ("*i32",) * 3}
    found = []
    for name, kinds in arrays.items():
        given = {f"ids_{index}_ptr": kind for index, kind in enumerate(kinds)}
        constexprs = {**{f"ids_{index}_ptr": None for index in range(len(kinds), 3)}, "LANES": LANES}
        found.append(kernel_case(f"check ids: {name}", _check_ids_kernel, constexprs, _KINDS | given))
    constexprs = {"KEYS_AT_ONCE": 128, "LANES": LANES}
    return [*found, kernel_case("check sequences", _check_sequences_kernel, constexprs, _KINDS, aligned=())]
