"""The experts of transformers' models as `fused_moe` takes them."""

from __future__ import annotations

from typing import Any

import torch
from transformers.activations import SiLUActivation
from transformers.integrations.moe import _default_apply_gate

from paged.errors import UnsupportedError

# gpt-oss's gate, clamped and with one added to the other half, by whose it is, and whether the two halves alternate.
_CLAMPED_GATES = {"GptOssExperts._apply_gate": True, "OpenAIPrivacyFilterExperts._apply_gate": False}
# What `fused_moe`'s "swiglu_oai" has built in.
_CLAMPED = {"limit": 7.0, "alpha": 1.702}


def read_experts(experts: Any) -> dict[str, Any]:
    """The weights, biases and activation of a module of experts, by the names that `fused_moe` has for them.

    Weights stored as [num_experts, in, out] are written anew in memory, once, so that the rows of each output stand
    together; the parameter keeps its shape and values.

    Raises:
        UnsupportedError: experts that are no gated SiLU or gpt-oss MLPs, or whose weights stand in another order.
    """
    _expect(experts, "has_gate", True)
    _expect(experts, "has_post_expert_norm", False)
    gate = type(experts)._apply_gate
    interleaved = _CLAMPED_GATES.get(gate.__qualname__)
    if interleaved is not None:
        for name, value in _CLAMPED.items():
            _expect(experts, name, value)
    elif gate is not _default_apply_gate:
        raise UnsupportedError(f"_apply_gate: {type(experts).__name__}'s own, expected act_fn(gate) * up or gpt-oss's")
    elif not isinstance(experts.act_fn, torch.nn.SiLU | SiLUActivation):
        raise UnsupportedError(f"act_fn: {experts.act_fn}, expected SiLU")
    _expect(experts, "is_concatenated", not interleaved)
    w1, w2 = experts.gate_up_proj, experts.down_proj
    if experts.is_transposed:
        if w1.shape[-1] != 2 * w2.shape[-2]:
            raise UnsupportedError(
                f"is_transposed: True, with weights {list(w1.shape)} and {list(w2.shape)} that are not"
            )
        w1, w2 = _transposed(w1), _transposed(w2)
    return {
        "w1": w1,
        "w2": w2,
        "w1_bias": experts.gate_up_proj_bias if experts.has_bias else None,
        "w2_bias": experts.down_proj_bias if experts.has_bias else None,
        "activation": "silu" if interleaved is None else "swiglu_oai",
        "interleaved": bool(interleaved),
    }


def _expect(experts: Any, name: str, value: Any) -> None:
    if getattr(experts, name) != value:
        raise UnsupportedError(f"{name}: {getattr(experts, name)}, expected experts where it is {value}")


def _transposed(weight: torch.Tensor) -> torch.Tensor:
    """[num_experts, out, in] with contiguous rows."""
    if weight.stride(-2) == 1:
        return weight.mT
    # What is made in a graph is the graph's.
    if torch.compiler.is_compiling() or (weight.is_cuda and torch.cuda.is_current_stream_capturing()):
        return weight.mT.contiguous()
    weight.data = weight.data.mT.contiguous().mT
    return weight.mT
