"""The picture of a cache: every block once, of the kind it is, in text and in SVG."""

from __future__ import annotations

import subprocess
import sys
from xml.etree import ElementTree

import pytest

from paged import CachePicture, KvCacheHandle, PagedKvCacheConfig, PagedKvCacheManager, cache_picture

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def manager() -> PagedKvCacheManager:
    return PagedKvCacheManager(
        PagedKvCacheConfig(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, num_blocks=12, num_swap_blocks=4)
    )


def write(manager: PagedKvCacheManager, name: str, tokens: list[int]) -> KvCacheHandle:
    handle = manager.allocate(name, token_ids=tokens)
    manager.advance(handle, len(tokens) - handle.num_tokens)
    manager.commit(handle, tokens)
    return handle


def kinds(picture: CachePicture) -> str:
    return " ".join(cell.kind for cell in picture.cells)


def test_an_empty_cache(manager: PagedKvCacheManager) -> None:
    picture = cache_picture(manager)
    assert [cell.block for cell in picture.cells] == list(range(1, 13))
    assert picture.count("free") == 12
    assert picture.sequences == ()
    assert picture.text(columns=6).splitlines()[:2] == [" 1   .  .  .  .  .  .", " 7   .  .  .  .  .  ."]


def test_every_kind_of_block(manager: PagedKvCacheManager) -> None:
    """Each becomes what it is by one call, and the figures agree with the manager's own."""
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
    revived = manager.allocate("c", token_ids=list(range(10)), namespace=None)
    picture = cache_picture(manager)
    assert picture.sequences[0].num_cached_tokens == revived.num_tokens == 8
    assert kinds(picture).startswith("own own free own free")
    manager.evict(4)
    manager.free(revived)
    manager.evict(4)
    assert manager.cached_blocks() == ()
    assert cache_picture(manager).count("free") == 12


def test_cached_blocks_come_least_recently_used_first(manager: PagedKvCacheManager) -> None:
    first, second = (write(manager, name, [start] * 9) for name, start in (("a", 1), ("b", 2)))
    blocks = [handle.blocks[:2] for handle in (second, first)]
    manager.free(second)
    manager.free(first)
    # Of one sequence the last block goes first: it is of no use without the one before.
    assert manager.cached_blocks() == (*blocks[0][::-1], *blocks[1][::-1])
    manager.evict(1)
    assert manager.cached_blocks() == (blocks[0][0], *blocks[1][::-1])


def test_text_and_svg(manager: PagedKvCacheManager) -> None:
    first = write(manager, "<one>", list(range(9)))
    manager.fork(first, "two")
    manager.swap_out(write(manager, "three", list(range(100, 108))))
    picture = cache_picture(manager)
    lines = picture.text(columns=12).splitlines()
    assert lines[0].split()[:4] == ["1", "a+", "a+", "a!"]
    assert "c  three: 8 tokens, 0 blocks, 2 blocks in host memory" in lines
    assert lines[-1] == picture.summary
    assert picture.summary.startswith("3 of 12 blocks of 4 tokens in use, 3 of them shared")
    root = ElementTree.fromstring(picture.svg(columns=6))
    cells = root.findall(f"{SVG}g")
    titles = [cell.findtext(f"{SVG}title") for cell in cells]
    assert len(titles) == 12
    assert titles[2] == "block 3: of several, copied when one of them writes its next token (<one>, two)"
    stripes = [len(cell.findall(f"{SVG}rect")) - 2 for cell in cells]
    assert stripes == [2, 2, 2] + [0] * 9
    assert any("three" in (text.text or "") for text in root.findall(f"{SVG}text"))


def test_takes_no_torch() -> None:
    code = "import paged, sys; paged.cache_picture; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
