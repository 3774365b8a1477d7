"""Matrix instructions beside the tables of PTX that say which thread holds which number."""

import pytest
import torch

from paged.bench.compiled.products import WgmmaKind
from tests.compiled.ptx_program import run

_ITEMS = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "tf32": torch.float32,
    "s8": torch.int8,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
_LOAD = """
	mul.wide.u32 %rd8, %r0, {stride};
	add.s64 %rd{place}, %rd{place}, %rd8;
"""


def _numbers(rows: int, columns: int, kind: str) -> torch.Tensor:
    """Small whole numbers, so that sums are exact."""
    return torch.randint(-4, 5, (rows, columns)).float().to(_ITEMS[kind])


def _place(kind: str, register: int, lane: int, part: int, halves: int) -> tuple[int, int]:
    """Row and column of a number in a register: 4 threads share a row, registers go to the next 8 rows first."""
    per = 4 // _ITEMS[kind].itemsize
    column_block, half = divmod(register, halves)
    return lane // 4 + 8 * half, column_block * 4 * per + lane % 4 * per + part


def _by_lane(matrix: torch.Tensor, kind: str, num_registers: int, halves: int) -> torch.Tensor:
    """The registers, [32, registers], that hold a matrix."""
    per = 4 // _ITEMS[kind].itemsize
    items = torch.empty(32, num_registers, per, dtype=_ITEMS[kind])
    for lane in range(32):
        for register in range(num_registers):
            for part in range(per):
                items[lane, register, part] = matrix[_place(kind, register, lane, part, halves)]
    return items.view(torch.int32).reshape(32, num_registers)


@pytest.mark.parametrize(
    ("kind", "depth"), [("f16", 16), ("bf16", 16), ("bf16", 8), ("tf32", 8), ("s8", 32), ("e4m3", 32), ("e5m2", 32)]
)
def test_mma(kind: str, depth: int) -> None:
    is_whole = kind == "s8"
    sum_type = "s32" if is_whole else "f32"
    num_a = depth * _ITEMS[kind].itemsize // 8
    num_b = num_a // 2
    a, b = _numbers(16, depth, kind), _numbers(8, depth, kind)
    sums = torch.randint(-9, 9, (16, 8), dtype=torch.int32)
    if not is_whole:
        sums = sums.float()
    inputs = [
        _by_lane(a, kind, num_a, 2).contiguous(),
        _by_lane(b, kind, num_b, 1).contiguous(),
        torch.stack([sums[lane // 4 :: 8, lane % 4 * 2 : lane % 4 * 2 + 2].reshape(4) for lane in range(32)]),
        torch.zeros(32, 4, dtype=sums.dtype),
    ]
    names, loads = [], ["mov.u32 %r0, %tid.x;"]
    next_register = 1
    for place, tensor in enumerate(inputs):
        count = tensor.shape[1]
        loads.append(_LOAD.format(stride=4 * count, place=place))
        names.append([f"%r{next_register + index}" for index in range(count)])
        next_register += count
        if place < 3:
            for index, name in enumerate(names[-1]):
                loads.append(f"ld.global.b32 {name}, [%rd{place}+{4 * index}];")
    a_names, b_names, c_names, d_names = (", ".join(each) for each in names)
    shape = f"mma.sync.aligned.m16n8k{depth}.row.col.{sum_type}.{kind}.{kind}.{sum_type}"
    product = f"{shape} {{{d_names}}}, {{{a_names}}}, {{{b_names}}}, {{{c_names}}};"
    twice = f"{shape} {{{d_names}}}, {{{a_names}}}, {{{b_names}}}, {{{d_names}}};"  # reads what the first has left
    store = f"st.global.v4.b32 [%rd3], {{{d_names}}};"
    assert run("\n".join([*loads, product, twice, store]), inputs).kinds() == []
    want = sums.double() + 2 * a.double() @ b.double().T
    for lane in range(32):
        got = inputs[3][lane].double().reshape(2, 2)
        assert got.equal(want[lane // 4 :: 8, lane % 4 * 2 : lane % 4 * 2 + 2])


# A: 64 x 16 numbers of 16 bits, B: 8 x 16, both in core matrices of 8 rows of 16 bytes, one after the other.
_WGMMA = """
	mov.u32 %r0, %tid.x;
	mov.b32 %r1, global_smem;
	mul.wide.u32 %rd8, %r0, 16;
	add.s64 %rd0, %rd0, %rd8;
	ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%rd0];
	shl.b32 %r6, %r0, 4;
	add.s32 %r6, %r6, %r1;
	st.shared.v4.b32 [%r6], {%r2, %r3, %r4, %r5};
	setp.lt.u32 %p0, %r0, 16;
	add.s64 %rd1, %rd1, %rd8;
	@%p0 ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%rd1];
	@%p0 st.shared.v4.b32 [%r6+2048], {%r2, %r3, %r4, %r5};
	fence.proxy.async.shared::cta;
	bar.sync 0;
	shr.u32 %r7, %r1, 4;
	cvt.u64.u32 %rd4, %r7;
	add.s64 %rd4, %rd4, DESCRIPTOR;
	add.s64 %rd5, %rd4, 128;
	mov.b32 %r10, 0f41100000; mov.b32 %r11, 0f41100000; mov.b32 %r12, 0f41100000; mov.b32 %r13, 0f41100000;
	mov.pred %p1, -1;
	wgmma.fence.sync.aligned;
	wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r10, %r11, %r12, %r13}, %rd4, %rd5, %p1, 1, 1, 0, 0;
	wgmma.commit_group.sync.aligned;
	wgmma.wait_group.sync.aligned 0;
	add.s64 %rd2, %rd2, %rd8;
	st.global.v4.b32 [%rd2], {%r10, %r11, %r12, %r13};
"""


def _run_wgmma(body: str) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """Result, expected result and faults."""
    a, b = _numbers(64, 16, "bf16"), _numbers(8, 16, "bf16")
    # [rows / 8, columns / 8, 8, 8]: leading 128 bytes to the next columns, stride 256 to the next rows
    stored = [matrix.view(-1, 8, 2, 8).transpose(1, 2).contiguous() for matrix in (a, b)]
    out = torch.zeros(128, 4)
    report = run(body, (*stored, out), threads=128, shared=4096)
    # A thread holds two rows of its warp's 16, and two columns of each.
    got = out.view(4, 8, 4, 2, 2).permute(0, 3, 1, 2, 4).reshape(64, 8)
    return got, 9 + a.float() @ b.float().T, report.kinds()


def test_wgmma() -> None:
    leading, stride = 128 >> 4, 256 >> 4
    body = _WGMMA.replace("DESCRIPTOR", str(leading << 16 | stride << 32))
    got, want, faults = _run_wgmma(body)
    assert faults == []
    assert got.equal(want)
    for dropped, fault in (
        ("fence.proxy.async.shared::cta;", "wgmma reads what was written without a proxy fence"),
        ("bar.sync 0;", "race: read after write"),
        ("wgmma.wait_group.sync.aligned 0;", ""),
    ):
        assert dropped in body
        got, want, faults = _run_wgmma(body.replace(dropped, ""))
        assert faults == list(filter(None, [fault]))
        assert fault or got.isnan().all(), "accumulators are NaN before they are waited for"
    overwritten = body.replace("wgmma.wait_group", "bar.sync 0; @%p0 st.shared.b32 [%r6], %r0; wgmma.wait_group")
    assert "operand of wgmma overwritten before it was waited for" in _run_wgmma(overwritten)[2]
    moved = body.replace("wgmma.wait_group", "mov.b32 %r20, %r10; wgmma.wait_group")
    assert "copy of an accumulator in flight" in _run_wgmma(moved)[2]


def test_immediate_numbers_of_wgmma() -> None:
    parts = ["m64n128k16", "f32", "bf16", "bf16"]
    assert WgmmaKind.of(parts, [1, -1, 0, 1], False) == WgmmaKind(128, 16, "f32", "bf16", -1, (False, True))
    assert WgmmaKind.of(parts, [1, 1, 1], True) == WgmmaKind(128, 16, "f32", "bf16", 1, (False, True))
    assert WgmmaKind.of(["m64n8k32", "f32", "e4m3", "e4m3"], [1, 1], False).is_transposed == (False, False)
