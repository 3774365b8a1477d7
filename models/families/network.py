"""A network: embedding, decoder layers, norm and LM head. A family is a network with its own reading of config.json."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn import functional

from paged.cache.manager import PagedKvCacheManager
from paged.kernels.core.device import NUMBA_DTYPES, use_triton, using_numba, wants_numba
from paged.kernels.core.dtypes import KvKind
from paged.kernels.cpu.products import pack
from paged.kernels.layers.linear import linear
from paged.models.families.decoder_layer import DecoderLayer, rows_of
from paged.models.layers.attention import Attention, HeldCaches
from paged.models.layers.attention_config import AttentionConfig
from paged.models.layers.attention_options import WidthNorm
from paged.models.layers.compressed_attention import CompressedAttention, CompressedPools
from paged.models.layers.config import DecoderConfig
from paged.models.layers.decoder_config import decoder_config
from paged.models.layers.head_rotation import KEYS_AND_VALUES
from paged.models.layers.indexer import MeanIndexer, PooledIndexer
from paged.models.layers.latent_attention import LatentAttention
from paged.models.layers.learned_rotation import LearnedRotation
from paged.models.layers.modules import KeepsFloat32, Linear, RmsNorm, empty_parameter, stream_norm
from paged.models.layers.rope import RopeConfig, rope_table
from paged.models.layers.share_bound import share_bound
from paged.models.layers.sparse_moe import SparseMoe
from paged.models.loading.hf_config import HfConfig
from paged.models.loading.weights import Destinations, PackedModule, Track, untracked
from paged.models.parallel.ranks import Ranks
from paged.models.parallel.share import Share
from paged.models.quantization.layouts import Quantization
from paged.models.quantization.packed_weights import PackedWeights
from paged.step.metadata import AttentionMetadata, OutputRows

if TYPE_CHECKING:
    from paged.models.drafts.head import DraftHead

# Modules of Gemma 4 and DeepSeek-V4.1 whose names are absent from tensor names in a checkpoint.
_OF_OURS = re.compile(r"\.(experts\.moe|own_inputs?|latent_pool)\b")


class Network(nn.Module):
    """Token ids to final hidden states, and hidden states to logits; families differ in `read_config`.

    Attributes:
        model_type: name of the family in transformers. A config.json that names another known family is refused.
        own_config: sizes of this rank's layers.
        rows, num_logits: rows of the vocabulary on this rank, and their number.
        num_weights: weights of the whole network, even if this rank holds a part.
        renames: patterns in tensor names of a checkpoint, and their replacements.
        layer_class: class of the decoder layers.
        norm_class: makes the norm behind the last layer.
        draft_head: the loaded multi-token head, block drafter or EAGLE-3 head; None for no head.
        kv_rotation: rotation of heads in the cache, as `kv_cache_rotation` in `LoadOptions`.
        uses_numba: whether the network was packed for a CPU with numba, and runs numba kernels.
    """

    model_type: str
    ranks = Ranks()
    renames: Mapping[str, str] = MappingProxyType({})
    layer_class: type[DecoderLayer] = DecoderLayer
    norm_class: Callable[[DecoderConfig], nn.Module] = staticmethod(stream_norm)
    kv_rotation: str | None = None
    uses_numba = False

    def __init__(self, config: DecoderConfig, share: Share | None = None) -> None:
        super().__init__()
        share = share or Share()
        self.config, self.own_config = config, share.config(config)
        self.rows = share.vocabulary(config.vocab_size)
        self.num_logits = self.rows.stop - self.rows.start
        self.embed_tokens = empty_parameter(self.num_logits, config.hidden_size)
        layers = nn.ModuleList(self.layer_class(self.own_config, index) for index in range(config.num_layers))
        self.layers = cast("Sequence[DecoderLayer]", layers)
        self.norm = cast(RmsNorm, self.norm_class(config))
        self.draft_head: DraftHead | None = None
        self.num_weights: int | None = None
        self._packed_embedding: torch.Tensor | None = None
        self.lm_head: Linear | None = None
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, {"lm_head": self.num_logits}, bias=config.head_bias)
        if config.quantization is not None:
            quantize(self, "model", config, config.quantization)

    @classmethod
    def read_config(cls, hf: HfConfig) -> DecoderConfig:
        """Return the configuration of this family's checkpoints; every family overrides this.

        A key of `hf` that the family does not read counts as unknown. If an unread key is in `COMPUTATION_KEYS`, its
        value must be neutral.
        """
        raise NotImplementedError

    @classmethod
    def variant(cls, hf: HfConfig) -> type[Network]:
        """Return the class for a config.json of this family, if names of weights depend on it."""
        return cls

    @classmethod
    def num_sums(cls, config: DecoderConfig) -> int:
        """Return the number of all-reduces in a step: for the embeddings, and in every layer."""
        return 1 + sum(cls.layer_class.num_sums(config, index) for index in range(config.num_layers))

    def read_folder(self, folder: Path) -> None:
        """Read what the network needs of a checkpoint's folder beside its configuration and weights."""

    def join(self, ranks: Ranks) -> None:
        """Let the layers sum the results of all ranks; `ranks` must match `share`."""
        self.ranks = ranks
        for layer in self.layers:
            layer.ranks = ranks
        for module in self.modules():
            if isinstance(module, WidthNorm) and ranks.size > 1:
                module.mean_of_ranks = ranks.mean

    def set_caches(self, kv_manager: PagedKvCacheManager, max_seq_len: int) -> None:
        """Give every layer its cache and the rotations of positions below max_seq_len."""
        self.derive_from_weights()
        config = self.config
        layers, sources = list(self.layers), list(config.cache_layers)
        if self.draft_head is not None:
            layers.extend(cast("Sequence[DecoderLayer]", self.draft_head.layers))
            sources.extend(range(config.num_layers, len(layers)))
        rotations = self.rotations()
        tables = {rotation: self.rotary_table(*rotation, max_seq_len) for rotation in set(rotations)}
        held = HeldCaches()
        pools = CompressedPools(kv_manager, self.cached_attention, held)
        for index, (layer, source, rotation) in enumerate(zip(layers, sources, rotations, strict=True)):
            layer.set_states(kv_manager, index, len(layers))
            attention, cos_sin_cache = layer.self_attn, tables[rotation]
            if attention is None:
                continue
            keys, values = held.of(kv_manager.k_cache(source)), held.of(kv_manager.v_cache(source))
            attention.set_cache(keys, values, kv_manager.table_of(source), cos_sin_cache)
            if self.kv_rotation is not None and isinstance(attention, Attention):
                attention.rotate_keys(self.embed_tokens.device)
            if isinstance(attention, CompressedAttention):
                pools.give(attention, index)
                continue
            indexer = attention.indexer
            if indexer is not None:
                key_layer = len(layers) + index  # cache of the indexer's keys or rows, see `cache_config`
                keys, table = held.of(kv_manager.k_cache(key_layer)), kv_manager.table_of(key_layer)
                if isinstance(indexer, (MeanIndexer, PooledIndexer)):
                    entries = held.of(kv_manager.entries(source))
                    indexer.set_pools(entries, kv_manager.table_of(source), keys, table, cos_sin_cache)
                else:
                    indexer.set_cache(keys, table, cos_sin_cache)
            k_scale, v_scale = kv_manager.scales(source)
            if k_scale is not None:
                attention.k_scale = held.of(k_scale)
            if v_scale is not None:
                attention.v_scale = held.of(v_scale)
        share_bound(self)
        # Round the factor to the weights' dtype, as training did: Gemma 3 in bfloat16 has 34 instead of 33.94.
        self.embedding_scale = torch.tensor(config.embedding_scale, dtype=self.embed_tokens.dtype).item()

    def attended_caches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the keys and values [..., elements] that `paged_attention` reads, of each layer and the draft head."""
        return [(module.k_cache, module.v_cache) for module in self.modules() if isinstance(module, Attention)]

    def rotate_kv(self, rotation: str | None) -> None:
        """Choose the rotation of heads in the cache, and fold that of values into the loaded weights."""
        self.kv_rotation = rotation
        if rotation == KEYS_AND_VALUES:
            for layer in self.layers:
                if isinstance(layer.self_attn, Attention):
                    layer.self_attn.rotate_values()

    @property
    def cached_attention(self) -> tuple[AttentionConfig, ...]:
        """The attention of each layer, the draft head's last."""
        attention = self.config.attention
        if self.draft_head is not None:
            attention += self.draft_head.attention
        return attention

    def rotations(self) -> list[tuple[RopeConfig | None, int]]:
        """Return each layer's rotation and the elements of a head that it rotates; the draft head's come last."""
        return [(layer.rope, layer.rotated_dim) for layer in self.cached_attention]

    def rotary_table(self, rope: RopeConfig | None, size: int, max_positions: int) -> torch.Tensor:
        """Return the rotary table of the layers with a rotation of `size` elements, see `rope_table`."""
        return rope_table(rope, size, max_positions, self.embed_tokens.device)

    def derive_from_weights(self) -> None:
        """Let layers derive their forms of the weights; call it again after weights have changed."""
        for module in self.modules():
            if isinstance(module, (CompressedAttention, LatentAttention, LearnedRotation, PackedWeights, SparseMoe)):
                module.derive_from_weights()
        if self._packed_embedding is not None:
            self._pack_embedding()

    def scale_caches(self, scales: Sequence[Mapping[str, torch.Tensor]], cache_kinds: tuple[KvKind, KvKind]) -> None:
        """Give every layer k_scale and v_scale of the cache that it reads; a missing scale is 1.

        scales: largest magnitude / 448 of all keys or values, or those of a head. NVFP4 takes one scale for all heads,
        largest magnitude / (448 * 6). cache_kinds: of keys and values.
        """
        for layer, source in zip(self.layers, self.config.cache_layers, strict=True):
            if layer.self_attn is None:
                continue
            for letter, kind in zip("kv", cache_kinds, strict=True):
                scale = scales[source].get(f"{letter}_scale")
                if kind.has_table_scale and scale is not None:
                    setattr(layer.self_attn, f"{letter}_table_scale", scale.amax() / 6)
                elif kind.takes_scales:
                    setattr(layer.self_attn, f"{letter}_scale", scale)
        share_bound(self)

    def computing(self, *, is_invariant: bool = False) -> AbstractContextManager[None]:
        """Return the context for everything that computes with the network; it selects this network's kernels.

        is_invariant: whether a row has the same bits in any batch, if `has_invariant_rows` allows it.
        """
        return using_numba(self.uses_numba, is_invariant=is_invariant)

    @property
    def has_invariant_rows(self) -> bool:
        """Whether, within `computing(is_invariant=True)`, no row's bits depend on other rows of the batch.

        Numba kernels and products in blocks are invariant. Adapters and PyTorch's activations are not known to be: an
        activation may differ where a thread's share of the rows ends. Sums of three or more ranks have no fixed order.
        """
        is_own = type(self).forward is not Network.forward or type(self).layer_inputs is not Network.layer_inputs
        if is_own or self.draft_head is not None or self.config.logits_softcap or self.ranks.size > 2:
            return False
        with self.computing():
            if use_triton(self.embed_tokens) or not wants_numba() or self.embed_tokens.dtype not in NUMBA_DTYPES:
                return False
            if self.lm_head is not None and not self.lm_head.has_invariant_rows:
                return False
            return all(layer.has_invariant_rows for layer in self.layers)

    def pack(self, track: Track = untracked) -> None:
        """Reorder weights for faster products on a CPU.

        `kernels.cpu.products.pack` reorders plain weights, `kernels.cpu.quantization.packed_product` quantised weights.
        Packed weights replace the others. A tied head is packed beside the embedding.
        """
        dtype = self.embed_tokens.dtype
        parts: list[tuple[Callable[[], None], int]] = []
        for module in self.modules():
            if isinstance(module, (Linear, SparseMoe)) and (size := module.bytes_to_pack(dtype)):
                parts.append((partial(_pack, module, dtype), size))
        if self.lm_head is None:
            parts.append((self._pack_embedding, self.embed_tokens.nbytes))
        for pack_part, _ in track(parts, desc="packing", unit="B", size=itemgetter(1)):
            pack_part()

    def quantize(self, form: str, track: Track = untracked) -> None:
        """Round the layers' projections and experts to int8 or int4 for a CPU, see `rounding`."""
        layers = cast("nn.ModuleList", self.layers)
        modules: list[Linear | SparseMoe] = []
        for module in layers.modules():
            if isinstance(module, (Linear, SparseMoe)):
                modules.append(module)
        for projection in track(modules, desc="quantising", unit="projection"):
            projection.round_to(form)

    def drop_packed_embedding(self) -> None:
        """Free the packed head until `derive_from_weights` packs it again."""
        if self._packed_embedding is not None and self._packed_embedding.is_mkldnn:
            self._packed_embedding = torch.empty(0)

    def weight_tensors(self) -> Iterator[torch.Tensor]:
        """Yield all weights as they are held, including packed ones."""
        yield from self.parameters()
        for module in self.modules():
            if isinstance(module, PackedModule):
                yield from module.weight_tensors()
        if self._packed_embedding is not None:
            yield self._packed_embedding

    def _pack_embedding(self) -> None:
        self._packed_embedding = pack(self.embed_tokens)

    def embedded_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the token ids to embed; see `placeholder_ids` of the configuration."""
        for placeholder_id in self.config.placeholder_ids:
            input_ids = input_ids.masked_fill(input_ids == placeholder_id, self.config.placeholder_padding)
        return input_ids

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return hidden states before the first layer, [num_tokens, hidden_size]."""
        input_ids = self.embedded_ids(input_ids)
        if self.ranks.size == 1:
            hidden = functional.embedding(input_ids, self.embed_tokens)
        else:
            rows = input_ids - self.rows.start
            is_elsewhere = (rows < 0) | (rows >= self.num_logits)
            hidden = functional.embedding(rows.masked_fill(is_elsewhere, 0), self.embed_tokens)
            hidden = self.ranks.sum(hidden.masked_fill_(is_elsewhere[:, None], 0))
        return hidden if self.embedding_scale == 1 else hidden.mul_(self.embedding_scale)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        outputs: OutputRows | None = None,
        boundaries: dict[int, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return hidden states after the final norm, [num_tokens, hidden_size].

        K and V of all tokens are written to the caches. With `outputs`, only their rows are returned. `boundaries`
        receives the residual streams before the layers that `draft_head` reads, by index.
        """
        hidden, embeds = self.embed(input_ids), metadata.embeds
        if embeds is not None:
            hidden.index_copy_(0, embeds.row_ids, embeds.rows)
        inputs = self.layer_inputs(input_ids, hidden)
        residual: torch.Tensor | None = None
        taps: tuple[int, ...] = ()
        if self.draft_head is not None and boundaries is not None:
            taps = self.draft_head.taps
        last = len(self.layers) - 1
        for index, (layer, layer_input) in enumerate(zip(self.layers, inputs, strict=True)):
            if boundaries is not None and index in taps:
                boundaries[index] = layer.stream(hidden, residual)
            output_rows = outputs if index == last else None
            hidden, residual = layer(hidden, residual, positions, metadata, output_rows, *layer_input)
            if embeds is not None:
                embeds.add_deepstack(hidden, index)
        if boundaries is not None and len(self.layers) in taps:
            boundaries[len(self.layers)] = self.layers[last].stream(hidden, residual)
        normed: torch.Tensor = self.norm(hidden, residual)[0]
        return normed

    def run(
        self,
        input_ids: torch.Tensor,
        metadata: AttentionMetadata,
        outputs: OutputRows | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return `forward` for the rows of `outputs`, and all tokens' features for `draft_head`, or None.

        Features are [num_tokens, hidden size of the head].
        """
        head = self.draft_head
        if head is None:
            return self(input_ids, metadata.positions, metadata, outputs), None
        boundaries: dict[int, torch.Tensor] = {}
        hidden = self(input_ids, metadata.positions, metadata, None, boundaries)
        return rows_of(hidden, outputs), head.features(hidden, boundaries)

    def layer_inputs(self, input_ids: torch.Tensor, hidden: torch.Tensor) -> Sequence[tuple[torch.Tensor, ...]]:
        """Return each layer's inputs beside the residual stream: the token ids, if it adds features of n-grams.

        hidden: the embedded tokens.
        """
        return [() if ngrams is None else (input_ids,) for ngrams in self.config.ngrams]

    def head(self, hidden: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits in the weights' dtype, [num_rows, num_logits], in `out` if given."""
        if self.lm_head is not None and (self.lm_head.packed is not None or self.lm_head.bias is not None):
            logits: torch.Tensor = self.lm_head(hidden)
        else:
            weight: torch.Tensor = self.embed_tokens
            if self.lm_head is not None:
                weight = self.lm_head.weight
            elif self._packed_embedding is not None:
                weight = self._packed_embedding
            if out is not None and not out.is_cpu:
                logits = torch.mm(hidden, weight.T, out=out)
            else:
                logits = linear(hidden, weight)
        if self.config.logits_scale != 1:
            logits.mul_(self.config.logits_scale)
        if softcap := self.config.logits_softcap:
            logits.div_(softcap).tanh_().mul_(softcap)
        if out is None or logits is out:
            return logits
        return out.copy_(logits)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits, float32 [num_rows, num_logits]."""
        return self.head(hidden).float()

    def destinations(self) -> Destinations:
        """Return the parameter slice of every tensor that a checkpoint must hold, by the tensor's name."""
        destinations: Destinations = {"model.embed_tokens.weight": self.embed_tokens}
        destinations |= self.norm.destinations("model.norm")
        for index, layer in enumerate(self.layers):
            destinations |= layer.destinations(f"model.layers.{index}")
        if self.lm_head is not None:
            destinations |= self.lm_head.destinations("")
        return destinations


def set_dtype(root: nn.Module, dtype: torch.dtype) -> None:
    """Convert the weights below `root`, except norms and routers, which stay float32."""
    root.to(dtype)
    for module in root.modules():
        if isinstance(module, KeepsFloat32):
            module.keep_float32()
        elif isinstance(module, RmsNorm) and module.has_float32_weight:
            module.float()


def quantize(root: nn.Module, prefix: str, config: DecoderConfig, quantization: Quantization) -> None:
    """Hold the weights below `root` packed, if the checkpoint packs them.

    prefix: beginning of their names in the checkpoint. A module `lm_head` has no prefix. The errors are
    `Linear.quantize`'s.
    """
    for path, module in list(root.named_modules()):
        name = _OF_OURS.sub("", f"{prefix}.{path}").replace(".mlp", f".{config.mlp_name}")
        name = name.replace(".linear_attn", f".{config.recurrent_name}")
        if isinstance(module, SparseMoe):
            module.quantize(name, quantization)
        elif isinstance(module, Linear):
            parent = name.rpartition(".")[0]
            if path == "lm_head":
                parent = ""
            module.quantize(parent, quantization)


def family(
    model_type: str,
    fields: Callable[[HfConfig], Mapping[str, Any]],
    renames: Mapping[str, str] = Network.renames,
    layer_class: type[DecoderLayer] = DecoderLayer,
    norm_class: Callable[[DecoderConfig], nn.Module] = stream_norm,
) -> type[Network]:
    """Return a family that differs from others only in fields of `decoder_config`, weight names, layers and norm."""

    class Family(Network):
        @classmethod
        def read_config(cls, hf: HfConfig) -> DecoderConfig:
            return decoder_config(hf, **fields(hf))

    Family.model_type, Family.renames, Family.layer_class = model_type, renames, layer_class
    Family.norm_class = staticmethod(norm_class)
    return Family


def _pack(module: Linear | SparseMoe, dtype: torch.dtype) -> None:
    """Pack a module if memory suffices: packing the modules before it may have used it up."""
    if module.bytes_to_pack(dtype):
        module.pack(dtype)
