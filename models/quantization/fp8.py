"""`quant_method` "fp8": e4m3 in blocks of 128 x 128 as DeepSeek-V3 has it, or with a scale for all of a projection."""

from __future__ import annotations

import re

from paged.errors import UnsupportedError
from paged.kernels.common.scalars import shown
from paged.kernels.quantization.weight import FP8_BLOCK
from paged.models.loading.hf_config import HfConfig
from paged.models.quantization.eight_bit import EightBit
from paged.models.quantization.quantization import HEAD, Quantization, unconverted


def read_fp8(hf: HfConfig) -> Quantization:
    """hf: the quantization_config.

    Raises:
        UnsupportedError: an option is not known here.
        CheckpointError: a value is malformed.
    """
    hf.choice("fmt", "e4m3")
    block = hf.value("weight_block_size")
    if block not in (None, [FP8_BLOCK, FP8_BLOCK]):
        raise UnsupportedError(f"{hf.source}: weight_block_size = {shown(block)} is not supported, known is [128, 128]")
    # Static scales of activations beside blocks are none of 128 values of a token.
    is_static = hf.choice("activation_scheme", "dynamic", *(() if block else ("static",))) == "static"
    layout = EightBit(
        form="e4m3",
        group_size=FP8_BLOCK if block else 0,
        one_scale=not block,
        scale_name="weight_scale_inv" if block else "weight_scale",
        quantizes_input=True,
        has_input_scale=is_static,
    )
    plain = unconverted(hf, "modules_to_not_convert") + unconverted(hf, "ignored_layers")
    return Quantization(((HEAD, None), *plain, (re.compile(""), layout)))
