"""transformers in a process of its own, which `busy_peers.py` starts; imports nothing of ours.

    python -P transformers_process.py CHECKPOINT DTYPE THREADS

For each line of stdin with `prompts` of one length and `new_tokens` it generates by `generate`, and writes the total
`seconds` and each prompt's `first_seconds`, as `vllm_process.py` does.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from time import perf_counter
from typing import Any

import torch


def main(folder: str, dtype: str, threads: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output must not mix with answers
    torch.set_num_threads(int(threads))
    transformers: Any = importlib.import_module("transformers")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    print(json.dumps({"version": transformers.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_run(model, **json.loads(line))), file=answers, flush=True)


def _run(model: Any, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    input_ids = torch.tensor(prompts)
    token_times: list[float] = []

    def note_time(_: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        token_times.append(perf_counter())
        return logits

    start = perf_counter()
    model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        logits_processor=[note_time],
    )
    seconds = perf_counter() - start
    first_seconds = token_times[0] - start
    return {"seconds": seconds, "first_seconds": [first_seconds] * len(prompts)}


if __name__ == "__main__":
    main(*sys.argv[1:])
