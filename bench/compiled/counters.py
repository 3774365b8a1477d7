"""Counts of what compiled kernels do: sectors of global memory, wavefronts of shared memory, instructions.

A request is one instruction of one warp. Sectors have 32 bytes; the least are as many as the distinct bytes of a
request fill. A wavefront serves 32 banks of 4 bytes; without conflicts a request takes one for every 128 bytes.

Triton splits a load of more than 16 bytes a thread into several instructions, each of which touches a part of every
sector. The L1 cache serves all but the first, so sectors are also counted as an SM fetches them from the L2 cache: once
for each CTA and Python line. Copies that bypass the L1 cache (cp.async.cg and TMA) fetch their sectors each time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from paged.bench.compiled.numerics import Array
from paged.bench.compiled.ptx import Instruction, Kernel
from paged.bench.compiled.threads import WARP_SIZE, Threads

_SECTOR_BYTES = 32
_WAVEFRONT_BYTES = 128
_NUM_BANKS = 32
_MATRIX = ("mma", "wgmma")
_BYPASSES = ("cg", "volatile")
_MEMORY = ("ld", "st", "atom", "red", "cp", "ldmatrix", "stmatrix")


@dataclass
class Requests:
    """Requests of one line: how many sectors or wavefronts they took, and how many they need at least.

    fetched: sectors that come from the L2 cache. needed: sectors that the distinct bytes of a CTA fill. Only for loads.
    """

    count: int = 0
    taken: int = 0
    least: int = 0
    fetched: int = 0
    needed: int = 0

    def add(self, count: int, taken: int, least: int) -> None:
        self.count += count
        self.taken += taken
        self.least += least

    @property
    def ratio(self) -> float:
        return self.taken / max(self.least, 1)

    @property
    def fetched_ratio(self) -> float:
        return self.fetched / max(self.needed, 1)


@dataclass
class _Reads:
    """Sectors and accesses by size of one line in a launch. A number holds a CTA and a place in memory."""

    sectors: list[Array] = field(default_factory=list)
    accesses: dict[int, list[Array]] = field(default_factory=dict)


@dataclass
class Counters:
    """Counts of all launches of a kernel.

    loads, stores: of global memory, by instruction. shared: of shared memory. instructions: name -> warps that ran it.
    flops: multiplications and additions of matrix instructions. barriers: of all CTAs.
    """

    launches: int = 0
    ctas: int = 0
    loads: dict[str, Requests] = field(default_factory=dict)
    stores: dict[str, Requests] = field(default_factory=dict)
    shared: dict[str, Requests] = field(default_factory=dict)
    instructions: Counter[str] = field(default_factory=Counter)
    flops: int = 0
    barriers: int = 0
    _sites: list[Instruction] = field(default_factory=list)
    _blocks: list[Counter[str]] = field(default_factory=list)
    _flops: list[int] = field(default_factory=list)
    _reads: dict[str, _Reads] = field(default_factory=dict)

    def begin_launch(self, kernel: Kernel, num_ctas: int) -> None:
        self.launches += 1
        self.ctas += num_ctas
        self._sites = kernel.instructions()
        self._blocks = []
        self._flops = []
        for block in kernel.blocks:
            self._blocks.append(Counter(_kind(i) for i in block.instructions))
            self._flops.append(sum(map(_flops, block.instructions)))

    def end_launch(self) -> None:
        """Count what the CTAs have fetched."""
        for line, reads in self._reads.items():
            requests = self.loads[line]
            if reads.sectors:
                requests.fetched += len(np.unique(np.concatenate(reads.sectors)))
            for size, accesses in reads.accesses.items():
                ctas = np.unique(np.concatenate(accesses)) >> _PLACE_BITS
                _, per_cta = np.unique(ctas, return_counts=True)
                requests.needed += _num_sectors(per_cta, size)
        self._reads.clear()

    def note_block(self, block: int, threads: Threads, mask: Array | None) -> None:
        """Count the instructions of a block for each warp that runs it."""
        num_warps = int(threads.mask(mask).reshape(-1, WARP_SIZE).any(1).sum())
        for name, count in self._blocks[block].items():
            self.instructions[name] += count * num_warps
        self.flops += self._flops[block] * num_warps
        self.barriers += self._blocks[block]["barrier"] * num_warps * WARP_SIZE // threads.per_cta

    def note_global(self, site: int, threads: Threads, address: Array, size: int, mask: Array | None) -> None:
        lanes = np.flatnonzero(threads.mask(mask))
        if not len(lanes):
            return
        warp, first = lanes // WARP_SIZE, address[lanes].astype(np.int64)
        sectors = []
        for offset in range(0, size, min(size, _SECTOR_BYTES)):
            sectors.append(_pairs(warp, (first + offset) // _SECTOR_BYTES))
        touched = np.unique(np.concatenate(sectors))
        # Distinct accesses of a warp, each of `size` bytes.
        accesses = np.unique(_pairs(warp, first // size))
        _, per_warp = np.unique(accesses >> _PLACE_BITS, return_counts=True)
        least = _num_sectors(per_warp, size)
        instruction = self._sites[site]
        if instruction.op == "st":
            self.stores.setdefault(instruction.source, Requests()).add(len(per_warp), len(touched), least)
            return
        requests = self.loads.setdefault(instruction.source, Requests())
        requests.add(len(per_warp), len(touched), least)
        reads = self._reads.setdefault(instruction.source, _Reads())
        cta_of_warp = threads.cta_number[::WARP_SIZE]
        if any(part in instruction.parts for part in _BYPASSES):
            requests.fetched += len(touched)
        else:
            reads.sectors.append(_in_ctas(touched, cta_of_warp))
        reads.accesses.setdefault(size, []).append(_in_ctas(accesses, cta_of_warp))

    def note_box(self, site: int, sources: Array, item: int) -> None:
        """Count a copy of a box as one request."""
        first = np.unique(sources.astype(np.int64))
        taken = len(np.unique(first // _SECTOR_BYTES))
        least = -(-len(first) * item // _SECTOR_BYTES)
        requests = self.loads.setdefault(self._sites[site].source, Requests())
        requests.add(1, taken, least)
        requests.fetched += taken
        requests.needed += least

    def note_shared(self, site: int, threads: Threads, address: Array, size: int, mask: Array | None) -> None:
        lanes = np.flatnonzero(threads.mask(mask))
        if not len(lanes):
            return
        # Vectors of 8 bytes are served for half a warp at once, vectors of 16 bytes for a quarter.
        at_once = min(WARP_SIZE, _WAVEFRONT_BYTES // max(size, 4))
        self._add_shared(site, lanes // at_once, address[lanes].astype(np.int64), size, lanes // WARP_SIZE)

    def note_matrices(self, site: int, address: Array, at_once: int) -> None:
        """Count the rows of matrices, 16 bytes each, of which `at_once` are served together."""
        group = np.arange(len(address)) // at_once
        self._add_shared(site, group, address.astype(np.int64), 16, group)

    def _add_shared(self, site: int, group: Array, first: Array, size: int, request: Array) -> None:
        words = []
        for offset in range(0, max(size, 4), 4):
            words.append(_pairs(group, (first + offset) // 4))
        distinct = np.unique(np.concatenate(words))
        bank = (distinct >> _PLACE_BITS) * _NUM_BANKS + distinct % _NUM_BANKS
        banks, per_bank = np.unique(bank, return_counts=True)
        groups, place = np.unique(banks // _NUM_BANKS, return_inverse=True)
        wavefronts = np.zeros(len(groups), np.int64)
        np.maximum.at(wavefronts, place, per_bank)
        requests = self.shared.setdefault(self._sites[site].source, Requests())
        requests.add(len(np.unique(request)), int(wavefronts.sum()), len(groups))


_PLACE_BITS = 48


def _num_sectors(counts: Array, size: int) -> int:
    """Return the sectors that groups of so many accesses of `size` bytes fill."""
    return int((-(-counts * size // _SECTOR_BYTES)).sum())


def _in_ctas(pairs: Array, cta_of_warp: Array) -> Array:
    """Return pairs of a warp and a place as pairs of the warp's CTA and the place."""
    places = pairs & ((1 << _PLACE_BITS) - 1)
    return np.unique(_pairs(cta_of_warp[pairs >> _PLACE_BITS], places))


def _pairs(group: Array, place: Array) -> Array:
    """Return a group and a place in one number each."""
    return (group.astype(np.int64) << _PLACE_BITS) | place


def _kind(i: Instruction) -> str:
    """Return what an instruction counts as."""
    if i.op in _MATRIX:
        if i.parts[1] in ("fence", "commit_group", "wait_group"):
            return "wait"
        return "matrix"
    if i.op in ("bar", "barrier") and i.parts[1] != "warp":
        return "barrier"
    if i.op in _MEMORY:
        if i.parts[:2] == ["ld", "param"]:
            return "move"
        if "commit_group" in i.parts or "wait_group" in i.parts:
            return "wait"
        return "memory"
    if i.op in ("mov", "cvta", "bra", "ret"):
        return "move"
    if i.op == "cvt":
        return "convert"
    if i.op in ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh"):
        return "special"
    if i.op in ("shfl", "redux", "vote", "elect"):
        return "exchange"
    if i.type.startswith(("f", "bf")):
        return "float"
    return "integer"


def _flops(i: Instruction) -> int:
    """Return the operations of a matrix instruction of one warp; wgmma is shared by four."""
    if i.op == "mma":
        rows_columns, _, depth = i.parts[3].partition("k")
        rows, _, columns = rows_columns.removeprefix("m").partition("n")
        return 2 * int(rows) * int(columns) * int(depth)
    if i.parts[:2] == ["wgmma", "mma_async"]:
        columns, _, depth = i.parts[4].removeprefix("m64n").partition("k")
        return 2 * 16 * int(columns) * int(depth)
    return 0
