"""transformers' `generate_batch` for hybrid models, whose layers its own continuous batching does not take.

transformers pages K and V of full and of sliding attention alone, and gives no other layer a place in a batch. A model
with other layers (Qwen3-Next, LFM2, Jamba, ...) runs in an engine of this package, with the weights that it has then.
"""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import Any
from weakref import WeakKeyDictionary

from transformers.generation.continuous_batching.cache import ATTN_TYPE_TO_ALLOCATOR
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from paged import Engine, EngineConfig, LlmExecutor, SamplingParams
from paged.errors import UnsupportedError
from paged.interop.trl import checkpoint_weights

# Settings of a GenerationConfig by the names of `SamplingParams`.
_SAMPLING = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "repetition_penalty": "repetition_penalty",
}
_DRAWING = ("temperature", *SamplingParams().filters)
# Settings that change no token of `generate_batch`, or that are read by name below.
_READ = {"bos_token_id", "pad_token_id", "transformers_version", "use_cache", "do_sample", "eos_token_id", "max_length"}

_ENGINES: WeakKeyDictionary[Any, Engine] = WeakKeyDictionary()


def is_hybrid(config: Any) -> bool:
    """Return whether a model has layers that transformers' continuous batching refuses."""
    layer_types = getattr(config.get_text_config(), "layer_types", None) or ()
    return any(layer_type not in ATTN_TYPE_TO_ALLOCATOR for layer_type in layer_types)


def generate_batch(
    model: Any,
    inputs: list[list[int]],
    generation_config: Any = None,
    continuous_batching_config: Any = None,
    record_timestamps: bool = False,
    progress_bar: bool = False,
    persistent_manager: bool = False,
    warmup: bool = True,
    max_new_tokens: int | None = None,
    **unknown: Any,
) -> dict[str, GenerationOutput]:
    """Complete prompts as transformers' method of this name does.

    The first call writes the model to a temporary folder and loads it into an engine, which stays as long as the model
    does. Every later call copies the model's weights to the engine. The engine decides the size of its cache.

    Args:
        model: transformers model of a family of this package.
        inputs: token ids of each prompt.
        generation_config: its settings of sampling and ends; None for the model's own.
        continuous_batching_config: max_batch_tokens, max_requests_per_batch, return_logprobs and seed are read. The
            rest configures transformers' own cache and graphs.
        persistent_manager: not read, the engine always stays.
        warmup: whether the first call compiles kernels and captures graphs before it runs.

    Returns:
        Outputs by request id, in the order of the prompts, each followed by its further sequences.

    Raises:
        UnsupportedError: a setting that the engine does not honour, timestamps, or a model of no family.
        Any error of `Engine.generate`.
    """
    for name in unknown:
        raise UnsupportedError(f"{name}: generate_batch of a hybrid model does not take it")
    if record_timestamps:
        raise UnsupportedError("record_timestamps: True, generate_batch of a hybrid model records none")
    params = _sampling_params(generation_config or model.generation_config, continuous_batching_config, max_new_tokens)
    if not inputs:
        return {}
    engine = _engine_of(model, continuous_batching_config, warmup=warmup)
    results = {}
    for index, output in enumerate(engine.generate(inputs, params, progress=progress_bar)):
        for completion in output.outputs:
            request_id = f"req_{index}"
            if completion.index:
                request_id += f"__child#{completion.index - 1}"
            logprobs: list[float] = []
            for table in completion.logprobs or ():
                logprobs += table.values()
            results[request_id] = GenerationOutput(
                request_id=request_id,
                prompt_ids=output.prompt_token_ids,
                generated_tokens=completion.token_ids,
                logprobs=logprobs,
                error=output.error,
                status=RequestStatus.FINISHED if output.error is None else RequestStatus.FAILED,
            )
    return results


def _sampling_params(generation_config: Any, batching: Any, max_new_tokens: int | None) -> SamplingParams:
    settings = generation_config.to_diff_dict()
    for name in settings.keys() - _READ - _SAMPLING.keys() - set(_DRAWING):
        raise UnsupportedError(f"{name}: {settings[name]!r}, generate_batch of a hybrid model does not take it")
    params: dict[str, Any] = {"max_tokens": settings.get("max_length"), "ignore_eos": True}
    for name, own_name in _SAMPLING.items():
        if settings.get(name) is not None:
            params[own_name] = settings[name]
    if max_new_tokens is not None:
        params["max_tokens"] = max_new_tokens
    if settings.get("do_sample"):
        params |= {name: settings[name] for name in _DRAWING if settings.get(name) is not None}
    else:
        params["temperature"] = 0.0
    ends = settings.get("eos_token_id")
    if ends is None:
        ends = []
    elif isinstance(ends, int):
        ends = [ends]
    params["stop_token_ids"] = [token for token in ends if token >= 0]
    if batching is not None:
        params["seed"] = batching.seed
        if batching.return_logprobs:
            params["logprobs"] = 0
    return SamplingParams(**params)


def _engine_of(model: Any, batching: Any, *, warmup: bool) -> Engine:
    """Return the model's engine with the model's weights."""
    engine = _ENGINES.get(model)
    if engine is not None:
        engine.update_weights(checkpoint_weights(model))
        return engine
    policy = {"logprobs_mode": "processed"}  # transformers' log probabilities are those after its processors
    if batching is not None and batching.max_batch_tokens is not None:
        policy["token_budget"] = batching.max_batch_tokens
    if batching is not None and batching.max_requests_per_batch is not None:
        policy["max_num_seqs"] = batching.max_requests_per_batch
    with TemporaryDirectory(prefix="paged-") as folder:
        model.save_pretrained(folder)
        executor = LlmExecutor.from_pretrained(folder, device=model.device, dtype=model.dtype, progress=False)
    if warmup:
        executor.warmup()
    _ENGINES[model] = Engine(executor, EngineConfig(**policy))
    return _ENGINES[model]
