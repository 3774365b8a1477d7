"""Decode steps of our engine and of others beside busy processes of other users.

Threads of each engine wait for each other as it chooses; vLLM runs without torch.compile."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from statistics import median

import torch

from paged.bench.benchmark import Json, Setting
from paged.bench.contest import OURS, beside
from paged.bench.engine import busy, cpu_engines, llama_cpp_process, quantized, transformers_process, vllm_process
from paged.bench.engine.models import MODELS, save_random
from paged.bench.engine.peer_process import PeerProcess
from paged.bench.limits import at_least, times_us
from paged.bench.neighbours import cores_left, neighbours
from paged.bench.watchdog import WATCHDOG

_TRANSFORMERS = "transformers"
_DTYPE, _LLAMA_CPP_FORM = "bfloat16", "BF16"
_CONTEXT, _NEW_TOKENS = 32, 8
# Length in tokens at which llama.cpp's sequences start anew, as in `busy_process`.
_MOST_TOKENS = 256
_TURNS, _SECONDS = 3, 0.5


def rows() -> list[busy.Case]:
    """Return the cases of `busy_peers`."""
    cases = []
    for case in busy.rows():
        name = case.name.replace("busy.", "busy.peers.", 1)
        cases.append(case._replace(name=name))
    return cases


class _Engines:
    """Our engine and the peers that are installed, each in a process of its own with as many threads.

    peers: name -> process. absent: name of a peer that is not installed -> the reason.
    """

    def __init__(self) -> None:
        self.ours = busy.process_of(OURS, _DTYPE)
        self.peers: dict[str, PeerProcess] = {}
        self.absent: dict[str, str] = {}
        self._folder = tempfile.TemporaryDirectory()
        checkpoint = str(Path(self._folder.name) / "checkpoint")
        save_random(MODELS[busy.MODEL], getattr(torch, _DTYPE), checkpoint)
        threads = str(self.ours.about["threads"])
        of_transformers = (transformers_process.__file__, checkpoint, _DTYPE, threads)
        self._start(_TRANSFORMERS, Path(sys.executable), *of_transformers)
        of_vllm = (vllm_process.__file__, checkpoint, _DTYPE, threads, "eager")
        self._start(cpu_engines.PEER, cpu_engines.PEER_PYTHON, *of_vllm)
        of_llama_cpp = (llama_cpp_process.__file__, checkpoint, _LLAMA_CPP_FORM, threads)
        self._start(quantized.PEER, quantized.PEER_PYTHON, *of_llama_cpp)

    def _start(self, name: str, python: Path, *arguments: str) -> None:
        """Start a peer, or note why it is absent."""
        WATCHDOG.progress()
        try:
            self.peers[name] = PeerProcess(name, python, *arguments, log=Path(self._folder.name) / f"{name}.log")
        except FileNotFoundError as error:
            self.absent[name] = str(error)
        except RuntimeError as error:
            self.absent[name] = f"failed: {error}"

    def step_seconds(self, name: str, sequences: int) -> float:
        """Return the mean seconds of an engine's decode step in one turn."""
        WATCHDOG.progress()
        if name == OURS:
            return busy.step_seconds(self.ours, sequences)
        if name == quantized.PEER:
            return _mean(lambda: _llama_cpp_steps(self.peers[name], sequences))
        return _mean(lambda: _generation_steps(self.peers[name], sequences))


# Processes live as long as the rows need them.
_engines = lru_cache(maxsize=1)(_Engines)


def _llama_cpp_steps(peer: PeerProcess, sequences: int) -> tuple[int, float]:
    """Return the number of decode steps that were run, and their seconds."""
    taken = peer.ask(batch=sequences, steps=_NEW_TOKENS, context=_CONTEXT, most_tokens=_MOST_TOKENS)
    return len(taken), sum(taken)


def _generation_steps(peer: PeerProcess, sequences: int) -> tuple[int, float]:
    """As `_llama_cpp_steps`, for an engine that generates from prompts. The time of the prompts does not count."""
    prompts = []
    for sequence in range(sequences):
        prompts.append(list(range(sequence, sequence + _CONTEXT)))
    run = peer.ask(prompts=prompts, new_tokens=_NEW_TOKENS)
    return _NEW_TOKENS - 1, run["seconds"] - max(run["first_seconds"])


def _mean(run: Callable[[], tuple[int, float]]) -> float:
    """Run steps for a turn; return the mean of their seconds."""
    num_steps, seconds = 0, 0.0
    while seconds < _SECONDS:
        num_new, new_seconds = run()
        num_steps += num_new
        seconds += new_seconds
    return seconds / num_steps


def busy_peers(case: busy.Case, setting: Setting) -> Json:
    """Time a step of each engine, in turns.

    over_quiet: an engine's median time over its own median time without neighbours. quiet_cores: cores that as many
    threads got without our neighbours; fewer cores than threads mean that other processes ran, too.
    """
    engines = _engines()
    names = [OURS, *engines.peers]
    turns = min(_TURNS, setting.repeats)
    for name in names:
        engines.step_seconds(name, case.sequences)  # warms up
    quiet_cores = cores_left(engines.ours.about["threads"], _SECONDS)
    quiet = _turns(engines, names, case.sequences, turns)
    taken = quiet
    if case.neighbours:
        with neighbours(case.neighbours, most_seconds=busy.MOST_LOAD_S):
            taken = _turns(engines, names, case.sequences, turns)
    ours, peers = beside(taken, times_us)
    for name, peer in engines.peers.items():
        peers[name]["version"] = peer.about["version"]
        if "instructions" in peer.about:
            peers[name]["backend"] = peer.about["instructions"]
    detail = {"quiet_cores": quiet_cores}
    for name, times in ((OURS, ours), *peers.items()):
        times["over_quiet"] = median(taken[name]) / median(quiet[name])
        detail[f"{name} over quiet"] = times["over_quiet"]
    fastest = min((times["ratio"] for times in peers.values()), default=None)
    return {
        "name": case.name,
        **ours,
        "peers": peers,
        "absent": engines.absent,
        "goals": [at_least("the speed of the fastest peer", fastest, 1.0)],
        "detail": detail,
    }


def _turns(engines: _Engines, names: list[str], sequences: int, turns: int) -> dict[str, list[float]]:
    """Return the mean seconds of each engine's steps, by turn."""
    taken: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(turns):
        for name, seconds in taken.items():
            seconds.append(engines.step_seconds(name, sequences))
    return taken
