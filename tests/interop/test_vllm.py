"""vLLM's functions against the float64 reference, and what they refuse."""

import importlib
import sys
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import paged.interop
from paged import UnsupportedError
from paged.interop import fused_experts, reshape_and_cache_flash
from paged.interop.vllm_interface import INTERFACE
from paged.kernels.cache import definition as cache_definition
from paged.kernels.moe import definition as moe_definition
from tests.tolerance import assert_close


def test_plugin_imports_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """`vllm.general_plugins` is loaded by vLLM; what else imports this package must not need it."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr(paged, "interop", paged.interop)
    for name in [name for name in sys.modules if name.startswith("paged.interop")]:
        monkeypatch.delitem(sys.modules, name)
    importlib.import_module("paged.interop.vllm_plugin")


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "fp8_e4m3"])
def test_cache_write(kv_cache_dtype: str, backend: str, device: torch.device) -> None:
    """Rows beyond the slots are padding; scales count in 8-bit caches alone, which come as bytes."""
    key, value = torch.randn(2, 5, 2, 16, device=device).unbind(0)
    key[3:], value[3:] = torch.nan, torch.nan
    slots = torch.tensor([7, -1, 2], device=device)
    scales = torch.tensor(0.5, device=device), torch.tensor([0.5, 2.0], device=device)
    caches = torch.zeros(2, 3, 4, 2, 16, device=device)
    stored_as = torch.float32 if kv_cache_dtype == "auto" else torch.float8_e4m3fn
    k_cache, v_cache = (cache.to(stored_as) for cache in caches.unbind(0))
    used = {} if kv_cache_dtype == "auto" else {"k_scale": scales[0], "v_scale": scales[1]}
    want = cache_definition.reshape_and_cache(key[:3], value[:3], k_cache, v_cache, slots, **used)
    given = (k_cache, v_cache) if kv_cache_dtype == "auto" else (k_cache.view(torch.uint8), v_cache.view(torch.uint8))
    reshape_and_cache_flash(key, value, *given, slots, kv_cache_dtype, *scales)
    for cache, expected in zip((k_cache, v_cache), want, strict=True):
        assert_close(cache, expected)


class _Activation(Enum):
    SILU = "silu"
    SWIGLUOAI = "swigluoai"
    RELU2 = "relu2"


def _experts(device: torch.device) -> dict[str, torch.Tensor]:
    hidden_states, w1, w2 = (torch.randn(size, device=device) for size in ((5, 16), (2, 24, 16), (2, 16, 12)))
    topk_ids = torch.tensor([[0, 1], [3, 2], [1, 3], [2, 0], [3, 0]], device=device)
    expert_map = torch.tensor([1, -1, 0, -1], dtype=torch.int32, device=device)
    routed = {"topk_weights": torch.rand(5, 2, dtype=torch.float64, device=device), "topk_ids": topk_ids}
    return {"hidden_states": hidden_states, "w1": w1, "w2": w2, **routed, "expert_map": expert_map}


@pytest.mark.parametrize("inplace", [False, True])
def test_experts(inplace: bool, backend: str, device: torch.device) -> None:
    arguments = _experts(device)
    want = moe_definition.fused_moe(**arguments)
    unquantised = SimpleNamespace(quant_dtype=None, weight_quant_dtype=None, w1_bias=None, w2_bias=None)
    options = {"global_num_experts": 4, "quant_config": unquantised, "inplace": inplace}
    out = fused_experts(**arguments, activation=_Activation.SILU, **options)
    assert_close(out, want)
    assert (out is arguments["hidden_states"]) == inplace


@pytest.mark.parametrize("activation", ["swigluoai", "swigluoai_uninterleave", _Activation.SWIGLUOAI])
def test_experts_of_gpt_oss(activation: Any, backend: str, device: torch.device) -> None:
    arguments = _experts(device)
    biases = {"w1_bias": torch.randn(2, 24, device=device), "w2_bias": torch.randn(2, 16, device=device)}
    options = {"activation": "swiglu_oai", "interleaved": activation != "swigluoai_uninterleave"}
    want = moe_definition.fused_moe(**arguments, **biases, **options)
    assert_close(fused_experts(**arguments, activation=activation, quant_config=SimpleNamespace(**biases)), want)


def test_experts_without_gates(device: torch.device) -> None:
    arguments = _experts(device)
    arguments["w1"] = arguments["w1"][:, ::2].contiguous()
    want = moe_definition.fused_moe(**arguments, activation="relu2")
    assert_close(fused_experts(**arguments, activation="relu2_no_mul"), want)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("activation", {"activation": _Activation.RELU2}),
        ("apply_router_weight_on_input", {"apply_router_weight_on_input": True}),
        ("quant_dtype", {"quant_config": SimpleNamespace(quant_dtype=torch.float8_e4m3fn)}),
        ("weight_quant_dtype", {"quant_config": SimpleNamespace(weight_quant_dtype=torch.int8)}),
    ],
)
def test_other_experts_are_refused_by_name(name: str, option: dict[str, Any], device: torch.device) -> None:
    with pytest.raises(UnsupportedError, match=name):
        fused_experts(**_experts(device), **option)


def test_an_absent_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Rather than all that it would have."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr(sys, "argv", ["vllm_interface"])
    assert INTERFACE.main(None) == 1
    assert capsys.readouterr().out.startswith("vllm cannot be imported: ")
