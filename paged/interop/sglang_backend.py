"""SGLang's attention backend on this project's operations; importing this imports SGLang.

SGLang owns the pools and the batch. A layer's pool has keys [slots, num_kv_heads, head_dim] and values of the same
form. It is written by the pool itself, and read here in place as blocks of page_size slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, KVWriteLoc, MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_parallel, get_spec

from paged.errors import UnsupportedError
from paged.interop.sglang_interface import BACKEND
from paged.kernels.attention.paged_attention import paged_attention
from paged.kernels.attention.plan import AttentionPlan
from paged.kernels.core.checks import FLOAT_DTYPES
from paged.kernels.core.device import is_capturing
from paged.kernels.core.dtypes import KV_KINDS
from paged.kernels.core.operation import bound_for, layout

# Speculative algorithms whose draft workers decode chains and extend by what was verified.
DRAFT_WORKERS = ("EAGLE", "EAGLE3", "STANDALONE")


@dataclass
class SglangStep:
    """Metadata of a step, shared by its layers.

    Attributes:
        cu_seqlens_q: int32 [num_seqs + 1].
        seq_lens: int32 [num_seqs], lengths with the step's own tokens.
        table: int32 [num_seqs, pages], pages of the pool that sees all tokens.
        window_table: the same for the pool of layers with a window, or None if all layers share one pool.
        window_slots: where these layers write, or None.
        max_seqlen_q, max_seqlen_k: upper bounds known to the host.
        plans: plan by whether a CUDA graph is being captured, because a graph has to make its own.
    """

    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    table: torch.Tensor
    window_table: torch.Tensor | None
    window_slots: torch.Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    plans: dict[bool, AttentionPlan] = field(default_factory=dict)

    def plan(self) -> AttentionPlan:
        """Return the plan of the step."""
        capturing = is_capturing(self.seq_lens)
        if capturing not in self.plans:
            lengths = {"max_seqlen_q": self.max_seqlen_q, "max_seqlen_k": self.max_seqlen_k}
            self.plans[capturing] = AttentionPlan(self.cu_seqlens_q, self.seq_lens, **lengths)
        return self.plans[capturing]


@dataclass
class GraphBuffers:
    """Tensors that captured graphs read, for the largest batch; see `SglangStep`."""

    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    table: torch.Tensor
    window_table: torch.Tensor | None
    window_slots: torch.Tensor | None


class PagedAttnBackend(AttentionBackend):
    """Attention of all layers of a model runner: extend, decode, mixed steps, chains of drafts, CUDA graphs."""

    needs_cpu_seq_lens = False
    pool_kind: Any = MHATokenToKVPool
    # SGLang's pools have no scales in the cache.
    cache_dtypes = (*FLOAT_DTYPES, *(dtype for dtype, kind in KV_KINDS.items() if not kind.has_scales))

    def __init__(self, runner: Any) -> None:
        """Keep the runner's pools.

        Raises:
            UnsupportedError: another kind of pool or dtype, pages whose size is neither 1 nor a multiple of 8, draft
                workers of other algorithms or with a pool for windows, trees of drafts, context parallelism,
                encoder-decoder models, or models whose images have masks.
        """
        super().__init__()
        self._check(runner)
        self.device = runner.device
        self.req_to_token_pool, self.token_to_kv_pool = runner.req_to_token_pool, runner.token_to_kv_pool
        self.page_size: int = runner.page_size
        # SGLang sizes the masks of drafts by it, for backends that ask for no lengths on the host.
        self.max_context_len: int = self.req_to_token_pool.req_to_token.shape[1]
        self.num_verified: int = get_spec().speculative_num_draft_tokens or 1
        self.has_window_pool = isinstance(runner.token_to_kv_pool, SWAKVPool)
        # Tokens that a draft worker wrote after a batch's sequences when this backend's decode attends.
        self.num_drafted = 0
        self.graph: GraphBuffers | None = None
        self.step: SglangStep | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Make the metadata of a step that runs without a graph.

        Raises:
            UnsupportedError: the step is of a diffusion model, or verifies other numbers of drafts for each sequence.
        """
        self.step = None
        if forward_batch.forward_mode.is_idle():
            return
        limit = self.max_context_len
        if forward_batch.seq_lens_cpu is not None:
            longest = int(forward_batch.seq_lens_cpu.max())
            if forward_batch.forward_mode.is_target_verify():
                longest += self._num_verified(forward_batch.spec_info)
            elif forward_batch.forward_mode.is_decode():
                longest += self.num_drafted
            limit = min(limit, longest)
        self.step = self._make_step(forward_batch, limit)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Make the tensors that graphs of up to `max_bs` sequences and `max_num_tokens` tokens read."""
        num_pages = -(-self.max_context_len // self.page_size)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        window_table, window_slots = None, None
        if self.has_window_pool:
            window_table = zeros(max_bs, num_pages)
            window_slots = zeros(max_num_tokens, dtype=torch.int64)
        table = zeros(max_bs, num_pages)
        self.graph = GraphBuffers(zeros(max_bs + 1), zeros(max_bs), table, window_table, window_slots)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Copy a batch to the tensors of `init_cuda_graph_state`, before a graph is captured or replayed.

        Raises:
            UnsupportedError: the step is neither decode nor the verification of as many drafts for each sequence.
        """
        mode = forward_batch.forward_mode
        if not (mode.is_decode_or_idle() or mode.is_target_verify()):
            raise UnsupportedError(f"forward_mode: {mode.name} in a CUDA graph, expected DECODE or TARGET_VERIFY")
        assert self.graph is not None
        step = self._make_step(forward_batch, self.max_context_len)
        tensors: dict[str, Any] = {}
        for buffer in fields(self.graph):
            tensor = getattr(step, buffer.name)
            if tensor is not None:
                tensors[buffer.name] = getattr(self.graph, buffer.name)[: len(tensor)]
                tensors[buffer.name].copy_(tensor)
        if in_capture:
            self.step = replace(step, **tensors)

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Do nothing: the metadata of a chain needs nothing that the drafts decide, no mask and no positions."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of sequences that pad a graph's batch: 1, so that every row sees a key."""
        return 1

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        **unknown: Any,
    ) -> torch.Tensor:
        """Write k and v to the layer's pool, attend to it, and return [num_tokens, num_q_heads * v_head_dim].

        Raises:
            UnsupportedError: an argument, or a property of the layer, asks for what the backend does not do.
        """
        refuse_arguments(unknown)
        check_layer(layer)
        step, pool = self.step, self.token_to_kv_pool
        assert step is not None
        is_window_layer = self.has_window_pool and pool.layers_mapping[layer.layer_id][1]
        if save_kv_cache and k is not None:
            where = KVWriteLoc(forward_batch.out_cache_loc, step.window_slots)
            pool.set_kv_buffer(layer, where, k, v, layer.k_scale, layer.v_scale)
        k_cache = self._as_blocks(pool.get_key_buffer(layer.layer_id))
        v_cache = self._as_blocks(pool.get_value_buffer(layer.layer_id))
        table = step.table
        if is_window_layer:
            assert step.window_table is not None
            table = step.window_table
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)  # [T, Hq, D]
        out = query.new_empty(len(query), layer.tp_q_head_num, layer.v_head_dim)
        scales: dict[str, torch.Tensor | None] = {"k_scale": None, "v_scale": None}
        if k_cache.dtype.itemsize == 1:
            scales = {"k_scale": layer.k_scale, "v_scale": layer.v_scale}
        options: dict[str, Any] = {
            "softmax_scale": layer.scaling,
            "causal": layer.attn_type == AttentionType.DECODER,
            "window_size": self._window(layer),
            "softcap": layer.logit_cap or 0.0,
        }
        tensors = layout(k_cache, v_cache, out, query, sinks, *scales.values())
        bound_for(paged_attention, *options.values(), table.stride(), *tensors)(
            query,
            k_cache,
            v_cache,
            block_table=table,
            cu_seqlens_q=step.cu_seqlens_q,
            seq_lens=step.seq_lens,
            max_seqlen_q=step.max_seqlen_q,
            sinks=sinks,
            plan=step.plan(),
            out=out,
            **scales,
            **options,
        )
        return out.flatten(1)

    forward_decode = forward_extend

    def _make_step(self, forward_batch: Any, limit: int) -> SglangStep:
        """Return the metadata of a batch. limit: upper bound of the longest sequence, the step's tokens included."""
        mode = forward_batch.forward_mode
        if mode.is_dllm_extend():
            raise UnsupportedError("forward_mode: DLLM_EXTEND, expected a step of an autoregressive model")
        seq_lens = forward_batch.seq_lens.to(torch.int32)
        num_seqs = len(seq_lens)
        if mode.is_decode_or_idle() or mode.is_target_verify():
            longest = 1
            if mode.is_target_verify():
                longest = self._num_verified(forward_batch.spec_info)
                seq_lens = seq_lens + longest
            else:
                seq_lens = seq_lens + self.num_drafted
            offsets = torch.arange(num_seqs + 1, dtype=torch.int32, device=self.device) * longest
        else:
            query_lens = forward_batch.extend_seq_lens
            offsets = torch.zeros(num_seqs + 1, dtype=torch.int32, device=self.device)
            offsets[1:] = query_lens.cumsum(0)
            longest = len(forward_batch.input_ids)
            if forward_batch.extend_seq_lens_cpu is not None:
                longest = max(forward_batch.extend_seq_lens_cpu, default=0)
        slots = self._slots(forward_batch, limit)
        window_table, window_slots = None, None
        if self.has_window_pool:
            translate = self.token_to_kv_pool.translate_loc_from_full_to_swa
            window_table = (translate(slots) // self.page_size).to(torch.int32)
            window_slots = translate(forward_batch.out_cache_loc)
        return SglangStep(
            cu_seqlens_q=offsets,
            seq_lens=seq_lens,
            table=(slots // self.page_size).to(torch.int32),
            window_table=window_table,
            window_slots=window_slots,
            max_seqlen_q=longest,
            max_seqlen_k=limit,
        )

    def _num_verified(self, drafts: Any) -> int:
        """Return the number of tokens that a step verifies for each sequence. SGLang may change it between steps."""
        if drafts is None:
            return self.num_verified
        if drafts.ragged_verify_layout is not None:
            raise UnsupportedError("ragged_verify_layout: expected as many drafts for each sequence")
        if drafts.num_tokens_per_req > 0:
            return int(drafts.num_tokens_per_req)
        return self.num_verified

    def _slots(self, forward_batch: Any, limit: int) -> torch.Tensor:
        """Return the first slot of each page of the sequences, up to position `limit`: [num_seqs, pages]."""
        requests = forward_batch.req_pool_indices[: forward_batch.batch_size].long()
        rows: torch.Tensor = self.req_to_token_pool.req_to_token[requests]
        return rows[:, : limit : self.page_size].long()

    def _as_blocks(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return a pool's buffer [slots, heads, size] as [blocks, page_size, heads, size], without a copy."""
        num_pages = len(buffer) // self.page_size
        return buffer[: num_pages * self.page_size].view(num_pages, self.page_size, *buffer.shape[1:])

    def _window(self, layer: Any) -> tuple[int, int]:
        """Return the positions that a layer's queries see on each side of their own; -1 for no limit."""
        window = layer.sliding_window_size
        if window is None or window < 0:
            return -1, -1
        return window, window

    def _check(self, runner: Any) -> None:
        """Raise UnsupportedError for a runner whose steps the backend does not do."""
        pool, page_size = runner.token_to_kv_pool, runner.page_size
        kinds = [pool]
        if isinstance(pool, SWAKVPool):
            kinds = [pool.full_kv_pool, pool.swa_kv_pool]
        elif type(pool) is HybridLinearKVPool:
            kinds = [pool.full_kv_pool]
        for kind in kinds:
            if type(kind) is not self.pool_kind:
                raise UnsupportedError(f"token_to_kv_pool: {type(kind).__name__}, expected {self.pool_kind.__name__}")
            if kind.dtype not in self.cache_dtypes:
                raise UnsupportedError(f"kv_cache_dtype: {kind.dtype}, expected one of {self.cache_dtypes}")
            if isinstance(kind, MHATokenToKVPool) and kind.kv_cache_layout != "nhd":
                raise UnsupportedError(f"kv_cache_layout: {kind.kv_cache_layout!r}, expected 'nhd'")
        if page_size != 1 and page_size % 8:
            raise UnsupportedError(f"page_size: {page_size}, expected 1 or a multiple of 8")
        topk = get_spec().speculative_eagle_topk or 1
        if topk > 1:
            raise UnsupportedError(f"speculative_eagle_topk: {topk}, expected 1, a chain of drafts")
        for name in ("attn_dcp_size", "attn_cp_size"):
            size = getattr(get_parallel(), name)
            if size > 1:
                raise UnsupportedError(f"{name}: {size}, expected 1, no context parallelism")
        if runner.model_config.is_encoder_decoder:
            raise UnsupportedError("is_encoder_decoder: cross attention is not supported")
        takes_images = runner.model_config.is_multimodal and not runner.model_config.is_lm_only
        runs_prompts = runner.prefill_attention_backend_str == BACKEND
        # SGLang gives the masks of images (Gemma 3 and 4) to its own backends alone; others run them as causal.
        if takes_images and runs_prompts and hasattr(runner.model, "prepare_attn_masks"):
            raise UnsupportedError(
                f"is_multimodal: {type(runner.model).__name__} masks images, which is not supported; serve text alone "
                "with --language-model-only, or choose another --prefill-attention-backend"
            )
        algorithm = get_spec().speculative_algorithm
        if runner.is_draft_worker and algorithm not in DRAFT_WORKERS:
            raise UnsupportedError(
                f"is_draft_worker: of {algorithm!r}, expected one of {DRAFT_WORKERS}; choose another "
                "--speculative-draft-attention-backend"
            )
        if runner.is_draft_worker and isinstance(pool, SWAKVPool):
            raise UnsupportedError("is_draft_worker: drafts with a pool for windows are not supported")
        window = get_spec().speculative_draft_window_size
        if runner.is_draft_worker and window and not runner.sliding_window_size:
            raise UnsupportedError(f"speculative_draft_window_size: {window}, expected none, or windows of layers")


def full_pool(runner: Any) -> Any:
    """Return the pool of a runner's full-attention layers, which pools of hybrids and of windows have inside."""
    pool = runner.token_to_kv_pool
    return getattr(pool, "full_kv_pool", pool)


def refuse_arguments(arguments: dict[str, Any]) -> None:
    """Raise UnsupportedError if an argument that the backend does not know is given."""
    for name, value in arguments.items():
        if value is not None:
            raise UnsupportedError(f"{name}: attention here does not take it")


def check_layer(layer: Any) -> None:
    """Raise UnsupportedError for a layer that the backend does not do."""
    if layer.is_cross_attention or layer.attn_type == AttentionType.DECODER_BIDIRECTIONAL:
        raise UnsupportedError(f"attn_type: layer {layer.layer_id} is neither a decoder's nor an encoder's")
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        raise UnsupportedError(f"logit_capping_method: {layer.logit_capping_method!r}, expected 'tanh'")
    if layer.xai_temperature_len and layer.xai_temperature_len > 0:
        raise UnsupportedError(f"xai_temperature_len: {layer.xai_temperature_len}, expected none")
    if layer.use_irope:
        raise UnsupportedError(
            f"use_irope: layer {layer.layer_id} sees chunks of the sequence, expected all or a window"
        )
