"""What a model over a paged cache, and its captured steps, ask of a network."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from paged.cache.manager import PagedKvCacheManager
from paged.metadata import AttentionMetadata
from paged.models.layers.config import DecoderConfig


class DecoderNetwork(Protocol):
    """What PagedCausalLM runs; `models.families.llama.Llama` is one."""

    config: DecoderConfig

    def bind(self, kv_manager: PagedKvCacheManager, max_seq_len: int) -> None: ...

    def pack(self) -> None: ...

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata, /
    ) -> torch.Tensor: ...

    def head(self, hidden: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...

    def parameters(self) -> Iterator[torch.nn.Parameter]: ...

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]: ...
