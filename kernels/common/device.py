"""What tile choices need to know of the device a tensor lies on."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

# Chips whose programs may take 227 KB of shared memory and whose matrix unit reads its operands from there. The
# interpreter ("cpu") gets the same tiles, so that what tests run is what they launch.
LARGE_SHARED_MEMORY = ("sm_90", "sm_100", "sm_103", "cpu")


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
