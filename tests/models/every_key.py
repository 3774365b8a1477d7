"""Every key that transformers' configuration of a family, or its modeling code, reads: other values, and what they do.

A value is refused by a named error, or the logits are transformers'. A key that transformers ignores may be refused.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from paged.errors import PagedError
from paged.models.layers.config import DecoderConfig
from paged.models.loading.hf_config import HfConfig
from paged.models.registry import load_model, model_config
from tests.models.edits import edit_tensors
from tests.models.families import (
    FAMILIES,
    VARIANTS,
    as_float64,
    logits_of,
    randomize_vectors,
    save_checkpoint,
    split_convolutions,
    tokens,
)

PROMPT = tokens(40)
_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu2", "relu", "tanh")
_WORDS = ("rope", "nope", "sigmoid", "softmax", "greedy", "noaux_tc", "per_head", "default", "other")
_LAYER_TYPES = ("full_attention", "sliding_attention", "linear_attention", "chunked_attention")
# Values of keys of a rotation. A head has 16 or 32 elements.
_ROPE_VALUES: dict[str, tuple[Any, ...]] = {
    "rope_theta": (50.0, None),
    "rope_type": ("linear", "dynamic", "yarn", "llama3", "longrope", "proportional", "axial", "mrope", "su", None),
    "type": ("linear", "default"),
    "partial_rotary_factor": (0.5, 0.25, 1.0, None),
    "factor": (2.0, 8, 0.5, None),
    "original_max_position_embeddings": (16, 64, 128, None),
    "attention_factor": (0.5, 1.5, None),
    "beta_fast": (8, 64.0, None),
    "beta_slow": (2, 0, None),
    "short_factor": ([1.5] * 8, [1.5] * 6, None),
    "long_factor": ([3.0] * 8, [3.0] * 6, None),
    "low_freq_factor": (2.0, None),
    "high_freq_factor": (8.0, None),
    "mscale": (0.5, 2.0, None),
    "mscale_all_dim": (0.5, 2.0, 0, None),
    "truncate": (True, False, None),
    "mrope_section": ([2, 3, 3], None),
    "alpha": (50.0, None),
    "llama_4_scaling_beta": (0.3, None),
    "short_mscale": (1.4, None),
    "long_mscale": (1.4, None),
    "head_dim": (8,),
}
_YARN = {"rope_type": "yarn", "factor": 4.0}
_LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_AT_32 = {"original_max_position_embeddings": 32}
_ROTATIONS = (
    {"rope_type": "linear", "factor": 3.0},
    {"type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 3.0, "alpha": 9.0},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0},
    _YARN,
    _YARN | _AT_32 | {"mscale": 0.7, "mscale_all_dim": 1.3},
    _YARN | _AT_32 | {"mscale_all_dim": 1.3},
    _LLAMA3,
    _LLAMA3 | _AT_32,
)
# Keys of every configuration that name the class, a version or the dtype; and methods.
_NOT_DRAWN = frozenset("model_type architectures transformers_version torch_dtype dtype vocab_size".split())
_ABSENT: Any = object()
_LARGEST = 2048


class Change(NamedTuple):
    """Another value of a key. key: its name, with those of the sections around it. settings: of config.json."""

    key: str
    settings: dict[str, Any]

    def __str__(self) -> str:
        return ", ".join(
            f"{key} = {'absent' if value is _ABSENT else value!r:.150}" for key, value in self.settings.items()
        )


class EveryKey:
    """A tiny random checkpoint of a family, and changes of its config.json."""

    def __init__(self, name: str, folder: Path) -> None:
        self.theirs = save_checkpoint((FAMILIES | VARIANTS)[name], folder)
        self.values: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self._written = json.loads(self.theirs.config.to_json_string(use_diff=False)) | self.values
        self._folder = folder
        self._config_class = type(self.theirs.config)
        self._config = _read(self.values)
        self._weights = self.theirs.state_dict()
        self._logits = logits_of(self.theirs, PROMPT)
        self.num_compared = 0

    def keys(self) -> list[str]:
        """Return the keys of the configuration's class, of config.json, and those that the class or the model reads."""
        modules = [inspect.getmodule(type(self.theirs)), inspect.getmodule(self._config_class)]
        source = "".join(inspect.getsource(module) for module in modules if module is not None)
        keys = {*self._written, *self._config_class.attribute_map}
        keys |= {field.name for field in dataclasses.fields(self._config_class)}
        for pattern in (r"config\.([a-z]\w*)", r'config, "(\w+)"', r'kwargs\.\w+\("(\w+)"', r'"(\w+)" in kwargs'):
            keys |= set(re.findall(pattern, source))
        return sorted(key for key in keys - _NOT_DRAWN if not callable(getattr(self._config_class, key, None)))

    def changes(self) -> Iterator[list[Change]]:
        """Yield all changes of each key; of a rotation's keys, as `rope_parameters` and as `rope_scaling`."""
        hints = {field.name: str(field.type) for field in dataclasses.fields(self._config_class)}
        for key in self.keys():
            if key == "rope_parameters":
                yield from self._changes_of_rotation()
                continue
            values = [
                value for value in _other_values(key, self._written.get(key), hints.get(key, "")) if _is_small(value)
            ]
            if key in self.values:
                values.append(_ABSENT)
            if values:
                yield [Change(key, {key: value}) for value in values]

    def _changes_of_rotation(self) -> Iterator[list[Change]]:
        key, section = "rope_parameters", self._written.get("rope_parameters") or {}
        parts = [part for part, value in section.items() if isinstance(value, dict)]
        for part in parts:
            for names in _other_rotations(section[part]):
                yield [Change(f"{key}.{part}.{name}", {key: section | {part: changed}}) for name, changed in names]
        if not parts:
            for names in _other_rotations(section):
                yield [Change(f"{key}.{name}", {key: changed}) for name, changed in names]
                yield [
                    Change(f"rope_scaling.{name}", {key: _ABSENT, "rope_scaling": changed}) for name, changed in names
                ]

    def fault_of(self, *changes: Change) -> str:
        """Return how the logits differ from transformers'; "" if they do not, or either refuses the changes."""
        values = dict(self.values)
        for change in changes:
            values |= change.settings
        values = {key: value for key, value in values.items() if value is not _ABSENT}
        try:
            config = _read(values)
        except PagedError:
            return ""
        if _size(config) > max(_size(self._config), 3 * _LARGEST):
            return ""
        try:
            theirs = self._build(values)
            has_same_weights = _shapes(theirs.state_dict()) == _shapes(self._weights)
            if has_same_weights:
                theirs.load_state_dict(self._weights)
            else:
                randomize_vectors(theirs)
            rounded = logits_of(theirs, PROMPT)
        except Exception:  # from transformers' code, of any type
            return ""
        if config == self._config and has_same_weights:
            self.num_compared += 1
            difference = float((rounded - self._logits).abs().max() / self._logits.abs().max())
            return f"ignored here, in transformers it changes logits by {difference:.2g}" * (difference > 1e-5)
        exact = logits_of(as_float64(theirs), PROMPT)
        if not exact.isfinite().all():
            return ""
        try:
            logits = self._our_logits(theirs, values, config)
        except PagedError:
            return ""
        self.num_compared += 1
        exact, rounded = exact[: len(logits)], rounded[: len(logits)]
        if logits.shape != exact.shape:
            return f"logits {list(logits.shape)}, expected {list(exact.shape)}"
        largest = exact.abs().max()
        error, budget = (logits - exact).abs().max(), 24 * (rounded - exact).abs().max() + 1e-5 * largest
        return f"logits differ by {float(error / largest):.2g}" * (not error <= budget)

    def _build(self, values: dict[str, Any]) -> Any:
        from transformers import AutoModelForCausalLM

        torch.manual_seed(1)
        config = self._config_class.from_dict(_decoded(values))
        theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        if config.model_type == "nemotron_h":
            for module in theirs.modules():
                if hasattr(module, "time_step_limit"):
                    module.time_step_limit = config.time_step_limit  # as in the authors' kernels
        return theirs

    def _our_logits(self, theirs: Any, values: dict[str, Any], config: DecoderConfig) -> torch.Tensor:
        theirs.save_pretrained(self._folder)
        if theirs.config.model_type == "olmo_hybrid":
            edit_tensors(self._folder, partial(split_convolutions, theirs.config))
        (self._folder / "config.json").write_text(json.dumps(values))
        longest = _longest_compared(config)
        model = load_model(self._folder, block_size=8, num_blocks=64, cuda_graphs=False, max_seq_len=longest)
        return model.forward_verify("a", PROMPT[:longest]).double()


def _read(values: dict[str, Any]) -> DecoderConfig:
    return model_config(HfConfig(json.loads(json.dumps(values)), "config.json"))[1]


def _longest_compared(config: DecoderConfig) -> int:
    """Return the longest sequence to load for: of LongRoPE, one whose factors are those of the prompt's length."""
    longest = config.max_position_embeddings
    for layer in config.attention:
        if (
            layer.rope is not None
            and layer.rope.kind == "longrope"
            and layer.rope.original_max_positions >= len(PROMPT)
        ):
            longest = min(longest, layer.rope.original_max_positions)
    return longest


def _other_values(key: str, value: Any, hint: str) -> list[Any]:
    """Return other values of a key, near and far, by the type of its value or, without one, by its annotation."""
    drawn: list[Any] = [None]
    if isinstance(value, bool):
        drawn.append(not value)
    elif isinstance(value, int):
        drawn += [value + 1, max(value - 1, 0), 2 * value, value // 2, 0, 1]
    elif isinstance(value, float):
        drawn += [2 * value, value / 2, value + 0.25, 0.0, 1.0, 2.0, 30.0]
    elif isinstance(value, str):
        drawn += _ACTIVATIONS if "act" in key else _WORDS
    elif isinstance(value, list):
        drawn += [value[::-1], value[1:] + value[:1], value[:-1], []]
        if all(type(entry) in (int, float) for entry in value):
            drawn += [[entry + 1 for entry in value], [2 * entry for entry in value]]
        elif all(isinstance(entry, str) for entry in value):
            drawn += [[entry] * len(value) for entry in (*value, *_LAYER_TYPES)]
    elif value is None:
        for kind, values in _BY_HINT.items():
            if kind in hint or not hint:
                drawn += values
    others: list[Any] = []
    for other in drawn:
        if not any(type(other) is type(known) and other == known for known in (value, *others)):
            others.append(other)
    return others


_BY_HINT: dict[str, list[Any]] = {
    "bool": [True, False],
    "int": [1, 2, 4, 8, 16],
    "float": [0.5, 2.0],
    "list": [[0], [1], [0, 1], [1, 0]],
    "str": ["silu", "other"],
}


def _other_rotations(section: dict[str, Any]) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """Yield changes of each key of a rotation, then rotations of other kinds."""
    for key, values in _ROPE_VALUES.items():
        changed = [(key, section | {key: value}) for value in values]
        if key in section:
            changed.append((key, {name: value for name, value in section.items() if name != key}))
        yield changed
    kept = {key: section[key] for key in ("rope_theta", "partial_rotary_factor") if key in section}
    for rotation in _ROTATIONS:
        yield [("kind", kept | rotation)]


def _is_small(value: Any) -> bool:
    return type(value) is not int or value <= _LARGEST


def _size(config: DecoderConfig) -> int:
    """Return a measure of what a model costs to build."""
    num_experts = max((moe.num_experts for moe in config.moe if moe is not None), default=0)
    return max(
        config.hidden_size, config.vocab_size, 50 * config.num_layers, 20 * num_experts, *config.intermediate_size
    )


def _shapes(weights: dict[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in weights.items()}


def _decoded(value: Any) -> Any:
    """Return a value of config.json with the floats that transformers writes as objects."""
    if isinstance(value, list):
        return [_decoded(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"__float__"}:
        return float(value["__float__"])
    return {key: _decoded(entry) for key, entry in value.items()}
