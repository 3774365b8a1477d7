"""Prefixes in a folder: found after a restart and by other processes; any fault is a miss, with the right data."""

import errno
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from paged import InvalidInputError, PagedKvCacheManager, UnsupportedError
from paged.cache.groups import CacheGroup
from paged.cache.tiers import files
from paged.cache.tiers.block_file import BlockKey, StoredBlock
from paged.cache.tiers.block_store import BlockStore
from paged.cache.tiers.files import FileTier
from paged.cache.tiers.folder import CacheFolder
from tests.cache.prefix_cache import BLOCK, Cache
from tests.cache.tiers.patience import PATIENCE_S, patience_of_users
from tests.deadline import HANG_S
from tests.failure import Failure

TOKENS = range(41)
NUM_BLOCKS = 10


def make(folder: Path | None, **changes: Any) -> Cache:
    return Cache(device="cpu", **{"num_blocks": 30, "host_cache_bytes": 1 << 16, "cache_folder": folder} | changes)


def files_of(cache: Cache) -> FileTier:
    tier = cache.manager._prefixes.tier
    assert tier is not None
    assert tier.files is not None
    return tier.files


def fill(folder: Path, **changes: Any) -> None:
    """What another process leaves there that has run a prompt."""
    cache = make(folder, **changes)
    cache.free(cache.run("a", TOKENS))
    cache.manager.close_tiers(HANG_S)


@pytest.mark.parametrize(
    "changes", [{}, {"groups": [CacheGroup((0,)), CacheGroup((1,), sliding_window=6)]}], ids=["plain", "windows"]
)
def test_a_restart_begins_with_hits(changes: dict[str, Any], tmp_path: Path) -> None:
    fill(tmp_path, **changes)
    cache = make(tmp_path, **changes)
    assert cache.run("a", TOKENS).num_cached_tokens == 40
    assert cache.run("b", [*range(8), *range(100, 110)]).num_cached_tokens == 8
    cache.check()
    assert files_of(cache).num_faults == 0


def test_names_are_the_same_in_every_process(tmp_path: Path) -> None:
    """Those of blocks of one layout, also where the namespace is a frozenset, whose order depends on PYTHONHASHSEED."""
    cache = make(tmp_path)
    cache.free(cache.run("a", TOKENS[:BLOCK], frozenset(("model", "tenant", "adapter", "salt"))))
    cache.manager.close_tiers(HANG_S)
    (file,) = CacheFolder(tmp_path, None).files()
    assert file.path.relative_to(tmp_path).parts == (
        "065e89c53dc7cbba346e30ba469621b9",
        "24ea7e511649c8f556f3c4eb46d0b06e08eac3838e50d05b786fb64eba5871a0-0.kv",
    )


OTHER_LAYOUTS: dict[str, dict[str, Any]] = {
    "block size": {"block_size": 2 * BLOCK},
    "dtype": {"dtype": torch.bfloat16},
    "head size": {"head_dim": 16},
    "layers": {"groups": [CacheGroup((0,)), CacheGroup((1,), sliding_window=6)]},
}


@pytest.mark.parametrize("changes", OTHER_LAYOUTS.values(), ids=OTHER_LAYOUTS)
def test_another_layout_finds_nothing(changes: dict[str, Any], tmp_path: Path) -> None:
    fill(tmp_path)
    cache = make(tmp_path, **changes)
    assert cache.manager.allocate("a", token_ids=TOKENS).num_cached_tokens == 0
    assert files_of(cache).num_faults == 0


def test_other_weights_find_nothing(tmp_path: Path) -> None:
    for fingerprint, expected in ((b"old", 0), (b"new", 0), (b"old", 40)):
        cache = make(tmp_path)
        cache.manager.set_fingerprint(fingerprint)
        handle = cache.run("a", TOKENS)
        assert handle.num_cached_tokens == expected
        cache.free(handle)
        cache.manager.close_tiers(HANG_S)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(where: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[where] ^= 1
        path.write_bytes(content)

    return change


def put_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def put_other_block(path: Path) -> None:
    other = next(other for other in path.parent.iterdir() if other != path)
    path.write_bytes(other.read_bytes())


FAULTS: dict[str, Callable[[Path], None]] = {
    "short": cut,
    "empty": lambda path: path.write_bytes(b""),
    "magic": flip(0),
    "version": flip(8),
    "digest": flip(20),
    "hash": flip(50),
    "length": flip(86),
    "ids": flip(97),
    "data": flip(-100),
    "checksum": flip(-1),
    "a folder": put_folder,
    "another block": put_other_block,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_file_is_a_miss(fault: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whichever block it is: what comes before is used, all else is computed, and written anew."""
    fill(tmp_path)
    key_paths = block_paths(tmp_path)
    position = list(FAULTS).index(fault) % NUM_BLOCKS
    FAULTS[fault](tmp_path / key_paths[position])
    cache = make(tmp_path)
    handle = cache.run("a", TOKENS)
    assert handle.num_cached_tokens == position * BLOCK
    cache.check()
    assert files_of(cache).num_faults == 1
    assert "cache folder" in caplog.text
    cache.free(handle)
    cache.manager.close_tiers(HANG_S)
    if fault != "a folder":
        assert make(tmp_path).run("a", TOKENS).num_cached_tokens == 40


def block_paths(folder: Path) -> list[Path]:
    cache = make(folder)
    index, digest = cache.manager._prefixes.index, files_of(cache).digest
    hash_ = index.root_hash(None)
    found = []
    for start in range(0, 40, BLOCK):
        hash_ = index.next_hash(hash_, list(TOKENS[start : start + BLOCK]))
        assert isinstance(hash_, bytes)
        found.append(Path(BlockKey(digest, hash_, 0).name))
    return found


def test_a_full_disk_drops_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(CacheFolder, "_write", fail)
    cache = make(tmp_path)
    cache.free(cache.run("a", TOKENS))
    cache.manager.close_tiers(HANG_S)
    # A write that fails before the close is tried again by it.
    assert NUM_BLOCKS <= files_of(cache).num_faults <= 2 * NUM_BLOCKS
    assert files_of(cache).num_written == 0
    assert "No space left" in caplog.text
    assert cache.run("b", TOKENS).num_cached_tokens == 40
    cache.check()


def test_a_folder_that_is_gone_is_a_miss(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    fill(folder)
    cache = make(folder)
    folder.rename(tmp_path / "elsewhere")
    cache.free(cache.run("a", TOKENS))
    cache.manager.close_tiers(HANG_S)
    assert make(folder).run("a", TOKENS).num_cached_tokens == 40, "written into a new folder"


def test_a_system_without_threads_uses_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path)
    monkeypatch.setattr(files.Thread, "start", Mock(side_effect=[None, RuntimeError("can't start new thread")]))
    cache = make(tmp_path)
    assert cache.run("a", TOKENS).num_cached_tokens == 0
    assert files_of(cache).num_faults == 1
    cache.manager.close_tiers(HANG_S)
    cache.check()


def test_a_first_read_that_fails_anywhere_leaves_no_prompt_waiting(tmp_path: Path) -> None:
    fill(tmp_path)
    source = {Path(files.__file__).parent}
    num_cached = set()
    num_lines = 0
    is_hit = True
    while is_hit:
        cache = make(tmp_path)
        failure = Failure(num_lines, source, MemoryError())
        is_hit = failure.hits(partial(cache.manager.read_files, TOKENS))
        num_cached.add(cache.run("a", TOKENS).num_cached_tokens)
        cache.check()
        assert files_of(cache).num_late == 0
        cache.manager.close_tiers(HANG_S)
        num_lines += 1
    assert num_cached == {0, 40}


def test_a_slow_folder_holds_up_one_prompt_for_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path)
    answer, load = Event(), CacheFolder.load

    def load_late(folder: CacheFolder, name: str) -> bytes | None:
        assert answer.wait(HANG_S)
        return load(folder, name)

    monkeypatch.setattr(CacheFolder, "load", load_late)
    cache = make(tmp_path)
    tier = files_of(cache)
    num_waits: list[int] = []
    with patience_of_users(tier) as waits:
        for name in ("a", "b", "c"):
            cache.free(cache.run(name, [*TOKENS[:30], ord(name)]))
            cache.manager.clear_prefix_cache()
            num_waits.append(len(waits))
    assert tier.num_late == 3
    assert 0 < max(waits) <= PATIENCE_S
    assert num_waits[0] == num_waits[2], "later ones do not wait while there is no answer"
    answer.set()
    with tier._changed:
        assert tier._changed.wait_for(lambda: tier._current is None, HANG_S)
    assert cache.run("d", TOKENS).num_cached_tokens == 40
    cache.check()


def hold_reads_of_host(manager: PagedKvCacheManager, monkeypatch: pytest.MonkeyPatch) -> tuple[Event, Event]:
    """Let reads of host memory wait for the second event; the first is set when one has begun."""
    begun, go_on, read = Event(), Event(), manager.tensors.host.read

    def read_late(block: int) -> bytes:
        begun.set()
        assert go_on.wait(HANG_S)
        return read(block)

    monkeypatch.setattr(manager.tensors.host, "read", read_late)
    return begun, go_on


def test_writes_that_are_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a reset, or when the time of a shutdown is over, they are dropped."""
    cache = make(tmp_path)
    begun, go_on = hold_reads_of_host(cache.manager, monkeypatch)
    cache.free(cache.run("a", TOKENS))
    cache.manager.evict(30)
    assert begun.wait(HANG_S)
    cache.manager.set_fingerprint(b"new")
    cache.manager.close_tiers(0.0)
    go_on.set()
    tier = files_of(cache)
    with tier._changed:
        assert tier._changed.wait_for(lambda: not tier._is_writing, HANG_S)
    assert tier.num_written == 0
    assert make(tmp_path).run("a", TOKENS).num_cached_tokens == 0


def test_a_read_that_is_late(tmp_path: Path) -> None:
    """What it brings after the weights have changed is not used."""
    fill(tmp_path)
    cache = make(tmp_path)
    read = cache.manager.read_files(TOKENS)
    assert read is not None
    assert read.wait(HANG_S)
    assert len(read.blocks) == NUM_BLOCKS
    cache.manager.set_fingerprint(b"new")
    assert cache.manager.allocate("a", token_ids=TOKENS, from_files=read).num_cached_tokens == 0


def test_the_limit_holds_for_all_processes(tmp_path: Path) -> None:
    """What was used last stays."""
    block_bytes = 500
    limit = 10 * block_bytes
    folders = [CacheFolder(tmp_path, limit) for _ in range(2)]

    def block(number: int) -> StoredBlock:
        key = BlockKey(bytes([number % 2]) * 32, number.to_bytes(32, "little"), 0)
        return StoredBlock(key, [number], bytes(block_bytes - 200))

    for number in range(40):
        assert folders[number % 2].store(block(number).key.name, block(number).encode())
        os.utime(tmp_path / block(number).key.name, (number, number))
        assert sum(file.num_bytes for file in folders[0].files()) <= limit
        if number:
            assert folders[0].lookup([block(number - 1).key.name]) == 1
    assert len(folders[0].files()) > 5
    assert not folders[0].store("a/b", bytes(limit + 1))


class DictStore(BlockStore):
    """Shared by two caches; `fault` is a call that fails."""

    def __init__(self, fault: str = "") -> None:
        self.blocks: dict[str, bytes] = {}
        self.fault = fault
        self.num_completed = 0

    def _fail(self, call: str) -> None:
        if call == self.fault:
            raise RuntimeError(call)

    def lookup(self, names: Sequence[str]) -> int:
        self._fail("lookup")
        return int(names[0] in self.blocks)

    def load(self, name: str) -> bytes | None:
        self._fail("load")
        content = self.blocks.get(name)
        return content and (content[::-1] if self.fault == "garbage" else content)

    def store(self, name: str, content: bytes) -> bool:
        self._fail("store")
        self.blocks[name] = content
        return True

    def complete(self) -> None:
        self.num_completed += 1
        self._fail("complete")


@pytest.mark.parametrize(
    ("fault", "num_cached"), {"": 40, "lookup": 0, "load": 0, "garbage": 0, "store": 0, "complete": 40}.items()
)
def test_a_store_of_others(fault: str, num_cached: int) -> None:
    """Whatever it does, prompts get their own data."""
    store = DictStore(fault)
    found = []
    for _ in range(2):
        cache = make(None)
        cache.manager.attach_store(store)
        handle = cache.run("a", TOKENS)
        cache.check()
        found.append(handle.num_cached_tokens)
        cache.free(handle)
        cache.manager.close_tiers(HANG_S)
        assert (files_of(cache).num_faults > 0) == (fault not in ("", "garbage") or found == [0, 0])
    assert found == [0, num_cached]
    assert store.num_completed == 2


def test_refuses_stores() -> None:
    with pytest.raises(InvalidInputError, match="store"):
        Cache(host_cache_bytes=1 << 16).manager.attach_store("folder")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="store"):
        Cache().manager.attach_store(DictStore())
    manager = make(None).manager
    manager.tensors.listener = lambda name, arguments: None
    with pytest.raises(UnsupportedError, match="other ranks"):
        manager.attach_store(DictStore())


@pytest.mark.parametrize(
    "options", [{"cache_folder": 7}, {"cache_folder": "a\0b"}, {"cache_folder_bytes": 9}, {"cache_folder_bytes": -1}]
)
def test_refuses_folders(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(options))):
        Cache(**options)


def test_refuses_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(InvalidInputError, match="cache_folder"):
        make(path)
