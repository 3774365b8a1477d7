"""What is compiled after `warmup`, at the sizes that are served: each takes a second or more, while requests wait."""

from __future__ import annotations

from itertools import cycle

import pytest

from paged import Engine, EngineConfig, SamplingParams
from tests.emulated_device.emulator.device import EmulatedCuda
from tests.emulated_device.emulator.report import CompiledKernel
from tests.emulated_device.shapes import SHAPES, executor_of

# Prompt lengths on both sides of what tile choices depend on, in the order they come.
LENGTHS = (1, 2, 7, 17, 40, 100, 33, 300, 16, 700, 64, 1500, 3, 128, 2500, 5)


def serve(name: str, cuda: EmulatedCuda) -> list[tuple[int, CompiledKernel]]:
    """A new request in every second step, then a dozen at once; what is compiled after warmup, and at which step."""
    executor = executor_of(name, num_blocks=4096, max_seq_len=32_768)
    executor.warmup()
    mark = cuda.report.mark()
    engine = Engine(executor, EngineConfig(token_budget=2048), seed=0)
    lengths, found, step = cycle(LENGTHS), [], 0

    def add() -> None:
        length = next(lengths)
        engine.add_request([length] * length, SamplingParams(temperature=0, max_tokens=4 + length % 13))

    while step < 2 * len(LENGTHS) or engine.num_unfinished:
        step += 1
        for _ in range(12 if step == 2 * len(LENGTHS) else step < 2 * len(LENGTHS) and step % 2):
            add()
        engine.step()
        found += [(step, kernel) for kernel in cuda.report.compiled_after(mark)]
        mark = cuda.report.mark()
    assert engine.metrics.finished == {"length": len(LENGTHS) + 12}
    return found


def described(step: int, kernel: CompiledKernel, difference: dict[str, tuple[str, str]] | None) -> str:
    """A line on a variant: what tells it from the one most like it that was there."""
    what = "its first" if difference is None else ", ".join(f"{k}: {a} -> {b}" for k, (a, b) in difference.items())
    return f"step {step}: {kernel.name} ({kernel.place}), {what}"


@pytest.mark.parametrize("name", SHAPES)
def test_nothing_is_compiled_while_serving(name: str) -> None:
    with EmulatedCuda(num_sms=132, executes=False) as cuda:
        late = [described(step, kernel, cuda.report.nearest(kernel)) for step, kernel in serve(name, cuda)]
        cuda.report.check()
        assert not late, "\n".join(late)
