"""Runs `run_compiled`, and the clock that refuses compilations, on Triton's own compiler, with a driver that launches
nothing."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from paged.bench.timing import CompiledWhileTimedError, timed
from paged.kernels.common.compilation import run_compiled
from paged.kernels.common.launch import launch

launched: list[str] = []
waited_for = threading.Barrier(2)
compile_kernel = triton.compiler.compile


@triton.jit
def _doubled_kernel(x_ptr, SIZE: tl.constexpr):
    tl.static_assert(SIZE < 1024)
    offsets = tl.arange(0, SIZE)
    tl.store(x_ptr + offsets, 2 * tl.load(x_ptr + offsets))


def compile_together(*args: Any, **kwargs: Any) -> Any:
    """Every compilation ahead begins only when another one has begun."""
    if threading.current_thread().name.startswith("ThreadPoolExecutor"):
        waited_for.wait(60)
    return compile_kernel(*args, **kwargs)


def run(*sizes: int) -> None:
    for size in sizes:
        launch(_doubled_kernel, (1,), x_ptr=x, SIZE=size)


def launches_elsewhere(kernels: list[Any]) -> list[Any]:
    """What another thread launches while it is compiled ahead runs there once it is compiled, in Triton 3.6 anew."""
    thread = threading.Thread(target=run, args=(16,))
    thread.start()
    thread.join()
    assert launched == ["_doubled_kernel"]
    return kernels


x = torch.zeros(1024)
triton.compiler.compile = compile_together
triton.runtime.driver.set_active(
    SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        launcher_cls=lambda source, metadata: lambda *args: launched.append(metadata.name),
        utils=SimpleNamespace(
            load_binary=lambda *args: (1, 1, 16, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": 1 << 18},
        ),
    )
)
run_compiled(lambda: run(16, 32, 16, 64, 128), launches_elsewhere)
assert launched == ["_doubled_kernel"] * 6

with pytest.raises(triton.CompilationError):
    run_compiled(lambda: run(256, 1024))
assert len(launched) == 7

run_compiled(lambda: run(16, 256), lambda kernels: 1 / 0)  # nothing is left to be compiled
assert len(launched) == 9

with pytest.raises(CompiledWhileTimedError, match="_doubled_kernel"), timed():
    run(512)
with timed():
    run(512)
