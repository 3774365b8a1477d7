"""transformers' continuous batching on our attention and experts gives the tokens of its plain `generate`."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paged import UnsupportedError
from tests.models.families import FAMILIES, PARTS, tokens, with_pictures
from tests.operations import stand_in
from tests.tolerance import assert_within

# Over several pages of 8 and sliding windows of 8; 40 tokens need two chunks of a batch of 32.
PROMPTS = [tokens(length, seed=length) for length in (40, 1, 16, 17, 33)]
CPU = torch.device("cpu")


@pytest.fixture
def interop() -> Any:
    """Our module, registered twice, as which it may be; transformers is imported with it, for seconds."""
    from paged.interop import transformers

    transformers.register()
    transformers.register()
    return transformers


def _model(family: str, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, MiMoV2FlashConfig

    kind = AutoModelForCausalLM
    if family == "values of 16":
        # In layers with a window it has twice as many KV heads, for which the cache of transformers has no room.
        kinds = {"layer_types": ["full_attention"] * 2, "mlp_layer_types": ["dense"] * 2}
        sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
        sizes |= {"intermediate_size": 96, "vocab_size": FAMILIES["llama"].vocab_size, "initializer_range": 0.1}
        config = MiMoV2FlashConfig(head_dim=24, v_head_dim=16, **kinds, **sizes)
    elif family == "qwen3_5 with images":
        config = with_pictures("qwen3_5", PARTS["qwen3_5"].to_dict())
        kind = AutoModelForImageTextToText
    else:
        config = FAMILIES["llama" if family == "heads of 512" else family]
        if family == "heads of 512":
            config.head_dim = 512
    torch.manual_seed(0)
    return kind.from_config(config).eval().to(device)


def _params(kernels: str, names: str, marks: Any = ()) -> list[Any]:
    return [pytest.param(name, kernels, marks=marks) for name in names.split(", ")]


@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        *_params("torch", "gpt_oss, values of 16"),
        *_params("triton", "qwen3_window_in_one_layer"),
        *_params("torch", "qwen3_moe, heads of 512", pytest.mark.thorough),
        *_params("triton", "gpt_oss, values of 16", pytest.mark.thorough),
    ],
)
def test_generate_batch_gives_the_same_tokens(
    family: str, kernels: str, interop: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    monkeypatch.setenv("PAGED_BACKEND", kernels)
    model = _model(family, device)
    # The interpreter takes a second a forward.
    prompts, num_tokens = (PROMPTS, 8) if kernels == "torch" or device.type == "cuda" else (PROMPTS[3:4], 2)
    greedy = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        expected.append(model.generate(ids, generation_config=greedy)[0, len(prompt) :].tolist())
    calls = dict.fromkeys(("paged_attention", "flash_attn_varlen_func", "fused_moe"), 0)

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        return stand_in(call)

    for name in calls:
        monkeypatch.setattr(interop, name, counted(name, getattr(interop, name)))
    model.set_attn_implementation(interop.NAME)
    has_experts = family in ("gpt_oss", "qwen3_moe")
    if has_experts:
        model.set_experts_implementation(interop.NAME)
    results = model.generate_batch(
        prompts,
        generation_config=greedy,
        continuous_batching_config=ContinuousBatchingConfig(page_size=8, num_blocks=64, max_batch_tokens=32),
        progress_bar=False,
    )
    assert [result.error for result in results.values()] == [None] * len(prompts)
    assert [results[name].generated_tokens for name in sorted(results)] == expected
    assert calls["paged_attention"] > 0
    assert (calls["flash_attn_varlen_func"] > 0) == (family in ("gpt_oss", "qwen3_window_in_one_layer"))
    assert (calls["fused_moe"] > 0) == has_experts


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["qwen3_5 with images", "lfm2_moe"])
def test_hybrid_models_are_batched_with_the_weights_they_have(
    family: str, interop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers refuses their layers; its `generate`, a prompt at a time, gives the expected tokens."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    monkeypatch.setenv("PAGED_BACKEND", "torch")
    model = _model(family, CPU)
    greedy = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(max_batch_tokens=32, return_logprobs=True)
    options = {"generation_config": greedy, "continuous_batching_config": batching}
    for _ in range(2):
        expected = []
        for prompt in PROMPTS:
            expected.append(model.generate(torch.tensor([prompt]), generation_config=greedy)[0, len(prompt) :].tolist())
        attention = model.config._attn_implementation
        model.set_attn_implementation(interop.NAME)
        results = model.generate_batch(PROMPTS, **options)
        assert list(results) == [f"req_{index}" for index in range(len(PROMPTS))]
        assert [result.generated_tokens for result in results.values()] == expected
        assert all(len(result.logprobs) == 6 and max(result.logprobs) <= 0 for result in results.values())
        model.set_attn_implementation(attention)
        with torch.no_grad():
            model.get_input_embeddings().weight.copy_(model.get_input_embeddings().weight.flip(0))
    model.set_attn_implementation(interop.NAME)
    with pytest.raises(UnsupportedError, match="num_beams"):
        model.generate_batch(PROMPTS, generation_config=GenerationConfig(num_beams=2))


@pytest.mark.thorough  # 6 s
def test_implementations_of_transformers_keep_their_cache(interop: Any) -> None:
    """As before `register`, also with layers that have a window, and after the same model ran on `paged_triton`."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = _model("qwen3_window_in_one_layer", CPU)
    greedy = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0)
    pages = ContinuousBatchingConfig(page_size=8, num_blocks=64, max_batch_tokens=32)
    options = {"generation_config": greedy, "continuous_batching_config": pages, "progress_bar": False}
    tokens_of = {}
    for name in ("sdpa", interop.NAME, "eager"):
        model.set_attn_implementation(name)
        results = model.generate_batch(PROMPTS, **options)
        assert [result.error for result in results.values()] == [None] * len(PROMPTS), name
        tokens_of[name] = [results[request_id].generated_tokens for request_id in sorted(results)]
    assert tokens_of["sdpa"] == tokens_of[interop.NAME] == tokens_of["eager"]


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_moe", "aria", "biases"])
def test_experts_equal_those_of_transformers(kind: str, interop: Any, device: torch.device) -> None:
    """gpt-oss's weights alternate; Aria's are SiLU's."""
    from transformers.integrations.moe import batched_mm_experts_forward
    from transformers.models.aria import modeling_aria as aria

    sizes = {"hidden_size": 64, "intermediate_size": 32}
    if kind == "aria":
        experts = aria.AriaExperts(aria.AriaTextConfig(**sizes, moe_num_experts=4))
    else:
        experts = _model("qwen3_moe" if kind == "biases" else kind, CPU).model.layers[0].mlp.experts
    if kind == "biases":
        experts.has_bias = True
        experts.gate_up_proj_bias, experts.down_proj_bias = (torch.nn.Parameter(torch.empty(4, 64)) for _ in range(2))
    experts = experts.to(device)
    experts.config._experts_implementation = "eager"
    ids = torch.tensor([[0, 3], [1, 2], [3, 1]], device=device)
    arguments = torch.randn(3, 64, device=device), ids, torch.rand(3, 2, device=device)
    with torch.no_grad():
        for parameter in experts.parameters():  # values beyond gpt-oss's clamps
            parameter.normal_()
        before = {name: value.clone() for name, value in experts.state_dict().items()}
        expected = batched_mm_experts_forward(experts, *arguments) if kind == "biases" else experts(*arguments)
        for _ in range(2):
            found = interop.fused_experts_forward(experts, *arguments)
            assert_within(found, expected, 1e-4 * expected.abs().max())
    for name, value in experts.state_dict().items():
        assert torch.equal(value, before[name]), name
    with pytest.raises(UnsupportedError, match="no_grad"):
        interop.fused_experts_forward(experts, *arguments)


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [
        ("gpt_oss", "limit", 6.0),
        ("gpt_oss", "is_concatenated", True),
        ("qwen3_moe", "has_gate", False),
        ("qwen3_moe", "is_transposed", True),
        ("qwen3_moe", "has_post_expert_norm", True),
    ],
)
def test_other_experts_are_refused_by_name(family: str, name: str, value: Any, interop: Any) -> None:
    experts = _model(family, CPU).model.layers[0].mlp.experts
    arguments = torch.randn(3, 64), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
    setattr(experts, name, value)
    with torch.no_grad(), pytest.raises(UnsupportedError, match=name):
        interop.fused_experts_forward(experts, *arguments)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, torch.ones(1)) for name in ("attention_mask", "position_bias", "indices", "block_indices", "sinks")),
        ("dropout", 0.1),
        ("cache", None),
    ],
)
def test_other_attention_arguments_are_refused_by_name(name: str, value: Any, interop: Any) -> None:
    arguments = {"attention_mask": None, "cache": object(), name: value}
    with pytest.raises(UnsupportedError, match=name):
        interop.PagedTritonAttention()(SimpleNamespace(), *(torch.zeros(1, 1, 1, 8),) * 3, **arguments)


@pytest.mark.parametrize(
    ("key", "value", "has_window"), [((2, 192), (2, 128), False), ((4, 64), (4, 64), False), ((2, 64), (2, 48), True)]
)
def test_heads_that_the_cache_has_no_room_for_are_refused(
    key: tuple[int, int], value: tuple[int, int], has_window: bool, interop: Any
) -> None:
    """As latent attention's in its expanded form, and those of layers with more heads than others."""
    allocator = SimpleNamespace(num_key_value_heads=2, head_dim=64, supports_block_table=not has_window)
    cache = SimpleNamespace(layer_to_allocator={0: allocator})
    rows = [torch.zeros(1, heads, 3, size) for heads, size in ((4, key[1]), key, value)]
    module = SimpleNamespace(layer_idx=0, is_causal=True)
    with pytest.raises(UnsupportedError, match=r"key: .*value: .*2 heads of 64"):
        interop.PagedTritonAttention()(module, *rows, None, cache=cache, max_length_q=3)


def test_another_transformers_is_refused(interop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.generation.continuous_batching import continuous_api

    monkeypatch.delattr(continuous_api, "is_flash_attention_requested")
    with pytest.raises(UnsupportedError, match="continuous_api"):
        interop.register()
    monkeypatch.undo()
    monkeypatch.setattr(interop, "_UPDATE", lambda self, key_states, value_states: None)
    with pytest.raises(UnsupportedError, match=r"PagedAttentionCache\.update"):
        interop.register()
