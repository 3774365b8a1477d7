"""The device a tensor lies on: whether Triton or PyTorch computes there, and what tile choices need to know of it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from paged.kernels.common.compat import HAS_TRITON, interpreting, setting
from paged.kernels.common.errors import InvalidInputError, UnsupportedError

# Chips whose programs may take 227 KB of shared memory and whose matrix unit reads its operands from there. The
# interpreter ("cpu") gets the same tiles, so that what tests run is what they launch.
LARGE_SHARED_MEMORY = ("sm_90", "sm_100", "sm_103", "cpu")
# Consumer chips, whose programs may take 99 KB, and for which ptxas keeps to fewer registers where it can.
SMALL_SHARED_MEMORY = ("sm_86", "sm_89", "sm_120")


@dataclass(frozen=True)
class Device:
    """What choices depend on: the architecture ("sm_90", "gfx942", "cpu"), how many programs run side by side, and the
    chip's name for tuned tables, "" where there are none."""

    arch: str
    num_sms: int
    name: str = ""


@functools.cache
def device_of(device: torch.device) -> Device:
    """The device's architecture and size; the interpreter is given 8 SMs, enough for tests to see sequences split."""
    if device.type != "cuda":
        return Device("cpu", 8)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        arch = str(properties.gcnArchName).split(":")[0]
    else:
        arch = f"sm_{properties.major}{properties.minor}"
    return Device(arch, properties.multi_processor_count, properties.name)


def use_triton(place: torch.Tensor | torch.device) -> bool:
    """Backend for operations on a tensor or a device: True for the Triton kernels, False for the PyTorch
    implementations.

    CUDA and ROCm tensors take Triton; CPU tensors take PyTorch, or Triton's interpreter when TRITON_INTERPRET=1 was set
    before the first import. The environment variable PAGED_BACKEND (`triton` or `torch`) overrides both.

    Raises:
        InvalidInputError: PAGED_BACKEND holds another word.
        UnsupportedError: Triton was asked for where it cannot run, or the tensor has no memory ("meta").
    """
    device = place if isinstance(place, torch.device) else place.device
    if device.type == "meta":
        raise UnsupportedError("tensors on meta have no values to compute with")
    choice = setting("PAGED_BACKEND")
    if choice == "torch":
        return False
    if choice not in ("", "triton"):
        raise InvalidInputError(f"PAGED_BACKEND={choice!r}: expected 'triton' or 'torch'")
    on_gpu = device.type == "cuda"
    runnable = HAS_TRITON and (on_gpu or interpreting())
    if runnable:
        return True
    if choice == "triton" or on_gpu:
        reason = "triton is not installed" if not HAS_TRITON else "CPU tensors need TRITON_INTERPRET=1"
        raise UnsupportedError(f"the Triton backend cannot run on device {device}: {reason}")
    return False
