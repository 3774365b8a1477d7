"""A Triton driver whose device is this CPU: Triton compiles for a real target, and a launch runs the PTX."""

from __future__ import annotations

import gc
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from triton.backends.compiler import GPUTarget

from paged.bench.compilation.machine_code import SM_LIMITS
from paged.bench.compiled.batch import Batch, Launched
from paged.bench.compiled.context import Context
from paged.bench.compiled.counters import Counters
from paged.bench.compiled.errors import NotModelledError, StoppedError
from paged.bench.compiled.global_memory import GlobalMemory
from paged.bench.compiled.report import Fault, Report
from paged.bench.compiled.tensor_copies import TensorMap
from paged.bench.compiled.threads import Cta
from paged.bench.compiled.translate import Translation

SCHEDULES = ("random", "one", "all")
# Threads that run in step. More of them make the executor faster until arrays leave the processor's cache.
_THREADS_AT_ONCE = 1024
_GRID_LIMITS = (2**31 - 1, 65535, 65535)
_FORMATS = {"i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I"}
_FORMATS |= {"u64": "Q", "fp32": "f", "f32": "f", "fp64": "d"}
# Kernels that take addresses of tensors as numbers, so that any tensor of the process may be theirs.
_BY_ADDRESS = ("_copy_blocks_kernel",)
_SWIZZLES = {0: 0, 1: 32, 2: 64, 3: 128}


@dataclass
class Settings:
    """How launches run.

    arch: such as "sm_90". num_sms: SMs that kernels plan for. schedule: "random", some CTAs together in random order;
    "one", one after the other, in random order; "all", all together. order: returns the order in which the
    CTAs of a kernel run one after the other, given its name and their number, or None for the schedule. counters:
    counts what kernels do, by name, if asked for.
    """

    arch: str
    num_sms: int = 8
    schedule: str = "random"
    seed: int = 0
    order: Callable[[str, int], Sequence[int] | None] | None = None
    counts: bool = False
    report: Report = field(default_factory=Report)
    counters: dict[str, Counters] = field(default_factory=dict)
    translations: list[Translation] = field(default_factory=list)


def driver(settings: Settings) -> Any:
    """Return what Triton asks its driver for."""
    limits = SM_LIMITS[settings.arch]
    properties = {
        "max_shared_mem": limits.shared - limits.shared_reserved,
        "multiprocessor_count": settings.num_sms,
        "max_num_regs": 65536,
        "warpSize": 32,
        "sm_clock_rate": 1,
        "mem_clock_rate": 1,
        "mem_bus_width": 1,
    }

    def load_binary(_: str, binary: bytes, *__: Any) -> tuple[Any, Any, int, int, int]:
        translation = Translation(binary.decode())
        settings.translations.append(translation)
        return translation, translation, 0, 0, 1024

    return SimpleNamespace(
        utils=SimpleNamespace(get_device_properties=lambda _: properties, load_binary=load_binary),
        launcher_cls=lambda source, metadata: Launcher(settings, source, metadata),
        get_current_device=lambda: 0,
        set_current_device=lambda _: None,
        get_current_stream=lambda _=None: 0,
        get_current_target=lambda: GPUTarget("cuda", int(settings.arch.removeprefix("sm_")), 32),
        get_active_torch_device=lambda: torch.device("cpu"),
        get_device_interface=lambda: SimpleNamespace(current_device=lambda: 0, synchronize=lambda: None),
        is_active=lambda: True,
    )


@dataclass
class _Arguments:
    """Arguments of a launch: (type, value) for each parameter of the kernel, and the tensors with their names."""

    values: list[tuple[str, Any]] = field(default_factory=list)
    tensors: list[tuple[str, torch.Tensor]] = field(default_factory=list)


class Launcher:
    """Launches of one compiled kernel, as Triton makes them."""

    def __init__(self, settings: Settings, source: Any, metadata: Any) -> None:
        self.settings = settings
        self.name = source.fn.__name__
        self.signature = list(source.signature.items())
        self.metadata = metadata
        self.boxes = list(getattr(metadata, "tensordesc_meta", None) or [])
        # Arguments that the kernel was compiled for as multiples of 16.
        self.aligned = set()
        for path, attributes in (source.attrs or {}).items():
            if ["tt.divisibility", 16] in [list(attribute) for attribute in attributes]:
                self.aligned.add(path[0])

    def __call__(self, x: int, y: int, z: int, _stream: int, translation: Translation, *extra: Any) -> None:
        """Launch on a grid of x * y * z CTAs. extra: three values that Triton passes on, two hooks, the arguments."""
        grid = (x, y, z)
        if any(size > limit for size, limit in zip(grid, _GRID_LIMITS, strict=True)):
            self._fault("grid beyond CUDA's limits", f"{grid}")
            return
        if 0 in grid:
            return
        arguments = self._arguments(extra[-len(self.signature) :], x * y * z)
        params, maps = self._params(translation, arguments.values)
        if translation.kernel.num_threads != 32 * self.metadata.num_warps:
            raise NotModelledError(f"{self.name}: {translation.kernel.num_threads} threads")
        settings = self.settings
        number = settings.report.num_launches
        counters = None
        if settings.counts:
            counters = settings.counters.setdefault(self.name, Counters())
            counters.begin_launch(translation.kernel, x * y * z)
        random = np.random.default_rng([settings.seed, number])
        context = Context(self.name, translation.sites, random, settings.report, counters)
        memory = GlobalMemory(arguments.tensors)
        self._run(Launched(context, translation, memory, grid, self.metadata.shared, params, maps))
        if counters is not None:
            counters.end_launch()

    def _run(self, launched: Launched) -> None:
        """Run the CTAs by the schedule, or one after the other in a given order."""
        report, grid = self.settings.report, launched.grid
        num_ctas = grid[0] * grid[1] * grid[2]
        order = None
        if self.settings.order is not None:
            order = self.settings.order(self.name, num_ctas)
        at_once = max(1, _THREADS_AT_ONCE // launched.translation.kernel.num_threads)
        if self.settings.schedule == "all":
            at_once = num_ctas
        if self.settings.schedule == "one" or order is not None:
            at_once = 1
        if order is None:
            order = launched.context.random.permutation(num_ctas).tolist()
        ctas: list[Cta] = []
        for number in order:
            ctas.append((number % grid[0], number // grid[0] % grid[1], number // (grid[0] * grid[1])))
        report.launches[self.name] += 1
        report.ctas[self.name] += len(ctas)
        start = time.perf_counter()
        with np.errstate(all="ignore"):
            for first in range(0, len(ctas), at_once):
                try:
                    Batch(launched, ctas[first : first + at_once]).run()
                except StoppedError as error:
                    self._fault(error.kind, error.detail)
                    break
        report.add_seconds(self.name, time.perf_counter() - start)

    def _fault(self, kind: str, detail: str) -> None:
        self.settings.report.add(Fault(kind, self.name), detail)

    def _arguments(self, values: Sequence[Any], num_ctas: int) -> _Arguments:
        arguments = _Arguments()
        boxes = iter(self.boxes)
        for position, ((name, kind), value) in enumerate(zip(self.signature, values, strict=True)):
            self._add(arguments, name, kind, value, position in self.aligned, boxes)
        if self.name in _BY_ADDRESS:
            for candidate in gc.get_objects():
                if type(candidate) is torch.Tensor and candidate.is_cpu and candidate.layout == torch.strided:
                    arguments.tensors.append(("a tensor", candidate))
        scratch_size = getattr(self.metadata, "global_scratch_size", 0) * num_ctas
        scratch = torch.full((scratch_size,), 0xFF, dtype=torch.uint8)
        arguments.tensors.append(("scratch", scratch))
        arguments.values += [("*scratch", scratch.data_ptr()), ("*profile", 0)]
        return arguments

    def _add(self, to: _Arguments, name: str, kind: Any, value: Any, is_aligned: bool, boxes: Any) -> None:
        """Add an argument: a tuple, a tensor, a tensor of boxes, or a number. Constants are compiled in."""
        if isinstance(kind, tuple):
            for place, (part_kind, part) in enumerate(zip(kind, value, strict=True)):
                self._add(to, f"{name}[{place}]", part_kind, part, False, boxes)
        elif kind.startswith("tensordesc"):
            self._add_box(to, name, value, next(boxes))
        elif kind.startswith("*"):
            address = value
            if isinstance(value, torch.Tensor):
                address = value.data_ptr()
                to.tensors.append((name, value))
            if value is None:
                address = 0
            if is_aligned and address % 16:
                self._fault(
                    "compiled for an aligned pointer", f"{name} is {address % 16} bytes behind a multiple of 16"
                )
            to.values.append((kind, address))
        elif kind != "constexpr":
            if is_aligned and value % 16:
                self._fault("compiled for a multiple of 16", f"{name} = {value}")
            to.values.append((kind, value))

    def _add_box(self, to: _Arguments, name: str, descriptor: Any, box: Any) -> None:
        """Add the tensor map of a descriptor, and the sizes and strides that follow it."""
        if box is None or getattr(descriptor, "padding", "zero") != "zero":
            raise NotModelledError(f"{self.name}: a descriptor without TMA, or one that pads with NaN")
        item = box["elem_size"]
        strides = [item * stride for stride in reversed(descriptor.strides)]
        tensor_map = TensorMap(
            address=descriptor.base.data_ptr(),
            item=item,
            shape=list(reversed(descriptor.shape)),
            strides=[item, *strides[1:]],
            box=list(reversed(box["block_size"])),
            swizzle=_SWIZZLES[box["swizzle"]],
        )
        for problem in tensor_map.problems():
            self._fault("illegal tensor map", f"{name}: {problem}")
        to.tensors.append((name, descriptor.base))
        to.values.append(("map", tensor_map))
        to.values += [("i32", size) for size in descriptor.shape]
        to.values += [("i64", stride) for stride in descriptor.strides]

    def _params(
        self, translation: Translation, values: Sequence[tuple[str, Any]]
    ) -> tuple[bytes, dict[int, TensorMap]]:
        """Return the memory of the parameters, and the tensor maps by their places in it."""
        params = translation.kernel.params
        if len(values) != len(params):
            raise NotModelledError(f"{self.name}: {len(values)} arguments for {len(params)} parameters")
        memory = bytearray(params[-1].offset + params[-1].size)
        maps = {}
        for param, (kind, value) in zip(params, values, strict=True):
            if kind == "map":
                maps[param.offset] = value
            elif kind.startswith("*"):
                struct.pack_into("<Q", memory, param.offset, value)
            elif _FORMATS[kind] in "fd":
                struct.pack_into(f"<{_FORMATS[kind]}", memory, param.offset, value)
            else:
                self._pack_integer(memory, param.offset, kind, int(value))
        return bytes(memory), maps

    def _pack_integer(self, memory: bytearray, offset: int, kind: str, value: int) -> None:
        size = struct.calcsize(_FORMATS[kind])
        if not -(1 << 8 * size - 1) <= value < 1 << 8 * size:
            self._fault("argument beyond its type", f"{value} as {kind}")
        memory[offset : offset + size] = (value & ((1 << 8 * size) - 1)).to_bytes(size, "little")
