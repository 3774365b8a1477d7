"""Kimi K3's text model inside of its multimodal one, and options that are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from paged.errors import UnsupportedError
from paged.models.parallel.share import Share
from paged.models.registry import load_model, read_model_config
from tests.kernels.quantization.published import E2M1, in_bytes
from tests.models.edits import WEIGHTS, Tensors, assert_refused, edit_config
from tests.models.families import FAMILIES, assert_same_logits, logits_of, save_checkpoint, tokens
from tests.models.kimi_k3 import KimiK3
from tests.models.quantization.packers import compressed

pytestmark = pytest.mark.usefixtures("bound_calls_are_alike")


def _packed(theirs: KimiK3) -> Tensors:
    """Return the model's tensors with its experts in MXFP4, whose numbers the model then has; names have a prefix."""
    stored: Tensors = {}
    for name, tensor in theirs.tensors.items():
        path = f"language_model.{name}"
        if ".experts." not in name:
            stored[path] = tensor
            continue
        rows, columns = tensor.shape
        codes = torch.randint(16, (rows, columns))
        exponents = torch.randint(120, 124, (rows, columns // 32), dtype=torch.uint8)
        scales = torch.exp2(exponents.double() - 127).repeat_interleave(32, 1)
        theirs.tensors[name] = (E2M1[codes] * scales).float()
        stored |= {f"{path}_packed": in_bytes(codes), f"{path}_scale": exponents}
    return stored


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.thorough)], indirect=True)
def test_text_of_the_multimodal_model_with_packed_experts(backend: str, tmp_path: Path) -> None:
    """As published: the quantisation is a part of the text's configuration. Its pictures' placeholder is embedded as
    padding."""
    theirs = save_checkpoint(FAMILIES["kimi_k3"], tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    del text["architectures"]
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    ignored = {"ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"]}
    text["quantization_config"] = compressed("mxfp4-pack-quantized", weights) | ignored
    text["quantization_config"]["config_groups"]["group_0"]["targets"] = [r"re:.*block_sparse_moe\.experts\..*"]
    wrapped = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "text_config": text}
    wrapped |= {"media_placeholder_token_id": 100, "tie_word_embeddings": False, "vision_config": {"hidden_size": 8}}
    (tmp_path / "config.json").write_text(json.dumps(wrapped))
    save_file(_packed(theirs) | {"vision_tower.weight": torch.zeros(1)}, tmp_path / WEIGHTS)
    model = load_model(tmp_path, block_size=8, num_blocks=32)
    ids = [*tokens(20), 100, 7]
    want = logits_of(theirs, [*ids[:20], 0, 7])
    assert_same_logits(model.forward_verify("a", ids), want)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"activation_situ_beta": 2.0}, "activation_situ_beta = 2.0 is not supported, known is 4.0"),
        ({"mla_use_nope": False}, "mla_use_nope = False is not supported, known are True"),
        ({"linear_attn_config": {"mixes_heads": True}}, "linear_attn_config: 'mixes_heads' is unknown, known are"),
    ],
)
def test_options_that_are_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_checkpoint(FAMILIES["kimi_k3"], tmp_path)
    edit_config(tmp_path, **changed)
    assert_refused(tmp_path, message, UnsupportedError)


def test_ranks_are_refused(tmp_path: Path) -> None:
    """Each would normalise its own part of the experts' sum."""
    save_checkpoint(FAMILIES["kimi_k3"], tmp_path)
    with pytest.raises(UnsupportedError, match="tensor_parallel_size 2: a norm of the experts' sum, supported is 1"):
        Share(0, 2).config(read_model_config(tmp_path)[1])
