"""vLLM's functions with any value for any one argument."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from paged.interop import fused_experts, reshape_and_cache_flash
from tests.fuzz.fuzzing import fuzz
from tests.fuzz.interop.odd_arguments import ODD_ARGUMENTS, call_with_odd


def _experts() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(3, 8),
        "w1": torch.randn(4, 12, 8) / 4,
        "w2": torch.randn(4, 8, 6) / 4,
        "topk_weights": torch.rand(3, 2),
        "topk_ids": torch.tensor([[0, 1], [3, 2], [1, 1]]),
        "activation": "silu",
        "apply_router_weight_on_input": False,
        "global_num_experts": 5,
        "expert_map": torch.tensor([3, 2, -1, 1, 0], dtype=torch.int32),
        "quant_config": None,
        "inplace": False,
    }


def _cache() -> dict[str, Any]:
    return {
        "key": torch.randn(4, 2, 8),
        "value": torch.randn(4, 2, 8),
        "key_cache": torch.zeros(3, 4, 2, 8),
        "value_cache": torch.zeros(3, 4, 2, 8),
        "slot_mapping": torch.tensor([0, 5, -1]),
        "kv_cache_dtype": "auto",
        "k_scale": torch.tensor(1.0),
        "v_scale": None,
    }


FUNCTIONS = {"experts": (fused_experts, _experts), "cache": (reshape_and_cache_flash, _cache)}


@fuzz(st.tuples(st.sampled_from(sorted(FUNCTIONS)), st.integers(0, 99), ODD_ARGUMENTS), examples=300)
def test_vllm_functions_with_odd_arguments(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    kind, index, expression = case
    function, make = FUNCTIONS[kind]
    given = make()
    function(**make())
    name = sorted(given)[index % len(given)]
    call_with_odd(function, given, name, expression, {*given})
