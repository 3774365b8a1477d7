"""transformers' continuous batching on our attention and experts gives the tokens of its own."""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, MiMoV2FlashConfig
from transformers.generation.continuous_batching import continuous_api
from transformers.integrations.moe import batched_mm_experts_forward
from transformers.models.aria.modeling_aria import AriaExperts, AriaTextConfig
from transformers.models.openai_privacy_filter.modeling_openai_privacy_filter import (
    OpenAIPrivacyFilterConfig,
    OpenAIPrivacyFilterExperts,
)

from paged import UnsupportedError
from paged.interop import transformers as interop
from tests.models.families import FAMILIES, tokens

# Over several pages of 8 and sliding windows of 8; 40 tokens need two chunks of a batch of 32.
PROMPTS = [tokens(length, seed=length) for length in (40, 1, 16, 17, 33)]

# In its layers with a window it has twice as many KV heads, for which the cache of transformers has no room.
UNEQUAL = MiMoV2FlashConfig(
    v_head_dim=16,
    layer_types=["full_attention"] * 2,
    mlp_layer_types=["dense"] * 2,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=FAMILIES["llama"].vocab_size,
    initializer_range=0.1,
)


def _model(family: str, device: torch.device) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(deepcopy(FAMILIES[family])).eval().to(device)


def _generate(model: Any, attention: str, experts: str, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    model.set_attn_implementation(attention)
    if model.config.model_type in ("gpt_oss", "qwen3_moe"):
        model.set_experts_implementation(experts)
    results = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(page_size=8, num_blocks=64, max_batch_tokens=32),
        progress_bar=False,
    )
    assert [result.error for result in results.values()] == [None] * len(prompts)
    return [results[name].generated_tokens for name in sorted(results)]


@pytest.mark.parametrize("family", ["gpt_oss", "llama", "qwen3", "qwen3_moe", "qwen3_window_in_one_layer"])
def test_generate_batch_gives_the_same_tokens(
    family: str, backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    interop.register()
    interop.register()
    model = _model(family, device)
    # The interpreter takes a second a forward.
    prompts, num_tokens = (PROMPTS, 12) if backend == "torch" or device.type == "cuda" else (PROMPTS[-2:], 2)
    theirs = "eager" if family == "gpt_oss" else "sdpa"  # which has no sinks
    expected = _generate(model, theirs, "eager", prompts, num_tokens)
    calls = {"paged_attention": 0, "flash_attn_varlen_func": 0, "fused_moe": 0}

    def counted(name: str) -> Any:
        function = getattr(interop, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    for name in calls:
        monkeypatch.setattr(interop, name, counted(name))
    assert _generate(model, interop.NAME, interop.NAME, prompts, num_tokens) == expected
    assert calls["paged_attention"] > 0
    assert (calls["flash_attn_varlen_func"] > 0) == (family in ("gpt_oss", "qwen3_window_in_one_layer"))
    assert (calls["fused_moe"] > 0) == (family in ("gpt_oss", "qwen3_moe"))


@pytest.mark.parametrize("sizes", ["512", "24 and 16"])
def test_head_sizes(sizes: str, backend: str, device: torch.device) -> None:
    """The tokens of transformers without its continuous batching, which takes keys and values of one size."""
    config = deepcopy(FAMILIES["llama"] if sizes == "512" else UNEQUAL)
    config.head_dim = int(sizes.split()[0])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().to(device)
    num_tokens, prompts = (6 if backend == "torch" else 2), PROMPTS[-2:]
    greedy = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        expected.append(model.generate(ids, generation_config=greedy)[0, len(prompt) :].tolist())
    interop.register()
    assert _generate(model, interop.NAME, interop.NAME, prompts, num_tokens) == expected


@pytest.mark.parametrize(
    ("key", "value", "has_window"), [((2, 192), (2, 128), False), ((4, 64), (4, 64), False), ((2, 64), (2, 65), False),
                                     ((2, 64), (2, 48), True)]
)  # fmt: skip
def test_heads_that_the_cache_has_no_room_for_are_refused(
    key: tuple[int, int], value: tuple[int, int], has_window: bool
) -> None:
    """As latent attention's in its expanded form, and those of layers with more heads than others."""
    allocator = SimpleNamespace(num_key_value_heads=2, head_dim=64, supports_block_table=not has_window)
    cache = SimpleNamespace(layer_to_allocator={0: allocator})
    rows = [torch.zeros(1, heads, 3, size) for heads, size in ((4, key[1]), key, value)]
    with pytest.raises(UnsupportedError, match=r"key: .*value: .*2 heads of 64"):
        interop.PagedTritonAttention()(
            SimpleNamespace(layer_idx=0, is_causal=True), *rows, None, cache=cache, max_length_q=3
        )


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_experts_equal_those_of_transformers(family: str, device: torch.device) -> None:
    interop.register()
    model = _model(family, device)
    inputs = torch.tensor([PROMPTS[0]], device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" in name:  # values beyond gpt-oss's clamps, and its biases, which begin at 0
                parameter.normal_(std=0.5)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        expected = model(inputs).logits
        model.set_experts_implementation(interop.NAME)
        for _ in range(2):
            torch.testing.assert_close(model(inputs).logits, expected)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    with pytest.raises(UnsupportedError, match="no_grad"):
        model(inputs)


def test_clamped_experts_of_both_orders(device: torch.device) -> None:
    """gpt-oss's weights alternate, the privacy filter's stand one half behind the other; Aria's are SiLU's."""
    privacy_filter = OpenAIPrivacyFilterConfig(hidden_size=64, intermediate_size=32, num_local_experts=4)
    aria = AriaTextConfig(hidden_size=64, intermediate_size=32, moe_num_experts=4)
    modules = (
        _model("gpt_oss", device).model.layers[0].mlp.experts,
        OpenAIPrivacyFilterExperts(privacy_filter),
        AriaExperts(aria),
    )
    for experts in modules:
        experts = experts.to(device)
        experts.config._experts_implementation = "eager"
        ids = torch.tensor([[0, 3], [1, 2], [3, 1]], device=device)
        arguments = torch.randn(3, 64, device=device), ids, torch.rand(3, 2, device=device)
        with torch.no_grad():
            for parameter in experts.parameters():
                parameter.normal_()
            expected = experts(*arguments)
            torch.testing.assert_close(
                interop.fused_experts_forward(experts, *arguments), expected, rtol=1e-4, atol=1e-3
            )


def test_experts_with_biases(device: torch.device) -> None:
    experts = _model("qwen3_moe", device).model.layers[0].mlp.experts
    experts.has_bias = True
    experts.gate_up_proj_bias = torch.nn.Parameter(torch.randn(4, 64, device=device))
    experts.down_proj_bias = torch.nn.Parameter(torch.randn(4, 64, device=device))
    ids = torch.tensor([[0, 3], [1, 2], [3, 1]], device=device)
    arguments = torch.randn(3, 64, device=device), ids, torch.rand(3, 2, device=device)
    with torch.no_grad():
        expected = batched_mm_experts_forward(experts, *arguments)
        torch.testing.assert_close(interop.fused_experts_forward(experts, *arguments), expected)


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [
        ("gpt_oss", "limit", 6.0),
        ("gpt_oss", "alpha", 1.0),
        ("gpt_oss", "is_concatenated", True),
        ("gpt_oss", "has_gate", False),
        ("qwen3_moe", "has_gate", False),
        ("qwen3_moe", "is_concatenated", False),
        ("qwen3_moe", "is_transposed", True),
        ("qwen3_moe", "has_post_expert_norm", True),
        ("qwen3_moe", "act_fn", torch.nn.GELU()),
    ],
)
def test_other_experts_are_refused_by_name(family: str, name: str, value: Any) -> None:
    experts = _model(family, torch.device("cpu")).model.layers[0].mlp.experts
    arguments = torch.randn(3, 64), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
    with torch.no_grad():
        assert interop.fused_experts_forward(experts, *arguments).shape == (3, 64)
        setattr(experts, name, value)
        with pytest.raises(UnsupportedError, match=name):
            interop.fused_experts_forward(experts, *arguments)


def test_attention_without_the_cache_of_generate_batch_is_refused() -> None:
    interop.register()
    model = _model("llama", torch.device("cpu"))
    inputs = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        model(inputs)
        model.set_attn_implementation(interop.NAME)
        with pytest.raises(UnsupportedError, match="cache"):
            model(inputs)


@pytest.mark.parametrize(
    ("name", "value"), [("attention_mask", torch.ones(1)), ("position_bias", torch.ones(1)), ("dropout", 0.1)]
)
def test_other_attention_arguments_are_refused_by_name(name: str, value: Any) -> None:
    arguments = {"attention_mask": None, "cache": object(), name: value}
    attention = interop.PagedTritonAttention()
    with pytest.raises(UnsupportedError, match=name):
        attention(SimpleNamespace(), *(torch.zeros(1, 1, 1, 8),) * 3, **arguments)


def test_another_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    interop.register()
    monkeypatch.delattr(continuous_api, "is_flash_attention_requested")
    with pytest.raises(UnsupportedError, match="continuous_api"):
        interop.register()
