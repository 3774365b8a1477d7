"""CTAs that run together: all their threads in step, one basic block after the other.

Of the blocks that threads have reached, the first one runs, for all threads that are there. So a warp's threads that
took different branches meet again behind them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paged.bench.compiled import products
from paged.bench.compiled.context import Context
from paged.bench.compiled.copies import AsyncCopies
from paged.bench.compiled.errors import NotModelledError, StoppedError
from paged.bench.compiled.global_memory import GlobalAccess, GlobalMemory
from paged.bench.compiled.numerics import Array
from paged.bench.compiled.shared_memory import SharedMemory
from paged.bench.compiled.tensor_copies import TensorCopies, TensorMap
from paged.bench.compiled.threads import WARP_SIZE, Cta, Threads
from paged.bench.compiled.translate import Translation

_UNSET = 0xFFC0DEADFFC0DEAD  # what registers hold before they are written
_MAX_RUNS = 200_000  # of one block; more are an endless loop
_REDUCTIONS: dict[str, np.ufunc] = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and}
_REDUCTIONS |= {"or": np.bitwise_or, "xor": np.bitwise_xor}


@dataclass(frozen=True)
class Launched:
    """What the batches of one launch share. shared: bytes of shared memory of a CTA."""

    context: Context
    translation: Translation
    memory: GlobalMemory
    grid: Cta
    shared: int
    params: bytes
    maps: dict[int, TensorMap]


class Batch:
    """The CTAs that run together. The code of blocks calls its methods; `mask` tells the threads, None is all."""

    def __init__(self, launched: Launched, ctas: Sequence[Cta]) -> None:
        self._launched = launched
        self.context = launched.context
        kernel = launched.translation.kernel
        self.threads = Threads(ctas, kernel.num_threads, launched.grid)
        self.special = self.threads.special
        self.memory = GlobalAccess(self.context, self.threads, launched.memory, launched.translation.waits_for_grid)
        self.shared = SharedMemory(self.context, self.threads, launched.shared)
        self.copies = AsyncCopies(self.threads, self.memory, self.shared)
        self.tensors = TensorCopies(self.threads, self.memory, self.shared, launched.maps)
        self.groups = products.WarpgroupProducts(self.context, self.threads, self.shared)
        self._full: dict[tuple[str, bytes], Array] = {}

    def run(self) -> None:
        """Run until all threads have ended.

        Raises:
            StoppedError: a thread waits for ever.
        """
        translation = self._launched.translation
        registers = self._registers(translation.kernel.registers.values())
        num_blocks = len(translation.functions)
        num_runs = [0] * num_blocks
        block = 0  # of all threads
        places: Array | None = None  # or the block of each thread
        while True:
            mask = None
            if places is not None:
                block = int(places.min())
                is_here = places == block
                if is_here.all():
                    places = None
                else:
                    mask = is_here
            if block >= num_blocks:
                return
            num_runs[block] += 1
            if num_runs[block] > _MAX_RUNS:
                raise StoppedError("deadlock", f"a loop does not end, {translation.sources[block]}")
            translation.executed.add(block)
            if self.context.counters is not None:
                self.context.counters.note_block(block, self.threads, mask)
            following = translation.functions[block](registers, self, mask)
            block, places = self._after(following, block, places, mask)

    def _registers(self, sizes: Iterable[int]) -> list[Array]:
        registers: list[Array] = []
        for size in sizes:
            if size == 0:
                registers.append(np.zeros(self.threads.total, bool))
            else:
                registers.append(np.full(self.threads.total, _UNSET & ((1 << 8 * size) - 1), f"u{size}"))
        return registers

    def _after(
        self, following: int | tuple[Array, int, int], block: int, places: Array | None, mask: Array | None
    ) -> tuple[int, Array | None]:
        """Return the block that comes next for all threads, or the block of each."""
        if isinstance(following, int):
            if mask is None or places is None:
                return following, None
            return block, np.where(mask, following, places)
        condition, taken, otherwise = following
        if mask is not None and places is not None:
            return block, np.where(mask, np.where(condition, taken, otherwise), places)
        if condition.all():
            return taken, None
        if not condition.any():
            return otherwise, None
        return block, np.where(condition, taken, otherwise)

    # Values

    def full(self, value: Any) -> Array:
        """Return an array with a value for each thread."""
        key = value.dtype.str, value.tobytes()
        if key not in self._full:
            self._full[key] = np.full(self.threads.total, value)
        return self._full[key]

    def param(self, offset: int, kind: str) -> Array:
        return self.full(np.frombuffer(self._launched.params, kind, 1, offset)[0])

    fragment = staticmethod(products.fragment)
    accumulators = staticmethod(products.accumulators)
    element = staticmethod(products.element)

    def mma(self, a: Array, b: Array, sums: Array, mask: Array | None) -> Array:
        self.threads.first_lanes(mask)
        return products.mma(a, b, sums)

    def check_copied_accumulator(self, number: int, site: int) -> None:
        self.groups.check_copied(number, site)

    # Barriers

    def barrier(self, num_threads: int, mask: Array | None, site: int) -> None:
        if num_threads not in (0, self.threads.per_cta):
            raise NotModelledError(f"a barrier of {num_threads} of {self.threads.per_cta} threads")
        self.threads.pass_barrier(mask)

    # Other threads of a warp

    def _by_warp(self, values: Array) -> Array:
        return values.reshape(-1, WARP_SIZE)

    def shuffle(
        self, mode: str, a: Array, operand: Array, limits: Array, mask: Array | None, site: int
    ) -> tuple[Array, Array]:
        """Return what each thread reads of another one, and whether that one is in its segment."""
        lane = self.threads.lane
        offset, clamp = operand.astype(np.int64) & 31, limits.astype(np.int64)
        segment = clamp >> 8 & 31
        first = lane & segment
        last = first | (clamp & 31 & ~segment)
        if mode == "up":
            source = lane - offset
            is_inside = source >= last
        elif mode == "down":
            source = lane + offset
            is_inside = source <= last
        elif mode == "bfly":
            source = lane ^ offset
            is_inside = source <= last
        else:
            source = first | (offset & ~segment)
            is_inside = source <= last
        source = np.where(is_inside, source, lane) + np.arange(self.threads.total) - lane
        if mask is not None and not mask[source[mask]].all():
            self.context.fault("shuffle from a thread that is not active", site, "")
        return a[source], is_inside

    def reduce(self, operation: str, a: Array, mask: Array | None) -> Array:
        self.threads.first_lanes(mask)
        per_warp = _REDUCTIONS[operation].reduce(self._by_warp(a), axis=1, dtype=a.dtype)
        return np.repeat(per_warp, WARP_SIZE)

    def ballot(self, condition: Array, mask: Array | None) -> Array:
        votes = self._by_warp(condition & self.threads.mask(mask))
        bits = votes.astype(np.uint64) << np.arange(WARP_SIZE, dtype=np.uint64)
        return np.repeat(bits.sum(1).astype(np.uint32), WARP_SIZE)

    def elect(self, mask: Array | None) -> tuple[Array, Array]:
        """Return the lane of each warp's first active thread, and whether a thread is that one."""
        active = self._by_warp(self.threads.mask(mask))
        leader = np.repeat(active.argmax(1), WARP_SIZE)
        return leader.astype(np.uint32), (self.threads.lane == leader) & active.ravel()
