"""Rotated heads in the cache: the same logits over a plain cache, and smaller errors over one of 4 bits."""

from pathlib import Path

import pytest
import torch

from paged.errors import InvalidInputError, UnsupportedError
from paged.models.registry import load_model
from paged.models.weight_update import read_new_weights, replace_weights
from paged.step.batch import UnifiedBatchItem
from tests.models.edits import Tensors, assert_refused, edit_config, edit_tensors
from tests.models.families import FAMILIES, PARTS, assert_same_logits, logits_of, save_checkpoint, tokens
from tests.models.lora.folders import Adapter

PROMPT = tokens(40)
# Norms of heads, windows, interleaved pairs, sinks, partial rotation, chosen blocks, gated heads, norms behind the
# rotation, fused projections, biases. Keys alone where elements are gated or values are keys.
FAMILY_ROTATIONS = [
    *(("qwen3", "hadamard"), ("cohere2", "hadamard")),
    *(
        pytest.param(family, "hadamard", marks=pytest.mark.thorough)
        for family in ("gemma3", "gpt_oss", "glm4", "minimax_m3", "laguna", "hunyuan_moe", "phi3", "olmo2")
    ),
    *(
        pytest.param(family, "hadamard_keys", marks=pytest.mark.thorough)
        for family in ("qwen3_next", "qwen4_exp", "gemma4_moe")
    ),
]


@pytest.mark.parametrize(("family", "rotation"), FAMILY_ROTATIONS)
def test_logits_stay(family: str, rotation: str, tmp_path: Path) -> None:
    """Of prompts at once, cut, beside decodes, and after a hit of the prefix cache."""
    theirs = save_checkpoint((PARTS | FAMILIES)[family], tmp_path)
    expected = logits_of(theirs, PROMPT)
    model = load_model(tmp_path, kv_cache_rotation=rotation, block_size=8, num_blocks=64)
    assert_same_logits(model.prefill("a", PROMPT), expected[-1])
    model.release("a")
    model.unified_forward([UnifiedBatchItem("b", PROMPT[:38])])
    decode, chunk = model.unified_forward(
        [UnifiedBatchItem("b", PROMPT[38:39], pos_offset=38), UnifiedBatchItem("c", PROMPT[:13])]
    )
    assert_same_logits(decode, expected[38])
    assert_same_logits(chunk, expected[12])


def _with_outliers(tensors: Tensors) -> None:
    """Multiply two channels of each head of 32 of keys by 16, and divide the queries' channels by it."""
    for name, weight in tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")):
            factor = 16.0 if "k_proj" in name else 1 / 16
            heads = weight.unflatten(0, (-1, 32))  # rotated channels d and d + 16 make a pair
            heads[:, [3, 19]] *= factor


@pytest.mark.parametrize("kind", ["int4", pytest.param("int8", marks=pytest.mark.thorough)])
def test_outliers_cost_less(kind: str, tmp_path: Path) -> None:
    theirs = save_checkpoint(FAMILIES["llama"], tmp_path)
    edit_tensors(tmp_path, _with_outliers)
    expected = logits_of(theirs, PROMPT)[1:]  # queries and keys multiply as before
    errors = {}
    for rotation in (None, "hadamard_keys"):
        model = load_model(tmp_path, kv_cache_dtype=(kind, "auto"), kv_cache_rotation=rotation)
        logits = model.forward_verify("a", PROMPT)[1:]
        errors[rotation] = float((logits - expected).norm() / expected.norm())
    assert errors["hadamard_keys"] < 0.7 * errors[None]


def test_files_of_other_rotations_are_not_found(llama_folder: Path, tmp_path: Path) -> None:
    """Even if a user names the weights by the same fingerprint."""
    digests = set()
    for rotation in (None, "hadamard_keys", "hadamard"):
        model = load_model(llama_folder, cache_folder=tmp_path, kv_cache_rotation=rotation)
        model.kv_manager.set_fingerprint(b"weights")
        assert model.kv_manager.files is not None
        digests.add(model.kv_manager.files.digest)
    assert len(digests) == 3


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_adapters_and_new_weights_are_rotated(family: str, tmp_path: Path) -> None:
    base, other = tmp_path / "base", tmp_path / "other"
    save_checkpoint(FAMILIES[family], base)
    targets = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj")
    adapter = Adapter(targets)
    folder = adapter.save(tmp_path / "adapter", base)
    merged = adapter.merge(folder, base, tmp_path / "merged")
    expected = load_model(merged).prefill("a", PROMPT)
    model = load_model(base, kv_cache_rotation="hadamard", max_lora_rank=8)
    model.adapters.load("adapter", folder)
    model.set_lora_adapter_for_cache("a", "adapter")
    assert_same_logits(model.prefill("a", PROMPT), expected)

    torch.manual_seed(1)
    save_checkpoint(FAMILIES[family], other)
    edit_tensors(other, lambda tensors: tensors.update({name: -tensor for name, tensor in tensors.items()}))
    expected = load_model(other).prefill("a", PROMPT)
    model = load_model(base, kv_cache_rotation="hadamard")
    replace_weights(model, read_new_weights(model, other, check_finite=True))
    assert_same_logits(model.prefill("a", PROMPT), expected)


@pytest.mark.parametrize(
    ("family", "rotation", "error", "message"),
    [
        ("llama", "householder", InvalidInputError, "'householder', expected hadamard, hadamard_keys, 'none' or None"),
        ("mimo_v2_flash", "hadamard", InvalidInputError, "heads of 24, expected a multiple of 16"),
        ("deepseek_v3", "hadamard_keys", UnsupportedError, "for latents or compressed entries, expected None"),
        ("qwen3_next", "hadamard", UnsupportedError, "gates the elements of a head's output, expected 'hadamard_keys'"),
        pytest.param(
            *("gemma4_moe", "hadamard", UnsupportedError, "are its keys before their rotation"),
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_refused(family: str, rotation: str, error: type[Exception], message: str, tmp_path: Path) -> None:
    save_checkpoint(FAMILIES[family], tmp_path)
    assert_refused(tmp_path, message, error, kv_cache_rotation=rotation)


@pytest.mark.thorough
def test_refuses_layers_that_read_others(tmp_path: Path) -> None:
    save_checkpoint(FAMILIES["gemma4_shared_kv"], tmp_path)
    edit_config(tmp_path, per_layer_config={"2": {"head_dim": 32}, "4": {"head_dim": 32}})
    assert_refused(tmp_path, "reads K/V of layer", UnsupportedError, kv_cache_rotation="hadamard_keys")
