"""vLLM's attention over latents (MLA) on this project's operations; importing this imports vLLM.

vLLM's layer stays: it splits a step into decodes, which attend to the cached latents, and prompts, whose latents it
expands to keys and values. Both attend here. A cached row is [latent, rotated dimensions], written and read in place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, MultipleOf, max_decode_query_len
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum

from paged.errors import InvalidInputError, UnsupportedError
from paged.interop.vllm import E4M3_CACHES, PLAIN_CACHES
from paged.interop.vllm_engine.backend import WARMUP, HasWarmup, PaddingStep, PagedBackend
from paged.interop.vllm_engine.metadata import PackedKeys
from paged.kernels.attention.paged_mla_attention import paged_mla_attention
from paged.kernels.attention.plan import AttentionPlan
from paged.kernels.attention.tiles import step_sizes
from paged.kernels.cache.concat_and_cache_mla import concat_and_cache_mla
from paged.kernels.cache.latent_cache import NVFP4_LATENT_BYTES, PACKED_BYTES, check_latent_cache
from paged.kernels.core.device import is_capturing
from paged.kernels.core.operation import bound_for, layout

# vLLM's names for rows of bytes, and their sizes.
PACKED_CACHES = {"fp8_ds_mla": PACKED_BYTES, "nvfp4_ds_mla": NVFP4_LATENT_BYTES}
# Arguments of layers that change the result and that neither operation takes.
_UNUSED = ("alibi_slopes", "sliding_window", "logits_soft_cap", "kv_sharing_target_layer_name", "q_pad_num_heads")


class PagedPrefill(MLAPrefillBackend):
    """Attention of prompts to keys and values that vLLM has expanded: new tokens, and chunks of their context."""

    supported_dtypes: ClassVar[list[torch.dtype]] = PagedBackend.supported_dtypes
    get_name = staticmethod(lambda: "PAGED_MLA")

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        """Keep a step's metadata and make what its layers share."""
        super().prepare_metadata(prefill_metadata)
        offsets, longest = prefill_metadata.query_start_loc, prefill_metadata.max_query_len
        self._new_keys = PackedKeys.of(offsets, longest, offsets, longest)
        self._context_keys: dict[int, PackedKeys] = {}  # by the index of the chunk

    def run_prefill_new_tokens(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        return_softmax_lse: bool,
        out: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
    ) -> Any:
        """Return causal attention to the step's own tokens [num_tokens, num_heads, v_head_dim].

        q, k: [num_tokens, num_heads, qk_head_dim]. v: [num_tokens, num_heads, v_head_dim].
        With return_softmax_lse: also the natural log-sum-exps, float32 [num_heads, num_tokens].

        Raises:
            UnsupportedError: an output scale.
        """
        if output_scale is not None:
            raise UnsupportedError("output_scale: attention here does not quantise its output")
        options = {"softmax_scale": self.scale, "causal": True, "return_lse": return_softmax_lse, "out": out}
        return self._new_keys.attend(q, k, v, **options)

    def run_prefill_context_chunk(
        self,
        chunk: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> Any:
        """Return attention to a chunk of context and its log-sum-exps, shaped as in `run_prefill_new_tokens`.

        chunk: vLLM's `ContextChunk`. q has the queries of its requests, k and v the tokens of the chunk.
        """
        if chunk.index not in self._context_keys:
            self._context_keys[chunk.index] = PackedKeys.of(
                chunk.query_start_loc, chunk.max_query_len, chunk.cu_seq_lens, chunk.max_seq_len
            )
        keys = self._context_keys[chunk.index]
        return keys.attend(q, k, v, softmax_scale=self.scale, causal=False, return_lse=True, out=out)


@dataclass
class CachedRequests(MLACommonDecodeMetadata):
    """Requests of a step that attend to cached latents.

    Attributes:
        query_start_loc: int32 [num_seqs + 1].
        max_query_len, max_seq_len: upper bounds known to the host.
        plans: plan by whether a CUDA graph is being captured, see `PagedMetadata.plan`.
    """

    query_start_loc: torch.Tensor
    max_query_len: int
    max_seq_len: int
    plans: dict[bool, AttentionPlan] = field(default_factory=dict)

    def plan(self) -> AttentionPlan:
        """Return the plan that the layers of the step share."""
        capturing = is_capturing(self.seq_lens)
        if capturing not in self.plans:
            lengths = {"max_seqlen_q": self.max_query_len, "max_seqlen_k": self.max_seq_len}
            self.plans[capturing] = AttentionPlan(self.query_start_loc, self.seq_lens, **lengths)
        return self.plans[capturing]


class LatentBuilder:
    """The part of a metadata builder that dense and sparse layers share; mixed into one of vLLM's."""

    # Prompts are divided on the host, so a graph holds decodes and verify rows only.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    supports_draft_decode_metadata_update = True

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> int:
        """Return the longest verify query: a graph splits its batch by the lengths on the device."""
        return max_decode_query_len(vllm_config)  # type: ignore[no-any-return]

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """Run vLLM's method with lengths of 1, see `PagedMetadataBuilder.build_for_cudagraph_capture`."""
        metadata = super().build_for_cudagraph_capture(common_attn_metadata)  # type: ignore[misc]
        common_attn_metadata.seq_lens.fill_(1)
        return metadata


class PagedMlaBuilder(LatentBuilder, MLACommonMetadataBuilder[MLACommonMetadata]):
    """Makes vLLM's metadata of a step with decodes and verify rows of any length as `CachedRequests`."""

    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN
    supports_non_causal_multi_token_decode: ClassVar[bool] = True

    def _build_decode(
        self,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        max_seq_len: int,
        query_start_loc_cpu: torch.Tensor,
        query_start_loc_device: torch.Tensor,
        num_decode_tokens: int,
        max_query_len: int,
        dcp_tot_seq_lens_device: torch.Tensor | None,
    ) -> CachedRequests:
        return CachedRequests(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            query_start_loc=query_start_loc_device,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
        )

    def update_draft_decode_metadata(self, metadata: MLACommonMetadata) -> None:
        """Drop the plans after lengths changed in place, see `PagedMetadataBuilder.update_draft_decode_metadata`."""
        if metadata.decode is not None:
            metadata.decode.plans.clear()


class LatentImpl(HasWarmup):
    """The part of a layer's implementation that dense and sparse layers share; mixed into one of vLLM's.

    vLLM's class gives num_heads, head_size, scale, kv_lora_rank and kv_cache_dtype.
    """

    known_caches: ClassVar[tuple[str, ...]] = PLAIN_CACHES + E4M3_CACHES
    supports_pcp = False

    def __init__(self, **named: Any) -> None:
        """Take vLLM's arguments, which its layer gives by name. Prompts attend here unless the user chose otherwise.

        Raises:
            UnsupportedError: an argument or a setting of vLLM that attention here does not honour.
            InvalidInputError: sizes of latents that the operations do not take.
        """
        self._check(named)
        super().__init__(**named)
        self.supports_quant_query_input = False
        attention_config = get_current_vllm_config().attention_config
        if attention_config.mla_prefill_backend is None:  # the layer reads it next
            attention_config.mla_prefill_backend = MLAPrefillBackendEnum[PagedPrefill.get_name()]
        WARMUP.register_warmup()

    def chosen_positions(self) -> torch.Tensor | None:
        """Return the indexer's buffer of a sparse layer, int32 [most tokens, top_k]; None of a dense one."""
        return None

    def padding_steps(self, layer: Any, vllm_config: Any) -> list[PaddingStep]:
        """Return steps of every size that selects other tiles of latents, or of the keys that prompts expand them to.

        There are none if the layer has no cache.
        """
        impl: Any = self
        steps: list[PaddingStep] = []
        if not layer.kv_cache.numel():
            return steps
        longest = vllm_config.scheduler_config.max_num_batched_tokens
        positions = self.chosen_positions()
        if positions is not None:
            longest = min(longest, len(positions))
        flags = (True, False) if vllm_config.attention_config.use_non_causal else (True,)
        for num_tokens in step_sizes((impl.num_heads, 1), longest):
            for causal in flags:
                steps.append(
                    partial(self._run_padding, layer, num_tokens, vllm_config.model_config.max_model_len, causal)
                )
        return steps

    def _run_padding(self, layer: Any, num_tokens: int, max_seq_len: int, causal: bool) -> None:
        """Write, attend to the cache and attend as prompts do, all for padding alone."""
        impl: Any = self
        cache, dtype = layer.kv_cache, layer.kv_b_proj.params_dtype
        device, rank = cache.device, impl.kv_lora_rank
        none = torch.zeros(2, dtype=torch.int32, device=device)  # no queries, so all rows are padding
        slots = torch.full((num_tokens,), -1, dtype=torch.int64, device=device)

        def zeros(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        # Latents and rotated dimensions are views of one tensor, separate, or only the latter are a view.
        rows = zeros(num_tokens, rank + impl.qk_rope_head_dim)
        views = rows[:, :rank], rows[:, None, rank:]
        apart = [view.contiguous() for view in views]
        for latents, rope in (views, apart, (apart[0], views[1])):
            self.do_kv_cache_update(latents, rope, cache, slots, impl.kv_cache_dtype, layer._k_scale)
        requests = CachedRequests(
            block_table=none[:1, None],
            seq_lens=none[:1],
            dcp_tot_seq_lens=None,
            query_start_loc=none,
            max_query_len=num_tokens,
            max_seq_len=max_seq_len,
        )
        indices = self.chosen_positions()
        if indices is not None:
            indices = indices[:num_tokens]
        q = zeros(num_tokens, impl.num_heads, rank + impl.qk_rope_head_dim)
        self.attend_cached(q, cache, requests, layer, causal=causal, indices=indices)
        if isinstance(layer.prefill_backend, PagedPrefill):
            k = zeros(num_tokens, impl.num_heads, impl.qk_nope_head_dim + impl.qk_rope_head_dim)
            # vLLM expands a latent to a key's first part and a value, side by side.
            v = zeros(num_tokens, impl.num_heads, impl.qk_nope_head_dim + impl.v_head_dim)[..., impl.qk_nope_head_dim :]
            keys = PackedKeys.of(none, num_tokens, none, num_tokens)
            for is_new, return_lse in ((True, False), (True, True), (False, True)):
                options = {"softmax_scale": layer.prefill_backend.scale, "causal": is_new, "return_lse": return_lse}
                keys.attend(k, k, v, **options)

    def _check(self, named: dict[str, Any]) -> None:
        known = signature(super().__init__).parameters
        for name, value in named.items():
            if name not in known or (name in _UNUSED and value is not None):
                raise UnsupportedError(f"{name}: attention over latents here does not take it")
        if named["attn_type"] != AttentionType.DECODER:
            raise UnsupportedError(f"attn_type: {named['attn_type']!r}, expected {AttentionType.DECODER.value!r}")
        _check_cache(named["kv_cache_dtype"], named["head_size"], named["kv_lora_rank"], self.known_caches)
        _check_settings(get_current_vllm_config())

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Return False, so that vLLM quantises in an operation of its own."""
        return False

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Write latents [num_tokens or more, kv_lora_rank] and rotated dimensions [..., 1, rope] to the cache.

        slot_mapping: int64 [num_tokens]; a negative slot skips the token. k_scale: float32, one value, for e4m3 caches;
        skip_scale: it is 1.
        """
        if kv_cache.numel() == 0:
            return
        slots = slot_mapping.flatten()
        latents, rope = kv_c_normed[: len(slots)], k_pe[: len(slots)].squeeze(1)
        scale = None
        if kv_cache_dtype in E4M3_CACHES:
            kv_cache = kv_cache.view(torch.float8_e4m3fn)
            if not skip_scale:
                scale = k_scale
        concat_and_cache_mla(latents, rope, kv_cache, slots, scale=scale)

    def attend_cached(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        requests: CachedRequests,
        layer: Any,
        *,
        causal: bool,
        indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return attention to the cache, [num_tokens, num_heads, kv_lora_rank]. Rows beyond the requests become 0.

        q: [num_tokens, num_heads, kv_lora_rank + rope], or its two parts. indices: as in `paged_mla_attention`.
        """
        if isinstance(q, tuple):
            q = torch.cat(q, dim=-1)
        impl: Any = self
        k_scale = None
        if impl.kv_cache_dtype in E4M3_CACHES:
            kv_cache, k_scale = kv_cache.view(torch.float8_e4m3fn), layer._k_scale
        chosen = None if indices is None else (indices.shape[1], indices.stride())
        kind = impl.scale, impl.kv_lora_rank, causal, requests.block_table.stride(), chosen
        attend = bound_for(paged_mla_attention, *kind, *layout(kv_cache, k_scale))
        plan = requests.plan()
        return attend(  # type: ignore[no-any-return]
            q,
            kv_cache,
            v_head_dim=impl.kv_lora_rank,
            block_table=requests.block_table,
            cu_seqlens_q=plan.cu_seqlens_q,
            seq_lens=plan.seq_lens,
            max_seqlen_q=plan.max_seqlen_q,
            softmax_scale=impl.scale,
            causal=causal,
            k_scale=k_scale,
            indices=indices,
            plan=plan,
        )


class PagedMlaImpl(LatentImpl, MLACommonImpl[MLACommonMetadata]):
    """Attention of one dense layer."""

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, None]:
        """Return attention of a step's decodes and verify rows, see `attend_cached`, and no log-sum-exps."""
        requests: Any = attn_metadata.decode
        return self.attend_cached(q, kv_c_and_k_pe_cache, requests, layer, causal=attn_metadata.causal), None


class PagedMlaBackend(MLACommonBackend):
    """Declares the dense backend to vLLM. By vLLM's default, all other features are unsupported."""

    supported_dtypes: ClassVar[list[torch.dtype]] = PagedBackend.supported_dtypes
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [*PagedMlaImpl.known_caches]
    get_name = staticmethod(lambda: "PAGED_MLA")
    get_impl_cls = staticmethod(lambda: PagedMlaImpl)
    get_builder_cls = staticmethod(lambda: PagedMlaBuilder)
    get_supported_kernel_block_sizes = staticmethod(lambda kv_cache_spec=None: [MultipleOf(8)])
    supports_non_causal = classmethod(lambda cls: True)
    supports_compute_capability = PagedBackend.supports_compute_capability
    supports_combination = PagedBackend.supports_combination


def _check_cache(kv_cache_dtype: str, head_size: int, kv_lora_rank: int, known: tuple[str, ...]) -> None:
    """Raise unless the operations take rows of head_size numbers, kv_lora_rank of them the latent."""
    if kv_cache_dtype not in known:
        raise UnsupportedError(f"kv_cache_dtype: {kv_cache_dtype!r}, known are {known}")
    if kv_cache_dtype in E4M3_CACHES and current_platform.fp8_dtype() != torch.float8_e4m3fn:
        raise UnsupportedError(f"kv_cache_dtype: {kv_cache_dtype!r} is {current_platform.fp8_dtype()} on this device")
    row = torch.empty(1, 8, head_size, dtype=torch.float32, device="meta")
    if kv_cache_dtype in PACKED_CACHES:
        row = torch.empty(1, 8, PACKED_CACHES[kv_cache_dtype], dtype=torch.uint8, device="meta")
    row_size = check_latent_cache(row, kv_lora_rank, torch.float32)
    if row_size != head_size:
        raise InvalidInputError(f"head_size: {head_size}, expected {row_size} for kv_cache_dtype {kv_cache_dtype!r}")


def _check_settings(config: Any) -> None:
    """Raise UnsupportedError if vLLM's configuration asks for a feature that attention here lacks."""
    parallel = config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name) > 1:
            raise UnsupportedError(f"{name}: {getattr(parallel, name)}, expected 1 for latents")
    if config.attention_config.hisparse_config is not None:
        raise UnsupportedError("hisparse_config: given, expected None for latents")
