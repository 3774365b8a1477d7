"""ModelOpt (NVIDIA): NVFP4, or e4m3 with a scale for all of a projection."""

from __future__ import annotations

import re
from pathlib import Path

from paged.models.loading.checkpoint_files import is_there
from paged.models.loading.hf_config import HfConfig
from paged.models.quantization.eight_bit import EightBit
from paged.models.quantization.four_bit_floats import Nvfp4
from paged.models.quantization.layout import Layout
from paged.models.quantization.quantization import Quantization, pattern

_FILE = "hf_quant_config.json"


def read_modelopt(hf: HfConfig) -> Quantization:
    """hf: the quantization_config, or what `hf_quant_config.json` holds in its place.

    Raises:
        UnsupportedError: an option is not known here.
        CheckpointError: a value is malformed.
    """
    layout: Layout
    hf.choice("kv_cache_quant_algo", "FP8", "none")
    if hf.choice("quant_algo", "NVFP4", "FP8") == "FP8":
        layout = EightBit(form="e4m3", one_scale=True, quantizes_input=True, has_input_scale=True)
    else:
        hf.choice("group_size", 16)
        layout = Nvfp4(weight="weight", global_scale="weight_scale_2", ignored="input_scale")
    # A module, or with an asterisk any whose names begin so, and all below it.
    plain = []
    for key in ("ignore", "exclude_modules"):
        for name in hf.items(key, str):
            anything = ".*".join(map(re.escape, name.split("*")))
            plain.append((pattern(rf"{anything}(?:\.|\Z)", hf, key), None))
    return Quantization((*plain, (re.compile(""), layout)))


def read_config(folder: Path) -> HfConfig:
    """config.json, with the quantization_config that older versions of ModelOpt write beside it.

    Raises:
        CheckpointError: a file is missing, or not a JSON object.
    """
    hf = HfConfig.read(folder)
    if hf.values.get("quantization_config") is not None or not is_there(folder / _FILE):
        return hf
    section = HfConfig.read(folder, _FILE).section("quantization")
    values = {} if section is None else dict(section.values)
    return HfConfig({**hf.values, "quantization_config": {**values, "quant_method": "modelopt"}}, hf.source)
