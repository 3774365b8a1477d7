"""Decode steps and prompts on a CPU in several weight formats, in turns with plain weights and with llama.cpp."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from paged import LlmExecutor
from paged.bench.benchmark import Json, Setting
from paged.bench.contest import OURS, Contest
from paged.bench.engine import llama_cpp_process
from paged.bench.engine.models import MODELS, load, random_executor, save_random
from paged.bench.engine.peer_process import PEERS, PeerProcess
from paged.bench.timing import Sample, ceilings
from paged.models.paged_lm import PagedCausalLM
from paged.models.quantized_writer import quantize_checkpoint

PEER = "llama.cpp"
PEER_PYTHON = PEERS / "llama-cpp" / "bin" / "python"
# Our format -> llama.cpp's format in the same row; empty for none. "head" also quantises the tied head.
FORMATS = {
    "plain": "",
    "int4": "Q4_0",
    "int4 head": "Q4_0",
    "int8": "Q8_0",
    "int8 head": "Q8_0",
    "fp8": "",
}
_BATCHES = (1, 32)
_CONTEXT = 32
# Number of steps in a turn. Their median counts, because threads of the other engine may be busy in the first step.
_STEPS = 6
# Size in a row's name -> model.
CONFIGS = {"": "Llama-6-layers", "0.5B": "Llama-0.5B", "1.5B": "Llama-1.5B"}
# Models with experts -> formats. llama.cpp's process does not write these models.
EXPERTS = {
    "Qwen3-MoE": ("plain", "int4", "int8"),
    "Qwen3-Next": ("plain", "int4", "int8"),
    "gpt-oss": ("plain", "MXFP4"),
}
_MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}
# Rows of prompts: lengths in tokens, and formats that compute prompts differently.
_LENGTHS, _PROMPT_FORMATS = (512, 4096), ("plain", "int4", "int8")
# Limit of a prompt's seconds: 4,096 tokens take at most 9 seconds on one thread.
_MOST_PROMPT_S = 60.0
# Rows of the larger models: numbers of sequences, and formats.
_LARGE_BATCHES, _LARGE_FORMATS = (1, 8, 32), ("plain", "int4 head", "int8 head")
# Length at which all sequences start anew: 32 sequences of this length fill the cache.
_MOST_TOKENS = max(_LENGTHS) // max(_LARGE_BATCHES)


def rows() -> Iterator[tuple[str, str, int, str]]:
    """Yield name, format, number of sequences and size of each row."""
    for batch in _BATCHES:
        for form in FORMATS:
            yield f"quantized.{form}.{batch}", form, batch, ""
    for size in ("0.5B", "1.5B"):
        for batch in _LARGE_BATCHES:
            for form in _LARGE_FORMATS:
                yield f"quantized.{size}.{form}.{batch}", form, batch, size
    for size, forms in EXPERTS.items():
        for batch in _LARGE_BATCHES:
            for form in forms:
                yield f"quantized.{size}.{form}.{batch}", form, batch, size


def prompt_rows() -> Iterator[tuple[str, str, int]]:
    """Yield name, format and number of tokens of each prompt's row."""
    for length in _LENGTHS:
        for form in _PROMPT_FORMATS:
            yield f"quantized.prompt.{form}.{length}", form, length


class _Models:
    """A model in every format, each made on first use, and the peer's processes."""

    def __init__(self, size: str) -> None:
        self._size, self.are_stored = size, size in CONFIGS
        self._folder = tempfile.TemporaryDirectory()
        self._path = Path(self._folder.name)
        if self.are_stored:
            save_random(MODELS[CONFIGS[size]], torch.bfloat16, str(self._path / "plain"))

    @cache  # noqa: B019
    def ours(self, form: str) -> PagedCausalLM:
        executor = self._stored(form) if self.are_stored else self._random(form)
        assert isinstance(executor.model, PagedCausalLM)
        executor.warmup()
        return executor.model

    def _stored(self, form: str) -> LlmExecutor:
        path = self._path / form
        if not path.exists():
            kind, _, head = form.partition(" ")
            quantize_checkpoint(self._path / "plain", path, kind, head=bool(head))
        return load(path, torch.device("cpu"), torch.bfloat16, max(_LENGTHS) + 1, progress=False)

    def _random(self, form: str) -> LlmExecutor:
        config = MODELS[self._size]
        quantization = None
        if form == "MXFP4":
            config = config | _MXFP4
        elif form != "plain":
            quantization = form
        return random_executor(
            config,
            torch.device("cpu"),
            max(_LENGTHS),
            dtype=torch.bfloat16,
            quantization=quantization,
            num_state_slots=2 * max(_LARGE_BATCHES),
        )

    @cache  # noqa: B019
    def peer(self, form: str) -> PeerProcess:
        arguments = (str(self._path / "plain"), form, str(torch.get_num_threads()))
        log = self._path / f"{form}.log"
        return PeerProcess(PEER, PEER_PYTHON, llama_cpp_process.__file__, *arguments, log=log)


# One size at a time, because all formats of a size stay in memory.
_models = lru_cache(maxsize=1)(_Models)


def step_bytes(model: PagedCausalLM, batch: int) -> int:
    """Return the bytes that a decode step of `batch` sequences must read.

    They are weights, keys and values at the context's end, and recurrent states.
    """
    stats, cache = model.kv_manager.stats(), model.kv_manager.config
    token_bytes = len(cache.tables) * stats.bytes_per_block // cache.block_size
    return model.step_bytes(batch) + batch * (_CONTEXT * token_bytes + stats.bytes_per_state)


def decode_step(name: str, form: str, batch: int, size: str, setting: Setting) -> Json:
    """Time a step of `batch` sequences.

    detail: MB of the weights, and MB that a step must read; the step's read rate in percent of the measured rate of
    reads with the same threads.
    """
    models = _models(size)
    model = models.ours(form)
    entries = Contest({"name": name}, setting)
    read_bytes = step_bytes(model, batch)
    detail = {"weights_mb": model.parameter_bytes() / 1e6, "read_mb": read_bytes / 1e6}
    job = {"batch": batch, "steps": _STEPS, "context": _CONTEXT, "most_tokens": _MOST_TOKENS}
    row = _in_turns(entries, models, form, lambda ours: _steps_of(ours, batch), job, detail)
    detail["percent_of_read"] = 100 * read_bytes / (row["median_us"] / 1e6) / setting.limits.read
    return row | {"detail": detail}


def prompt(name: str, form: str, length: int, setting: Setting) -> Json:
    """Time a prompt of `length` tokens.

    detail: the rate of its products in percent of the measured rate of bfloat16 with the same threads. int8 may exceed
    100, because it multiplies bytes.
    """
    models = _models("")
    entries = Contest({"name": name}, setting, max_seconds=_MOST_PROMPT_S, min_samples=3)
    detail: dict[str, float] = {}
    row = _in_turns(entries, models, form, lambda ours: _prompt_of(ours, length), {"prompt": length}, detail)
    rate = prompt_flops(MODELS[CONFIGS[""]], length) / (row["median_us"] / 1e6)
    limits = ceilings(setting.device, torch.bfloat16, setting.repeats)
    detail["percent_of_matmul"] = 100 * rate / limits.matmul
    return row | {"detail": detail}


def prompt_flops(config: Json, length: int) -> int:
    """Return the operations of a prompt: products with all weights except the head, and causal attention."""
    hidden_size: int = config["hidden_size"]
    kv_size = hidden_size // config["num_attention_heads"] * config["num_key_value_heads"]
    weights = 2 * hidden_size * (hidden_size + kv_size) + 3 * hidden_size * config["intermediate_size"]
    num_pairs = length * (length + 1) // 2
    flops: int = config["num_hidden_layers"] * (2 * length * weights + 4 * num_pairs * hidden_size)
    return flops


def _in_turns(
    entries: Contest,
    models: _Models,
    form: str,
    sample_of: Callable[[PagedCausalLM], Sample],
    job: Json,
    detail: dict[str, float],
) -> Json:
    """Time a format in turns with plain weights, and with llama.cpp if it was asked for. job: llama.cpp's request."""
    entries.samples[OURS] = sample_of(models.ours(form))
    if form != "plain":
        entries.samples["plain"] = sample_of(models.ours("plain"))
    peer_form = FORMATS.get(form, "")
    peer_name = f"{PEER} {peer_form}"
    if peer_form and models.are_stored and entries.setting.peers == PEER:
        peer = models.peer(peer_form)
        entries.samples[peer_name] = lambda: median(peer.ask(**job))
        detail["peer_weights_mb"] = peer.about["bytes"] / 1e6
    for sample in entries.samples.values():
        sample()  # warm-up
    row = entries.row()
    if peer_name in row["peers"]:
        about = models.peer(peer_form).about
        row["peers"][peer_name] |= {"backend": about["instructions"], "version": about["version"]}
    return row


def _prompt_of(model: PagedCausalLM, length: int) -> Sample:
    """Return a function that runs a prompt and returns its seconds."""
    tokens = [index % 1000 for index in range(length)]

    def sample() -> float:
        model.reset()
        start = perf_counter()
        model.prefill(0, tokens)
        return perf_counter() - start

    return sample


def _steps_of(model: PagedCausalLM, batch: int) -> Sample:
    """Return a function that runs some steps and returns the median of their seconds.

    Sequences have different tokens, so that they reach different experts.
    """

    def begin() -> None:
        model.reset()
        for seq in range(batch):
            model.prefill(seq, list(range(seq, seq + _CONTEXT)))

    def sample() -> float:
        if model.kv_manager.handles()[0].num_tokens + _STEPS > _MOST_TOKENS:
            begin()
        seconds = []
        for _ in range(_STEPS):
            position = model.kv_manager.handles()[0].num_tokens
            items = [(seq, 5 + seq, position) for seq in range(batch)]
            start = perf_counter()
            model.decode_batch_with_full_logits(items)
            seconds.append(perf_counter() - start)
        return median(seconds)

    begin()
    return sample
