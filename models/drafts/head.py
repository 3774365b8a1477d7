"""The base of draft heads: decoder layers that guess further tokens from the target's hidden states.

The input at position j is the embedding of token j and the target's hidden state of token j - 1. So a head's keys and
values depend on the tokens up to j alone, like the target's, and lie in the same blocks. Sharing, forking, swapping or
truncating a sequence therefore covers the head too. Position 0 has no input, and attention leaves it out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

from paged.errors import UnsupportedError
from paged.kernels.layers.linear import linear
from paged.models.layers.config import DecoderConfig
from paged.models.layers.modules import empty_parameter, stream_norm
from paged.models.loading.weights import Destinations
from paged.step.metadata import AttentionMetadata, OutputRows


class Target(Protocol):
    """The part of the target network that a draft head uses."""

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


class DraftHead(nn.Module):
    """A draft head; subclasses differ in how they join their inputs.

    Attributes:
        layers: the decoder layers of the head, mostly one.
        attention: the attention of each layer, which needs a cache.
        taps: indices of the target's layers whose inputs the head reads. The number of layers stands for the output of
            the last layer. Empty if the head reads the final hidden states.
        embed_tokens, lm_head: None if the head uses the target's.
        offsets: ids that the target gives to the head's tokens, minus the head's ids; None if all are equal.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, target: Target, config: DecoderConfig, layers: Sequence[nn.Module], num_logits: int) -> None:
        """config: configuration of the head; its last layers are `layers`."""
        super().__init__()
        self.vocab_size, self.layers = config.vocab_size, nn.ModuleList(layers)
        self.attention = config.attention[-len(layers) :]
        for attention in self.attention:
            is_unknown = attention.window or attention.chunk_size or attention.softcap or attention.sinks
            if is_unknown and attention.compressed is None:
                raise UnsupportedError("draft: a head with a window, chunks, a soft cap or sinks in its attention")
        self.norm = stream_norm(config)
        self.embed_tokens: nn.Parameter | None = empty_parameter(config.vocab_size, config.hidden_size)
        self.lm_head: nn.Parameter | None = empty_parameter(num_logits, config.hidden_size)
        self.offsets: nn.Parameter | None = None
        self._embed, self._logits = target.embed, target.logits  # methods, so the target is no submodule

    @property
    def layer(self) -> Any:
        """The layer of a head with one."""
        (layer,) = self.layers
        return layer

    def features(self, hidden: torch.Tensor, boundaries: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Return the features that the head reads from the target, [num_tokens, size of its features].

        hidden: states after the target's final norm. boundaries: inputs of the layers in `taps`, by index.
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

        input_ids: int64 [num_tokens]. features: features of the token before each, [num_tokens, size].
        """
        raise NotImplementedError

    def destinations(self) -> Destinations:
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
