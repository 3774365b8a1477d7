"""How much the ranks of a model send in a step, by arithmetic."""

from __future__ import annotations

from paged.models.layers.config import DecoderConfig


def step_bytes(
    config: DecoderConfig, *, num_sums: int, last_sums: int, size: int, itemsize: int, num_tokens: int, num_rows: int
) -> dict[str, int]:
    """Bytes that a rank gives to collectives in a step, by their kind, as `Ranks.num_bytes` counts them.

    num_sums: all-reduces of hidden states, see `Llama.num_sums`. last_sums: those of them in the last layer, which has
    the rows alone whose logits are gathered: `num_rows`. size: ranks. itemsize: of activations.
    """
    logits = -(-config.vocab_size // size)
    # Norms over all heads add up a float32 each, of queries and of keys.
    norms = sum(1 if one.shares_kv_with is not None else 2 for one in config.attention if one.qk_norm == "width")
    return {
        "sum": (num_tokens * (num_sums - last_sums) + num_rows * last_sums) * config.hidden_size * itemsize
        + num_tokens * 4 * norms,
        "gather": num_rows * logits * itemsize,
    }


def ring_bytes(num_bytes: dict[str, int], size: int) -> float:
    """What a rank sends for that: of an all-reduce, by a ring, every part but its own twice; what is gathered once."""
    return num_bytes["sum"] * 2 * (size - 1) / size + num_bytes["gather"]
