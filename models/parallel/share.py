"""A rank's part of a network: sizes of its layers, and slices of stored tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import NamedTuple

import torch

from paged.errors import UnsupportedError
from paged.models.layers.attention_config import AttentionConfig
from paged.models.layers.config import DecoderConfig, MoeConfig
from paged.models.layers.recurrent_config import RecurrentConfig, ShortConvConfig
from paged.models.loading.weights import Destination, Destinations, Read, Tensors

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
# Projections whose results are summed over ranks; only one rank adds their bias.
_SUMMED = ("o_proj", "out_proj", "down_proj")
_SUMMED_BIAS = re.compile(rf"(?:{'|'.join(_SUMMED)})(?:\.bias|_bias)\Z")
_VOCABULARY = ("model.embed_tokens", "lm_head")


class Section(NamedTuple):
    """Consecutive features in one dimension of a tensor; a rank holds features `start` to `stop`."""

    size: int
    start: int
    stop: int

    @property
    def num_held(self) -> int:
        """Number of features on this rank."""
        return self.stop - self.start


class Part(NamedTuple):
    """The part of a stored tensor that a rank reads: `ranges` of dimension `dim`.

    numbers_groups: whether values are group numbers, which start at 0 on every rank.
    """

    dim: int
    ranges: tuple[tuple[int, int], ...]
    numbers_groups: bool = False

    def read(self, tensors: Tensors, name: str, destination: Destination) -> torch.Tensor:
        """Read the part from an open file."""
        parts = [tensors.get_part(name, self.dim, *bounds) for bounds in self.ranges]
        tensor = parts[0]
        if len(parts) > 1:
            tensor = torch.cat(parts, self.dim)
        if self.numbers_groups:
            tensor = tensor - tensor.min()
        return tensor


def _zeros(tensors: Tensors, name: str, destination: Destination) -> torch.Tensor:
    """Return zeros, for a bias that another rank adds."""
    return torch.zeros(destination.shape)


def _own_sizes(tensors: Tensors, name: str, destination: Destination, *, shares: Sequence[Fraction]) -> torch.Tensor:
    """Return the sizes of a rank's parts of a projection."""
    sizes: list[int] = []
    for size, share in zip(tensors.get_tensor(name).tolist(), shares, strict=True):
        sizes.append(int(size * share))
    return torch.tensor(sizes)


@dataclass(frozen=True)
class Share:
    """The part of rank `rank` of `size`: equal parts of heads, MLPs and vocabulary.

    Each expert is split too or, with `expert_parallel`, lies on one rank. Every rank holds all norms, routers and other
    small tensors. With more ranks than KV heads, several ranks hold the same head.
    """

    rank: int = 0
    size: int = 1
    expert_parallel: bool = False

    def config(self, network: DecoderConfig) -> DecoderConfig:
        """Return a network's configuration with the sizes of this rank's layers; vocabulary sizes stay.

        Raises:
            UnsupportedError: a size is not a multiple of the number of ranks.
        """
        if self.size == 1:
            return network
        sizes: list[int] = []
        for size, moe in zip(network.intermediate_size, network.moe, strict=True):
            if moe is not None and size % self.size:
                sizes.append(0)  # a layer with experts rarely has another MLP; `parts` refuses size 0 then
            else:
                sizes.append(self._divided("intermediate_size", size))
        return replace(
            network,
            attention=tuple(map(self._attention, network.attention)),
            recurrent=tuple(map(self._recurrent, network.recurrent)),
            moe=tuple(map(self._moe, network.moe)),
            intermediate_size=tuple(sizes),
        )

    def vocabulary(self, size: int) -> Section:
        """Return this rank's rows of the embedding and the head; the last rank may have fewer."""
        rows = -(-size // self.size)
        return Section(size, min(self.rank * rows, size), min((self.rank + 1) * rows, size))

    def parts(
        self, config: DecoderConfig, network_destinations: Destinations, destinations: Destinations
    ) -> dict[str, Read]:
        """Return the parts of tensors that this rank reads; tensors without an entry are read whole.

        config, network_destinations: the whole network's. destinations: this rank's.

        Raises:
            UnsupportedError: a rank's part of a packed tensor would begin or end within a word or a group.
        """
        parts: dict[str, Read] = {}
        for name, destination in destinations.items():
            if self.rank and _SUMMED_BIAS.search(name) and not (self.expert_parallel and ".experts." in name):
                parts[name] = _zeros
            elif name.endswith(".weight_shape"):  # describes the packed weights beside it
                packed = f"{name.removesuffix('shape')}packed"
                shares = list(map(Fraction, destinations[packed].shape, network_destinations[packed].shape))
                parts[name] = partial(_own_sizes, shares=shares)
            elif (part := self._part(config, name, network_destinations[name], destination)) is not None:
                parts[name] = part.read
        return parts

    def adapted(
        self, config: DecoderConfig, shapes: Mapping[str, Sequence[int]]
    ) -> dict[str, tuple[int, list[Section]]]:
        """Return the split dimension (0 rows, 1 columns) and this rank's part of each split projection.

        shapes: [out_features, in_features] on this rank, by name.
        """
        parts: dict[str, tuple[int, list[Section]]] = {}
        if self.size == 1:
            return parts
        for name, shape in shapes.items():
            dim, sections = int(name.endswith(_SUMMED)), self.sections(config, f"{name}.weight")
            factor = shape[dim] // sum(section.num_held for section in sections)
            scaled = []
            for section in sections:
                scaled.append(Section(factor * section.size, factor * section.start, factor * section.stop))
            parts[name] = dim, scaled
        return parts

    def sections(self, config: DecoderConfig, name: str) -> list[Section]:
        """Return the features of a split projection, by the name of one of its tensors in a checkpoint."""
        if name.startswith(_VOCABULARY):
            return [self.vocabulary(config.vocab_size)]
        match = _LAYER.fullmatch(name)
        assert match is not None
        layer, path = int(match[1]), match[2]
        recurrent = config.recurrent[layer]
        if recurrent is not None and path.startswith(f"{config.recurrent_name}."):
            return [self._even(size) for size in recurrent.parts(path.split(".")[1])]
        if path.startswith("self_attn.indexer."):
            return self._index_heads(config.attention[layer], path.split(".")[2])
        if path.startswith("self_attn."):
            return self._heads(config.attention[layer], path.split(".")[1])
        moe = config.moe[layer]
        size, interleaved = config.intermediate_size[layer], False
        if moe is not None and f"{moe.shared_name}." in path:
            size = moe.shared_size
        elif moe is not None and "experts." in path:
            size, interleaved = moe.intermediate_size, moe.interleaved
            if self.expert_parallel:
                return [self._even(moe.num_experts)]
        if "gate_up_proj" not in path:
            return [self._even(size)]
        if interleaved:
            return [self._even(2 * size)]
        return [self._even(size), self._even(size)]

    def _heads(self, layer: AttentionConfig, name: str) -> list[Section]:
        first, count = self._kv_heads(layer)
        per_rank = layer.num_heads // self.size

        def of(heads: int, first: int, count: int, size: int) -> Section:
            return Section(heads * size, first * size, (first + count) * size)

        query = of(layer.num_heads, self.rank * per_rank, per_rank, layer.head_dim)
        key = of(layer.num_kv_heads, first, count, layer.head_dim)
        value = of(layer.num_kv_heads, first, count, layer.v_head_dim)
        return {"k_proj": [key], "k_norm": [key], "v_proj": [value], "qkv_proj": [query, key, value]}.get(name, [query])

    def _index_heads(self, layer: AttentionConfig, name: str) -> list[Section]:
        """Return the features of an indexer with a head for each KV head; every rank holds its one key."""
        assert layer.block_index is not None  # other indexers are not split
        size = layer.block_index.head_dim
        if name != "q_proj":
            return [Section(size, 0, size)]
        first, count = self._kv_heads(layer)
        return [Section(layer.num_kv_heads * size, first * size, (first + count) * size)]

    def _kv_heads(self, layer: AttentionConfig) -> tuple[int, int]:
        """Return the index of this rank's first KV head, and the number of its KV heads."""
        return self.rank * layer.num_kv_heads // self.size, max(1, layer.num_kv_heads // self.size)

    def scales(self, layer: AttentionConfig, scales: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return this rank's scales of a layer's cache: a single scale, or one per KV head."""
        first, count = self._kv_heads(layer)
        held = dict(scales)
        for name, scale in scales.items():
            if len(scale) > 1:
                held[name] = scale[first : first + count]
        return held

    def _even(self, size: int) -> Section:
        return Section(size, size * self.rank // self.size, size * (self.rank + 1) // self.size)

    def _divided(self, name: str, size: int) -> int:
        if size % self.size:
            raise UnsupportedError(f"tensor_parallel_size {self.size}: {name} {size}, supported are multiples of it")
        return size // self.size

    def _attention(self, layer: AttentionConfig) -> AttentionConfig:
        compressed = layer.compressed
        if compressed is not None:  # groups of heads are split; every rank has all rows and entries
            compressed = replace(compressed, num_groups=self._divided("o_groups", compressed.num_groups))
        heads = layer.num_kv_heads
        if max(heads, self.size) % min(heads, self.size):
            raise UnsupportedError(
                f"tensor_parallel_size {self.size}: num_key_value_heads {heads}, supported are multiples and divisors"
            )
        num_heads = self._divided("num_attention_heads", layer.num_heads)
        num_kv_heads = self._kv_heads(layer)[1]
        return replace(layer, num_heads=num_heads, num_kv_heads=num_kv_heads, compressed=compressed)

    def _recurrent(self, layer: RecurrentConfig | None) -> RecurrentConfig | None:
        if layer is None:
            return None
        if isinstance(layer, ShortConvConfig):
            return replace(layer, size=self._divided("channels of a convolution", layer.size))
        heads = self._divided("heads of recurrent layers", layer.num_heads)
        return replace(
            layer, num_heads=heads, num_key_heads=self._divided("key heads of recurrent layers", layer.num_key_heads)
        )

    def _moe(self, moe: MoeConfig | None) -> MoeConfig | None:
        if moe is None:
            return None
        if moe.latent_eps is not None:
            raise UnsupportedError(f"tensor_parallel_size {self.size}: a norm of the experts' sum, supported is 1")
        shared_size = self._divided("the shared experts' intermediate size", moe.shared_size)
        if self.expert_parallel:
            held = self._divided("experts", moe.num_experts)
            return replace(moe, held=(self.rank * held, held), shared_size=shared_size)
        size = self._divided("the experts' intermediate size", moe.intermediate_size)
        return replace(moe, intermediate_size=size, shared_size=shared_size)

    def _part(
        self, config: DecoderConfig, name: str, network_destination: Destination, destination: Destination
    ) -> Part | None:
        """Return this rank's part of a tensor, None for all of it; its destinations in the network and on this rank."""
        shape = [*destination.shape, *[1] * (len(network_destination.shape) - len(destination.shape))]
        differing = [dim for dim, size in enumerate(network_destination.shape) if size != shape[dim]]
        if not differing:
            return None
        (dim,) = differing
        sections = self.sections(config, name)
        # Entries of the tensor per feature: less than 1 if it is packed, because an entry then holds several features.
        scale = Fraction(network_destination.shape[dim], sum(section.size for section in sections))
        ranges: list[tuple[int, int]] = []
        num_entries, is_within_entry = Fraction(0), False
        for features in _placed(sections):
            start, stop = features.start * scale, features.stop * scale
            if start.denominator != 1 or stop.denominator != 1:
                is_within_entry = True
            ranges.append((int(start), int(stop)))
            num_entries += stop - start
        if is_within_entry or num_entries != shape[dim]:
            raise UnsupportedError(
                f"tensor_parallel_size {self.size}: {name} of shape {list(network_destination.shape)} would be cut "
                f"within an entry of dimension {dim}"
            )
        return Part(dim, tuple(ranges), numbers_groups=name.endswith("g_idx"))


def cut(tensor: torch.Tensor, sections: Sequence[Section], dim: int) -> torch.Tensor:
    """Return a rank's part of a plain tensor whose dimension `dim` consists of the sections."""
    return torch.cat([tensor.narrow(dim, kept.start, len(kept)) for kept in _placed(sections)], dim)


def _placed(sections: Sequence[Section]) -> list[range]:
    """Return a rank's ranges in consecutive sections."""
    ranges: list[range] = []
    offset = 0
    for section in sections:
        ranges.append(range(offset + section.start, offset + section.stop))
        offset += section.size
    return ranges


def step_bytes(
    config: DecoderConfig, *, num_sums: int, last_sums: int, size: int, itemsize: int, num_tokens: int, num_rows: int
) -> dict[str, int]:
    """Return the bytes that a rank gives to collectives in a step, by kind, like `Ranks.num_bytes`.

    Args:
        num_sums: all-reduces of hidden states, see `Network.num_sums`.
        last_sums: all-reduces in the last layer, over the `num_rows` rows with logits.
        size: number of ranks.
        itemsize: bytes of an activation.
    """
    logits = -(-config.vocab_size // size)
    # A norm over all heads needs the sum of two float32 values per token over ranks: one for queries, one for keys.
    norms = sum(2 for layer in config.attention if layer.qk_norm == "width")
    return {
        "sum": (num_tokens * (num_sums - last_sums) + num_rows * last_sums) * config.hidden_size * itemsize
        + num_tokens * 4 * norms,
        "gather": num_rows * logits * itemsize,
    }


def ring_bytes(num_bytes: dict[str, int], size: int) -> float:
    """Return the bytes that a rank sends in a ring for `num_bytes`. A sum travels twice; a rank's own part stays."""
    return num_bytes["sum"] * 2 * (size - 1) / size + num_bytes["gather"]
