"""File tier of the prefix cache: blocks of the host tier in a folder, which outlive the process."""

from __future__ import annotations

import hashlib
import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from threading import Condition, Thread
from time import monotonic
from typing import NamedTuple

from paged.cache.tiers.block_file import BlockFileError, BlockKey, StoredBlock, decode
from paged.cache.tiers.block_store import BlockStore

_LOG = logging.getLogger("paged")

# A prompt waits so much longer than a folder of the rate would take for what has come; the rest is computed. At 1 GB/s,
# an 8B model's K/V (131 kB a token) come at 7,600 tokens/s, about as fast as a GPU computes them.
PATIENCE_S = 0.05
_WORTHWHILE_RATE = 1e9
# Blocks that wait to be written; more are dropped.
_MOST_WAITING = 256


class Position(NamedTuple):
    """A position of a prompt: its chained hash, and its token ids."""

    hash: bytes
    token_ids: list[int]


class Write(NamedTuple):
    """A block to write. make: returns it, or None if its memory has been used again meanwhile."""

    key: BlockKey
    make: Callable[[], StoredBlock | None]


class _Job:
    """A run of positions to read: the blocks that have come so far, and whether anybody still waits for them."""

    def __init__(self, positions: Sequence[Position], digest: bytes) -> None:
        self.positions, self.digest = positions, digest
        self.blocks: list[StoredBlock] = []
        self.is_done = self.is_abandoned = False


class FileTier:
    """Reads and writes blocks of a folder in two threads of its own.

    No fault of the folder goes further than here: it is a miss, a line in the log and a count in `num_faults`. A read
    waits for PATIENCE_S, and longer only while blocks come at a worthwhile rate. While the folder has not answered an
    earlier read, others do not wait at all.

    num_read, num_written: blocks. num_late: reads that were given up. num_dropped: blocks that were not written because
    too many waited, their memory was used again, or the limit of the folder is too small.
    """

    def __init__(self, store: BlockStore, layout: str, num_block_bytes: int, is_needed: Sequence[bool]) -> None:
        """layout: all that decides what the bytes of a block mean. is_needed: whether each table has no window."""
        self.store = store
        self.num_read = self.num_written = self.num_faults = self.num_late = self.num_dropped = 0
        self.digest = b""
        self._layout, self._num_block_bytes, self._is_needed = layout, num_block_bytes, is_needed
        self._changed = Condition()
        self._job: _Job | None = None
        self._writes: deque[Write] = deque()
        self._is_writing = self._is_closed = False
        self._pid = 0
        self.identify(b"")

    def identify(self, fingerprint: bytes) -> None:
        """Use files of these weights from now on."""
        self.digest = hashlib.sha256(self._layout.encode() + b"\0" + fingerprint).digest()

    def read(self, positions: Sequence[Position]) -> list[StoredBlock]:
        """Return the blocks of the longest run of positions that the folder has, as far as they come in time."""
        if not positions or not self._is_running():
            return []
        with self._changed:
            if self._job is not None:  # given up by an earlier call, and still not answered
                self.num_late += 1
                return []
            job = self._job = _Job(positions, self.digest)
            self._changed.notify_all()
            begun = monotonic()
            while not job.is_done:
                allowed_s = PATIENCE_S + len(job.blocks) * self._num_block_bytes / _WORTHWHILE_RATE
                remaining_s = begun + allowed_s - monotonic()
                if remaining_s <= 0:
                    break
                self._changed.wait_for(lambda: job.is_done, remaining_s)
            job.is_abandoned = True
            if not job.is_done:
                self.num_late += 1
                _LOG.warning("%s: too slow, computing the rest", self.store)
            self.num_read += len(job.blocks)
            return list(job.blocks)

    def write(self, writes: Sequence[Write]) -> None:
        """Write blocks later; those that are too many are dropped."""
        if not writes or not self._is_running():
            return
        with self._changed:
            room = max(0, _MOST_WAITING - len(self._writes))
            self._writes += writes[:room]
            self.num_dropped += len(writes[room:])
            self._changed.notify_all()

    def close(self, writes: Sequence[Write], timeout_s: float) -> None:
        """Write these blocks in place of those that wait, at most for `timeout_s`, and use the folder no more."""
        if not self._is_running():
            return
        with self._changed:
            self._writes.clear()
            self._writes += writes
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._writes and not self._is_writing, timeout_s)
            if self._writes:
                _LOG.warning("%s: %d blocks dropped", self.store, len(self._writes))
            self.num_dropped += len(self._writes)
            self._writes.clear()
            self._is_closed = True
            self._changed.notify_all()
        if not self._is_writing:
            try:
                self.store.complete()
            except Exception as error:  # of others' code
                self._count_fault(error)

    def _is_running(self) -> bool:
        """Start the threads at the first use. A forked process has none of them, and uses no files."""
        if self._is_closed:
            return False
        if not self._pid:
            self._pid = os.getpid()
            for target in (self._read_jobs, self._write_blocks):
                Thread(target=target, name="paged-cache-folder", daemon=True).start()
        return self._pid == os.getpid()

    def _read_jobs(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._job is not None or self._is_closed)
                job = self._job
            if job is None:
                return
            try:
                self._run(job)
            except Exception as error:  # also of others' code
                self._count_fault(error)
            finally:
                with self._changed:
                    job.is_done = True
                    self._job = None
                    self._changed.notify_all()

    def _run(self, job: _Job) -> None:
        """Read position by position, until one lacks a block that it needs."""
        for position in job.positions:
            row: list[StoredBlock] = []
            for column, is_needed in enumerate(self._is_needed):
                block = self._read_block(BlockKey(job.digest, position.hash, column), position)
                if block is not None:
                    row.append(block)
                elif is_needed or column == 0:
                    return
            with self._changed:
                if job.is_abandoned:
                    return
                job.blocks += row

    def _read_block(self, key: BlockKey, position: Position) -> StoredBlock | None:
        content = self.store.load(key.name)
        if content is None:
            return None
        try:
            block = decode(content, key)
        except BlockFileError:
            self.store.remove(key.name)
            raise
        if block.token_ids != position.token_ids:
            raise BlockFileError(f"{key.name}: other token ids than the prompt's")
        if len(block.data) != self._num_block_bytes:
            raise BlockFileError(f"{key.name}: {len(block.data)} bytes, expected {self._num_block_bytes}")
        return block

    def _write_blocks(self) -> None:
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._writes or self._is_closed)
                if not self._writes:
                    return
                write = self._writes.popleft()
                self._is_writing = True
            try:
                if self.store.lookup([write.key.name]):
                    continue
                block = write.make()
                if block is not None and self.store.store(write.key.name, block.encode()):
                    self.num_written += 1
                else:
                    self.num_dropped += 1
            except Exception as error:  # also of others' code
                self._count_fault(error)

    def _count_fault(self, error: Exception) -> None:
        with self._changed:
            self.num_faults += 1
        _LOG.warning("%s: %s", self.store, error)


def layout_text(**parts: object) -> str:
    """Return all that decides what the bytes of a block mean, as one text that is the same in every process."""
    return "\n".join(f"{name}={parts[name]!r}" for name in sorted(parts))
