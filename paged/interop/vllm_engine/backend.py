"""vLLM's attention backend on this project's operations; importing this imports vLLM.

vLLM owns the cache and the batch. A layer's cache is [num_blocks, num_kv_heads, block_size, head_dim + v_head_dim],
keys before values, with the strides of any of vLLM's layouts. It is read and written in place. In caches with scales
the last dimension is that of bytes: keys, their scales, values, their scales. In 8 bits this is how vLLM's
Triton backend stores it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from tqdm import tqdm
from vllm import envs
from vllm.distributed import is_global_first_rank
from vllm.model_executor.warmup.jit_warmup import VllmJitKernel
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionLayer,
    AttentionType,
    MultipleOf,
)

from paged.errors import UnsupportedError
from paged.interop.vllm import E4M3_CACHES, PLAIN_CACHES, reshape_and_cache_flash
from paged.interop.vllm_engine.metadata import PagedMetadata, PagedMetadataBuilder, attend_shard
from paged.interop.vllm_plugin import INT4_CACHES
from paged.kernels.attention.paged_attention import paged_attention
from paged.kernels.attention.tiles import step_sizes
from paged.kernels.cache.reshape_and_cache import reshape_and_cache
from paged.kernels.core.checks import MAX_HEAD_DIM
from paged.kernels.core.dtypes import kv_kind
from paged.kernels.core.launch import run_compiled, serving_begins
from paged.kernels.core.operation import bound_for, layout

# Caches that hold a scale of every row, or of its groups, by vLLM's names and by ours.
CACHES_WITH_SCALES = {
    "int8_per_token_head": torch.int8,
    "fp8_per_token_head": torch.bits8,
    INT4_CACHES: torch.bits4x2,
}
KNOWN_CACHES = (*PLAIN_CACHES, *E4M3_CACHES, *CACHES_WITH_SCALES)


class PagedBackend(AttentionBackend):
    """Declares the backend's features to vLLM. By vLLM's default, all other features are unsupported."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [*KNOWN_CACHES]
    forward_includes_kv_cache_update = False
    # In vLLM 0.33, layers may write the cache in a fused operation and then call `forward` without key and value.
    supports_kv_cache_update_bypass = True
    get_name = staticmethod(lambda: "CUSTOM")
    get_impl_cls = staticmethod(lambda: PagedImpl)
    get_builder_cls = staticmethod(lambda: PagedMetadataBuilder)
    get_supported_kernel_block_sizes = staticmethod(lambda kv_cache_spec=None: [MultipleOf(8)])
    supports_head_size = classmethod(lambda cls, head_size: 1 <= head_size <= MAX_HEAD_DIM)
    supports_sink = supports_sliding_window = supports_non_causal = classmethod(lambda cls: True)
    supports_per_head_quant_scales = supports_batch_invariance = supports_sink
    # The kernels are compiled for sm_80 and later and for gfx942, which reports 9.4. On a CPU, the capability is None.
    supports_compute_capability = classmethod(
        lambda cls, capability: capability is None or capability >= DeviceCapability(8, 0)
    )

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: Any, *_args: Any, **_options: Any
    ) -> str | None:
        """Return a reason unless a 16-bit cache has the model's dtype, and scales lie at multiples of their size."""
        if kv_cache_dtype in ("float16", "bfloat16") and dtype != getattr(torch, kv_cache_dtype):
            return f"kv_cache_dtype {kv_cache_dtype} is not supported for a model in {dtype}"
        if kv_cache_dtype in CACHES_WITH_SCALES and head_size % 4:
            return f"kv_cache_dtype {kv_cache_dtype} is not supported for heads of {head_size}, no multiple of 4"
        return None

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Return the layer's specification with the bytes of a head's row of keys and of values, scales included."""
        # vLLM's modes have the names of the caches; the dtype of e4m3 codes is uint8 there.
        kind = kv_kind(CACHES_WITH_SCALES.get(spec.kv_quant_mode.name.lower(), spec.dtype))
        if spec.state_content_bytes is not None or not kind.has_scales:
            return spec
        row_bytes = kind.row_bytes(spec.head_size) + kind.row_bytes(spec.head_size_v)
        return replace(spec, state_content_bytes=row_bytes)


# A step of a layer over padding alone.
PaddingStep = Callable[[], None]


class HasWarmup(ABC):
    """A layer's attention whose kernels `AttentionWarmup` compiles."""

    @abstractmethod
    def padding_steps(self, layer: Any, vllm_config: Any) -> list[PaddingStep]:
        """Return steps of every size that selects other tiles; none if the layer has no cache."""


class PagedImpl(HasWarmup, AttentionImpl[PagedMetadata]):
    """Attention of one layer."""

    supports_dcp = True
    can_return_lse_for_decode = True
    supports_mtp_with_cp_non_trivial_interleave_size = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **unknown: Any,
    ) -> None:
        """Take vLLM's arguments, in its order; sliding_window includes the query's own position.

        Raises:
            UnsupportedError: encoder or cross attention, another kv_cache_dtype, an unknown argument, or a cache
                distributed over ranks together with ALiBi or a window.
        """
        if attn_type != AttentionType.DECODER:
            raise UnsupportedError(f"attn_type: {attn_type!r}, expected {AttentionType.DECODER.value!r}")
        if kv_cache_dtype not in KNOWN_CACHES:
            raise UnsupportedError(f"kv_cache_dtype: {kv_cache_dtype!r}, known are {KNOWN_CACHES}")
        for name in unknown:
            raise UnsupportedError(f"{name}: attention here does not take it")
        if self.dcp_world_size > 1 and (alibi_slopes is not None or sliding_window is not None):
            raise UnsupportedError("alibi_slopes, sliding_window: unknown positions in a cache distributed over ranks")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        # The window has two sides; causal attention cuts off the right side.
        self.window_size = (-1, -1) if sliding_window is None else (sliding_window - 1, sliding_window - 1)
        self.kv_cache_dtype = kv_cache_dtype
        self.logits_soft_cap = logits_soft_cap or 0.0
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self.is_batch_invariant = bool(envs.VLLM_BATCH_INVARIANT)
        # Layers can share a binding if these properties and the layouts of their tensors are equal.
        slopes = None if alibi_slopes is None else tuple(alibi_slopes)
        self.kind = self.scale, self.window_size, self.logits_soft_cap, self.is_batch_invariant, slopes
        WARMUP.register_warmup()

    def padding_steps(self, layer: Any, vllm_config: Any) -> list[PaddingStep]:
        """If the cache is distributed over ranks, there are none, because the ranks would wait for each other."""
        steps: list[PaddingStep] = []
        if not layer.kv_cache.numel() or self.dcp_world_size > 1:
            return steps
        flags = (False, True) if vllm_config.attention_config.use_non_causal else (False,)
        longest = vllm_config.scheduler_config.max_num_batched_tokens
        for num_tokens in step_sizes((layer.num_heads // layer.num_kv_heads,), longest):
            for by_flag in flags:
                steps.append(partial(_run, layer, num_tokens, vllm_config.model_config.max_model_len, by_flag))
        return steps

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: PagedMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend to the cache and write `output`. Rows beyond the batch, and all rows without metadata, become 0.

        Args:
            query: [num_tokens, num_q_heads, head_dim].
            output: [num_tokens, num_q_heads, v_head_dim].
            key, value: used only if the cache is distributed over ranks; otherwise they are read from the cache.
            kv_cache: see the module.

            Raises:
                UnsupportedError: an output scale, or another cache layout.
        """
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError("output_scale, output_block_scale: attention here does not quantise its output")
        if attn_metadata is None:
            return output.zero_()
        plan, causal = attn_metadata.plan()
        block_table = attn_metadata.block_table
        caches, scales = self._caches(layer, kv_cache, output.shape[-1])
        options: dict[str, Any] = {
            "softmax_scale": self.scale,
            "causal": causal,
            "softcap": self.logits_soft_cap,
            "sinks": self.sinks,
            "deterministic": self.is_batch_invariant,
        }
        if attn_metadata.shard is not None:
            if key is None or value is None:
                raise UnsupportedError("key, value: None, expected the step's own with a cache distributed over ranks")
            attended = attend_shard(
                attn_metadata.shard, query, (key, value), caches, block_table, scales=scales, **options
            )
            return output.copy_(attended)
        kind = self.kind, causal if isinstance(causal, bool) else None, block_table.stride()
        bound_for(paged_attention, *kind, *layout(*caches, output, self.sinks, *scales.values()))(
            query,
            *caches,
            block_table=block_table,
            cu_seqlens_q=attn_metadata.query_start_loc,
            seq_lens=attn_metadata.seq_lens,
            max_seqlen_q=attn_metadata.max_query_len,
            window_size=self.window_size,
            alibi_slopes=self.alibi_slopes,
            plan=plan,
            out=output,
            **scales,
            **options,
        )
        return output

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write key and value to the cache.

        key: [num_tokens or more, num_kv_heads, head_dim]. value: [..., v_head_dim]. slot_mapping: int64 [num_tokens].
        """
        caches, scales = self._caches(layer, kv_cache, value.shape[-1])
        if self.kv_cache_dtype in CACHES_WITH_SCALES:
            num_tokens = slot_mapping.shape[0]
            reshape_and_cache(key[:num_tokens], value[:num_tokens], *caches, slot_mapping, **scales)
        else:
            reshape_and_cache_flash(key, value, *caches, slot_mapping, self.kv_cache_dtype, **scales)

    def _caches(
        self, layer: AttentionLayer, kv_cache: torch.Tensor, v_head_dim: int
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]:
        """Return keys and values of a layer's cache, and their scales, which the layer or the cache holds.

        Keys and values: [num_blocks, block_size, num_kv_heads, elements of a row].
        """
        if self.kv_cache_dtype in CACHES_WITH_SCALES:
            return self._caches_with_scales(kv_cache, v_head_dim)
        sizes = self.head_size, v_head_dim
        _check_row(kv_cache, sum(sizes))
        scales = {}
        if self.kv_cache_dtype in E4M3_CACHES:
            kv_cache = kv_cache.view(torch.float8_e4m3fn)
            scales = {"k_scale": layer._k_scale, "v_scale": layer._v_scale}
        k_cache, v_cache = kv_cache.transpose(1, 2).split(sizes, dim=-1)
        return (k_cache, v_cache), scales

    def _caches_with_scales(
        self, kv_cache: torch.Tensor, v_head_dim: int
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]:
        kind = kv_kind(CACHES_WITH_SCALES[self.kv_cache_dtype])
        sizes = []
        for width in (self.head_size, v_head_dim):
            sizes += [kind.num_elements(width), kind.num_scales(width) * kind.scale_dtype.itemsize]
        _check_row(kv_cache, sum(sizes))
        # [num_blocks, block_size, num_kv_heads, bytes of a row]
        rows = kv_cache.view(torch.uint8).transpose(1, 2)
        k_codes, k_scale, v_codes, v_scale = rows.split(sizes, dim=-1)
        caches = k_codes.view(kind.dtype), v_codes.view(kind.dtype)
        scales = {"k_scale": k_scale.view(kind.scale_dtype), "v_scale": v_scale.view(kind.scale_dtype)}
        if not kind.group_size:
            scales = {name: scale.squeeze(-1) for name, scale in scales.items()}
        return caches, scales


def _check_row(kv_cache: torch.Tensor, row_size: int) -> None:
    if kv_cache.dim() != 4 or kv_cache.shape[3] != row_size:
        raise UnsupportedError(
            f"kv_cache: shape {list(kv_cache.shape)}, expected [num_blocks, num_kv_heads, block_size, {row_size}]"
        )


class AttentionWarmup(VllmJitKernel[PaddingStep]):
    """Warm-up of attention and cache-write kernels for vLLM's kernel registry.

    vLLM asks for the steps when the layers have their caches, and compiles them before it captures graphs.
    """

    def get_warmup_keys(self, vllm_config: Any) -> list[PaddingStep]:
        """Return the `padding_steps` of all layers."""
        steps: list[PaddingStep] = []
        for layer in vllm_config.compilation_config.static_forward_context.values():
            impl = getattr(layer, "impl", None)
            if isinstance(impl, HasWarmup):
                steps += impl.padding_steps(layer, vllm_config)
        return steps

    def compile(self, compile_key: PaddingStep) -> None:
        self.compile_many([compile_key])

    def compile_many(self, compile_keys: Iterable[PaddingStep]) -> None:
        """Compile several kernels at once and launch them. Afterwards PAGED_JIT controls compilation."""
        steps = list(compile_keys)

        def run() -> None:
            for step in steps:
                step()

        is_disabled = None if is_global_first_rank() else True  # None: tqdm shows the bar only on a terminal
        run_compiled(run, partial(tqdm, desc="paged attention", unit="kernel", disable=is_disabled))
        serving_begins()


def _run(layer: Any, rows: int, max_seq_len: int, by_flag: bool) -> None:
    """Write and attend to padding only. q, k and v are views of one tensor, separate, or only v is a view."""
    device = layer.kv_cache.device
    none = torch.zeros(2, dtype=torch.int32, device=device)  # no queries, so all rows are padding
    slots = torch.full((rows,), -1, dtype=torch.int64, device=device)
    metadata = PagedMetadata(
        num_actual_tokens=rows,
        max_query_len=rows,
        query_start_loc=none,
        max_seq_len=max_seq_len,
        seq_lens=none[:1],
        block_table=none[:1, None],
        slot_mapping=slots,
        causal=none[:1] if by_flag else True,
    )
    widths = [
        layer.num_heads * layer.head_size,
        layer.num_kv_heads * layer.head_size,
        layer.num_kv_heads * layer.head_size_v,
    ]
    together = torch.zeros(rows, sum(widths), dtype=layer.dtype, device=device).split(widths, dim=1)
    apart = [x.contiguous() for x in together]
    for q, k, v in (together, apart, (*apart[:2], together[2])):
        query = q.view(rows, layer.num_heads, layer.head_size)
        key = k.view(rows, layer.num_kv_heads, layer.head_size)
        value = v.view(rows, layer.num_kv_heads, layer.head_size_v)
        out = torch.empty(rows, layer.num_heads, layer.head_size_v, dtype=layer.dtype, device=device)
        layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slots)
        layer.impl.forward(layer, query, key, value, layer.kv_cache, metadata, out)


WARMUP = AttentionWarmup()
