"""Packed checkpoints are what transformers reads in them, through compressed-tensors where that wrote them."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from paged.errors import UnsupportedError
from paged.models.loading.hf_config import HfConfig
from paged.models.quantization.read import read_quantization
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


def test_presets() -> None:
    """Those of compressed-tensors are read, but for some that are refused."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
    from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

    refused = set()
    for name in PRESET_SCHEMES.keys() - {"UNQUANTIZED"}:
        scheme = preset_name_to_scheme(name, ["Linear"])
        form = infer_module_format(torch.nn.Linear, scheme).value
        config = QuantizationConfig(config_groups={"group_0": scheme}, format=form).model_dump(mode="json")
        try:
            assert read_quantization(HfConfig({"quantization_config": config}, "config.json")) is not None
        except UnsupportedError:
            refused.add(name)
    assert refused == {"W4A8", "W4AFP8", "MXFP8", "MXFP8A16"}
