"""Prefixes move from a process that runs prompts to one that decodes, through shared memory.

    python examples/prefill_decode.py

`SharedMemoryStore` is all that a store needs: four calls over opaque blocks, each known by a name. A store in Redis,
LMCache or Mooncake looks the same.
"""

import hashlib
import multiprocessing
from collections.abc import Sequence
from multiprocessing.shared_memory import SharedMemory

from paged import Engine, LlmExecutor, SamplingParams
from paged.cache.tiers.block_store import BlockStore

FOLDER = "models/recall"
LENGTH = 150
PROMPTS = [[(7 * i + 3 * start) % 90 + 5 for i in range(LENGTH)] for start in range(4)]


class SharedMemoryStore(BlockStore):
    """A segment for each block: eight bytes of its size, then the block. They live until the first process ends."""

    def __init__(self) -> None:
        self._segments: list[SharedMemory] = []

    def _open(self, name: str, **options: object) -> SharedMemory:
        segment = SharedMemory(hashlib.sha256(name.encode()).hexdigest()[:24], **options)  # type: ignore[arg-type]
        self._segments.append(segment)
        return segment

    def lookup(self, names: Sequence[str]) -> int:
        for count, name in enumerate(names):
            if self.load(name) is None:
                return count
        return len(names)

    def load(self, name: str) -> bytes | None:
        try:
            segment = self._open(name)
        except FileNotFoundError:
            return None
        size = int.from_bytes(segment.buf[:8], "little")
        return bytes(segment.buf[8 : 8 + size])

    def store(self, name: str, content: bytes) -> bool:
        segment = self._open(name, create=True, size=8 + len(content))
        segment.buf[8 : 8 + len(content)] = content
        segment.buf[:8] = len(content).to_bytes(8, "little")
        return True

    def complete(self) -> None:
        """Do nothing: a block is there for others as soon as it is written."""

    def unlink(self) -> None:
        """Give all memory back."""
        for segment in {segment.name: segment for segment in self._segments}.values():
            segment.unlink()


def answers(max_tokens: int, store: BlockStore | None) -> list[tuple[list[int], int]]:
    """Return each prompt's new tokens, and the number of its tokens that came from the store."""
    executor = LlmExecutor.from_pretrained(FOLDER, num_blocks=64, host_cache_bytes=64 << 20, progress=False)
    if store is not None:
        executor.kv_manager.attach_store(store)
        executor.kv_manager.set_fingerprint(FOLDER.encode())  # where weights change, a digest of them
    engine = Engine(executor, eos_token_ids=())
    outputs = engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=max_tokens), progress=False)
    executor.shutdown()  # all blocks go to the store
    return [(output.outputs[0].token_ids, output.num_loaded_tokens) for output in outputs]


if __name__ == "__main__":
    store = SharedMemoryStore()
    prefill = multiprocessing.get_context("spawn").Process(target=answers, args=(1, store))
    prefill.start()
    prefill.join()
    decoded, alone = answers(12, store), answers(12, None)
    store.unlink()
    assert [token_ids for token_ids, _ in decoded] == [token_ids for token_ids, _ in alone]
    num_loaded = sum(count for _, count in decoded)
    print(f"the same tokens; {num_loaded} of {LENGTH * len(PROMPTS)} prompt tokens came from the other process")
