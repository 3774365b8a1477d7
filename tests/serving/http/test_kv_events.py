"""KV events over ZeroMQ: replayed from the first, they rebuild the set of cached blocks."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from paged import InvalidInputError, PagedKvCacheConfig, PagedKvCacheManager
from tests.deadline import HANG_S

msgspec, zmq = (pytest.importorskip(name, reason="needs the extra serve") for name in ("msgspec", "zmq"))

from paged.serving.http.kv_events import KvEventPublisher  # noqa: E402 (needs what was looked for)


def exercise(manager: PagedKvCacheManager, count: int) -> None:
    """Requests over few tokens, so that they share prefixes, in a pool that is too small for them."""
    rng = random.Random(count)
    for number in range(count):
        ids = [rng.randint(0, 1) for _ in range(rng.randint(1, 24))]
        adapter = rng.choice([None, "adapter", ("adapter", "salt"), (None, "salt")])
        handle = manager.allocate(number, token_ids=ids, namespace=adapter)
        manager.advance(handle, len(ids) - handle.num_tokens)
        manager.commit(handle, ids)
        manager.free(handle)
        if number == count // 2:
            manager.clear_prefix_cache()


@contextmanager
def replayed(manager: PagedKvCacheManager, count: int) -> Iterator[list[tuple[int, bytes]]]:
    """What the replay socket tells of a cache at work, which has the same numbers and bytes as what was published."""
    addresses = ["inproc://events", "inproc://replay"]
    publisher = KvEventPublisher(manager, addresses[0], replay_endpoint=addresses[1], topic="kv")
    context = zmq.Context.instance()
    subscriber = context.socket(zmq.SUB)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"kv")
    subscriber.connect(addresses[0])
    told: list[tuple[int, bytes]] = []
    num_told_of = 0  # events
    heard: list[Any] = []
    manager.subscribe(heard.append, with_host=True)
    try:
        for step in range(5):
            exercise(manager, count // 5 + step)
            while num_told_of < len(heard):
                assert subscriber.poll(1000 * HANG_S)
                _, number, batch = subscriber.recv_multipart()
                told.append((int.from_bytes(number, "big"), batch))
                num_told_of += len(msgspec.msgpack.decode(batch)[1])
        assert [number for number, _ in told] == list(range(len(told)))
        assert len(told) >= 5
        for first in (2, 0):
            dealer = context.socket(zmq.DEALER)
            dealer.connect(addresses[1])
            dealer.send_multipart((b"", first.to_bytes(8, "big")))
            again = []
            while True:
                _, _, number, batch = dealer.recv_multipart()
                if number == (-1).to_bytes(8, "big", signed=True):
                    break
                again.append((int.from_bytes(number, "big"), batch))
            dealer.close()
            assert again == told[first:]
        yield told
    finally:
        publisher.close()
        subscriber.close()


def make_manager(host_cache_bytes: int = 0) -> PagedKvCacheManager:
    config = PagedKvCacheConfig(1, 1, 8, block_size=8, num_blocks=12, host_cache_bytes=host_cache_bytes)
    return PagedKvCacheManager(config)


@pytest.mark.parametrize("host_cache_bytes", [0, 1 << 14])
def test_events_rebuild_the_cache(host_cache_bytes: int) -> None:
    manager = make_manager(host_cache_bytes)
    with replayed(manager, 500) as batches:
        chains: dict[Any, tuple[Any, ...]] = {}  # hash -> what leads to it
        on_host: set[Any] = set()
        kinds = set()
        for _, batch in batches:
            for event in msgspec.msgpack.decode(batch)[1]:
                kinds.add(event["type"])
                if event["type"] == "AllBlocksCleared":
                    chains.clear()
                    on_host.clear()
                elif event["medium"] == "CPU":
                    if event["type"] == "BlockStored":
                        assert event["block_hashes"][0] in chains, "of the same name as on the device"
                        on_host.update(event["block_hashes"])
                    else:
                        on_host.difference_update(event["block_hashes"])
                elif event["type"] == "BlockRemoved":
                    for one in event["block_hashes"]:
                        del chains[one]
                else:
                    above = chains[event["parent_block_hash"]] if event["parent_block_hash"] is not None else ()
                    for index, one in enumerate(event["block_hashes"]):
                        tokens = tuple(event["token_ids"][index * 8 : index * 8 + 8])
                        key = event["extra_keys"][index]
                        assert len(tokens) == 8
                        assert event["lora_name"] in (None, "adapter")
                        above = (*above, tokens, None if key is None else tuple(key))
                        chains[one] = above
        assert kinds == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
        stats = manager.stats()
        assert len(chains) == stats.published_blocks
        assert len(on_host) == stats.host_cached_blocks
        assert (stats.host_cached_blocks > 0) == (host_cache_bytes > 0)
        assert stats.evictions > 100
        assert len(set(chains.values())) == len(chains), "no two blocks have the same way to them"


def test_addresses_that_cannot_be_bound_are_named() -> None:
    with pytest.raises(InvalidInputError, match="nowhere"):
        KvEventPublisher(make_manager(), "tcp://nowhere.invalid:1")
