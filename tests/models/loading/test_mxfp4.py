"""Experts packed in MXFP4: the numbers of the format, and the logits of a model that has them unpacked."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paged.errors import UnsupportedError
from paged.executors.llm_executor import LlmExecutor
from paged.kernels.cpu.products import this_cpu
from paged.kernels.quantization import definition
from paged.models.quantization.packed_weights import Mxfp4Experts
from paged.models.registry import load_model
from tests.backends import needs_numba
from tests.models.edits import Tensors, assert_refused, edit_config, edit_tensors
from tests.models.families import FAMILIES, assert_same_logits, logits_of, save_checkpoint, tokens

DOWN = "model.layers.0.mlp.experts.down_proj"
BLOCKS, SCALES, BIAS = f"{DOWN}_blocks", f"{DOWN}_scales", f"{DOWN}_bias"
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def randint(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8)


def unpacked(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float64 [..., columns], by the format's formula: low bits first, 2^(scale - 127) for 32 of a row."""
    codes = torch.stack([blocks % 16, blocks // 16], -1).flatten(-2).long()
    values = torch.tensor([sign * value for sign in (1, -1) for value in E2M1], dtype=torch.float64)[codes]
    return (values * 2.0 ** (scales.double() - 127).unsqueeze(-1)).flatten(-2)


@pytest.fixture
def packed(tmp_path: Path) -> tuple[Path, Any]:
    """A checkpoint whose experts are random numbers that the format holds, and transformers' model of the same."""
    theirs = save_checkpoint(FAMILIES["gpt_oss"], tmp_path)

    def pack(tensors: Tensors) -> None:
        for name, parameter in theirs.named_parameters():
            if name.endswith(("gate_up_proj", "down_proj")):
                num_experts, columns, rows = parameter.shape
                blocks = randint(num_experts, rows, columns // 32, 16)
                scales = randint(num_experts, rows, columns // 32, low=120, high=125)
                parameter.data.copy_(unpacked(blocks, scales).mT)
                del tensors[name]
                tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}

    edit_tensors(tmp_path, pack)
    edit_config(tmp_path, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return tmp_path, theirs


@pytest.mark.parametrize("columns", [32, 96, 160])
def test_experts_hold_what_the_blocks_say(columns: int) -> None:
    """Every code and scale but NaN, in rows that are no whole unit of words."""
    blocks, scales = randint(3, 85, columns // 32, 16), torch.arange(255, dtype=torch.uint8).view(3, 85, 1)
    scales = scales.repeat(1, 1, columns // 32)
    experts = Mxfp4Experts(3, 85, columns)
    destinations = experts.destinations("w")
    destinations["w_scales"].copy_(scales)
    destinations["w_blocks"].copy_(blocks)
    expected = unpacked(blocks, scales)
    for expert in range(3):
        held = definition.dequantize_codes(experts.values[expert], experts.scale[expert], num_columns=columns)
        assert torch.equal(held, expected[expert])


def test_transformers_unpacks_the_same() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks, scales = randint(3, 8, 2, 16), randint(3, 8, 2, low=100, high=140)
    expected = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).mT.cpu()
    assert torch.equal(unpacked(blocks, scales), expected.double())


def test_logits_of_packed_experts(packed: tuple[Path, Any]) -> None:
    folder, theirs = packed
    model = load_model(folder)
    assert_same_logits(model.forward_verify("a", tokens(40)), logits_of(theirs, tokens(40)))


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


@needs_numba
@pytest.mark.by_cpu
def test_experts_stay_packed_on_a_cpu(packed: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a byte a weight and two for 32, and the logits of the weights unpacked."""
    if not this_cpu().multiplies_codes:
        pytest.skip("no numba kernels for 4-bit weights")
    folder, theirs = packed
    logits: dict[str, torch.Tensor] = {}
    weight_bytes: dict[str, int] = {}
    for backend in ("torch", "numba"):
        monkeypatch.setenv("PAGED_BACKEND", backend)
        executor = LlmExecutor.from_pretrained(folder, dtype=torch.bfloat16, num_blocks=8)
        executor.warmup()
        logits[backend] = executor.model.forward_verify("a", tokens(40))
        weight_bytes[backend] = executor.model.parameter_bytes()
    count, hidden, inner = theirs.config.num_hidden_layers * 4, 64, 96
    num_weights = count * 3 * inner * hidden
    assert weight_bytes["torch"] - weight_bytes["numba"] == num_weights * 2 - num_weights * 9 // 16
    want = logits_of(theirs, tokens(40))
    # bfloat16 alone moves these logits by a tenth, as it moves the router's choice.
    errors = {backend: (logits[backend] - want).norm() / want.norm() for backend in logits}
    assert errors["numba"] <= 2 * errors["torch"] + 0.01


def test_packed_experts_are_bfloat16_where_the_configuration_names_no_type(packed: tuple[Path, Any]) -> None:
    folder, _ = packed
    assert load_model(folder).dtype == torch.float32
    edit_config(folder, dtype=None)
    assert load_model(folder).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(SCALES), "down_proj_scales: missing"),
        (lambda t: t.update({BLOCKS: t[BLOCKS][:, :, :2]}), r"shape \[4, 64, 2, 16\] in .*, expected \[4, 64, 3, 16\]"),
        (lambda t: t.update({SCALES: t[SCALES].float()}), "down_proj_scales: dtype F32 in .*, expected U8"),
        (lambda t: t.update({BIAS: t[BIAS].byte()}), "down_proj_bias: dtype U8 in .*, expected F64"),
        (lambda t: t.update({DOWN: torch.ones(4, 96, 64)}), "down_proj: unexpected tensor"),
    ],
)
def test_wrong_tensors(packed: tuple[Path, Any], change: Callable[[Tensors], object], message: str) -> None:
    folder, _ = packed
    load_model(folder)
    edit_tensors(folder, change)
    assert_refused(folder, message)


def test_other_ways_to_pack_are_refused(packed: tuple[Path, Any], folder: Path) -> None:
    experts, _ = packed
    load_model(experts)
    edit_config(experts, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32})
    edit_config(folder, quantization_config={"quant_method": "mxfp4"})
    for refused, message in ((experts, "experts: quantised in one tensor"), (folder, "quant_method = 'mxfp4'")):
        assert_refused(refused, message, UnsupportedError)
