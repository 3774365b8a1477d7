"""Host time of a layer's operations without the driver: a driver that launches nothing replaces CUDA's.

    python -m bench.kernels.host        microseconds, median of rounds, and calls of Python functions, bound and plain

Needs Triton, no GPU, and a process in which no kernel has run. Tensors are on the CPU; ids are not checked, as on a
GPU.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

import paged
from paged.bench.kernels import work
from paged.bench.kernels.work import Draw, Work
from paged.bench.operations import DEFINITIONS
from paged.kernels.common import id_checks
from paged.kernels.common.device import using_numba
from paged.kernels.common.operation import Bound
from paged.kernels.moe.fused_moe import moe_block_size

NUM_TOKENS = 64
_ROUNDS, _CALLS = 9, 200
# A layer of Qwen3-8B, and of Qwen3-30B-A3B with experts of an eighth of its width, which the host does not see.
_HEADS, _HEAD_DIM = (32, 8), 128
_DRAW = Draw(torch.device("cpu"), torch.bfloat16)


class _Driver:
    """A current device and stream, and nothing else."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class _Compiled:
    """A compiled kernel as `triton.compiler.CompiledKernel` launches it, up to the driver; counts the launches."""

    function, packed_metadata, num_launches = 0, (), 0

    def launch_metadata(self, *_: Any) -> Any:
        return None

    def run(self, *_: Any) -> None:
        _Compiled.num_launches += 1

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def runner(*arguments: Any) -> None:
            driver, hooks = triton.runtime.driver.active, triton.knobs.runtime
            stream = driver.get_current_stream(driver.get_current_device())
            metadata = self.launch_metadata(grid, stream, *arguments)
            enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
            self.run(*grid, stream, self.function, self.packed_metadata, metadata, enter, leave, *arguments)

        return runner


def pretend_gpu() -> None:
    """Let CPU tensors be launched on, by kernels that are neither compiled nor run, for the rest of the process."""
    for name in dir(paged):  # jitted functions of files that are loaded later would be the interpreter's
        getattr(paged, name)
    triton.runtime.driver.set_active(_Driver())
    triton.compiler.compile = lambda *_args, **_options: _Compiled()
    id_checks.checks_on_host = lambda *_args, **_options: False
    os.environ["TRITON_INTERPRET"] = "1"  # as if tensors were on a GPU
    torch.set_grad_enabled(False)


def dense_layer(bind: Callable[[Any], Any] = Bound, num_tokens: int = NUM_TOKENS) -> dict[str, Callable[[], object]]:
    """Return a decode step's launches of a decoder layer, without its products, by name. bind: binds operations."""
    norm = work.fused_add_rms_norm(_DRAW, tokens=num_tokens, hidden_size=4096)
    write = work.qk_norm_rope_and_cache(_DRAW, tokens=num_tokens, heads=_HEADS, dim=_HEAD_DIM)
    attend = work.paged_attention(_DRAW, lengths=[(1, 512)] * num_tokens, heads=_HEADS, dim=_HEAD_DIM)
    attend.arguments["out"] = torch.empty_like(attend.arguments["q"])
    activate = work.silu_and_mul(_DRAW, tokens=num_tokens, size=12288)
    return _bound(bind, norm, write, attend, norm, activate)


def moe_layer(bind: Callable[[Any], Any] = Bound, num_tokens: int = NUM_TOKENS) -> dict[str, Callable[[], object]]:
    """Return the launches of a layer with a mixture of experts instead of the MLP."""
    sizes = {"tokens": num_tokens, "num_experts": 128, "top_k": 8}
    experts = work.fused_moe(_DRAW, **sizes, hidden_size=256, intermediate_size=768)
    block_size = moe_block_size(num_tokens, sizes["top_k"], experts.arguments["w2"])
    assert block_size is not None
    route = work.route_and_align(_DRAW, **sizes, block_size=block_size)
    _, _, experts.arguments["aligned"] = route.call()
    layer = dense_layer(bind, num_tokens)
    del layer["silu_and_mul"]
    return layer | _bound(bind, route, experts)


def _bound(bind: Callable[[Any], Any], *launches: Work) -> dict[str, Callable[[], object]]:
    """Return a call of each; a name's second call is named so."""
    operations = {}
    calls: dict[str, Callable[[], object]] = {}
    for launch in launches:
        name = launch.operation
        if name not in operations:
            operations[name] = bind(getattr(paged, name))
        if name in calls:
            name = f"{name}, second"
        arguments = DEFINITIONS[launch.operation].signature.bind(**launch.arguments)
        calls[name] = functools.partial(operations[launch.operation], *arguments.args, **arguments.kwargs)
    return calls


def python_calls(call: Callable[[], object]) -> int:
    """Count the calls of Python functions in a call, from its second run on."""
    call()
    count = 0

    def on_event(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(on_event)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def microseconds(call: Callable[[], object]) -> float:
    """Return the median over rounds of this thread's CPU time."""
    call()
    rounds = []
    for _ in range(_ROUNDS):
        start = time.thread_time()
        for _ in range(_CALLS):
            call()
        rounds.append(1e6 * (time.thread_time() - start) / _CALLS)
    return statistics.median(rounds)


def main() -> None:
    pretend_gpu()
    for name, layer_of in (("dense", dense_layer), ("MoE", moe_layer)):
        rows: dict[str, list[float]] = {}
        for layer in (layer_of(), layer_of(lambda operation: operation)):
            for operation, call in layer.items():
                with using_numba(False):  # as a forward does, which reads the environment once
                    rows.setdefault(operation, []).extend((microseconds(call), python_calls(call)))
        rows[f"{name} layer"] = [sum(column) for column in zip(*rows.values(), strict=True)]
        for operation, numbers in rows.items():
            print("{:28} {:7.1f} us {:5} calls   plain {:7.1f} us {:5} calls".format(operation, *numbers))


if __name__ == "__main__":
    main()
