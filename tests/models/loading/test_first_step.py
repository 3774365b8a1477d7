"""A configuration runs, or it is refused when it is loaded: a change of any keys of any family's config.json."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from paged.errors import CheckpointError, UnsupportedError
from paged.models.loading.hf_config import HfConfig
from paged.models.network_loader import meta_network, with_stored_layout
from paged.models.registry import ARCHITECTURES, load_model, model_config
from tests.models.edits import WEIGHTS
from tests.models.families import FAMILIES, VOCAB_SIZE, tokens

# Names of activations, and of kinds of layers, rotations and routings.
WORDS = (
    *("silu", "gelu", "gelu_pytorch_tanh", "relu2", "xielu", "sigmoid", "softmax", "full_attention", "yarn"),
    *("sliding_attention", "linear_attention", "mlp", "moe", "conv", "dense", "sparse", "rope", "nope", "auto"),
)
FAST = ("deepseek_v32", "nemotron_h")
NUM_CHANGES = 40
MOST_WEIGHTS = 3_000_000
MOST_POSITIONS = 4096


def _other(rng: random.Random, value: Any) -> Any:
    """A value of the same type or of another."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice([0, 1, 2, 3, 7, 8, value - 1, value + 1, 2 * value, value // 2, 3 * value])
    if isinstance(value, float):
        return rng.choice([0.0, 0.25, 0.5, 1.0, 2.0, 2 * value])
    if isinstance(value, str):
        return rng.choice(WORDS)
    if isinstance(value, list):
        changed = [_other(rng, one) if rng.random() < 0.5 else one for one in value]
        return rng.choice([[], value[:-1], value[::-1], value + value[:1], changed])
    if isinstance(value, dict):
        return {key: _other(rng, one) if rng.random() < 0.3 else one for key, one in value.items()}
    return rng.choice([1, 8, True, 0.5, "silu"])


def _save(values: dict[str, Any], folder: Path) -> bool:
    """Save a random checkpoint of this config.json; return False, and save nothing, if it is too large for a test."""
    network_class, config = model_config(HfConfig(values, "config.json"))
    if (any(config.attends) and config.max_position_embeddings > MOST_POSITIONS) or config.vocab_size > 8 * VOCAB_SIZE:
        return False
    network = meta_network(network_class, with_stored_layout(config, {}), torch.float32)
    destinations = network.destinations()
    if sum(destination.shape.numel() for destination in destinations.values()) > MOST_WEIGHTS:
        return False
    tensors = {}
    for key, destination in destinations.items():
        tensors[key] = 0.1 * torch.randn(destination.shape)
        if not destination.dtype.is_floating_point:  # a table of ids
            tensors[key] = torch.zeros(destination.shape, dtype=destination.dtype)
    save_file(tensors, folder / WEIGHTS)
    (folder / "config.json").write_text(json.dumps(values))
    return True


@pytest.mark.parametrize(
    "name",
    [
        *FAST,
        *(pytest.param(name, marks=pytest.mark.thorough) for name in FAMILIES if name not in FAST),
    ],
)
def test_what_loads_runs_a_first_step(name: str, tmp_path: Path) -> None:
    """A prompt and a decode, in float32 or bfloat16; what is refused at load is refused by name."""
    rng = random.Random(name)
    values = json.loads(FAMILIES[name].to_json_string(use_diff=False))
    own = [key for key, family in ARCHITECTURES.items() if family.model_type == values["model_type"]]
    values["architectures"] = own
    keys = sorted(values.keys() - {"architectures", "model_type", "transformers_version", "dtype"})
    num_run = num_refused = 0
    for index in range(NUM_CHANGES):
        changed = rng.sample(keys, rng.choice([1, 1, 2])) if index else []
        changes = {key: _other(rng, values[key]) for key in changed}
        dtype = rng.choice([torch.float32, torch.bfloat16])
        try:
            if not _save(values | changes, tmp_path):
                continue
            model = load_model(tmp_path, dtype=dtype, block_size=8, num_blocks=32, num_state_slots=8)
        except (CheckpointError, UnsupportedError):
            num_refused += 1
            continue
        except Exception as error:
            raise AssertionError(f"{changes} in {dtype} is refused by {type(error).__name__}") from error
        prompt = [token % model.config.vocab_size for token in tokens(12)][: model.config.max_seq_len]
        try:
            model.prefill("a", prompt)
            if len(prompt) < model.config.max_seq_len:
                model.decode("a", prompt[0], len(prompt))
        except Exception as error:
            raise AssertionError(f"{changes} in {dtype} loads and fails in a step: {error}") from error
        num_run += 1
    assert num_run > NUM_CHANGES // 4
    assert num_refused
