"""Packed models give the logits of their unpacked weights, in every way that models run, and those of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paged import LlmExecutor, QuantizedWeight
from paged.kernels.quantization.gemm import row_counts
from paged.models.loading import weights as loading
from paged.models.paged_lm import PagedCausalLM
from paged.models.quantization import packed_weights as packing
from paged.models.warmup import run_packed
from paged.serving.command_line.checkpoint_summary import summarize
from paged.step.batch import UnifiedBatchItem
from tests.models.edits import assert_refused, edit_config
from tests.models.families import assert_same_logits, forward, logits_of
from tests.models.lora.folders import Adapter
from tests.models.quantization.checkpoints import PROMPT, WEIGHTS, Folders, assert_as_unpacked, load, packed_weights
from tests.models.quantization.compressor import reads_order
from tests.models.quantization.packers import FORMATS
from tests.tolerance import assert_within

some_formats = pytest.mark.parametrize("folders", ["fp8 blocks", "gptq zeros, order"], indirect=True)
one_format = pytest.mark.parametrize("folders", ["pack-quantized"], indirect=True)


@pytest.mark.parametrize("folders", FORMATS, indirect=True)
def test_logits_of_the_unpacked_weights(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed at once, and 128 rows of the widest projections at a time; the head where the configuration says so."""
    config = FORMATS[folders.name].config
    is_packed = config.get("lm_head", False) or config.get("ignore") == []
    assert ("lm_head" in packed_weights(assert_as_unpacked(folders))) == is_packed
    monkeypatch.setattr(packing, "_MOST_CODES", 128 * 384)
    assert_as_unpacked(folders)


@pytest.mark.by_cpu
@pytest.mark.parametrize("folders", FORMATS, indirect=True)
def test_logits_in_the_order_of_a_cpu(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model counts its weights as before, and takes no more memory than with plain weights."""
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    num_parameters = load(folders.packed).num_parameters()
    model = assert_as_unpacked(folders, is_repacked=True)
    assert model.num_parameters() == num_parameters
    assert model.parameter_bytes() <= load(folders.plain).parameter_bytes()


@pytest.mark.parametrize("folders", ["nvfp4-pack-quantized"], indirect=True)
def test_without_memory_for_plain_weights_they_stay_packed(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    monkeypatch.setattr(loading, "_RESERVE", 1 << 60)
    model = load(folders.packed)
    num_packed, num_bytes = len(packed_weights(model)), model.parameter_bytes()
    model.network.pack()
    assert len(packed_weights(model)) == num_packed > 0
    assert model.prefill("a", PROMPT).isfinite().all()
    assert model.parameter_bytes() == num_bytes


@pytest.mark.parametrize(
    "folders", ["fp8 blocks", "awq", "int-quantized static", "nvfp4-pack-quantized"], indirect=True
)
@pytest.mark.thorough
def test_kernels_in_16_bits(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through Triton: float16 logits within what its rounding, and that of activations, moves those of float32."""
    monkeypatch.setenv("PAGED_BACKEND", "triton")
    got = load(folders.packed, dtype="float16").prefill("a", PROMPT)
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    want = load(folders.packed).prefill("a", PROMPT)
    plain, rounded = (load(folders.plain, dtype=dtype).prefill("a", PROMPT) for dtype in ("float32", "float16"))
    budget = 3 * (rounded - plain).norm()
    if FORMATS[folders.name].rounds:
        budget += 1.5 * (want - plain).norm()
    assert_within((got - want).norm(), 0.0, budget)


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
    assert num_bytes == summary["weight_bytes"] == needs.weight_bytes
    assert summary["stored_bytes"] == (folders.packed / WEIGHTS).stat().st_size
    plain = summarize(folders.plain)
    assert summary["parameters"] == plain["parameters"] == executor.info().num_parameters
    projections = sum(weights.values.shape[0] * weights.in_features for weights in packed_weights(model).values())
    least = plain["weight_bytes"] - 4 * projections + sum(each.values.nbytes for each in packed_weights(model).values())
    # Scales of 16 bits for 16 columns, and a word for each column of each projection, are the most there is.
    assert least < num_bytes < least + projections * 1.2 / 8 + 4 * 7 * 384


@some_formats
def test_graphs_and_batches(folders: Folders) -> None:
    """Padded steps over static inputs, and sequences side by side, give each its own logits."""
    model, eager = load(folders.packed, cuda_graphs=(4,)), load(folders.packed)
    model.prepare()
    eager.pack()
    for one in (model, eager):
        forward(one, {"a": PROMPT, "b": PROMPT[:5]})
    got = model.decode_batch_with_full_logits([("a", 3, 9), ("b", 4, 5)])
    assert model.num_graph_replays == 1
    assert_same_logits(got[0], eager.decode("a", 3, 9))
    assert_same_logits(got[1], eager.decode("b", 4, 5))


@some_formats
@pytest.mark.thorough
def test_forward_is_one_graph(folders: Folders) -> None:
    torch._dynamo.reset()
    model, eager = load(folders.packed), load(folders.packed)
    model.network.forward = torch.compile(model.network.forward, fullgraph=True, backend="aot_eager")
    assert_same_logits(model.prefill("a", PROMPT), eager.prefill("a", PROMPT))
    torch._dynamo.reset()


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
    assert_same_logits(got, want)


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


@pytest.mark.parametrize("folders", ["modelopt NVFP4"], indirect=True)
def test_a_configuration_beside_config_json(folders: Folders) -> None:
    edit_config(folders.packed, "quantization_config")
    quantization = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}
    quantization |= {"exclude_modules": ["lm_head"]}
    (folders.packed / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    assert_as_unpacked(folders)
    assert summarize(folders.packed)["supported"]


@pytest.mark.parametrize("folders", ["gptq"], indirect=True)
def test_biases_of_nothing(folders: Folders) -> None:
    folders.edit("self_attn.q_proj.bias", torch.zeros(256))
    assert_as_unpacked(folders)
    folders.edit("self_attn.q_proj.bias", torch.ones(256))
    assert_refused(folders.packed, r"q_proj.bias: unexpected tensor")


@pytest.mark.parametrize("folders", ["gptq zeros, order"], indirect=True)
def test_every_kernel_is_launched_beforehand(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of as few rows as take each tile, of each run."""
    model = load(folders.packed)
    counts: dict[int, list[int]] = {}

    def recorded(x: torch.Tensor, weight: QuantizedWeight, **_: Any) -> torch.Tensor:
        counts.setdefault(weight.values.data_ptr(), []).append(len(x))
        return x

    monkeypatch.setattr(packing, "quantized_linear", recorded)
    run_packed(model.network, 3000)
    for weights in packed_weights(model).values():
        for _, weight in weights.runs:
            assert set(counts[weight.values.data_ptr()]) >= set(row_counts(3000, weight, torch.float32))


# It rounds int8 activations by a token's largest / 127.5; kernels that serve, as ours, by the largest / 127.
COMPRESSED = [name for name, each in FORMATS.items() if each.make is None and name != "int-quantized rows"]


@pytest.mark.parametrize("folders", COMPRESSED, indirect=True)
def test_logits_as_transformers_reads(folders: Folders) -> None:
    """With activations rounded as the configuration says, but for those in 4 bits, which stay as they are."""
    from transformers import AutoModelForCausalLM

    if "order" in folders.name and not reads_order():
        pytest.skip("this compressed-tensors reads no columns in another order than their groups")
    with torch.compiler.set_stance("force_eager"):  # as in `compress`
        # compressed-tensors 0.20 makes room for zero points that are not packed.
        options = {"dtype": torch.float32, "ignore_mismatched_sizes": "zeros" in folders.name}
        model = AutoModelForCausalLM.from_pretrained(folders.packed, **options)
        for name, tensor in load_file(folders.packed / WEIGHTS).items():
            if name.endswith(".weight_zero_point"):
                module = model.get_submodule(name.removesuffix(".weight_zero_point"))
                module.weight_zero_point = torch.nn.Parameter(tensor, requires_grad=False)
        model.hf_quantizer.compressor.decompress_model(model)
    is_nvfp4 = folders.name == "nvfp4-pack-quantized"
    for module in model.modules() if is_nvfp4 else ():
        module.quantization_enabled = False
    want = logits_of(torch.nn.Module.float(model), PROMPT)[-1]
    got = load(folders.packed).prefill("a", PROMPT)
    # compressed-tensors unpacks NVFP4 to bfloat16.
    assert_within(got, want, (2e-2 if is_nvfp4 else 1e-4) * want.abs().max())


@pytest.mark.parametrize("folders", ["fp8 blocks"], indirect=True)
def test_weights_as_transformers_reads(folders: Folders) -> None:
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    config = FineGrainedFP8Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folders.packed, dtype=torch.float32, quantization_config=config)
    state = model.state_dict()
    plain = load_file(folders.plain / WEIGHTS)
    assert state.keys() == plain.keys()
    for name, weight in plain.items():
        assert_within(state[name], weight, 1e-6 * weight.abs())
