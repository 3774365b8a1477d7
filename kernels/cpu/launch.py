"""Launch numba kernels on PyTorch's threads. This file does not import numba."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .recording import recording

# Least work of a thread, in elements or multiplications. To wake and join two threads takes 5 us.
_WORK_OF_A_THREAD = 16384
SCRATCH = "scratch"
# PyTorch loads its OpenMP library for the whole process. numba kernels use its threads, because threads of their own
# would compete for the cores.
_libraries = ctypes.CDLL(None)
_run_in_parallel: Any = getattr(_libraries, "GOMP_parallel", None)
if _run_in_parallel is not None:
    _run_in_parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    _run_in_parallel.restype = None
# Sets the number of threads for parallel regions of the calling thread alone. torch.set_num_threads would also change
# it permanently for threads that first use torch meanwhile.
_set_own_threads: Any = getattr(_libraries, "omp_set_num_threads", torch.set_num_threads)


@contextmanager
def one_thread() -> Iterator[None]:
    """Let PyTorch's operations and numba kernels inside run on the calling thread alone."""
    num_threads = torch.get_num_threads()
    _set_own_threads(1)
    try:
        yield
    finally:
        _set_own_threads(num_threads)


class NumbaLaunch:
    """One numba kernel, run again and again with tensors that differ only in their addresses, as `Launch` for Triton.

    The kernel takes an int64 array: a status, which it may set, then its arguments.
    """

    def __init__(
        self,
        address: int,
        work: int | Callable[[Mapping[str, Any]], int],
        arguments: Sequence[int | str],
        *,
        scratch_size: int = 0,
        before: NumbaLaunch | None = None,
    ) -> None:
        """Keep the kernel and its fixed arguments.

        Args:
            address: of the kernel's code.
            work: number of multiplications or elements, or a function that counts them from the tensors before each
                run; 0 for a kernel of one thread.
            arguments: numbers, names of tensors whose addresses are passed, or `SCRATCH`.
            scratch_size: float32 elements of scratch memory for each thread.
            before: launch that runs first, with the same tensors.
        """
        self._before = before
        self.address = address
        self._work = work
        self.scratch_size = scratch_size
        self._values = array("q", [0, *(0 if isinstance(value, str) else value for value in arguments)])
        self._positions = [(at, name) for at, name in enumerate(arguments, 1) if isinstance(name, str)]

    def __call__(self, tensors: Mapping[str, Any]) -> int:
        """Run and return the status: 0 unless the kernel sets it. Another status ends the repetition of a recording."""
        if self._before is not None:
            self._before(tensors)
        if (current := recording()) is None:
            return self._run(tensors)
        sequence = current.last
        if not isinstance(sequence, LaunchSequence):
            sequence = LaunchSequence()
            current.add(sequence)
        operands = [tensor for tensor in tensors.values() if isinstance(tensor, torch.Tensor)]
        sequence.append(self, self.values(tensors), current.lasting(operands))
        return current.read(lambda: self._run(tensors))

    def _run(self, tensors: Mapping[str, Any]) -> int:
        work = self._work(tensors) if callable(self._work) else self._work
        # Use one thread or all. With a number in between, libgomp would end threads and start them again later. See
        # docs/performance.md.
        threads = 1 if _is_small(work) else torch.get_num_threads()
        values = self.values(tensors)
        if self.scratch_size:
            scratch = torch.empty(threads * self.scratch_size)
            self.set_scratch(values, scratch)
        _run_in_parallel(self.address, values.buffer_info()[0], threads, 0)
        return values[0]

    @property
    def is_serial(self) -> bool:
        """Whether one thread runs the kernel for these tensors."""
        return self._work == 0

    @property
    def is_small(self) -> bool:
        """Whether one thread always runs the kernel."""
        return not callable(self._work) and _is_small(self._work)

    def values(self, tensors: Mapping[str, Any]) -> array[int]:
        """Return the kernel's array: the status, then the arguments with the tensors' addresses."""
        values = self._values[:]
        for at, name in self._positions:
            if name != SCRATCH and tensors[name] is not None:
                values[at] = tensors[name].data_ptr()
        return values

    def set_scratch(self, values: array[int], scratch: torch.Tensor) -> None:
        """Write the address of scratch memory, `scratch_size` for each thread, into the kernel's arguments."""
        for at, name in self._positions:
            if name == SCRATCH:
                values[at] = scratch.data_ptr()


def _is_small(work: int) -> bool:
    return work < 2 * _WORK_OF_A_THREAD


class LaunchSequence:
    """Consecutive launches of a recording, run by one call from Python.

    The threads start once and meet after every launch. Tensors' addresses are read once. Six layers have 56 launches;
    from Python, starting each takes a seventh of their time.
    """

    def __init__(self) -> None:
        self._launches: list[tuple[NumbaLaunch, array[int]]] = []
        self._kept: list[torch.Tensor] = []
        self._most_threads = 0  # the number of threads that the table is filled for

    def append(self, launch: NumbaLaunch, values: array[int], kept: Sequence[torch.Tensor]) -> None:
        """Add a launch with its arguments, before the first run. kept: tensors whose addresses are arguments."""
        self._launches.append((launch, values))
        self._kept += kept

    def __call__(self) -> int:
        """Run the launches up to the first whose status is not 0, and return this status."""
        num_threads = torch.get_num_threads()
        if num_threads > self._most_threads:
            self._fill_table(num_threads)
        if self._is_small:
            num_threads = 1
        _run_in_parallel(self._address, self._arguments.buffer_info()[0], num_threads, 0)
        status = self._arguments[0]
        if status:
            self._most_threads = 0  # a new table clears the statuses
        return status

    def _fill_table(self, num_threads: int) -> None:
        """Fill the table that up to `num_threads` threads read."""
        from .sequence import run_sequence

        self._most_threads = num_threads
        self._is_small = all(launch.is_small for launch, _ in self._launches)
        self._scratch = torch.empty(num_threads * max(launch.scratch_size for launch, _ in self._launches))
        self._table = array("q")
        for launch, values in self._launches:
            values[0] = 0
            launch.set_scratch(values, self._scratch)
            self._table.extend((launch.address, values.buffer_info()[0], launch.is_serial))
        self._address = run_sequence.address
        self._arguments = array("q", (0, len(self._launches), self._table.buffer_info()[0]))
