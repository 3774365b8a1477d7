"""Decode steps on a CPU of one model in several formats, in turns: `python -m paged.bench.engine.quantized_cpu`."""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from paged import LlmExecutor
from paged.bench.engine.models import save_random
from paged.kernels.quantization.cpu_product import this_cpu
from paged.models.paged_lm import PagedCausalLM
from paged.models.quantized_writer import FORMATS, quantize_checkpoint

_CONTEXT = 32


def main() -> None:
    """Write a random Llama, quantise it, and print the medians as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="for the checkpoints, which are made if missing")
    parser.add_argument("--layers", type=int, default=6, help="of 24")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="in a turn")
    args = parser.parse_args()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 16),
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": args.layers,
        "vocab_size": 8000,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    }
    folder: Path = args.folder
    if not folder.exists():
        folder.mkdir(parents=True)
        save_random(config, torch.bfloat16, str(folder / "plain"))
        for form in FORMATS:
            quantize_checkpoint(folder / "plain", folder / form, form)
    models = {form: _load(folder / form) for form in ("plain", *FORMATS)}
    models |= {f"{form}, float32": _load(folder / form, dtype="float32") for form in ("plain", "int8", "int4")}
    report: dict[str, Any] = {"config": config, "threads": torch.get_num_threads(), "cpu": this_cpu()._asdict()}
    report["weight_bytes"] = {name: model.parameter_bytes() for name, model in models.items()}
    report["step_ms"] = {batch: _measure(models, batch, args.rounds, args.steps) for batch in (1, 32)}
    print(json.dumps(report, indent=2))


def _load(folder: Path, **options: Any) -> PagedCausalLM:
    model = LlmExecutor.from_pretrained(folder, num_blocks=256, cuda_graphs=False, progress=False, **options).model
    assert isinstance(model, PagedCausalLM)
    return model


def _measure(models: dict[str, PagedCausalLM], batch: int, rounds: int, steps: int) -> dict[str, float]:
    """Return the median milliseconds of a decode step of `batch` sequences."""
    for model in models.values():
        model.reset()
        for sequence in range(batch):
            model.prefill(sequence, list(range(_CONTEXT)))
    times: dict[str, list[float]] = {name: [] for name in models}
    positions = dict.fromkeys(models, _CONTEXT)
    for turn in range(rounds + 1):
        for name, model in models.items():
            for _ in range(steps):
                start = perf_counter()
                model.decode_batch_with_full_logits([(each, 5, positions[name]) for each in range(batch)])
                positions[name] += 1
                if turn:  # the first warms up
                    times[name].append(perf_counter() - start)
    return {name: statistics.median(each) * 1e3 for name, each in times.items()}


if __name__ == "__main__":
    main()
