"""Oracle executor: attention on unprojected embeddings, whose outputs are known in closed form."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch.nn import functional

from paged.cache.groups import RecurrentSpec
from paged.cache.manager import PagedKvCacheManager
from paged.errors import InvalidInputError
from paged.executors.types import MemoryRequirements, ModelInfo
from paged.executors.unified_executor import UnifiedExecutor
from paged.kernels.attention.paged_attention import paged_attention
from paged.kernels.cache.reshape_and_cache import reshape_and_cache
from paged.kernels.core.checks import FLOAT_DTYPES
from paged.kernels.core.dtypes import KV_KINDS, kv_kind
from paged.kernels.core.errors import as_bool, as_int, shown
from paged.kernels.recurrent.causal_conv1d import causal_conv1d
from paged.kernels.recurrent.mamba2_scan import mamba2_scan
from paged.kernels.recurrent.metadata import RecurrentBatch
from paged.models.logits_policy import Rows, answers_of
from paged.step.step import Step

# Taps of the recurrent layer's convolution (the current token's last), and the decay of its state.
_TAPS = (0.5, 0.0, 0.25, 1.0)
DECAY = 0.875
_KEY_DIM = 16


@dataclass(frozen=True)
class PagedExecutorConfig:
    """Sizes of the oracle's model, which has no weights; its embedding is a formula.

    Attributes:
        embedding: "one_hot" sets element t mod (num_kv_heads * head_dim) of token t to 1. "sinusoidal" sets element i
            of token t to sin((t + 1)(i + 1)), in float32.
        recurrent: whether the last layer also has a recurrent state, see `PagedAttentionExecutor`. The cache's
            configuration then needs `recurrent_spec()`.

    Raises:
        InvalidInputError: a size is not positive, num_heads is not a multiple of num_kv_heads, or the embedding is
            unknown.
    """

    vocab_size: int = 256
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 4
    head_dim: int = 8
    max_sequence_length: int = 512
    embedding: Literal["one_hot", "sinusoidal"] = "one_hot"
    recurrent: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "recurrent", as_bool("recurrent", self.recurrent))
        for name, value in asdict(self).items():
            if name not in ("embedding", "recurrent"):
                object.__setattr__(self, name, as_int(name, value, low=1))
        if self.num_heads % self.num_kv_heads:
            raise InvalidInputError(
                f"num_heads: {self.num_heads}, expected a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if not isinstance(self.embedding, str) or self.embedding not in ("one_hot", "sinusoidal"):
            raise InvalidInputError(f"embedding: {shown(self.embedding)}, expected 'one_hot' or 'sinusoidal'")

    def recurrent_spec(self, **options: Any) -> RecurrentSpec:
        """Return the state shape of the last layer. options: other fields of RecurrentSpec, such as num_slots."""
        heads, size = self.num_kv_heads, self.head_dim
        channels = heads * size + 2 * _KEY_DIM
        return RecurrentSpec((self.num_layers - 1,), channels, len(_TAPS), heads, size, 1, _KEY_DIM, **options)


class PagedAttentionExecutor(UnifiedExecutor):
    """Runs kernels and cache with identity projections, so that every logit is known in closed form.

    At every layer, K = V = the token's embedding e, and Q repeats each KV head's slice of e num_heads / num_kv_heads
    times. The output is the last layer's causal attention with scale 1 / sqrt(head_dim): logits[j mod vocab_size] +=
    attn[j] over all num_heads * head_dim elements. With one_hot, in the head that contains the query's index, keys with
    the same index weigh exp(1 / sqrt(head_dim)) and all other keys weigh 1. In every other head, all keys weigh the
    same.

    With `recurrent`, the last layer also has a state, whose output is added to the attention of the KV head's query
    heads. With the token's embedding e_t, c_t = e_t + e_(t-1) / 4 + e_(t-3) / 2 and s_t = DECAY s_(t-1) + c_t, the
    output is s_t. All terms before the first token are zero. Therefore a missing, stale or foreign state changes the
    logits.

    It computes in the cache's dtype, or in float32 if the cache has 8 bits. All dtypes hold one-hot embeddings exactly.

    Raises:
        InvalidInputError: the manager's layers, KV heads, head_dim or recurrent layers differ from the configuration,
            or the kernels do not support its dtype.
    """

    kv_manager: PagedKvCacheManager

    def __init__(self, config: PagedExecutorConfig, kv_manager: PagedKvCacheManager) -> None:
        self.config = config
        self.kv_manager = kv_manager
        for name in ("num_layers", "num_kv_heads", "head_dim"):
            have, want = getattr(kv_manager.config, name), getattr(config, name)
            if have != want:
                raise InvalidInputError(f"kv_manager: {name} {have}, expected {want} as in the configuration")
        layers = kv_manager.config.recurrent and kv_manager.config.recurrent.layers
        want_layers = (config.num_layers - 1,) if config.recurrent else None
        if layers != want_layers:
            raise InvalidInputError(
                f"kv_manager: recurrent layers {layers}, expected {want_layers} as in the configuration"
            )
        cache_dtypes = (*FLOAT_DTYPES, *KV_KINDS)
        dtype, row_bytes = torch.float32, 0
        for layer in range(config.num_layers):
            for cache in (kv_manager.k_cache(layer), kv_manager.v_cache(layer)):
                if cache.dtype not in cache_dtypes:
                    raise InvalidInputError(f"kv_manager: dtype {cache.dtype}, expected one of {cache_dtypes}")
                if cache.dtype in FLOAT_DTYPES:
                    dtype = cache.dtype
                row_bytes += kv_kind(cache.dtype).row_bytes(config.head_dim)
        width = config.num_heads * config.head_dim
        kv_width = config.num_kv_heads * config.head_dim
        super().__init__(
            ModelInfo(
                model_id=f"paged-attention-{config.embedding}",
                model_type="paged_attention_oracle",
                num_parameters=0,
                hidden_size=kv_width,
                num_layers=config.num_layers,
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                vocab_size=config.vocab_size,
                max_sequence_length=min(config.max_sequence_length, kv_manager.config.max_seq_len or sys.maxsize),
                dtype=dtype,
                device=cache.device,
            ),
            kv_manager,
            MemoryRequirements(
                weight_bytes=0,
                kv_bytes_per_token_per_layer=-(-config.num_kv_heads * row_bytes // config.num_layers),
                activation_bytes_per_token=(kv_width + 2 * width) * dtype.itemsize,
            ),
        )

    def kv_capacity(self) -> int:
        return self.kv_manager.stats().capacity_tokens

    def cache_metrics_snapshot(self) -> dict[str, Any]:
        return self.kv_manager.metrics_snapshot()

    def _run(self, step: Step) -> Rows:
        if self.kv_manager.canaries is not None:
            self.kv_manager.canaries.before_forward(step)
        logits = self._logits(self._attend(step)[step.sample_rows])
        return logits if step.policies is None else answers_of(logits, step.policies)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Embed token ids [num_tokens] as [num_tokens, num_kv_heads, head_dim]."""
        width = self._info.hidden_size
        if self.config.embedding == "one_hot":
            rows = functional.one_hot(token_ids % width, width)
        else:
            scale = torch.arange(1, width + 1, dtype=torch.float32, device=token_ids.device)
            rows = torch.sin((token_ids + 1).unsqueeze(1).float() * scale)
        return rows.to(self._info.dtype).view(-1, self.config.num_kv_heads, self.config.head_dim)

    def _attend(self, step: Step) -> torch.Tensor:
        """Run every layer and its cache write; return the last attention [num_tokens, num_heads * head_dim]."""
        embedding = self._embed(step.input_ids)
        query = embedding.repeat_interleave(self.config.num_heads // self.config.num_kv_heads, dim=1)
        out = torch.empty_like(query)
        metadata = step.metadata
        for layer in range(self.config.num_layers):
            k_cache, v_cache = self.kv_manager.k_cache(layer), self.kv_manager.v_cache(layer)
            k_scale, v_scale = self.kv_manager.scales(layer)
            block_table, slot_mapping = metadata.table(self.kv_manager.table_of(layer))
            reshape_and_cache(embedding, embedding, k_cache, v_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)
            paged_attention(
                query,
                k_cache,
                v_cache,
                block_table=block_table,
                cu_seqlens_q=metadata.cu_seqlens_q,
                seq_lens=metadata.seq_lens,
                max_seqlen_q=metadata.max_seqlen_q,
                k_scale=k_scale,
                v_scale=v_scale,
                plan=metadata.plan,
                out=out,
            )
        if metadata.recurrent is not None:
            scanned = self._scan(embedding, metadata.recurrent)
            out += scanned.repeat_interleave(self.config.num_heads // self.config.num_kv_heads, dim=1)
        return out.flatten(1)

    def _scan(self, embedding: torch.Tensor, batch: RecurrentBatch) -> torch.Tensor:
        """Return the last layer's recurrent output, [num_tokens, num_kv_heads, head_dim], by Mamba-2's scan.

        Keys and queries are a constant unit vector, and each step has size 1.
        """
        state = self.kv_manager.state(self.config.num_layers - 1)
        rows, device = embedding.flatten(1), embedding.device
        unit = functional.one_hot(torch.zeros(2, dtype=torch.int64, device=device), _KEY_DIM).to(rows.dtype).view(1, -1)
        mixed = torch.cat([rows, unit.expand(len(rows), -1)], 1).to(state.conv.dtype)
        weight = torch.tensor(_TAPS, device=device).repeat(mixed.shape[1], 1)
        weight[rows.shape[1] :, :-1] = 0
        heads = torch.zeros(self.config.num_kv_heads, device=device)
        mixed = causal_conv1d(mixed, weight, None, state, batch, activation=None)
        dt = mixed.new_zeros(len(rows), len(heads))
        # The softplus of dt_bias is 1, and exp(-exp(a_log)) is DECAY.
        dt_bias, a_log = heads + math.log(math.e - 1), heads + math.log(-math.log(DECAY))
        out = mamba2_scan(mixed, dt, a_log, dt_bias, heads, state, batch, num_groups=1)
        return out.to(embedding.dtype)

    def _logits(self, attention: torch.Tensor) -> torch.Tensor:
        """Compute logits[j mod vocab_size] += attention[j] in float32, adding rows of vocab_size elements in order."""
        padded = functional.pad(attention.float(), (0, -attention.shape[1] % self.config.vocab_size))
        return padded.view(-1, padded.shape[1] // self.config.vocab_size, self.config.vocab_size).sum(1)
