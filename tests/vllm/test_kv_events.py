"""KV events read by vLLM's own classes: they rebuild the exact set of cached blocks."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM's Python files: make vllm")

import msgspec
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

from paged import BlocksStored, CacheCleared
from tests.serving.http.test_kv_events import make_manager, replayed


def test_vllm_reads_what_is_published() -> None:
    manager, own = make_manager(), set[object]()

    def keep(event: object) -> None:
        if isinstance(event, BlocksStored):
            own.update(event.hashes)
        elif isinstance(event, CacheCleared):
            own.clear()
        else:
            own.discard(event.hash)  # type: ignore[attr-defined]

    manager.subscribe(keep)
    decoder, found = msgspec.msgpack.Decoder(KVEventBatch), set[object]()
    with replayed(manager, 500) as batches:
        for _, batch in batches:
            read = decoder.decode(batch)
            assert read.data_parallel_rank == 0
            for event in read.events:
                if isinstance(event, BlockStored):
                    assert event.parent_block_hash is None or event.parent_block_hash in found
                    assert len(event.token_ids) == event.block_size * len(event.block_hashes)
                    found |= set(event.block_hashes)
                elif isinstance(event, BlockRemoved):
                    found -= set(event.block_hashes)
                else:
                    assert isinstance(event, AllBlocksCleared)
                    found.clear()
        assert found == own
        assert len(found) == manager.stats().published_blocks
