"""Problems of attention over a window and compressed entries; tests and `paged verify` run them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from paged.bench.attention import problem as attention_problem
from paged.kernels.cache.latent_cache import MXFP8_BYTES, NVFP4_BYTES, RECORD_BYTES, RECORD_FORMS, encode_records


@dataclass(frozen=True)
class Problem:
    """Shapes of one batch; lengths are (query length, key length) per sequence.

    pool_size: positions of an entry; 0 for a window alone. chosen: entries that each query lists, in disorder among -1
    and entries of open pools; 0 for all.
    """

    name: str
    lengths: tuple[tuple[int, int], ...]
    heads: int = 2
    head_dim: int = 32
    rotary_dim: int = 16
    sliding_window: int = 20
    pool_size: int = 4
    chosen: int = 0
    sinks: bool = True
    block_size: int = 16
    entry_block_size: int = 4
    dtype: torch.dtype = torch.float32
    padding_rows: int = 0
    deterministic: bool = False
    record_bytes: int = 0  # size of rows and entries that are records; 0 for numbers of dtype


PROBLEMS = (
    Problem("mixed batch", ((1, 300), (5, 90), (40, 40), (1, 3), (2, 1), (0, 9)), heads=3, padding_rows=2),
    Problem("chosen entries", ((1, 300), (5, 90), (30, 40), (1, 3)), heads=5, chosen=9, padding_rows=1),
    Problem("a window alone", ((1, 90), (20, 30)), pool_size=0, rotary_dim=0, sinks=False, block_size=3),
    Problem("split", ((1, 3000), (1, 40)), pool_size=2, entry_block_size=16, head_dim=16, deterministic=True),
    Problem("one entry a block", ((1, 700), (3, 257)), pool_size=128, sliding_window=128, entry_block_size=1),
    Problem(
        "sizes of DeepSeek-V4", ((1, 300), (2, 9)), 64, 512, 64, 128, chosen=40, block_size=64, entry_block_size=16
    ),
    Problem("records", ((1, 150), (5, 40)), 3, 512, 64, chosen=9, record_bytes=RECORD_BYTES),
    Problem("records of V4.1", ((1, 90), (5, 40)), 3, 512, 64, pool_size=1, chosen=9, record_bytes=MXFP8_BYTES),
    Problem("records in NVFP4", ((1, 90), (5, 40)), 3, 512, 64, chosen=9, record_bytes=NVFP4_BYTES),
)


def make(problem: Problem, device: torch.device) -> dict[str, Any]:
    """Make the arguments that the reference also takes; see `bench.attention.problem.make` for the tensors.

    Blocks of positions that no query sees are block 0, which holds NaN. Entries of open pools are NaN.
    """
    size, dtype = problem.head_dim, problem.dtype
    rows = attention_problem.make(
        attention_problem.Problem(
            "", problem.lengths, (problem.heads, 1), size, None, problem.block_size, dtype,
            padding_rows=problem.padding_rows,
        ),
        torch.device("cpu"),
    )  # fmt: skip
    for seq, (q_len, seq_len) in enumerate(problem.lengths):
        first = max(seq_len - q_len - problem.sliding_window + 1, 0)
        rows.block_table[seq, : first // problem.block_size] = 0
    arguments: dict[str, Any] = {
        "q": rows.q,
        "kv_cache": _stored(rows.k_cache[:, :, 0], problem),
        "block_table": rows.block_table,
        "cu_seqlens_q": rows.cu_seqlens_q,
        "seq_lens": rows.seq_lens,
    }
    options: dict[str, Any] = {"softmax_scale": size**-0.5, "sliding_window": problem.sliding_window}
    if problem.pool_size:
        lengths = tuple((0, seq_len // problem.pool_size) for _, seq_len in problem.lengths)
        entries = attention_problem.make(
            attention_problem.Problem("", lengths, (1, 1), size, None, problem.entry_block_size, dtype),
            torch.device("cpu"),
        )
        arguments |= {"entry_cache": _stored(entries.k_cache[:, :, 0], problem), "entry_table": entries.block_table}
        options["pool_size"] = problem.pool_size
    if problem.chosen:
        arguments["indices"] = draw_entries(problem.lengths, problem.padding_rows, problem.pool_size, problem.chosen)
    if problem.sinks:
        arguments["sinks"] = torch.randn(problem.heads)
    if problem.rotary_dim:
        longest = max(seq_len for _, seq_len in problem.lengths)
        angles = 6 * torch.rand(longest, problem.rotary_dim // 2)
        arguments["cos_sin_cache"] = torch.cat([angles.cos(), angles.sin()], -1)
    on_device = {name: tensor.to(device) for name, tensor in arguments.items()}
    return {**on_device, **options}


def _stored(rows: torch.Tensor, problem: Problem) -> torch.Tensor:
    """Return rows in the form of a problem's caches. Groups of a record have scales that differ by powers of four."""
    if not problem.record_bytes:
        return rows
    form = RECORD_FORMS[problem.record_bytes]
    factors = torch.ones(rows.shape[-1] // form.group)
    factors[: form.num_codes // form.group] = 4.0 ** torch.randint(-1, 2, (form.num_codes // form.group,))
    return encode_records((rows.float().unflatten(-1, (-1, form.group)) * factors[:, None]).flatten(-2), form.num_bytes)


def draw_entries(lengths: tuple[tuple[int, int], ...], padding_rows: int, pool_size: int, count: int) -> torch.Tensor:
    """Draw int32 [num_tokens, count] entries of each token's sequence, in disorder among entries of -1.

    The pool after the last that is closed is always among them.
    """
    rows = []
    for q_len, seq_len in lengths:
        for position in range(seq_len - q_len, seq_len):
            num_closed = max(position + 1, 0) // pool_size
            entries = torch.cat([torch.tensor([num_closed]), torch.randperm(num_closed)])[: count - 1]
            row = torch.full((count,), -1)
            row[torch.randperm(count)[: len(entries)]] = entries
            rows.append(row)
    rows += [torch.full((count,), -1)] * padding_rows
    return torch.stack(rows).int()


def call_of(problem: Problem, device: torch.device) -> dict[str, Any]:
    """Make all arguments of `paged_compressed_attention`, with an output that holds NaN."""
    arguments = make(problem, device)
    return {
        **arguments,
        "out": torch.full_like(arguments["q"], math.nan),
        "max_seqlen_q": max(q_len for q_len, _ in problem.lengths),
        "return_lse": True,
        "deterministic": problem.deterministic,
    }
