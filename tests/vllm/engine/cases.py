"""What the engines are run with, under vLLM's own backend and under ours."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """One way to run a model; every one has chunked prefill, a prefix that prompts share, and runs all prompts twice.

    options: of vLLM's engine. env: of its process. by_error: log-probabilities are compared with float64, not tokens,
    because roundings of 16 and 8 bits may choose others. adapter: every other prompt uses it. like: the case whose
    texts under vLLM's own backend it must have; that runs this one only where ours has failed. vllm_fails: how vLLM
    itself fails on a CPU, whichever the backend. repeats: how often every prompt holds its tokens. block_size: tokens
    of a block as vLLM must make it.
    """

    name: str
    model: str = "llama"
    dtype: str = "float32"
    options: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    by_error: bool = False
    adapter: bool = False
    like: str | None = None
    vllm_fails: str | None = None
    repeats: int = 1
    block_size: int | None = None


def _hybrid(block_size: int, repeats: int) -> Case:
    """Prompts longer than a block; vLLM's own recurrent layers take bfloat16 alone on a CPU."""
    name, model = f"Qwen3.5, blocks of {block_size:,}", f"qwen3.5 {block_size}"
    options = {"block_size": 16, "mamba_ssm_cache_dtype": "float32", "max_model_len": 4096}
    return Case(name, model, "bfloat16", options, by_error=True, repeats=repeats, block_size=block_size)


_CORES = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}  # where it finds one NUMA node vLLM places no second worker itself
_NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
_PARALLEL: dict[str, Any] = {"env": _CORES, "like": "Llama"}
CASES = (
    Case("Llama"),
    Case(
        "Llama, compiled, blocks of vLLM's choice", options={"enforce_eager": False, "block_size": None}, like="Llama"
    ),
    Case("Gemma 2: softcap, sliding window", model="gemma2"),
    Case("Gemma 3: sliding window, q/k norm", model="gemma3"),
    Case("gpt-oss: sinks, sliding window", model="gpt-oss"),
    Case("Qwen3-MoE", model="qwen3-moe"),
    *(_hybrid(block_size, repeats) for block_size, repeats in ((528, 6), (816, 8), (1056, 10))),
    Case("LoRA on every other prompt", options={"enable_lora": True, "max_lora_rank": 8}, adapter=True),
    Case("n-gram speculation", options={"speculative_config": _NGRAM}, like="Llama"),
    Case("tensor parallel 2", options={"tensor_parallel_size": 2}, **_PARALLEL),
    # Run eagerly, vLLM's CPU worker skips the warm-up in which a second stage makes its buffers.
    Case("pipeline parallel 2, compiled", options={"pipeline_parallel_size": 2, "enforce_eager": False}, **_PARALLEL),
    Case(
        "decode context parallel 2",
        model="one KV head",
        options={"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
        env=_CORES,
        vllm_fails="Context Parallelism is not supported on CPU",
    ),
    # It has a kernel of Triton's for every mean.
    Case(
        "batch-invariant mode", env={"VLLM_BATCH_INVARIANT": "1"}, vllm_fails="'function' object is not subscriptable"
    ),
    Case("float16", dtype="float16", by_error=True),
    Case("bfloat16", dtype="bfloat16", by_error=True),
    Case("fp8 cache of float32", options={"kv_cache_dtype": "fp8"}, by_error=True),
    Case("fp8 cache of bfloat16", dtype="bfloat16", options={"kv_cache_dtype": "fp8"}, by_error=True),
)
