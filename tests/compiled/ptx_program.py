"""Runs PTX that a test has written, on tensors, without Triton."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import torch

from paged.bench.compiled.batch import Batch, Launched
from paged.bench.compiled.context import Context
from paged.bench.compiled.counters import Counters
from paged.bench.compiled.errors import StoppedError
from paged.bench.compiled.global_memory import GlobalMemory
from paged.bench.compiled.report import Fault, Report
from paged.bench.compiled.tensor_copies import TensorMap
from paged.bench.compiled.translate import Translation

_HEAD = """.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry program(
{params}
)
.reqntid {threads}
{{
	.reg .pred %p<9>;
	.reg .b16 %rs<9>;
	.reg .b32 %r<99>;
	.reg .b64 %rd<9>;
{loads}
{body}
	ret;
}}
"""


def module(body: str, num_params: int, threads: int, num_maps: int = 0) -> str:
    """A module whose parameters are in %rd0, %rd1 and so on; the tensor maps come first."""
    params, loads = [], []
    for index in range(num_params):
        if index < num_maps:
            params.append(f"\t.param .align 64 .b8 program_param_{index}[128]")
            loads.append(f"\tmov.b64 %rd{index}, program_param_{index};")
        else:
            params.append(f"\t.param .u64 .ptr .global .align 1 program_param_{index}")
            loads.append(f"\tld.param.b64 %rd{index}, [program_param_{index}];")
    return _HEAD.format(params=",\n".join(params), threads=threads, loads="\n".join(loads), body=body)


def run(
    body: str,
    tensors: Sequence[torch.Tensor],
    *,
    threads: int = 32,
    num_ctas: int = 1,
    at_once: int = 99,
    shared: int = 1024,
    maps: Sequence[TensorMap] = (),
    counters: Counters | None = None,
) -> Report:
    """Run the body of a kernel; the report has its faults. A tensor for each parameter that is no map."""
    translation = Translation(module(body, len(maps) + len(tensors), threads, len(maps)))
    params = translation.kernel.params
    memory = bytearray(params[-1].offset + params[-1].size)
    for param, tensor in zip(params[len(maps) :], tensors, strict=True):
        struct.pack_into("<Q", memory, param.offset, tensor.data_ptr())
    report = Report()
    context = Context("program", translation.sites, np.random.default_rng(0), report, counters)
    if counters is not None:
        counters.begin_launch(translation.kernel, num_ctas)
    named = [(f"tensor {index}", tensor) for index, tensor in enumerate(tensors)]
    by_place = {param.offset: tensor_map for param, tensor_map in zip(params, maps, strict=False)}
    grid = (num_ctas, 1, 1)
    launched = Launched(context, translation, GlobalMemory(named), grid, shared, bytes(memory), by_place)
    ctas = [(number, 0, 0) for number in range(num_ctas)]
    with np.errstate(all="ignore"):
        for first in range(0, num_ctas, at_once):
            try:
                Batch(launched, ctas[first : first + at_once]).run()
            except StoppedError as error:
                report.add(Fault(error.kind, "program"), error.detail)
    if counters is not None:
        counters.end_launch()
    return report
