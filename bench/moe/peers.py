"""Calls of other implementations of experts on the same batches, in the same process.

vLLM's peer is its Triton kernels for both products, launched as vLLM does, with its tiles. Alignment, activation,
rounding to e4m3 and the sum around them are ours. Only kernels with an expert map take a rank's part of the experts.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import torch

import paged
from paged.bench.contest import Peer
from paged.bench.problems.experts import MoeBatch, MoeCase, MoeLayer
from paged.bench.timing import Call
from paged.kernels.core.compat import tl, triton
from paged.kernels.core.device import device_of
from paged.kernels.moe.fused_moe import moe_sum
from paged.kernels.moe.weights import ExpertLinear
from paged.kernels.quantization.quantize_rows import quantize_rows

_QWEN3_MOE = "transformers.models.qwen3_moe.modeling_qwen3_moe"
# Our name of a format -> the name in the files of vLLM's tuned tables.
_TABLES = {
    None: "",
    "e4m3": ",dtype=fp8_w8a8,block_shape=[128,128]",
    "int8": ",dtype=int8_w8a16",
    "int4": ",dtype=int4_w4a16",
}
# Up to this many (token, expert) pairs per expert, vLLM takes a CUDA kernel for 4-bit weights on NVIDIA's chips.
_COMPILED_INT4_ENTRIES = 6
# vLLM's functions that launch kernels: for weights in the input's dtype or e4m3, and for integers.
_FLOAT_LAUNCHER, _INTEGER_LAUNCHER = "invoke_fused_moe_triton_kernel", "invoke_fused_moe_wna16_triton_kernel"
_TAKEN = {_FLOAT_LAUNCHER, _INTEGER_LAUNCHER, "get_moe_wna16_block_config"}


@functools.cache
def _vllm_folder() -> Path:
    """Return the folder of vLLM's Python files for experts.

    Raises:
        FileNotFoundError: the files are not on the path.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("vllm is not on the Python path")
    return Path(spec.submodule_search_locations[0], "model_executor/layers/fused_moe")


def _swaps_ab(block_m: int, block_n: int) -> bool:
    return device_of(torch.device("cuda")).arch == "sm_90" and block_m < 64 and block_n >= 64


@functools.cache
def vllm_functions() -> dict[str, Any]:
    """Return vLLM's Triton kernels and launchers by name.

    Only the functions are executed, because the imports of their file need vLLM's compiled extension or a driver.
    """
    path = _vllm_folder() / "fused_moe.py"
    names: dict[str, Any] = {"__name__": "vllm.model_executor.layers.fused_moe", "tl": tl, "triton": triton}
    names |= {"torch": torch, "Any": Any, "enable_swap_ab": _swaps_ab, "resolve_moe_use_td": lambda: False}
    names["warn_if_moe_use_td_ineffective"] = lambda *_, **__: None
    tree = ast.parse(path.read_text())
    functions: list[ast.stmt] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            if node.name in _TAKEN or "triton.jit" in decorators:
                functions.append(node)
    tree.body = functions
    # Keep the file's line numbers, because Triton looks there for a function's source.
    exec(compile(tree, str(path), "exec", dont_inherit=True), names)
    return names


def _kind(case: MoeCase) -> str | None:
    if case.format is None:
        return None
    return case.format.kind


@functools.cache
def _table(case: MoeCase, device: torch.device) -> dict[int, dict[str, int]]:
    """Return vLLM's tuned table for the experts of this rank; empty if there is none."""
    name, model = torch.cuda.get_device_name(device).replace(" ", "_"), case.model
    experts = f"E={model.num_local_experts},N={model.intermediate_size}"
    path = _vllm_folder() / f"configs/{experts},device_name={name}{_TABLES[_kind(case)]}.json"
    if not path.exists():
        return {}
    tiles = {}
    for key, tile in json.loads(path.read_text()).items():
        if key.isdigit():
            tiles[int(key)] = tile
    return tiles


def _tile(case: MoeCase, device: torch.device) -> dict[str, int]:
    """Return the table's tile for the nearest number of tokens; without a table, vLLM's tile for int8 and int4."""
    table = _table(case, device)
    if table:
        return table[min(table, key=lambda num_tokens: abs(num_tokens - case.num_tokens))]
    block_m = 64
    if case.num_tokens <= 20:
        block_m = 16
    elif case.num_tokens <= 40:
        block_m = 32
    return {"BLOCK_SIZE_M": block_m, "GROUP_SIZE_M": 1, "SPLIT_K": 1}


def refused_by_vllm(case: MoeCase, dtype: torch.dtype, device: torch.device) -> str | None:
    if device.type != "cuda":
        return "needs a GPU"
    try:
        vllm_functions()
    except Exception as error:  # another version's file may fail in many ways
        return f"vLLM's kernel cannot be read: {type(error).__name__}: {error}"
    kind = _kind(case)
    if kind == "e4m3" and str(case.format) != "e4m3-128x128":
        return "rounds what such weights multiply with a scale a token, not one for every 128 values"
    if kind == "int4" and case.num_tokens * case.model.top_k <= _COMPILED_INT4_ENTRIES * case.model.num_experts:
        return "takes a compiled kernel, which is not here, for so few entries"
    if kind in ("mxfp4", "nvfp4") or (case.format is not None and case.format.in_words):
        return "has no kernel here for words of eight codes"
    if kind in ("int8", "int4") or _table(case, device):
        return None
    return "vLLM ships no table for these experts on this device"


def vllm_call(case: MoeCase, layer: MoeLayer, batch: MoeBatch) -> Call:
    """Return a call of vLLM's kernels with vLLM's arguments.

    Up to a quarter of the experts' number, entries are not aligned, except for int8 and int4. With an expert map,
    blocks of experts on other ranks exist and get zeros.
    """
    ids, tile = batch.topk_ids, _tile(case, batch.topk_ids.device)
    num_entries, block_m = ids.numel(), tile["BLOCK_SIZE_M"]
    is_integer = _kind(case) in ("int8", "int4")
    is_naive = not is_integer and layer.expert_map is None and num_entries * 4 <= case.model.num_experts
    gate_up = layer.gate_up._replace(w=_as_unsigned(layer.gate_up.w))
    down = layer.down._replace(w=_as_unsigned(layer.down.w))

    def call() -> torch.Tensor:
        num_padded = torch.full((1,), num_entries * block_m, dtype=torch.int32, device=ids.device)
        aligned: tuple[torch.Tensor | None, torch.Tensor, torch.Tensor] = (None, ids.view(-1), num_padded)
        if not is_naive:
            aligned = paged.moe_align_block_size(ids, block_m, case.model.num_experts)
            if layer.expert_map is not None:
                experts = aligned[1]
                rows = torch.where(experts >= 0, layer.expert_map[experts.clamp(min=0)], -1)
                aligned = (aligned[0], rows, aligned[2])

        def product(x: torch.Tensor, linear: ExpertLinear, weights: torch.Tensor | None) -> torch.Tensor:
            """Return the first product or, with `weights`, the second product, whose rows are entries."""
            w, scale = linear.w, linear.scale
            out = x.new_empty(1, num_entries, w.shape[1])
            dtype = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[x.dtype]
            top_k = 1
            if weights is None:
                top_k = case.model.top_k
            routing = (weights, *aligned, weights is not None, top_k, tile, dtype)
            if is_integer:
                assert case.format is not None
                kinds = (_kind(case) == "int8", _kind(case) == "int4")
                launch = vllm_functions()[_INTEGER_LAUNCHER]
                launch(x, w, out, scale, None, *routing, *kinds, [0, case.format.group_k])
                return out[0]
            launch = vllm_functions()[_FLOAT_LAUNCHER]
            if scale is None:
                launch(x, w, out, None, None, *routing, False, False, False, False, False, None)
            else:
                x, x_scale = quantize_rows(x, w.dtype, in_groups=True)(x, None)
                launch(x, w, out, x_scale, scale, *routing, True, False, False, False, False, [128, 128])
            return out[0]

        activated = paged.silu_and_mul(product(batch.hidden_states, gate_up, None))
        parts = product(activated, down, batch.topk_weights)
        out = torch.empty_like(batch.hidden_states)
        moe_sum(parts, batch.topk_weights, ids, len(layer.down.w), layer.expert_map, out)
        return out

    return call


def _as_unsigned(w: torch.Tensor) -> torch.Tensor:
    """Return int8 weights as vLLM stores them: unsigned, 128 higher."""
    if w.dtype == torch.int8:
        return w.view(torch.uint8) ^ 128
    return w


def _refused_by_transformers(
    implementation: str, case: MoeCase, dtype: torch.dtype, device: torch.device
) -> str | None:
    try:
        importlib.import_module(_QWEN3_MOE)
    except Exception as error:  # an import fails in many ways
        return f"transformers cannot be imported: {type(error).__name__}: {error}"
    if case.format is not None:
        return "takes no quantised weights"
    if not case.model.is_whole:
        return "has no expert map"
    if implementation == "eager" and device.type != "cpu":
        return "takes part on a CPU alone"
    return None


def _transformers_call(implementation: str, case: MoeCase, layer: MoeLayer, batch: MoeBatch) -> Call:
    """Return a call of transformers' Qwen3-MoE experts, with one of the implementations that its models choose from."""
    from transformers import Qwen3MoeConfig

    num_experts, hidden_size, intermediate_size = layer.down.w.shape
    config = Qwen3MoeConfig(num_experts=num_experts, hidden_size=hidden_size, moe_intermediate_size=intermediate_size)
    config._experts_implementation = implementation
    with torch.device("meta"):
        experts = importlib.import_module(_QWEN3_MOE).Qwen3MoeExperts(config)
    experts.gate_up_proj = torch.nn.Parameter(layer.gate_up.w, requires_grad=False)
    experts.down_proj = torch.nn.Parameter(layer.down.w, requires_grad=False)
    ids = batch.topk_ids.long()
    return lambda: experts(batch.hidden_states, ids, batch.topk_weights)


def _transformers(name: str, implementation: str) -> Peer:
    refuses = functools.partial(_refused_by_transformers, implementation)
    return Peer(name, refuses, functools.partial(_transformers_call, implementation))


PEERS = (
    Peer("vllm", refused_by_vllm, vllm_call),
    _transformers("transformers", "grouped_mm"),
    _transformers("transformers_eager", "eager"),
)
