"""What is compiled after `warmup`, at the sizes that are served: each takes a second or more, while requests wait."""

from itertools import cycle

import pytest

from paged import Engine, EngineConfig, SamplingParams
from tests.emulated_device.emulator.device import EmulatedCuda
from tests.emulated_device.shapes import SHAPES, executor_of

# Prompt lengths on both sides of what tile choices depend on, in the order they come.
LENGTHS = (1, 2, 7, 17, 40, 100, 33, 300, 16, 700, 64, 1500, 3, 128, 2500, 5)
ALWAYS = ("Qwen3-30B-A3B",)  # dense kernels and those of experts


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ALWAYS else pytest.mark.thorough) for name in SHAPES]
)
def test_nothing_is_compiled_while_serving(name: str) -> None:
    """A new request in every second step, then a dozen at once."""
    with EmulatedCuda(num_sms=132, executes=False) as cuda:
        executor = executor_of(name, num_blocks=4096, max_seq_len=32_768)
        executor.warmup()
        mark = cuda.report.mark()
        engine = Engine(executor, EngineConfig(token_budget=2048), seed=0)
        lengths, late, step = cycle(LENGTHS), [], 0
        while step < 2 * len(LENGTHS) or engine.num_unfinished:
            step += 1
            for _ in range(12 if step == 2 * len(LENGTHS) else step < 2 * len(LENGTHS) and step % 2):
                length = next(lengths)
                engine.add_request([length] * length, SamplingParams(temperature=0, max_tokens=4 + length % 13))
            engine.step()
            for kernel in cuda.report.compiled_after(mark):
                late.append(f"step {step}: {kernel.name} ({kernel.place}): {cuda.report.nearest(kernel)}")
            mark = cuda.report.mark()
        assert engine.metrics.finished == {"length": len(LENGTHS) + 12}
        cuda.report.check()
        assert not late, "\n".join(late)
