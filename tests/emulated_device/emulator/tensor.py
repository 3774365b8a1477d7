"""Tensors that say cuda, and hold their values in CPU memory."""

from __future__ import annotations

from typing import Any

import torch

from tests.emulated_device.emulator.memory import Allocation

_CUDA_IN_DLPACK = 2


class CudaTensor(torch.Tensor):
    """A tensor of an emulated device. inner: the CPU tensor behind it; allocation: shared by all views."""

    inner: torch.Tensor
    allocation: Allocation

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls: type[CudaTensor], inner: torch.Tensor, allocation: Allocation) -> CudaTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=allocation.device,
        )
        made.inner, made.allocation = inner, allocation
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Where no mode is on: on threads that began before it."""
        machine = next(tensor.allocation.machine for tensor in tensors_in((args, kwargs)) if isinstance(tensor, cls))
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

    def record_stream(self, stream: Any) -> None:
        self.allocation.block.home = None

    def __dlpack_device__(self) -> Any:
        return _CUDA_IN_DLPACK, self.device.index

    def __dlpack__(self, **_: Any) -> Any:
        return Capsule(self)

    def __deepcopy__(self, memo: Any) -> Any:
        return self.detach().clone()

    @property
    def data(self) -> Any:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: CudaTensor) -> None:
        """As torch does, this keeps the object and gives it the other's memory."""
        if value.shape != self.shape or value.dtype != self.dtype or value.stride() != self.stride():
            raise NotImplementedError("data of another shape, stride or dtype")
        self.inner, self.allocation = value.inner, value.allocation


class Capsule:
    """A tensor on its way through DLPack."""

    def __init__(self, tensor: CudaTensor) -> None:
        self.tensor = tensor


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors among an operation's arguments or results."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for one in value for tensor in tensors_in(one)]
    if isinstance(value, dict):
        return [tensor for one in value.values() for tensor in tensors_in(one)]
    return []


def map_tensors(change: Any, value: Any) -> Any:
    """The same arguments or results with every tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(change, one) for one in value)
    if isinstance(value, dict):
        return {name: map_tensors(change, one) for name, one in value.items()}
    return value
