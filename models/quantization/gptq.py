"""GPTQ (Frantar et al., 2023): 4 or 8 bits, groups of columns, in their own order or in that of desc_act."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from paged.errors import CheckpointError, InvalidInputError, UnsupportedError
from paged.kernels.quantization.repack import from_gptq
from paged.kernels.quantization.weight import QuantizedWeight
from paged.models.loading.hf_config import HfConfig
from paged.models.quantization.layout import Layout, Stored, Tensors, see_that
from paged.models.quantization.quantization import HEAD, Quantization, group_size, pattern


@dataclass(frozen=True, kw_only=True)
class Gptq(Layout):
    """See `from_gptq`. Where there are no zero points the file still holds some, all of them the middle code."""

    version: int

    @property
    def num_bits(self) -> int:
        return 4 if self.form == "int4" else 8

    def check(self, name: str, rows: int, columns: int) -> None:
        super().check(name, rows, columns)
        see_that(name, rows, 32 // self.num_bits, "rows")
        see_that(name, columns, 32 // self.num_bits, "columns")

    def stored(self, rows: int, columns: int) -> dict[str, Stored]:
        groups, per_word = self.num_groups(columns), 32 // self.num_bits
        return {
            "qweight": Stored((columns // per_word, rows), torch.int32, 1),
            "qzeros": Stored((groups, rows // per_word), torch.int32, 1, per_word),
            "scales": Stored((groups, rows), torch.float32, 1),
            "g_idx": Stored((columns,), torch.int32),
        }

    def pack(self, tensors: Tensors, columns: int) -> QuantizedWeight:
        qzeros: torch.Tensor | None = tensors["qzeros"]
        if not self.has_zero_points:
            # The middle code in every position, less 1 in version 1, as an int32.
            code = 2 ** (self.num_bits - 1) - (2 - self.version)
            middle = int.from_bytes(bytes([code if self.num_bits == 8 else 17 * code] * 4), "little", signed=True)
            if (tensors["qzeros"] != middle).any():
                raise InvalidInputError(f"qzeros: not all {middle}, which the configuration's sym = true stands for")
            qzeros = None
        return from_gptq(
            tensors["qweight"],
            tensors["scales"],
            qzeros,
            tensors["g_idx"],
            num_bits=self.num_bits,
            format_version=self.version,
        )


def read_gptq(hf: HfConfig) -> Quantization:
    """hf: the quantization_config.

    Raises:
        UnsupportedError: an option is not known here.
        CheckpointError: a value is malformed.
    """
    num_bits = hf.choice("bits", 4, 8)
    if num_bits is None:
        raise CheckpointError(f"{hf.source}: bits is missing, expected 4 or 8")
    hf.choice("is_marlin_format", False)
    hf.choice("pack_dtype", "int32")
    layout = Gptq(
        form=f"int{num_bits}",
        group_size=group_size(hf),
        has_zero_points=not hf.flag("sym"),
        has_order=hf.flag("desc_act"),
        version=2 if hf.choice("checkpoint_format", "gptq", "gptq_v2") == "gptq_v2" else 1,
    )
    # GPTQModel: patterns after "-:" name modules that stay plain, others change options of some.
    plain = []
    changed = hf.section("dynamic")
    for name in changed.values if changed is not None else ():
        if not name.startswith("-:"):
            raise UnsupportedError(
                f"{hf.source}: dynamic has {name!r}, known are patterns of plain modules, as '-:...'"
            )
        plain.append((pattern(name[2:], hf, "dynamic"), None))
    if not hf.flag("lm_head"):
        plain.append((HEAD, None))
    return Quantization((*plain, (re.compile(""), layout)))
