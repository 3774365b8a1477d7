"""A cache folder in which other things lie, and calls that hang: each is a miss, and all else goes on."""

import logging
import os
import re
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event

import pytest

from paged.cache.tiers import files, folder
from paged.cache.tiers.block_file import BlockKey, StoredBlock
from paged.cache.tiers.folder import CacheFolder
from tests.cache.prefix_cache import BLOCK
from tests.cache.tiers.patience import patience_of_users
from tests.cache.tiers.test_files import NUM_BLOCKS, TOKENS, block_paths, files_of, fill, make
from tests.deadline import HANG_S

TERABYTE = 1 << 40


def put_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        here = Path.cwd()
        os.chdir(path.parent)  # a socket's path has at most 108 bytes
        try:
            bound.bind(path.name)
        finally:
            os.chdir(here)


def put_large_file(path: Path) -> None:
    """Without contents."""
    path.touch()
    os.truncate(path, TERABYTE)


def put_forged_file(path: Path, content: bytes) -> None:
    """A header that says a terabyte."""
    sizes = (0).to_bytes(8, "little") + (TERABYTE - 136).to_bytes(8, "little")
    path.write_bytes(content[:80] + sizes)
    os.truncate(path, TERABYTE)


def put_link(path: Path, content: bytes) -> None:
    """To the block itself, elsewhere."""
    target = path.parent.parent / "elsewhere"
    target.write_bytes(content)
    path.symlink_to(target)


# By name: puts it in the place of a block, whose bytes it is given.
THINGS: dict[str, Callable[[Path, bytes], object]] = {
    "pipe": lambda path, _: os.mkfifo(path),
    "folder": lambda path, _: path.mkdir(),
    "socket": lambda path, _: put_socket(path),
    "link to a device": lambda path, _: path.symlink_to("/dev/zero"),
    "link to itself": lambda path, _: path.symlink_to(path.name),
    "link to nothing": lambda path, _: path.symlink_to("nothing"),
    "link": put_link,
    "large file": lambda path, _: put_large_file(path),
    "forged file": put_forged_file,
}


@pytest.mark.parametrize("thing", THINGS)
@pytest.mark.parametrize("limit", [None, 1 << 20])
def test_a_thing_in_the_place_of_a_block(
    thing: str, limit: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not read, other prompts go on, and a write takes its place if that can be."""
    fill(tmp_path)
    position = list(THINGS).index(thing) % NUM_BLOCKS
    path = tmp_path / block_paths(tmp_path)[position]
    content = path.read_bytes()
    path.unlink()
    THINGS[thing](path, content)
    cache = make(tmp_path, cache_folder_bytes=limit)
    handle = cache.run("a", TOKENS)
    assert handle.num_cached_tokens == position * BLOCK
    cache.check()
    assert files_of(cache).num_faults == 1
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1
    cache.free(handle)
    cache.manager.clear_prefix_cache()
    assert cache.run("b", [*TOKENS[: position * BLOCK], 1, 2]).num_cached_tokens == position * BLOCK
    cache.manager.close_tiers(HANG_S)
    fill(tmp_path, cache_folder_bytes=limit)
    is_whole = make(tmp_path).run("a", TOKENS).num_cached_tokens == 40
    assert is_whole == (thing != "folder")


@pytest.mark.parametrize("is_longer", [False, True])
def test_a_file_that_changes_while_it_is_read(is_longer: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path)
    path = tmp_path / block_paths(tmp_path)[0]
    read = folder._read

    def read_changed(file: int, num_bytes: int) -> bytes:
        content = read(file, num_bytes)
        if num_bytes == folder.HEADER_BYTES and os.path.samestat(os.fstat(file), path.stat()):
            os.truncate(path, path.stat().st_size + (1 if is_longer else -1))
        return content

    monkeypatch.setattr(folder, "_read", read_changed)
    cache = make(tmp_path)
    assert cache.run("a", TOKENS).num_cached_tokens == (40 if is_longer else 0)
    cache.check()


def clutter(path: Path, num_files: int = 200) -> set[str]:
    """Put things into a cache folder that are not its own; their names."""
    digest = next(entry for entry in path.iterdir() if entry.is_dir()).name
    for number in range(num_files):
        (path / digest / f"{number}.kv").write_bytes(bytes(10_000))
    for name in ("file.kv", "\udcff\udcfe", "n" * 250, "line\nbreak\x1b[2J", f"{'0' * 64}-0.txt"):
        (path / digest / name).write_bytes(bytes(10_000))
    os.mkfifo(path / "pipe")
    os.mkfifo(path / digest / f"{'1' * 64}-0.kv")
    (path / digest / f"{'2' * 64}-0.kv").mkdir()
    (path.parent / "outside").mkdir()
    (path.parent / "outside" / f"{'3' * 64}-0.kv").write_bytes(bytes(10_000))
    (path / ("a" * 32)).symlink_to(path.parent / "outside")
    (path / ("b" * 32)).touch()
    return {str(entry) for entry in (*path.rglob("*"), *(path.parent / "outside").rglob("*")) if not is_own(entry)}


def is_own(path: Path) -> bool:
    is_block = re.fullmatch(r"[0-9a-f]{64}-\d+\.kv", path.name) is not None
    return path.name == ".lock" or (is_block and path.is_file() and path.parent.name not in ("outside", "a" * 32))


def test_other_entries_are_neither_counted_nor_removed(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    limit = 12_000
    fill(path, cache_folder_bytes=limit)
    before = clutter(path)
    for start in (100, 200, 300):
        cache = make(path, cache_folder_bytes=limit)
        cache.free(cache.run("a", range(start, start + 41)))
        cache.manager.close_tiers(HANG_S)
        assert files_of(cache).num_faults == 0
        assert files_of(cache).num_written == NUM_BLOCKS
    assert make(path).run("a", range(300, 341)).num_cached_tokens == 40
    assert sum(file.num_bytes for file in CacheFolder(path, limit).files()) <= limit
    assert {name for name in before if os.path.lexists(name)} == before


def a_block(number: int, num_bytes: int = 300) -> StoredBlock:
    return StoredBlock(BlockKey(bytes(32), number.to_bytes(32, "little"), 0), [number], bytes(num_bytes))


@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_the_lock_is_no_file(kind: str, tmp_path: Path) -> None:
    """Nothing is written through it, and no call waits for its other end."""
    victim = tmp_path / "victim"
    victim.write_text("kept")
    path = tmp_path / "cache"
    path.mkdir()
    {"pipe": os.mkfifo, "link": lambda lock: lock.symlink_to(victim), "folder": Path.mkdir}[kind](path / ".lock")
    with pytest.raises(OSError, match="not a regular file"):
        CacheFolder(path, 10_000).store(a_block(1).key.name, a_block(1).encode())
    assert victim.read_text() == "kept"


@pytest.mark.parametrize("kind", ["pipe", "link", "file"])
def test_a_temporary_name_is_taken(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a process of the same number on another machine: what is there stays."""
    monkeypatch.setattr(folder.secrets, "token_hex", lambda size: "0" * 2 * size)
    victim = tmp_path / "victim"
    victim.write_text("kept")
    store, block = CacheFolder(tmp_path / "cache", None), a_block(1)
    part = store.path / f"{block.key.name}.{'0' * 16}.part"
    part.parent.mkdir()
    {"pipe": os.mkfifo, "link": lambda path: path.symlink_to(victim), "file": Path.touch}[kind](part)
    with pytest.raises(FileExistsError):
        store.store(block.key.name, block.encode())
    assert os.path.lexists(part)
    assert victim.read_text() == "kept"
    assert store.lookup([block.key.name]) == 0


def test_a_full_disk_leaves_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, block = CacheFolder(tmp_path, None), a_block(1)
    monkeypatch.setattr(folder.os, "replace", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(OSError, match="No space"):
        store.store(block.key.name, block.encode())
    assert store.files() == []


def test_the_limit_holds_if_nothing_can_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CacheFolder(tmp_path, 1000)
    stored = [store.store(a_block(number).key.name, a_block(number).encode()) for number in range(2)]
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: (_ for _ in ()).throw(PermissionError()))
    stored.append(store.store(a_block(2).key.name, a_block(2).encode()))
    assert stored == [True, True, False]


def test_a_clock_that_goes_back(tmp_path: Path) -> None:
    """What was used before does not drive out all that comes."""
    store = CacheFolder(tmp_path, 5000)
    for number in range(9):
        store.store(a_block(number).key.name, a_block(number).encode())
        os.utime(tmp_path / a_block(number).key.name, (4e9, 4e9 + number))
    for number in range(9, 15):
        assert store.store(a_block(number).key.name, a_block(number).encode())
    assert store.lookup([a_block(number).key.name for number in range(9, 15)]) == 6


@pytest.mark.parametrize("kind", ["file", "link", "nothing"])
def test_the_folder_is_replaced_while_it_is_used(kind: str, tmp_path: Path) -> None:
    """By a file, by a link to an empty folder, and removed."""
    path = tmp_path / "cache"
    fill(path)
    cache = make(path, cache_folder_bytes=1 << 20)
    assert cache.run("a", TOKENS[:9]).num_cached_tokens == 8
    shutil.rmtree(path)
    if kind == "file":
        path.touch()
    elif kind == "link":
        (tmp_path / "other").mkdir()
        path.symlink_to(tmp_path / "other")
    handle = cache.run("b", [*TOKENS, *TOKENS])
    assert handle.num_cached_tokens == 8
    cache.check()
    cache.free(handle)
    cache.manager.close_tiers(HANG_S)
    assert (files_of(cache).num_faults > 0) == (kind == "file")


class Hang:
    """Calls of `CacheFolder.load` that do not return before the end: those of one block, or all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.name: str | None = None  # "" for all
        self.end, load = Event(), CacheFolder.load

        def load_or_hang(store: CacheFolder, name: str) -> bytes | None:
            if self.name == "" or name == self.name:
                assert self.end.wait(HANG_S)
            return load(store, name)

        monkeypatch.setattr(CacheFolder, "load", load_or_hang)
        monkeypatch.setattr(files, "HANG_S", 0.0)


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hang]:
    hang = Hang(monkeypatch)
    yield hang
    hang.end.set()


def num_readers() -> int:
    return sum(thread.name == "paged-cache-folder" for thread in threading.enumerate())


def test_a_file_that_hangs_costs_one_prompt_its_patience(
    hang: Hang, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """From then on it is a miss, and all others are read."""
    fill(tmp_path)
    hang.name = str(block_paths(tmp_path)[1])
    cache = make(tmp_path)
    tier = files_of(cache)
    with patience_of_users(tier, lambda name: name == hang.name):
        cache.free(cache.run("a", TOKENS))
    assert tier.num_late == 1
    num_threads = num_readers()
    for _ in range(3):
        cache.manager.clear_prefix_cache()
        assert cache.run("b", TOKENS).num_cached_tokens == BLOCK
        cache.check()
        cache.free(cache.manager.get_handle("b"))
    assert (tier.num_late, len(tier._hung), tier.num_faults) == (1, 1, 1)
    assert num_readers() == num_threads + 1
    assert f"no answer to {hang.name}" in caplog.text
    hang.end.set()
    with tier._changed:
        assert tier._changed.wait_for(lambda: not tier._hung, HANG_S)
    cache.manager.clear_prefix_cache()
    assert cache.run("c", TOKENS).num_cached_tokens == 40


def test_a_folder_that_hangs_costs_a_few_threads_and_comes_back(
    hang: Hang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = [range(start, start + 5) for start in range(0, 400, 20)]
    cache = make(tmp_path)
    for prompt in prompts:
        cache.free(cache.run("a", prompt))
    cache.manager.close_tiers(HANG_S)
    hang.name = ""
    monkeypatch.setattr(files, "_MOST_HUNG", 4)
    cache = make(tmp_path)
    tier = files_of(cache)
    with patience_of_users(tier):
        for prompt in prompts:
            assert cache.run("a", prompt).num_cached_tokens == 0
            cache.free(cache.manager.get_handle("a"))
    assert len(tier._hung) == 4
    assert tier.num_late >= len(prompts) - 4
    assert "the folder is not used until one of them returns" in caplog.text
    hang.end.set()
    with tier._changed:
        assert tier._changed.wait_for(lambda: not tier._hung and tier._current is None, HANG_S)
    cache.manager.clear_prefix_cache()
    assert cache.run("b", prompts[0]).num_cached_tokens == BLOCK
    cache.check()


def test_each_thread_that_hangs_too_is_given_twice_the_time(hang: Hang, tmp_path: Path) -> None:
    tier = files_of(make(tmp_path))
    numbers = []
    for seconds in (0.5, 1.5, 1.5, 2.5, 3.5, 4.5):
        tier._reader.read = tier._reader.read or files.FileRead(tier, 0, [], b"")
        tier._reader.asked_at = files.monotonic() - seconds
        with pytest.MonkeyPatch.context() as context:
            context.setattr(files, "HANG_S", 1.0)
            tier._replace_reader()
        numbers.append(len(tier._hung))
    assert numbers == [0, 1, 1, 2, 2, 3]
