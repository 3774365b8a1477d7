"""Launches of numba kernels on PyTorch's threads; this file does not import numba."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from .recording import recording

# Elements or multiplications that are worth a thread: starting and joining two threads takes 5 us.
_WORK_OF_A_THREAD = 16384
SCRATCH = "scratch"
# PyTorch loads its OpenMP for the whole process, so numba kernels share its threads; otherwise both would compete.
_run_in_parallel: Any = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
if _run_in_parallel is not None:
    _run_in_parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    _run_in_parallel.restype = None


class LoopLaunch:
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
        before: LoopLaunch | None = None,
    ) -> None:
        """Keep the kernel and its fixed arguments.

        Args:
            address: of the kernel's code.
            work: number of multiplications or elements, or a function that counts them from the tensors before each
                run.
            arguments: numbers, names of tensors whose addresses are passed, or `SCRATCH`.
            scratch_size: float32 elements of scratch memory for each thread.
            before: launch that runs first, with the same tensors.
        """
        self._before = before
        self._address = address
        self._work = work
        self._scratch_size = scratch_size
        self._values = array("q", [0, *(0 if isinstance(value, str) else value for value in arguments)])
        self._positions = [(at, name) for at, name in enumerate(arguments, 1) if isinstance(name, str)]

    def __call__(self, tensors: Mapping[str, Any]) -> int:
        """Run and return the status: 0 unless the kernel sets it; another status ends the repetition of a recording."""
        if self._before is not None:
            self._before(tensors)
        if (current := recording()) is None:
            return self._run(tensors)
        current.add(partial(self._run, tensors))
        return current.read(lambda: self._run(tensors))

    def _run(self, tensors: Mapping[str, Any]) -> int:
        work = self._work(tensors) if callable(self._work) else self._work
        threads = min(torch.get_num_threads(), max(1, work // _WORK_OF_A_THREAD))
        values = self._values[:]
        scratch = torch.empty(threads * self._scratch_size) if self._scratch_size else None
        for at, name in self._positions:
            tensor = scratch if name == SCRATCH else tensors[name]
            if tensor is not None:
                values[at] = tensor.data_ptr()
        _run_in_parallel(self._address, values.buffer_info()[0], threads, 0)
        return values[0]
