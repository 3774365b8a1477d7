"""StepPacer: prompts beside decodes stretch a step by no more than was asked."""

from __future__ import annotations

import pytest

from paged.executors.engine.step_pacer import StepPacer


def test_pacer_keeps_steps_within_the_stretch() -> None:
    """On a machine where a decode step takes 10 ms and a prompt token 0.1 ms at first, 0.3 ms later."""
    pacer = StepPacer(2.0)
    assert pacer.max_prefill_tokens == 0, "one step shows what decodes take"
    pacer.observe(0.010, 0)
    taken = []
    for step in range(40):
        count = pacer.max_prefill_tokens
        seconds = 0.010 + count * (0.0001 + 0.0002 * step / 40)
        assert seconds <= 0.020
        taken.append(count)
        pacer.observe(seconds, count)
    assert taken[0] == 8
    assert max(taken) > 50
    assert taken[-1] == pytest.approx(0.6 * 0.010 / 0.000295, rel=0.2)
