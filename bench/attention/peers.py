"""Calls of other implementations of attention on the same batches, in the same process.

Dense peers (torch's) attend over contiguous copies of the keys and values. The copies are made before timing.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import math
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from paged.bench.attention.cases import AttentionCase, Layer, Step
from paged.bench.contest import Peer
from paged.bench.timing import Call

_MAX_COPY_BYTES = 8 << 30
_WORKSPACE_BYTES = 128 << 20  # FlashInfer's documentation recommends this size
# Settings of vLLM's Triton backend. Its kernel without splits runs if there are at least this many programs. Its other
# kernel makes a fixed number of splits, and takes queries up to a longest one.
_VLLM_MIN_GRID, _VLLM_SEGMENTS, _VLLM_MAX_SPLIT_QUERY = 128, 16, 8
_VLLM_MLA_SPLIT = 512


Refuses = Callable[[AttentionCase, torch.dtype, torch.device], str | None]


def _needs(name: str, load: Callable[[], Any], *, latent: bool = False) -> Refuses:
    """Return the check of a peer that needs a GPU and its package; it takes latents, or values of the keys' size."""

    def refuses(case: AttentionCase, dtype: torch.dtype, device: torch.device) -> str | None:
        if device.type != "cuda":
            return "needs a GPU"
        if latent and not (case.latent and case.kind == "decode"):
            return "takes decode steps over latents only"
        if case.v_head_dim and not latent:
            return "takes values of the keys' size only"
        try:
            load()
        except Exception as error:  # imports look for drivers and libraries, and fail in many ways
            return f"{name} cannot be imported: {type(error).__name__}: {error}"
        return None

    return refuses


@functools.cache
def vllm_kernel(module: str, name: str) -> Callable[..., None]:
    """Return a Triton kernel's function of vLLM.

    The kernel's module imports vLLM's compiled extension without using it. If only the Python files exist, an empty
    module replaces the extension.
    """
    extension = "vllm._C_stable_libtorch"
    if extension not in sys.modules and importlib.util.find_spec(extension) is None:
        sys.modules[extension] = ModuleType(extension)
    if not importlib.import_module("vllm.triton_utils").HAS_TRITON:
        raise ImportError("vLLM sees no active Triton driver")
    return getattr(importlib.import_module(f"vllm.v1.attention.ops.{module}"), name)  # type: ignore[no-any-return]


vllm_attention = functools.partial(vllm_kernel, "triton_unified_attention", "unified_attention")
vllm_mla_decode = functools.partial(vllm_kernel, "triton_decode_attention", "decode_attention_fwd")


def _vllm_calls(step: Step, layers: list[Layer]) -> list[Call]:
    """Return calls with the arguments of TritonAttentionImpl, and the workspace and threshold of its metadata builder.

    The threshold is the captured batch size next to _VLLM_MIN_GRID // num_kv_heads. Our cases' numbers of KV heads give
    captured sizes.
    """
    (num_q_heads, num_kv_heads), device = step.case.heads, step.block_table.device
    threshold = _VLLM_MIN_GRID // num_kv_heads
    segments = (threshold * min(step.max_seqlen_q, _VLLM_MAX_SPLIT_QUERY), num_q_heads, _VLLM_SEGMENTS)
    width = 1 << (step.case.head_dim - 1).bit_length()
    scale = torch.ones(1, device=device).expand(len(step.case.lengths), num_kv_heads)
    options: dict[str, Any] = {
        "cu_seqlens_q": step.cu_seqlens_q,
        "max_seqlen_q": step.max_seqlen_q,
        "seqused_k": step.seq_lens,
        "max_seqlen_k": step.max_seqlen_k,
        "softmax_scale": 1 / math.sqrt(step.case.head_dim),
        "causal": True,
        "window_size": (-1, -1),
        "block_table": step.block_table,
        "softcap": 0,
        "q_descale": None,
        "k_descale": scale,
        "v_descale": scale,
        "seq_threshold_3D": threshold,
        "num_par_softmax_segments": _VLLM_SEGMENTS,
        "softmax_segm_output": torch.empty(*segments, width, device=device),
        "softmax_segm_max": torch.empty(segments, device=device),
        "softmax_segm_expsum": torch.empty(segments, device=device),
    }
    attend = vllm_attention()

    def call(layer: Layer) -> torch.Tensor:
        out = torch.empty_like(layer.q)
        attend(q=layer.q, k=layer.k_cache, v=layer.v_cache, out=out, **options)
        return out

    return [functools.partial(call, layer) for layer in layers]


def _vllm_mla_calls(step: Step, layers: list[Layer]) -> list[Call]:
    """Return calls with the arguments of TritonMLAImpl: one split for each 512 keys, rounded to a power of two."""
    (num_heads, _), device, case = step.case.heads, step.block_table.device, step.case
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    splits = min(1 << (max(1, step.max_seqlen_k // _VLLM_MLA_SPLIT) - 1).bit_length(), 2 * num_sms)
    partial_out = torch.empty(len(case.lengths), num_heads, splits, case.v_head_dim + 1, device=device)
    scale, attend = torch.ones(1, device=device), vllm_mla_decode()

    def call(layer: Layer) -> torch.Tensor:
        out = layer.q.new_zeros(len(layer.q), num_heads, case.v_head_dim)
        lse = layer.q.new_zeros(len(layer.q), num_heads)
        attend(
            layer.q, layer.k_cache, layer.v_cache, out, lse, step.block_table, step.seq_lens, partial_out, splits,
            case.head_dim**-0.5, case.block_size, k_scale=scale, v_scale=scale, is_mla=True,
        )  # fmt: skip
        return out

    return [functools.partial(call, layer) for layer in layers]


def _dense_on(*device_types: str) -> Refuses:
    """Return the check of a dense peer, compared on some types of device, for sequences of one length."""

    def refuses(case: AttentionCase, dtype: torch.dtype, device: torch.device) -> str | None:
        if case.latent:
            return "has no latents"
        if device.type not in device_types:
            return f"is compared on {' and '.join(device_types)} devices only"
        if not case.is_uniform:
            return "needs sequences of one length, whole prompts or decode steps"
        num_bytes = case.cost(dtype).num_bytes
        if num_bytes > _MAX_COPY_BYTES:
            return f"would copy {num_bytes / 1e9:.0f} GB"
        return None

    return refuses


def _dense(step: Step, layer: Layer) -> list[torch.Tensor]:
    """Return queries, keys and values [num_seqs, num_heads, length, head_dim], contiguous as in a dense cache."""
    num_seqs, seq_len = len(step.case.lengths), step.max_seqlen_k
    num_blocks = -(-seq_len // step.case.block_size)
    table = step.block_table[:, :num_blocks].long()
    queries = layer.q.unflatten(0, (num_seqs, step.max_seqlen_q))
    keys = layer.k_cache[table].flatten(1, 2)[:, :seq_len]
    values = layer.v_cache[table].flatten(1, 2)[:, :seq_len]
    return [x.transpose(1, 2).contiguous() for x in (queries, keys, values)]


def _sdpa_calls(step: Step, layers: list[Layer], backend: SDPBackend | None = None) -> list[Call]:
    """Return calls of PyTorch's attention. backend: None lets PyTorch choose, as its users do."""
    is_causal = step.max_seqlen_q > 1

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with contextlib.ExitStack() as stack:
            if backend is not None:
                stack.enter_context(sdpa_kernel(backend))
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
        return out.transpose(1, 2)

    return [functools.partial(call, *_dense(step, layer)) for layer in layers]


def chosen_by_sdpa(step: Step, layer: Layer) -> str:
    """Return the implementation that `scaled_dot_product_attention` chooses."""
    q, k, v = _dense(step, layer)
    choice = torch._fused_sdp_choice(q, k, v, is_causal=step.max_seqlen_q > 1, enable_gqa=True)
    return SDPBackend(choice).name.lower()


def _flashinfer_calls(step: Step, layers: list[Layer]) -> list[Call]:
    """Return calls of FlashInfer's wrapper for chunks or, for decode steps, of its wrapper with tensor cores."""
    flashinfer = _load_flashinfer()
    case, device, dtype = step.case, step.block_table.device, layers[0].q.dtype
    seq_lens, table = step.seq_lens.cpu(), step.block_table.cpu()
    num_blocks = (seq_lens + case.block_size - 1) // case.block_size
    indices = torch.cat([table[seq, :count] for seq, count in enumerate(num_blocks.tolist())])
    pages = (
        functional.pad(num_blocks.cumsum(0), (1, 0)).int().to(device),  # first page of each sequence
        indices.to(device),
        ((seq_lens - 1) % case.block_size + 1).to(device),  # tokens of its last page
    )
    sizes = (*case.heads, case.head_dim, case.block_size)
    dtypes = {"q_data_type": dtype, "kv_data_type": dtype}
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    if step.max_seqlen_q == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(*pages, *sizes, **dtypes)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(step.cu_seqlens_q, *pages, *sizes, causal=True, **dtypes)
    return [functools.partial(wrapper.run, layer.q, (layer.k_cache, layer.v_cache)) for layer in layers]


def _load_flashinfer() -> Any:
    return importlib.import_module("flashinfer")


PEERS = (
    Peer("vllm", _needs("vLLM", vllm_attention), _vllm_calls),
    Peer("vllm_mla", _needs("vLLM", vllm_mla_decode, latent=True), _vllm_mla_calls),
    Peer("sdpa", _dense_on("cpu", "cuda"), _sdpa_calls),
    Peer("sdpa_cudnn", _dense_on("cuda"), functools.partial(_sdpa_calls, backend=SDPBackend.CUDNN_ATTENTION)),
    Peer("sdpa_flash", _dense_on("cuda"), functools.partial(_sdpa_calls, backend=SDPBackend.FLASH_ATTENTION)),
    Peer("flashinfer", _needs("FlashInfer", _load_flashinfer), _flashinfer_calls),
)
