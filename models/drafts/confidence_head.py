"""The confidence head of a drafter: the probability that the target accepts a draft."""

from __future__ import annotations

import torch
from torch import nn

from paged.kernels.layers.linear import linear
from paged.models.layers.modules import empty_parameter
from paged.models.loading.weights import Destinations


class ConfidenceHead(nn.Module):
    """sigmoid(w [h, e]), for a hidden state h and the embedding e of the token before the draft (DSpark).

    h is the state before the final norm. The weights are float32 in models of any dtype. The formula and the name of
    the weights are those of vLLM 0.33 (`DSparkConfidenceHead`).
    """

    def __init__(self, hidden_size: int, embedding_size: int) -> None:
        super().__init__()
        self.weight = empty_parameter(1, hidden_size + embedding_size)

    def keep_float32(self) -> None:
        """Convert the weights back to float32."""
        self.float()

    def forward(self, hidden: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """Return float32 [n] for hidden [n, hidden_size] and embeddings [n, embedding_size]."""
        inputs = torch.cat([hidden, embeddings], -1).float()
        return linear(inputs, self.weight).squeeze(-1).sigmoid()

    def destinations(self, prefix: str) -> Destinations:
        return {f"{prefix}.proj.weight": self.weight}
