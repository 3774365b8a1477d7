"""fused_moe with quantised weights against float64, on both backends."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paged import InvalidInputError, UnsupportedError, fused_moe, moe_align_block_size
from paged.bench.moe.formats import FORMATS, quantize
from paged.kernels.common.packed.torch_ops import product
from paged.kernels.layers import reference as layers_reference
from paged.kernels.moe import reference as moe_reference
from paged.kernels.moe.fused_moe import moe_block_size
from tests.kernels.moe.test_fused_moe import Inputs, make_inputs
from tests.tolerance import assert_close


def make_quantized(
    device: torch.device, layout: str, num_tokens: int, dtype: torch.dtype, **sizes: int
) -> tuple[Inputs, dict[str, Any]]:
    sizes = {"hidden_size": 192, "intermediate_size": 96, "num_experts": 3, "top_k": 2} | sizes
    hidden_states, w1, w2, *routes = make_inputs(device, num_tokens=num_tokens, **sizes)
    first, second = (quantize(_uneven(w), FORMATS[layout]) for w in (w1, w2))
    return (hidden_states.to(dtype), first.w, second.w, *routes), first.options("w1") | second.options("w2")


def _uneven(w: torch.Tensor) -> torch.Tensor:
    """Rows and columns differ in size by up to 4, so that no scale is another's."""
    num_experts, rows, columns = w.shape
    sizes = torch.exp2(2 * torch.rand(num_experts, -(-rows // 8), -(-columns // 16), device=w.device))
    return w * sizes.repeat_interleave(8, 1)[:, :rows].repeat_interleave(16, 2)[:, :, :columns]


def rounded_moe(inputs: Inputs, options: dict[str, Any]) -> torch.Tensor:
    """The definition with the activation, each expert's part and what kernels multiply of short groups of 4-bit codes
    rounded to the dtype of hidden_states."""
    hidden_states, w1, w2, topk_weights, topk_ids = (tensor.cpu() for tensor in inputs)
    total = torch.zeros(hidden_states.shape, dtype=torch.float64)
    dtype = hidden_states.dtype

    def matrix(w: torch.Tensor, name: str, expert: int, num_columns: int) -> torch.Tensor:
        scale, zeros, tensor_scale = (
            None if options.get(f"{name}_{each}") is None else options[f"{name}_{each}"][expert].cpu()
            for each in ("scale", "zeros", "tensor_scale")
        )
        if w.dtype == torch.int32 and scale is not None and scale.dim() == 2:
            plain = moe_reference.dequantize(w[expert], scale, zeros, num_columns=num_columns).to(dtype).double()
            return plain * (1.0 if tensor_scale is None else tensor_scale.double())
        return moe_reference.dequantize(w[expert], scale, zeros, tensor_scale, num_columns=num_columns)

    matrices = [
        (matrix(w1, "w1", expert, hidden_states.shape[1]), matrix(w2, "w2", expert, w1.shape[1] // 2))
        for expert in range(len(w1))
    ]
    for token, ids in enumerate(topk_ids.tolist()):
        for k, expert in enumerate(ids):
            first, second = matrices[expert]
            x = hidden_states[token, None].double()
            if w1.dtype == torch.float8_e4m3fn:
                x = moe_reference.quantize_token_groups(x)
            activated = layers_reference.silu_and_mul(x @ first.T).to(dtype).double()
            if w2.dtype == torch.float8_e4m3fn:
                activated = moe_reference.quantize_token_groups(activated)
            total[token] += (activated @ second.T * topk_weights[token, k])[0].to(dtype).double()
    return total


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_matches_reference(layout: str, dtype: torch.dtype, device: torch.device) -> None:
    inputs, scales = make_quantized(device, layout, 5, dtype)
    rounded = rounded_moe(inputs, scales) if dtype != torch.float32 else None
    assert_close(fused_moe(*inputs, **scales), moe_reference.fused_moe(*inputs, **scales), rounded=rounded)


@pytest.mark.parametrize("layout", ["e4m3 block", "int4 group", "mxfp4"])
@pytest.mark.parametrize(("num_tokens", "block_m"), [(30, 32), (60, 64), (100, 128)])
def test_every_tile(layout: str, num_tokens: int, block_m: int, backend: str, device: torch.device) -> None:
    """Groups that the sizes do not fill, more columns than a tile, and the operands swapped for 32 rows."""
    inputs, scales = make_quantized(device, layout, num_tokens, torch.float16, intermediate_size=288)
    if backend == "triton":
        wanted = moe_block_size(num_tokens, 2, inputs[2], w2_scale=scales["w2_scale"], dtype=torch.float16)
        assert wanted == block_m
    out = fused_moe(*inputs, **scales)
    assert_close(out, moe_reference.fused_moe(*inputs, **scales), rounded=rounded_moe(inputs, scales))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("layout", ["e4m3 block", "mxfp4"])
def test_biases_activation_and_a_nan_row(layout: str, device: torch.device) -> None:
    """Interleaved, as gpt-oss has it."""
    inputs, scales = make_quantized(device, layout, 6, torch.float32)
    inputs[0][3, 7] = math.nan
    inputs[0][4] = 0
    options = scales | {
        "w1_bias": torch.randn(3, 192, device=device),
        "w2_bias": torch.randn(3, 192, device=device),
        "activation": "swiglu_oai",
        "interleaved": True,
    }
    out = fused_moe(*inputs, **options)
    assert out.isnan().any(1).tolist() == [False, False, False, True, False, False]
    finite = out.isfinite().all(1)
    assert_close(out[finite], moe_reference.fused_moe(*inputs, **options)[finite.cpu()])


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("layout", ["mxfp4", "int4 words zeros"])
def test_experts_of_another_rank_and_a_given_alignment(layout: str, device: torch.device) -> None:
    """Sizes that are no whole words, whose tiles `moe_block_size` finds by the words alone."""
    inputs, scales = make_quantized(device, layout, 3, torch.float32, hidden_size=64, intermediate_size=32)
    expert_map = torch.tensor([2, -1, 0], dtype=torch.int32, device=device)
    expected = moe_reference.fused_moe(*inputs, expert_map=expert_map, **scales)
    assert_close(fused_moe(*inputs, expert_map=expert_map, **scales), expected)
    size = moe_block_size(7, 2, inputs[2], expert_map=expert_map, w2_scale=scales["w2_scale"], dtype=inputs[0].dtype)
    if size is not None:
        aligned = moe_align_block_size(inputs[4], size, 3, expert_map=expert_map)
        assert_close(fused_moe(*inputs, expert_map=expert_map, aligned=aligned, **scales), expected)


@pytest.mark.usefixtures("backend")
def test_strides_of_scales_are_free(device: torch.device) -> None:
    inputs, scales = make_quantized(device, "int4 words zeros", 3, torch.float32, hidden_size=64, intermediate_size=64)
    contiguous = {name: None if each is None else each.contiguous() for name, each in scales.items()}
    assert contiguous["w1_scale"].stride() != scales["w1_scale"].stride()
    assert torch.equal(fused_moe(*inputs, **scales), fused_moe(*inputs, **contiguous))


def test_nothing_is_unpacked_in_memory(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The PyTorch implementation takes a tile of rows at a time: no tensor has as many numbers as an expert."""
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    monkeypatch.setattr(product, "_TILE", 1)
    inputs, scales = make_quantized(device, "mxfp4", 3, torch.float32, hidden_size=512, intermediate_size=512)
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **kwargs or {})
            if isinstance(out, torch.Tensor) and out.is_floating_point():
                largest = max(largest, out.numel())
            return out

    with Sizes():
        fused_moe(*inputs, **scales)
    assert 0 < largest <= 128 * 512


def test_rejects_what_does_not_fit(device: torch.device) -> None:
    inputs, scales = make_quantized(device, "int8 group", 3, torch.float32)
    fused_moe(*inputs, **scales)
    with pytest.raises(InvalidInputError, match=r"w2: dtype torch[.]int8, expected torch[.]float32"):
        fused_moe(*inputs, w1_scale=scales["w1_scale"])
    with pytest.raises(InvalidInputError, match="w1_scale: dtype"):
        fused_moe(*inputs, **scales | {"w1_scale": scales["w1_scale"].double()})
    with pytest.raises(InvalidInputError, match=r"w1_scale: shape \[3, 191, 6\], expected \[3, 192, groups\]"):
        fused_moe(*inputs, **scales | {"w1_scale": scales["w1_scale"][:, 1:]})
    with pytest.raises(InvalidInputError, match="w1_scale: 5 groups, expected a divisor of 192 columns"):
        fused_moe(*inputs, **scales | {"w1_scale": scales["w1_scale"][..., :5].contiguous()})
    with pytest.raises(UnsupportedError, match="w1_scale: groups of 16 columns, expected a multiple of 32"):
        fused_moe(*inputs, **scales | {"w1_scale": scales["w1_scale"].repeat(1, 1, 2)})
    with pytest.raises(InvalidInputError, match=r"w1_zeros: dtype torch[.]uint8, expected torch[.]int8"):
        fused_moe(*inputs, **scales | {"w1_zeros": torch.zeros_like(scales["w1_scale"], dtype=torch.uint8)})
    with pytest.raises(InvalidInputError, match=r"w2_tensor_scale: shape \[\], expected \[3\]"):
        fused_moe(*inputs, **scales | {"w2_tensor_scale": torch.ones((), device=device)})
    plain = torch.randn(3, 192, 192, device=device), torch.randn(3, 192, 96, device=device)
    with pytest.raises(InvalidInputError, match="w1_zeros: given with plain weights, expected None"):
        fused_moe(inputs[0], *plain, *inputs[3:], w1_zeros=torch.zeros(3, dtype=torch.int8, device=device))
    inputs, scales = make_quantized(device, "e4m3 block", 3, torch.float32)
    fused_moe(*inputs, **scales)
    with pytest.raises(InvalidInputError, match=r"w2_scale: shape \[3, 2, 2\], expected \[3, 2, 1\]"):
        fused_moe(*inputs, **scales | {"w2_scale": scales["w2_scale"].repeat(1, 1, 2)})
    inputs, scales = make_quantized(device, "int4 group", 3, torch.float32)
    fused_moe(*inputs, **scales)
    with pytest.raises(InvalidInputError, match=r"w1: shape \[3, 192, 95\], expected \[3, 192, 96\]"):
        fused_moe(inputs[0], inputs[1][..., 1:], *inputs[2:], **scales)
    inputs, scales = make_quantized(device, "mxfp4", 3, torch.float32)
    fused_moe(*inputs, **scales)
    with pytest.raises(InvalidInputError, match=r"w2: shape \[3, 192, 32\], expected \[num_experts, 192, 16\]"):
        fused_moe(*inputs[:2], inputs[2].repeat(1, 1, 2), *inputs[3:], **scales)
    with pytest.raises(InvalidInputError, match=r"w2_scale: shape \[3, 192, 2\], expected \[3, 192, 3\]"):
        fused_moe(*inputs, **scales | {"w2_scale": scales["w2_scale"][..., 1:]})
    with pytest.raises(InvalidInputError, match="w2_zeros: given with mxfp4 weights, expected None"):
        fused_moe(*inputs, **scales | {"w2_zeros": torch.zeros(3, 192, 3, dtype=torch.int8, device=device)})
    in_bytes, others = make_quantized(device, "int4 group", 3, torch.float32)
    mixed = {"w1_scale": scales["w1_scale"], "w2_scale": others["w2_scale"]}
    with pytest.raises(InvalidInputError, match=r"w1, w2: torch[.]int32 and torch[.]uint8, expected int32 of both"):
        fused_moe(*inputs[:2], in_bytes[2], *inputs[3:], **mixed)
