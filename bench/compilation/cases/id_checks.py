"""The kernels of PAGED_CHECK=1: ids of one, two and three arrays, and the sequences of attention."""

from __future__ import annotations

from paged.bench.compilation.case import CompileCase
from paged.kernels.common.id_check_kernels import _check_ids_kernel, _check_sequences_kernel
from paged.kernels.common.id_checks import LANES

_RECORD = {"record_ptr": "*i64", "ticket_ptr": "*i32", "operation": "i32"}


def cases() -> list[CompileCase]:
    """As the operations launch them: slots alone, slots and positions, a slot map with ranks; one window or none."""
    arrays = {"slots": ("*i64",), "slots and positions": ("*i64", "*i64"), "rows, slots and ranks": ("*i32",) * 3}
    return [*(_ids_case(name, kinds) for name, kinds in arrays.items()), _sequences_case()]


def _ids_case(name: str, kinds: tuple[str, ...]) -> CompileCase:
    missing = {f"ids_{place}_ptr": None for place in range(len(kinds), 3)}
    pointers = {f"ids_{place}_ptr": kind for place, kind in enumerate(kinds)} | dict.fromkeys(missing, "constexpr")
    bounds: dict[str, str] = {}
    for place in range(3):
        bounds |= {f"num_{place}": "i32", f"low_{place}": "i64" if place == 0 else "i32", f"high_{place}": "i32"}
    return CompileCase(
        name=f"check ids: {name}",
        kernel=_check_ids_kernel,
        signature=pointers | _RECORD | bounds | {"LANES": "constexpr"},
        constexprs={**missing, "LANES": LANES},
        num_warps=4,
    )


def _sequences_case() -> CompileCase:
    scalars = ("num_tokens", "num_blocks", "block_size", "width", "max_seqlen_q", "left", "stride_table_seq")
    tensors = dict.fromkeys(("block_table_ptr", "cu_seqlens_q_ptr", "seq_lens_ptr"), "*i32")
    constexprs = {"KEYS_AT_ONCE": 128, "LANES": LANES}
    return CompileCase(
        name="check sequences",
        kernel=_check_sequences_kernel,
        signature=tensors | _RECORD | dict.fromkeys(scalars, "i32") | dict.fromkeys(constexprs, "constexpr"),
        constexprs=constexprs,
        num_warps=4,
    )
