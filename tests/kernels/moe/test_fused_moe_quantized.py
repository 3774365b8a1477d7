"""fused_moe with quantised weights against float64, on both backends."""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paged import InvalidInputError, UnsupportedError, fused_moe, moe_align_block_size
from paged.bench.problems.formats import FORMATS, quantize
from paged.kernels.moe import definition as moe_definition
from paged.kernels.moe import fused_moe as moe
from paged.kernels.moe import gemm
from paged.kernels.moe.fused_moe import moe_block_size
from paged.kernels.quantization import definition as quantization
from paged.kernels.quantization import product
from tests.kernels.faulty import planted, turns_red
from tests.kernels.moe.test_fused_moe import Inputs, make_inputs, rounded_moe
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


def _rounded(inputs: Inputs, options: dict[str, Any]) -> torch.Tensor:
    """The definition with its roundings, and with what kernels multiply of short groups of 4-bit codes rounded too."""
    hidden_states, w1, w2, *routes = inputs

    def matrices(name: str, w: torch.Tensor, num_columns: int) -> Iterator[torch.Tensor]:
        found = [options.get(f"{name}_{each}") for each in ("scale", "zeros", "tensor_scale")]
        for expert in range(len(w)):
            scale, zeros, total = (None if each is None else each[expert] for each in found)
            if w.dtype != torch.int32 or scale.dim() < 2:
                yield quantization.dequantize_codes(w[expert], scale, zeros, total, num_columns=num_columns)
                continue
            plain = quantization.dequantize_codes(w[expert], scale, zeros, num_columns=num_columns)
            yield plain.to(hidden_states.dtype).double() * (1.0 if total is None else float(total))

    first = torch.stack(list(matrices("w1", w1, hidden_states.shape[1])))
    second = torch.stack(list(matrices("w2", w2, w1.shape[1] // 2)))
    return rounded_moe(
        (hidden_states, first, second, *routes), "triton", {}, rounds_factors=w1.dtype == torch.float8_e4m3fn
    )


def assert_matches(inputs: Inputs, scales: dict[str, Any], **options: Any) -> None:
    rounded = None if inputs[0].dtype == torch.float32 else _rounded(inputs, scales)
    out = fused_moe(*inputs, **scales, **options)
    assert_close(out, moe_definition.fused_moe(*inputs, **scales, **options), rounded=rounded)


# In the interpreter a layout takes a third of a second: others than these differ in the scales alone.
QUICK = ("e4m3 block", "int4 words zeros")


@pytest.mark.parametrize(
    ("backend", "dtype", "layout"),
    [
        pytest.param(backend, dtype, layout, marks=getattr(pytest.mark, "by_cpu" if backend == "torch" else "thorough"))
        for backend, dtype, layout in itertools.product(("torch", "triton"), (torch.float32, torch.float16), FORMATS)
        if backend == "torch" or dtype == torch.float32 or layout not in QUICK
    ]
    + [("triton", torch.float16, layout) for layout in QUICK],
    indirect=["backend"],
)
@pytest.mark.usefixtures("backend")
def test_matches_reference(layout: str, dtype: torch.dtype, device: torch.device) -> None:
    assert_matches(*make_quantized(device, layout, 3, dtype, num_experts=2))


@pytest.mark.parametrize("backend", ["triton"], indirect=True)
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("layout", "num_tokens", "block_m"),
    [
        ("e4m3 block", 30, 32),
        ("mxfp4", 60, 64),
        ("int4 group", 100, 128),
    ],
)
@pytest.mark.thorough
def test_every_tile(layout: str, num_tokens: int, block_m: int, device: torch.device) -> None:
    """Groups that the sizes do not fill, more columns than a tile, and the operands swapped for 32 rows."""
    inputs, scales = make_quantized(device, layout, num_tokens, torch.float16, intermediate_size=288)
    options = {"w2_scale": scales["w2_scale"], "dtype": torch.float16}
    assert moe_block_size(num_tokens, 2, inputs[2], **options) == block_m
    assert_matches(inputs, scales)


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
    assert_close(out[finite], moe_definition.fused_moe(*inputs, **options)[finite.cpu()])


@pytest.mark.usefixtures("backend")
def test_experts_of_another_rank_and_a_given_alignment(device: torch.device) -> None:
    """Sizes that are no whole words, whose tiles `moe_block_size` finds by the words alone."""
    inputs, scales = make_quantized(device, "int4 words zeros", 3, torch.float32, hidden_size=64, intermediate_size=32)
    expert_map = torch.tensor([2, -1, 0], dtype=torch.int32, device=device)
    assert_matches(inputs, scales, expert_map=expert_map)
    size = moe_block_size(7, 2, inputs[2], expert_map=expert_map, w2_scale=scales["w2_scale"], dtype=inputs[0].dtype)
    if size is not None:
        aligned = moe_align_block_size(inputs[4], size, 3, expert_map=expert_map)
        out = fused_moe(*inputs, expert_map=expert_map, aligned=aligned, **scales)
        assert torch.equal(out, fused_moe(*inputs, expert_map=expert_map, **scales))


def test_rejects_what_does_not_fit(device: torch.device) -> None:
    names = ("hidden_states", "w1", "w2", "topk_weights", "topk_ids")
    good = {}
    for layout in ("int8 group", "e4m3 block", "int4 group", "mxfp4"):
        inputs, scales = make_quantized(device, layout, 1, torch.float32, top_k=1)
        good[layout] = dict(zip(names, inputs, strict=True)) | scales
        fused_moe(**good[layout])
    int8, _, in_bytes, in_words = good.values()
    scale = int8["w1_scale"]
    plain = {"w1": torch.randn(3, 192, 192, device=device), "w2": torch.randn(3, 192, 96, device=device)}
    plain |= {"w1_scale": None, "w2_scale": None, "w1_zeros": torch.zeros(3, dtype=torch.int8, device=device)}
    of_bytes = {name: in_bytes[name] for name in ("w2", "w2_scale")}
    columns = in_words["w2"].repeat(1, 1, 2)
    for layout, changes, message in (
        ("int8 group", {"w1_scale": scale[:, 1:]}, r"w1_scale: shape \[3, 191, 6\], expected \[3, 192, groups\]"),
        ("int8 group", {"w1_scale": scale[..., :5].contiguous()}, "w1_scale: 5 groups, expected a divisor of 192 col"),
        ("int8 group", {"w1_zeros": scale.byte()}, r"w1_zeros: dtype torch[.]uint8, expected torch[.]int8"),
        ("int8 group", {"w2_tensor_scale": scale[0, 0, 0]}, r"w2_tensor_scale: shape \[\], expected \[3\]"),
        ("int8 group", plain, "w1_zeros: given with plain weights, expected None"),
        ("e4m3 block", {"w2_scale": scale[:, :2, :2]}, r"w2_scale: shape \[3, 2, 2\], expected \[3, 2, 1\]"),
        ("mxfp4", {"w2": columns}, r"w2: shape \[3, 192, 32\], expected \[num_experts, 192, 16\]"),
        ("mxfp4", {"w2_zeros": scale[..., :3].char()}, "w2_zeros: given with mxfp4 weights, expected None"),
        ("mxfp4", of_bytes, r"w1, w2: torch[.]int32 and torch[.]uint8, expected int32 of both"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            fused_moe(**good[layout] | changes)
    with pytest.raises(UnsupportedError, match="w1_scale: groups of 16 columns, expected a multiple of 32"):
        fused_moe(**int8 | {"w1_scale": scale.repeat(1, 1, 2)})


MODULES = {"product": product, "gemm": gemm}
# Fault -> the file, text of it, and what the faulty copy has in its place.
MUTATIONS = {
    "no fault": ("gemm", "", ""),
    "the first expert's scales": ("gemm", "expert * stride_scale_expert", "0 * stride_scale_expert"),
    "the first expert's zero points": ("gemm", "expert * stride_zeros_expert", "0 * stride_zeros_expert"),
    "the first expert's scale of all": ("gemm", "expert * stride_tensor_scale", "0 * stride_tensor_scale"),
    "the first row's scales": ("gemm", "groups_n * stride_scale_row", "groups_n * 0"),
    "the first row's zero points": ("gemm", "groups_n * stride_zeros_row", "groups_n * 0"),
    "the first group's scale": (
        "gemm",
        "// GROUP_K * weights.stride_scale_group",
        "* 0 * weights.stride_scale_group",
    ),
    "the first group's zero point": (
        "gemm",
        "// GROUP_K * weights.stride_zero_group",
        "* 0 * weights.stride_zero_group",
    ),
    "the columns behind the last whole step": ("gemm", "(K + BLOCK_K - 1) // BLOCK_K", "K // BLOCK_K"),
    "the other half of a byte": ("product", "join(values & 15, (values >> 4)", "join((values >> 4) & 15, (values)"),
    "8 is never subtracted": ("product", "tl.full((1,), 8, tl.int8)", "tl.full((1,), 0, tl.int8)"),
}
LAYOUTS = ("int4 group", "int4 group zeros", "int4 words zeros", "nvfp4")


@pytest.mark.thorough
@pytest.mark.parametrize("fault", MUTATIONS)
def test_checks_see_the_fault(fault: str, tmp_path: Path, device: torch.device) -> None:
    name, *change = MUTATIONS[fault]
    with planted([MODULES[name]], [gemm, moe], tmp_path, *change):
        is_found = any(turns_red(_check, layout, device) for layout in LAYOUTS)
    assert is_found == (fault != "no fault")


def _check(layout: str, device: torch.device) -> None:
    torch.manual_seed(0)
    assert_matches(*make_quantized(device, layout, 3, torch.float32, num_experts=2, top_k=1))
