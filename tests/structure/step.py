"""Draws docs/step.svg: the KV cache after one step that runs a decode beside prompts. `make picture` runs it."""

from paged import LlmExecutor, UnifiedBatch, UnifiedBatchItem, cache_picture
from tests.structure.imports import ROOT

PATH = ROOT / "docs" / "step.svg"
PROMPT = list(range(5, 105))  # of A; B begins with its first 64 tokens


def draw() -> str:
    """A prompt is answered and freed, A's prompt runs; then one step runs A's decode, B's prompt and a chunk of C's."""
    executor = LlmExecutor.from_pretrained(ROOT / "models" / "recall", device="cpu", num_blocks=64, block_size=16)
    manager = executor.kv_manager

    def item(name: str, tokens: list[int], *, is_final_chunk: bool = True) -> UnifiedBatchItem:
        handle = manager.get_handle(name) or manager.allocate(name, token_ids=tokens)
        new = tokens[handle.num_tokens :]
        return UnifiedBatchItem(handle.cache_id, new, handle, handle.num_tokens, is_final_chunk)

    executor.unified_decode(UnifiedBatch([item("answered", [9] * 150)]))
    manager.commit(manager.get_handle("answered"), [9] * 150)
    manager.free(manager.get_handle("answered"))
    executor.unified_decode(UnifiedBatch([item("A: decodes", PROMPT)]))
    manager.commit(manager.get_handle("A: decodes"), PROMPT)
    step = [
        item("A: decodes", [*PROMPT, 7]),
        item("B: its whole prompt", [*PROMPT[:64], 1, 2, 3]),
        item("C: a chunk of its prompt", list(range(190)), is_final_chunk=False),
    ]
    executor.unified_decode(UnifiedBatch(step))
    return cache_picture(manager).svg(columns=32)


if __name__ == "__main__":
    PATH.write_text(draw())
