"""Latent attention problems that catch paging bugs; tests and `paged verify` run them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from paged.bench.attention import problem as attention_problem
from paged.kernels.cache.latent_cache import NVFP4_LATENT_BYTES, PACKED_BYTES, RECORD_FORMS, encode_records


@dataclass(frozen=True)
class Problem:
    """Shapes of one batch; lengths are (query length, key length) per sequence.

    form: form of the cache: "" for the dtype of q, "e4m3" with one scale, or "packed" or "nvfp4" for records.
    chosen: number of keys that each query sees, at random positions, in disorder among entries of -1; 0 for all.
    coverage: q = 0, and latents are one-hot of the position: every key counts the same, so a dropped key shows.
    """

    name: str
    lengths: tuple[tuple[int, int], ...]
    heads: int = 2
    sizes: tuple[int, int] = (64, 16)  # sizes of the latent and of the rotated part
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    form: str = ""
    chosen: int = 0
    causal: bool = True
    window_size: tuple[int, int] = (-1, -1)  # blocks that no query sees are block 0, which holds NaN
    sinks: bool = False
    padding_rows: int = 0
    deterministic: bool = False
    coverage: bool = False


_RECORD_BYTES = {"packed": PACKED_BYTES, "nvfp4": NVFP4_LATENT_BYTES}

PROBLEMS = (
    Problem("mixed batch", ((1, 17), (5, 18), (40, 40), (1, 700), (2, 1), (0, 3)), padding_rows=2),
    Problem("split", ((1, 2011), (1, 65)), coverage=True),
    Problem("16 heads", ((1, 130), (4, 40)), heads=16, block_size=24),
    Problem("128 heads", ((1, 70), (2, 40)), heads=128, sizes=(32, 16), block_size=64),
    Problem("5 heads, no rotation, blocks of 1", ((1, 30), (20, 24)), heads=5, sizes=(48, 0), block_size=1),
    Problem("one head", ((30, 70), (1, 1)), heads=1, sizes=(256, 64)),
    Problem("sizes of DeepSeek", ((1, 40), (3, 20)), sizes=(512, 64), block_size=64),
    Problem("sizes of dots3", ((1, 40), (3, 30)), sizes=(1024, 64), block_size=64, window_size=(20, -1)),
    Problem("sinks, not causal", ((3, 30), (1, 600)), heads=3, sinks=True, causal=False, deterministic=True),
    Problem("window", ((1, 300), (5, 90), (30, 30), (40, 70), (1, 3)), heads=3, window_size=(20, -1), padding_rows=1),
    Problem("window on both sides", ((4, 90), (50, 50)), window_size=(3, 9), causal=False, sinks=True, block_size=24),
    Problem("e4m3", ((1, 300), (5, 20)), form="e4m3", sizes=(64, 32)),
    Problem("packed", ((1, 40), (5, 20)), sizes=(512, 64), form="packed"),
    Problem("nvfp4", ((1, 40), (5, 20)), sizes=(512, 64), form="nvfp4"),
    Problem("chosen keys", ((5, 90), (1, 20), (4, 3)), heads=5, chosen=33, padding_rows=1),
    Problem("split chosen keys", ((1, 1100), (1, 700)), sinks=True, chosen=600, block_size=64, causal=False),
    Problem("packed, chosen", ((2, 60),), sizes=(512, 64), form="packed", chosen=20),
    Problem("nvfp4, chosen", ((2, 60),), sizes=(512, 64), form="nvfp4", chosen=20),
    Problem("nvfp4, window", ((3, 60),), sizes=(512, 64), form="nvfp4", window_size=(20, -1)),
)


def make(problem: Problem, device: torch.device) -> dict[str, Any]:
    """Make the arguments that the reference also takes; see `bench.attention.problem.make` for the tensors."""
    latent, rope = problem.sizes
    size, dtype = latent + rope, problem.dtype
    plain = attention_problem.Problem(
        "", problem.lengths, (problem.heads, 1), size, latent, problem.block_size, dtype,
        padding_rows=problem.padding_rows, layout="shared", coverage=problem.coverage,
    )  # fmt: skip
    tensors = attention_problem.make(plain, torch.device("cpu"))
    cache = tensors.k_cache[:, :, 0]
    if problem.coverage:
        for seq, (_, seq_len) in enumerate(problem.lengths):
            position = torch.arange(seq_len)
            blocks = tensors.block_table[seq, position // problem.block_size].long()
            rows = torch.eye(size)[position % latent].to(dtype)
            cache[blocks, position % problem.block_size] = rows
    if problem.window_size[0] >= 0:
        for seq, (q_len, seq_len) in enumerate(problem.lengths):
            first = max(seq_len - q_len - problem.window_size[0], 0)
            tensors.block_table[seq, : first // problem.block_size] = 0
    arguments: dict[str, Any] = {
        "q": tensors.q, "kv_cache": _stored(cache, problem.form), "block_table": tensors.block_table,
        "cu_seqlens_q": tensors.cu_seqlens_q, "seq_lens": tensors.seq_lens,
    }  # fmt: skip
    if problem.form == "e4m3":
        arguments["k_scale"] = torch.rand(1) + 0.5
    if problem.sinks:
        arguments["sinks"] = torch.randn(problem.heads).to(dtype)
    if problem.chosen:
        indices = arguments["indices"] = torch.full((len(tensors.q), problem.chosen), -1, dtype=torch.int32)
        for seq, (_, seq_len) in enumerate(problem.lengths):
            for row in range(*tensors.cu_seqlens_q[seq : seq + 2].tolist()):
                count = min(seq_len, problem.chosen - 1)
                places = torch.randperm(problem.chosen)[:count]
                indices[row, places] = torch.randperm(seq_len)[:count].int()
    on_device: dict[str, Any] = {name: tensor.to(device) for name, tensor in arguments.items()}
    options = {"causal": problem.causal, "window_size": problem.window_size}
    return {**on_device, "v_head_dim": latent, "softmax_scale": size**-0.5, **options}


def _stored(cache: torch.Tensor, form: str) -> torch.Tensor:
    if form == "e4m3":
        return cache.to(torch.float8_e4m3fn)
    if form not in _RECORD_BYTES:
        return cache
    record = RECORD_FORMS[_RECORD_BYTES[form]]
    factors = torch.rand(record.num_numbers // record.group + 1) + 0.5  # neighbouring groups have other scales
    rows = cache.float() * factors.repeat_interleave(record.group)[: record.num_numbers]
    return encode_records(rows, record.num_bytes)


def index_problem(
    problem: attention_problem.Problem,
    device: torch.device,
    *,
    is_packed: bool = False,
    scales_last: bool = False,
) -> dict[str, Any]:
    """Make the arguments of `choose_keys` except top_k; the keys have one head.

    is_packed: e4m3 keys, each with its scale. scales_last: a block has all keys first, then all scales.
    """
    drawn = attention_problem.make(problem, torch.device("cpu"))
    keys = drawn.k_cache[:, :, 0]
    if is_packed:
        scales = keys.float().abs().amax(-1, keepdim=True) / 448
        codes = (keys / scales).to(torch.float8_e4m3fn)
        parts = [codes.contiguous().view(torch.uint8), scales.contiguous().view(torch.uint8)]
        if scales_last:
            parts = [part.flatten(1) for part in parts]
        keys = torch.cat(parts, -1)
    tensors = {
        "q": drawn.q,
        "weights": torch.randn(drawn.q.shape[:2]),
        "key_cache": keys,
        "block_table": drawn.block_table,
        "cu_seqlens_q": drawn.cu_seqlens_q,
        "seq_lens": drawn.seq_lens,
    }
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def call_of(problem: Problem, device: torch.device) -> dict[str, Any]:
    """Make all arguments of `paged_mla_attention`, with an output that holds NaN."""
    arguments = make(problem, device)
    q = arguments["q"]
    return {
        **arguments,
        "out": q.new_full((*q.shape[:2], problem.sizes[0]), math.nan),
        "max_seqlen_q": max(q_len for q_len, _ in problem.lengths),
        "return_lse": True,
        "deterministic": problem.deterministic,
    }
