"""Experts packed in MXFP4: the numbers of the format, and the logits of a model that has them unpacked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paged.errors import CheckpointError, UnsupportedError
from paged.executors.command_line.checkpoint_summary import summarize
from paged.kernels.moe import reference
from paged.models.loading.mxfp4 import Mxfp4Experts
from paged.models.registry import load_model
from tests.models.families import FAMILIES, assert_same_logits, save_checkpoint, tokens

Tensors = dict[str, torch.Tensor]
EXPERTS = "model.layers.0.mlp.experts."
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def randint(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8)


def unpacked(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float64 [..., columns], by the format's formula: low bits first, 2^(scale - 127) for 32 of a row."""
    codes = torch.stack([blocks % 16, blocks // 16], -1).flatten(-2).long()
    values = torch.tensor([sign * value for sign in (1, -1) for value in E2M1], dtype=torch.float64)[codes]
    return (values * 2.0 ** (scales.double() - 127).unsqueeze(-1)).flatten(-2)


def pack(folder: Path, theirs: Any) -> None:
    """Give the experts of a checkpoint, and of transformers' model of it, random numbers that the format holds."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, parameter in theirs.named_parameters():
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        num_experts, columns, rows = parameter.shape
        blocks = randint(num_experts, rows, columns // 32, 16)
        scales = randint(num_experts, rows, columns // 32, low=120, high=125)
        with torch.no_grad():
            parameter.copy_(unpacked(blocks, scales).mT)
        del tensors[name]
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, file)
    edit_config(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})


def edit_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.fixture
def packed(tmp_path: Path) -> tuple[Path, Any]:
    """A checkpoint, and transformers' model of the unpacked weights."""
    theirs = save_checkpoint(FAMILIES["gpt_oss"], tmp_path)
    pack(tmp_path, theirs)
    return tmp_path, theirs


@pytest.mark.parametrize("columns", [32, 96, 160])
def test_experts_hold_what_the_blocks_say(columns: int) -> None:
    """Every code and scale but NaN, in rows that are no whole unit of words."""
    blocks, scales = randint(3, 85, columns // 32, 16), torch.arange(255, dtype=torch.uint8).view(3, 85, 1)
    scales = scales.repeat(1, 1, columns // 32)
    experts = Mxfp4Experts(3, 85, columns)
    slots = experts.weight_slots("w")
    slots["w_scales"].copy_(scales)
    slots["w_blocks"].copy_(blocks)
    expected = unpacked(blocks, scales)
    for expert in range(3):
        held = reference.dequantize(experts.values[expert], experts.scale[expert], num_columns=columns)
        assert torch.equal(held, expected[expert])


def test_transformers_unpacks_the_same() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks, scales = randint(3, 8, 2, 16), randint(3, 8, 2, low=100, high=140)
    expected = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).mT.cpu()
    assert torch.equal(unpacked(blocks, scales), expected.double())


@pytest.mark.usefixtures("_fast")
def test_logits_of_packed_experts(packed: tuple[Path, Any]) -> None:
    folder, theirs = packed
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens(40)])).logits[0]
    model = load_model(folder)
    assert_same_logits(model.forward_verify("a", tokens(40)), expected)


def test_experts_stay_packed_on_the_device(packed: tuple[Path, Any]) -> None:
    """Half a byte a weight and a byte for 32, of rows of whole words; the rest as in the checkpoint's type."""
    folder, theirs = packed
    model = load_model(folder, dtype=torch.bfloat16)
    named = dict(model.network.named_parameters())
    experts = {name: parameter for name, parameter in named.items() if name.endswith((".values", ".exponents"))}
    layers, (count, hidden, inner) = theirs.config.num_hidden_layers, (4, 64, 96)
    rows = [(2 * inner, hidden), (hidden, inner)]
    expected = sum(height * (128 // 2 + -(-width // 32)) for height, width in rows)
    assert sum(parameter.nbytes for parameter in experts.values()) == layers * count * expected
    assert all(named[name].dtype == torch.bfloat16 for name in named.keys() - experts.keys())
    assert model.num_parameters() == theirs.num_parameters()


def test_bytes_of_gpt_oss_20b(tmp_path: Path) -> None:
    """13.8 GB where bfloat16 would take 41.8, of which 10.4 are experts; the sizes of the published config.json."""
    config = {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "max_position_embeddings": 131072,
        "hidden_act": "silu",
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "sliding_window": 128,
        "quantization_config": {"quant_method": "mxfp4"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    summary = summarize(tmp_path)
    assert summary.supported, summary.reason
    assert summary.parameters == 20_914_757_184
    assert summary.weight_bytes is not None
    assert 13.5e9 < summary.weight_bytes < 14.1e9


@pytest.mark.usefixtures("_fast")
def test_blocks_and_scales_in_files_of_their_own(packed: tuple[Path, Any]) -> None:
    folder, _ = packed
    expected = load_model(folder).prefill("a", tokens(9))
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    homes = {name: f"{'a' if name.endswith('_scales') else 'b'}.safetensors" for name in tensors}
    for home in set(homes.values()):
        save_file({name: tensor for name, tensor in tensors.items() if homes[name] == home}, folder / home)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
    assert torch.equal(load_model(folder).prefill("a", tokens(9)), expected)


def test_packed_experts_are_bfloat16_where_the_configuration_names_no_type(packed: tuple[Path, Any]) -> None:
    folder, _ = packed
    assert load_model(folder).dtype == torch.float32
    edit_config(folder, dtype=None)
    assert load_model(folder).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{EXPERTS}down_proj_scales"), "down_proj_scales: missing"),
        (lambda t: t.pop(f"{EXPERTS}gate_up_proj_blocks"), "gate_up_proj_blocks: missing"),
        (
            lambda t: t.update({f"{EXPERTS}down_proj_blocks": t[f"{EXPERTS}down_proj_blocks"][:, :, :2].clone()}),
            r"down_proj_blocks: shape \[4, 64, 2, 16\] in .*, expected \[4, 64, 3, 16\]",
        ),
        (
            lambda t: t.update({f"{EXPERTS}down_proj_scales": t[f"{EXPERTS}down_proj_scales"].float()}),
            "down_proj_scales: dtype F32 in .*, expected U8",
        ),
        (
            lambda t: t.update({f"{EXPERTS}down_proj_bias": t[f"{EXPERTS}down_proj_bias"].byte()}),
            "down_proj_bias: dtype U8 in .*, expected F64",
        ),
        (lambda t: t.update({f"{EXPERTS}down_proj": torch.ones(4, 96, 64)}), "down_proj: unexpected tensor"),
    ],
)
def test_wrong_tensors(packed: tuple[Path, Any], change: Callable[[Tensors], object], message: str) -> None:
    folder, _ = packed
    load_model(folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_model(folder)


def test_other_ways_to_pack_are_refused(packed: tuple[Path, Any], llama_folder: Path, tmp_path: Path) -> None:
    folder, _ = packed
    load_model(folder)
    edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32})
    llama = Path(shutil.copytree(llama_folder, tmp_path / "llama"))
    edit_config(llama, quantization_config={"quant_method": "mxfp4"})
    for refused, message in ((folder, "experts: quantised in one tensor"), (llama, "quant_method = 'mxfp4'")):
        with pytest.raises(UnsupportedError, match=message):
            load_model(refused)
