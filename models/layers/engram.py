"""Engram: features of the last tokens, from hashed tables in host memory, gated into residual streams."""

from __future__ import annotations

import torch
from torch import nn

from paged.cache.manager import PagedKvCacheManager
from paged.kernels.cache.latent_cache import write_index_keys
from paged.models.layers.config import DecoderConfig
from paged.models.layers.hyper_connection import StreamsRmsNorm
from paged.models.layers.modules import Linear, empty_parameter
from paged.models.layers.ngrams import RowHash, stream_gates
from paged.models.layers.recurrent_config import EngramConfig
from paged.models.loading.host_weights import HostWeights
from paged.models.loading.weights import Destinations
from paged.step.metadata import AttentionMetadata

# Elements of a row that share a scale, a power of two.
GROUP = 32


def has_packed_tables(config: DecoderConfig, index: int) -> bool:
    """Return whether a checkpoint packs the tables of layer `index`."""
    if config.quantization is None:
        return False
    return config.quantization.layout(f"model.layers.{index}.engram.embed") is not None


def table_bytes(config: EngramConfig, dtype: torch.dtype, *, is_packed: bool) -> int:
    """Return the bytes of a layer's tables. dtype: of plain weights."""
    num_elements = config.num_table_elements
    if is_packed:
        return num_elements + num_elements // GROUP
    return num_elements * dtype.itemsize


class SharedIds:
    """The ids of the last tokens in the hash, which the cache keeps for every position beside its entries.

    So chunks, hits of the prefix cache, forks, truncations and drafts find earlier tokens like keys. Ids are kept as
    float32, which is exact below 2^24.
    """

    ids: torch.Tensor  # float32 [num_blocks, block_size, 1]
    table: int
    of_tokens: torch.Tensor  # int64 [vocab_size]

    def __init__(self, config: EngramConfig) -> None:
        self.config = config

    def set_cache(self, kv_manager: PagedKvCacheManager, layer: int, index: int, of_tokens: torch.Tensor) -> None:
        """Take the cache's entries `index` of `layer`, and the id of each token in the hash."""
        self.ids = kv_manager.entries(layer, index).view(torch.float32)
        self.table, self.of_tokens = kv_manager.table_of(layer), of_tokens

    def last(self, input_ids: torch.Tensor, metadata: AttentionMetadata) -> tuple[torch.Tensor, ...]:
        """Keep the ids of a step's tokens [T]; return each token's, that of the token before, ..., int64 [T] each."""
        table, slots = metadata.table(self.table)
        hash_ids = self.of_tokens[input_ids]  # [T]
        write_index_keys(hash_ids[:, None].float(), self.ids, slots)
        positions, device = metadata.positions, hash_ids.device
        block_size, order = self.ids.shape[1], self.config.order
        tokens = torch.arange(len(hash_ids), device=device)
        ends = metadata.cu_seqlens_q[1:].long()
        seqs = torch.searchsorted(ends, tokens, right=True).clamp(max=len(ends) - 1)  # [T]
        places = positions[:, None] - torch.arange(order, device=device)  # [T, order]
        kept = places.clamp(min=0)
        blocks = table[seqs[:, None], kept // block_size].long()
        ids = self.ids[blocks, kept % block_size, 0].long()  # [T, order]
        pad = self.of_tokens[self.config.pad_token_id]
        return torch.where(places >= 0, ids, pad).unbind(1)


class EngramTables(HostWeights):
    """The tables of all heads, in host memory; a GPU reads the rows of a step over its bus.

    is_packed: whether rows are e4m3, with a scale for every `GROUP` elements that is a power of two.
    """

    def __init__(self, config: EngramConfig, *, is_packed: bool) -> None:
        super().__init__()
        self.is_packed = is_packed
        self.exponents: nn.Parameter | None = None
        if is_packed:
            codes = torch.empty(config.num_rows, config.head_size, dtype=torch.uint8)
            exponents = torch.empty(config.num_rows, config.head_size // GROUP, dtype=torch.uint8)
            self.weight = nn.Parameter(codes, requires_grad=False)
            self.exponents = nn.Parameter(exponents, requires_grad=False)
        else:
            self.weight = empty_parameter(config.num_rows, config.head_size)

    def forward(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the rows of all heads side by side, [T, size] in `dtype`. rows: int64 [T, heads]."""
        numbers = self.seen["weight"][rows]  # [T, heads, head_size]
        if self.is_packed:
            groups = numbers.view(torch.float8_e4m3fn).float().unflatten(-1, (-1, GROUP))
            scales = self.seen["exponents"][rows].view(torch.float8_e8m0fnu).float()  # [T, heads, groups]
            numbers = (groups * scales.unsqueeze(-1)).flatten(-2)
        return numbers.flatten(1).to(dtype)

    def destinations(self, prefix: str) -> Destinations:
        if self.exponents is None:
            return {f"{prefix}.weight": self.weight}
        return {
            f"{prefix}.weight": self.weight.data.view(torch.float8_e4m3fn),
            f"{prefix}.scale": self.exponents.data.view(torch.float8_e8m0fnu),
        }


class Engram(nn.Module):
    """What a layer adds to each residual stream: a value of the last tokens, gated by the stream.

    From DeepSeek-V4.1 (DeepSeek-AI, 2026), as in vLLM 0.33: s_n += sigmoid(signed sqrt(q_n norm(s_n) . k_n norm(key_n)
    / sqrt(D))) * value, in float32.

    Shapes: T tokens, N streams, D hidden size.
    """

    def __init__(self, config: DecoderConfig, engram: EngramConfig, index: int) -> None:
        super().__init__()
        assert config.streams is not None
        self.config, count = engram, config.streams.count
        self.shared_ids = SharedIds(engram)
        self.tables = EngramTables(engram, is_packed=has_packed_tables(config, index))
        self.sizes = [count * config.hidden_size, config.hidden_size]
        self.wkv = Linear(engram.size, {"wkv": sum(self.sizes)})
        self.query_norm, self.key_norm = StreamsRmsNorm(config, count), StreamsRmsNorm(config, count)

    def set_cache(self, kv_manager: PagedKvCacheManager, layer: int, index: int, of_tokens: torch.Tensor) -> None:
        """See `SharedIds.set_cache`."""
        self.shared_ids.set_cache(kv_manager, layer, index, of_tokens)
        device = of_tokens.device
        self.hash = RowHash(self.config, device)
        self.tables.see_from(device)

    def forward(self, streams: torch.Tensor, input_ids: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        """Return the streams [T, N, D] with the features of the tokens [T]."""
        rows = self.hash.rows(self.shared_ids.last(input_ids, metadata))
        features = self.tables(rows, streams.dtype)  # [T, size]
        keys, values = self.wkv(features).float().split_with_sizes(self.sizes, -1)  # [T, N * D], [T, D]
        wide = streams.float()
        keys, _ = self.key_norm(keys.view_as(wide))
        queries, _ = self.query_norm(wide)
        joined: torch.Tensor = wide + stream_gates(keys, queries) * values[:, None]
        return joined.to(streams.dtype)

    def destinations(self, prefix: str) -> Destinations:
        destinations = self.wkv.destinations(prefix) | self.tables.destinations(f"{prefix}.embed")
        for name, norm in (("q", self.query_norm), ("k", self.key_norm)):
            destinations[f"{prefix}.{name}_weight"] = norm.weight.data.unflatten(0, (-1, self.sizes[1]))
        return destinations
