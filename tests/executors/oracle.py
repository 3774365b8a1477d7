"""PagedAttentionExecutors, whose answers are known in closed form, and what to ask of any executor."""

from collections.abc import Sequence
from typing import Any

import torch

from paged.cache.kv_cache import KvCacheHandle, PagedKvCacheConfig
from paged.cache.manager import PagedKvCacheManager
from paged.executors.closed_form import expected_logits
from paged.executors.paged_attention_executor import PagedAttentionExecutor, PagedExecutorConfig
from paged.step.batch import DecodeInput, PrefillInput, UnifiedBatch, UnifiedBatchItem
from paged.step.step import Step
from tests.tolerance import assert_close

_OF_THE_CACHE = """num_blocks block_size max_seq_len num_swap_blocks dtype groups host_cache_bytes
    max_pinned_fraction""".split()


class EchoExecutor(PagedAttentionExecutor):
    """Writes no K/V and answers with each token's own embedding, so that a random schedule takes milliseconds."""

    def _attend(self, step: Step) -> torch.Tensor:
        assert len(step.metadata.slot_mapping) == len(step.input_ids)
        return self._embed(step.input_ids).flatten(1)


def make_executor(
    device: torch.device,
    *,
    states: dict[str, Any] | None = None,
    kind: type[PagedAttentionExecutor] = PagedAttentionExecutor,
    **sizes: Any,
) -> PagedAttentionExecutor:
    """An executor over a cache of its own; `sizes` go to the configuration of the one or the other, `states` to that of
    a recurrent layer, if it is given."""
    options = {"num_blocks": 32, "block_size": 8, "dtype": torch.float32}
    options |= {name: sizes.pop(name) for name in _OF_THE_CACHE if name in sizes}
    config = PagedExecutorConfig(**sizes, recurrent=states is not None)
    options |= {name: getattr(config, name) for name in ("num_layers", "num_kv_heads", "head_dim")}
    options["recurrent"] = None if states is None else config.recurrent_spec(**states)
    return kind(config, PagedKvCacheManager(PagedKvCacheConfig(**options, device=device)))


def check_logits(executor: PagedAttentionExecutor, logits: torch.Tensor | None, tokens: Sequence[int]) -> None:
    """They are those of the closed form after these tokens."""
    assert logits is not None
    assert_close(logits, expected_logits(executor.config, tokens))


def prompt(*rows: Sequence[int], **fields: Any) -> PrefillInput:
    """A prefill of rows of equal length."""
    return PrefillInput(torch.tensor(rows), **fields)


def step(handle: KvCacheHandle | Sequence[KvCacheHandle], *tokens: int, **fields: Any) -> DecodeInput:
    """A decode of one token a sequence."""
    return DecodeInput(torch.tensor(tokens)[:, None], handle, **fields)


def batch(*items: UnifiedBatchItem) -> UnifiedBatch:
    """A batch of these items."""
    return UnifiedBatch(list(items))


def item(seq_id: str | int, tokens: Sequence[int], start: int = 0, **fields: Any) -> UnifiedBatchItem:
    """The tokens of a sequence from position `start` on."""
    return UnifiedBatchItem(seq_id, tokens, pos_offset=start, **fields)


def chunk(seq_id: str | int, tokens: Sequence[int], start: int = 0) -> UnifiedBatchItem:
    """Part of a prompt, and not the last."""
    return item(seq_id, tokens, start, is_final_chunk=False)


def forward(executor: Any, *items: UnifiedBatchItem) -> list[Any]:
    """What one forward over these items gives."""
    return executor.unified_decode(batch(*items))
