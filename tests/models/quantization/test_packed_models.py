"""Packed models in every way that models run: graphs, compiled, adapted, mixed, and through Triton's kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paged import LlmExecutor
from paged.batch import UnifiedBatchItem
from paged.errors import CheckpointError
from paged.executors.command_line.checkpoint_summary import summarize
from paged.models.paged_lm import PagedCausalLM
from tests.models.lora.folders import Adapter
from tests.models.quantization.checkpoints import PROMPT, WEIGHTS, Folders, assert_as_unpacked, load, packed_weights
from tests.models.quantization.packers import FORMATS

some_formats = pytest.mark.parametrize("folders", ["fp8 blocks", "gptq zeros, order"], indirect=True)
one_format = pytest.mark.parametrize("folders", ["pack-quantized"], indirect=True)


@pytest.mark.parametrize(
    "folders", ["awq", "fp8 blocks", "int-quantized static", "nvfp4-pack-quantized"], indirect=True
)
def test_kernels_in_16_bits(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through Triton: float16 logits within what its rounding, and that of activations, moves those of float32."""
    monkeypatch.setenv("PAGED_BACKEND", "triton")
    got = load(folders.packed, dtype="float16").prefill("a", PROMPT)
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    want = load(folders.packed).prefill("a", PROMPT)
    plain, rounded = (load(folders.plain, dtype=dtype).prefill("a", PROMPT) for dtype in ("float32", "float16"))
    budget = 3 * (rounded - plain).abs().max()
    if FORMATS[folders.name].rounds:
        budget += 0.5 * (want - plain).abs().max()
    assert (got - want).abs().max() < budget


@pytest.mark.usefixtures("_fast")
@pytest.mark.parametrize("folders", FORMATS, indirect=True)
def test_bytes_are_as_promised(folders: Folders) -> None:
    """Of the device, before and after the model is loaded, and of the files; a packed model has no plain copy."""
    summary = summarize(folders.packed)
    executor = LlmExecutor.from_pretrained(folders.packed, num_blocks=4)
    model = executor.model
    assert isinstance(model, PagedCausalLM)
    held = {each.untyped_storage().data_ptr(): each for each in model.network.parameters()}
    num_bytes = sum(each.untyped_storage().nbytes() for each in held.values())
    needs = executor.capabilities().memory_requirements
    assert needs is not None
    assert num_bytes == summary.weight_bytes == needs.weight_bytes
    assert summary.stored_bytes == (folders.packed / WEIGHTS).stat().st_size
    plain = summarize(folders.plain)
    assert summary.parameters == plain.parameters == executor.info().num_parameters
    projections = sum(weights.values.shape[0] * weights.in_features for weights in packed_weights(model).values())
    least = plain.weight_bytes - 4 * projections + sum(each.values.nbytes for each in packed_weights(model).values())
    # Scales of 16 bits for 16 columns, and a word for each column of each projection, are the most there is.
    assert least < num_bytes < least + projections * 1.2 / 8 + 4 * 7 * 384


@pytest.mark.usefixtures("_fast")
@pytest.mark.parametrize(
    ("folders", "num_runs"),
    [
        ("gptq", (1, 1)),
        ("fp8 blocks", (1, 1)),
        ("fp8 static", (1, 1)),
        ("gptq zeros, order", (3, 2)),
        ("modelopt NVFP4", (2, 1)),
    ],
    indirect=["folders"],
)
def test_projections_that_agree_are_one_product(folders: Folders, num_runs: tuple[int, int]) -> None:
    packed = packed_weights(load(folders.packed))
    assert {path: len(weights.runs) for path, weights in packed.items()} == {
        "layers.0.self_attn.qkv_proj": num_runs[0],
        "layers.0.self_attn.o_proj": 1,
        "layers.0.mlp.gate_up_proj": num_runs[1],
        "layers.0.mlp.down_proj": 1,
    }


@pytest.mark.usefixtures("_fast")
@some_formats
def test_graphs_and_batches(folders: Folders) -> None:
    """Padded steps over static inputs, and sequences side by side, give each its own logits."""
    model, eager = load(folders.packed, cuda_graphs=(4,)), load(folders.packed)
    model.prepare()
    for one in (model, eager):
        one.unified_forward([UnifiedBatchItem("a", PROMPT), UnifiedBatchItem("b", PROMPT[:5])])
    got = model.decode_batch_with_full_logits([("a", 3, 9), ("b", 4, 5)])
    assert model.num_graph_replays == 1
    torch.testing.assert_close(got[0], eager.decode("a", 3, 9), rtol=0, atol=1e-3)
    torch.testing.assert_close(got[1], eager.decode("b", 4, 5), rtol=0, atol=1e-3)


@pytest.mark.usefixtures("_fast")
@some_formats
def test_forward_is_one_graph(folders: Folders) -> None:
    torch._dynamo.reset()
    model, eager = load(folders.packed), load(folders.packed)
    model.network.forward = torch.compile(model.network.forward, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(model.prefill("a", PROMPT), eager.prefill("a", PROMPT), rtol=0, atol=1e-3)
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fast")
@one_format
def test_an_adapter_adds_to_the_product(folders: Folders, tmp_path: Path) -> None:
    adapter = Adapter(["q_proj", "v_proj", "down_proj"])
    path = adapter.save(tmp_path / "adapter", folders.plain)
    want = load(adapter.merge(path, folders.plain, tmp_path / "merged")).prefill("a", PROMPT)
    executor = LlmExecutor.from_pretrained(folders.packed, num_blocks=16)
    executor.load_lora("one", path)
    (got,) = executor.model.unified_forward([UnifiedBatchItem("a", PROMPT)])
    assert (got - want).abs().max() > 0.1
    handle = executor.kv_manager.allocate("b", namespace="one")
    (got,) = executor.model.unified_forward([UnifiedBatchItem("b", PROMPT, kv_cache=handle)])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-3)


@pytest.mark.usefixtures("_fast")
@pytest.mark.parametrize(
    ("folders", "change"),
    [
        ("fp8 blocks", {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp"]}),
        ("fp8 static", {"ignored_layers": ["gate_proj", "up_proj", "down_proj"]}),
        ("pack-quantized", {"ignore": ["re:.*\\.mlp\\..*_proj$", "lm_head"]}),
        ("gptq", {"dynamic": {"-:.*\\.mlp\\..*": {}}}),
        ("modelopt NVFP4", {"ignore": ["model.layers.0.mlp*", "lm_head"]}),
        ("awq", {"modules_to_not_convert": ["mlp"]}),
        ("awq", {"modules_to_not_convert": [r"model.layers.\d+.mlp.(gate|up|down)_proj"]}),
    ],
    indirect=["folders"],
)
def test_modules_that_stay_plain(folders: Folders, change: dict[str, Any]) -> None:
    plain = load_file(folders.plain / WEIGHTS)
    tensors = {name: each for name, each in load_file(folders.packed / WEIGHTS).items() if ".mlp." not in name}
    save_file(tensors | {name: each for name, each in plain.items() if ".mlp." in name}, folders.packed / WEIGHTS)
    folders.configure(**change)
    assert len(packed_weights(load(folders.packed))) == 2
    assert_as_unpacked(folders)


@pytest.mark.usefixtures("_fast")
@one_format
def test_targets_by_name_pattern_and_class(folders: Folders) -> None:
    """Every group says in its own way what it packs; a name counts before a pattern, and that before a class."""
    group = FORMATS[folders.name].config["config_groups"]["group_0"]
    other = {**group, "weights": {**group["weights"], "group_size": 64}}
    name = "model.layers.0.mlp.down_proj"
    groups = {"a": other | {"targets": ["Linear"]}, "b": group | {"targets": [r"re:.*\.self_attn\..*", name]}}
    groups["c"] = group | {"targets": ["re:.*(gate|up)_proj"]}
    groups["d"] = other | {"targets": [r"re:model\.layers\.0\.mlp\.down.*"]}
    folders.configure(config_groups=groups)
    assert_as_unpacked(folders)


@pytest.mark.usefixtures("_fast")
@pytest.mark.parametrize(
    "folders",
    ["gptq", "gptq_v2 8 bits", "mxfp4-pack-quantized", "pack-quantized", "pack-quantized 8 bits"],
    indirect=True,
)
def test_the_head_is_packed_where_the_configuration_says_so(folders: Folders) -> None:
    config = FORMATS[folders.name].config
    is_packed = config.get("lm_head", False) or config.get("ignore") == []
    assert ("lm_head" in packed_weights(load(folders.packed))) == is_packed


@pytest.mark.usefixtures("_fast")
@pytest.mark.parametrize("folders", ["modelopt NVFP4"], indirect=True)
def test_a_configuration_beside_config_json(folders: Folders) -> None:
    file = folders.packed / "config.json"
    config = json.loads(file.read_text())
    del config["quantization_config"]
    file.write_text(json.dumps(config))
    quantization = {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    }
    (folders.packed / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    assert_as_unpacked(folders)
    assert summarize(folders.packed).supported


@pytest.mark.usefixtures("_fast")
@pytest.mark.parametrize("folders", ["gptq"], indirect=True)
def test_biases_of_nothing(folders: Folders) -> None:
    folders.edit(self_attn__q_proj__bias=torch.zeros(256))
    assert_as_unpacked(folders)
    folders.edit(self_attn__q_proj__bias=torch.ones(256))
    with pytest.raises(CheckpointError, match=r"q_proj.bias: unexpected tensor"):
        load(folders.packed)
