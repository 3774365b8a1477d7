"""vLLM's Triton kernels for both products of a layer, launched as vLLM does, with its tiles.

Alignment, activation, rounding to e4m3 and the sum around them are ours.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

import torch

import paged
from paged.bench.moe.cases import MoeBatch, MoeCase, MoeLayer
from paged.bench.timing import Call
from paged.kernels.common.compat import tl, triton
from paged.kernels.common.device import device_of
from paged.kernels.moe.quantize_token_groups import quantize_token_groups
from paged.kernels.moe.sum import moe_sum

# How vLLM's tables are named by what they were tuned for.
_TABLES = {
    None: "",
    "e4m3": ",dtype=fp8_w8a8,block_shape=[128,128]",
    "int8": ",dtype=int8_w8a16",
    "int4": ",dtype=int4_w4a16",
}
# Up to so many entries an expert vLLM gives 4-bit weights to a compiled kernel on NVIDIA's chips.
_COMPILED_INT4_ENTRIES = 6
Aligned = tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]


@functools.cache
def _vllm_folder() -> Path:
    """Where vLLM's Python files of experts lie.

    Raises:
        FileNotFoundError: they are not on the path.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("vllm is not on the Python path")
    return Path(spec.submodule_search_locations[0], "model_executor/layers/fused_moe")


@functools.cache
def vllm_kernels() -> dict[str, Any]:
    """vLLM's Triton kernels by name, out of a file whose own imports ask for its compiled extension or for a driver."""
    path = _vllm_folder() / "fused_moe.py"
    names: dict[str, Any] = {"__name__": "vllm.model_executor.layers.fused_moe", "tl": tl, "triton": triton}
    tree = ast.parse(path.read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    tree.body = [node for node in functions if any(ast.unparse(mark) == "triton.jit" for mark in node.decorator_list)]
    # Line numbers stay those of the file, where Triton looks for a function's source.
    exec(compile(tree, str(path), "exec", dont_inherit=True), names)
    return names


def _kind(case: MoeCase) -> str | None:
    return None if case.format is None else case.format.kind


@functools.cache
def _table(case: MoeCase, device: torch.device) -> dict[int, dict[str, int]]:
    """Its tuned table for the experts of this rank; empty where there is none."""
    name, model = torch.cuda.get_device_name(device).replace(" ", "_"), case.model
    experts = f"E={model.num_local_experts},N={model.intermediate_size}"
    path = _vllm_folder() / f"configs/{experts},device_name={name}{_TABLES[_kind(case)]}.json"
    if not path.exists():
        return {}
    return {int(key): tile for key, tile in json.loads(path.read_text()).items() if key.isdigit()}


def _tile(case: MoeCase, device: torch.device, num_rows: int) -> dict[str, int]:
    """The table's tile for the nearest number of tokens; for int8 and int4 without one what vLLM then takes."""
    table = _table(case, device)
    if table:
        return dict(table[min(table, key=lambda num_tokens: abs(num_tokens - case.num_tokens))])
    block_m = 16 if case.num_tokens <= 20 else 32 if case.num_tokens <= 40 else 64
    block_n, block_k = (32, 64) if num_rows == 1 else (64, 32)
    return {"BLOCK_SIZE_M": block_m, "BLOCK_SIZE_N": block_n, "BLOCK_SIZE_K": block_k, "GROUP_SIZE_M": 1}


def refused_by_vllm(case: MoeCase, dtype: torch.dtype, device: torch.device) -> str | None:
    if device.type != "cuda":
        return "needs a GPU"
    try:
        vllm_kernels()
    except Exception as error:  # another version's file may fail in many ways
        return f"vLLM's kernel cannot be read: {type(error).__name__}: {error}"
    kind = _kind(case)
    if kind == "e4m3" and str(case.format) != "e4m3-128x128":
        return "rounds what such weights multiply with a scale a token, not one for every 128 values"
    if kind == "int4" and case.num_tokens * case.model.top_k <= _COMPILED_INT4_ENTRIES * case.model.num_experts:
        return "takes a compiled kernel, which is not here, for so few entries"
    if kind in ("mxfp4", "nvfp4") or (case.format is not None and case.format.in_words):
        return "has no kernel here for words of eight codes"
    if kind in ("int8", "int4"):
        return None
    return None if _table(case, device) else "vLLM ships no table for these experts on this device"


def vllm_call(case: MoeCase, layer: MoeLayer, batch: MoeBatch) -> Call:
    """As in vLLM, entries up to a quarter of the experts are not aligned, but for int8 and int4; and with an expert map
    the blocks of experts that are elsewhere are there and get zeros."""
    x, ids = batch.hidden_states, batch.topk_ids
    num_entries, block_m = ids.numel(), _tile(case, x.device, len(x))["BLOCK_SIZE_M"]
    is_integer = _kind(case) in ("int8", "int4")
    is_naive = not is_integer and layer.expert_map is None and num_entries * 4 <= case.model.num_experts
    w1, w2 = (_as_unsigned(w) for w in (layer.w1, layer.w2))

    def call() -> torch.Tensor:
        num_padded = torch.full((1,), num_entries * block_m, dtype=torch.int32, device=x.device)
        aligned: Aligned = (None, ids.view(-1), num_padded)
        if not is_naive:
            aligned = paged.moe_align_block_size(ids, block_m, case.model.num_experts)
            if layer.expert_map is not None:
                experts = aligned[1]
                rows = torch.where(experts >= 0, layer.expert_map[experts.clamp(min=0)], -1)
                aligned = (aligned[0], rows, aligned[2])
        gate_up = x.new_empty(num_entries, w1.shape[1])
        _gemm(case, x, w1, layer.quantization.get("w1_scale"), gate_up, aligned, None)
        parts = x.new_empty(num_entries, x.shape[1])
        _gemm(
            case,
            paged.silu_and_mul(gate_up),
            w2,
            layer.quantization.get("w2_scale"),
            parts,
            aligned,
            batch.topk_weights.view(-1),
        )
        out = torch.empty_like(x)
        moe_sum(parts, batch.topk_weights, ids, len(w2), layer.expert_map, out)
        return out

    return call


def _as_unsigned(w: torch.Tensor) -> torch.Tensor:
    """8-bit whole numbers as vLLM stores them, 128 above what they are."""
    return w.view(torch.uint8) ^ 128 if w.dtype == torch.int8 else w


def _gemm(
    case: MoeCase,
    x: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor | None,
    out: torch.Tensor,
    aligned: Aligned,
    weights: torch.Tensor | None,
) -> None:
    """The first product, or with `weights` the second, whose rows are entries."""
    tile, kind, dtype = _tile(case, x.device, len(x)), _kind(case), x.dtype
    num_entries, block_m = len(out), tile["BLOCK_SIZE_M"]
    sorted_token_ids, expert_ids, num_padded = aligned
    size = num_entries * block_m if sorted_token_ids is None else sorted_token_ids.numel()
    if len(x) < block_m:
        size = min(size, num_entries * block_m)
    arguments: dict[str, Any] = {
        "b_ptr": w,
        "c_ptr": out,
        "b_scale_ptr": w_scale,
        "topk_weights_ptr": weights,
        "sorted_token_ids_ptr": sorted_token_ids,
        "expert_ids_ptr": expert_ids,
        "num_tokens_post_padded_ptr": num_padded,
        "N": w.shape[1],
        "K": x.shape[1],
        "EM": size,
        "num_valid_tokens": num_entries,
        **_strides("stride_b", "enk", w),
        **_strides("stride_c", "mn", out),
        **_strides("stride_bs", "enk", w_scale),
        "SPLIT_K": 1,
        "MUL_ROUTED_WEIGHT": weights is not None,
        "top_k": case.model.top_k if weights is None else 1,
        "compute_type": {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype],
        "use_int8_w8a16": kind == "int8",
        **tile,
    }
    if kind in ("int8", "int4"):
        assert case.format is not None
        kernel = vllm_kernels()["fused_moe_kernel_gptq_awq"]
        arguments |= {
            "b_zp_ptr": None,
            **_strides("stride_bz", "enk", None),
            "block_k_diviable": x.shape[1] % tile["BLOCK_SIZE_K"] == 0,
            "group_size": case.format.group_k,
            "has_zp": False,
            "use_int4_w4a16": kind == "int4",
        }
    else:
        kernel, x_scale, group = vllm_kernels()["fused_moe_kernel"], None, 0
        if kind == "e4m3":
            (x, x_scale), group = quantize_token_groups(x)(x), 128
        arguments |= {
            "b_bias_ptr": None,
            "a_scale_ptr": x_scale,
            **_strides("stride_as", "mk", x_scale),
            **dict.fromkeys(("stride_bbe", "stride_bbn"), 0),
            **dict.fromkeys(("group_n", "group_k"), group),
            "BLOCK_SIZE_K": min(tile["BLOCK_SIZE_K"], group or tile["BLOCK_SIZE_K"]),
            "naive_block_assignment": sorted_token_ids is None,
            "use_fp8_w8a8": kind == "e4m3",
            "use_int8_w8a8": False,
            "per_channel_quant": False,
            "HAS_BIAS": False,
            "SWAP_AB": (
                kind == "e4m3" and device_of(x.device).arch == "sm_90" and block_m < 64 and tile["BLOCK_SIZE_N"] >= 64
            ),
            "USE_TD": False,
        }
    grid = (triton.cdiv(size, block_m) * triton.cdiv(w.shape[1], tile["BLOCK_SIZE_N"]),)
    kernel[grid](a_ptr=x, **_strides("stride_a", "mk", x), **arguments)


def _strides(prefix: str, axes: str, tensor: torch.Tensor | None) -> dict[str, int]:
    """A tensor's strides by the kernels' names for them; 0 where there is no tensor."""
    strides = (0,) * len(axes) if tensor is None else tensor.stride()
    return {prefix + axis: stride for axis, stride in zip(axes, strides, strict=True)}
