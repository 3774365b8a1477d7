"""Cases in real engines of vLLM: `python -m tests.vllm.engine.serve RESULTS BACKEND CASE...`, one after the other.

Each adds a line to the file RESULTS, beside which the checkpoints lie: {"case", "backend"} and {"tokens": [[...], ...],
"error": mean |log-probability - float64's|, "layers": classes, "cached": tokens found in the prefix cache,
"block_size": tokens}, or {"failed": why}.
"""

import json
import random
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from tests.vllm.engine.cases import CASES, Case
from tests.vllm.engine.checkpoints import VOCABULARY, adapter, checkpoint

NUM_PROMPTS, NUM_TOKENS = 8, 12


def prompts() -> list[list[int]]:
    """Ragged, every fourth after a prefix longer than two blocks; each begins to repeat itself, so that n-grams hit."""
    random_ = random.Random(0)
    shared = [random_.randrange(VOCABULARY) for _ in range(80)]
    made = []
    for index in range(NUM_PROMPTS):
        own = [random_.randrange(VOCABULARY) for _ in range(random_.randint(3, 100))]
        made.append((shared if index % 4 == 3 else []) + own + own[: len(own) // 2])
    return made


def _layers(worker: Any) -> list[str]:
    """The classes of a worker's attention layers."""
    from vllm.model_executor.layers.attention import Attention

    layers = [module for module in worker.get_model().modules() if isinstance(module, Attention)]
    return sorted({type(layer.impl).__name__ for layer in layers})


def _serve(case: Case, backend: str, folder: Path) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    path = checkpoint(folder, case.model, case.dtype)
    options: dict[str, Any] = {
        "dtype": case.dtype, "block_size": 32, "max_model_len": 512, "max_num_batched_tokens": 64, "max_num_seqs": 8,
        "enforce_eager": True, "enable_prefix_caching": True, "enable_chunked_prefill": True, "seed": 0,
        "skip_tokenizer_init": True, "attention_config": {"backend": backend}, "max_logprobs": VOCABULARY,
        **case.options,
    }  # fmt: skip
    llm = LLM(str(path), **options)
    try:
        lora = LoRARequest("adapter", 1, str(adapter(folder))) if case.adapter else None
        given = [{"prompt_token_ids": prompt * case.repeats} for prompt in prompts()]
        requests = [lora if index % 2 else None for index in range(len(given))] if lora else None
        logprobs = VOCABULARY if case.by_error else None
        greedy = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "detokenize": False}
        sampling = SamplingParams(**greedy, logprobs=logprobs)
        outputs = []
        for _ in range(2):  # the second time most of each prompt is in the prefix cache
            outputs += llm.generate(given, sampling, use_tqdm=False, lora_request=requests)
        return {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "error": _error(path, outputs) if case.by_error else None,
            "layers": sorted({name for names in llm.collective_rpc(_layers) for name in names}),
            "cached": sum(output.num_cached_tokens or 0 for output in outputs),
            "block_size": llm.llm_engine.vllm_config.cache_config.block_size,
        }
    finally:
        llm.llm_engine.engine_core.shutdown()


@torch.no_grad()
def _error(path: Path, outputs: list[Any]) -> float:
    """Mean distance of all log-probabilities from those of the same weights in float64, after the same tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    errors = []
    for output in outputs:
        generated = output.outputs[0]
        ids = torch.tensor([[*output.prompt_token_ids, *generated.token_ids]])
        expected = model(ids).logits[0, len(output.prompt_token_ids) - 1 : -1].log_softmax(-1)
        for row, given in zip(expected, generated.logprobs, strict=True):
            got = torch.tensor([given[token].logprob for token in range(VOCABULARY)], dtype=torch.float64)
            errors.append((got - row).abs().mean().item())
    return sum(errors) / len(errors)


def main() -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    results, backend, names = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    for case in (case for case in CASES if case.name in names):
        try:
            result = _serve(case, backend, results.parent)
        except Exception as error:  # whatever an engine ends in is a result
            traceback.print_exc()
            result = {"failed": f"{type(error).__name__}: {error}"}
        cleanup_dist_env_and_memory()
        with results.open("a") as file:
            print(json.dumps({"case": case.name, "backend": backend, **result}), file=file)


if __name__ == "__main__":
    main()
