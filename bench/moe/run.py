"""The fused MoE against the hardware's limits and against others' experts, in one process on the same tensors.

    python -m bench.moe.run [--json FILE] [--only NAME] [--budget SECONDS] [--small]

A GPU runs bfloat16 at full size, out of CUDA graphs; a CPU the PyTorch twin in float32 at small sizes, and
`--only small-cpu` compares it there with the experts of transformers. Calls take turns in an order that is drawn anew
every round: what one leaves in the cache is no other's lot alone. Tokens are routed evenly or with experts as popular
as Zipf's law has words; one call has other tokens and experts than the last. A time holds sorting entries by expert,
both products and the sum, not the router; where e4m3 weights want their inputs rounded, that too.

A limit counts weights as they are stored, quantised ones with their scales, and all products at the rate measured in
`matmul_dtype`: e4m3 on a chip that multiplies 8 bits at twice that rate may take more than 100 % of it.

A token of each case is compared with the float64 reference; a row that differs is refused, and a peer that differs
anywhere from ours gets no ratio. vLLM's kernels come from its package on PYTHONPATH, with the table that it ships for
the device.
"""

from __future__ import annotations

import gc
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

import paged
from paged.bench.check import WrongResultError, compare
from paged.bench.environment import benchmark_dtype, environment, parse_options
from paged.bench.goal import at_least
from paged.bench.limits import Ceilings, speed
from paged.bench.moe.cases import CASES, CPU_CASES, CPU_MODEL, MoeBatch, MoeCase, MoeLayer
from paged.bench.moe.peers import PEERS
from paged.bench.timing import Call, cache_bytes, ceilings, sampler
from paged.kernels.moe import reference

REPEATS = {"cuda": 30, "cpu": 5}
MIN_REPEATS = 5
# A case takes no more samples than fit in this time, beyond MIN_REPEATS.
MAX_SECONDS = 1.0
# The comparison on a CPU, whose shortest calls take 200 us, takes so many samples for one of other cases, in this time.
CPU_REPEATS, CPU_SECONDS = 400, 6.0
MAX_BATCHES = 8


@dataclass
class Contender:
    """How one implementation is timed for one case, and the samples taken of it, in seconds."""

    method: str
    sample: Callable[[], float]
    samples: list[float] = field(default_factory=list)


def measure(case: MoeCase, device: torch.device, repeats: int, limits: Ceilings) -> dict[str, Any]:
    """The row of a case; peers hold times and a ratio (their median over ours), absent ones why they do not.

    Raises:
        WrongResultError: the operation does not agree with the reference.
    """
    torch.manual_seed(0)
    dtype = benchmark_dtype(device)
    layer = case.layer(device, dtype)
    batches = [case.batch(device, dtype)]
    cost, cache = case.cost(layer, batches[0]), cache_bytes(device)
    num_batches = 1 + min(2 * cache // cost.num_bytes, MAX_BATCHES - 1)
    batches += [case.batch(device, dtype) for _ in range(num_batches - 1)]
    calls = [_our_call(layer, batch) for batch in batches]
    out = calls[0]()
    tolerance = _tolerance(case)
    _check(out, layer, batches[0], tolerance)
    contenders = {"ours": Contender(*sampler(calls, device))}
    absent = {}
    for peer in PEERS:
        reason = peer.refuses(case, dtype, device)
        if reason is None:
            try:
                calls = [peer.make(case, layer, batch) for batch in batches]
                compare(calls[0](), out, *tolerance)
                contenders[peer.name] = Contender(*sampler(calls, device))
            except WrongResultError as error:
                reason = f"wrong: {error}"
            except Exception as error:  # whatever a peer fails with, the others get their times
                reason = f"failed: {type(error).__name__}: {str(error)[:500]}"
        if reason is not None:
            absent[peer.name] = reason
    is_for_cpu = case.model == CPU_MODEL
    rounds, seconds = (CPU_REPEATS * repeats, CPU_SECONDS) if is_for_cpu else (repeats, MAX_SECONDS)
    start, order = time.monotonic(), random.Random(0)
    for index in range(rounds):
        for contender in order.sample(list(contenders.values()), len(contenders)):
            contender.samples.append(contender.sample())
        if index + 1 >= MIN_REPEATS and time.monotonic() - start > seconds:
            break
    results = {name: asdict(speed(contender.samples, cost, limits)) for name, contender in contenders.items()}
    own = results.pop("ours")
    for result in results.values():
        result["ratio"] = result["median_us"] / own["median_us"]
    histogram = case.histogram(batches[0])
    row = {
        "name": case.name,
        "model": case.model.name,
        "format": None if case.format is None else str(case.format),
        "routing": case.routing,
        "tokens": case.num_tokens,
        "active_experts": sum(entries > 0 for entries in histogram),
        "local_experts": len(histogram),
        "largest_expert": max(histogram),
        "flops": cost.flops,
        "num_bytes": cost.num_bytes,
        "matmul_dtype": str(dtype).removeprefix("torch."),
        "method": contenders["ours"].method,
        "cold": num_batches * cost.num_bytes > cache,
        "samples": len(contenders["ours"].samples),
        **own,
        "peers": results,
        "absent": absent,
    }
    return {**row, "goals": goals(row, limits) if device.type == "cuda" or is_for_cpu else []}


def _our_call(layer: MoeLayer, batch: MoeBatch) -> Call:
    routes = (batch.topk_weights, batch.topk_ids)
    return lambda: paged.fused_moe(batch.hidden_states, layer.w1, layer.w2, *routes, **layer.options)


def _tolerance(case: MoeCase) -> tuple[torch.dtype | None, float]:
    """As what an error is judged, and how many budgets it may take: rounding what e4m3 weights multiply, first the
    hidden states and then the activation, may tip either way, and vLLM rounds what int8 and int4 weights stand for."""
    if case.format is None:
        return None, 1
    return torch.float8_e4m3fn if case.format.kind == "e4m3" else None, 2


def _check(out: torch.Tensor, layer: MoeLayer, batch: MoeBatch, tolerance: tuple[torch.dtype | None, float]) -> None:
    """One token, as an expert of Mixtral takes the reference a second."""
    spot = slice(len(out) // 2, len(out) // 2 + 1)
    routes = (batch.topk_weights[spot], batch.topk_ids[spot])
    expected = reference.fused_moe(batch.hidden_states[spot], layer.w1, layer.w2, *routes, **layer.options)
    compare(out[spot], expected, *tolerance)


def goals(row: dict[str, Any], limits: Ceilings) -> list[dict[str, Any]]:
    """What the row is meant to reach, on one H200 or, of the comparison on a CPU, there; value and met are None where
    what it compares with did not run."""
    if row["model"] == CPU_MODEL.name:
        ratios = [peer["ratio"] for name, peer in row["peers"].items() if name.startswith("transformers")]
        return [asdict(at_least("the fastest experts of transformers", min(ratios, default=None), 1.0))]
    found = [at_least("vLLM's Triton kernel", row["peers"].get("vllm", {}).get("ratio"), 1.0)]
    is_plain = row["format"] is None
    if is_plain and row["bound_by"] == "memory" and row["active_experts"] == row["local_experts"]:
        found.append(at_least("92 % of the copy bandwidth", 100 * row["gb_per_s"] * 1e9 / limits.copy, 92.0))
    if is_plain and row["model"] == "Qwen3-30B-A3B" and row["tokens"] >= 16384:
        found.append(at_least("520 TFLOP/s", row["tflop_per_s"], 520.0))
    return [asdict(goal) for goal in found]


def geometric_means(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of every peer's ratios, over the rows that have one."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        for name, peer in row["peers"].items():
            ratios.setdefault(name, []).append(math.log(peer["ratio"]))
    return {name: math.exp(sum(logs) / len(logs)) for name, logs in ratios.items()}


def main(argv: list[str] | None = None, write: Callable[[str], object] = print) -> int:
    """Print a line a case; the exit code is 1 where one was refused its row. Missed goals are no error."""
    options = parse_options(__doc__, argv, REPEATS)
    device, repeats = options.device, options.repeats
    limits = ceilings(device, benchmark_dtype(device), repeats)
    cases = {case.name: case.small() if options.scale == "small" else case for case in CASES}
    if device.type == "cpu":
        cases |= {case.name: case for case in CPU_CASES}
    cases = {name: case for name, case in cases.items() if options.only in name}
    report: dict[str, Any] = environment("moe", device, limits)
    write("\n".join(f"{name}: {value}" for name, value in report.items()))
    report |= {"rows": [], "refused": {}, "not_run": list(cases), "geometric_means": {}}
    for name, case in cases.items():
        if time.monotonic() > options.end:
            break
        try:
            row = measure(case, device, repeats, limits)
        except Exception as error:  # whatever is wrong with one case, the others get their rows
            report["refused"][name] = f"{type(error).__name__}: {str(error)[:500]}"
            write(f"{name}: refused: {report['refused'][name]}")
        else:
            report["rows"].append({**row, "name": name})
            write(_line(report["rows"][-1]))
        report["not_run"].remove(name)
        report["geometric_means"] = geometric_means(report["rows"])
        options.save(report)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    means = "".join(f", {name} {ratio:.2f}x" for name, ratio in report["geometric_means"].items())
    counts = f"{len(report['rows'])} rows, {len(report['refused'])} refused, {len(report['not_run'])} not run"
    write(f"{counts}{means}")
    return int(bool(report["refused"]))


def _line(row: dict[str, Any]) -> str:
    times = f"{row['median_us']:9.1f} us ({row['p20_us']:.1f} to {row['p80_us']:.1f})"
    rates = (
        f"{row['gb_per_s']:7.1f} GB/s {row['tflop_per_s']:7.2f} TFLOP/s {row['percent']:5.1f} % of {row['bound_by']}"
    )
    ratios = "".join(f", {name} {peer['ratio']:.2f}x" for name, peer in row["peers"].items())
    faults = "".join(f", {name} {why}" for name, why in row["absent"].items() if why.startswith(("wrong", "failed")))
    return f"{row['name']:40} {times:40} {rates}{'' if row['cold'] else ', warm'}{ratios}{faults}"


if __name__ == "__main__":
    sys.exit(main())
