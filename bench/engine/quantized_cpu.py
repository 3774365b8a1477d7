"""Decode steps on a CPU of one model in several formats, in turns: `python -m paged.bench.engine.quantized_cpu`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from paged import LlmExecutor
from paged.bench.benchmark import environment, save
from paged.bench.engine import llama_cpp_process
from paged.bench.engine.models import MODELS, save_random
from paged.bench.engine.runs import PeerProcess
from paged.bench.limits import times_us
from paged.kernels.quantization.cpu_product import this_cpu
from paged.models.paged_lm import PagedCausalLM
from paged.models.quantized_writer import FORMATS, quantize_checkpoint

_CONTEXT = 32
_PEER = "llama.cpp "
# Seconds of some steps of a number of sequences.
_Steps = Callable[[int, int], list[float]]


def main() -> None:
    """Write a random Llama, quantise it, and print or save the times of decode steps as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="for the checkpoints, which are made if missing")
    parser.add_argument("--layers", type=int, default=6, help="of 24")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="in a turn")
    formats = ["plain", *FORMATS, "int4 head", "int8 head"]
    parser.add_argument(
        "--formats", nargs="+", default=formats, help=f"also {_PEER}Q4_0 and Q8_0; default: %(default)s"
    )
    parser.add_argument("--peer", type=Path, help="python with llama_cpp, gguf and safetensors, for llama.cpp")
    parser.add_argument("--json", type=Path, help="where to save the results")
    args = parser.parse_args()
    config = MODELS["Llama-100M"] | dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 16)
    config |= {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": args.layers}
    folder: Path = args.folder
    if not folder.exists():
        folder.mkdir(parents=True)
        save_random(config, torch.bfloat16, str(folder / "plain"))
        for form in FORMATS:
            quantize_checkpoint(folder / "plain", folder / form, form)
            quantize_checkpoint(folder / "plain", folder / f"{form} head", form, head=True)
    report = environment("engine", torch.device("cpu"))
    report |= {"config": config, "threads": torch.get_num_threads(), "cpu": this_cpu()._asdict(), "weight_bytes": {}}
    models: dict[str, _Steps] = {}
    for name in args.formats:
        if name.startswith(_PEER):
            form, threads = name.removeprefix(_PEER), str(torch.get_num_threads())
            command = (llama_cpp_process.__file__, folder / "plain", form, threads)
            peer = PeerProcess(name, args.peer, *command, log=folder / f"{name}.log")
            models[name] = partial(_ask, peer)
            report["peers"][_PEER.strip()], num_bytes = peer.told["version"], peer.told["bytes"]
        else:
            model = _load(folder, name)
            models[name], num_bytes = partial(_decode, model), model.parameter_bytes()
        report["weight_bytes"][name] = num_bytes
    report["rows"] = [row for batch in (1, 32) for row in _rows(models, batch, args.rounds, args.steps)]
    print(json.dumps(report, indent=1))
    if args.json is not None:
        save(args.json, report)


def _load(folder: Path, name: str) -> PagedCausalLM:
    executor = LlmExecutor.from_pretrained(folder / name, num_blocks=256, progress=False)
    assert isinstance(executor.model, PagedCausalLM)
    executor.warmup()
    return executor.model


def _decode(model: PagedCausalLM, batch: int, steps: int) -> list[float]:
    if len(model.kv_manager.handles()) != batch:
        model.reset()
        for sequence in range(batch):
            model.prefill(sequence, list(range(_CONTEXT)))
    seconds = []
    for _ in range(steps):
        position = model.kv_manager.handles()[0].num_tokens
        start = perf_counter()
        model.decode_batch_with_full_logits([(each, 5, position) for each in range(batch)])
        seconds.append(perf_counter() - start)
    return seconds


def _ask(peer: PeerProcess, batch: int, steps: int) -> list[float]:
    seconds: list[float] = peer.ask(batch=batch, steps=steps, context=_CONTEXT)
    return seconds


def _rows(models: dict[str, _Steps], batch: int, rounds: int, steps: int) -> list[dict[str, Any]]:
    """Return the times of a decode step of `batch` sequences; the first turn of each model warms up."""
    times: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(rounds + 1):
        for name, model in models.items():
            seconds = model(batch, steps)
            times[name] += seconds if turn else []
    found = {name: times_us(each) for name, each in times.items()}
    least = {name: {"least_us": min(each) * 1e6} for name, each in times.items()}

    def ratios(name: str) -> dict[str, dict[str, float]]:
        others = (other for other in found if other != name and other.startswith(("plain", _PEER)))
        medians = {other: found[other]["median_us"] for other in others}
        return {other: {"median_us": us, "ratio": us / found[name]["median_us"]} for other, us in medians.items()}

    return [
        {"name": f"decode.{batch}.{name}", **row, "detail": least[name], "peers": ratios(name)}
        for name, row in found.items()
    ]


if __name__ == "__main__":
    main()
