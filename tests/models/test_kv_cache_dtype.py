"""Models over a KV cache of 8 bits, and the scales that their checkpoints hold for it."""

import re
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from paged.errors import InvalidInputError, UnsupportedError
from paged.executors.llm_executor import LlmExecutor
from paged.models.families.network import Network
from paged.models.layers.attention import Attention
from paged.models.paged_lm import PagedCausalLM
from paged.models.registry import load_model
from paged.step.batch import UnifiedBatchItem
from tests.models.edits import Tensors, assert_refused, edit_config, edit_tensors
from tests.models.families import FAMILIES, WITHOUT_ATTENTION, assert_same_logits, logits_of, save_checkpoint, tokens
from tests.tolerance import assert_rounded_alike

FP8 = torch.float8_e4m3fn
LAYER = "model.layers.{}.self_attn."


def add(folder: Path, layers: int = 1, **scales: torch.Tensor) -> None:
    """Scales of the first layers, by name with __ for a dot."""
    named = {name.replace("__", "."): scale for name, scale in scales.items()}
    edit_tensors(folder, lambda t: t.update({LAYER.format(i) + k: s for i in range(layers) for k, s in named.items()}))


def attention(model: PagedCausalLM, layer: int = 0) -> Attention:
    assert isinstance(model.network, Network)
    return model.network.layers[layer].self_attn


NAMES = (
    "{}_scale",
    "attn__{}_scale",
    "{}_proj__{}_scale",
    "qkv_proj__{}_scale",
    "qkqkv_proj__{}_scale",
    "{}_proj__output_scale",
)
# Of keys and values both.
SHARED_NAMES = ("kv_scale", "attn__kv_scale", "qkv_proj__kv_scale", "qkv_proj__output_scale")
# Of operands that stay in 16 bits here, and offsets of nothing.
OTHER_NAMES = (
    "q_scale",
    "q_proj__output_scale",
    "prob_output_scale",
    "attn__prob_scale",
    "k_zero_point",
    "v_zero_point",
)


@pytest.mark.parametrize("name", NAMES)
def test_scales_are_found_under_every_name(name: str, folder: Path) -> None:
    add(folder, **{name.format("k", "k"): torch.tensor(0.25), name.format("v", "v"): torch.tensor([0.5]).bfloat16()})
    model = load_model(folder, kv_cache_dtype=FP8)
    for scale, value in ((attention(model).k_scale, 0.25), (attention(model).v_scale, 0.5)):
        assert scale is not None
        assert (scale.tolist(), scale.dtype, scale.device) == ([value], torch.float32, model.device)
    assert attention(model, 1).k_scale is attention(model, 1).v_scale is None
    # They are those of an 8-bit cache.
    assert attention(load_model(folder)).k_scale is None


@pytest.mark.parametrize("name", SHARED_NAMES)
def test_a_scale_of_both(name: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    add(folder, 2, **{name: torch.tensor([0.25])})
    layer = attention(load_model(folder, kv_cache_dtype=FP8))
    assert (layer.k_scale, layer.v_scale) == (torch.tensor([0.25]), torch.tensor([0.25]))
    load_model(folder)
    assert caplog.messages == []


def test_a_missing_scale_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It counts as 1. Nothing is told of a checkpoint without any, and of a cache that has none."""
    load_model(folder, kv_cache_dtype=FP8)
    add(folder, 1, k_scale=torch.tensor(0.25))
    load_model(folder)
    load_model(folder, kv_cache_dtype="int8")
    assert caplog.messages == []
    load_model(folder, kv_cache_dtype=FP8)
    (message,) = caplog.messages
    assert "not v_scale of layer 0, k_scale of layer 1, v_scale of layer 1 (3 in all)" in message


def test_scales_of_other_operands_are_skipped(folder: Path) -> None:
    add(folder, 2, **dict.fromkeys(OTHER_NAMES, torch.zeros(1)))
    layer = attention(load_model(folder, kv_cache_dtype=FP8))
    assert layer.k_scale is layer.v_scale is None
    add(folder, q_zero_point=torch.tensor([3], dtype=torch.int8))
    load_model(folder, kv_cache_dtype=FP8)
    add(folder, k_zero_point=torch.tensor([3], dtype=torch.int8))
    load_model(folder)
    assert_refused(folder, "self_attn.k_zero_point: a zero point other than 0", UnsupportedError, kv_cache_dtype=FP8)


@pytest.mark.parametrize(
    "family",
    [
        *("deepseek_v3", "nemotron_h"),
        *(
            pytest.param(name, marks=pytest.mark.thorough)
            for name in FAMILIES
            # Each row of DeepSeek-V4 has scales of its own.
            if name not in ("deepseek_v3", "nemotron_h", "deepseek_v4", *WITHOUT_ATTENTION)
        ),
    ],
)
def test_every_family_has_every_name(family: str, tmp_path: Path) -> None:
    """Beside the names that a family's own files have; with a cache of 16 and of 8 bits."""
    save_checkpoint(FAMILIES[family], tmp_path)
    modules: set[str] = set()
    with safe_open(tmp_path / "model.safetensors", "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118
            match = re.match(
                r"(.*\.(?:self_attn|attention|mixer)\.)(?:k_proj|kv_a_proj_with_mqa|qkv_proj)\.weight", name
            )
            if match is not None:
                modules.add(match[1])
    assert modules
    for name in NAMES:
        added: Tensors = {}
        for module, letter in product(modules, "kv"):
            added[module + name.format(letter, letter).replace("__", ".")] = torch.tensor(0.25)
        edit_tensors(tmp_path, lambda tensors, added=added: tensors.update(added))
        load_model(tmp_path)
        layers = load_model(tmp_path, kv_cache_dtype=FP8).network.layers
        found = [layer.self_attn.k_scale for layer in layers if layer.self_attn is not None]
        assert found.count(torch.tensor([0.25])) == len(found) >= 1
        edit_tensors(tmp_path, lambda tensors, added=added: [tensors.pop(key) for key in added])


def test_a_scale_a_head(folder: Path) -> None:
    add(folder, v_scale=torch.tensor([0.25, 2.0]).view(2, 1, 1))
    layer = attention(load_model(folder, kv_cache_dtype=FP8))
    assert layer.v_scale.tolist() == [0.25, 2.0]  # type: ignore[union-attr]
    assert layer.k_scale is None


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({"k_scale": torch.ones(3)}, r"self_attn.k_scale: shape \[3\] in .*, expected 1 or 2 values"),
        ({"k_scale": torch.zeros(1)}, r"self_attn.k_scale: \[0.0\]"),
        ({"v_scale": torch.tensor([1.0, torch.nan])}, r"self_attn.v_scale: \[1.0, nan\]"),
        ({"v_scale": torch.ones(1).int()}, "self_attn.v_scale: dtype I32"),
        ({"v_scale": torch.ones(1), "v_proj__v_scale": torch.ones(1)}, "v_scale: a second v_scale, again in"),
    ],
)
def test_wrong_scales(scales: Tensors, message: str, folder: Path) -> None:
    load_model(folder, kv_cache_dtype=FP8)
    add(folder, **scales)
    assert_refused(folder, message, kv_cache_dtype=FP8)


def test_scales_of_layers_that_differ(tmp_path: Path) -> None:
    """Each layer has as many as its cache has heads; one that reads another's K/V takes that one's."""
    save_checkpoint(FAMILIES["gemma4_moe"], tmp_path / "moe")
    add(tmp_path / "moe", 2, k_scale=torch.ones(2))
    assert_refused(
        tmp_path / "moe", r"layers.1.self_attn.k_scale: shape \[2\] in .*, expected 1 or 1 values", kv_cache_dtype=FP8
    )
    save_checkpoint(FAMILIES["gemma4_shared_kv"], tmp_path / "shared")
    scales = {LAYER.format(layer) + "v_scale": torch.full((2,), 1.0 + layer) for layer in range(3)}
    edit_tensors(tmp_path / "shared", lambda t: t.update(scales))
    executor = LlmExecutor.from_pretrained(tmp_path / "shared", kv_cache_dtype=FP8)
    found = [attention(executor.model, layer).v_scale for layer in range(5)]
    assert [scale.tolist() for scale in found if scale is not None] == [[one, one] for one in (1.0, 2.0, 3.0, 2.0, 3.0)]
    # Two layers of two heads of 16, and one of heads of 24, of five.
    needed = executor.capabilities().memory_requirements
    assert needed.total(1, 100, 5) - needed.total(1, 0, 5) >= 100 * 2 * 2 * (16 + 16 + 24)
    assert executor.info().num_layers == 5
    with pytest.raises(InvalidInputError, match="layer: 3 has no K/V of its own"):
        executor.kv_manager.k_cache(3)


@pytest.mark.parametrize("name", ["model.layers.2.self_attn.k_scale", "model.layers.0.self_attn.k_proj.v_scale"])
def test_scales_of_nothing(name: str, folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({name: torch.ones(1)}))
    assert_refused(folder, f"{name}: unexpected tensor in", kv_cache_dtype=FP8)


def test_a_configuration_that_quantises_the_cache_alone(folder: Path) -> None:
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    quantization = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    edit_config(folder, quantization_config=quantization)
    load_model(folder, kv_cache_dtype=FP8)
    for other, message in (
        (None, "config_groups without weights, and no kv_cache_scheme"),
        (scheme | {"type": "int"}, "kv_cache_scheme: type = 'int'"),
    ):
        edit_config(folder, quantization_config=quantization | {"kv_cache_scheme": other})
        assert_refused(folder, message, UnsupportedError, kv_cache_dtype=FP8)


def _amplify(tensors: Tensors, factors: torch.Tensor) -> None:
    """Give every KV head keys and values `factors` times as large, and take that back behind the cache."""
    rows = factors.repeat_interleave(32).unsqueeze(1)
    columns = factors.repeat_interleave(2 * 32).unsqueeze(0)  # two query heads share a KV head
    for layer in range(2):
        names = {part: f"{LAYER.format(layer)}{part}_proj.weight" for part in "qkvo"}
        tensors[names["k"]] *= rows
        tensors[names["v"]] *= rows
        tensors[names["q"]] /= columns.T
        tensors[names["o"]] /= columns


@pytest.mark.parametrize("factors", [(4096.0,), (1024.0, 16384.0)])
def test_scales_keep_large_keys_and_values_in_range(factors: tuple[float, ...], folder: Path) -> None:
    """Powers of two, so that the scaled cache holds the very codes of the checkpoint as it was."""
    scale = torch.tensor(factors)
    expected = load_model(folder, kv_cache_dtype=FP8).prefill("a", tokens(40))
    edit_tensors(folder, lambda t: _amplify(t, scale.expand(2)))
    saturated = load_model(folder, kv_cache_dtype=FP8).prefill("a", tokens(40))
    assert float((saturated - expected).abs().max() / expected.abs().max()) > 0.1
    add(folder, 2, k_scale=scale, v_scale=scale)
    assert_same_logits(load_model(folder, kv_cache_dtype=FP8).prefill("a", tokens(40)), expected)


def test_int8_has_scales_of_its_own(folder: Path) -> None:
    """Those of a checkpoint are of 8-bit floats."""
    add(folder, k_scale=torch.tensor(0.25), v_scale=torch.tensor(0.5))
    executor = LlmExecutor.from_pretrained(folder, kv_cache_dtype="int8", block_size=8)
    assert executor.kv_manager is not None
    assert executor.kv_manager.k_cache(0).dtype == torch.int8
    # K and V of 2 heads of 32 bytes and a float32.
    assert executor.capabilities().memory_requirements.kv_bytes_per_token_per_layer == 2 * 2 * (32 + 4)
    assert executor.kv_manager.stats().bytes_per_block == 2 * 8 * 2 * 2 * (32 + 4)
    for name in ("fp8_e5m2", "float8_e5m2", torch.float8_e5m2):
        layer = attention(load_model(folder, kv_cache_dtype=name))
        assert (layer.k_cache.dtype, layer.k_scale) == (torch.float8_e5m2, torch.tensor([0.25]))


def _as_int8(rows: torch.Tensor) -> torch.Tensor:
    step = rows.abs().amax(-1, keepdim=True) / 127
    return (rows / step).round() * step


def _as_int4(rows: torch.Tensor) -> torch.Tensor:
    """32 numbers have 16 levels; the one of largest magnitude is the lowest of them."""
    groups = rows.float().unflatten(-1, (-1, min(32, rows.shape[-1])))
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -8
    step = (largest.view(torch.int32) >> 16 << 16).view(torch.float32)
    return ((groups / step).round().clamp(-8, 7) * step).flatten(-2).to(rows.dtype)


def _as_nvfp4(rows: torch.Tensor) -> torch.Tensor:
    """16 numbers have the magnitudes of e2m1, times an e4m3 scale."""
    groups = rows.float().unflatten(-1, (-1, min(16, rows.shape[-1])))
    step = (groups.abs().amax(-1, keepdim=True) / 6).to(FP8).float()
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    nearest = (groups.abs() / step).unsqueeze(-1).sub(magnitudes).abs().argmin(-1)
    return (magnitudes[nearest] * step * groups.sign()).flatten(-2).to(rows.dtype)


def _as_scaled_fp8(rows: torch.Tensor) -> torch.Tensor:
    step = rows.abs().amax(-1, keepdim=True) / 448
    return (rows / step).to(FP8).to(rows.dtype) * step


ROUNDINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fp8": lambda rows: rows.to(FP8).to(rows.dtype),
    "fp8_e5m2": lambda rows: rows.to(torch.float8_e5m2).to(rows.dtype),
    "int8": _as_int8,
    "int4": _as_int4,
    "nvfp4": _as_nvfp4,
    "fp8_per_token_head": _as_scaled_fp8,
}
_FAMILIES = ("gemma3", "gemma4_shared_kv", "gpt_oss", "hunyuan_v1_dense", "llama", "mistral", "qwen3", "qwen3_moe")


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *((name, "fp8") for name in _FAMILIES),
        ("llama", "fp8_e5m2"),
        ("gemma3", "int8"),
        ("gemma4_shared_kv", "int8"),
        pytest.param("llama", "int4", marks=pytest.mark.thorough),
        pytest.param("gemma4_shared_kv", "int4", marks=pytest.mark.thorough),
        pytest.param("llama", "nvfp4", marks=pytest.mark.thorough),
        pytest.param("gpt_oss", "fp8_per_token_head", marks=pytest.mark.thorough),
        pytest.param("gemma3", "int8,nvfp4", marks=pytest.mark.thorough),
    ],
)
def test_logits_over_an_8_bit_cache(family: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' own logits, once its keys and values are rounded too; however the prompt is cut."""
    theirs = save_checkpoint(FAMILIES[family], tmp_path)
    module = sys.modules[type(theirs).__module__]
    exact = module.eager_attention_forward

    def rounded(layer: Any, query: Any, key: torch.Tensor, value: torch.Tensor, *rest: Any, **options: Any) -> Any:
        k_kind, _, v_kind = kind.partition(",")
        key, value = ROUNDINGS[k_kind](key), ROUNDINGS[v_kind or k_kind](value)
        return exact(layer, query, key, value, *rest, **options)

    prompt = tokens(40)
    unrounded = logits_of(theirs, prompt)[-1]
    monkeypatch.setattr(module, "eager_attention_forward", rounded)
    expected = logits_of(theirs, prompt)[-1]
    assert not torch.allclose(unrounded, expected, atol=1e-4 if "int8" in kind else 1e-2)
    model = load_model(tmp_path, kv_cache_dtype=kind, block_size=8)
    assert_rounded_alike(model.prefill("whole", prompt), expected, unrounded)
    model.unified_forward([UnifiedBatchItem("cut", prompt[:21], is_final_chunk=False)])
    model.unified_forward([UnifiedBatchItem("cut", prompt[21:39], pos_offset=21, is_final_chunk=False)])
    assert_rounded_alike(model.decode("cut", prompt[39], 39), expected, unrounded)


def test_layers_that_keep_the_dtype_of_the_weights(folder: Path) -> None:
    """With every layer kept, the logits are those of a plain cache; with none, they are not."""
    prompt = tokens(40)
    expected = load_model(folder).prefill("a", prompt)
    kept = load_model(folder, kv_cache_dtype="int8,int4", kv_cache_keep_layers="0,1").prefill("a", prompt)
    assert torch.equal(kept, expected)
    model = load_model(folder, kv_cache_dtype="int8,int4", kv_cache_keep_layers=[1])
    dtypes = [(attention(model, layer).k_cache.dtype, attention(model, layer).v_cache.dtype) for layer in range(2)]
    assert dtypes == [(torch.int8, torch.bits4x2), (model.dtype, model.dtype)]
    assert not torch.equal(model.prefill("a", prompt), expected)
    config = model.kv_manager.config
    # Per token 2 heads of 32 numbers: int8 with a float32, int4 with a bfloat16, and twice the weights' dtype.
    assert config.block_bytes(torch.int8) == config.block_size * 2 * (
        (32 + 4) + (16 + 2) + 2 * 32 * model.dtype.itemsize
    )
    for options, message in (
        ({"kv_cache_dtype": "int8,int4,int8"}, "kv_cache_dtype: 'int8,int4,int8', expected one dtype, or one of keys"),
        ({"kv_cache_keep_layers": "first"}, "kv_cache_keep_layers: 'first', expected layers such as '0,1,27'"),
        ({"kv_cache_keep_layers": [2]}, r"kv_cache_keep_layers: 2, expected layers .*: \[0, 1\]"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            load_model(folder, **options)


@pytest.mark.parametrize("kind", ["fp8", "nvfp4"])
def test_scales_of_a_checkpoint_skip_kept_layers(kind: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are of caches of 8 bits: nothing is told of a kept layer without scales, and no kernel gets them."""
    logits: list[torch.Tensor] = []
    for num_layers in (1, 2):
        add(folder, num_layers, k_scale=torch.tensor(0.25), v_scale=torch.tensor(0.5))
        model = load_model(folder, kv_cache_dtype=kind, kv_cache_keep_layers=[1])
        layer = attention(model, 1)
        assert layer.k_scale is layer.v_scale is layer.k_table_scale is layer.v_table_scale is None
        logits.append(model.prefill("a", tokens(40)))
    assert torch.equal(*logits)
    assert caplog.messages == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("rwkv7", {"kv_cache_dtype": "int8"}, "kv_cache_dtype: torch.int8, expected .*, as no layer has keys"),
        ("rwkv7", {"kv_cache_rotation": "hadamard"}, "kv_cache_rotation: 'hadamard', expected None, as no layer has"),
        ("rwkv7", {"kv_cache_keep_layers": [0]}, "kv_cache_keep_layers: .*, expected none, as no layer has keys"),
        ("qwen3_next", {"kv_cache_keep_layers": [0]}, r"kv_cache_keep_layers: 0, expected layers .*: \[1\]"),
        ("gemma4_shared_kv", {"kv_cache_keep_layers": [3]}, r"kv_cache_keep_layers: 3, expected .*: \[0, 1, 2\]"),
        ("deepseek_v2", {"kv_cache_dtype": "fp8,auto"}, "kv_cache_dtype: .*, expected one dtype for latents"),
        ("minimax_m3", {"kv_cache_dtype": "fp8,auto"}, "kv_cache_dtype: .*, expected one dtype beside an indexer"),
        ("deepseek_v4", {"kv_cache_keep_layers": [0]}, "kv_cache_keep_layers: .*, expected none for compressed"),
        ("lfm2", {"state_dtype": "int8"}, "state_dtype: torch.int8, expected float32 or None, as no layer has"),
    ],
)
def test_options_that_a_model_cannot_have(family: str, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    """They are refused at load, not ignored."""
    save_checkpoint(FAMILIES[family], tmp_path)
    with pytest.raises((InvalidInputError, UnsupportedError), match=message):
        load_model(tmp_path, **options)


def test_scales_of_a_checkpoint_for_nvfp4(folder: Path) -> None:
    """The largest magnitude is 448 times a scale of 8-bit floats, and 448 * 6 times one of NVFP4."""
    add(folder, 2, k_scale=torch.tensor(0.25), v_scale=torch.tensor([0.5, 0.75]))
    layer = attention(load_model(folder, kv_cache_dtype="nvfp4"))
    assert layer.k_table_scale is not None
    assert layer.v_table_scale is not None
    assert (layer.k_table_scale * 24, layer.v_table_scale * 8) == (1.0, 1.0)
    assert layer.k_scale is not None
    assert layer.k_scale.dtype == FP8
