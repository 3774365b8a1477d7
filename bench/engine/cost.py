"""What a model must read and multiply: its weights, and the keys and values behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from paged import LlmExecutor
from paged.bench.limits import Cost
from paged.models.paged_lm import PagedCausalLM


class Weights(NamedTuple):
    """Of layers and of the head: bytes that a step reads, and multiplications of a row."""

    layer_bytes: int
    layer_products: int
    head_bytes: int
    head_products: int


def weights(executor: LlmExecutor, config: Mapping[str, Any], num_tokens: int) -> Weights:
    """Those of a step of so many tokens, of which experts count that these reach when they are spread evenly."""
    assert isinstance(executor.model, PagedCausalLM)
    num_experts, top_k = config.get("num_experts", 1), config.get("num_experts_per_tok", 1)
    reached = 1 - (1 - top_k / num_experts) ** num_tokens
    head_name = "embed_tokens" if config["tie_word_embeddings"] else "lm_head.weight"
    num_bytes = products = 0.0
    head_bytes = head_products = 0
    for name, weight in executor.model.network.named_parameters():
        size = weight.numel() * weight.element_size()
        is_expert = name.endswith((".w1", ".w2"))
        if name == head_name:
            head_bytes, head_products = size, weight.numel()
        elif name != "embed_tokens":
            num_bytes += size * (reached if is_expert else 1)
            products += weight.numel() * (top_k / num_experts if is_expert else 1)
    return Weights(int(num_bytes), int(products), head_bytes, head_products)


def generation(
    executor: LlmExecutor, config: Mapping[str, Any], prompt_lengths: Sequence[int], new_tokens: int
) -> Cost:
    """The least of greedy generation: one step for all prompts, then one for each token of all sequences.

    Every step reads the weights, a decode its keys and values too; prompts and decodes are multiplied, and with the
    keys before them.
    """
    assert executor.kv_manager is not None
    count, prompt_tokens, decodes = len(prompt_lengths), sum(prompt_lengths), new_tokens - 1
    first, later = (weights(executor, config, num_tokens) for num_tokens in (prompt_tokens, count))
    stats, cache = executor.kv_manager.stats(), executor.kv_manager.config
    kv_bytes = stats.bytes_per_block // cache.block_size
    read_tokens = sum(decodes * length + decodes * (decodes + 1) // 2 for length in prompt_lengths)
    pairs = sum((length + decodes) * (length + decodes + 1) // 2 for length in prompt_lengths)
    num_bytes = first.layer_bytes + decodes * later.layer_bytes + new_tokens * later.head_bytes + read_tokens * kv_bytes
    products = (prompt_tokens + decodes * count) * later.layer_products + new_tokens * count * later.head_products
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    attention = 2 * pairs * config["num_hidden_layers"] * config["num_attention_heads"] * head_dim
    return Cost(2 * (products + attention), num_bytes)
