"""What packed checkpoints can have wrong, and what of their formats is not known: errors that name it."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paged.errors import CheckpointError, UnsupportedError
from paged.models import network_loader
from paged.models.loading.hf_config import HfConfig
from paged.models.quantization.read import read_quantization
from paged.serving.command_line.checkpoint_summary import summarize
from tests.models.edits import assert_refused
from tests.models.quantization.checkpoints import Folders, load
from tests.models.quantization.packers import FORMATS, compressed


@pytest.mark.parametrize(
    ("folders", "key", "change", "message"),
    [
        ("gptq", "scales", lambda t: t[:-1], r"down_proj.scales: shape \[11, 256\] in .*, expected \[12, 256\]"),
        ("fp8 blocks", "weight_scale_inv", lambda t: t.T, r"shape \[3, 2\] in .*, expected \[2, 3\]"),
        ("fp8 static", "weight_scale", lambda t: t.repeat(2), r"shape \[2\] in .*, expected \[\]"),
        ("fp8 static", "input_scale", lambda t: None, "input_scale: missing in"),
        (
            "pack-quantized",
            "weight_shape",
            lambda t: t + 1,
            r"projection: weight_shape: \[257, 385\], expected 384 columns",
        ),
        (
            "pack-quantized zeros, order",
            "weight_g_idx",
            lambda t: t * 0,
            "projection: g_idx: expected each of 12 groups",
        ),
        ("gptq", "g_idx", lambda t: t.flip(0), "projection: g_idx: columns in their own order"),
        ("gptq", "qzeros", lambda t: t + 1, "projection: qzeros: not all 2004318071, which .* sym = true"),
        ("mxfp4-pack-quantized", "weight_scale", lambda t: t | 255, "projection: scales: 255, which is NaN"),
        ("modelopt NVFP4", "weight", lambda t: t[:, 1:], r"weight: shape \[256, 191\]"),
    ],
    indirect=["folders"],
)
def test_wrong_tensors(
    folders: Folders, key: str, change: Callable[[torch.Tensor], torch.Tensor | None], message: str
) -> None:
    load(folders.packed)
    folders.edit(f"mlp.down_proj.{key}", change(folders.tensor(f"mlp.down_proj.{key}")))
    assert "model.layers.0.mlp.down_proj." in assert_refused(folders.packed, message)


@pytest.mark.parametrize(
    ("folders", "changes", "error", "message"),
    [
        ("gptq", {"group_size": 160}, CheckpointError, "q_proj: 256 columns, expected a multiple of the group size"),
        ("gptq", {"group_size": 48}, UnsupportedError, "group_size = 48 is not supported, known are multiples of 32"),
        ("gptq", {"dynamic": {"-:.*k_proj": {}}}, UnsupportedError, "q_proj, .*k_proj: quantised in two ways"),
        ("gptq", {"dynamic": {"-:(": {}}}, CheckpointError, r"dynamic has '\(', which is not a pattern"),
    ],
    indirect=["folders"],
)
def test_wrong_for_the_model(
    folders: Folders, changes: dict[str, Any], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen before a tensor is read."""
    load(folders.packed)
    folders.configure(**changes)
    monkeypatch.setattr(network_loader, "load_weights", None)
    assert_refused(folders.packed, message, error)
    summary = summarize(folders.packed)
    assert not summary["supported"]
    assert re.search(message, str(summary["reason"]))


DOWN = "model.layers.1.mlp.down_proj"
_WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
_FLOAT4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 32}
_FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method = 'bitsandbytes'"),
        (FORMATS["fp8 blocks"].config | {"weight_block_size": [64, 64]}, r"weight_block_size = \[64, 64\]"),
        (FORMATS["fp8 blocks"].config | {"activation_scheme": "static"}, "activation_scheme = 'static'"),
        (FORMATS["fp8 blocks"].config | {"fmt": "e5m2"}, "fmt = 'e5m2'"),
        (FORMATS["gptq"].config | {"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
        (FORMATS["gptq"].config | {"dynamic": {"+:.*": {"bits": 8}}}, "dynamic has '.:..'"),
        (FORMATS["awq"].config | {"version": "gemv"}, "version = 'gemv'"),
        (FORMATS["awq"].config | {"backend": "llm-awq"}, "backend = 'llm-awq'"),
        (FORMATS["gptq"].config | {"method": "awq", "format": "gemm"}, "format = 'gemm'"),
        (FORMATS["nvfp4-pack-quantized"].config | {"config_groups": {"one": {"weights": _FLOAT4}}}, "group_size = 32"),
        (FORMATS["modelopt FP8"].config | {"quant_algo": "W4A8_AWQ"}, "quant_algo = 'W4A8_AWQ'"),
        (FORMATS["pack-quantized"].config | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config = "),
        (FORMATS["pack-quantized"].config | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config = "),
        (compressed("pack-quantized", _WEIGHTS | {"num_bits": 3}), "num_bits = 3"),
        (compressed("pack-quantized", _WEIGHTS, {"num_bits": 8}), "input_activations = "),
        (compressed("pack-quantized", _WEIGHTS | {"strategy": "tensor"}), "strategy = 'tensor'"),
        (compressed("pack-quantized", _WEIGHTS | {"actorder": "random"}), "actorder = 'random'"),
        (compressed("marlin-24", _WEIGHTS), "format = 'marlin-24' with 4 bits of type int"),
        (compressed("float-quantized", _FLOAT8, _FLOAT8 | {"symmetric": False}), "symmetric = False"),
        (compressed("float-quantized", _FLOAT8 | {"strategy": "block"}), "block_structure = None"),
    ],
)
def test_what_is_not_known_is_named(config: dict[str, Any], key: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"config.json: quantization_config.*{key}"):
        read_quantization(HfConfig({"quantization_config": config}, "config.json"))


def test_weights_of_a_packed_cache_may_be_plain() -> None:
    section = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}
    assert read_quantization(HfConfig({"quantization_config": section}, "config.json")) is None


def test_what_is_missing_is_named() -> None:
    for config, message in (
        ({"quant_method": "gptq"}, "bits is missing"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size = 0, expected -1 or a positive integer"),
        (compressed("float-quantized", _FLOAT8 | {"strategy": None}), "strategy is missing"),
        (FORMATS["awq"].config | {"modules_to_not_convert": ["x" * 1001]}, "longer than 1000 characters"),
    ):
        with pytest.raises(CheckpointError, match=message):
            read_quantization(HfConfig({"quantization_config": config}, "config.json"))


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
    for packed in ("1.mlp.up_proj", "1.self_attn.q_proj", "1.mlp.gate_proj", "21.mlp.up_proj"):
        assert quantization.layout(f"model.layers.{packed}") is not None, packed
