"""Tensors that say cuda and hold their values in CPU memory; PyTorch's operations on them: done on the CPU, given to a
stream, or taken down by a capture."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tests.emulated_device.emulator.memory import Allocation, poison, zeros_like
from tests.emulated_device.emulator.report import place
from tests.emulated_device.emulator.streams import Work

if TYPE_CHECKING:
    from tests.emulated_device.emulator.device import EmulatedCuda

_CUDA_IN_DLPACK = 2
# Their results' sizes, or their results, are needed on the host.
_WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal",
            "bincount"}  # fmt: skip
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_REFUSED = {"set_", "resize_", "resize_as_"}


class CudaTensor(torch.Tensor):
    """A tensor of an emulated device. inner: the CPU tensor behind it; allocation: shared by all views."""

    inner: torch.Tensor
    allocation: Allocation

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls: type[CudaTensor], inner: torch.Tensor, allocation: Allocation) -> CudaTensor:
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        made = torch.Tensor._make_wrapper_subclass(cls, inner.size(), **layout, device=allocation.device)
        made.inner, made.allocation = inner, allocation
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Where no mode is on: on threads that began before it."""
        machine = next(tensor.allocation.machine for tensor in _tensors_in((args, kwargs)) if isinstance(tensor, cls))
        return machine.operations.dispatch(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first.")

    __array__ = numpy

    def __repr__(self, *_: Any, **__: Any) -> str:  # type: ignore[override]
        return f"CudaTensor({self.inner!r}, device={self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy = memo.get(id(self))
        if copy is None:
            copy = self.detach().clone()
            if isinstance(self, torch.nn.Parameter):
                copy = torch.nn.Parameter(copy, self.requires_grad)
            memo[id(self)] = copy
        return copy

    def record_stream(self, stream: Any) -> None:
        self.allocation.block.home = None

    def __dlpack_device__(self) -> Any:
        return _CUDA_IN_DLPACK, self.device.index

    def __dlpack__(self, **_: Any) -> Any:
        return self

    @property
    def data(self) -> Any:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: CudaTensor) -> None:
        """As torch does, this keeps the object and gives it the other's memory."""
        if value.shape != self.shape or value.dtype != self.dtype or value.stride() != self.stride():
            raise NotImplementedError("data of another shape, stride or dtype")
        self.inner, self.allocation = value.inner, value.allocation


class _Effects(NamedTuple):
    """Places and names of the arguments that an operation writes, and whether its result is a view of one."""

    written: tuple[tuple[int, str], ...]
    is_view: bool


class Operations:
    """Where every operation arrives, by `CudaTensor` or by the mode that makes factories arrive as well."""

    def __init__(self, machine: EmulatedCuda) -> None:
        self._machine = machine
        self._known_shapes: dict[Any, Any] = {}

    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Do what a machine with GPUs does for `func(*args, **kwargs)`."""
        tensors = _tensors_in((args, kwargs))
        ours = [tensor for tensor in tensors if isinstance(tensor, CudaTensor)]
        name = func.overloadpacket.__name__
        wanted = kwargs.get("device")
        if not ours and (wanted is None or wanted.type != "cuda"):
            return self._on_host(func, name, args, kwargs, tensors)
        if func.namespace not in ("aten", "prims", "prim"):
            return func._op_dk(torch._C.DispatchKey.CUDA, *args, **kwargs)
        if name in _REFUSED:
            raise NotImplementedError(f"{func} on an emulated device")
        if name == "lift_fresh":
            return args[0]
        if name == "_to_copy":
            return self._converted(args[0], kwargs)
        if name == "copy_" and args[0].device != args[1].device:
            is_free = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            return self._copy(args[0], args[1], is_free)
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            self._machine.wait_for(name)
        device = self._device_of(func, name, wanted, tensors, ours, args)
        return self._compute(func, name, args, kwargs, device, ours)

    def _on_host(self, func: Any, name: str, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        transfers = self._machine.transfers
        if name == "is_pinned":
            return transfers.pinned_block(args[0]) is not None
        if name == "_pin_memory":
            return transfers.pin(args[0].clone())
        if not _effects(func).is_view:
            transfers.host_uses(tensors, _written(func, args, kwargs))
        if kwargs.get("pin_memory"):
            return transfers.pin(func(*args, **{**kwargs, "pin_memory": False}))
        return func(*args, **kwargs)

    def _device_of(
        self, func: Any, name: str, wanted: Any, tensors: list[torch.Tensor], ours: list[CudaTensor], args: Any
    ) -> torch.device:
        """Where the operation runs; what is on several devices is refused as CUDA does, and waits are noted."""
        places = {tensor.device for tensor in ours}
        strangers = [tensor for tensor in tensors if tensor.device.type == "cpu" and tensor.dim() > 0]
        if name in _INDEXING and args[0].device.type == "cuda":
            indices = [index for index in args[1] if index is not None]
            if any(index.device.type == "cpu" and index.dim() for index in indices):
                self._machine.wait_for(f"{name} with indices on the host")
            value = args[2] if len(args) > 2 else None
            is_fill = value is not None and value.numel() == 1 and value.device.type == "cpu" and len(indices) == 1
            if _has_mask(name, args) and not is_fill:
                self._machine.wait_for(f"{name} with a mask")
            strangers = [one for one in strangers if not any(one is index for index in indices)]
        if len(places) > 1 or (places and strangers):
            named = [str(place) for place in sorted(places, key=str)] + ["cpu"] * bool(strangers)
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{named[0]} and {named[1]}! (in {func})"
            )
        if name in _WAITING:
            self._machine.wait_for(name)
        return torch.device("cuda", self._machine.index_of(wanted)) if wanted is not None else ours[0].device

    def _compute(
        self, func: Any, name: str, args: Any, kwargs: Any, device: torch.device, ours: list[CudaTensor]
    ) -> Any:
        machine, effects = self._machine, _effects(func)
        stream = machine.current_stream(device)
        inner_args, inner_kwargs = _map_tensors(_inner, args), _map_tensors(_inner, kwargs)
        if "device" in kwargs:
            inner_kwargs["device"] = torch.device("cpu")
        if effects.is_view:
            return self._wrapped(func(*inner_args, **inner_kwargs), ours, device)
        written = [tensor for tensor in _written(func, args, kwargs) if isinstance(tensor, CudaTensor)]
        reads = tuple(tensor.allocation.block for tensor in ours if all(tensor is not one for one in written))
        does = name in _WAITING or (machine.executes and stream.capture is None)
        if does or (not written and _has_mask(name, args)):
            result = self._wrapped(func(*inner_args, **inner_kwargs), ours, device)
        elif written:
            result = written[0] if len(written) == 1 else tuple(written)
        else:
            shapes = self._shapes(func, inner_args, inner_kwargs)
            result = _map_tensors(lambda shape: self._new(zeros_like(shape), device), shapes)
        made = [tensor for tensor in _tensors_in(result) if all(tensor is not one for one in ours)]
        if machine.executes and (name in _EMPTY or stream.capture is not None):
            for tensor in made:
                poison(tensor.inner)
        if name in _EMPTY:
            return result
        targets = [tensor.inner for tensor in made]

        def run() -> None:
            again = _tensors_in(func(*inner_args, **inner_kwargs))
            for target, value in zip(targets, again if targets else (), strict=True):
                target.copy_(value)

        writes = tuple(tensor.allocation.block for tensor in (*written, *made))
        is_done = stream.capture is None
        machine.submit(stream, Work(name, place(), reads, writes, (lambda: None) if is_done else run))
        return result

    def _converted(self, source: torch.Tensor, kwargs: Any) -> Any:
        """`Tensor.to` another device, dtype or memory format."""
        wanted = kwargs.get("device") or source.device
        if wanted.type == "cuda":
            wanted = torch.device("cuda", self._machine.index_of(wanted))
        options = {name: kwargs[name] for name in ("dtype", "memory_format") if kwargs.get(name) is not None}
        if wanted == source.device:
            func, options = torch.ops.aten._to_copy.default, {**kwargs, **options}
            return self._compute(func, "_to_copy", (source,), options, source.device, [source])  # type: ignore[list-item]
        shape = torch.empty_like(_shape(source), **options)
        is_free = kwargs.get("non_blocking", False)
        target = zeros_like(shape) if shape.device.type == "meta" else torch.empty_like(shape)
        if wanted.type == "cuda":
            return self._copy(self._new(target, wanted), source, is_free)
        return self._copy(self._machine.transfers.pin(target) if is_free else target, source, is_free)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, is_free: bool) -> torch.Tensor:
        """From one device to another, or between host and device. It is asynchronous where that was asked for and the
        host's memory is pinned, contiguous and of the same dtype."""
        if source.numel() == 0:
            return target
        machine, to, of = self._machine, _inner(target), _inner(source)
        here = target if isinstance(target, CudaTensor) else source
        stream = machine.current_stream(here.device)
        host = next((tensor for tensor in (target, source) if not isinstance(tensor, CudaTensor)), None)
        pinned = None if host is None else machine.transfers.pinned_block(host)
        blocks = [
            (tensor.allocation.block,) if isinstance(tensor, CudaTensor) else (pinned,) if pinned else ()
            for tensor in (source, target)
        ]
        is_plain = pinned is not None and is_free and host is not None and host.is_contiguous()
        is_free = host is None or (is_plain and target.dtype == source.dtype)
        if host is not None and stream.capture is not None:
            if not is_free:
                machine.wait_for("a copy between host and device")
            machine.report.hazard("host in a graph", "every replay copies from or to the host's memory as it then is")
        values = of.clone() if host is target and machine.executes else None

        def run() -> None:
            if host is source and pinned is not None:
                machine.transfers.deliver(of)
            to.copy_(of)

        other = machine.current_stream(source.device) if host is None else stream
        stream.wait_stream(other)  # PyTorch puts the copy between the two devices' streams
        machine.submit(stream, Work("copy_", place(), *blocks, run=run))
        other.wait_stream(stream)
        if host is None or stream.capture is not None:
            return target
        time = stream.clock[stream.stream_id]
        if not is_free:
            what = "pageable" if pinned is None else "pinned"
            machine.wait_for(f"a copy {'to' if host is target else 'from'} {what} host memory", stream.clock)
        elif machine.executes and host is target:
            machine.transfers.receive(to, values.to(to.dtype).reshape(to.shape), stream.stream_id, time)
        elif machine.executes:
            machine.transfers.send(of, stream.stream_id, time)
        return target

    def _wrapped(self, result: Any, ours: list[CudaTensor], device: torch.device) -> Any:
        """Results in place of the CPU's: an argument itself, a view that shares its memory, or a new tensor."""
        known = {id(tensor.inner): tensor for tensor in ours}
        return _map_tensors(lambda inner: known[id(inner)] if id(inner) in known else self._new(inner, device), result)

    def _shapes(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operation's results without their memory; the same question is asked at every step."""
        key = func, _key(args), _key(kwargs)
        if key not in self._known_shapes:
            options = _map_tensors(_shape, kwargs)
            if "device" in kwargs:
                options["device"] = torch.device("meta")
            self._known_shapes[key] = func(*_map_tensors(_shape, args), **options)
        return self._known_shapes[key]

    def _new(self, inner: torch.Tensor, device: torch.device) -> CudaTensor:
        return CudaTensor(inner, self._machine.memory.allocation_of(inner, device))


@functools.cache
def _effects(func: Any) -> _Effects:
    places = list(enumerate(func._schema.arguments))
    written = tuple((i, one.name) for i, one in places if one.alias_info is not None and one.alias_info.is_write)
    return _Effects(written, not written and any(one.alias_info is not None for _, one in places))


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    return _tensors_in([args[i] if i < len(args) else kwargs.get(name) for i, name in _effects(func).written])


def _has_mask(name: str, args: Any) -> bool:
    return name in _INDEXING and any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])


def _inner(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.inner if isinstance(tensor, CudaTensor) else tensor


def _shape(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its memory."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _key(value: Any) -> Any:
    """All of an argument that results' shapes depend on."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    if isinstance(value, dict):
        return tuple((name, _key(one)) for name, one in value.items())
    return type(value), value


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors among an operation's arguments or results."""
    if isinstance(value, torch.Tensor):
        return [value]
    within = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for one in within for tensor in _tensors_in(one)]


def _map_tensors(change: Any, value: Any) -> Any:
    """The same arguments or results with every tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_map_tensors(change, one) for one in value)
    if isinstance(value, dict):
        return {name: _map_tensors(change, one) for name, one in value.items()}
    return value
