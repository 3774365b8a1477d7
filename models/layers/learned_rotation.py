"""A rotation with learned frequencies."""

from __future__ import annotations

import torch
from torch import nn

from paged.models.layers.modules import empty_parameter
from paged.models.layers.rope import RopeConfig, fill_rope_table, rope_frequencies
from paged.models.loading.weights import Destinations


class LearnedRotation(nn.Module):
    """LeRoPE (Mistral Large 4, 2026): each pair's frequency is multiplied by exp(alpha), with a learned alpha.

    alpha is float32 in models of any dtype, because an error of the frequency grows with the position.
    """

    def __init__(self, num_pairs: int) -> None:
        super().__init__()
        self.alpha = empty_parameter(num_pairs)
        self._filled: tuple[RopeConfig, torch.Tensor, torch.Tensor] | None = None

    def keep_float32(self) -> None:
        """Convert alpha back to float32."""
        self.alpha.data = self.alpha.data.float()

    def fill(self, rope: RopeConfig, size: int, table: torch.Tensor) -> None:
        """Write the rotary table, float32 [positions, size]."""
        self._filled = rope, rope_frequencies(rope, size, len(table)), table
        self.derive_from_weights()

    def derive_from_weights(self) -> None:
        """Write the table again if there is one; call it after alpha has changed."""
        if self._filled is not None:
            rope, frequencies, table = self._filled
            learned = frequencies.to(table.device) * self.alpha.exp()
            fill_rope_table(table, learned, rope.attention_factor)

    def destinations(self, prefix: str) -> Destinations:
        return {f"{prefix}.alpha": self.alpha}
