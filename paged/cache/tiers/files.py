"""File tier of the prefix cache: blocks of the host tier in a folder, which outlive the process."""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from threading import Condition, Thread
from time import monotonic
from typing import NamedTuple

from paged.cache.tiers.block_file import BlockFileError, BlockKey, StoredBlock, decode
from paged.cache.tiers.block_store import BlockStore

_LOG = logging.getLogger("paged")

# How much later a prompt's first token may come because of files.
PATIENCE_S = 0.05
# Prompt tokens that a forward runs in a second, at least: those of an 8B model on a GPU. Where steps are slower, a wait
# that trusts their rate is too long: behind hits they run few tokens each, and one of a busy machine tells little.
_LEAST_PREFILL_RATE = 8_000.0
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


def longest_wait_s(num_tokens: int, prefill_rate: float) -> float:
    """Return how long a prompt waits until `num_tokens` of it have come from files.

    A forward computes them in `num_tokens / prefill_rate` seconds. A prompt that waits as long, and PATIENCE_S, and
    then computes the rest, has its first token at most PATIENCE_S later than a prompt that begins cold.
    """
    return PATIENCE_S + num_tokens / prefill_rate


class FileRead:
    """Blocks that a prompt continues with, on their way from files.

    positions: to read, in this order. digest: of the weights and the layout. blocks: those that have come so far.
    num_positions: how many positions they are of.
    is_over: whether no more blocks come, because all are there or the files are too slow.
    """

    def __init__(self, tier: FileTier, positions: Sequence[Position], digest: bytes) -> None:
        self.positions, self.digest = positions, digest
        self.blocks: list[StoredBlock] = []
        self.num_positions = 0
        self.is_over = not positions
        self._tier = tier

    def wait(self, timeout_s: float = math.inf) -> bool:
        """Wait until a prompt should begin with the blocks that are there; False if that is later than `timeout_s`."""
        return self._tier.wait(self, timeout_s)


class FileTier:
    """Reads and writes blocks of a folder in two threads of its own.

    No fault of the folder goes further than here: it is a miss, a line in the log and a count in `num_faults`. Reads
    run one after the other. One that takes longer than `longest_wait_s` is given up with all that wait behind it. Until
    the folder has answered, further ones are given up at once.

    prefill_rate: prompt tokens that a forward runs in a second; the highest that was measured, at least 8,000.
    num_read, num_written: blocks. num_late: reads that were given up. num_dropped: blocks that were not written because
    too many waited, their memory was used again, or the limit of the folder is too small.
    """

    def __init__(
        self, store: BlockStore, layout: str, block_size: int, num_bytes: Sequence[int], is_needed: Sequence[bool]
    ) -> None:
        """layout: all that decides what the bytes of a block mean.

        num_bytes, is_needed: for each table, the bytes of a block, and whether the table has no window. States of
        recurrent layers, which few positions have, are behind the tables.
        """
        self.store = store
        self.num_read = self.num_written = self.num_faults = self.num_late = self.num_dropped = 0
        self.digest = b""
        self.prefill_rate = _LEAST_PREFILL_RATE
        self._layout, self._num_bytes, self._is_needed = layout, num_bytes, is_needed
        self._block_size = block_size
        self._changed = Condition()
        self._current: FileRead | None = None
        self._begun_at = 0.0  # the first read that is not over
        self._reads: deque[FileRead] = deque()
        self._writes: deque[Write] = deque()
        self._is_writing = self._is_closed = False
        self._pid = 0
        self.identify(b"")

    def identify(self, fingerprint: bytes) -> None:
        """Use files of these weights from now on."""
        self.digest = hashlib.sha256(self._layout.encode() + b"\0" + fingerprint).digest()

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Record how long a step with so many prompt tokens took."""
        self.prefill_rate = max(self.prefill_rate, num_tokens / seconds)

    def read(self, positions: Sequence[Position]) -> FileRead:
        """Begin to read the longest run of positions that the folder has."""
        read = FileRead(self, positions, self.digest)
        if not self._is_running():
            read.is_over = True
        if read.is_over:
            return read
        with self._changed:
            if self._current is not None and self._current.is_over:  # given up, and still not answered
                read.is_over = True
                self.num_late += 1
            else:
                if self._current is None and not self._reads:
                    self._begun_at = monotonic()
                self._reads.append(read)
                self._changed.notify_all()
        return read

    def wait(self, read: FileRead, timeout_s: float) -> bool:
        """`FileRead.wait`."""
        end = monotonic() + timeout_s
        with self._changed:
            while not read.is_over:
                remaining_s = min(end - monotonic(), self._give_up_late())
                if read.is_over or remaining_s <= 0:
                    break
                self._changed.wait(remaining_s)
            return read.is_over

    def take(self, read: FileRead) -> list[StoredBlock]:
        """Return the blocks of a read that have come, and expect no more of it; none if the weights have changed."""
        with self._changed:
            read.is_over = True
            return list(read.blocks) if read.digest == self.digest else []

    def _give_up_late(self) -> float:
        """Give all reads up if the first of them takes too long; return the seconds until then."""
        first = self._current or self._reads[0]
        num_tokens = first.num_positions * self._block_size
        allowed_s = longest_wait_s(num_tokens, self.prefill_rate)
        remaining_s = self._begun_at + allowed_s - monotonic()
        if remaining_s <= 0:
            _LOG.warning("%s: too slow, computing the rest", self.store)
            late = {first, *self._reads}
            self.num_late += len(late)
            for read in late:
                read.is_over = True
            self._reads.clear()
        return remaining_s

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
            for read in self._reads:
                read.is_over = True
            self._reads.clear()
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
            try:
                for target in (self._read_files, self._write_blocks):
                    Thread(target=target, name="paged-cache-folder", daemon=True).start()
            except BaseException as error:
                self._is_closed = True  # one of them would wait for ever for the other's work
                if not isinstance(error, RuntimeError):  # which tells that the system has no more threads
                    raise
                self._count_fault(error)
                return False
        return self._pid == os.getpid()

    def _read_files(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._reads or self._is_closed)
                if not self._reads:
                    return
                read = self._current = self._reads.popleft()
                self._begun_at = monotonic()
            try:
                self._run(read)
            except Exception as error:  # also of others' code
                self._count_fault(error)
            finally:
                with self._changed:
                    read.is_over = True
                    self._current = None
                    self._changed.notify_all()

    def _run(self, read: FileRead) -> None:
        """Read position by position, until one lacks a block that it needs."""
        for position in read.positions:
            row: list[StoredBlock] = []
            for column, is_needed in enumerate(self._is_needed):
                block = self._read_block(BlockKey(read.digest, position.hash, column), position)
                if block is not None:
                    row.append(block)
                elif is_needed or column == 0:
                    return
            with self._changed:
                if read.is_over:
                    return
                read.blocks += row
                read.num_positions += 1
                self.num_read += len(row)

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
        if len(block.data) != self._num_bytes[key.column]:
            raise BlockFileError(f"{key.name}: {len(block.data)} bytes, expected {self._num_bytes[key.column]}")
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
