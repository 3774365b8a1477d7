"""Host time of a layer's operations without the driver: a driver that launches nothing replaces CUDA's.

    python -m bench.kernels.host        microseconds, median of rounds, and calls of Python functions, bound and plain

Needs Triton, no GPU, and a process in which no kernel has run. Tensors are on the CPU; ids are not checked, as on a
GPU.
"""

from __future__ import annotations

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
from paged.kernels.common import id_checks
from paged.kernels.common.device import using_numba
from paged.kernels.common.operation import Bound
from paged.kernels.moe.fused_moe import moe_block_size

NUM_TOKENS = 64
_ROUNDS, _CALLS = 9, 200
# A layer of Qwen3-8B, and of Qwen3-30B-A3B with experts of an eighth of its width, which the host does not see.
_HIDDEN, _UNITS, _Q_HEADS, _KV_HEADS, _HEAD_DIM, _EXPERTS, _TOP_K = 4096, 12288, 32, 8, 128, 128, 8


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
    norm, write, attend, activate = map(
        bind, (paged.fused_add_rms_norm, paged.qk_norm_rope_and_cache, paged.paged_attention, paged.silu_and_mul)
    )
    x, residual, weight = _empty(num_tokens, _HIDDEN), _empty(num_tokens, _HIDDEN), _empty(_HIDDEN)
    gate_up, head_weight = _empty(num_tokens, 2 * _UNITS), _empty(_HEAD_DIM)
    sizes = [heads * _HEAD_DIM for heads in (_Q_HEADS, _KV_HEADS, _KV_HEADS)]
    q, k, v = (part.unflatten(1, (-1, _HEAD_DIM)) for part in _empty(num_tokens, sum(sizes)).split(sizes, dim=1))
    k_cache, v_cache = _empty(256, 16, _KV_HEADS, _HEAD_DIM), _empty(256, 16, _KV_HEADS, _HEAD_DIM)
    positions, angles = torch.arange(num_tokens), torch.empty(4096, _HEAD_DIM)
    table, out = torch.zeros(num_tokens, 64, dtype=torch.int32), _empty(num_tokens, _Q_HEADS, _HEAD_DIM)
    offsets = torch.arange(num_tokens + 1, dtype=torch.int32)
    seq_lens = torch.full((num_tokens,), 512, dtype=torch.int32)
    plan = paged.AttentionPlan(offsets, seq_lens, max_seqlen_q=1, max_seqlen_k=1024)
    batch = {"block_table": table, "cu_seqlens_q": offsets, "seq_lens": seq_lens, "max_seqlen_q": 1, "plan": plan}
    slots, norms = torch.arange(num_tokens), {"q_weight": head_weight, "k_weight": head_weight}
    return {
        "fused_add_rms_norm": lambda: norm(x, residual, weight),
        "qk_norm_rope_and_cache": lambda: write(q, k, v, k_cache, v_cache, slots, positions, angles, **norms),
        "paged_attention": lambda: attend(q, k_cache, v_cache, **batch, out=out),
        "fused_add_rms_norm, second": lambda: norm(x, residual, weight),
        "silu_and_mul": lambda: activate(gate_up),
    }


def moe_layer(bind: Callable[[Any], Any] = Bound, num_tokens: int = NUM_TOKENS) -> dict[str, Callable[[], object]]:
    """Return the launches of a layer with a mixture of experts instead of the MLP."""
    route, experts = map(bind, (paged.route_and_align, paged.fused_moe))
    hidden, units = 256, 768
    x, w1, w2 = _empty(num_tokens, hidden), _empty(_EXPERTS, 2 * units, hidden), _empty(_EXPERTS, hidden, units)
    logits, ticket = _empty(num_tokens, _EXPERTS), torch.zeros(1, dtype=torch.int32)
    routing, block_size = paged.Routing(_TOP_K), moe_block_size(num_tokens, _TOP_K, w2)
    assert block_size is not None
    topk_weights, topk_ids, aligned = paged.route_and_align(logits, routing, block_size, ticket=ticket)
    layer = dense_layer(bind, num_tokens)
    del layer["silu_and_mul"]
    return {
        **layer,
        "route_and_align": lambda: route(logits, routing, block_size, ticket=ticket),
        "fused_moe": lambda: experts(x, w1, w2, topk_weights, topk_ids, aligned=aligned),
    }


def _empty(*size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.bfloat16)


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
