"""Any JSON in any field of config.json, of an index or of an adapter_config.json is refused by name, or loads."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from paged.models.families.config_keys import COMPUTATION_KEYS
from tests.fuzz.files.checkpoint_folders import load_changed, with_field
from tests.fuzz.fuzzing import fuzz
from tests.fuzz.values import JSON, expressions, value

FAMILY_NAMES = ("gemma3", "gpt_oss", "llama3_rope", "mistral", "qwen2_yarn_window_in_one_layer", "qwen3_moe")
INDEX = "model.safetensors.index.json"
ROPE_FIELDS = [
    *("rope_type", "type", "rope_theta", "factor", "attention_factor", "beta_fast", "beta_slow", "mscale"),
    *("mscale_all_dim", "truncate", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    *("partial_rotary_factor", "full_attention", "sliding_attention", "foo"),
]
ADAPTER_FIELDS = [
    *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights"),
    *("target_modules", "exclude_modules", "layers_to_transform", "use_dora", "modules_to_save", "foo"),
]
# JSON as text, made by an expression that a seed can hold: numbers that no type holds, and depths that no stack does.
TEXTS = st.one_of(
    JSON.map(json.dumps).map(repr),
    st.integers(-3, 200).map(str).map(repr),
    st.floats(0, 4).map(repr).map(repr),
    expressions(r"""
        'NaN'; 'Infinity'; '-Infinity'; '1e999'; '9' * 5000; '9' * 400; '1e-320'; '1e308'; '-0.0'; '1.0'; '"1"';
        '10000'; '[' * 100_000; '[' * 900 + ']' * 900; '{"a":' * 100_000; '[' + '[],' * 300_000 + '[]]'; '[]';
        '{}'; 'null'; str(2**31 - 1); str(2**31); str(2**63); str(10**9); str(10**7); '"\\ud800"'; '"\\u0000"'; 'true';
        'false'; 'x'; '"' + 'a' * 100_000 + '"'; '["full_attention", "sliding_attention"]';
        '{"rope_type": "linear", "factor": 2}'
    """),
)


@pytest.fixture(scope="module")
def unchanged(folder_of: Callable[[str], Path]) -> Callable[[str], list[float]]:
    """The logits of a family's checkpoint."""
    return cache(lambda name: load_changed(folder_of(name), {}).result[0])


def _field_names() -> st.SearchStrategy[str]:
    from tests.models.families import FAMILIES

    of_families = {key for name in FAMILY_NAMES for key in FAMILIES[name].to_dict()}
    return st.sampled_from(sorted(of_families | COMPUTATION_KEYS | {"foo", "rope_scaling"}))


CONFIGS = st.fixed_dictionaries(
    {
        "family": st.sampled_from(FAMILY_NAMES),
        "path": st.one_of(
            st.deferred(_field_names).map(lambda key: [key]),
            st.tuples(st.sampled_from(["rope_parameters", "rope_scaling"]), st.sampled_from(ROPE_FIELDS)).map(list),
            st.sampled_from(ROPE_FIELDS).map(lambda key: ["rope_parameters", "full_attention", key]),
        ),
        "text": TEXTS,
    }
)


@fuzz(CONFIGS, examples=5, thorough=50)
def test_config_fields(case: dict[str, Any], folder_of: Any, unchanged: Any) -> None:
    """What loads computes what the unchanged checkpoint does, unless the family reads the key."""
    folder = folder_of(case["family"])
    config = json.loads((folder / "config.json").read_text())
    outcome = load_changed(folder, {"config.json": with_field(config, case["path"], value(case["text"]))})
    if not outcome.error:
        logits, read_keys = outcome.result
        assert case["path"][0] in read_keys or logits == unchanged(case["family"])


FILE_NAMES = expressions(r"""
    '".."'; '"."'; '""'; '"../model.safetensors"'; '"/dev/zero"'; '"/"'; '"a/../.."'; '"rest.safetensors"';
    '"norm.safetensors"'; '"config.json"'; '"./norm.safetensors"'; '"a/\\ud800"'; '"\\u001b[2J"';
    '"' + 'a/' * 5000 + '"'
""")
IN_INDEX = [["weight_map"], ["metadata"], ["weight_map", "model.norm.weight"], ["weight_map", "x"]]


@pytest.fixture(scope="module")
def sharded(folder_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, base = tmp_path_factory.mktemp("sharded"), folder_of("mistral")
    tensors = load_file(base / "model.safetensors")
    norm = {"model.norm.weight": tensors.pop("model.norm.weight")}
    save_file(norm, folder / "norm.safetensors")
    save_file(tensors, folder / "rest.safetensors")
    weight_map = dict.fromkeys(tensors, "rest.safetensors") | dict.fromkeys(norm, "norm.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_bytes((base / "config.json").read_bytes())
    return folder


@fuzz(st.tuples(st.sampled_from(IN_INDEX), TEXTS | FILE_NAMES), examples=3, thorough=20)
def test_index_fields(case: tuple[list[str], str], sharded: Path, unchanged: Any) -> None:
    changed = with_field(json.loads((sharded / INDEX).read_text()), case[0], value(case[1]))
    outcome = load_changed(sharded, {INDEX: changed})
    assert outcome.error or outcome.result[0] == unchanged("mistral")
    assert "\x1b" not in outcome.error
    assert len(outcome.error) < 2000


def test_an_index_of_many_files(sharded: Path) -> None:
    """None is looked up twice, and there are no more than a checkpoint can have."""
    for names, message in ((range(5_000), "more than 4096 files"), ([0] * 150_000, "missing")):
        weight_map = {f"t{number}": f"a/{name}" for number, name in enumerate(names)}
        index = json.dumps({"weight_map": weight_map}).encode()
        assert message in load_changed(sharded, {INDEX: index}).error


PATTERNS = st.tuples(st.sampled_from(["rank_pattern", "alpha_pattern"]), st.sampled_from(["q_proj", "a.b", "x+"]))
ADAPTERS = st.fixed_dictionaries(
    {"path": st.sampled_from(ADAPTER_FIELDS).map(lambda key: [key]) | PATTERNS.map(list), "text": TEXTS}
)


@fuzz(ADAPTERS, examples=3, thorough=20)
def test_adapter_fields(case: dict[str, Any], folder: Path, adapter: Path) -> None:
    config = json.loads((adapter / "adapter_config.json").read_text())
    changed = with_field(config, case["path"], value(case["text"]))
    load_changed(folder, {"adapter_config.json": changed}, adapter)
