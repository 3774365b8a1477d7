"""The fused MoE against the hardware's limits and other packages, in one process on the same tensors.

    python -m bench.moe.run [--json FILE] [--only NAME] [--budget SECONDS] [--small]

A GPU runs bfloat16 at full size from CUDA graphs. A CPU runs what models run there, in float32 at small sizes; `--only
small-cpu` compares it with transformers' experts. The order of calls is drawn anew in every round, so that the cache's
contents favour no implementation. Tokens are routed evenly, or to experts as popular as words by Zipf's law.
Consecutive calls have different tokens and experts. A time includes sorting entries by expert, both products and the
sum, and for e4m3 weights rounding of their inputs, but not the router.

A limit counts weights as they are stored, quantised weights with their scales. All products count at the rate measured
in `matmul_dtype`, so e4m3 may take more than 100 % on a chip that multiplies 8 bits at twice this rate.

One token of each case is compared with the float64 reference. A row that differs is refused; a peer that differs
anywhere from ours gets no ratio. vLLM's kernels come from its package on PYTHONPATH, with the table that it ships for
the device.
"""

from __future__ import annotations

import sys

import torch

from paged.bench.benchmark import Benchmark, Json, Setting
from paged.bench.cards.cards import CARDS
from paged.bench.check import Result, agreement
from paged.bench.contest import OURS, Contest
from paged.bench.limits import Ceilings, Goal, at_least
from paged.bench.moe.cases import CASES, CPU_CASES, CPU_MODEL
from paged.bench.moe.peers import PEERS
from paged.bench.problems.experts import MoeCase
from paged.bench.timing import num_sets

# Time limit of a case in seconds, and the number of samples that it takes even beyond the limit.
MAX_SECONDS, MIN_REPEATS = 1.0, 5
# Largest number of batches that a case rotates through, even if they do not fill the cache.
MAX_BATCHES = 8


def contest(case: MoeCase, setting: Setting) -> Contest:
    """Return the contest of our calls and the peers'.

    Raises:
        WrongResultError: the operation differs from the reference.
    """
    torch.manual_seed(0)
    device, dtype = setting.device, setting.dtype
    layer = case.layer(device, dtype)
    batches = [case.batch(device, dtype)]
    cost = case.cost(layer, batches[0])
    count, is_cold = num_sets(cost.num_bytes, device, MAX_BATCHES)
    for _ in range(count - 1):
        batches.append(case.batch(device, dtype))
    histogram = case.histogram(batches[0])
    format_name = None
    if case.format is not None:
        format_name = str(case.format)
    about = {
        "name": case.name,
        "model": case.model.name,
        "format": format_name,
        "routing": case.routing,
        "tokens": case.num_tokens,
        "active_experts": len(histogram) - histogram.count(0),
        "local_experts": len(histogram),
        "largest_expert": max(histogram),
        "matmul_dtype": str(dtype).removeprefix("torch."),
    }
    entries = Contest(about, setting, cost, is_cold, MAX_SECONDS, MIN_REPEATS)
    card = CARDS["fused_moe"]
    # Compare one token, because the reference takes a second for an expert of Mixtral.
    token = slice(case.num_tokens // 2, case.num_tokens // 2 + 1)
    arguments = card.by_name(*layer.arguments(batches[0].rows(token)), **layer.options)
    want = card.want(arguments)
    bound = card.bounds(arguments, want)["out"]
    rounded = None
    if layer.gate_up.w.dtype == torch.float8_e4m3fn:
        rounded = torch.float8_e4m3fn
    calls = [layer.call(batch) for batch in batches]
    entries.add(OURS, calls, lambda out: Result(out[token], want["out"], bound).check())
    our_out = calls[0]()
    entries.add_peers(
        PEERS,
        case,
        lambda peer: [peer.make(case, layer, batch) for batch in batches],
        lambda out: agreement(out, our_out, rounded, 2).check(),
    )

    def complete(row: Json) -> None:
        if device.type == "cuda" or case.model == CPU_MODEL:
            row["goals"] = goals(row, setting.limits)

    entries.complete = complete
    return entries


def goals(row: Json, limits: Ceilings) -> list[Goal]:
    """Return the goals of a row, on one H200 or, for CPU_MODEL, on a CPU."""
    if row["model"] == CPU_MODEL.name:
        ratios = []
        for name, peer in row["peers"].items():
            if name.startswith("transformers"):
                ratios.append(peer["ratio"])
        return [at_least("the fastest experts of transformers", min(ratios, default=None), 1.0)]
    judged = [at_least("vLLM's Triton kernel", row["peers"].get("vllm", {}).get("ratio"), 1.0)]
    is_plain = row["format"] is None
    if is_plain and row["bound_by"] == "memory" and row["active_experts"] == row["local_experts"]:
        judged.append(at_least("92 % of the copy bandwidth", 100 * row["gb_per_s"] * 1e9 / limits.copy, 92.0))
    if is_plain and row["model"] == "Qwen3-30B-A3B" and row["tokens"] >= 16384:
        judged.append(at_least("520 TFLOP/s", row["tflop_per_s"], 520.0))
    return judged


def cases(setting: Setting) -> list[MoeCase]:
    """Return all cases; on a CPU, the cases of the comparison there."""
    sized = list(CASES)
    if setting.small:
        sized = [case.small() for case in CASES]
    if setting.device.type == "cpu":
        sized += CPU_CASES
    return sized


BENCHMARK = Benchmark(
    "moe",
    __doc__,
    cases,
    lambda case, setting: contest(case, setting).row(),
    {"cuda": 30, "cpu": 500},
    legend="Qwen3-30B-A3B/16.zipf.64: a sixteenth of the widths and experts, routing, tokens",
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
