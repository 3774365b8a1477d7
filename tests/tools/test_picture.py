"""The picture of a cache: every block once, of the kind it is, in text and in SVG."""

import threading
from concurrent.futures import ThreadPoolExecutor
from xml.etree import ElementTree

import pytest

from paged import CachePicture, KvCacheHandle, PagedKvCacheConfig, PagedKvCacheManager, cache_picture

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def manager() -> PagedKvCacheManager:
    return PagedKvCacheManager(PagedKvCacheConfig(1, 1, 8, block_size=4, num_blocks=12, num_swap_blocks=4))


def write(manager: PagedKvCacheManager, name: str | int, tokens: list[int]) -> KvCacheHandle:
    handle = manager.allocate(name, token_ids=tokens)
    manager.advance(handle, len(tokens) - handle.num_tokens)
    manager.commit(handle, tokens)
    return handle


def kinds(picture: CachePicture) -> str:
    return " ".join(cell.kind for cell in picture.cells)


def test_every_kind_of_block(manager: PagedKvCacheManager) -> None:
    """Each becomes what it is by one call, and the figures agree with the manager's own."""
    picture = cache_picture(manager)
    assert [cell.block for cell in picture.cells] == list(range(1, 13))
    assert (picture.count("free"), picture.sequences) == (12, ())
    assert picture.text(columns=6).splitlines()[:2] == [" 1   .  .  .  .  .  .", " 7   .  .  .  .  .  ."]
    first = write(manager, "a", list(range(10)))
    assert kinds(cache_picture(manager)) == "own own own" + " free" * 9
    fork = manager.fork(first, "b")
    assert kinds(cache_picture(manager)) == "shared shared copy" + " free" * 9
    manager.extend(fork, 1)
    picture = cache_picture(manager)
    assert kinds(picture) == "shared shared own own" + " free" * 8, "the copy was made"
    assert [cell.fill for cell in picture.cells[:5]] == [1.0, 1.0, 0.5, 0.75, 0.0]
    manager.free(first)
    assert kinds(cache_picture(manager)) == "own own free own" + " free" * 8
    manager.free(fork)
    picture = cache_picture(manager)
    assert kinds(picture) == "cached cached" + " free" * 10
    assert picture.count("cached") == manager.stats().cached_blocks == len(manager.cached_blocks())
    manager.evict(4)
    assert cache_picture(manager).count("free") == 12


def test_names_and_holders(manager: PagedKvCacheManager) -> None:
    """An owner's names replace ids; the text has all holders of shared blocks, in runs of the same ones."""
    first = write(manager, 1, list(range(10)))
    manager.extend(manager.fork(first, 2), 1)
    manager.fork(first, 3)
    picture = cache_picture(manager, {1: "alice/0", 2: "alice/1"})
    assert [one.request_id for one in picture.sequences] == ["alice/0", "alice/1", 3]
    assert picture.text().splitlines()[-2:] == ["shared: 1-2  a b c", "shared: 3-3  a c"]
    assert "(alice/0, alice/1, 3)" in picture.svg()


def test_a_picture_is_of_one_moment(manager: PagedKvCacheManager) -> None:
    """Another thread allocates and frees all the time; what a picture counts always agrees."""
    ends = threading.Event()

    def churn() -> None:
        while not ends.is_set():
            handle = manager.allocate("a", 20)
            manager.free(manager.fork(handle, "b"))
            manager.free(handle)

    with ThreadPoolExecutor(1) as pool:
        churning = pool.submit(churn)
        try:
            for _ in range(200):
                picture = cache_picture(manager)
                held = sum(bool(cell.holders) for cell in picture.cells)
                assert picture.summary.startswith(f"{held} of 12 blocks")
                assert held == (5 if picture.sequences else 0)
        finally:
            ends.set()
        churning.result()


def test_text_and_svg(manager: PagedKvCacheManager) -> None:
    first = write(manager, "<one>", list(range(9)))
    manager.fork(first, "two")
    manager.swap_out(write(manager, "three", list(range(100, 108))))
    picture = cache_picture(manager)
    assert picture.text(columns=12).splitlines()[0].split()[:4] == ["1", "a+", "a+", "a!"]
    root = ElementTree.fromstring(picture.svg(columns=6))
    cells = root.findall(f"{SVG}g")
    assert len(cells) == 12
    assert "(<one>, two)" in str(cells[2].findtext(f"{SVG}title"))
