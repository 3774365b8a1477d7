"""fused_moe against float64, on both backends."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paged import InvalidInputError, UnsupportedError, fused_moe, moe_align_block_size, route_tokens
from paged.kernels.common import reference as common_reference
from paged.kernels.common.device import Device
from paged.kernels.moe import reference as moe_reference
from paged.kernels.moe.alignment import MoeAlignment
from paged.kernels.moe.config import MoeShape, MoeTile, fallback_tiles, takes_gemv
from paged.kernels.moe.fused_moe import moe_block_size, token_counts
from paged.kernels.moe.gemm import expert_gemm
from paged.kernels.moe.weights import ExpertLinear
from tests.tolerance import assert_close, dtypes

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Every tensor made by torch.empty and its like holds NaN, so that reading what nothing wrote shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).new_empty(2).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def make_inputs(
    device: torch.device,
    *,
    num_tokens: int = 6,
    hidden_size: int = 48,
    intermediate_size: int = 40,
    num_experts: int = 4,
    top_k: int = 2,
    dtype: torch.dtype = torch.float32,
) -> Inputs:
    """hidden_states, w1, w2, topk_weights, topk_ids; every product has about unit variance."""
    hidden_states = torch.randn(num_tokens, hidden_size, device=device)
    w1 = torch.randn(num_experts, 2 * intermediate_size, hidden_size, device=device) / math.sqrt(hidden_size)
    w2 = torch.randn(num_experts, hidden_size, intermediate_size, device=device) / math.sqrt(intermediate_size)
    topk_weights, topk_ids = route_tokens(torch.randn(num_tokens, num_experts, device=device), top_k)
    return hidden_states.to(dtype), w1.to(dtype), w2.to(dtype), topk_weights, topk_ids


def rounded_moe(inputs: Inputs, backend: str, options: dict[str, Any]) -> torch.Tensor:
    """The definition, with the roundings to the inputs' dtype that lie between its steps: the activation and each
    expert's part, but for matrix-vector products; in PyTorch both products and sums with a bias."""
    hidden_states, w1, w2, topk_weights, topk_ids = (tensor.cpu() for tensor in inputs)
    activation, interleaved = options.get("activation", "silu"), options.get("interleaved", False)

    def to_dtype(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(hidden_states.dtype).double()

    def linear(w: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, expert: int) -> torch.Tensor:
        product = w[expert].double() @ x
        product = to_dtype(product) if backend == "torch" else product
        if bias is None:
            return product
        total = product + bias[expert].cpu().double()
        return to_dtype(total) if backend == "torch" else total

    num_experts, hidden_size, intermediate_size = w2.shape
    shape = MoeShape(topk_ids.numel(), num_experts, hidden_size, intermediate_size, 2)
    total = torch.zeros(hidden_states.shape, dtype=torch.float64)
    for token, ids in enumerate(topk_ids.tolist()):
        for k, expert in enumerate(ids):
            product = linear(w1, hidden_states[token].double(), options.get("w1_bias"), expert)
            gate, up = (product[0::2], product[1::2]) if interleaved else product.chunk(2)
            activated = to_dtype(common_reference.gated_activation(gate, up, activation))
            part = linear(w2, activated, options.get("w2_bias"), expert) * topk_weights[token, k]
            total[token] += part if backend == "torch" or takes_gemv(shape) else to_dtype(part)
    return total


def assert_matches(out: torch.Tensor, inputs: Inputs, backend: str, **options: Any) -> None:
    rounded = None if out.dtype == torch.float32 else rounded_moe(inputs, backend, options)
    assert_close(out, moe_reference.fused_moe(*inputs, **options), rounded=rounded)


@pytest.mark.parametrize("dtype", dtypes())
@pytest.mark.parametrize(
    ("num_tokens", "hidden_size", "intermediate_size", "num_experts", "top_k"),
    # Whole tiles; a tail in every dimension; matrix-vector products, with and without tails; 16 of 512 experts.
    [
        (9, 64, 32, 4, 2),
        (3, 511, 33, 3, 1),
        (1, 40, 65, 8, 5),
        (2, 512, 256, 16, 2),
        (1, 511, 33, 24, 6),
        (9, 40, 32, 512, 16),
    ],
)
def test_matches_reference(
    num_tokens: int,
    hidden_size: int,
    intermediate_size: int,
    num_experts: int,
    top_k: int,
    dtype: torch.dtype,
    backend: str,
    device: torch.device,
) -> None:
    inputs = make_inputs(
        device,
        num_tokens=num_tokens,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_experts=num_experts,
        top_k=top_k,
        dtype=dtype,
    )
    assert_matches(fused_moe(*inputs), inputs, backend)


@pytest.mark.parametrize("num_tokens", [1, 12])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "swiglu_oai"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_activations_biases_and_layouts(
    num_tokens: int, activation: str, interleaved: bool, backend: str, device: torch.device
) -> None:
    """Gates and ups far enough out to be clamped; one token takes matrix-vector products."""
    inputs = make_inputs(device, num_tokens=num_tokens, num_experts=8, dtype=torch.float16)
    inputs[1].mul_(4)
    options = {
        "activation": activation,
        "w1_bias": torch.randn(8, 80, device=device, dtype=torch.float16),
        "w2_bias": torch.randn(8, 48, device=device),
        "interleaved": interleaved,
    }
    assert_matches(fused_moe(*inputs, **options), inputs, backend, **options)


@pytest.mark.parametrize(
    ("num_tokens", "hidden_size", "intermediate_size", "block_m", "widths"),
    [
        (22, 128, 32, 16, (32, 64)),
        (22, 2048, 32, 16, (32, 128)),
        (22, 64, 1040, 16, (64, 64)),
        (40, 144, 80, 32, (64, 128)),
        (80, 128, 80, 64, (64, 128)),
        (120, 144, 80, 128, (64, 128)),
        (110, 2048, 48, 128, (128, 128)),
        (110, 48, 2048, 128, (64, 256)),
    ],
)
def test_every_tile(
    num_tokens: int,
    hidden_size: int,
    intermediate_size: int,
    block_m: int,
    widths: tuple[int, int],
    backend: str,
    device: torch.device,
) -> None:
    """Several blocks for one of two experts, and more columns than a tile where the depth leaves room for them."""
    shape = MoeShape(num_tokens, 2, hidden_size, intermediate_size, 2)
    tiles = fallback_tiles(shape, Device("cpu", 8))
    assert (tiles.gate_up.block_m, tiles.gate_up.block_n, tiles.down.block_n) == (block_m, *widths)
    inputs = make_inputs(
        device,
        num_tokens=num_tokens,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_experts=2,
        top_k=1,
        dtype=torch.float16,
    )
    inputs[4][: num_tokens // 4] = 1
    assert_matches(fused_moe(*inputs), inputs, backend)


@pytest.mark.parametrize("shift", [0, 4])
def test_alternating_rows_of_many_tokens(shift: int, backend: str, device: torch.device) -> None:
    """Weights for the copy engine, and some 8 bytes off the addresses that it reads."""
    hidden_states, w1, w2, *routes = make_inputs(
        device, num_tokens=120, hidden_size=192, intermediate_size=80, num_experts=2, top_k=1, dtype=torch.float16
    )
    moved = [torch.nn.functional.pad(w, (shift, 16 - shift), value=math.nan)[..., shift : shift - 16] for w in (w1, w2)]
    inputs = (hidden_states, *moved, *routes)
    options = {"interleaved": True, "w1_bias": torch.randn(2, 160, device=device, dtype=torch.float16)}
    assert_matches(fused_moe(*inputs, **options), inputs, backend, **options)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="minutes in the interpreter")
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 128, 128), (1, 2048, 128), (33, 2048, 128), (222, 1024, 511), (64, 128, 1024)]
)
@pytest.mark.parametrize("num_experts", [8, 64, 192])
@pytest.mark.parametrize("top_k", [2, 6])
def test_the_peers_matrix(m: int, n: int, k: int, num_experts: int, top_k: int, device: torch.device) -> None:
    sizes = {"num_tokens": m, "hidden_size": k, "intermediate_size": n, "num_experts": num_experts, "top_k": top_k}
    inputs = make_inputs(device, **sizes, dtype=torch.bfloat16)
    assert_matches(fused_moe(*inputs), inputs, "triton")


@pytest.mark.parametrize(("expert", "num_tokens", "num_experts"), [(0, 40, 3), (2, 40, 3), (5, 2, 8)])
def test_all_tokens_to_one_expert(
    expert: int, num_tokens: int, num_experts: int, backend: str, device: torch.device
) -> None:
    inputs = make_inputs(device, num_tokens=num_tokens, num_experts=num_experts, top_k=1)
    inputs[4].fill_(expert)
    assert_matches(fused_moe(*inputs), inputs, backend)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("num_tokens", [1, 6])
def test_parts_of_four_ranks_add_up(num_tokens: int, device: torch.device) -> None:
    """Two of eight experts live on each rank, in an order of the rank's own; some tokens need one rank alone."""
    hidden_states, w1, w2, topk_weights, topk_ids = make_inputs(device, num_tokens=num_tokens, num_experts=8)
    topk_ids[:2] = torch.tensor([[0, 4], [5, 1]], device=device)[:num_tokens]
    total = torch.zeros_like(hidden_states)
    for rank in range(4):
        owned = [rank + 4, rank]
        expert_map = torch.full((8,), -1, dtype=torch.int32, device=device)
        expert_map[owned] = torch.arange(2, dtype=torch.int32, device=device)
        local = (hidden_states, w1[owned], w2[owned], topk_weights, topk_ids)
        part = fused_moe(*local, expert_map=expert_map)
        assert_close(part, moe_reference.fused_moe(*local, expert_map=expert_map))
        total += part
    assert_close(total, moe_reference.fused_moe(hidden_states, w1, w2, topk_weights, topk_ids))


# 12 entries: sorted by expert, and few enough for matrix-vector products.
BOTH_PATHS = pytest.mark.parametrize("num_experts", [4, 48])


@pytest.mark.usefixtures("backend")
@BOTH_PATHS
def test_ids_of_no_expert_contribute_nothing(num_experts: int, device: torch.device) -> None:
    hidden_states, w1, w2, topk_weights, topk_ids = make_inputs(device, num_experts=num_experts)
    topk_ids[0, 1], topk_ids[2, 0], topk_ids[3] = -1, num_experts, -1
    known = topk_ids.masked_fill(topk_ids == num_experts, -1)
    want = moe_reference.fused_moe(hidden_states, w1, w2, topk_weights, known)
    assert_close(fused_moe(hidden_states, w1, w2, topk_weights, topk_ids), want)
    every = torch.arange(num_experts, dtype=torch.int32, device=device)
    assert_close(fused_moe(hidden_states, w1, w2, topk_weights, topk_ids, expert_map=every), want)


@pytest.mark.usefixtures("backend")
@BOTH_PATHS
def test_nan_stays_in_its_row(num_experts: int, device: torch.device) -> None:
    """A token that was routed nowhere, one with a single NaN weight, one whose hidden state holds NaN."""
    hidden_states, w1, w2, topk_weights, topk_ids = make_inputs(device, num_experts=num_experts)
    topk_weights[1], topk_ids[1] = math.nan, -1
    topk_weights[3, 1] = math.nan
    hidden_states[4, 7] = math.nan
    out = fused_moe(hidden_states, w1, w2, topk_weights, topk_ids)
    assert out.isnan().all(1).tolist() == [False, True, False, True, True, False]
    assert_close(out, moe_reference.fused_moe(hidden_states, w1, w2, topk_weights, topk_ids))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("num_experts", [4, 64])
def test_shared_experts_are_experts_that_all_tokens_take(num_experts: int, device: torch.device) -> None:
    """Two rows behind the routed experts, with weight 1, add what a gated MLP of twice the width would."""
    hidden_states, w1, w2, _, _ = make_inputs(device, num_experts=num_experts + 2)
    logits = torch.randn(6, num_experts, device=device)
    routed = route_tokens(logits, 2)
    out = fused_moe(hidden_states, w1, w2, *route_tokens(logits, 2, num_shared_experts=2))
    gates, ups = (part.reshape(80, 48) for part in w1[num_experts:].chunk(2, 1))
    shared = (
        common_reference.gated_activation(
            hidden_states.cpu() @ gates.cpu().T, hidden_states.cpu() @ ups.cpu().T, "silu"
        )
        @ torch.cat(list(w2[num_experts:]), 1).cpu().double().T
    )
    assert_close(out, moe_reference.fused_moe(hidden_states, w1, w2, *routed) + shared)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="8 GB, and minutes in the interpreter")
def test_more_entries_than_32_bits_address(device: torch.device) -> None:
    """131,072 tokens of 8 experts: the parts that are summed begin beyond 2^31 elements."""
    inputs = make_inputs(
        device,
        num_tokens=131072,
        hidden_size=4096,
        intermediate_size=64,
        num_experts=16,
        top_k=8,
        dtype=torch.bfloat16,
    )
    assert inputs[4].numel() * 4096 > 2**31
    out = fused_moe(*inputs)
    spots = [0, 65537, 131071]
    few = (inputs[0][spots], *inputs[1:3], inputs[3][spots], inputs[4][spots])
    assert_matches(out[spots], few, "triton")


def test_entries_beyond_two_billion_elements(device: torch.device, tmp_path: Path) -> None:
    """The last of 131,073 tokens of 8 experts each: entries read and write rows from 2^31 elements on, in sparse files
    (or untouched allocations on a GPU). Below the output lie as many elements again, where offsets of 32 bits, which
    turn negative, would write."""
    num_entries, num_columns, depth, far = 8 * 131073, 2048, 64, 2**31

    def untouched(name: str, size: int) -> torch.Tensor:
        if device.type == "cuda":
            return torch.empty(size, dtype=torch.float16, device=device)
        return torch.from_file(str(tmp_path / name), shared=True, size=size, dtype=torch.float16)

    x = untouched("x", far + num_entries * num_columns)[far:].view(num_entries, num_columns)[:, :depth]
    out = untouched("out", far + num_entries * num_columns)[far:].view(num_entries, num_columns)
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
@BOTH_PATHS
def test_strided_inputs_and_out(num_experts: int, device: torch.device) -> None:
    """What lies between the rows is NaN and must not be read, also where a row ends inside a tile."""
    hidden_states, w1, w2, topk_weights, topk_ids = make_inputs(device, num_experts=num_experts)
    strided = [torch.nn.functional.pad(tensor, (8, 16), value=math.nan) for tensor in (hidden_states, w1, w2)]
    views = [tensor[..., 8:-16] for tensor in strided]
    out = torch.full((6, 64), math.nan, device=device)[:, 8:56]
    assert fused_moe(*views, topk_weights, topk_ids, out=out) is out
    assert_close(out, moe_reference.fused_moe(hidden_states, w1, w2, topk_weights, topk_ids))


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """PyTorch's, for tests of what depends on them."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("backend", "threads")
@pytest.mark.parametrize("unrouted", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 8, 9, 80])
def test_any_number_of_tokens(num_tokens: int, unrouted: bool, device: torch.device) -> None:
    """On a CPU products of an entry each, with two threads of all experts at once, and of an expert's many rows; rows
    apart by NaN, biases, and an id of no expert beside a NaN weight."""
    hidden_states, w1, w2, topk_weights, topk_ids = make_inputs(device, num_tokens=num_tokens, num_experts=2)
    strided = [torch.nn.functional.pad(tensor, (8, 16), value=math.nan) for tensor in (hidden_states, w1, w2)]
    views = [tensor[..., 8:-16] for tensor in strided]
    biases = {"w1_bias": torch.randn(2, 80, device=device), "w2_bias": torch.randn(2, 48, device=device)}
    nan_rows = [False] * num_tokens
    if unrouted:
        topk_ids[0, 0], topk_ids[-1, 1] = 2, -1
        topk_weights[-1, 1], nan_rows[-1] = math.nan, True
    out = fused_moe(*views, topk_weights, topk_ids, **biases)
    assert out.isnan().any(1).tolist() == nan_rows
    known = topk_ids.masked_fill(topk_ids == 2, -1)
    assert_close(out, moe_reference.fused_moe(hidden_states, w1, w2, topk_weights, known, **biases))


@pytest.mark.usefixtures("backend")
def test_weights_beyond_two_billion_elements(device: torch.device, tmp_path: Path) -> None:
    """Expert 2 begins 2^31 elements into a sparse file (or an untouched allocation on a GPU)."""
    hidden_states, w1, w2, topk_weights, topk_ids = make_inputs(device, num_experts=3, dtype=torch.float16)
    topk_ids[0, 0] = 2
    stride, size = 2**30, 2**31 + w1[0].numel()
    if device.type == "cpu":
        storage = torch.from_file(str(tmp_path / "w1"), shared=True, size=size, dtype=torch.float16)
    else:
        storage = torch.empty(size, dtype=torch.float16, device=device)
    far_w1 = storage.as_strided(w1.shape, (stride, w1.shape[2], 1))
    far_w1.copy_(w1)
    near = fused_moe(hidden_states, w1, w2, topk_weights, topk_ids)
    assert torch.equal(fused_moe(hidden_states, far_w1, w2, topk_weights, topk_ids), near)


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_alignment_made_beforehand(num_tokens: int, backend: str, device: torch.device) -> None:
    """The result with an alignment is the same, and one of another block size is refused where one is read."""
    inputs = make_inputs(device, num_tokens=num_tokens, num_experts=8)
    block_size = moe_block_size(num_tokens, 2, inputs[2])
    assert (block_size is None) == (backend == "torch" or num_tokens == 1)
    if block_size is not None:
        aligned = moe_align_block_size(inputs[4], block_size, 8)
        assert torch.equal(fused_moe(*inputs, aligned=aligned), fused_moe(*inputs))
        with pytest.raises(InvalidInputError, match="aligned: sizes"):
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
    for element_size in (2, 4):
        for num_entries in (1, 16, 100, 200, 500, 1 << 20):
            for size in (33, 512, 4096):
                for packed in ("", "mxfp4"):
                    shape = MoeShape(num_entries, 8, size, size, element_size, packed)
                    tiles = fallback_tiles(shape, Device(arch, 100))
                    assert tiles.gate_up.block_m == tiles.down.block_m


def test_rejects_what_does_not_fit(device: torch.device) -> None:
    hidden_states, w1, w2, topk_weights, topk_ids = make_inputs(device)
    fused_moe(hidden_states, w1, w2, topk_weights, topk_ids, activation="silu")
    with pytest.raises(UnsupportedError, match="activation: 'relu', known are 'silu', 'gelu'"):
        fused_moe(hidden_states, w1, w2, topk_weights, topk_ids, activation="relu")
    biases = {"w1_bias": torch.zeros(4, 80, device=device), "w2_bias": torch.zeros(4, 48, device=device)}
    fused_moe(hidden_states, w1, w2, topk_weights, topk_ids, **biases)
    for name, bias in biases.items():
        with pytest.raises(InvalidInputError, match=f"{name}: shape"):
            fused_moe(hidden_states, w1, w2, topk_weights, topk_ids, **{name: bias[:, 1:]})
        with pytest.raises(InvalidInputError, match=f"{name}: dtype"):
            fused_moe(hidden_states, w1, w2, topk_weights, topk_ids, **{name: bias.double()})
        with pytest.raises(InvalidInputError, match=f"{name}: strides"):
            fused_moe(hidden_states, w1, w2, topk_weights, topk_ids, **{name: bias.T.contiguous().T})
    with pytest.raises(InvalidInputError, match=r"w1: shape \[4, 79, 48\], expected \[4, 80, 48\]"):
        fused_moe(hidden_states, w1[:, 1:], w2, topk_weights, topk_ids)
    with pytest.raises(InvalidInputError, match="w2: dtype"):
        fused_moe(hidden_states, w1, w2.half(), topk_weights, topk_ids)
    with pytest.raises(InvalidInputError, match="w2: last dimension has stride 48"):
        fused_moe(hidden_states, w1, w2.mT.contiguous().mT, topk_weights, topk_ids)
    with pytest.raises(InvalidInputError, match="topk_weights: shape"):
        fused_moe(hidden_states, w1, w2, topk_weights[:, :1], topk_ids)
    with pytest.raises(InvalidInputError, match="topk_ids: dtype"):
        fused_moe(hidden_states, w1, w2, topk_weights, topk_ids.long())
    with pytest.raises(InvalidInputError, match="expert_map: dtype"):
        fused_moe(hidden_states, w1, w2, topk_weights, topk_ids, expert_map=torch.arange(4, device=device))
    with pytest.raises(InvalidInputError, match="out: shape"):
        fused_moe(hidden_states, w1, w2, topk_weights, topk_ids, out=hidden_states[:3])
