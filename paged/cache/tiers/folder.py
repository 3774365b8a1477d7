"""A cache folder: files of blocks that several processes write and read, within a limit of bytes."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from paged.cache.tiers.block_file import SUFFIX
from paged.cache.tiers.block_store import BlockStore

_LOCK_NAME = ".lock"
_PART_SUFFIX = ".part"
# A file that is still being written after an hour is of a process that has ended.
_ABANDONED_S = 3600.0
# Of the limit: what remains after a clean-up, so that not every write needs one.
_KEPT_FRACTION = 0.9


class CacheFile(NamedTuple):
    """A file in the folder: its path, its bytes, and the seconds since the epoch when it was last used."""

    path: Path
    num_bytes: int
    used_at: float


class CacheFolder(BlockStore):
    """Reads and writes blocks in a folder. Methods raise OSError where the file system does.

    Files are written under a temporary name and renamed, so that no process sees half a file. With a limit, a lock
    file holds the sum of their bytes: a process counts a file there before it writes it. The least recently used files
    of all models go first.
    """

    def __init__(self, path: Path, limit_bytes: int | None) -> None:
        """limit_bytes: of all files together; None for no limit. The folder is made if there is none."""
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = path
        self.limit_bytes = limit_bytes
        self._numbers = itertools.count()

    def __str__(self) -> str:
        return f"cache folder {self.path}"

    def lookup(self, names: Sequence[str]) -> int:
        count = 0
        while count < len(names) and (self.path / names[count]).exists():
            count += 1
        return count

    def load(self, name: str) -> bytes | None:
        path = self.path / name
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        with contextlib.suppress(OSError):  # another process may have removed it
            os.utime(path)
        return content

    def remove(self, name: str) -> bool:
        (self.path / name).unlink(missing_ok=True)
        return True

    def complete(self) -> None:
        """Do nothing: a file is there for others as soon as it has its name."""

    def store(self, name: str, content: bytes) -> bool:
        """Write a file unless it exists; False if it is larger than the limit."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if self.limit_bytes is None:
            self._write(path, content)
            return True
        if len(content) > self.limit_bytes:
            return False
        with self._locked() as lock:  # to the end, so that a clean-up finds all files that are counted
            if path.exists():
                return True
            self._reserve(lock, len(content), self.limit_bytes)
            self._write(path, content)
        return True

    def _write(self, path: Path, content: bytes) -> None:
        part = path.with_name(f"{path.name}.{os.getpid()}.{next(self._numbers)}{_PART_SUFFIX}")
        try:
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(content)
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def files(self) -> list[CacheFile]:
        """Return all files of blocks, those that are being written included, least recently used first."""
        files = []
        for path in self.path.glob("*/*"):
            if path.suffix in (SUFFIX, _PART_SUFFIX):
                with contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    files.append(CacheFile(path, status.st_size, status.st_mtime))
        return sorted(files, key=lambda file: file.used_at)

    def _reserve(self, lock: int, num_bytes: int, limit: int) -> None:
        """Count the bytes of a new file, and remove others if there are too many."""
        text = os.pread(lock, 32, 0)
        total = int(text) if text.isdigit() else limit  # unknown: look
        if total + num_bytes > limit:
            total = self._clean_up(max(0, int(limit * _KEPT_FRACTION) - num_bytes))
        os.pwrite(lock, b"%032d" % (total + num_bytes), 0)

    def _clean_up(self, num_kept_bytes: int) -> int:
        """Remove files until at most so many bytes remain; return how many do."""
        files = self.files()
        total = sum(file.num_bytes for file in files)
        now = time.time()
        for file in files:
            is_part = file.path.suffix == _PART_SUFFIX
            is_abandoned = is_part and now - file.used_at > _ABANDONED_S
            is_surplus = not is_part and total > num_kept_bytes
            if is_abandoned or is_surplus:
                file.path.unlink(missing_ok=True)
                total -= file.num_bytes
        return total

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """Hold the folder's lock, and yield the lock file."""
        import fcntl  # which systems without fork lack

        lock = os.open(self.path / _LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield lock
        finally:
            os.close(lock)
