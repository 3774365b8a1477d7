"""A key of config.json that transformers reads is honoured, or refused by name: all keys of all families, other values.

SOAK=1 takes all values of all keys, and more pairs: 40,000 configurations in ten minutes of a core. The thorough set
takes a value of every fourth key of each family, the fast set some keys of some families.
"""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from paged.errors import UnsupportedError
from paged.models.loading.hf_config import HfConfig
from paged.models.registry import ARCHITECTURES, model_config
from tests.models.every_key import Change, EveryKey
from tests.models.families import FAMILIES, OF_TRANSFORMERS, VARIANTS

IS_SOAK = "SOAK" in os.environ
FAST = ("granite_hybrid", "hunyuan_moe", "phi3")
NUM_PAIRS = 200 if IS_SOAK else 3


@pytest.mark.parametrize("name", FAST)
def test_some_keys(name: str, tmp_path: Path) -> None:
    _compare(name, tmp_path, every=9)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*OF_TRANSFORMERS, *(VARIANTS if IS_SOAK else ())])
def test_every_key(name: str, tmp_path: Path) -> None:
    _compare(name, tmp_path, every=1 if IS_SOAK else 4)


@pytest.mark.parametrize(
    ("name", "key", "honoured", "refused"),
    [
        ("ernie4_5_moe", "moe_norm_min", 1e-12, 2.0),
        ("deepseek_v3", "head_dim", 16, 15),
        ("mistral4", "head_dim", 40, 39),
        ("glm_moe_dsa", "head_dim", 24, 2),
        ("nemotron_h", "time_step_min", 0.001, 0.5),
        ("nemotron_h", "mamba_dt_min", 0.001, 0.5),
        ("hunyuan_moe", "num_experts_per_tok", None, 2),
        ("granite_hybrid", "time_step_min", 0.5, None),
    ],
)
def test_keys_of_some_families(name: str, key: str, honoured: Any, refused: Any) -> None:
    """They have an effect in these families alone, or in others alone."""
    _config(name, **{key: honoured})
    if refused is not None:
        with pytest.raises(UnsupportedError, match=f"config.json: {key} = {refused} is not supported"):
            _config(name, **{key: refused})


@pytest.mark.parametrize("name", ["gemma3", "laguna", "olmo3"])
def test_yarn_of_a_layer_type_rounds(name: str) -> None:
    """transformers reads `truncate` beside the layer types, where no published model has it."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    sliding = {"rope_type": "default", "rope_theta": 1e4}
    for truncate in (True, False, None):
        parameters = {"full_attention": yarn | {"truncate": truncate}, "sliding_attention": sliding}
        if truncate:
            _config(name, rope_parameters=parameters)
            continue
        with pytest.raises(UnsupportedError, match=f"truncate {truncate}, expected true"):
            _config(name, rope_parameters=parameters)


@pytest.mark.parametrize(("name", "key"), [("deepseek_v3", "rope_interleave"), ("falcon_h1", "mamba_norm_before_gate")])
def test_a_null_flag_is_false(name: str, key: str) -> None:
    """Also where the flag of an absent key is true."""
    assert _config(name, **{key: None}) == _config(name, **{key: False}) != _config(name, **{key: True})


def test_a_null_head_dim_beside_a_latent() -> None:
    """transformers then rotates by the hidden size of a head, which is the rotated part's size or not."""
    _config("deepseek_v3", head_dim=None)
    with pytest.raises(UnsupportedError, match="head_dim null, expected 16 or no such key"):
        _config("deepseek_v3", head_dim=None, hidden_size=60)


def _config(name: str, **values: Any) -> Any:
    written = json.loads(FAMILIES[name].to_json_string(use_diff=False))
    architectures = [key for key, family in ARCHITECTURES.items() if family.model_type == written["model_type"]]
    return model_config(HfConfig(written | {"architectures": architectures} | values, "config.json"))[1]


def _compare(name: str, folder: Path, *, every: int) -> None:
    family = EveryKey(name, folder)
    draw = random.Random(name)
    keys = list(family.changes())
    changes: list[Change] = []
    for of_key in keys[draw.randrange(every) :: every]:
        changes += of_key if IS_SOAK else [draw.choice(of_key)]
    cases: list[tuple[Change, ...]] = [(change,) for change in changes]
    cases += [tuple(draw.sample(changes, 2)) for _ in range(NUM_PAIRS)]
    faults: dict[str, str] = {}
    for case in cases:
        fault = family.fault_of(*case)
        if fault:
            faults[", ".join(map(str, case))] = fault
    assert faults == {}
    assert family.num_compared > len(changes) // 3
