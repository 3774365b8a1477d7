"""Accesses that a GPU would get wrong, each beside the right one."""

from collections.abc import Callable

import pytest
import torch

from paged.bench.compiled import batch
from paged.bench.compiled.tensor_copies import TensorMap
from tests.compiled.ptx_program import run

# %r0: the thread, %rd2: its 4 bytes of the first tensor, %rd3: of the second
_PLACES = """
	mov.u32 %r0, %tid.x;
	mul.wide.u32 %rd8, %r0, 4;
	add.s64 %rd2, %rd0, %rd8;
	add.s64 %rd3, %rd1, %rd8;
"""
# A tensor goes through shared memory; each thread reads what the last thread before it, around the CTA, has written.
_ROTATE = f"""{_PLACES}
	ld.global.b32 %r1, [%rd2];
	shl.b32 %r2, %r0, 2;
	mov.b32 %r3, global_smem;
	add.s32 %r2, %r2, %r3;
	st.shared.b32 [%r2], %r1;
	bar.sync 0;
	add.s32 %r4, %r0, 63;
	and.b32 %r4, %r4, 63;
	shl.b32 %r4, %r4, 2;
	add.s32 %r4, %r4, %r3;
	ld.shared.b32 %r5, [%r4];
	st.global.b32 [%rd3], %r5;
"""
_COPY = f"""{_PLACES}
	shl.b32 %r2, %r0, 2;
	mov.b32 %r3, global_smem;
	add.s32 %r2, %r2, %r3;
	cp.async.ca.shared.global [%r2], [%rd2], 4;
	cp.async.commit_group;
	cp.async.wait_group 0;
	bar.sync 0;
	ld.shared.b32 %r5, [%r2];
	st.global.b32 [%rd3], %r5;
"""
# The CTAs write a number each; the last one, by a ticket, adds them up.
_TICKET = """
	mov.u32 %r0, %tid.x;
	mov.u32 %r1, %ctaid.x;
	mov.u32 %r9, %nctaid.x;
	mul.wide.u32 %rd2, %r1, 4;
	add.s64 %rd2, %rd0, %rd2;
	add.s32 %r2, %r1, 1;
	setp.eq.s32 %p0, %r0, 0;
	@%p0 st.global.b32 [%rd2], %r2;
	bar.sync 0;
	mov.b32 %r8, 0;
	@%p0 atom.global.gpu.acq_rel.add.u32 %r8, [%rd1], 1;
	mov.b32 %r3, global_smem;
	@%p0 st.shared.b32 [%r3], %r8;
	bar.sync 0;
	ld.shared.b32 %r8, [%r3];
	add.s32 %r9, %r9, -1;
	setp.lt.s32 %p1, %r8, %r9;
	@%p1 bra $L_END;
	mov.b32 %r4, 0;
	mov.b32 %r5, 0;
$L_LOOP:
	mul.wide.u32 %rd3, %r4, 4;
	add.s64 %rd3, %rd0, %rd3;
	ld.global.b32 %r6, [%rd3];
	add.s32 %r5, %r5, %r6;
	add.s32 %r4, %r4, 1;
	setp.le.s32 %p2, %r4, %r9;
	@%p2 bra $L_LOOP;
	@%p0 st.global.b32 [%rd1+4], %r5;
$L_END:
"""
_SPIN = """
$L_WAIT:
	ld.volatile.global.b32 %r1, [%rd0];
	setp.eq.s32 %p0, %r1, 0;
	@%p0 bra $L_WAIT;
"""
# A box of 8 x 32 bytes comes to shared memory, and its 64 words to the tensor.
_BOX = """
	mov.u32 %r0, %tid.x;
	mov.b32 %r3, global_smem;
	add.s32 %r4, %r3, 512;
	setp.eq.s32 %p0, %r0, 0;
	mov.b32 %r5, 0;
	@%p0 st.shared.b32 [%r3], %r5;
	@%p0 mbarrier.init.shared::cta.b64 [%r4], 1;
	fence.proxy.async.shared::cta;
	bar.sync 0;
	@%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r4], 256;
	@%p0 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r3], [%rd0, {%r5, %r5}], [%r4];
$L_WAIT:
	mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r4], %r5;
	@!%p1 bra $L_WAIT;
	shl.b32 %r6, %r0, 2;
	add.s32 %r7, %r3, %r6;
	ld.shared.b32 %r8, [%r7];
	mul.wide.u32 %rd8, %r0, 4;
	add.s64 %rd3, %rd2, %rd8;
	st.global.b32 [%rd3], %r8;
	bar.sync 0;
	@%p0 mbarrier.inval.shared::cta.b64 [%r4];
"""


def _tensors(size: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(size, dtype=torch.int32), torch.full((size,), -1, dtype=torch.int32)


def test_shared_memory_and_its_barrier() -> None:
    source, target = _tensors()
    assert run(_ROTATE, (source, target), threads=64).kinds() == []
    assert target.tolist() == source.roll(1).tolist()
    report = run(_ROTATE.replace("bar.sync 0;", ""), (source, target), threads=64)
    assert report.kinds() == ["race: read after write"]
    assert "warp 0 after warp 1" in report.lines()[0]


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        (lambda text: text.replace("[%rd2]", "[%rd2+4]"), "load out of bounds"),
        (lambda text: text.replace("[%rd3]", "[%rd3+-4]"), "store out of bounds"),
        (lambda text: text.replace("[%rd2]", "[%rd2+2]"), "load misaligned"),
        (lambda text: text.replace("st.shared.b32 [%r2]", "st.shared.b32 [%r2+1000]"), "out of bounds shared access"),
        (lambda text: text.replace("st.shared.b32 [%r2]", "st.shared.b32 [%r2+1]"), "misaligned shared access"),
        (lambda text: text.replace("st.shared.b32 [%r2], %r1;", ""), "read of shared memory that nobody wrote"),
        (lambda text: text.replace("[%r2]", "[%r3]"), "different values stored to one place at once"),
        (lambda text: text.replace("[%rd3]", "[%rd1]"), "different values stored to one place at once"),
    ],
)
def test_wrong_addresses(edit: Callable[[str], str], fault: str) -> None:
    assert fault in run(edit(_ROTATE), _tensors(), threads=64).kinds()


def test_a_gap_between_elements_belongs_to_no_tensor() -> None:
    source, target = torch.arange(128, dtype=torch.int32).view(64, 2)[:, 0], _tensors()[1]
    report = run(_ROTATE, (source, target), threads=64)
    assert report.kinds() == ["load between a tensor's elements"]
    assert "4 bytes from the start of tensor 0" in report.lines()[0]


def test_a_copy_is_there_only_after_its_wait() -> None:
    source, target = _tensors()
    assert run(_COPY, (source, target), threads=64).kinds() == []
    assert target.equal(source)
    for wait in ("", "cp.async.wait_group 1;"):
        report = run(_COPY.replace("cp.async.wait_group 0;", wait), (source, target), threads=64)
        assert report.kinds() == ["read of a copy that was not waited for"]
        assert target.eq(-1).all(), "ones, which are NaN in floats"


def test_threads_of_a_cta_that_miss_a_barrier() -> None:
    guarded = f"{_PLACES} setp.lt.s32 %p0, %r0, 40; @%p0 bar.sync 0;"
    assert run(guarded, _tensors(), threads=64).kinds() == ["deadlock"]
    branched = f"{_PLACES} setp.lt.s32 %p0, %r0, 40; @%p0 bra $L_END; bar.sync 0; $L_END:"
    assert run(branched, _tensors(), threads=64).kinds() == ["deadlock"]


@pytest.mark.parametrize("at_once", [1, 2, 99])
def test_a_ticket_orders_ctas(at_once: int) -> None:
    numbers, cells = torch.zeros(5, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    assert run(_TICKET, (numbers, cells), threads=64, num_ctas=5, at_once=at_once).kinds() == []
    assert cells.tolist() == [5, 15]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("acq_rel", "relaxed"),
        ("acq_rel", "acquire"),
        ("acq_rel", "release"),
        ("st.global.b32 [%rd2], %r2;\n\tbar.sync 0;", "st.global.b32 [%rd2], %r2;"),
    ],
)
def test_a_ticket_that_orders_nothing(old: str, new: str) -> None:
    assert old in _TICKET
    cells = torch.zeros(2, dtype=torch.int32)
    report = run(_TICKET.replace(old, new), (torch.zeros(5, dtype=torch.int32), cells), threads=64, num_ctas=5)
    assert report.kinds() == ["race between CTAs: read after write"]


def test_a_wait_for_another_cta_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "_MAX_RUNS", 500)
    report = run(_SPIN, (torch.zeros(1, dtype=torch.int32),))
    assert report.kinds() == ["deadlock"]
    assert "a loop does not end" in report.lines()[0]
    assert run(_SPIN, (torch.ones(1, dtype=torch.int32),)).kinds() == []


def _box(tensor: torch.Tensor) -> TensorMap:
    rows, columns = tensor.shape
    return TensorMap(tensor.data_ptr(), 4, [columns, rows], [4, 4 * columns], [8, 8], 32)


def test_a_box_comes_with_its_barrier() -> None:
    source, target = torch.arange(7 * 12, dtype=torch.int32).view(7, 12), _tensors()[1]
    report = run(_BOX, (source, target), threads=64, maps=[_box(source)])
    assert report.kinds() == []
    want = torch.zeros(8, 8, dtype=torch.int32)
    want[:7] = source[:, :8]  # the row outside of the tensor is 0
    vectors = want.view(8, 2, 4)
    for row in range(8):  # a swizzle of 32 bytes exchanges the vectors of every other group of 4 rows
        assert target.view(8, 2, 4)[row].equal(vectors[row].flip(0) if row & 4 else vectors[row])


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("@!%p1 bra $L_WAIT;", "", "read of a copy that was not waited for"),
        ("_, [%r4], 256", "_, [%r4], 128", "deadlock"),
        ("_, [%r4], 256", "_, [%r4], 512", "deadlock"),
        ("@%p0 mbarrier.init.shared::cta.b64 [%r4], 1;", "", "arrival of an mbarrier that was not initialised"),
        ("fence.proxy.async.shared::cta;", "", "copy engine without a proxy fence behind ordinary stores"),
        ("shared::cta;\n\tbar.sync 0;", "shared::cta;", "mbarrier used by another warp without a barrier after its"),
        ("[%r3], [%rd0", "[%r3+16], [%rd0", "misaligned destination of a tensor copy"),
    ],
)
def test_a_box_without_its_barrier(old: str, new: str, fault: str) -> None:
    assert old in _BOX
    source, target = torch.arange(7 * 12, dtype=torch.int32).view(7, 12), _tensors()[1]
    report = run(_BOX.replace(old, new), (source, target), threads=64, maps=[_box(source)])
    assert any(kind.startswith(fault) for kind in report.kinds()), report.lines()


def test_conditions_of_a_tensor_map() -> None:
    good = TensorMap(1024, 2, [64, 8], [2, 128], [64, 8], 128)
    assert good.problems() == []
    for change in (
        {"address": 1032},
        {"strides": [2, 136]},
        {"shape": [0, 8]},
        {"box": [64, 257]},
        {"box": [12, 8]},
        {"swizzle": 64},
    ):
        assert len(TensorMap(**(vars(good) | change)).problems()) == 1
