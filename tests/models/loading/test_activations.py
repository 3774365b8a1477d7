"""An activation gives transformers' logits, or it is refused by the key that names it."""

import json
from pathlib import Path

import pytest

from paged.errors import CheckpointError, UnsupportedError
from paged.models.registry import load_model, read_model_config
from tests.models.families import (
    FAMILIES,
    OF_TRANSFORMERS,
    VARIANTS,
    assert_same_logits,
    logits_of,
    save_checkpoint,
    tokens,
)

PROMPT = tokens(20)
ANYWHERE = {"hidden_act", "hidden_activation"}
KEYS = {*ANYWHERE, "mlp_hidden_act", "mamba_hidden_act"}
# Recurrent layers of each kind, which have an activation of their own, MLPs without gates, and names that differ.
FAST = ("falcon_h1", "gemma", "granite_hybrid", "lfm2", "llama", "nemotron_h", "olmo_hybrid", "qwen3_5")
WITHOUT_RECURRENCE = ("granite_hybrid_attention_only", "nemotron_h_attention_last")


@pytest.mark.parametrize(
    "name",
    [
        *FAST,
        *(
            pytest.param(name, marks=pytest.mark.thorough)
            for name in (*OF_TRANSFORMERS, *WITHOUT_RECURRENCE)
            if name not in FAST
        ),
    ],
)
def test_every_activation(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.activations import ACT2CLS

    save_checkpoint((FAMILIES | VARIANTS)[name], tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    runs: set[tuple[str, str]] = set()
    refused: dict[tuple[str, str], str] = {}
    keys = ANYWHERE | (KEYS & saved.keys())
    for key in keys:
        for activation in sorted(ACT2CLS):
            (tmp_path / "config.json").write_text(json.dumps(saved | {key: activation}))
            try:
                read_model_config(tmp_path)
            except (CheckpointError, UnsupportedError) as error:
                refused[key, activation] = str(error)
                continue
            runs.add((key, activation))
            theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
            logits = load_model(tmp_path, block_size=8, num_blocks=16).forward_verify("a", PROMPT)
            assert_same_logits(logits, logits_of(theirs, PROMPT))
    assert {(key, saved[key]) for key in KEYS & saved.keys()} <= runs
    for (key, activation), message in refused.items():
        assert f"{key} = {activation!r} is not supported" in message
    assert {(key, "sigmoid") for key in keys} <= refused.keys()
