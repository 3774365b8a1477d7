"""Decode steps over KV caches of several formats, in turns in one process, on the CPU.

    python -m bench.attention.formats [--json FILE] [--only NAME]

A row is one sequence of 8,192 tokens with heads of 128, in calls bound for a step as those of a model's layers are: to
check a call takes as long as attention over a thousand tokens. Consecutive calls use different layers' caches, in total
more than the CPU's caches hold. "ours" is int4, and a format's ratio is its time over that of int4. Bytes are those of
keys, values and their scales.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, NamedTuple

import torch

import paged
from paged.bench.attention.cases import MAX_LAYERS, attention_cost
from paged.bench.benchmark import SHARED, Benchmark, Json, Setting, backend_name
from paged.bench.check import agreement
from paged.bench.contest import OURS, Contest
from paged.bench.limits import Goal, at_least
from paged.bench.timing import Call, num_sets
from paged.kernels.attention import definition
from paged.kernels.core.dtypes import kv_kind
from paged.kernels.core.operation import Bound

NUM_TOKENS, BLOCK_SIZE, HEAD_DIM = 8192, 16, 128
MAX_SECONDS, MIN_REPEATS = 5.0, 10
FORMATS = {"int4": torch.bits4x2, "int8": torch.int8, "e4m3": torch.float8_e4m3fn}
# Least time of int8 over that of int4, which has 0.55 of its bytes.
LEAST_RATIO = 1.8


class Case(NamedTuple):
    """Query and KV heads of a decode step, and the dtype of queries."""

    heads: tuple[int, int]
    dtype: torch.dtype

    @property
    def name(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"decode.1x{NUM_TOKENS}.h{self.heads[0]}_{self.heads[1]}.{dtype}.int4"


CASES = [Case(heads, dtype) for dtype in (torch.bfloat16, torch.float32) for heads in ((8, 8), (32, 8))]


def _row_bytes(dtype: torch.dtype, num_kv_heads: int) -> int:
    """Return the bytes of a token's K and V with their scales."""
    return 2 * num_kv_heads * kv_kind(dtype).row_bytes(HEAD_DIM)


def _layer(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Return a layer's arguments of `paged_attention`, random numbers in a cache of a dtype."""
    kind, num_blocks = kv_kind(dtype), NUM_TOKENS // BLOCK_SIZE
    arguments: dict[str, Any] = {"q": torch.randn(1, case.heads[0], HEAD_DIM, dtype=case.dtype)}
    for name in ("k", "v"):
        rows = torch.randn(num_blocks, BLOCK_SIZE, case.heads[1], HEAD_DIM)
        arguments[f"{name}_cache"], arguments[f"{name}_scale"] = kind.encode(rows, None)
    return arguments


def contest(case: Case, setting: Setting) -> Contest:
    """Return the contest of formats.

    Raises:
        WrongResultError: a result differs from the reference.
    """
    torch.manual_seed(0)
    num_bytes = NUM_TOKENS * _row_bytes(FORMATS["int4"], case.heads[1])
    num_layers, is_cold = num_sets(num_bytes, setting.device, MAX_LAYERS)
    batch: dict[str, Any] = {
        "block_table": torch.randperm(NUM_TOKENS // BLOCK_SIZE, dtype=torch.int32)[None],
        "cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32),
        "seq_lens": torch.tensor([NUM_TOKENS], dtype=torch.int32),
    }
    lengths = batch["cu_seqlens_q"], batch["seq_lens"]
    plan = paged.AttentionPlan(*lengths, max_seqlen_q=1, max_seqlen_k=NUM_TOKENS)
    costs = {}
    for name, dtype in FORMATS.items():
        row_bytes, itemsize = _row_bytes(dtype, case.heads[1]), case.dtype.itemsize
        costs[name] = attention_cost(
            [(1, NUM_TOKENS)], case.heads[0], (HEAD_DIM, HEAD_DIM), itemsize, row_bytes, BLOCK_SIZE
        )
    about = {"name": case.name, "backend": backend_name(setting.device)}
    entries = Contest(about, setting, costs["int4"], is_cold, MAX_SECONDS, MIN_REPEATS)
    for name, dtype in FORMATS.items():
        layers = [_layer(case, dtype) for _ in range(num_layers)]
        expected, _ = definition.paged_attention(**layers[0], **batch)
        calls: list[Call] = []
        attend: Bound[..., Any] = Bound(paged.paged_attention)
        for layer in layers:
            caches = {name: value for name, value in layer.items() if name != "q"}
            calls.append(functools.partial(attend, layer["q"], **caches, **batch, max_seqlen_q=1, plan=plan))

        def check(out: torch.Tensor, expected: torch.Tensor = expected) -> None:
            # The mean of 8,192 values is 0.011 of their size, but sums of them are rounded at their size.
            agreement(out, expected, factor=8).check()

        entries.add(OURS if name == "int4" else name, calls, check)

    def complete(row: Json) -> None:
        for name, peer in row["peers"].items():
            peer["gb_per_s"] = costs[name].num_bytes / peer["median_us"] / 1e3
        row["goals"] = goals(row)

    entries.complete = complete
    return entries


def goals(row: Json) -> list[Goal]:
    """Return the goal of a row: the share of the time that fewer bytes save."""
    return [at_least(f"{LEAST_RATIO}x int8", row["peers"]["int8"]["ratio"], LEAST_RATIO)]


BENCHMARK = Benchmark(
    "formats",
    __doc__,
    lambda setting: list(CASES),
    lambda case, setting: contest(case, setting).row(),
    {"cpu": 20},
    options=SHARED,
    legend="decode.1x8192.h32_8.bfloat16.int4: 1 sequence of 8,192 keys, 32 query and 8 KV heads",
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
