"""Card of products with quantised weights."""

from __future__ import annotations

import math

import torch

from paged.bench.bounds import products as bounds
from paged.bench.cards.card import Card, Row, defined, named, same
from paged.bench.cards.draw import Draw
from paged.bench.compilation.cases import quantization as compiled
from paged.bench.limits import Cost
from paged.bench.problems.arguments import Arguments, num_bytes
from paged.kernels.quantization import definition
from paged.kernels.quantization.quantize import quantize

_LINEAR = {"in_features": (4096, 1024, 1024), "out_features": (12288, 1024, 300), "group_size": same(128)}
_FEW, _MANY = {"tokens": (16, 16, 6), **_LINEAR}, {"tokens": (4096, 256, 130), **_LINEAR}
_INT4, _E4M3 = {"form": same("int4")}, {"form": same("e4m3")}


def _product(
    draw: Draw,
    *,
    tokens: int,
    in_features: int,
    out_features: int,
    form: str,
    group_size: int,
    has_bias: bool = False,
    symmetric: bool = True,
) -> Arguments:
    """Draw a product. Every 128 activations are e4m3 numbers of at most 1.75, so that quantising them is exact."""
    x = draw.normal(tokens, in_features).clamp(-1.75, 1.75).to(torch.float8_e4m3fn).to(draw.dtype)
    x[:, ::128] = 1.75
    floats = draw.floats(out_features, in_features) / math.sqrt(in_features)
    weight = quantize(floats, form, group_size=group_size, symmetric=symmetric or form not in ("int4", "int8"))
    arguments = {"x": x, "weight": weight}
    if has_bias:
        arguments["bias"] = draw.normal(out_features)
    return arguments


def _cost(_: Card, arguments: Arguments) -> Cost:
    x, weight = arguments["x"], arguments["weight"]
    out_features = len(weight.values)
    moved = num_bytes(x, weight.values, weight.scale) + len(x) * out_features * x.element_size()
    return Cost(2 * x.numel() * out_features, moved)


CARDS = (
    Card(
        "quantized_linear",
        _product,
        defined(definition.quantized_linear, "out"),
        named("out"),
        errors=bounds.quantized_linear,
        cost=_cost,
        rows=(
            Row(_FEW | _INT4, "int4 decode"),
            Row(_MANY | _INT4, "int4 prefill"),
            Row(_FEW | _E4M3, "e4m3 decode"),
            Row(_MANY | _E4M3, "e4m3 prefill"),
        ),
        odd={
            "tokens": (0, 1, 5),
            "in_features": (384, 128),
            "out_features": (1, 130, 24),
            "form": ("e4m3", "mxfp4", "nvfp4", "int4", "int8"),
            "group_size": (128,),
            "has_bias": (False, True),
            "symmetric": (True, False),
        },
        compiled=compiled.cases,
    ),
)
