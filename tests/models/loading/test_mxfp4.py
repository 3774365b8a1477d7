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
from paged.models.loading.mxfp4 import dequantize_mxfp4
from paged.models.registry import load_model
from tests.models.families import FAMILIES, assert_same_logits, save_checkpoint, tokens

Tensors = dict[str, torch.Tensor]
EXPERTS = "model.layers.0.mlp.experts."
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def randint(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8)


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
            parameter.copy_(dequantize_mxfp4(blocks, scales).mT)
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


def test_every_code_and_scale() -> None:
    """16 bytes hold the codes 0 to 15 and 15 to 0; low bits come first."""
    codes = [*range(16), *range(15, -1, -1)]
    block = torch.tensor([low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)])
    values = [sign * value for sign in (1, -1) for value in E2M1]
    blocks = block.to(torch.uint8).expand(256, 1, 16)
    numbers = dequantize_mxfp4(blocks, torch.arange(256, dtype=torch.uint8)[:, None])
    for scale in (0, 1, 126, 127, 128, 250):
        assert numbers[scale].double().tolist() == [values[code] * 2.0 ** (scale - 127) for code in codes]
    assert numbers[255].isnan().all()


def test_transformers_unpacks_the_same() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks, scales = randint(3, 8, 2, 16), randint(3, 8, 2, low=100, high=140)
    expected = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).mT.cpu()
    numbers = dequantize_mxfp4(blocks, scales)
    assert torch.equal(numbers.bfloat16(), expected)
    assert torch.equal(numbers.bfloat16().float(), numbers), "bfloat16 holds them"


@pytest.mark.usefixtures("_fast")
def test_logits_of_packed_experts(packed: tuple[Path, Any]) -> None:
    folder, theirs = packed
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens(40)])).logits[0]
    model = load_model(folder)
    assert_same_logits(model.forward_verify("a", tokens(40)), expected)


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
    edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    llama = Path(shutil.copytree(llama_folder, tmp_path / "llama"))
    edit_config(llama, quantization_config={"quant_method": "mxfp4"})
    for refused in (folder, llama):
        with pytest.raises(UnsupportedError, match="quantised weights"):
            load_model(refused)
