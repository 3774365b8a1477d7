"""Cases of the attention benchmark: batches, their tensors, and the expected results.

A step holds what the layers of a forward share: lengths, block table, plan. Each layer has its own queries and caches.
So, as in a model, no layer finds its data in the device's cache because of the layer before.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

import paged
from paged.bench.limits import Cost
from paged.bench.timing import Call
from paged.errors import InvalidInputError
from paged.kernels.attention import definition

# Largest number of layers that a case rotates through, even if they do not fill the cache.
MAX_LAYERS = 512
_SHAPE = re.compile(
    r"(decode|prefill|mixed):(\d+x(?:\d+of)?\d+(?:\+\d+x(?:\d+of)?\d+)*)(?:,h(\d+)_(\d+)|,d(\d+)|,b(\d+))*"
)
Group = tuple[int, int, int]
"""Sequences of one shape: their number, query length, and key length with the queries included."""


def attention_cost(
    lengths: Sequence[tuple[int, int]],
    num_q_heads: int,
    head_dims: tuple[int, int],
    itemsize: int,
    row_bytes: int,
    block_size: int,
) -> Cost:
    """Return the cost of causal attention over sequences of these query and key lengths.

    A pair is a query and a key that it sees. Each pair and query head takes 2 D operations for the score and 2 Dv for
    the value. Queries are read and outputs written; K, V and 4-byte block ids are read once. Partial results of split
    sequences are overhead and do not count. row_bytes: of a token's K and V in the cache.
    """
    pairs = moved = num_blocks = 0
    for q_len, seq_len in lengths:
        pairs += q_len * (seq_len - q_len) + q_len * (q_len + 1) // 2
        moved += q_len * num_q_heads * sum(head_dims) * itemsize + seq_len * row_bytes
        num_blocks += -(-seq_len // block_size)
    return Cost(2 * num_q_heads * sum(head_dims) * pairs, moved + 4 * num_blocks)


@dataclass(frozen=True)
class AttentionCase:
    """One row. kind: "prefill" (whole prompts), "decode" (one query per sequence) or "mixed" (anything else).

    v_head_dim: 0 if values are as wide as keys. latent: whether a value is the beginning of its key, stored once.
    """

    kind: str
    batch: str
    groups: tuple[Group, ...]
    heads: tuple[int, int] = (32, 8)
    block_size: int = 16
    head_dim: int = 128
    v_head_dim: int = 0
    latent: bool = False

    @property
    def name(self) -> str:
        name = f"{self.kind}.{self.batch}.h{self.heads[0]}_{self.heads[1]}.b{self.block_size}"
        head_dim, v_head_dim = self.head_dims
        if head_dim != v_head_dim:
            return f"{name}.d{head_dim}_{v_head_dim}"
        if head_dim != 128:
            return f"{name}.d{head_dim}"
        return name

    @property
    def head_dims(self) -> tuple[int, int]:
        """Head sizes of keys and of values."""
        return self.head_dim, self.v_head_dim or self.head_dim

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """Query and key length of each sequence."""
        lengths = []
        for count, q_len, seq_len in self.groups:
            lengths += [(q_len, seq_len)] * count
        return lengths

    @property
    def is_uniform(self) -> bool:
        """Whether all sequences have one length and are all whole prompts or all decode steps, as dense peers need."""
        _, q_len, seq_len = self.groups[0]
        return len(self.groups) == 1 and q_len in (1, seq_len)

    def cost(self, dtype: torch.dtype, lengths: Sequence[tuple[int, int]] | None = None) -> Cost:
        """Return the cost of causal attention of one layer over the batch, or over some `lengths` of it.

        See `attention_cost`.
        """
        if lengths is None:
            lengths = self.lengths
        num_q_heads, num_kv_heads = self.heads
        kv_dims = sum(self.head_dims)
        if self.latent:
            kv_dims = self.head_dim
        row_bytes = num_kv_heads * kv_dims * dtype.itemsize
        return attention_cost(lengths, num_q_heads, self.head_dims, dtype.itemsize, row_bytes, self.block_size)

    def small(self) -> AttentionCase:
        """Return the batch at a size for CPUs: at most 4 sequences of a shape, a 64th of the lengths."""
        groups = []
        shapes = []
        for count, q_len, seq_len in self.groups:
            count, seq_len = min(count, 4), seq_len // 64
            if q_len > 8:
                q_len //= 64
            groups.append((count, q_len, seq_len))
            if q_len in (1, seq_len):
                shapes.append(f"{count}x{seq_len}")
            else:
                shapes.append(f"{count}x{q_len}of{seq_len}")
        batch = "+".join(shapes)
        if self.latent:
            batch = f"latents_{batch}"
        return dataclasses.replace(self, batch=batch, groups=tuple(groups))

    def tensors(self, device: torch.device, dtype: torch.dtype, num_layers: int) -> tuple[Step, list[Layer]]:
        """Make random tensors on the device, with block tables shuffled through the whole pool."""
        blocks_of = [-(-seq_len // self.block_size) for _, seq_len in self.lengths]
        # A multiple of 16 columns, like a server's table with room for its longest sequence.
        table = torch.zeros(len(blocks_of), -(-max(blocks_of) // 16) * 16, dtype=torch.int32)
        ids = torch.randperm(sum(blocks_of), dtype=torch.int32) + 1  # block 0 is never handed out
        for seq, blocks in enumerate(ids.split(blocks_of)):
            table[seq, : len(blocks)] = blocks
        q_lens, seq_lens = torch.tensor(self.lengths, dtype=torch.int32).unbind(1)
        step = Step(
            case=self,
            block_table=table.to(device),
            cu_seqlens_q=functional.pad(q_lens.cumsum(0, dtype=torch.int32), (1, 0)).to(device),
            seq_lens=seq_lens.contiguous().to(device),
            max_seqlen_q=int(q_lens.max()),
            max_seqlen_k=int(seq_lens.max()),
        )
        num_q_heads, num_kv_heads = self.heads
        head_dim, v_head_dim = self.head_dims
        rows = (sum(blocks_of) + 1, self.block_size, num_kv_heads)
        layers = []
        for _ in range(num_layers):
            q = torch.randn(int(q_lens.sum()), num_q_heads, head_dim, device=device, dtype=dtype)
            k_cache = torch.randn(*rows, head_dim, device=device, dtype=dtype)
            v_cache = k_cache[..., :v_head_dim]
            if not self.latent:
                v_cache = torch.randn(*rows, v_head_dim, device=device, dtype=dtype)
            layers.append(Layer(q, k_cache, v_cache))
        return step, layers


@dataclass(frozen=True)
class Step:
    """The tensors that the layers of a forward share, as `paged_attention` takes them; maxima are exact."""

    case: AttentionCase
    block_table: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int

    @property
    def arguments(self) -> dict[str, Any]:
        """The shared arguments of `paged_attention`, without the plan."""
        names = ("block_table", "cu_seqlens_q", "seq_lens", "max_seqlen_q")
        return {name: getattr(self, name) for name in names}

    def plan(self) -> paged.AttentionPlan:
        return paged.AttentionPlan(
            self.cu_seqlens_q, self.seq_lens, max_seqlen_q=self.max_seqlen_q, max_seqlen_k=self.max_seqlen_k
        )


@dataclass(frozen=True)
class Layer:
    """One layer's tensors."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor


def _attend(step: Step, layer: Layer, plan: paged.AttentionPlan) -> Any:
    if not step.case.latent:
        return paged.paged_attention(**vars(layer), **step.arguments, plan=plan)
    sizes: dict[str, Any] = {"v_head_dim": step.case.v_head_dim, "softmax_scale": step.case.head_dim**-0.5}
    return paged.paged_mla_attention(layer.q, layer.k_cache.squeeze(2), **sizes, **step.arguments, plan=plan)


def ours(step: Step, layers: list[Layer]) -> list[Call]:
    """Return calls of attention with a plan that the layers share: the cost of one more layer."""
    plan = step.plan()
    return [functools.partial(_attend, step, layer, plan) for layer in layers]


def ours_with_planning(step: Step, layers: list[Layer]) -> list[Call]:
    """Return calls of attention with a plan of each call: the cost of a step's first layer."""

    def plan_and_attend(layer: Layer) -> Any:
        return _attend(step, layer, step.plan())

    return [functools.partial(plan_and_attend, layer) for layer in layers]


def expected_spots(step: Step, layer: Layer) -> list[tuple[int, slice, torch.Tensor]]:
    """Return expected outputs of a few query tokens, for batches too large for the reference: (token, heads, output).

    The tokens are the first, middle and last query of the first, the longest and the last sequence. Each is checked
    under one KV head.
    """
    lengths, (num_q_heads, num_kv_heads) = step.case.lengths, step.case.heads
    starts = step.cu_seqlens_q.tolist()
    longest = max(range(len(lengths)), key=lambda seq: lengths[seq][1])
    spots = set()
    for seq in (0, longest, len(lengths) - 1):
        q_len = lengths[seq][0]
        spots |= {(seq, 0), (seq, q_len // 2), (seq, q_len - 1)}
    group, results = num_q_heads // num_kv_heads, []
    for index, (seq, query) in enumerate(sorted(spots)):
        q_len, seq_len = lengths[seq]
        visible = seq_len - q_len + query + 1
        blocks = step.block_table[seq, : -(-visible // step.case.block_size)].long()
        kv_head, token = index % num_kv_heads, starts[seq] + query
        heads = slice(kv_head * group, (kv_head + 1) * group)
        out, _ = definition.paged_attention(
            layer.q[token : token + 1, heads].cpu(),
            layer.k_cache[blocks, :, kv_head : kv_head + 1].cpu(),
            layer.v_cache[blocks, :, kv_head : kv_head + 1].cpu(),
            block_table=torch.arange(len(blocks))[None],
            cu_seqlens_q=torch.tensor([0, 1]),
            seq_lens=torch.tensor([visible]),
        )
        results.append((token, heads, out[0]))
    return results


def parse_case(text: str) -> AttentionCase:
    """Return the case of --shape: KIND:GROUP+GROUP,hQ_KV,dSIZE,bSIZE, such as decode:4x700,h8_2,d64,b16.

    A group is 4x700, four whole prompts or decode steps over 700 keys; or 1x64of700, the last 64 tokens of 700. h:
    query and KV heads, d: head size, b: block size. Another text raises InvalidInputError.
    """
    wrong = InvalidInputError(f"--shape {text}: expected such as decode:4x700,h8_2,d64 or mixed:1x64of700+8x300")
    match = _SHAPE.fullmatch(text)
    if match is None:
        raise wrong
    kind, batch, num_q_heads, num_kv_heads, head_dim, block_size = match.groups()
    groups = []
    for count, q_len, seq_len in re.findall(r"(\d+)x(?:(\d+)of)?(\d+)", batch):
        if not q_len and kind == "prefill":
            q_len = seq_len
        group = int(count), int(q_len or 1), int(seq_len)
        if min(group) < 1 or group[1] > group[2]:
            raise wrong
        groups.append(group)
    heads = int(num_q_heads or 32), int(num_kv_heads or 8)
    case = AttentionCase(kind, batch, tuple(groups), heads, int(block_size or 16), int(head_dim or 128))
    if min(*heads, case.block_size, case.head_dim) < 1:
        raise wrong
    return case


def _prefill(count: int, kilo: int, **options: Any) -> AttentionCase:
    return AttentionCase("prefill", f"{count}x{kilo}k", ((count, kilo << 10, kilo << 10),), **options)


def _decode(count: int, kilo: int, **options: Any) -> AttentionCase:
    return AttentionCase("decode", f"{count}x{kilo}k", ((count, 1, kilo << 10),), **options)


def _chunk(**options: Any) -> AttentionCase:
    """Return the last 2,048 tokens of a prompt of 8k beside 63 decode steps."""
    return AttentionCase("mixed", "chunk_2k+63x8k", ((1, 2048, 8192), (63, 1, 8192)), **options)


def _latents(kind: str, batch: str, *groups: Group, heads: int = 128) -> AttentionCase:
    """Return a case with DeepSeek-V3's sizes. A rank of 8 has 16 heads."""
    sizes: dict[str, Any] = {"head_dim": 576, "v_head_dim": 512, "latent": True}
    return AttentionCase(kind, f"latents_{batch}", groups, (heads, 1), 64, **sizes)


# Options other than the usual heads and blocks.
_OPTIONS: tuple[dict[str, Any], ...] = (
    {"heads": (64, 8)},
    {"heads": (28, 4)},
    {"heads": (16, 16)},
    {"block_size": 64},
    {"block_size": 128},
)


def _with_options() -> list[AttentionCase]:
    cases = []
    for options in _OPTIONS:
        cases += [_decode(64, 8, **options), _prefill(4, 4, **options), _chunk(**options)]
    return cases


# Most important first, in case time runs out. The first cases have the engine's default block size.
_ORDER = (
    _decode(64, 8, block_size=64),
    _prefill(1, 8, block_size=64),
    _prefill(4, 4, block_size=64),
    _chunk(block_size=64),
    _decode(1, 1, block_size=64),
    _latents("decode", "64x8k", (64, 1, 8192)),
    _latents("decode", "64x8k", (64, 1, 8192), heads=16),
    _decode(64, 8),
    _prefill(1, 8),
    _chunk(),
    AttentionCase("mixed", "1x128k+31x4k", ((1, 1, 1 << 17), (31, 1, 4096))),
    AttentionCase("mixed", "122x600+8x10000", ((122, 1, 600), (8, 1, 10_000))),
    AttentionCase("mixed", "verify_64x5x8k", ((64, 5, 8192),)),
    _prefill(4, 4),
    _prefill(1, 16),
    _decode(256, 4),
    _decode(16, 32),
    _decode(1, 1),
    _decode(1, 32),
    _prefill(1, 1),
    _prefill(16, 1),
    _decode(64, 1),
    *_with_options(),
    _prefill(2, 8),
    _decode(16, 8),
    AttentionCase("mixed", "first_chunk_2k+63x8k", ((1, 2048, 2048), (63, 1, 8192))),
    _decode(1, 8),
    _decode(256, 1),
    _decode(256, 8),
    _prefill(1, 2),
    _prefill(16, 2),
    _prefill(1, 4),
    _prefill(4, 16),
    _prefill(16, 4),
    _decode(64, 32),
    _decode(256, 32),
    _decode(64, 8, heads=(16, 2), head_dim=512),
    _prefill(4, 4, heads=(16, 2), head_dim=512),
    _decode(64, 8, heads=(16, 16), head_dim=192, v_head_dim=128),
    _prefill(4, 4, heads=(16, 16), head_dim=192, v_head_dim=128),
    _latents("decode", "1x128k", (1, 1, 1 << 17)),
    _latents("mixed", "verify_64x2x8k", (64, 2, 8192)),
)
CASES = tuple(dict.fromkeys(_ORDER))
