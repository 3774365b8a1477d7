"""A network that runs transformers' own module over a paged KV cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from paged.cache.manager import PagedKvCacheManager
from paged.errors import UnsupportedError
from paged.kernels.core.dtypes import KvKind
from paged.models.families.decoder_layer import rows_of
from paged.models.families.network import Network
from paged.models.generic.config import ModuleConfig
from paged.models.generic.experts import ModuleExperts
from paged.models.generic.interface import PAGED, PagedLayer, Step
from paged.models.generic.layers import ModuleLinear, use_our_layers
from paged.models.generic.own_attention import use_paged_attention
from paged.models.generic.probe import build
from paged.models.generic.split import split, summed
from paged.models.layers.attention import HeldCaches
from paged.models.layers.config import DecoderConfig
from paged.models.layers.rope import rope_table
from paged.models.layers.share_bound import share_bound
from paged.models.loading.weights import Track, untracked
from paged.models.parallel.ranks import Ranks
from paged.models.parallel.share import Share
from paged.models.quantization.layouts import ROUTER
from paged.step.metadata import AttentionMetadata, OutputRows


class ModuleNetwork(Network):
    """transformers' module as a network: attention, products and RMS norms are ours, all other code is its own.

    module: the whole model. A `GivenHidden` replaces its decoder and returns the hidden states that `head` is given. So
        logits come from the model's own forward, with its factors and caps.
    """

    def __init__(
        self,
        config: ModuleConfig,
        share: Share | None = None,
        module: Any = None,
        device: torch.device | None = None,
    ) -> None:
        """module: the module with all weights; this rank's part moves to `device`. None builds one without weights."""
        nn.Module.__init__(self)
        share = share or Share()
        has_weights = module is not None
        if module is None:
            module = build(config.model_class, config.config, PAGED, config.text_module)
            drop_unused(module, config.unused)
        use_paged_attention(module)
        num_weights = sum(parameter.numel() for parameter in module.parameters())
        split(module, config, share)
        if has_weights:
            module.to(device)
            use_our_layers(module, config.linears, next(module.parameters()).dtype)
        self.config, self.own_config = config, share.config(config)
        self.rows = share.vocabulary(config.vocab_size)
        self.num_logits = self.rows.stop - self.rows.start
        self.layers: Sequence[Any] = ()
        self.draft_head = None
        self.num_weights = num_weights
        self._packed_embedding = None
        # An Identity instead of None, because `pack` would pack the embedding for None.
        self.lm_head: Any = module.get_output_embeddings() or nn.Identity()
        self._attentions = [module.get_submodule(name) for name in config.places]
        self._summed = [module.get_submodule(name) for name in summed(config)]
        self.decoder = module.get_submodule(config.decoder)
        self._decoder_layers = module.get_submodule(config.layers)
        self.module = module
        self._given = GivenHidden(self.decoder)
        module.set_submodule(config.decoder, self._given)
        self._step = Step()
        self._layers: list[PagedLayer] = []

    @classmethod
    def num_sums(cls, config: DecoderConfig) -> int:
        """Return the number of all-reduces in a step; the embeddings need none."""
        assert isinstance(config, ModuleConfig)
        return len(summed(config))

    def join(self, ranks: Ranks) -> None:
        """Let the modules of a `tp_plan` sum the results of all ranks; `ranks` must match `share`."""
        self.ranks = ranks
        if ranks.size > 1:
            for part in self._summed:
                part.register_forward_hook(lambda _, __, out: ranks.sum(out.contiguous()))

    @property
    def embed_tokens(self) -> torch.Tensor:  # type: ignore[override]
        """The module's embedding, on its device."""
        weight: torch.Tensor = next(self.module.parameters())
        return weight

    def set_caches(self, kv_manager: PagedKvCacheManager, max_seq_len: int) -> None:
        """Give every attention module its cache."""
        held = HeldCaches()
        no_rotation = rope_table(None, 0, max_seq_len, self.embed_tokens.device)
        self._layers = []
        for index, (attention, kind) in enumerate(zip(self._attentions, self.own_config.attention, strict=True)):
            k_scale, v_scale = kv_manager.scales(index)
            layer = PagedLayer(
                config=kind,
                step=self._step,
                k_cache=held.of(kv_manager.k_cache(index)),
                v_cache=held.of(kv_manager.v_cache(index)),
                table=kv_manager.table_of(index),
                no_rotation=no_rotation,
                k_scale=k_scale,
                v_scale=v_scale,
            )
            layer.attach(attention)
            self._layers.append(layer)
        share_bound(self)

    def attended_caches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(layer.k_cache, layer.v_cache) for layer in self._layers]

    def derive_from_weights(self) -> None:
        """Do nothing: the module has no packed weights."""

    def run(
        self,
        input_ids: torch.Tensor,
        metadata: AttentionMetadata,
        outputs: OutputRows | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return `forward`, and None, because there is no draft head."""
        return self(input_ids, metadata.positions, metadata, outputs), None

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        outputs: OutputRows | None = None,
        boundaries: Any = None,
    ) -> torch.Tensor:
        """Return hidden states after the final norm, [num_tokens, hidden_size], or the rows of `outputs`."""
        self._step.metadata = metadata
        try:
            result = self.decoder(input_ids=input_ids[None], position_ids=positions[None], use_cache=False)
        finally:
            self._step.metadata = None
        return rows_of(result.last_hidden_state[0], outputs)

    def layer_inputs(self, input_ids: torch.Tensor, hidden: torch.Tensor) -> Sequence[tuple[torch.Tensor, ...]]:
        """Raise: a module cannot take rows that replace token embeddings."""
        raise UnsupportedError("prompt_embeds: not supported for transformers' own module")

    def head(self, hidden: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits, [num_rows, num_logits], in `out` if given."""
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        self._given.hidden = hidden[None]
        try:
            logits: torch.Tensor = self.module(input_ids=ids, use_cache=False).logits[0, :, : self.num_logits]
        finally:
            self._given.hidden = None
        return logits if out is None else out.copy_(logits)

    def quantize(self, form: str, track: Track = untracked) -> None:
        """Round the layers' projections and experts to int8 or int4 for a CPU; routers stay plain."""
        projections: list[Callable[[str], None]] = []
        for name, module in self._decoder_layers.named_modules():
            if isinstance(module, ModuleLinear) and not any(ROUTER.match(part) for part in name.split(".")):
                projections.append(module.round_to)
            ours = ModuleExperts.of(module)
            if ours is not None:
                projections.append(partial(ours.round_to, theirs=module))
        for round_to in track(projections, desc="quantising", unit="projection"):
            round_to(form)

    def scale_caches(self, scales: Sequence[Mapping[str, torch.Tensor]], cache_kinds: tuple[KvKind, KvKind]) -> None:
        raise UnsupportedError("kv_cache_dtype: scales of a checkpoint need a family")


def drop_unused(module: nn.Module, names: Sequence[str]) -> None:
    """Free the weights of modules that text does not need."""
    for name in names:
        module.set_submodule(name, nn.Module())


class GivenHidden(nn.Module):
    """A stand-in for a decoder: it returns the hidden states that it holds, and has the decoder's attributes."""

    hidden: torch.Tensor | None = None

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.__dict__["decoder"] = decoder  # not a submodule, because its weights have another place

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["decoder"], name)

    def forward(self, *_: Any, **__: Any) -> HiddenOutput:
        return HiddenOutput(last_hidden_state=self.hidden)


class HiddenOutput(BaseModelOutputWithPast):  # type: ignore[misc]
    """Hidden states as a decoder's output; all other fields are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
