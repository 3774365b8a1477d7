"""Any JSON in any field of config.json, of an index or of an adapter_config.json is refused by name, or loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from paged.models.config_keys import COMPUTATION_KEYS
from tests.fuzz.files.checkpoint_folders import load_changed, load_changed_adapter
from tests.fuzz.fuzzing import fuzz
from tests.fuzz.values import JSON, value
from tests.models.families import FAMILIES, save_checkpoint
from tests.models.lora.folders import Adapter

FAMILY_NAMES = ("gemma3", "gpt_oss", "llama3_rope", "mistral", "qwen2_yarn_window_in_one_layer", "qwen3_moe")
FIELDS = sorted(
    {key for name in FAMILY_NAMES for key in FAMILIES[name].to_dict()} | COMPUTATION_KEYS | {"foo", "rope_scaling"}
)
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
    st.sampled_from(
        [
            "'NaN'",
            "'Infinity'",
            "'-Infinity'",
            "'1e999'",
            "'9' * 5000",
            "'9' * 400",
            "'1e-320'",
            "'1e308'",
            "'-0.0'",
            "'[' * 100_000",
            "'[' * 900 + ']' * 900",
            "'{\"a\":' * 100_000",
            "'[' + '[],' * 300_000 + '[]]'",
            "'true'",
            "str(2**31 - 1)",
            "str(2**31)",
            "str(2**63)",
            "str(10**9)",
            "str(10**7)",
            "'10000'",
            "'null'",
            "'{}'",
            "'[]'",
            "'\"\\\\ud800\"'",
            "'\"\\\\u0000\"'",
            "'\"' + 'a' * 100_000 + '\"'",
            "'1.0'",
            "'\"1\"'",
            "'false'",
            "'x'",
            '\'["full_attention", "sliding_attention"]\'',
            '\'{"rope_type": "linear", "factor": 2}\'',
        ]
    ),
)


def with_field(config: dict[str, Any], path: list[str], text: str) -> bytes:
    """The JSON of a config in which one field holds a text as it is."""
    section = config
    for key in path[:-1]:
        section = section.setdefault(key, {})
    section[path[-1]] = "@@"
    return json.dumps(config).replace('"@@"', text, 1).encode("utf-8", "surrogatepass")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    for name in FAMILY_NAMES:
        save_checkpoint(FAMILIES[name], root / name)
    return {name: root / name for name in FAMILY_NAMES}


@pytest.fixture(scope="module")
def unchanged(folders: dict[str, Path]) -> dict[str, list[float]]:
    return {name: load_changed(folder, {}).result[0] for name, folder in folders.items()}


CONFIGS = st.fixed_dictionaries(
    {
        "family": st.sampled_from(FAMILY_NAMES),
        "path": st.one_of(
            st.sampled_from(FIELDS).map(lambda key: [key]),
            st.tuples(st.sampled_from(["rope_parameters", "rope_scaling"]), st.sampled_from(ROPE_FIELDS)).map(list),
            st.sampled_from(ROPE_FIELDS).map(lambda key: ["rope_parameters", "full_attention", key]),
        ),
        "text": TEXTS,
    }
)


@fuzz(CONFIGS, examples=25)
def test_config_fields(case: dict[str, Any], folders: dict[str, Path], unchanged: dict[str, list[float]]) -> None:
    """What loads computes what the unchanged checkpoint does, unless the family reads the key."""
    folder = folders[case["family"]]
    config = json.loads((folder / "config.json").read_text())
    outcome = load_changed(folder, {"config.json": with_field(config, case["path"], value(case["text"]))})
    if outcome.error is None:
        logits, read_keys = outcome.result
        assert case["path"][0] in read_keys or logits == unchanged[case["family"]]


INDICES = st.fixed_dictionaries(
    {
        "path": st.sampled_from(
            [["weight_map"], ["metadata"], ["weight_map", "model.norm.weight"], ["weight_map", "x"]]
        ),
        "text": st.one_of(
            TEXTS,
            st.sampled_from(
                [
                    "'\"..\"'",
                    "'\".\"'",
                    "'\"\"'",
                    "'\"../model.safetensors\"'",
                    "'\"/dev/zero\"'",
                    "'\"/\"'",
                    "'\"a/../..\"'",
                    "'\"rest.safetensors\"'",
                    "'\"norm.safetensors\"'",
                    "'\"config.json\"'",
                    "'\"./norm.safetensors\"'",
                    "'\"a/\\\\ud800\"'",
                    "'\"\\\\u001b[2J\"'",
                    "'\"' + 'a/' * 5000 + '\"'",
                ]
            ),
        ),
    }
)


@pytest.fixture(scope="module")
def sharded(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    tensors = load_file(folders["mistral"] / "model.safetensors")
    norm = {"model.norm.weight": tensors.pop("model.norm.weight")}
    save_file(norm, folder / "norm.safetensors")
    save_file(tensors, folder / "rest.safetensors")
    weight_map = dict.fromkeys(tensors, "rest.safetensors") | dict.fromkeys(norm, "norm.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_bytes((folders["mistral"] / "config.json").read_bytes())
    return folder


@fuzz(INDICES, examples=10)
def test_index_fields(case: dict[str, Any], sharded: Path, unchanged: dict[str, list[float]]) -> None:
    index = "model.safetensors.index.json"
    changed = with_field(json.loads((sharded / index).read_text()), case["path"], value(case["text"]))
    outcome = load_changed(sharded, {index: changed})
    assert outcome.error is not None or outcome.result[0] == unchanged["mistral"]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("a/\ud800", "is no relative file name"),
        ("\x1b[2J", "is no relative file name"),
        ("a/" * 5000, "is no relative file name"),
        ("a/b", "missing"),
        ("a/../..", "lies outside"),
    ],
)
def test_files_that_an_index_names(entry: str, message: str, sharded: Path) -> None:
    index = {"weight_map": {"model.norm.weight": entry}}
    error = str(load_changed(sharded, {"model.safetensors.index.json": json.dumps(index).encode()}).error)
    assert message in error
    assert "\x1b" not in error
    assert len(error) < 2000


def test_an_index_of_many_files(sharded: Path) -> None:
    """None is looked up twice, and there are no more than a checkpoint can have."""
    for names, message in ((range(300_000), "more than 4096 files"), ([0] * 300_000, "missing")):
        weight_map = {f"t{number}": f"a/{name}" for number, name in enumerate(names)}
        index = json.dumps({"weight_map": weight_map}).encode()
        assert message in str(load_changed(sharded, {"model.safetensors.index.json": index}).error)


@pytest.fixture(scope="module")
def adapter(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Adapter(("q_proj", "down_proj")).save(tmp_path_factory.mktemp("adapters") / "a", folders["mistral"])


ADAPTERS = st.fixed_dictionaries(
    {
        "path": st.one_of(
            st.sampled_from(ADAPTER_FIELDS).map(lambda key: [key]),
            st.tuples(st.sampled_from(["rank_pattern", "alpha_pattern"]), st.sampled_from(["q_proj", "a.b", "x+"])).map(
                list
            ),
        ),
        "text": TEXTS,
    }
)


@fuzz(ADAPTERS, examples=10)
def test_adapter_fields(case: dict[str, Any], folders: dict[str, Path], adapter: Path) -> None:
    config = json.loads((adapter / "adapter_config.json").read_text())
    changed = with_field(config, case["path"], value(case["text"]))
    load_changed_adapter(folders["mistral"], adapter, {"adapter_config.json": changed})
