"""Every family with every scaling of rotary positions gives transformers' logits, or refuses it by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paged.errors import UnsupportedError
from paged.models.layers.rope import RopeConfig, rope_frequencies, rotary_dim
from paged.models.registry import load_model, read_model_config
from tests.models.families import FAMILIES, VARIANTS, assert_logits_of, save_checkpoint, tokens

PROMPT = tokens(40)
# What a family's own rotation says beside its kind.
KEPT = ("rope_theta", "partial_rotary_factor", "llama_4_scaling_beta", "original_max_position_embeddings")
KEPT += ("short_mscale", "long_mscale")
FAST = ("llama4",)
# Those with two rotations, with none, and with longrope alone in transformers.
LEFT = (
    *("gemma3", "gemma4_moe", "gemma4_shared_kv", "granite_hybrid", "kimi_k3", "kimi_linear"),
    *("mamba2", "nemotron_h", "olmo3", "phi3", "rwkv7"),
)


def _scalings(num_pairs: int) -> dict[str, dict[str, Any]]:
    """Options by name; each of yarn and longrope with factors for cosines and sines above, below and at 1."""
    scaled = {"factor": 4.0, "original_max_position_embeddings": 32}
    yarn = scaled | {"rope_type": "yarn"}
    lists = {
        "short_factor": [1 + 0.1 * pair for pair in range(num_pairs)],
        "long_factor": [1.0 + 2 * pair for pair in range(num_pairs)],
    }
    longrope = scaled | lists | {"rope_type": "longrope"}
    return {
        "dynamic": {"rope_type": "dynamic", "factor": 4.0},
        "linear": {"rope_type": "linear", "factor": 4.0},
        "llama3": scaled | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "yarn": yarn,
        "yarn at 1": yarn | {"attention_factor": 1.0},
        "yarn below": yarn | {"mscale": 0.7, "mscale_all_dim": 1.3},
        "longrope": longrope,
        "longrope below": longrope | {"attention_factor": 0.5},
        "longrope, short": longrope | {"original_max_position_embeddings": 128, "attention_factor": 2.0},
    }


@pytest.mark.parametrize(
    "name",
    [
        *FAST,
        "llama4_dense_layer",
        *(pytest.param(name, marks=pytest.mark.thorough) for name in FAMILIES if name not in (*FAST, *LEFT)),
    ],
)
def test_every_scaling(name: str, tmp_path: Path) -> None:
    """A prompt, and decodes behind another chunk."""
    from transformers import AutoModelForCausalLM

    save_checkpoint((FAMILIES | VARIANTS)[name], tmp_path)
    file = tmp_path / "config.json"
    saved = json.loads(file.read_text())
    kept = {key: saved["rope_parameters"][key] for key in KEPT if key in saved["rope_parameters"]}
    for kind, scaling in _scalings(_num_pairs(tmp_path)).items():
        file.write_text(json.dumps(saved | {"rope_parameters": kept | scaling}))
        refusal = _refusal(tmp_path)
        if refusal is not None:
            assert "rope" in refusal, kind
            continue
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
        model = load_model(tmp_path, block_size=8, num_blocks=32)
        assert_logits_of(model.forward_verify("whole", PROMPT), theirs, PROMPT)
        model.prefill("decoded", PROMPT[:30])
        decoded = [model.decode("decoded", PROMPT[position], position) for position in range(30, 33)]
        assert_logits_of(torch.stack(decoded), theirs, PROMPT, slice(30, 33))


def test_a_kind_without_a_formula_is_refused() -> None:
    """It is not computed as another one."""
    with pytest.raises(UnsupportedError, match="kind: 'ntk'"):
        rope_frequencies(RopeConfig(kind="ntk"), head_dim=64, max_positions=128)


def _refusal(folder: Path) -> str | None:
    """The message by which the configuration is refused, if it is."""
    try:
        read_model_config(folder)
    except UnsupportedError as error:
        return str(error)
    return None


def _num_pairs(folder: Path) -> int:
    """The pairs of a head that rotate."""
    _, config = read_model_config(folder)
    layer = next(layer for layer in config.attention if layer.rope is not None)
    assert layer.rope is not None
    return rotary_dim(layer.rope, layer.rotated_dim) // 2
