"""Deadlines: those of requests that have ended are forgotten."""

from __future__ import annotations

import torch

from paged import Engine
from tests.executors.engine_cases import FIVE
from tests.executors.oracle import make_executor


def test_deadlines_of_the_past_take_no_memory(device: torch.device) -> None:
    engine = Engine(make_executor(device))
    for _ in range(5):
        for _ in range(100):
            engine.abort(engine.add_request([1], FIVE, timeout_s=3600).request_id)
    assert len(engine._lifecycle._deadlines._heap) <= 128
