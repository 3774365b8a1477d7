"""Packed checkpoints are what transformers reads in them, through compressed-tensors where that wrote them."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from tests.models.quantization.checkpoints import PROMPT, Folders, load
from tests.models.quantization.compressor import WEIGHTS
from tests.models.quantization.packers import FORMATS

pytestmark = pytest.mark.usefixtures("_fast")
# It rounds int8 activations by a token's largest / 127.5; kernels that serve, as ours, by the largest / 127.
COMPRESSED = [name for name, each in FORMATS.items() if each.make is None and name != "int-quantized rows"]


@pytest.mark.parametrize("folders", COMPRESSED, indirect=True)
def test_logits(folders: Folders) -> None:
    """With activations rounded as the configuration says, but for those in 4 bits, which stay as they are."""
    with torch.compiler.set_stance("force_eager"):  # as in `compress`
        model = AutoModelForCausalLM.from_pretrained(folders.packed, dtype=torch.float32)
        model.hf_quantizer.compressor.decompress_model(model)
    is_nvfp4 = folders.name == "nvfp4-pack-quantized"
    for module in model.modules() if is_nvfp4 else ():
        module.quantization_enabled = False
    with torch.no_grad():
        want = torch.nn.Module.float(model)(torch.tensor([PROMPT])).logits[0, -1]
    got = load(folders.packed).prefill("a", PROMPT)
    # compressed-tensors unpacks NVFP4 to bfloat16.
    assert (got - want).abs().max() < (2e-2 if is_nvfp4 else 1e-4) * want.abs().max()


@pytest.mark.parametrize("folders", ["fp8 blocks"], indirect=True)
def test_weights(folders: Folders) -> None:
    config = FineGrainedFP8Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folders.packed, dtype=torch.float32, quantization_config=config)
    torch.testing.assert_close(model.state_dict(), load_file(folders.plain / WEIGHTS), rtol=1e-6, atol=0)
