"""Savings by tiers of the prefix cache in conversations whose K/V exceed the pool, and the cost of a slow folder."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import Event
from time import perf_counter

from paged import Engine, LlmExecutor, SamplingParams
from paged.bench.benchmark import Json, Setting
from paged.bench.engine.beside import check_same_texts
from paged.bench.engine.models import MODELS, load, random_prompts, save_random, warm_up
from paged.bench.limits import at_least, at_most, percentile
from paged.bench.timing import late_kernels
from paged.bench.watchdog import WATCHDOG
from paged.cache.tiers.folder import CacheFolder
from paged.executors.requests.output import RequestOutput

_NUM_CONVERSATIONS, _NUM_TURNS = 64, 8
_NEW_TOKENS, _ANSWER_TOKENS = 48, 16
# Number of users who wait at the same time.
_NUM_USERS = 4
# Size of the workload: tokens of all conversations, relative to the tokens that the pool holds.
_OVER_POOL = 10
_HOST_BYTES = 1 << 30
# Bytes of host memory in the case whose prompts never come again.
_SMALL_HOST_BYTES = 64 << 20
# Seconds to load a block of 32 tokens from a slow folder; a forward computes it in a few milliseconds.
_SLOW_LOAD_S = 0.02
_NO_TIER = "no tier"
# Limit of seconds in which a shutdown writes K/V to the folder.
_HANG_S = 600.0


class Conversations:
    """Conversations of one engine, and its measurements.

    texts: prompts and answers of each conversation. seconds: time of all turns. first_seconds: time of each request
    until its first token. num_run: computed prompt tokens. first_hits: cached tokens of the first request.
    """

    def __init__(self, executor: LlmExecutor, messages: Sequence[Sequence[list[int]]]) -> None:
        """messages: new tokens of each conversation and turn."""
        self.texts: list[list[int]] = [[] for _ in messages]
        self.seconds = 0.0
        self.first_seconds: list[float] = []
        self.num_run = 0
        self.first_hits = 0
        self._messages = messages
        self._engine = Engine(executor, eos_token_ids=())

    def run_turn(self, turn: int) -> None:
        """Run a turn of all conversations. A user begins the next conversation as soon as an answer has ended."""
        waiting = deque(range(len(self.texts)))
        running: dict[int, RequestOutput] = {}
        params = SamplingParams(temperature=0, max_tokens=_ANSWER_TOKENS)
        start = perf_counter()
        while waiting or running:
            while waiting and len(running) < _NUM_USERS:
                index = waiting.popleft()
                self.texts[index] += self._messages[index][turn]
                running[index] = self._engine.add_request(self.texts[index], params)
            self._engine.step()
            for index, output in list(running.items()):
                if output.finished:
                    self._end(index, output)
                    del running[index]
        self.seconds += perf_counter() - start
        WATCHDOG.progress()

    def _end(self, index: int, output: RequestOutput) -> None:
        if not self.first_seconds:
            self.first_hits = output.num_cached_tokens
        self.first_seconds.append(output.metrics.first_token_s or 0.0)
        self.num_run += len(self.texts[index]) - output.num_cached_tokens
        self.texts[index] += output.outputs[0].token_ids


class _SlowFolder(CacheFolder):
    """A folder whose reads wait before they begin."""

    def __init__(self, path: Path, wait: Callable[[], object]) -> None:
        super().__init__(path, None)
        self._wait = wait

    def load(self, name: str) -> bytes | None:
        self._wait()
        return super().load(name)


def conversations(name: str, model: str, setting: Setting) -> Json:
    """Measure how many times sooner the first token comes with host memory than without, in the median.

    Engines take turns, each with one turn of all conversations. After a restart on the folder, an engine runs them
    again beside a new engine without tiers.
    """
    config, rng = MODELS[model], random.Random(0)
    messages = []
    for _ in range(_NUM_CONVERSATIONS):
        messages.append(random_prompts(rng, config["vocab_size"], [_NEW_TOKENS] * _NUM_TURNS))
    with ExitStack() as stack, late_kernels() as late:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        save_random(config, setting.dtype, str(folder / "model"), setting.device.type)
        load_model = partial(_executor, stack, setting, folder / "model")
        host, folder_options = {"host_cache_bytes": _HOST_BYTES}, {"cache_folder": folder / "cache"}
        writer = load_model(**host, **folder_options)
        rows = _in_turns({_NO_TIER: load_model(), "host": load_model(**host), "folder": writer}, messages)
        texts = [text[:-_ANSWER_TOKENS] for text in rows[_NO_TIER].texts]
        assert writer.kv_manager is not None
        writer.kv_manager.close_tiers(_HANG_S)
        restarted = _in_turns({_NO_TIER: load_model(), "restart": load_model(**host, **folder_options)}, messages)
        detail: Json = {"restart_first_hits": restarted["restart"].first_hits}
        ratios: dict[str, float] = {}
        for part in (rows, restarted):
            cold = part.pop(_NO_TIER)
            for tier, measured in part.items():
                check_same_texts(measured.texts, cold.texts, len(cold.texts[0]))
                detail |= _compared(tier, measured, cold)
                ratios[tier] = detail[f"{tier}_first_token_ratio"]
        for kind, seconds in _added_seconds(load_model, folder / "cache", texts).items():
            detail[f"{kind}_added_ms"] = statistics.median(seconds) * 1e3
            detail[f"{kind}_added_p90_ms"] = percentile(seconds, 9) * 1e3
            detail[f"{kind}_added_most_ms"] = max(seconds) * 1e3
    goals = [at_least(f"1x with {tier}", ratio, 1) for tier, ratio in ratios.items()]
    for kind in ("slow", "dead"):
        goals.append(at_most(f"50 ms later, {kind} folder", detail[f"{kind}_added_ms"], 50))
    row = {"name": name, "value": ratios["host"], "unit": "times sooner", "goals": goals}
    return {**row, "late_kernels": ", ".join(late), "detail": detail}


def _executor(stack: ExitStack, setting: Setting, model: Path, **tiers: object) -> LlmExecutor:
    """Load a model whose pool holds a tenth of all conversations."""
    num_tokens = _NUM_CONVERSATIONS * _NUM_TURNS * (_NEW_TOKENS + _ANSWER_TOKENS)
    executor = load(model, setting.device, setting.dtype, num_tokens // _OVER_POOL, **tiers)
    stack.callback(executor.shutdown)
    warm_up(executor)
    return executor


def _in_turns(
    executors: Mapping[str, LlmExecutor], messages: Sequence[Sequence[list[int]]]
) -> dict[str, Conversations]:
    """Run all conversations by each executor; the order is reversed in every other turn."""
    engines = {name: Conversations(executor, messages) for name, executor in executors.items()}
    for turn in range(len(messages[0])):
        for name in sorted(engines, reverse=turn % 2 == 1):
            engines[name].run_turn(turn)
    return engines


def _compared(tier: str, measured: Conversations, cold: Conversations) -> Json:
    """Return the details of a tier: ratios of first-token times and of speed, and saved prompt tokens."""
    ours, theirs = measured.first_seconds, cold.first_seconds
    return {
        f"{tier}_first_token_ms": statistics.median(ours) * 1e3,
        f"{tier}_first_token_ratio": statistics.median(theirs) / statistics.median(ours),
        f"{tier}_first_token_p90_ratio": percentile(theirs, 9) / percentile(ours, 9),
        f"{tier}_tokens_per_second_ratio": cold.seconds / measured.seconds,
        f"{tier}_prompt_tokens_run": measured.num_run,
        f"{tier}_prompt_tokens_avoided": cold.num_run - measured.num_run,
    }


def _added_seconds(
    load_model: Callable[..., LlmExecutor], cache_folder: Path, prompts: Sequence[list[int]]
) -> dict[str, list[float]]:
    """Return how many seconds a folder delays the first token of each prompt that runs alone.

    One folder is slow; another does not answer.
    """
    end, rng = Event(), random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=1)
    waits: dict[str, Callable[[], object]] = {"slow": partial(time.sleep, _SLOW_LOAD_S), "dead": end.wait}
    engines = {"host": Engine(load_model(host_cache_bytes=_SMALL_HOST_BYTES), eos_token_ids=())}
    added: dict[str, list[float]] = {}
    for kind, wait in waits.items():
        added[kind] = []
        executor = load_model(host_cache_bytes=_SMALL_HOST_BYTES, cache_folder=cache_folder)
        assert executor.kv_manager is not None
        assert executor.kv_manager.files is not None
        executor.kv_manager.files.store = _SlowFolder(cache_folder, wait)
        engines[kind] = Engine(executor, eos_token_ids=())
    try:
        for prompt in prompts:
            seconds = {}
            for kind in rng.sample(list(engines), len(engines)):
                engine = engines[kind]
                output = engine.add_request(prompt, params)
                while not output.finished:
                    engine.step()
                seconds[kind] = output.metrics.first_token_s or 0.0
            for kind in waits:
                added[kind].append(seconds[kind] - seconds["host"])
            WATCHDOG.progress()
    finally:
        end.set()
    return added
