"""What every draft head is: a decoder layer between the target's embedding and its LM head, or copies of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional

from paged.errors import UnsupportedError
from paged.kernels.common.torch_ops.linear import linear
from paged.metadata import AttentionMetadata, OutputRows
from paged.models.layers.config import DecoderConfig
from paged.models.layers.decoder import empty_parameter, stream_norm
from paged.models.loading.weights import WeightSlots


class Target(Protocol):
    """What a head uses of the network that it drafts for."""

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


class DraftHead(nn.Module):
    """A draft head; subclasses differ in how they join their inputs.

    Attributes:
        layer: its decoder layer.
        attention: the layer's, for the cache.
        taps: indices of the target's layers whose inputs it reads; the number of layers stands for the last one's
            output. Empty if it reads the final hidden states.
        embed_tokens, lm_head: None for the target's.
        offsets: distance from each of the head's tokens to the target's token that it stands for; None if all are 0.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, target: Target, config: DecoderConfig, layer: nn.Module, num_logits: int) -> None:
        """config: of the head, whose last layer is `layer`."""
        super().__init__()
        self.vocab_size, self.layer = config.vocab_size, layer
        self.attention = attention = config.attention[-1]
        if attention.window or attention.chunk_size or attention.softcap or attention.sinks:
            raise UnsupportedError("draft: a head with a window, chunks, a soft cap or sinks in its attention")
        self.norm = stream_norm(config)
        self.embed_tokens: nn.Parameter | None = empty_parameter(config.vocab_size, config.hidden_size)
        self.lm_head: nn.Parameter | None = empty_parameter(num_logits, config.hidden_size)
        self.offsets: nn.Parameter | None = None
        self._embed, self._logits = target.embed, target.logits  # bound methods, which are no submodules

    def features(self, hidden: torch.Tensor, boundaries: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Return what the head reads of the target, [num_tokens, hidden_size].

        hidden: after the target's final norm. boundaries: inputs of the layers in `taps`.
        """
        return hidden

    def forward(
        self,
        input_ids: torch.Tensor,
        features: torch.Tensor,
        metadata: AttentionMetadata,
        outputs: OutputRows | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return hidden states after the final norm, and the features for the tokens drafted from them.

        input_ids: int64 [num_tokens]. features: of the tokens before these, [num_tokens, hidden_size].
        """
        raise NotImplementedError

    def weight_slots(self) -> WeightSlots:
        """Return every tensor that a checkpoint must hold, by name."""
        raise NotImplementedError

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.embed_tokens is None:
            return self._embed(input_ids)
        return functional.embedding(input_ids, self.embed_tokens)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits over the target's vocabulary, float32; -inf for tokens that the head lacks."""
        if self.lm_head is None:
            logits = self._logits(hidden)
        else:
            logits = linear(hidden, self.lm_head).float()
        if self.offsets is None:
            return logits
        token_ids = torch.arange(len(self.offsets), device=logits.device) + self.offsets
        all_logits = logits.new_full((len(logits), self.vocab_size), -torch.inf)
        return all_logits.index_copy_(1, token_ids, logits)
