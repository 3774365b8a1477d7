"""Weights in NVFP4 and MXFP4: two codes a byte, and a scale for every 16 or 32 columns."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paged.kernels.common.packed.packing import MXFP4_GROUP, NVFP4_GROUP
from paged.kernels.quantization.repack import from_mxfp4, from_nvfp4
from paged.kernels.quantization.weight import QuantizedWeight
from paged.models.quantization.layout import Layout, Stored, Tensors


@dataclass(frozen=True, kw_only=True)
class Nvfp4(Layout):
    """NVFP4 as compressed-tensors or ModelOpt store it; the names are the ends of those of its tensors.

    ignored: the scale of activations where those are NVFP4 too; here they stay as they are, which is more exact.
    """

    form: str = "nvfp4"
    group_size: int = NVFP4_GROUP
    weight: str
    global_scale: str
    ignored: str | None

    def stored(self, rows: int, columns: int) -> dict[str, Stored]:
        found = {
            self.weight: Stored((rows, columns // 2), torch.uint8, 0),
            "weight_scale": Stored((rows, columns // NVFP4_GROUP), torch.float8_e4m3fn, 0),
            self.global_scale: Stored((), torch.float32),
        }
        return found | ({self.ignored: Stored((), torch.float32)} if self.ignored else {})

    def pack(self, tensors: Tensors, columns: int) -> QuantizedWeight:
        scale = {self.global_scale: tensors[self.global_scale].float()}
        return from_nvfp4(tensors[self.weight], tensors["weight_scale"], **scale)


@dataclass(frozen=True, kw_only=True)
class Mxfp4(Layout):
    """MXFP4 as compressed-tensors stores it."""

    form: str = "mxfp4"
    group_size: int = MXFP4_GROUP

    def stored(self, rows: int, columns: int) -> dict[str, Stored]:
        return {
            "weight_packed": Stored((rows, columns // 2), torch.uint8, 0),
            "weight_scale": Stored((rows, columns // MXFP4_GROUP), torch.uint8, 0),
        }

    def pack(self, tensors: Tensors, columns: int) -> QuantizedWeight:
        return from_mxfp4(tensors["weight_packed"], tensors["weight_scale"])
