"""Decode steps on a CPU of one model in several weight formats, in turns with plain weights and with llama.cpp."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from paged import LlmExecutor
from paged.bench.benchmark import Json, Setting
from paged.bench.contest import OURS, Contest
from paged.bench.engine import llama_cpp_process
from paged.bench.engine.models import MODELS, save_random
from paged.bench.engine.peer_process import PEERS, PeerProcess
from paged.bench.timing import Sample
from paged.models.paged_lm import PagedCausalLM
from paged.models.quantized_writer import quantize_checkpoint

PEER = "llama.cpp"
PEER_PYTHON = PEERS / "llama-cpp" / "bin" / "python"
# Our formats, and llama.cpp's beside each; "head" also quantises the tied head.
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
# Steps in a turn, of which the median counts: threads of the engine before it may still be busy during the first.
_STEPS = 6
# 6 layers of the sizes of a 0.4B model. Others are named by their parameters.
_SIX_LAYERS = {
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 6,
}
# Those of Qwen2.5-0.5B and 1.5B, in a Llama, which llama.cpp's process writes as GGUF.
_HALF = {
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "vocab_size": 151_936,
}
_ONE_AND_A_HALF = {
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "vocab_size": 151_936,
}
CONFIGS = {
    "": MODELS["Llama-100M"] | _SIX_LAYERS,
    "0.5B": MODELS["Llama-100M"] | _HALF,
    "1.5B": MODELS["Llama-100M"] | _ONE_AND_A_HALF,
}
# Rows of the larger sizes: sequences, and formats.
_LARGE_BATCHES, _LARGE_FORMATS = (1, 8, 32), ("plain", "int4 head", "int8 head")


def rows() -> Iterator[tuple[str, str, int, str]]:
    """Yield name, format, number of sequences and size of each row."""
    for batch in _BATCHES:
        for form in FORMATS:
            yield f"quantized.{form}.{batch}", form, batch, ""
    for size in ("0.5B", "1.5B"):
        for batch in _LARGE_BATCHES:
            for form in _LARGE_FORMATS:
                yield f"quantized.{size}.{form}.{batch}", form, batch, size


class _Models:
    """A model in every format, written when it is first asked for, and the peer's processes."""

    def __init__(self, size: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._path = Path(self._folder.name)
        save_random(CONFIGS[size], torch.bfloat16, str(self._path / "plain"))

    @cache  # noqa: B019
    def ours(self, form: str) -> PagedCausalLM:
        path = self._path / form
        if not path.exists():
            kind, _, head = form.partition(" ")
            quantize_checkpoint(self._path / "plain", path, kind, head=bool(head))
        executor = LlmExecutor.from_pretrained(path, num_blocks=256, progress=False)
        assert isinstance(executor.model, PagedCausalLM)
        executor.warmup()
        return executor.model

    @cache  # noqa: B019
    def peer(self, form: str) -> PeerProcess:
        arguments = (str(self._path / "plain"), form, str(torch.get_num_threads()))
        log = self._path / f"{form}.log"
        return PeerProcess(PEER, PEER_PYTHON, llama_cpp_process.__file__, *arguments, log=log)


# One size at a time, since all its formats stay in memory.
_models = lru_cache(maxsize=1)(_Models)


def step_bytes(model: PagedCausalLM, batch: int) -> int:
    """Return the bytes that a decode step of `batch` sequences must read: weights, and keys and values at the context's
    end. An embedding counts if it is also the head."""
    num_bytes = model.parameter_bytes()
    network = model.network
    if network.lm_head is not None:
        num_bytes -= network.embed_tokens.nbytes
    stats, block_size = model.kv_manager.stats(), model.kv_manager.config.block_size
    return num_bytes + batch * _CONTEXT * stats.bytes_per_block // block_size


def decode_step(name: str, form: str, batch: int, size: str, setting: Setting) -> Json:
    """Time a step of `batch` sequences.

    detail: MB of the weights, and of what a step must read; the rate at which it read them, as a share of the measured
    rate of reads with the same threads, in percent.
    """
    models = _models(size)
    model = models.ours(form)
    entries = Contest({"name": name}, setting)
    entries.samples[OURS] = _sample(model, batch)
    read_bytes = step_bytes(model, batch)
    detail = {"weights_mb": model.parameter_bytes() / 1e6, "read_mb": read_bytes / 1e6}
    if form != "plain":
        entries.samples["plain"] = _sample(models.ours("plain"), batch)
    peer_form = FORMATS[form]
    if peer_form and setting.peers == PEER:
        peer = models.peer(peer_form)
        entries.samples[f"{PEER} {peer_form}"] = lambda: median(peer.ask(batch=batch, steps=_STEPS, context=_CONTEXT))
        detail["peer_weights_mb"] = peer.about["bytes"] / 1e6
    for sample in entries.samples.values():
        sample()  # warms up
    row = entries.row()
    detail["percent_of_read"] = 100 * read_bytes / (row["median_us"] / 1e6) / setting.limits.read
    return row | {"detail": detail}


def _sample(model: PagedCausalLM, batch: int) -> Sample:
    """Return a function that runs some steps and returns the median of their seconds."""
    model.reset()
    for seq in range(batch):
        model.prefill(seq, list(range(_CONTEXT)))

    def sample() -> float:
        seconds = []
        for _ in range(_STEPS):
            position = model.kv_manager.handles()[0].num_tokens
            items = [(seq, 5, position) for seq in range(batch)]
            start = perf_counter()
            model.decode_batch_with_full_logits(items)
            seconds.append(perf_counter() - start)
        return median(seconds)

    return sample
