"""Our engine beside one in another process, which a package named vllm stands in for."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paged import LlmExecutor
from paged.bench.benchmark import Setting
from paged.bench.check import WrongResultError
from paged.bench.engine import beside, cost, cpu_engines, models
from paged.bench.engine.beside import Run, run_engine
from paged.bench.engine.cpu_engines import PEER, Workload, beside_vllm

_VLLM = '''
from time import sleep
from types import SimpleNamespace as Made

__version__ = "0.0"
sampling_params = Made(RequestOutputKind=Made(DELTA=1))
SamplingParams = Made


class LLM:
    """Answers every prompt with its first token, a token a step, which takes 50 ms unless compiled."""

    def __init__(self, model, enforce_eager, **settings):
        print("what is no answer")
        self.step_seconds = 0.05 * enforce_eager
        self.llm_engine, self.left = self, {}

    def reset_prefix_cache(self):
        assert not self.left

    def add_request(self, name, prompt, params):
        self.left[name] = [prompt["prompt_token_ids"][0]] * params.max_tokens

    def has_unfinished_requests(self):
        return bool(self.left)

    def step(self):
        sleep(self.step_seconds)
        found = [Made(request_id=name, outputs=[Made(token_ids=[left.pop()])]) for name, left in self.left.items()]
        self.left = {name: left for name, left in self.left.items() if left}
        return found
'''
_TINY = models.MODELS["Llama-10M"] | {"hidden_size": 96, "num_hidden_layers": 1, "intermediate_size": 64}
_TINY |= {"num_attention_heads": 3, "vocab_size": 64}
_SHORT = Workload("short", [3, 5], 4)
pytestmark = pytest.mark.usefixtures("by_pytorch")


def _python(folder: Path, script: str) -> Path:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    return path


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One that finds the stand-ins. Engines live as long as the module's tests."""
    folder = tmp_path_factory.mktemp("peer")
    (folder / "vllm.py").write_text(_VLLM)
    (folder / "torch.py").write_text("def set_num_threads(count): pass")
    yield _python(folder, f'PYTHONPATH={folder} exec {sys.executable} "$@"')
    cpu_engines._engines.cache_clear()


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, python: Path) -> None:
    monkeypatch.setitem(models.MODELS, "tiny", _TINY)
    settings = {"PEER_PYTHON": python, "_REST_S": 0, "_CACHE_TOKENS": 512, "_ROUNDS": 2, "_MAX_ROUNDS": 4}
    settings |= {"WORKLOADS": [Workload("first", [20] * 10, 1)], "_IN_ALL_MODES": {("tiny", torch.float32)}}
    for name, value in settings.items():
        monkeypatch.setattr(cpu_engines, name, value)


@pytest.fixture
def _unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in's texts are others."""
    monkeypatch.setattr(cpu_engines, "check_same_texts", lambda *_: None)


def _measured() -> dict[str, Any]:
    return beside_vllm("x", "tiny", torch.float32, _SHORT, 1.0, Setting(torch.device("cpu"), 1))


@pytest.mark.usefixtures("_unchecked")
def test_row_holds_all_modes_and_the_limit() -> None:
    """The peer's fastest mode counts."""
    row = _measured()
    peers = row["peers"]
    assert set(peers) == {PEER, f"{PEER} compiled", f"{PEER} processes"}
    peer = peers[f"{PEER} compiled"]
    assert row["goals"][0]["value"] == peer["ratio"] == min(each["ratio"] for each in peers.values())
    assert row["value"] == pytest.approx(8 / row["median_us"] * 1e6)
    assert row["detail"]["peer_tokens_per_second"] == pytest.approx(8 / peer["median_us"] * 1e6)
    assert peer["ratio"] == pytest.approx(peer["median_us"] / row["median_us"])
    assert 0 < row["detail"]["first_token_ms"] < row["median_us"] / 1e3
    assert 0 < row["detail"]["peer_first_token_ms"] < peer["median_us"] / 1e3
    assert row["percent"] > 0


@pytest.mark.usefixtures("_unchecked")
@pytest.mark.parametrize(("num_stolen", "num_rounds"), [(1, 3), (4, 4)])
def test_runs_that_lost_a_core_count_where_there_are_no_others(
    monkeypatch: pytest.MonkeyPatch, num_stolen: int, num_rounds: int
) -> None:
    """Our first runs lose a core for a minute, as the clock is told, and take as much longer."""
    stolen: list[float] = [0.0, 0.0]
    calls: list[int] = []

    def run(executor: LlmExecutor, prompts: list[list[int]], new_tokens: int) -> Run:
        found = run_engine(executor, prompts, new_tokens)
        calls.append(new_tokens)
        is_lost = new_tokens == _SHORT.new_tokens and calls.count(new_tokens) <= num_stolen
        stolen[1] += (lost := 60.0 * is_lost)
        return found._replace(seconds=found.seconds + lost)

    monkeypatch.setattr(cpu_engines, "run_engine", run)
    monkeypatch.setattr(beside, "stolen_seconds", lambda: list(stolen))
    row = _measured()
    assert calls.count(_SHORT.new_tokens) == num_rounds
    assert (row["p80_us"] < 60e6) == (row["detail"]["stolen_percent"] == 0) == (num_stolen == 1)


def test_other_texts_get_no_speed() -> None:
    cpu_engines._engines.cache_clear()
    with pytest.raises(WrongResultError, match="of 10 texts"):
        _measured()


def test_least_cost_as_counted_by_hand(tmp_path: Path) -> None:
    """Two prompts of 3 and 5 tokens and 4 new ones each: 4 steps, of which 3 read 3 + 1, 3 + 2, ... keys. The only
    layer is the last one: of 2 + 4 tokens K and V are all that is needed."""
    models.save_random(_TINY, torch.float32, str(tmp_path))
    executor = LlmExecutor.from_pretrained(str(tmp_path), num_blocks=8, block_size=16)
    head, kv = 64 * 96, 2 * 3 * 32
    layer = 96 * (96 + 2 * 96) + 96 * 96 + 3 * 96 * 64
    found, norms = cost.generation(executor, _TINY, _SHORT.lengths, 4), 3 * 96
    assert found.num_bytes == 4 * (4 * (layer + norms + head) + (4 + 5 + 6 + 6 + 7 + 8) * kv)
    last, pairs = layer - 2 * 96 * 96 + 2 * 96, 6 * 7 // 2 - (1 + 2) + 8 * 9 // 2 - (1 + 2 + 3 + 4)
    assert found.flops == 2 * ((8 + 6) * (layer + norms) - 6 * last + 8 * head + 2 * pairs * 96)
