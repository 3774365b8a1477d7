"""Products with weights: oneDNN's and PyTorch's own say the same."""

from importlib import import_module
from unittest.mock import Mock

import pytest
import torch

from paged.kernels.cpu import products as module
from paged.kernels.cpu.products import pack
from paged.kernels.layers.linear import linear, linear_and_silu
from tests.backends import needs_numba
from tests.pairwise import pairwise
from tests.tolerance import DTYPES, assert_close

pytestmark = pytest.mark.by_cpu


@pytest.fixture(autouse=True)
def _no_intel_mkl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HAS_INTEL_MKL", False)


@pairwise(
    shape=[(1, 64), (33, 64), (0, 64), (2, 3, 64)],
    dtype=DTYPES,
    has_onednn=[True, False],
    is_packed=[False, True],
)
def test_matches_float64(
    shape: tuple[int, ...], dtype: torch.dtype, has_onednn: bool, is_packed: bool, device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if not has_onednn:
        monkeypatch.setattr(module, "_HAS_ONEDNN", False)
        monkeypatch.setattr(module, "MULTIPLIES_BF16", False)
    wide = torch.randn(*shape[:-1], 100, device=device).to(dtype) / 8
    x, weight, bias = wide[..., 5:69], torch.randn(40, 64, device=device).to(dtype), torch.randn(40, device=device)
    for given in (None, bias) if dtype == torch.float32 else (None,):  # 16-bit types may round before the bias
        want = x.double() @ weight.double().T
        out = linear(x, pack(weight) if is_packed else weight, given)
        assert out.dtype == dtype
        assert_close(out, want if given is None else want + given.double())


def test_packs_once_and_only_what_a_cpu_multiplies(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, half = torch.randn(40, 64, device=device), torch.randn(40, 64, device=device, dtype=torch.float16)
    packed = pack(weight)
    assert packed.is_mkldnn == (device.type == "cpu" and module._HAS_ONEDNN)
    assert pack(packed) is packed
    assert pack(half) is half
    monkeypatch.setattr(module, "_HAS_INTEL_MKL", True)
    assert pack(weight) is weight
    monkeypatch.setattr(module, "_MKL_BYTES", weight.nbytes - 1)
    assert pack(weight).is_mkldnn == packed.is_mkldnn
    monkeypatch.setattr(module, "_HAS_ONEDNN", False)
    assert pack(weight) is weight


@needs_numba
def test_loops_take_few_rows_of_plain_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of float32, where MKL takes the others: one after the other, then in blocks."""
    monkeypatch.setenv("PAGED_BACKEND", "numba")
    monkeypatch.setattr(module, "_HAS_INTEL_MKL", True)
    monkeypatch.setattr(module, "_MKL_BYTES", 0)
    loops = import_module("paged.kernels.cpu.layers.linear")
    if not loops.tile_linear.HAS_WIDE_VECTORS:
        pytest.skip("vectors of 16 take two registers")
    taken = []
    monkeypatch.setattr(loops, "linear", recorded := Mock(wraps=loops.linear))
    weight, bias = torch.randn(64, 96) / 10, torch.randn(64)
    assert pack(weight) is weight
    for count in (0, 1, 3, 4, 16, 17, 40, 128, 129):
        x = torch.randn(count, 128)[:, :96]
        want = x.double() @ weight.double().T
        before = recorded.call_count
        assert_close(linear(x, weight), want)
        assert_close(linear(x, weight, bias), want + bias.double())
        if recorded.call_count > before:
            taken.append(count)
        activated = linear_and_silu(x, weight)
        assert (activated is not None) == (17 <= count <= 128)
        if activated is not None:
            gate, up = want.chunk(2, 1)
            assert_close(activated, torch.nn.functional.silu(gate) * up)
    assert taken == [4, 16, 17, 40, 128]


@needs_numba
@pytest.mark.parametrize(("multiplies", "most"), [(False, 256), (True, 64)])
def test_bfloat16_in_loops(multiplies: bool, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without AMX, loops take few rows of plain weights; oneDNN takes more rows, in float32 if the CPU has no products
    of bfloat16."""
    if multiplies and not module.MULTIPLIES_BF16:
        pytest.skip("no products of bfloat16")
    monkeypatch.setenv("PAGED_BACKEND", "numba")
    loops = import_module("paged.kernels.cpu.layers.linear")
    for each, name, value in (
        (module, "MULTIPLIES_BF16", multiplies),
        (module, "_MOST_BF16_ROWS", most),
        (module, "_NUMBA_ROWS", {torch.bfloat16: range(1, most + 1)}),
        (loops.tile_linear, "multiplies", lambda _: False),
    ):
        monkeypatch.setattr(each, name, value)
    monkeypatch.setattr(loops, "linear", recorded := Mock(wraps=loops.linear))
    weight, bias = torch.randn(64, 96).bfloat16() / 10, torch.randn(64).bfloat16()
    assert pack(weight) is weight
    for count in (0, 1, 2, 7, most, most + 1):
        x = torch.randn(count, 128).bfloat16()[:, :96]
        want, before = x.double() @ weight.double().T, recorded.call_count
        assert_close(linear(x, weight), want)
        assert linear(x, weight, bias).dtype == torch.bfloat16
        assert (recorded.call_count > before) == (1 <= count <= most)
    assert_close(linear(x, weight, bias), want + bias.double())


@pytest.mark.skipif(not module._HAS_ONEDNN, reason="PyTorch has no oneDNN")
def test_numbers_of_rows_share_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN keeps half a megabyte for each: the memory of a process must not grow with the shapes that come."""
    monkeypatch.setattr(module, "_multiply", multiply := Mock(wraps=module._multiply))
    weight, rows = torch.randn(8, 16), torch.randn(200, 16)
    packed = pack(weight)
    for count in range(201):
        out = linear(rows[:count], packed)
        assert out.is_contiguous()
        assert_close(out, rows[:count].double() @ weight.double().T)
    assert {len(call.args[0]) for call in multiply.call_args_list} == {*range(33), *range(48, 209, 16)}


@pytest.mark.thorough
def test_a_compiled_graph_holds_no_private_op(device: torch.device) -> None:
    graphs: list[torch.fx.GraphModule] = []
    x, weight = torch.randn(3, 8, device=device), torch.randn(5, 8, device=device)
    compiled = torch.compile(linear, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    assert_close(compiled(x, weight), x.double() @ weight.double().T)
    [target] = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert target is torch.nn.functional.linear
