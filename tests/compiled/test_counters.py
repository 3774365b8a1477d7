"""Counts of accesses whose sectors and bank conflicts are known."""

import pytest
import torch

from paged.bench.compiled.counters import Counters, Requests
from tests.compiled.ptx_program import run


def _counted(body: str, threads: int = 64) -> Counters:
    counters = Counters()
    tensor = torch.zeros(4096, dtype=torch.int32)
    assert (
        run(f"mov.u32 %r0, %tid.x;\n{body}", (tensor,), threads=threads, shared=16384, counters=counters).kinds() == []
    )
    return counters


def _only(requests: dict[str, Requests]) -> tuple[int, int, int]:
    (each,) = requests.values()
    return each.count, each.taken, each.least


@pytest.mark.parametrize(
    ("stride", "offset", "taken", "least", "fetched", "needed"),
    [
        (4, 0, 8, 8, 8, 8),  # two warps, 128 bytes each
        (4, 16, 10, 8, 9, 8),  # shifted by half a sector; the warps share one
        (8, 0, 16, 8, 16, 8),  # every other word
        (32, 0, 64, 8, 64, 8),  # a sector for each word
        (0, 0, 2, 2, 1, 1),  # one word for all
    ],
)
def test_sectors(stride: int, offset: int, taken: int, least: int, fetched: int, needed: int) -> None:
    place = f"mul.wide.u32 %rd1, %r0, {stride}; add.s64 %rd1, %rd1, %rd0;"
    counters = _counted(f"{place} ld.global.b32 %r1, [%rd1+{offset}];")
    assert _only(counters.loads) == (2, taken, least)
    (requests,) = counters.loads.values()
    assert (requests.fetched, requests.needed) == (fetched, needed)
    assert counters.stores == {}
    counters = _counted(f"{place} mov.b32 %r1, 7; st.global.b32 [%rd1+{offset}], %r1;")
    assert _only(counters.stores) == (2, taken, least)


def test_sectors_of_vectors_and_of_few_threads() -> None:
    place = "mul.wide.u32 %rd1, %r0, 16; add.s64 %rd1, %rd1, %rd0;"
    assert _only(_counted(f"{place} ld.global.v4.b32 {{%r1, %r2, %r3, %r4}}, [%rd1];").loads) == (2, 32, 32)
    guarded = f"{place} setp.eq.s32 %p0, %r0, 3; @%p0 ld.global.b32 %r1, [%rd1];"
    assert _only(_counted(guarded).loads) == (1, 1, 1)


@pytest.mark.parametrize(("bypass", "fetched"), [(False, 64), (True, 128)])
def test_halves_of_sectors(bypass: bool, fetched: int) -> None:
    """32 bytes a thread in two instructions: the L1 cache holds the second half, unless both bypass it."""
    place = "mul.wide.u32 %rd1, %r0, 32; add.s64 %rd1, %rd1, %rd0;"
    for half in (0, 16):
        if bypass:
            place += f"cp.async.cg.shared.global [%r1+{64 * half}], [%rd1+{half}], 16;"
        else:
            place += f"ld.global.v4.b32 {{%r1, %r2, %r3, %r4}}, [%rd1+{half}];"
    (requests,) = _counted(f"mov.b32 %r3, global_smem; mad.lo.s32 %r1, %r0, 16, %r3; {place}").loads.values()
    assert (requests.taken, requests.least, requests.fetched, requests.needed) == (128, 64, fetched, 64)


@pytest.mark.parametrize(("words", "taken"), [(1, 2), (2, 4), (4, 8), (32, 64), (33, 2), (0, 2)])
def test_bank_conflicts(words: int, taken: int) -> None:
    """A warp whose threads lie `words` apart, in two warps."""
    place = f"mov.b32 %r3, global_smem; mad.lo.s32 %r2, %r0, {4 * words}, %r3; mov.b32 %r1, 5;"
    assert _only(_counted(f"{place} st.shared.b32 [%r2], %r1;").shared) == (2, taken, 2)


def test_wavefronts_of_vectors() -> None:
    place = "mov.b32 %r3, global_smem; mad.lo.s32 %r2, %r0, 16, %r3; mov.b32 %r1, 5;"
    counters = _counted(f"{place} st.shared.v4.b32 [%r2], {{%r1, %r1, %r1, %r1}};")
    assert _only(counters.shared) == (2, 8, 8), "a quarter of a warp at once"


def test_instructions_and_matrix_operations() -> None:
    product = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r1, %r2, %r3, %r4}, {%r5, %r6, %r7, %r8}, "
    body = f"bar.sync 0; {product} {{%r9, %r10}}, {{%r1, %r2, %r3, %r4}}; bar.sync 0; ex2.approx.f32 %r1, %r1;"
    counters = _counted(body)
    assert (counters.ctas, counters.barriers) == (1, 2)
    assert counters.flops == 2 * 2 * 16 * 8 * 16, "two warps"
    assert (counters.instructions["matrix"], counters.instructions["special"]) == (2, 2)
