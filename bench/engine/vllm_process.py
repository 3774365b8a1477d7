"""A vLLM engine on a CPU in its own environment, which `cpu_engines.py` and `busy_peers.py` start.
It imports nothing of this package.

    python -P vllm_process.py CHECKPOINT DTYPE THREADS MODE

MODE is `eager`, `compiled` (by torch.compile) or `processes`: eager, with the scheduler in another process than the
model. First the process writes its version, in a line of JSON. It takes jobs from stdin: for each line with `prompts`
and `new_tokens` it writes a line with the total `seconds`, each prompt's `first_seconds` and its `tokens`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from time import perf_counter
from typing import Any

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_TARGET_DEVICE": "cpu",
}


def main(folder: str, dtype: str, threads: str, mode: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output must not mix with answers
    cores = sorted(os.sched_getaffinity(0))[: int(threads)]
    os.environ.update(SETTINGS)
    if mode == "processes":  # vLLM would leave the scheduler a core of its own
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    else:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    importlib.import_module("torch").set_num_threads(int(threads))
    vllm: Any = importlib.import_module("vllm")
    llm = vllm.LLM(
        model=folder,
        dtype=dtype,
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_batched_tokens=2048,
        max_num_seqs=256,
        enforce_eager=mode != "compiled",
        seed=0,
    )
    print(json.dumps({"version": vllm.__version__}), file=answers, flush=True)
    for number, line in enumerate(sys.stdin):
        print(json.dumps(_run(vllm, llm, str(number), **json.loads(line))), file=answers, flush=True)


def _run(vllm: Any, llm: Any, job: str, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    llm.reset_prefix_cache()
    engine = llm.llm_engine
    params = vllm.SamplingParams(
        temperature=0,
        max_tokens=new_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=vllm.sampling_params.RequestOutputKind.DELTA,
    )
    names = [f"{job}.{index}" for index in range(len(prompts))]
    first_seconds: dict[str, float] = {}
    tokens: dict[str, list[int]] = {name: [] for name in names}
    start = perf_counter()
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            first_seconds.setdefault(output.request_id, perf_counter() - start)
            tokens[output.request_id] += output.outputs[0].token_ids
    seconds = perf_counter() - start
    return {
        "seconds": seconds,
        "first_seconds": [first_seconds[name] for name in names],
        "tokens": [tokens[name] for name in names],
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
