"""A server's streams beside a busy process: real ones, of a tiny model."""

import sys

import pytest
import torch

from paged.bench.benchmark import Setting
from paged.bench.engine import busy_server, models

TINY = models.MODELS["Llama-10M"] | {"hidden_size": 48, "num_hidden_layers": 1, "intermediate_size": 64}
TINY |= {"num_attention_heads": 3}


@pytest.mark.usefixtures("by_pytorch")
@pytest.mark.skipif(sys.platform != "linux", reason="busy processes have sessions")
def test_each_stream_is_timed_without_and_with_a_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.MODELS, "Llama-tiny", TINY)
    monkeypatch.setattr(busy_server, "MODEL", "Llama-tiny")
    loads = []
    neighbours = busy_server.neighbours

    def noted(count: int, *, most_seconds: float) -> object:
        loads.append(count)
        return neighbours(count, most_seconds=most_seconds)

    monkeypatch.setattr(busy_server, "neighbours", noted)
    row = busy_server.server("busy.server", Setting(torch.device("cpu"), 2))
    detail = row["detail"]
    assert loads == [1, 1]
    assert 0 < detail["quiet_ms"] < detail["quiet_p99_ms"]
    assert row["goals"][0]["value"] == pytest.approx(detail["busy_p99_ms"] / detail["quiet_p99_ms"])
