"""AWQ (Lin et al., 2024) in its "gemm" layout: 4 bits, with zero points."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from paged.kernels.quantization.repack import from_awq
from paged.kernels.quantization.weight import QuantizedWeight
from paged.models.loading.hf_config import HfConfig
from paged.models.quantization.layout import Layout, Stored, Tensors, see_that
from paged.models.quantization.quantization import HEAD, Quantization, group_size, unconverted


@dataclass(frozen=True, kw_only=True)
class Awq(Layout):
    """See `from_awq`."""

    form: str = "int4"
    has_zero_points: bool = True

    def check(self, name: str, rows: int, columns: int) -> None:
        super().check(name, rows, columns)
        see_that(name, rows, 8, "rows")

    def stored(self, rows: int, columns: int) -> dict[str, Stored]:
        groups = self.num_groups(columns)
        return {
            "qweight": Stored((columns, rows // 8), torch.int32, 1, 8),
            "scales": Stored((groups, rows), torch.float32, 1),
            "qzeros": Stored((groups, rows // 8), torch.int32, 1, 8),
        }

    def pack(self, tensors: Tensors, columns: int) -> QuantizedWeight:
        return from_awq(tensors["qweight"], tensors["scales"], tensors["qzeros"])


def read_awq(hf: HfConfig) -> Quantization:
    """hf: the quantization_config.

    Raises:
        UnsupportedError: an option is not known here.
        CheckpointError: a value is malformed.
    """
    hf.choice("bits", 4)
    hf.choice("version", "gemm")
    hf.choice("zero_point", True)
    layout = Awq(group_size=group_size(hf))
    return Quantization(((HEAD, None), *unconverted(hf, "modules_to_not_convert"), (re.compile(""), layout)))
