"""The engine's throughput against transformers' continuous batching, on the same weights."""

from __future__ import annotations

import inspect
import logging
import random
import tempfile
from time import perf_counter
from typing import Any

import torch

from paged.bench.benchmark import Json, Setting
from paged.bench.contest import OURS
from paged.bench.engine.beside import Run, check_same_texts, quiet_runs, row_beside, run_engine
from paged.bench.engine.cost import generation
from paged.bench.engine.models import MODELS, load, random_prompts, save_random, warm_up
from paged.bench.timing import measured_ceilings
from paged.bench.watchdog import WATCHDOG

_NUM_PROMPTS, _NEW_TOKENS = 32, 64
_CACHE_TOKENS = 16_384
_PEER_BLOCK = 32
# Device -> least and largest number of rounds, see `quiet_runs`. A CPU gets more rounds, because other work on the
# machine changes a run by a third.
_ROUNDS = {"cpu": (3, 8), "cuda": (2, 4)}
_CEILING_REPEATS = 5


def throughput(size: str, target: float, setting: Setting) -> Json:
    """Measure our tokens per second, and the peer's on the same weights. percent: see `cost.generation`."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    config, device, rng = MODELS[f"Llama-{size}"], setting.device, random.Random(0)
    lengths = [rng.randint(8, 128) for _ in range(_NUM_PROMPTS)]
    prompts = random_prompts(rng, config["vocab_size"], lengths)
    with tempfile.TemporaryDirectory() as folder:
        model = save_random(config, setting.dtype, folder, device.type)
        WATCHDOG.progress()
        executor = load(folder, device, setting.dtype, _CACHE_TOKENS)
    WATCHDOG.progress()
    warm_up(executor)

    def run_peer(sizes: ContinuousBatchingConfig | None, new_tokens: int) -> Run:
        options = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
        start = perf_counter()
        outputs = model.generate_batch(
            inputs=prompts, generation_config=options, continuous_batching_config=sizes, persistent_manager=bool(sizes)
        )
        seconds = perf_counter() - start
        ordered = sorted(outputs.values(), key=lambda output: int(output.request_id.rpartition("_")[2]))
        return Run(seconds, [], [list(output.generated_tokens) for output in ordered])

    # The name is block_size in transformers 5.17, page_size in other releases.
    page = "block_size"
    if "page_size" in inspect.signature(ContinuousBatchingConfig).parameters:
        page = "page_size"
    options: dict[str, Any] = {page: _PEER_BLOCK, "num_blocks": _CACHE_TOKENS // _PEER_BLOCK}
    sized = ContinuousBatchingConfig(**options, max_batch_tokens=2048, use_cuda_graph=False)
    run_engine(executor, prompts, 2)
    run_peer(sized, 2)
    WATCHDOG.progress()
    engines = {
        OURS: lambda _: run_engine(executor, prompts, _NEW_TOKENS),
        "transformers": lambda _: run_peer(None, _NEW_TOKENS),
        "transformers sized": lambda _: run_peer(sized, _NEW_TOKENS),
    }
    runs = quiet_runs(engines, *_ROUNDS[device.type])
    length = _NEW_TOKENS
    if setting.dtype != torch.float32:
        length = 1  # in 16 bits almost every text of 64 tokens differs somewhere
    for our_run, their_run in zip(runs[OURS], runs["transformers sized"], strict=True):
        check_same_texts(our_run.tokens, their_run.tokens, length)
    cost = generation(executor, config, lengths, _NEW_TOKENS)
    limits = measured_ceilings(device, setting.dtype, _CEILING_REPEATS, cost.num_bytes // _NEW_TOKENS)
    num_tokens = _NUM_PROMPTS * _NEW_TOKENS
    return row_beside(f"throughput.{size}", runs, num_tokens, cost, limits, target, "transformers")
