"""Shape of the recurrent layers' states, and the memory that one sequence takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paged.errors import InvalidInputError
from paged.kernels.common.scalars import as_int, shown

if TYPE_CHECKING:
    import torch

# Tokens of a ring by default. A ring of 16 is written back every 16 decode steps; see ReplaySSM (Dao AI Lab, 2026).
DEFAULT_RING = 16
# Tokens that a decoding sequence may run in a step by default: the newest one and 7 drafts.
DEFAULT_APPEND = 8
_MOST = (1 << 31) - 2


@dataclass(frozen=True)
class RecurrentSpec:
    """States of all recurrent layers; all have the same shape.

    A slot holds them for one sequence: the state S of every layer at a base position, the rows before it that the
    convolution needs, and a ring of the tokens since, from which the state at any of them follows.

    Attributes:
        layers: indices of the model's recurrent layers.
        conv_channels, conv_width: channels of the causal convolution, and the tokens it reads, its own included.
        num_heads, head_dim, num_key_heads, key_dim: S is [num_heads, head_dim, key_dim] (values by keys); heads of one
            group share a key. All 0 for layers that are a convolution only.
        num_slots: slots that can be handed out; storage holds one more, slot 0. A running sequence takes up to two.
        num_swap_slots: slots of host memory for `swap_out`.
        ring: tokens of a ring.
        max_append: a sequence with at most this many tokens in a step appends them to its ring, so that they can be
            taken back; one with more is scanned.
        snapshot_interval: also keep the state of prompts every so many tokens for the prefix cache, a multiple of the
            block size; None for the ends of prompts and the positions where prompts part only.
        conv_dtype: of the convolution's rows; None for the cache's dtype, or float32 if that is an 8-bit one. S and the
            rings are float32.

    Raises:
        InvalidInputError: a size is out of range, the layers are not distinct indices, or max_append exceeds the ring.
    """

    layers: tuple[int, ...]
    conv_channels: int
    conv_width: int
    num_heads: int = 0
    head_dim: int = 0
    num_key_heads: int = 0
    key_dim: int = 0
    num_slots: int = 64
    num_swap_slots: int = 0
    ring: int = DEFAULT_RING
    max_append: int = DEFAULT_APPEND
    snapshot_interval: int | None = None
    conv_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        layers = tuple(as_int("recurrent layers", layer) for layer in self.layers)
        if not layers or len(set(layers)) != len(layers):
            raise InvalidInputError(f"recurrent layers: {shown(layers)}, expected one or more distinct layers")
        self._set("layers", layers)
        least_heads = int(bool(self.num_heads))
        for name, least in {
            **dict.fromkeys(("conv_channels", "ring", "max_append"), 1),
            **dict.fromkeys(("num_heads", "head_dim", "num_key_heads", "key_dim"), least_heads),
            "conv_width": 2,
            "num_slots": 2,
            "num_swap_slots": 0,
        }.items():
            self._set(name, as_int(name, getattr(self, name), low=least, high=_MOST))
        if self.snapshot_interval is not None:
            self._set("snapshot_interval", as_int("snapshot_interval", self.snapshot_interval, low=1))
        if self.max_append > self.ring:
            raise InvalidInputError(f"max_append: {self.max_append}, expected at most the ring's {self.ring} tokens")
        if self.num_heads and self.num_heads % self.num_key_heads:
            raise InvalidInputError(f"num_heads: {self.num_heads}, expected a multiple of {self.num_key_heads}")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def state_bytes(self) -> int:
        """Bytes of S of one sequence, over all layers."""
        return 4 * len(self.layers) * self.num_heads * self.head_dim * self.key_dim

    def conv_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one sequence's convolution rows of `dtype`, without those of the ring."""
        return len(self.layers) * (self.conv_width - 1) * self.conv_channels * dtype.itemsize

    def ring_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one sequence's ring, with convolution rows of `dtype`."""
        floats = self.num_key_heads * self.key_dim + self.num_heads * self.head_dim + self.num_heads
        return len(self.layers) * self.ring * (4 * floats + self.conv_channels * dtype.itemsize)

    def slot_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of a slot with convolution rows of `dtype`."""
        return self.state_bytes + self.conv_bytes(dtype) + self.ring_bytes(dtype)
