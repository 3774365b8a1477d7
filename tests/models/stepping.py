"""Models in the middle of their sequences, whose next steps tests compare."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from paged.models.paged_lm import PagedCausalLM
from paged.models.registry import load_model
from paged.step.batch import UnifiedBatchItem
from tests.models.families import assert_same_logits, forward, tokens


def make(folder: Path, cuda_graphs: bool | Sequence[int] | None = (2, 4), **sizes: Any) -> PagedCausalLM:
    """A model whose cache is full of NaN, and graphs captured."""
    sizes = {"block_size": 4, "num_blocks": 32, "max_seq_len": 64, **sizes}
    model = load_model(folder, **sizes, cuda_graphs=cuda_graphs)
    config = model.network.config
    for layer in {source for source, attends in zip(config.cache_layers, config.attends, strict=True) if attends}:
        numbers = model.kv_manager.k_cache(layer), model.kv_manager.v_cache(layer)
        for tensor, scale in zip(numbers, model.kv_manager.scales(layer), strict=True):
            filled = tensor if scale is None else scale
            # All bits of a record set, its scales are NaN.
            filled.fill_(255 if filled.dtype == torch.uint8 else torch.nan)
    model.graphs.capture()
    return model


def begin(model: PagedCausalLM, lengths: Sequence[int]) -> None:
    """Sequences 0, 1, ... of so many tokens."""
    forward(model, {i: tokens(length, i) for i, length in enumerate(lengths)})


def go_back(model: PagedCausalLM, *lengths: int) -> None:
    """Sequences 0, 1, ... to so many tokens."""
    for name, length in enumerate(lengths):
        model.truncate_kv(name, length)


def decode(model: PagedCausalLM, names: Sequence[int], token: int) -> torch.Tensor:
    """Logits of one more token of each."""
    lengths = {handle.cache_id: handle.num_tokens for handle in model.kv_manager.handles()}
    return model.decode_batch([(name, (token + name) % 128, lengths[name]) for name in names])


def next_items(model: PagedCausalLM, names: Sequence[int], token: int) -> list[UnifiedBatchItem]:
    """One more token of each."""
    handles = {handle.cache_id: handle for handle in model.kv_manager.handles()}
    found = [(handles[name], handles[name].num_tokens) for name in names]
    return [UnifiedBatchItem(handle.cache_id, [token], kv_cache=handle, pos_offset=pos) for handle, pos in found]


def assert_same_results(actual: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor | None]) -> None:
    """Logits of the same items."""
    for got, want in zip(actual, expected, strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            assert_same_logits(got, want)
