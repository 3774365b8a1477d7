"""The bytes that a model must read and the multiplications that it must do: weights, keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from paged import LlmExecutor
from paged.bench.limits import Cost
from paged.models.paged_lm import PagedCausalLM


class Weights(NamedTuple):
    """Bytes that a step reads and multiplications of a row, for the layers and for the head.

    last_products: multiplications of the last layer except K and V, which only rows with logits need.
    """

    layer_bytes: int
    layer_products: int
    last_products: int
    head_bytes: int
    head_products: int


def weights(executor: LlmExecutor, config: Mapping[str, Any], num_tokens: int) -> Weights:
    """Return the weights of a step of `num_tokens`; experts count if evenly spread tokens reach them."""
    assert isinstance(executor.model, PagedCausalLM)
    num_experts, top_k = config.get("num_experts", 1), config.get("num_experts_per_tok", 1)
    reached = 1 - (1 - top_k / num_experts) ** num_tokens
    head_name = "lm_head.weight"
    if config["tie_word_embeddings"]:
        head_name = "embed_tokens"
    last_products = -2.0 * config["hidden_size"] * config["num_key_value_heads"] * _head_dim(config)
    num_bytes = products = 0.0
    head_bytes = head_products = 0
    for name, weight in executor.model.network.named_parameters():
        size = weight.numel() * weight.element_size()
        if name == head_name:
            head_bytes, head_products = size, weight.numel()
        elif name != "embed_tokens":
            share_read = share_of_row = 1.0
            if name.endswith((".w1", ".w2")):  # weights of experts
                share_read, share_of_row = reached, top_k / num_experts
            row_products = share_of_row * weight.numel()
            num_bytes += share_read * size
            products += row_products
            if name.startswith(f"layers.{config['num_hidden_layers'] - 1}."):
                last_products += row_products
    return Weights(int(num_bytes), int(products), int(last_products), head_bytes, head_products)


def generation(
    executor: LlmExecutor, config: Mapping[str, Any], prompt_lengths: Sequence[int], new_tokens: int
) -> Cost:
    """Return the least cost of greedy generation: one step for all prompts, then one step per token of all sequences.

    Every step reads the weights, and a decode also reads its keys and values. All tokens are multiplied with the
    weights and with the keys before them. The last layer runs only for the last token of a prompt.
    """
    assert executor.kv_manager is not None
    count, prompt_tokens, decodes = len(prompt_lengths), sum(prompt_lengths), new_tokens - 1
    first, later = weights(executor, config, prompt_tokens), weights(executor, config, count)
    stats, cache = executor.kv_manager.stats(), executor.kv_manager.config
    kv_bytes = stats.bytes_per_block // cache.block_size
    read_tokens = pairs = last_pairs = 0
    for length in prompt_lengths:
        all_pairs = (length + decodes) * (length + decodes + 1) // 2
        read_tokens += decodes * length + decodes * (decodes + 1) // 2
        pairs += all_pairs
        last_pairs += all_pairs - length * (length - 1) // 2
    num_bytes = first.layer_bytes + decodes * later.layer_bytes + new_tokens * later.head_bytes + read_tokens * kv_bytes
    products = (prompt_tokens + decodes * count) * later.layer_products + new_tokens * count * later.head_products
    products -= (prompt_tokens - count) * later.last_products
    attention = 2 * (pairs * (config["num_hidden_layers"] - 1) + last_pairs)
    attention *= config["num_attention_heads"] * _head_dim(config)
    return Cost(2 * (products + attention), num_bytes)


def _head_dim(config: Mapping[str, Any]) -> int:
    size: int = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return size
