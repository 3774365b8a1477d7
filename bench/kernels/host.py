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
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget

import paged
from paged.bench.cards.card import Card
from paged.bench.cards.cards import CARDS
from paged.bench.cards.draw import Draw
from paged.bench.problems.arguments import Arguments
from paged.kernels.core import ids as id_checks
from paged.kernels.core.device import using_numba
from paged.kernels.core.operation import Bound
from paged.kernels.moe.fused_moe import moe_block_size

NUM_TOKENS = 64
_ROUNDS, _CALLS = 9, 200
# Sizes of Qwen3-8B's layer and of Qwen3-30B-A3B's, with narrower experts: the host's work does not depend on widths.
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
    """A compiled kernel that counts launches; `triton.compiler.CompiledKernel` launches it, up to the driver."""

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
    """Let kernels launch on CPU tensors for the rest of the process; they are neither compiled nor run."""
    for name in dir(paged):  # load all kernels now; after the next lines they would be the interpreter's
        getattr(paged, name)
    triton.runtime.driver.set_active(_Driver())
    triton.compiler.compile = lambda *_args, **_options: _Compiled()
    id_checks.checks_on_host = lambda *_args, **_options: False
    os.environ["TRITON_INTERPRET"] = "1"  # as if tensors were on a GPU
    torch.set_grad_enabled(False)


class Launch(NamedTuple):
    """A call of an operation."""

    card: Card
    arguments: Arguments


def _launch(name: str, **sizes: Any) -> Launch:
    return Launch(CARDS[name], CARDS[name].draw(_DRAW, **sizes))


def dense_layer(bind: Callable[[Any], Any] = Bound, num_tokens: int = NUM_TOKENS) -> dict[str, Callable[[], object]]:
    """Return a decode step's launches of a decoder layer, without its products, by name. bind: binds operations."""
    norm = _launch("fused_add_rms_norm", tokens=num_tokens, hidden_size=4096)
    write = _launch("qk_norm_rope_and_cache", tokens=num_tokens, heads=_HEADS, dim=_HEAD_DIM)
    attend = _launch("paged_attention", lengths=[(1, 512)] * num_tokens, heads=_HEADS, dim=_HEAD_DIM)
    attend.arguments["out"] = torch.empty_like(attend.arguments["q"])
    activate = _launch("silu_and_mul", tokens=num_tokens, size=12288)
    return _bound(bind, norm, write, attend, norm, activate)


def moe_layer(bind: Callable[[Any], Any] = Bound, num_tokens: int = NUM_TOKENS) -> dict[str, Callable[[], object]]:
    """Return the launches of a layer with a mixture of experts instead of the MLP."""
    sizes = {"tokens": num_tokens, "num_experts": 128, "top_k": 8}
    experts = _launch("fused_moe", **sizes, hidden_size=256, intermediate_size=768)
    block_size = moe_block_size(num_tokens, sizes["top_k"], experts.arguments["w2"])
    assert block_size is not None
    route = _launch("route_and_align", **sizes, block_size=block_size)
    _, _, experts.arguments["aligned"] = route.card.operation(**route.arguments)
    layer = dense_layer(bind, num_tokens)
    del layer["silu_and_mul"]
    return layer | _bound(bind, route, experts)


def _bound(bind: Callable[[Any], Any], *launches: Launch) -> dict[str, Callable[[], object]]:
    """Return a call of each launch by name; the name of a second call says so."""
    operations = {}
    calls: dict[str, Callable[[], object]] = {}
    for card, named in launches:
        name = card.name
        if name not in operations:
            operations[name] = bind(card.operation)
        if name in calls:
            name = f"{name}, second"
        arguments = card.signature.bind(**named)
        calls[name] = functools.partial(operations[card.name], *arguments.args, **arguments.kwargs)
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
    """Return the median of this thread's CPU time over rounds."""
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
                with using_numba(False):  # as in a forward, which reads the environment once
                    rows.setdefault(operation, []).extend((microseconds(call), python_calls(call)))
        rows[f"{name} layer"] = [sum(column) for column in zip(*rows.values(), strict=True)]
        for operation, numbers in rows.items():
            print("{:28} {:7.1f} us {:5} calls   plain {:7.1f} us {:5} calls".format(operation, *numbers))


if __name__ == "__main__":
    main()
