"""Calls other implementations of experts on the same batches, in the same process.

A rank's part of the experts is for kernels with an expert map alone.
"""

from __future__ import annotations

import functools
import importlib

import torch

from paged.bench.contest import Peer
from paged.bench.moe.cases import MoeBatch, MoeCase, MoeLayer
from paged.bench.moe.peer_vllm import refused_by_vllm, vllm_call
from paged.bench.timing import Call

_QWEN3_MOE = "transformers.models.qwen3_moe.modeling_qwen3_moe"


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
    return "takes part on a CPU alone" if implementation == "eager" and device.type != "cpu" else None


def _transformers_call(implementation: str, case: MoeCase, layer: MoeLayer, batch: MoeBatch) -> Call:
    """The experts of its Qwen3-MoE, with one of the implementations that its models choose from."""
    from transformers import Qwen3MoeConfig

    num_experts, hidden_size, intermediate_size = layer.w2.shape
    config = Qwen3MoeConfig(num_experts=num_experts, hidden_size=hidden_size, moe_intermediate_size=intermediate_size)
    config._experts_implementation = implementation
    with torch.device("meta"):
        experts = importlib.import_module(_QWEN3_MOE).Qwen3MoeExperts(config)
    experts.gate_up_proj, experts.down_proj = (torch.nn.Parameter(w, requires_grad=False) for w in (layer.w1, layer.w2))
    ids = batch.topk_ids.long()
    return lambda: experts(batch.hidden_states, ids, batch.topk_weights)


PEERS = (
    Peer("vllm", refused_by_vllm, vllm_call),
    *(
        Peer(
            name,
            functools.partial(_refused_by_transformers, implementation),
            functools.partial(_transformers_call, implementation),
        )
        for name, implementation in (("transformers", "grouped_mm"), ("transformers_eager", "eager"))
    ),
)
