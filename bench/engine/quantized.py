"""Decode steps on a CPU of one model in several weight formats, in turns with plain weights and with llama.cpp."""

from __future__ import annotations

import tempfile
from functools import cache
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
BATCHES = (1, 32)
_CONTEXT = 32
# Steps in a turn, of which the median counts: threads of the engine before it may still be busy during the first.
_STEPS = 6
# 6 layers of the sizes of a 0.4B model.
_CONFIG = MODELS["Llama-100M"] | {
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 6,
}


class _Models:
    """The model in every format, written when it is first asked for, and the peer's processes."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._path = Path(self._folder.name)
        save_random(_CONFIG, torch.bfloat16, str(self._path / "plain"))

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


_models = cache(_Models)


def decode_step(name: str, form: str, batch: int, setting: Setting) -> Json:
    """Time a step of `batch` sequences. detail: bytes of the weights, MB."""
    models = _models()
    entries = Contest({"name": name}, setting)
    entries.samples[OURS] = _sample(models.ours(form), batch)
    detail = {"weights_mb": models.ours(form).parameter_bytes() / 1e6}
    if form != "plain":
        entries.samples["plain"] = _sample(models.ours("plain"), batch)
    peer_form = FORMATS[form]
    if peer_form and setting.peers == PEER:
        peer = models.peer(peer_form)
        entries.samples[f"{PEER} {peer_form}"] = lambda: median(peer.ask(batch=batch, steps=_STEPS, context=_CONTEXT))
        detail["peer_weights_mb"] = peer.about["bytes"] / 1e6
    for sample in entries.samples.values():
        sample()  # warms up
    return entries.row() | {"detail": detail}


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
