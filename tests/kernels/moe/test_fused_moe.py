"""fused_moe against float64, on both backends."""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paged import InvalidInputError, UnsupportedError, fused_moe, moe_align_block_size, route_tokens
from paged.kernels.core.device import Device
from paged.kernels.layers import definition as layers
from paged.kernels.layers.activation import ACTIVATIONS
from paged.kernels.moe import definition as moe_definition
from paged.kernels.moe.config import MoeShape, MoeTile, fallback_tiles, takes_gemv
from paged.kernels.moe.fused_moe import moe_block_size, token_counts
from paged.kernels.moe.gemm import expert_gemm
from paged.kernels.moe.moe_align_block_size import MoeAlignment
from paged.kernels.moe.weights import ExpertLinear
from paged.kernels.quantization import definition as quantization
from tests.pairwise import pairwise
from tests.tolerance import DTYPES, assert_close

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
SIZES = {"num_tokens": 6, "hidden_size": 48, "intermediate_size": 40, "num_experts": 4, "top_k": 2}


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Every tensor made by torch.empty and its like holds NaN, so that reading what nothing wrote shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).new_empty(2).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def make_inputs(device: torch.device, *, dtype: torch.dtype = torch.float32, **sizes: int) -> Inputs:
    """hidden_states, w1, w2, topk_weights, topk_ids of `SIZES` or others; every product has about unit variance."""
    num_tokens, hidden_size, intermediate_size, num_experts, top_k = (SIZES | sizes).values()
    hidden_states = torch.randn(num_tokens, hidden_size, device=device)
    w1 = torch.randn(num_experts, 2 * intermediate_size, hidden_size, device=device) / math.sqrt(hidden_size)
    w2 = torch.randn(num_experts, hidden_size, intermediate_size, device=device) / math.sqrt(intermediate_size)
    topk_weights, topk_ids = route_tokens(torch.randn(num_tokens, num_experts, device=device), top_k)
    return hidden_states.to(dtype), w1.to(dtype), w2.to(dtype), topk_weights, topk_ids


def between_nans(tensor: torch.Tensor, left: int = 8, right: int = 16) -> torch.Tensor:
    """The same rows with NaN between them, which must not be read."""
    return torch.nn.functional.pad(tensor, (left, right), value=math.nan)[..., left:-right]


def rounded_moe(inputs: Inputs, backend: str, options: dict[str, Any], *, rounds_factors: bool = False) -> torch.Tensor:
    """The definition, with the roundings to the inputs' dtype that lie between its steps: the activation and each
    expert's part, but for matrix-vector products; in PyTorch both products.

    rounds_factors: what weights are multiplied with is rounded to e4m3, as theirs are.
    """
    hidden_states, w1, w2, topk_weights, topk_ids = (tensor.cpu() for tensor in inputs)
    activation, interleaved = options.get("activation", "silu"), options.get("interleaved", False)
    shape = MoeShape(topk_ids.numel(), len(w1), hidden_states.shape[1], w1.shape[1] // 2, 2)

    def to_dtype(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(hidden_states.dtype).double()

    def linear(name: str, w: torch.Tensor, x: torch.Tensor, expert: int) -> torch.Tensor:
        factors = quantization.rounded_groups(x, "e4m3", 128) if rounds_factors else x
        product, bias = w[expert].double() @ factors, options.get(f"{name}_bias")
        product = to_dtype(product) if backend == "torch" else product
        return product if bias is None else product + bias[expert].cpu().double()

    total = torch.zeros(hidden_states.shape, dtype=torch.float64)
    for token, ids in enumerate(topk_ids.tolist()):
        for k, expert in enumerate(ids):
            product = linear("w1", w1, hidden_states[token].double(), expert)
            if activation == "relu2":
                activated = to_dtype(to_dtype(product).clamp(min=0) ** 2)
            else:
                gate, up = (product[0::2], product[1::2]) if interleaved else product.chunk(2)
                activated = to_dtype(layers.gated_activation(gate, up, activation))
            part = linear("w2", w2, activated, expert) * topk_weights[token, k]
            total[token] += part if backend == "torch" or takes_gemv(shape) else to_dtype(part)
    return total


def assert_matches(out: torch.Tensor, inputs: Inputs, backend: str, **options: Any) -> None:
    rounded = None if out.dtype == torch.float32 else rounded_moe(inputs, backend, options)
    assert_close(out, moe_definition.fused_moe(*inputs, **options), rounded=rounded)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        *(("triton", dtype) for dtype in DTYPES[1:]),
        pytest.param("triton", torch.float32, marks=pytest.mark.thorough),
        *(pytest.param("torch", dtype, marks=pytest.mark.by_cpu) for dtype in DTYPES),
    ],
    indirect=["backend"],
)
@pytest.mark.parametrize(
    "sizes",
    [
        (9, 64, 32, 4, 2),  # whole tiles
        (3, 511, 33, 3, 1),  # a tail in every dimension
        (1, 40, 65, 8, 5),
        (1, 512, 128, 8, 2),  # matrix-vector products
        (1, 511, 33, 12, 3),
        pytest.param((9, 40, 32, 512, 16), marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_matches_reference(sizes: tuple[int, ...], dtype: torch.dtype, backend: str, device: torch.device) -> None:
    inputs = make_inputs(device, **dict(zip(SIZES, sizes, strict=True)), dtype=dtype)
    assert_matches(fused_moe(*inputs), inputs, backend)


@pairwise(num_tokens=[1, 12], activation=[*ACTIVATIONS, "relu2"], interleaved=[False, True])
def test_activations_biases_and_layouts(
    num_tokens: int, activation: str, interleaved: bool, backend: str, device: torch.device
) -> None:
    """Gates and ups far enough out to be clamped; one token takes matrix-vector products, but for relu2."""
    x, w1, *others = make_inputs(device, num_tokens=num_tokens, num_experts=8, dtype=torch.float16)
    inputs = x, w1.mul_(4)[:, : 40 if activation == "relu2" else 80], *others
    options = {
        "activation": activation,
        "w1_bias": torch.randn(8, inputs[1].shape[1], device=device, dtype=torch.float16),
        "w2_bias": torch.randn(8, 48, device=device),
        "interleaved": interleaved,
    }
    assert_matches(fused_moe(*inputs, **options), inputs, backend, **options)


@pytest.mark.parametrize("backend", ["triton"], indirect=True)
@pytest.mark.parametrize(
    ("sizes", "block_m", "widths"),
    [
        ((22, 128, 32), 16, (32, 64)),
        ((22, 2048, 32), 16, (32, 128)),
        ((22, 64, 1040), 16, (64, 64)),
        ((40, 144, 80), 32, (64, 128)),
        ((80, 128, 80), 64, (64, 128)),
        ((120, 144, 80), 128, (64, 128)),
        pytest.param((110, 2048, 48), 128, (128, 128), marks=pytest.mark.thorough),
        pytest.param((110, 48, 2048), 128, (64, 256), marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_every_tile(
    sizes: tuple[int, ...], block_m: int, widths: tuple[int, int], backend: str, device: torch.device
) -> None:
    """Several blocks for one of two experts, and more columns than a tile where the depth leaves room for them."""
    num_tokens, hidden_size, intermediate_size = sizes
    tiles = fallback_tiles(MoeShape(num_tokens, 2, hidden_size, intermediate_size, 2), Device("cpu", 8))
    assert (tiles.gate_up.block_m, tiles.gate_up.block_n, tiles.down.block_n) == (block_m, *widths)
    inputs = make_inputs(device, **dict(zip(SIZES, (*sizes, 2, 1), strict=True)), dtype=torch.float16)
    inputs[4][: num_tokens // 4] = 1
    assert_matches(fused_moe(*inputs), inputs, backend)


@pytest.mark.parametrize("backend", ["triton"], indirect=True)
@pytest.mark.parametrize("shift", [pytest.param(0, marks=pytest.mark.thorough), 4])
def test_alternating_rows_of_many_tokens(shift: int, backend: str, device: torch.device) -> None:
    """Weights for the copy engine, and some 8 bytes off the addresses that it reads."""
    hidden_states, w1, w2, *routes = make_inputs(
        device, num_tokens=120, hidden_size=192, intermediate_size=80, num_experts=2, top_k=1, dtype=torch.float16
    )
    inputs = (hidden_states, *(between_nans(w, shift, 16 - shift) for w in (w1, w2)), *routes)
    options = {"interleaved": True, "w1_bias": torch.randn(2, 160, device=device, dtype=torch.float16)}
    assert_matches(fused_moe(*inputs, **options), inputs, backend, **options)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("num_tokens", [1, 6])
def test_parts_of_four_ranks_add_up(num_tokens: int, device: torch.device) -> None:
    """Two of eight experts live on each rank, in an order of its own; some tokens need one rank alone, some none."""
    hidden_states, w1, w2, weights, ids = make_inputs(device, num_tokens=num_tokens, num_experts=8)
    ids[:4] = torch.tensor([[0, 4], [5, 1], [-1, 2], [8, -1]], device=device)[:num_tokens]
    known, total = ids.masked_fill(ids == 8, -1), torch.zeros_like(hidden_states)
    for rank in range(4):
        owned = [rank + 4, rank]
        expert_map = torch.full((8,), -1, dtype=torch.int32, device=device)
        expert_map[owned] = torch.arange(2, dtype=torch.int32, device=device)
        local = (hidden_states, w1[owned], w2[owned], weights)
        part = fused_moe(*local, ids, expert_map=expert_map)
        assert_close(part, moe_definition.fused_moe(*local, known, expert_map=expert_map))
        total += part
    assert_close(total, moe_definition.fused_moe(hidden_states, w1, w2, weights, known))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("num_experts", [4, 48])
def test_nan_stays_in_its_row(num_experts: int, device: torch.device) -> None:
    """A token that was routed nowhere, one with a single NaN weight, one whose hidden state holds NaN; 12 entries are
    sorted by expert, or few enough for matrix-vector products."""
    hidden_states, w1, w2, topk_weights, topk_ids = make_inputs(device, num_experts=num_experts)
    topk_weights[1], topk_ids[1] = math.nan, -1
    topk_weights[3, 1] = math.nan
    hidden_states[4, 7] = math.nan
    out = fused_moe(hidden_states, w1, w2, topk_weights, topk_ids)
    assert out.isnan().all(1).tolist() == [False, True, False, True, True, False]
    assert_close(out, moe_definition.fused_moe(hidden_states, w1, w2, topk_weights, topk_ids))


def untouched(device: torch.device, path: Path, size: int) -> torch.Tensor:
    """Numbers in a sparse file, or on a GPU in memory."""
    if device.type == "cuda":
        return torch.empty(size, dtype=torch.float16, device=device)
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.float16)


def test_entries_beyond_two_billion_elements(device: torch.device, tmp_path: Path) -> None:
    """The last of 131,073 tokens of 8 experts each: entries read and write rows from 2^31 elements on. Below the output
    lie as many elements again, where offsets of 32 bits, which turn negative, would write."""
    num_entries, num_columns, depth, far = 8 * 131073, 2048, 64, 2**31
    x, out = (untouched(device, tmp_path / name, far + num_entries * num_columns)[far:] for name in ("x", "out"))
    x, out = x.view(num_entries, num_columns)[:, :depth], out.view(num_entries, num_columns)
    entries = torch.arange(num_entries - 8, num_entries + 8, dtype=torch.int32, device=device)
    x[-8:] = torch.randn(8, depth, device=device)
    w = torch.randn(1, num_columns, depth, device=device).half()
    one, padded = (torch.tensor([value], dtype=torch.int32, device=device) for value in (0, 16))
    assert (num_entries - 8) * num_columns >= far
    expert_gemm(x, ExpertLinear(w), out, MoeAlignment(entries, one, padded), MoeTile(16, 128, 64, 1, 4, 2))
    assert_close(out[-8:], x[-8:].cpu().double() @ w[0].cpu().double().T)


@pytest.mark.usefixtures("backend")
def test_no_tokens(device: torch.device) -> None:
    assert fused_moe(*make_inputs(device, num_tokens=0)).shape == (0, 48)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("backend", "threads"),
    [("triton", 1), *(pytest.param("torch", count, marks=pytest.mark.by_cpu) for count in (1, 2))],
    indirect=["backend"],
)
@pytest.mark.parametrize("unrouted", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 8, 9, 48])
def test_any_number_of_tokens(num_tokens: int, threads: int, unrouted: bool, device: torch.device) -> None:
    """On a CPU products of an entry each, with two threads of all experts at once, and of an expert's many rows; by
    Triton matrix-vector products of one token, too. Rows apart by NaN, biases, and an id of no expert beside a NaN
    weight."""
    num_experts = 8 if num_tokens == 1 else 2
    inputs = make_inputs(device, num_tokens=num_tokens, num_experts=num_experts)
    views, (topk_weights, topk_ids) = [between_nans(tensor) for tensor in inputs[:3]], inputs[3:]
    sizes = {"w1_bias": 80, "w2_bias": 48}
    biases = {name: torch.randn(num_experts, size, device=device) for name, size in sizes.items()}
    nan_rows, out = [False] * num_tokens, torch.full((num_tokens, 64), math.nan, device=device)[:, 8:56]
    if unrouted:
        topk_ids[0, 0], topk_ids[-1, 1] = num_experts, -1
        topk_weights[-1, 1], nan_rows[-1] = math.nan, True
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert fused_moe(*views, topk_weights, topk_ids, **biases, out=out) is out
    finally:
        torch.set_num_threads(before)
    assert out.isnan().any(1).tolist() == nan_rows
    known = topk_ids.masked_fill(topk_ids == num_experts, -1)
    assert_close(out, moe_definition.fused_moe(*inputs[:4], known, **biases))


@pytest.mark.usefixtures("backend")
def test_weights_beyond_two_billion_elements(device: torch.device, tmp_path: Path) -> None:
    """Expert 2 begins 2^31 elements away."""
    hidden_states, w1, w2, topk_weights, topk_ids = make_inputs(device, num_experts=3, dtype=torch.float16)
    topk_ids[0, 0] = 2
    stride, size = 2**30, 2**31 + w1[0].numel()
    storage = untouched(device, tmp_path / "w1", size)
    far_w1 = storage.as_strided(w1.shape, (stride, w1.shape[2], 1))
    far_w1.copy_(w1)
    near = fused_moe(hidden_states, w1, w2, topk_weights, topk_ids)
    assert_close(fused_moe(hidden_states, far_w1, w2, topk_weights, topk_ids), near.double())


@pytest.mark.parametrize("num_tokens", [1, 9])
def test_alignment_made_beforehand(num_tokens: int, backend: str, device: torch.device) -> None:
    """The result with an alignment is the same, and one of another block size is refused where one is read."""
    inputs = make_inputs(device, num_tokens=num_tokens, num_experts=8)
    block_size = moe_block_size(num_tokens, 2, inputs[2])
    assert (block_size is None) == (backend == "torch" or num_tokens == 1)
    if block_size is not None:
        aligned = moe_align_block_size(inputs[4], block_size, 8)
        assert torch.equal(fused_moe(*inputs, aligned=aligned), fused_moe(*inputs))
        with pytest.raises(InvalidInputError, match=r"aligned\.sorted_token_ids: shape"):
            fused_moe(*inputs, aligned=moe_align_block_size(inputs[4], 2 * block_size, 8))


@pytest.mark.parametrize("is_packed", [False, True])
def test_token_counts_lead_to_every_alignment(is_packed: bool, device: torch.device, backend: str) -> None:
    w2 = torch.empty(8, 64, 48, dtype=torch.float16, device=device)
    options: dict[str, Any] = {}
    if is_packed:
        w2, scale = w2.new_zeros(8, 64, 16, dtype=torch.int32), w2.new_zeros(8, 64, 2, dtype=torch.uint8)
        options = {"w2_scale": scale, "dtype": torch.float16}
    counts = token_counts(300, 2, w2, **options)
    assert counts[0] == 1
    assert 257 in counts, "routing takes another way"
    assert len(counts) < 10
    ways = [{moe_block_size(count, 2, w2, **options) for count in some} for some in (counts, range(1, 301))]
    assert ways[0] == ways[1]
    assert len(ways[0]) == (1 if backend == "torch" else 4 if is_packed else 5)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90", "sm_100", "gfx942"])
def test_both_gemms_share_one_order(arch: str) -> None:
    axes = ((2, 4), (1, 16, 100, 200, 500, 1 << 20), (33, 512, 4096), ("", "mxfp4"))
    for element_size, num_entries, size, packed in itertools.product(*axes):
        tiles = fallback_tiles(MoeShape(num_entries, 8, size, size, element_size, packed), Device(arch, 100))
        assert tiles.gate_up.block_m == tiles.down.block_m


def test_rejects_what_does_not_fit(device: torch.device) -> None:
    names = ("hidden_states", "w1", "w2", "topk_weights", "topk_ids")
    good = dict(zip(names, make_inputs(device), strict=True))
    biases = {"w1_bias": torch.zeros(4, 80, device=device), "w2_bias": torch.zeros(4, 48, device=device)}
    fused_moe(**good, **biases, activation="silu")
    for name, bad, message in (
        ("w1", good["w1"][:, 1:], r"w1: shape \[4, 79, 48\], expected \[4, 80, 48\]"),
        ("w2", good["w2"].half(), "w2: dtype"),
        ("topk_ids", good["topk_ids"].long(), "topk_ids: dtype"),
        ("expert_map", torch.arange(4, device=device), "expert_map: dtype"),
        *((name, bias[:, 1:], f"{name}: shape") for name, bias in biases.items()),
        *((name, bias.double(), f"{name}: dtype") for name, bias in biases.items()),
    ):
        with pytest.raises(InvalidInputError, match=message):
            fused_moe(**good | {name: bad})
    with pytest.raises(UnsupportedError, match="activation: 'relu', known are 'silu', 'gelu'"):
        fused_moe(**good, activation="relu")
