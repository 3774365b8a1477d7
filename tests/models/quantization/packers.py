"""Every format that checkpoints have; of those that no package here writes random projections, by their formulas."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from tests.kernels.quantization.published import E2M1, in_bytes, in_words
from tests.models.edits import Tensors

E4M3 = torch.float8_e4m3fn
GROUP = 32


@dataclass(frozen=True)
class Format:
    """config: the quantization_config. make: rows and columns to the tensors of a projection, by the ends of their
    names, and its weights in float64; None where compressed-tensors writes them, see `compress`. rounds: what
    activations become, see `rounded`; "" for nothing."""

    config: dict[str, Any]
    make: Callable[[int, int], tuple[Tensors, torch.Tensor]] | None = None
    rounds: str = ""


def rounded(x: torch.Tensor, how: str) -> torch.Tensor:
    """Activations in the type of the weights: "e4m3" or "int8" by tokens, "e4m3 groups", or "e4m3 static"."""
    x = x.double()
    form, _, scope = how.partition(" ")
    largest = 127.0 if form == "int8" else 448.0
    groups = (
        functional.pad(x, (0, -x.shape[-1] % 128)).unflatten(-1, (-1, 128)) if scope == "groups" else x.unsqueeze(-2)
    )
    scale = torch.tensor(STATIC).double() if scope == "static" else groups.abs().amax(-1, keepdim=True) / largest
    scale = torch.where(scale > 0, scale, 1.0)
    codes = groups / scale
    codes = codes.round().clamp(-128, 127) if form == "int8" else codes.clamp(-448, 448).float().to(E4M3).double()
    return (codes * scale).flatten(-2)[..., : x.shape[-1]].float()


# A static scale of activations.
STATIC = 0.02


def _size(columns: int, spread: float) -> float:
    """What codes of this standard deviation are multiplied by, so that logits are about 1."""
    return 1.0 / (spread * columns**0.5)


def _scales(rows: int, groups: int, size: float) -> torch.Tensor:
    return (torch.rand(rows, groups) + 0.5) * size


def _spread(scale: torch.Tensor, columns: int) -> torch.Tensor:
    return scale.double().repeat_interleave(columns // scale.shape[1], 1)


def e4m3(rows: int, columns: int) -> tuple[Tensors, torch.Tensor]:
    """With a scale for all weights, and one for activations."""
    codes = torch.randn(rows, columns).to(E4M3)
    scale = _scales(1, 1, _size(columns, float(codes.double().std()))).reshape(1)
    found = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor([STATIC])}
    return found, codes.double() * scale.double()


def e4m3_blocks(rows: int, columns: int) -> tuple[Tensors, torch.Tensor]:
    codes = torch.randn(rows, columns).to(E4M3)
    scale = _scales(-(-rows // 128), -(-columns // 128), _size(columns, float(codes.double().std())))
    wide = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns].double()
    return {"weight": codes, "weight_scale_inv": scale}, codes.double() * wide


def _whole_numbers(num_bits: int, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales in float16, and zero points, among which 0 is."""
    codes, groups, middle = torch.randint(2**num_bits, (rows, columns)), columns // GROUP, 2 ** (num_bits - 1)
    scale = _scales(rows, groups, _size(columns, 2**num_bits / 12**0.5)).half()
    zeros = torch.randint(middle - 3, middle + 3, (rows, groups))
    zeros[::5] = 0
    return codes, scale, zeros


def gptq(num_bits: int, *, symmetric: bool, version: int = 1, order: bool = False) -> Any:
    def make(rows: int, columns: int) -> tuple[Tensors, torch.Tensor]:
        codes, scale, zeros = _whole_numbers(num_bits, rows, columns)
        zeros = torch.full_like(zeros, 2 ** (num_bits - 1)) if symmetric else zeros
        group_of = torch.arange(columns) // GROUP
        group_of = group_of[torch.randperm(columns)] if order else group_of
        less = (0x11111111 if num_bits == 4 else 0x01010101) if version == 1 else 0
        found = {"qweight": in_words(codes, num_bits).T, "qzeros": in_words(zeros.T, num_bits) - less}
        found |= {"scales": scale.T, "g_idx": group_of.int()}
        return found, (codes - zeros[:, group_of]).double() * scale.double()[:, group_of]

    return make


def awq(rows: int, columns: int) -> tuple[Tensors, torch.Tensor]:
    codes, scale, zeros = _whole_numbers(4, rows, columns)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    found = {"qweight": in_words(codes.T, 4, order), "qzeros": in_words(zeros.T, 4, order), "scales": scale.T}
    return found, (codes - zeros.repeat_interleave(GROUP, 1)).double() * _spread(scale, columns)


def nvfp4(rows: int, columns: int) -> tuple[Tensors, torch.Tensor]:
    codes = torch.randint(16, (rows, columns))
    scale = (torch.rand(rows, columns // 16) * 200 + 100).to(E4M3)
    # Gate and up have one, as key and value; those of other sizes have others.
    total = torch.tensor([_size(columns, 3.0) / 200 * (1 + rows / 1024)])
    found = {"weight": in_bytes(codes), "weight_scale": scale, "weight_scale_2": total, "input_scale": torch.ones(1)}
    return found, E2M1[codes] * _spread(scale, columns) * total.double()


def compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """A quantization_config of one group."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    common = {"quant_method": "compressed-tensors", "ignore": ["lm_head"], "kv_cache_scheme": None}
    return {**common, "format": form, "config_groups": {"group_0": group}}


_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
_FLOAT4 = {"num_bits": 4, "type": "float"}
_NVFP4 = _FLOAT4 | {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
_MXFP4 = _FLOAT4 | {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
_TOKEN = {"strategy": "token", "dynamic": True}
_STATIC = {"strategy": "tensor", "dynamic": False}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
_MODELOPT = {"quant_method": "modelopt", "ignore": ["lm_head"]}

_FP8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
_FP8_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_BLOCK = {"strategy": "block", "block_structure": [128, 128]}
_GROUP = {"strategy": "group", "group_size": 128, "dynamic": True}
_CHANNEL, _TENSOR = {"strategy": "channel"}, {"strategy": "tensor"}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
_MIXED = {
    "a": {"targets": ["re:.*self_attn.*_proj"], "weights": _INT4, "format": "pack-quantized"},
    "b": {"targets": ["re:.*mlp.*_proj"], "weights": _FLOAT8 | _CHANNEL, "format": "naive-quantized"},
}


def _compressed(
    form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None, rounds: str = "", **changes: Any
) -> Format:
    return Format(compressed(form, weights, inputs) | changes, rounds=rounds)


FORMATS: dict[str, Format] = {
    "fp8 blocks": Format(_FP8_BLOCKS, e4m3_blocks, "e4m3 groups"),
    "fp8 static": Format(_FP8, e4m3, "e4m3 static"),
    "float-quantized rows": _compressed("float-quantized", _FLOAT8 | _CHANNEL, _FLOAT8 | _TOKEN, "e4m3"),
    "float-quantized static": _compressed("float-quantized", _FLOAT8 | _TENSOR, _FLOAT8 | _STATIC, "e4m3 static"),
    "float-quantized blocks": _compressed("float-quantized", _FLOAT8 | _BLOCK, _FLOAT8 | _GROUP, "e4m3 groups"),
    "naive-quantized": _compressed("naive-quantized", _FLOAT8 | _TENSOR),
    "int-quantized rows": _compressed("int-quantized", _INT8 | _CHANNEL, _INT8 | _TOKEN, "int8"),
    "int-quantized static": _compressed("int-quantized", _INT8 | _TENSOR, _INT8 | _STATIC, "int8 static"),
    "pack-quantized": _compressed("pack-quantized", _INT4),
    "pack-quantized zeros, order": _compressed("pack-quantized", _INT4 | {"symmetric": False, "actorder": "group"}),
    "pack-quantized zeros, rows": _compressed(
        "pack-quantized", _INT4 | {"symmetric": False, "strategy": "channel", "group_size": None}
    ),
    "pack-quantized 8 bits": _compressed("pack-quantized", _INT8 | _CHANNEL, ignore=[]),
    "nvfp4-pack-quantized": _compressed("nvfp4-pack-quantized", _NVFP4, _NVFP4 | {"dynamic": "local"}),
    "mxfp4-pack-quantized": _compressed("mxfp4-pack-quantized", _MXFP4, ignore=[]),
    "mixed-precision": _compressed("mixed-precision", {}, config_groups=_MIXED),
    "gptq": Format(_GPTQ, gptq(4, symmetric=True)),
    "gptq zeros, order": Format(_GPTQ | {"sym": False, "desc_act": True}, gptq(4, symmetric=False, order=True)),
    "gptq_v2 8 bits": Format(
        _GPTQ | {"bits": 8, "sym": False, "checkpoint_format": "gptq_v2", "lm_head": True},
        gptq(8, symmetric=False, version=2),
    ),
    "awq": Format(_AWQ, awq),
    "modelopt NVFP4": Format(_MODELOPT | {"quant_algo": "NVFP4"}, nvfp4),
    "modelopt FP8": Format(_MODELOPT | {"quant_algo": "FP8"}, e4m3, "e4m3 static"),
}
