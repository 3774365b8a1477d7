"""The files that a load reads: contents of text files, and stamps of large files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from paged.errors import CheckpointError

# Bytes of the pieces in which threads hash a file: so many that a thread hashes a piece for milliseconds. Each thread
# holds one piece in memory.
_PIECE_BYTES = 4 << 20

Stamp = tuple[int, ...]


@dataclass
class FilesRead:
    """The files that a load has read, in the order of reading.

    Every reader of `checkpoint_files` and `tensor_file` notes its files. So their digest covers all files
    that a family or a format reads.

    texts: name and SHA-256 of each text file. files: path and stamp of each large file.
    """

    texts: list[tuple[str, str]] = field(default_factory=list)
    files: list[tuple[Path, Stamp]] = field(default_factory=list)

    def digest(self, tick: Callable[[], object] = lambda: None) -> bytes:
        """Return a hash of every byte of all files, and of their names; large files are read again.

        tick: called after every 4 MiB.

        Raises:
            CheckpointError: a large file has changed since it was opened, or cannot be read.
        """
        digest = hashlib.sha256(repr(self.texts).encode())
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            for file, stamp in self.files:
                digest.update(f"{file.name}\0".encode() + _file_digest(file, stamp, threads, tick))
        return digest.digest()


_READS: ContextVar[FilesRead | None] = ContextVar("_READS", default=None)


@contextmanager
def noting_reads() -> Iterator[FilesRead]:
    """Note the files that this thread reads."""
    reads = FilesRead()
    token = _READS.set(reads)
    try:
        yield reads
    finally:
        _READS.reset(token)


def note_text(file: Path, data: bytes) -> None:
    """Note a text file and its contents."""
    reads = _READS.get()
    if reads is not None:
        reads.texts.append((file.name, hashlib.sha256(data).hexdigest()))


def note_file(file: Path, stamp: Stamp) -> None:
    """Note an open large file; the same file with the same stamp is noted once."""
    reads = _READS.get()
    if reads is not None and (file, stamp) not in reads.files:
        reads.files.append((file, stamp))


def stamp_of(status: os.stat_result) -> Stamp:
    """Return values of a file's status that change when the file does."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _file_digest(file: Path, stamp: Stamp, threads: ThreadPoolExecutor, tick: Callable[[], object]) -> bytes:
    """Return the SHA-256 over the SHA-256 of all pieces of a file; threads read and hash the pieces."""
    try:
        with file.open("rb", buffering=0) as opened:
            size = os.fstat(opened.fileno()).st_size
            digest = hashlib.sha256(size.to_bytes(8, "little"))
            for of_piece in threads.map(partial(_piece_digest, opened.fileno()), range(0, size, _PIECE_BYTES)):
                digest.update(of_piece)
                tick()
            if stamp_of(os.fstat(opened.fileno())) != stamp:
                raise CheckpointError(f"{file}: the file changed after it was loaded")
    except OSError as error:
        raise CheckpointError(f"{file}: unreadable ({error})") from error
    return digest.digest()


def _piece_digest(file: int, start: int) -> bytes:
    digest, end = hashlib.sha256(), start + _PIECE_BYTES
    while start < end and (data := os.pread(file, end - start, start)):
        digest.update(data)
        start += len(data)
    return digest.digest()
