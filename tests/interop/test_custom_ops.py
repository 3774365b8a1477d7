"""Every operation as a custom op: registered rightly, equal to the plain call, and one node of a compiled graph."""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from torch.utils._pytree import register_dataclass, tree_leaves, tree_map_only

import paged
from paged import RecurrentState
from paged.bench.problems.formats import NVFP4
from paged.bench.problems.formats import quantize as quantize_experts
from paged.kernels.quantization.quantize import quantize
from tests.fuzz.kernels.kernel_calls import CALLS
from tests.operations import OPERATIONS
from tests.tolerance import assert_within

Arguments = dict[str, Any]
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
OUT = ["paged_attention", "rms_norm", "silu_and_mul", "fused_moe", "quantized_linear"]

register_dataclass(RecurrentState)  # copied as a whole, its tensors too


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def small_call(name: str, device: torch.device) -> Arguments:
    """One call of every operation, by name, without the log-sum-exp."""
    call = CALLS[name]
    arguments = call.pack(tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), call.arguments()))
    arguments.pop("return_lse", None)
    if name == "route_and_align":
        arguments["ticket"] = torch.zeros(1, dtype=torch.int32, device=device)
    return arguments


def _with_int8(arguments: Arguments) -> Arguments:
    """A write to the cache, whose scales are written too."""
    cache = arguments["k_cache"]
    caches = {name: torch.zeros_like(cache, dtype=torch.int8) for name in ("k_cache", "v_cache")}
    return {**arguments, **caches, **{name: torch.zeros_like(cache[..., 0]) for name in ("k_scale", "v_scale")}}


def _with_out(name: str, arguments: Arguments) -> Arguments:
    return {**arguments, "out": torch.full_like(getattr(paged, name)(**arguments), float("nan"))}


def _variants(name: str, device: torch.device) -> Iterator[Arguments]:
    """Calls of an operation that take other ways through it."""
    arguments = small_call(name, device)
    yield arguments
    if name in OUT:
        yield _with_out(name, arguments)
    if name in ("paged_attention", "cascade_attention"):
        yield {**arguments, "return_lse": True}
    if name in ("fused_moe", "moe_align_block_size"):
        yield {**arguments, "expert_map": torch.tensor([1, -1, 0, 2, -1, 3], dtype=torch.int32, device=device)}
    if name in ("reshape_and_cache", "qk_norm_rope_and_cache"):
        yield {**arguments, "k_scale": torch.ones(2, device=device), "v_scale": torch.ones(1, device=device)}
        yield _with_int8(arguments)
    match name:
        case "paged_attention":
            yield {**arguments, "causal": torch.tensor([True, False, True], device=device)}
            yield {**arguments, "causal": False, "window_size": (3, 4), "softcap": 20.0}
            yield {**arguments, "v_cache": arguments["v_cache"][..., :8], "attention_chunk_size": 2}
        case "fused_moe":
            yield {**arguments, "w1_bias": torch.randn(6, 32, device=device), "activation": "gelu"}
            first, second = (quantize_experts(arguments[each], NVFP4) for each in ("w1", "w2"))
            yield {**arguments, "w1": first.w, "w2": second.w, **first.options("w1"), **second.options("w2")}
        case "quantized_linear":
            x, plain = torch.randn(3, 200, device=device), torch.randn(24, 200, device=device)
            yield {"x": x[:, :96], "weight": quantize(plain[:, :96], "int4", group_size=32, symmetric=False)}
            for form in ("e4m3", "int8", "mxfp4", "nvfp4"):
                yield {"x": x, "weight": quantize(plain, form)}
        case "silu_and_mul":
            yield {**arguments, "activation": "gelu_tanh"}
        case "greedy_argmax":
            yield {**arguments, "repetition_penalty": torch.randn(3, 40, device=device).exp()}


def _called(function: Callable[..., Any], arguments: Arguments) -> list[torch.Tensor]:
    """Results and arguments after the call, on copies."""
    arguments = tree_map_only(torch.Tensor, torch.clone, arguments)
    leaves = tree_leaves([function(**arguments), arguments])
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("checks", [CHECKS[:3], pytest.param(CHECKS[3:], marks=pytest.mark.thorough)], ids=len)
@pytest.mark.parametrize("name", [*OPERATIONS, "reshape_and_cache of int8", *(f"{name}_out" for name in OUT)])
def test_registration(name: str, checks: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    operation, _, is_int8 = name.removesuffix("_out").partition(" of ")
    arguments = small_call(operation, device)
    if name.endswith("_out"):
        arguments = _with_out(operation, arguments)
    if is_int8:
        arguments = _with_int8(arguments)
        arguments |= {f"{each}_cache": arguments.pop(each) for each in ("k_scale", "v_scale")}
    for key in [key for key, value in arguments.items() if is_dataclass(value)]:
        group = arguments.pop(key)
        arguments |= {field.name: getattr(group, field.name) for field in fields(group) if field.init}
    if name == "route_and_align":
        arguments = {"expert_map": None, "num_local_experts": None} | arguments
    getattr(paged, operation)  # its family's ops are defined where it is
    torch.library.opcheck(getattr(torch.ops.paged, name.partition(" of ")[0]).default, (), arguments, test_utils=checks)


@pytest.mark.parametrize("kernels", ["torch", pytest.param("triton", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", OPERATIONS)
def test_compiled_call_is_one_op_and_equals_the_plain_one(
    name: str, kernels: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGED_BACKEND", kernels)
    graphs: list[torch.fx.GraphModule] = []

    def backend_fn(graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(getattr(paged, name), fullgraph=True, backend=backend_fn)
    # The op asks for the log-sum-exp, and without it the PyTorch implementation takes another, fused product.
    tolerance = 1e-5 if (name, kernels) == ("paged_attention", "torch") else 0.0
    for variant in _variants(name, device):
        found, expected = _called(compiled, variant), _called(getattr(paged, name), variant)
        for result, plain in zip(found, expected, strict=True):
            assert_within(result, plain, tolerance * (1 + plain.double().abs()))
        targets = [str(node.target) for node in graphs[-1].graph.nodes if node.op == "call_function"]
        assert sum(target.startswith("paged.") for target in targets) == 1, targets
