"""What a model over a paged cache, and its captured steps, ask of a network."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from paged.cache.manager import PagedKvCacheManager
from paged.metadata import AttentionMetadata
from paged.models.layers.config import DecoderConfig
from paged.models.parallel.ranks import Ranks
from paged.models.parallel.share import Section


class DecoderNetwork(Protocol):
    """What PagedCausalLM runs; `models.families.llama.Llama` is one.

    config: of the whole network. own_config, rows, num_logits: the sizes of its part, and which part of the vocabulary
    it has, where several `ranks` share it; num_weights: then those of the whole.
    """

    config: DecoderConfig
    own_config: DecoderConfig
    num_logits: int
    rows: Section
    num_weights: int | None
    ranks: Ranks

    def bind(self, kv_manager: PagedKvCacheManager, max_seq_len: int) -> None: ...

    def pack(self) -> None: ...

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata, /
    ) -> torch.Tensor: ...

    def head(self, hidden: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...

    def parameters(self) -> Iterator[torch.nn.Parameter]: ...

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]: ...
