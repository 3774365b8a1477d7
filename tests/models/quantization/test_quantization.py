"""Which modules a configuration's names and patterns mean."""

from __future__ import annotations

from typing import Any

import pytest

from paged.models.loading.hf_config import HfConfig
from paged.models.quantization.read import read_quantization
from tests.models.quantization.packers import FORMATS

DOWN, UP = "model.layers.1.mlp.down_proj", "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("pack-quantized", {"ignore": [DOWN]}),
        ("pack-quantized", {"ignore": [f"language_model.{DOWN}"]}),
        ("pack-quantized", {"ignore": [DOWN.replace("model.", "model.language_model.", 1)]}),
        ("pack-quantized", {"ignore": [r"re:.*\.down_proj", "re:vision_tower.*"]}),
        ("fp8 blocks", {"modules_to_not_convert": [DOWN, "model.layers.11"]}),
        ("fp8 blocks", {"modules_to_not_convert": [r"model.layers.\d+.mlp.down_proj"]}),
        ("awq", {"modules_to_not_convert": ["down_proj", "gate"]}),
        ("modelopt FP8", {"ignore": ["*down_proj", "model.layers.1.self"]}),
        ("gptq", {"dynamic": {r"-:.*\.1\.mlp\.down": {}}}),
    ],
)
def test_one_module_stays_plain(name: str, changes: dict[str, Any]) -> None:
    """And its neighbours, with names that begin or end like it, do not."""
    quantization = read_quantization(HfConfig({"quantization_config": FORMATS[name].config | changes}, "config.json"))
    assert quantization is not None
    assert quantization.layout(DOWN) is None
    for packed in (
        UP,
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.gate_proj",
        "model.layers.21.mlp.up_proj",
    ):
        assert quantization.layout(packed) is not None, packed
