"""What others' experts take for the same batches, in the same process.

A peer that is missing, or that cannot take a case, says why. A rank's part of the experts is for kernels with an expert
map alone.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

import paged
from paged.bench.moe_cases import MoeBatch, MoeCase, MoeLayer
from paged.bench.timing import Call
from paged.kernels.compat import tl, triton
from paged.kernels.moe_sum import moe_sum

_VLLM_FOLDER = Path("model_executor/layers/fused_moe")


@dataclass(frozen=True)
class MoePeer:
    """refuses(case, dtype, device): why it takes no part, or None. make: the call for a layer and a batch."""

    name: str
    refuses: Callable[[MoeCase, torch.dtype, torch.device], str | None]
    make: Callable[[MoeCase, MoeLayer, MoeBatch], Call]


@functools.cache
def _vllm_folder() -> Path:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("vLLM is not on the path")
    return Path(spec.submodule_search_locations[0]) / _VLLM_FOLDER


@functools.cache
def _vllm_module() -> ModuleType:
    """vLLM's Triton kernels out of their file, whose own imports need the compiled extension."""
    source = (_vllm_folder() / "fused_moe.py").read_text()
    kernels = [
        ast.get_source_segment(source, node) or ""
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and any(ast.unparse(mark) == "triton.jit" for mark in node.decorator_list)
    ]
    # Triton reads the source of a kernel again when it compiles it, so the file stays.
    path = Path(tempfile.mkdtemp(prefix="moe-peers-")) / "vllm_kernels.py"
    path.write_text(
        "import triton\nimport triton.language as tl\n\n\n" + "\n\n\n".join(f"@triton.jit\n{k}" for k in kernels)
    )
    spec = importlib.util.spec_from_file_location("vllm_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _vllm_table(case: MoeCase, device: torch.device) -> dict[int, dict[str, int]]:
    """Its tuned table for the experts of this rank; empty where there is none."""
    name = torch.cuda.get_device_name(device).replace(" ", "_")
    model = case.model
    path = _vllm_folder() / f"configs/E={model.num_local_experts},N={model.intermediate_size},device_name={name}.json"
    if not path.exists():
        return {}
    return {int(key): tile for key, tile in json.loads(path.read_text()).items() if key.isdigit()}


def _refused_by_vllm(case: MoeCase, dtype: torch.dtype, device: torch.device) -> str | None:
    if device.type != "cuda":
        return "needs a GPU"
    try:
        _vllm_module()
    except Exception as error:  # an import fails in many ways
        return f"vLLM's kernel cannot be read: {type(error).__name__}: {error}"
    return None if _vllm_table(case, device) else "vLLM ships no table for these experts on this device"


def _vllm_call(case: MoeCase, layer: MoeLayer, batch: MoeBatch) -> Call:
    """vLLM's kernel for both products with its tuned tile; alignment, activation and sum between them are ours.

    As in vLLM, entries up to a quarter of the experts are not aligned, and with an expert map the blocks of experts
    that are elsewhere are there and get zeros.
    """
    kernel = _vllm_module().fused_moe_kernel
    table = _vllm_table(case, batch.hidden_states.device)
    tile = dict(table[min(table, key=lambda num_tokens: abs(num_tokens - case.num_tokens))])
    block_m = tile["BLOCK_SIZE_M"]
    num_entries, top_k = batch.topk_ids.numel(), case.model.top_k
    is_naive = layer.expert_map is None and num_entries * 4 <= case.model.num_experts

    def gemm(
        x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, aligned: tuple[Any, ...], weights: torch.Tensor | None
    ) -> None:
        sorted_token_ids, expert_ids, num_padded = aligned
        size = num_entries * block_m if sorted_token_ids is None else sorted_token_ids.numel()
        if len(x) < block_m:
            size = min(size, num_entries * block_m)
        kernel[(triton.cdiv(size, block_m) * triton.cdiv(w.shape[1], tile["BLOCK_SIZE_N"]),)](
            x,
            w,
            out,
            None,
            None,
            None,
            weights,
            sorted_token_ids,
            expert_ids,
            num_padded,
            w.shape[1],
            w.shape[2],
            size,
            num_entries,
            x.stride(0),
            x.stride(1),
            w.stride(0),
            w.stride(2),
            w.stride(1),
            out.stride(0),
            out.stride(1),
            *[0] * 7,
            group_n=0,
            group_k=0,
            naive_block_assignment=sorted_token_ids is None,
            SPLIT_K=1,
            MUL_ROUTED_WEIGHT=weights is not None,
            top_k=top_k if weights is None else 1,
            compute_type=tl.bfloat16,
            use_fp8_w8a8=False,
            use_int8_w8a8=False,
            use_int8_w8a16=False,
            per_channel_quant=False,
            HAS_BIAS=False,
            SWAP_AB=False,
            USE_TD=False,
            **tile,
        )

    def call() -> torch.Tensor:
        x, ids = batch.hidden_states, batch.topk_ids
        num_padded = torch.full((1,), num_entries * block_m, dtype=torch.int32, device=x.device)
        aligned: tuple[Any, ...] = (None, ids.view(-1), num_padded)
        if not is_naive:
            aligned = paged.moe_align_block_size(ids, block_m, case.model.num_experts)
            if layer.expert_map is not None:
                experts = aligned[1]
                rows = torch.where(experts >= 0, layer.expert_map[experts.clamp(min=0)], -1)
                aligned = (aligned[0], rows, aligned[2])
        gate_up = x.new_empty(num_entries, layer.w1.shape[1])
        gemm(x, layer.w1, gate_up, aligned, None)
        parts = x.new_empty(num_entries, x.shape[1])
        gemm(paged.silu_and_mul(gate_up), layer.w2, parts, aligned, batch.topk_weights.view(-1))
        out = torch.empty_like(x)
        moe_sum(parts, batch.topk_weights, ids, len(layer.w2), layer.expert_map, out)
        return out

    return call


def _refused_by_grouped_mm(case: MoeCase, dtype: torch.dtype, device: torch.device) -> str | None:
    if not hasattr(torch, "_grouped_mm"):
        return "this torch has no _grouped_mm"
    if dtype != torch.bfloat16:
        return "takes bfloat16 alone"
    return None if case.model.is_whole else "has no expert map"


def _grouped_mm_call(case: MoeCase, layer: MoeLayer, batch: MoeBatch) -> Call:
    """Entries sorted by expert, torch's two grouped products, our activation, and the sum back in order."""
    w1, w2 = layer.w1.mT, layer.w2.mT
    top_k = case.model.top_k

    def call() -> torch.Tensor:
        ids, entries = batch.topk_ids.flatten().sort(stable=True)
        ends = torch.histc(ids, bins=len(w1), min=0, max=len(w1) - 1).cumsum(0, dtype=torch.int32)
        gate_up = torch._grouped_mm(batch.hidden_states[entries // top_k], w1, offs=ends)
        parts = torch._grouped_mm(paged.silu_and_mul(gate_up), w2, offs=ends)
        weighted = torch.empty_like(parts)
        weighted[entries] = parts * batch.topk_weights.view(-1, 1)[entries].to(parts.dtype)
        return weighted.view(-1, top_k, parts.shape[1]).sum(1)

    return call


def _refused_by_transformers(case: MoeCase, dtype: torch.dtype, device: torch.device) -> str | None:
    try:
        importlib.import_module("transformers.integrations.moe")
    except Exception as error:  # an import fails in many ways
        return f"transformers cannot be imported: {type(error).__name__}: {error}"
    return None if case.model.is_whole else "has no expert map"


def _transformers_call(case: MoeCase, layer: MoeLayer, batch: MoeBatch) -> Call:
    """The `grouped_mm` experts that transformers' models call."""
    forward = importlib.import_module("transformers.integrations.moe").grouped_mm_experts_forward

    def apply_gate(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        return functional.silu(gate) * up

    experts = SimpleNamespace(
        num_experts=len(layer.w1),
        gate_up_proj=layer.w1,
        down_proj=layer.w2,
        has_gate=True,
        has_bias=False,
        is_transposed=False,
        has_post_expert_norm=False,
        _is_expert_parallel=False,
        _apply_gate=apply_gate,
    )
    ids = batch.topk_ids.long()
    return lambda: forward(experts, batch.hidden_states, ids, batch.topk_weights)


PEERS = (
    MoePeer("vllm", _refused_by_vllm, _vllm_call),
    MoePeer("torch_grouped_mm", _refused_by_grouped_mm, _grouped_mm_call),
    MoePeer("transformers", _refused_by_transformers, _transformers_call),
)
