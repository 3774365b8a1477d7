"""Matrix products: mma of a warp, and wgmma of four warps, which reads shared memory and ends some time later.

Sums are float32. Accumulators of wgmma hold a poison until a wait_group covers them; its operands are read at once, and
must still be the same at the wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from paged.bench.compiled import numerics
from paged.bench.compiled.code import SHARED_BASE
from paged.bench.compiled.context import Context
from paged.bench.compiled.errors import NotModelledError, StoppedError
from paged.bench.compiled.numerics import Array
from paged.bench.compiled.shadow import BY_ATOMIC, NOBODY, PENDING
from paged.bench.compiled.shared_memory import SharedMemory
from paged.bench.compiled.tensor_copies import SWIZZLE
from paged.bench.compiled.threads import EPOCH_SHIFT, SEVERAL_WARPS, WARP_MASK, WARP_SIZE, Threads

POISON = np.uint32(0xFFC0DEAD)  # a NaN
_GROUP_SIZE = 128  # threads of a warpgroup
_ITEM_BYTES = {"bf16": 2, "f16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
_SUMS = {"f32": np.dtype(np.float32), "s32": np.dtype(np.int32)}
# Bits 62 and 63 of a descriptor -> bytes of the swizzle's span.
_SPANS = {0: 0, 1: 128, 2: 64, 3: 32}
_VECTOR = 16
_CORE_ROWS = 8  # rows of a core matrix


def numbers(words: Array, kind: str) -> Array:
    """Return the numbers in 32-bit words, along the last axis. 8-bit integers become float64: their sums are exact."""
    if kind == "bf16":
        return numerics.from_bf16(words.view(np.uint16))
    if kind == "f16":
        return np.asarray(words.view(np.float16).astype(np.float32))
    if kind == "tf32":
        return (words & np.uint32(0xFFFFE000)).view(np.float32)
    if kind == "s8":
        return np.asarray(words.view(np.int8).astype(np.float64))
    if kind == "u8":
        return np.asarray(words.view(np.uint8).astype(np.float64))
    return np.asarray(numerics.FLOAT8[kind][words.view(np.uint8)])


def fragment(registers: Sequence[Array], kind: str, num_halves: int) -> Array:
    """Return the rows, [warps, 8 * num_halves, k], that registers hold: halves of the rows first, then columns."""
    words = np.stack(registers, 1)  # [threads, registers]
    num_columns = len(registers) // num_halves
    values = numbers(words, kind).reshape(-1, 8, 4, num_columns, num_halves, 4 // _ITEM_BYTES[kind])
    ordered = values.transpose(0, 4, 1, 3, 2, 5)
    return ordered.reshape(len(values), 8 * num_halves, -1)


def accumulators(registers: Sequence[Array]) -> Array:
    """Return the 16 x 8 sums, [warps, 16, 8], that four registers hold."""
    return np.stack(registers, 1).reshape(-1, 8, 4, 2, 2).transpose(0, 3, 1, 2, 4).reshape(-1, 16, 8)


def element(sums: Array, place: int) -> Array:
    """Return the register at a place of `accumulators`."""
    high, low = divmod(place, 2)
    return np.ascontiguousarray(sums[:, 8 * high : 8 * high + 8, low::2]).reshape(-1)


def mma(a: Array, b: Array, sums: Array) -> Array:
    """Return sums + a @ b^T."""
    product: Array = np.matmul(a, b.swapaxes(1, 2))
    total: Array = product.astype(sums.dtype, copy=False) + sums
    return total


@dataclass
class _Pending:
    """Registers that a wgmma writes: their values, [threads, registers], and the group of each thread, or 0."""

    values: Array
    group: Array


@dataclass
class _Operands:
    """Vectors that a wgmma has read: where, and what they were. group: of the thread that issued it."""

    group: int
    thread: int
    site: int
    read: list[tuple[Array, Array]]


@dataclass(frozen=True)
class WgmmaKind:
    """The opcode and immediate numbers of a wgmma. signs: -1 or 1 for each operand; is_transposed: of each operand."""

    num_columns: int
    depth: int
    sum_type: str
    item: str
    sign: int
    is_transposed: tuple[bool, bool]

    @classmethod
    def of(cls, parts: Sequence[str], immediates: Sequence[int], a_is_in_registers: bool) -> WgmmaKind:
        """Read parts such as "m64n128k16", "f32", "bf16", "bf16" and the numbers behind the operands."""
        shape, sum_type, a_type, b_type = parts
        if a_type != b_type or sum_type not in _SUMS:
            raise NotModelledError(f"wgmma of {a_type} and {b_type} to {sum_type}")
        columns, _, depth = shape.partition("n")[2].partition("k")
        sign = 1
        for number in immediates[:2]:
            sign *= number
        transposed = [bool(number) for number in immediates[2:]]
        if a_is_in_registers or not transposed:
            transposed = [False, *transposed, False]
        return cls(int(columns), int(depth), sum_type, a_type, sign, (transposed[0], transposed[1]))


class WarpgroupProducts:
    """The wgmma instructions in flight of a batch. committed: groups that each thread has committed."""

    def __init__(self, context: Context, threads: Threads, shared: SharedMemory) -> None:
        self.context, self.threads, self.shared = context, threads, shared
        self.committed = np.zeros(threads.total, np.int64)
        self._pending: dict[tuple[int, ...], _Pending] = {}  # by the registers' numbers
        self._operands: list[_Operands] = []

    def begin(
        self,
        kind: WgmmaKind,
        registers: tuple[int, ...],
        held: Sequence[Array],
        a: Array | Sequence[Array],
        b: Array,
        adds: Array,
        mask: Array | None,
        site: int,
    ) -> None:
        """Compute sums + a @ b for each warpgroup, which their registers get at a wait.

        held: what the registers hold. a: registers of an operand, or a descriptor of shared memory as b.
        adds: whether to add what the accumulators hold.
        """
        active = self.threads.mask(mask)
        groups = active.reshape(-1, _GROUP_SIZE)
        if (groups.any(1) != groups.all(1)).any():
            raise StoppedError("part of a warpgroup in wgmma", "")
        for pending in self._pending:
            if pending != registers and set(pending) & set(registers):
                raise NotModelledError("accumulators of two instructions in flight that overlap in part")
        before, group_before = np.stack(held, 1), np.zeros(self.threads.total, np.int64)
        if registers in self._pending:
            group_before = self._pending[registers].group
            before = np.where(group_before[:, None] > 0, self._pending[registers].values, before)
        values = before.copy()
        dtype = _SUMS[kind.sum_type]
        for group in np.flatnonzero(groups.any(1)):
            first = int(group) * _GROUP_SIZE
            chosen = slice(first, first + _GROUP_SIZE)
            operands = _Operands(int(self.committed[first]) + 1, first, site, [])
            if isinstance(a, np.ndarray):
                rows = self._read(int(a[first]), 64, kind, kind.is_transposed[0], operands)
            else:
                rows = fragment([value[chosen] for value in a], kind.item, 2).reshape(64, -1)
            columns = self._read(int(b[first]), kind.num_columns, kind, kind.is_transposed[1], operands)
            product = (kind.sign * (rows @ columns.T)).astype(dtype)
            sums = _by_register(product)
            if adds[first]:
                sums = sums + before[chosen].view(dtype)
            values[chosen] = sums.view(np.uint32)
            self._operands.append(operands)
        self._pending[registers] = _Pending(values, np.where(active, self.committed + 1, group_before))

    def commit(self, mask: Array | None) -> None:
        self.committed += self.threads.mask(mask)

    def wait(self, num_allowed: int, mask: Array | None) -> Mapping[int, tuple[Array, Array]]:
        """Return the registers that arrive: their values, and the threads that they reach."""
        waits, last = self.threads.mask(mask), self.committed - num_allowed
        unread = []
        for operands in self._operands:
            if waits[operands.thread] and operands.group <= last[operands.thread]:
                self._check_unchanged(operands)
            else:
                unread.append(operands)
        self._operands = unread
        arrived = {}
        for registers, pending in list(self._pending.items()):
            is_done = waits & (pending.group > 0) & (pending.group <= last)
            if is_done.any():
                for place, number in enumerate(registers):
                    arrived[number] = np.ascontiguousarray(pending.values[:, place]), is_done
                pending.group = np.where(is_done, 0, pending.group)
                if not pending.group.any():
                    del self._pending[registers]
        return arrived

    def _check_unchanged(self, operands: _Operands) -> None:
        for vectors, data in operands.read:
            if (self.shared.rows(_VECTOR)[vectors] != data).any():
                self.context.fault("operand of wgmma overwritten before it was waited for", operands.site, "")

    def arrived(self, registers: Mapping[int, tuple[Array, Array]], number: int, held: Array) -> Array:
        """Return what a register holds after a wait."""
        if number not in registers:
            return held
        value, is_done = registers[number]
        return np.where(is_done, value, held)

    def check_copied(self, number: int, site: int) -> None:
        """Report a move of an accumulator that has not been waited for."""
        if any(number in registers for registers in self._pending):
            self.context.fault("copy of an accumulator in flight", site, "")

    def _read(self, descriptor: int, num_rows: int, kind: WgmmaKind, is_transposed: bool, operands: _Operands) -> Array:
        """Return the rows, [rows, depth], that a descriptor names."""
        item = _ITEM_BYTES[kind.item]
        address, vectors = _operand_places(descriptor, num_rows, kind.depth, item, is_transposed)
        if address.min() < SHARED_BASE or address.max() + item > SHARED_BASE + self.shared.used:
            detail = f"wgmma reads byte {int(address.max()) + item - SHARED_BASE} of {self.shared.used}"
            self.context.fault("out of bounds shared access", operands.site, detail)
            address = np.clip(address, SHARED_BASE, SHARED_BASE + self.shared.used - item) // item * item
            vectors = np.unique(address // _VECTOR)
        start = self.shared.start_of(operands.thread)
        self._check_read(vectors + start // _VECTOR, operands)
        data = np.ascontiguousarray(self.shared.data.view(f"u{item}")[(address + start) // item])
        return numbers(data.view(np.uint32), kind.item).reshape(num_rows, kind.depth)

    def _check_read(self, vectors: Array, operands: _Operands) -> None:
        """Check that the bytes of an operand are there, and note that all warps of the group read them."""
        operands.read.append((vectors, self.shared.rows(_VECTOR)[vectors]))
        site, time = operands.site, int(self.threads.time[operands.thread])
        written = self.shared.shadow.written.reshape(-1, _VECTOR)[vectors]
        if (written == PENDING).any():
            self.context.fault("read of a copy that was not waited for", site, "by wgmma")
        if (written == NOBODY).any():
            self.context.fault("read of shared memory that nobody wrote", site, "by wgmma")
        is_new = (written >> EPOCH_SHIFT == time >> EPOCH_SHIFT) & (written & WARP_MASK != BY_ATOMIC)
        if is_new.any() and self.threads.per_cta > WARP_SIZE:
            warp = int(written[is_new][0]) & WARP_MASK
            self.context.fault("race: read after write", site, f"by wgmma after warp {warp}", int(is_new.sum()))
        if self.shared.unfenced.reshape(-1, _VECTOR)[vectors].any():
            self.context.fault("wgmma reads what was written without a proxy fence", site, "")
        self.shared.shadow.read.reshape(-1, _VECTOR)[vectors] = time | SEVERAL_WARPS


def _by_register(product: Array) -> Array:
    """Return 64 rows of sums as [128 threads, registers]."""
    num_columns = product.shape[1]
    return product.reshape(4, 2, 8, num_columns // 8, 4, 2).transpose(0, 2, 4, 3, 1, 5).reshape(_GROUP_SIZE, -1)


@cache
def _operand_places(descriptor: int, num_rows: int, depth: int, item: int, is_transposed: bool) -> tuple[Array, Array]:
    """Return the address of each number of an operand, [rows, depth], and its vectors, by their addresses over 16.

    Core matrices have rows of 16 bytes, so that each vector is read as a whole.
    """
    start = (descriptor & 0x3FFF) << 4
    leading = (descriptor >> 16 & 0x3FFF) << 4
    stride = (descriptor >> 32 & 0x3FFF) << 4
    if descriptor >> 49 & 7:
        raise NotModelledError("a wgmma descriptor with a base offset")
    span = _SPANS[descriptor >> 62]
    row, column = np.arange(num_rows)[:, None], np.arange(depth)[None, :]
    if not is_transposed and span:
        if depth * item > span:
            raise NotModelledError("a wgmma operand wider than its swizzle")
        offset = row // _CORE_ROWS * stride + row % _CORE_ROWS * span + column * item
    elif not is_transposed:
        vector, byte = np.divmod(column * item, _VECTOR)
        offset = row // _CORE_ROWS * stride + row % _CORE_ROWS * _VECTOR + vector * leading + byte
    elif span:
        per_span = span // item
        offset = row % per_span * item + row // per_span * leading
        offset = offset + column % _CORE_ROWS * span + column // _CORE_ROWS * stride
    else:
        per_vector = _VECTOR // item
        offset = row % per_vector * item + row // per_vector * stride
        offset = offset + column % _CORE_ROWS * _VECTOR + column // _CORE_ROWS * leading
    linear = start + offset
    address = linear ^ (linear >> 3 & SWIZZLE[span])
    return address, np.unique(address // _VECTOR)
