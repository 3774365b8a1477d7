"""Every operation as a custom op: registered rightly, equal to the plain call, and one node of a compiled graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import paged
from paged import LoraBatch, LoraWeights, Penalties, Routing
from paged.bench.attention.problem import Problem, make
from paged.bench.moe.formats import NVFP4
from paged.bench.moe.formats import quantize as quantize_experts
from paged.kernels.quantization.quantize import quantize
from tests.operations import OPERATIONS

Arguments = dict[str, Any]


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _attention(device: torch.device) -> Arguments:
    problem = Problem("mixed", ((5, 37), (1, 20), (3, 3)), heads=(4, 2), head_dim=16, block_size=8)
    return {**vars(make(problem, device)), "max_seqlen_q": 5}


def _cascade(device: torch.device) -> Arguments:
    arguments = _attention(device)
    shared = arguments["block_table"][:1, :2]
    arguments["block_table"] = torch.cat([shared.expand(3, -1), arguments["block_table"][:, :3]], 1)
    arguments["seq_lens"] = torch.tensor([37, 20, 19], dtype=torch.int32, device=device)
    caches = {name: arguments[name].nan_to_num() for name in ("k_cache", "v_cache")}
    return {**arguments, **caches, "shared_prefix_len": 16}


def _cache_write(device: torch.device) -> Arguments:
    return {
        "k_cache": torch.randn(4, 8, 2, 16, device=device),
        "v_cache": torch.randn(4, 8, 2, 16, device=device),
        "slot_mapping": torch.tensor([9, -1, 30, 2], device=device),
    }


def _int8(arguments: Arguments, device: torch.device) -> Arguments:
    """A write to the cache, whose scales are written too."""
    caches = {name: torch.zeros(4, 8, 2, 16, dtype=torch.int8, device=device) for name in ("k_cache", "v_cache")}
    return {**arguments, **caches, **{name: torch.zeros(4, 8, 2, device=device) for name in ("k_scale", "v_scale")}}


def _rotary(device: torch.device) -> Arguments:
    angles = torch.randn(10, 8, device=device)
    return {
        "positions": torch.tensor([0, 3, 9, 4], device=device),
        "cos_sin_cache": torch.cat([angles.cos(), angles.sin()], 1),
    }


def _moe(device: torch.device) -> Arguments:
    return {
        "hidden_states": torch.randn(5, 16, device=device),
        "w1": torch.randn(4, 24, 16, device=device),
        "w2": torch.randn(4, 16, 12, device=device),
        "topk_weights": torch.rand(5, 2, device=device),
        "topk_ids": torch.tensor([[0, 1], [3, 2], [1, 3], [2, 0], [3, 0]], dtype=torch.int32, device=device),
    }


def _arguments(name: str, device: torch.device) -> Arguments:
    """One call of every operation, by name."""

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device)

    match name:
        case "add_lora":
            ranks = torch.tensor([[4, 2], [3, 4]], dtype=torch.int32, device=device)
            weights = LoraWeights(randn(2, 2, 4, 16), randn(2, 4, 24), ranks, randn(2, 2), (16, 8))
            batch = LoraBatch.group(torch.tensor([1, -1, 0, 1, 0], dtype=torch.int32))
            batch = LoraBatch(batch.rows.to(device), batch.slots.to(device))
            return {"out": randn(5, 24), "x": randn(5, 16), "weights": weights, "batch": batch}
        case "paged_attention":
            return _attention(device)
        case "cascade_attention":
            return _cascade(device)
        case "copy_blocks":
            return {"caches": [randn(5, 3), randn(5, 3)], "block_pairs": torch.tensor([[0, 1], [2, 4]])}
        case "fused_moe":
            return _moe(device)
        case "greedy_argmax":
            return {"logits": randn(3, 50), "token_mask": randn(50) > 0, "repetition_penalty": randn(3, 50).exp()}
        case "merge_attn_states":
            return {"out_a": randn(3, 2, 8), "lse_a": randn(2, 3), "out_b": randn(3, 2, 8), "lse_b": randn(2, 3)}
        case "moe_align_block_size":
            return {"topk_ids": _moe(device)["topk_ids"], "block_size": 4, "num_experts": 4}
        case "qk_norm_rope_and_cache":
            rows = {"q": randn(4, 6, 16), "k": randn(4, 2, 16), "v": randn(4, 2, 16)}
            weights = {"q_weight": randn(16), "k_weight": randn(16)}
            return {**rows, **_cache_write(device), **_rotary(device), **weights}
        case "reshape_and_cache":
            return {"key": randn(4, 2, 16), "value": randn(4, 2, 16), **_cache_write(device)}
        case "rms_norm":
            return {"x": randn(4, 16), "weight": randn(16)}
        case "fused_add_rms_norm":
            return {"x": randn(4, 16), "residual": randn(4, 16), "weight": randn(16)}
        case "rotary_embedding":
            return {"query": randn(4, 6, 16), "key": randn(4, 2, 16), **_rotary(device)}
        case "quantized_linear":
            weight = quantize(randn(24, 96), "int4", group_size=32, symmetric=False)
            return {"x": randn(5, 96), "weight": weight, "bias": randn(24)}
        case "route_tokens":
            return {"router_logits": randn(5, 8), "top_k": 3}
        case "route_and_align":
            routing = Routing(3, scoring="sigmoid", num_shared_experts=1, correction_bias=randn(8))
            ticket = torch.zeros(1, dtype=torch.int32, device=device)
            return {"router_logits": randn(5, 8), "routing": routing, "block_size": 4, "ticket": ticket}
        case "sample_tokens":
            counts = torch.tensor([[0, 2, 1] * 10], dtype=torch.int32, device=device)
            penalties = Penalties(torch.tensor([-1, 0], device=device), counts, counts > 0, randn(2, 3).exp())
            keys = torch.tensor([[5, 7], [6, 1 << 31]], device=device)
            filters = {"top_k": torch.tensor([9, 30], device=device), "top_p": randn(2).sigmoid()}
            temperature = torch.tensor([1.0, 0.7], device=device)
            return {"logits": randn(2, 30), "keys": keys, "temperature": temperature, **filters, "penalties": penalties}
        case "silu_and_mul":
            return {"x": randn(4, 24)}
    raise NotImplementedError(name)


def _copy(value: Any) -> Any:
    if isinstance(value, list):
        return [_copy(each) for each in value]
    return value.clone() if isinstance(value, torch.Tensor) else value


def _tensors(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    return [tensor for value in values for tensor in _tensors(value)] if isinstance(values, list | tuple) else []


def _called(function: Callable[..., Any], arguments: Arguments) -> list[torch.Tensor]:
    """Results and arguments after the call, on copies."""
    arguments = {name: _copy(value) for name, value in arguments.items()}
    result = function(**arguments)
    return _tensors(result) + _tensors(list(arguments.values()))


def _out(name: str, arguments: Arguments) -> torch.Tensor:
    result = getattr(paged, name)(**arguments)
    return torch.full_like(result, float("nan"))


def _assert_same(actual: list[torch.Tensor], expected: list[torch.Tensor], *, tolerance: float = 0.0) -> None:
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize(
    "name",
    [*OPERATIONS, "paged_attention_out", "rms_norm_out", "silu_and_mul_out", "fused_moe_out", "quantized_linear_out"],
)
def test_registration(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    operation = name.removesuffix("_out")
    arguments = _arguments(operation, device)
    if name != operation:
        arguments["out"] = _out(operation, arguments)
    if name == "add_lora":
        weights, batch = arguments.pop("weights"), arguments.pop("batch")
        arguments |= {each: getattr(weights, each) for each in ("a", "b", "ranks", "scales", "part_sizes")}
        arguments |= {"rows": batch.rows, "slots": batch.slots}
    if "penalties" in arguments:
        arguments |= vars(arguments.pop("penalties"))
    if operation == "quantized_linear":
        arguments |= vars(arguments.pop("weight"))
    if "routing" in arguments:
        arguments |= {"expert_map": None, "num_local_experts": None, **vars(arguments.pop("routing"))}
    getattr(paged, name.removesuffix("_out"))  # its family's ops are defined where it is
    torch.library.opcheck(getattr(torch.ops.paged, name).default, (), arguments)


def test_registration_of_int8(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    arguments = _int8(_arguments("reshape_and_cache", device), device)
    arguments |= {f"{name}_cache": arguments.pop(name) for name in ("k_scale", "v_scale")}
    torch.library.opcheck(torch.ops.paged.reshape_and_cache.default, (), arguments)


@pytest.mark.parametrize("name", OPERATIONS)
def test_compiled_call_is_one_op_and_equals_the_plain_one(name: str, backend: str, device: torch.device) -> None:
    arguments = _arguments(name, device)
    variants = [arguments]
    if name in ("paged_attention", "rms_norm", "silu_and_mul", "fused_moe", "quantized_linear"):
        variants.append({**arguments, "out": _out(name, arguments)})
    if name in ("paged_attention", "cascade_attention"):
        variants.append({**arguments, "return_lse": True})
    if name == "paged_attention":
        variants.append({**arguments, "causal": torch.tensor([True, False, True], device=device)})
        variants.append({**arguments, "causal": False, "window_size": (3, 4), "softcap": 20.0})
        narrow = arguments["v_cache"][..., :8]
        variants.append({**arguments, "v_cache": narrow, "attention_chunk_size": 2})
    if name in ("fused_moe", "moe_align_block_size"):
        expert_map = torch.tensor([1, -1, 0, 2], dtype=torch.int32, device=device)
        variants.append({**arguments, "expert_map": expert_map})
    if name == "fused_moe":
        variants.append({**arguments, "w1_bias": torch.randn(4, 24, device=device), "activation": "gelu"})
        first, second = (quantize_experts(arguments[each], NVFP4) for each in ("w1", "w2"))
        packed = {"w1": first.w, "w2": second.w, **first.options("w1"), **second.options("w2")}
        variants.append(arguments | packed)
    if name == "quantized_linear":
        x, plain = torch.randn(3, 200, device=device), torch.randn(24, 200, device=device)
        variants += [{"x": x, "weight": quantize(plain, form)} for form in ("e4m3", "int8", "mxfp4", "nvfp4")]
    if name in ("reshape_and_cache", "qk_norm_rope_and_cache"):
        variants.append({**arguments, "k_scale": torch.ones(2, device=device), "v_scale": torch.ones(1, device=device)})
        variants.append(_int8(arguments, device))
    if name == "silu_and_mul":
        variants.append({**arguments, "activation": "gelu_tanh"})
    graphs: list[torch.fx.GraphModule] = []

    def backend_fn(graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(getattr(paged, name), fullgraph=True, backend=backend_fn)
    # The op asks for the log-sum-exp, and without it the PyTorch implementation takes another, fused product.
    tolerance = 1e-6 if (name, backend) == ("paged_attention", "torch") else 0.0
    for variant in variants:
        _assert_same(_called(compiled, variant), _called(getattr(paged, name), variant), tolerance=tolerance)
        targets = [str(node.target) for node in graphs[-1].graph.nodes if node.op == "call_function"]
        assert sum(target.startswith("paged.") for target in targets) == 1, targets
