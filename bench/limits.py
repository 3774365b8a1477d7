"""The least time an operation can take: what it must compute and move, over what the device was measured to reach."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """What one call must do: matrix-product operations (element-wise ones are hidden behind memory), and bytes read
    and written, each once."""

    flops: int
    num_bytes: int


@dataclass(frozen=True)
class Ceilings:
    """Rates measured on the device, a second: bytes copied (reads plus writes), bytes read, operations of a matmul."""

    copy: float
    read: float
    matmul: float

    @property
    def bandwidth(self) -> float:
        """The faster of the two streams: an operation that mostly reads may beat the copy, never both."""
        return max(self.copy, self.read)

    def bound(self, cost: Cost) -> tuple[float, str]:
        """The least seconds for `cost` where memory and matrix units overlap, and which of the two sets them."""
        memory, matmul = cost.num_bytes / self.bandwidth, cost.flops / self.matmul
        return max(memory, matmul), "memory" if memory >= matmul else "matmul"


@dataclass(frozen=True)
class Speed:
    """What samples of a call say beside its limit. percent: bound_us over median_us."""

    median_us: float
    p20_us: float
    p80_us: float
    gb_per_s: float
    tflop_per_s: float
    bound_us: float
    bound_by: str
    percent: float


def speed(samples: Sequence[float], cost: Cost, limits: Ceilings) -> Speed:
    """The speed of a call that took `samples` seconds, at least two of them."""
    deciles = statistics.quantiles(samples, n=10, method="inclusive")
    median = statistics.median(samples)
    bound, bound_by = limits.bound(cost)
    return Speed(
        median_us=median * 1e6,
        p20_us=deciles[1] * 1e6,
        p80_us=deciles[7] * 1e6,
        gb_per_s=cost.num_bytes / median / 1e9,
        tflop_per_s=cost.flops / median / 1e12,
        bound_us=bound * 1e6,
        bound_by=bound_by,
        percent=100 * bound / median,
    )


def attention_cost(
    lengths: Sequence[tuple[int, int]],
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    element_size: int,
) -> Cost:
    """Causal attention of one layer over (query length q, key length L) a sequence, L with the queries included.

    With the context c = L - q a sequence has P = q c + q (q + 1) / 2 pairs of a query and a key it sees; each pair and
    query head takes 2 D operations for its score and 2 D for its value. Queries are read and outputs written, K, V and
    4-byte block ids are read once. Partial results of split sequences are overhead and do not count.
    """
    pairs = sum(q * (seq_len - q) + q * (q + 1) // 2 for q, seq_len in lengths)
    elements = sum(2 * q * num_q_heads + 2 * seq_len * num_kv_heads for q, seq_len in lengths) * head_dim
    num_blocks = sum(-(-seq_len // block_size) for _, seq_len in lengths)
    return Cost(4 * num_q_heads * head_dim * pairs, elements * element_size + 4 * num_blocks)


def moe_cost(
    entries_per_expert: Sequence[int],
    *,
    num_tokens: int,
    hidden_size: int,
    intermediate_size: int,
    element_size: int,
    expert_bytes: int | None = None,
) -> Cost:
    """The three products of every routed entry, without padding: F = 6 (T K) H I.

    Weights of experts that got entries are read once, hidden states read and written once; activations between the
    products and the parts that are summed after them are overhead and do not count. expert_bytes: of an expert's
    quantised weights and their scales.
    """
    active = sum(entries > 0 for entries in entries_per_expert)
    area = hidden_size * intermediate_size
    if expert_bytes is None:
        expert_bytes = 3 * area * element_size
    num_bytes = active * expert_bytes + 2 * num_tokens * hidden_size * element_size
    return Cost(6 * sum(entries_per_expert) * area, num_bytes)
