"""Loops compiled by numba: attention, what bfloat16 is to others, which their families' tests leave to a GPU, several
threads, and where they are not asked for or not there."""

import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from unittest import mock

import pytest
import torch

import paged
from paged.bench.attention.problem import Problem, make
from paged.kernels.attention import definition
from paged.kernels.attention.plan import AttentionPlan
from paged.kernels.core import device as device_module
from paged.kernels.core.dtypes import kv_kind
from paged.kernels.cpu import launch
from paged.kernels.moe import definition as moe_definition
from tests.backends import needs_numba
from tests.kernels.attention import test_paged_attention as attention
from tests.kernels.attention.problem import check
from tests.kernels.cache import test_qk_norm_rope_and_cache as cache
from tests.kernels.layers import test_layers as layers
from tests.kernels.moe import test_fused_moe as experts
from tests.tolerance import assert_close, assert_within

CPU, BF16 = torch.device("cpu"), torch.bfloat16
NVFP4 = torch.float4_e2m1fn_x2
# Caches that numba kernels read; the last two have one scale or one for each head.
CODES = torch.int8, torch.bits4x2, NVFP4, torch.bits8, torch.float8_e4m3fn, torch.float8_e5m2
TYPES = pytest.mark.parametrize("dtype", [torch.float32, BF16])


def _is_taken(problem: Problem) -> bool:
    """Whether numba kernels attend, not PyTorch."""
    sizes = problem.head_dim, problem.v_head_dim or problem.head_dim
    if problem.cache_dtype is None:
        is_taken_cache = not problem.scales
    else:
        is_taken_cache = all(size % 32 == 0 for size in sizes) and not problem.chosen[1]
    return is_taken_cache and not problem.tree and isinstance(problem.causal, bool)


# The kernel of a cache format beside a dtype takes 5 s to compile: the others are thorough.
COMPILED_CODES = ("fp8 keys that are values", torch.float32), ("int8 cache", BF16), ("int4 cache", BF16)
PROBLEMS = [
    pytest.param(
        replace(problem, dtype=dtype),
        id=f"{problem.name} {dtype}",
        marks=[pytest.mark.thorough]
        * (problem.cache_dtype is not None and _is_taken(problem) and (problem.name, dtype) not in COMPILED_CODES),
    )
    for problem in attention.PROBLEMS
    for dtype in (torch.float32, BF16)
    if problem.dtype == torch.float32 and problem.lengths
]

pytestmark = pytest.mark.by_cpu


@pytest.fixture(params=[1, 3])
def _numba(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call by so many threads, however small."""
    monkeypatch.setenv("PAGED_BACKEND", "numba")
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)
    monkeypatch.setattr(launch, "_WORK_OF_A_THREAD", 1)


by_numba = [needs_numba, pytest.mark.usefixtures("_numba")]
by_three_threads = [*by_numba, pytest.mark.parametrize("_numba", [3], indirect=True)]


class TestTypes:
    pytestmark = by_three_threads

    @pytest.mark.parametrize("problem", PROBLEMS)
    def test_attention(self, problem: Problem) -> None:
        """Run trees, sequences that differ in causality, scaled caches and heads without full groups in PyTorch."""
        with mock.patch.object(definition, "paged_attention", wraps=definition.paged_attention) as in_pytorch:
            check(problem, CPU)
        assert in_pytorch.called == (not _is_taken(problem))

    @pytest.mark.parametrize("shape", [(3, 64), (5, 100), (2, 3, 48), (0, 16)])
    def test_norms(self, shape: tuple[int, ...]) -> None:
        layers.test_norms(shape, BF16, CPU)

    @pytest.mark.parametrize("is_plain", [True, False])
    @pytest.mark.parametrize("sizes", [cache.SIZES[2], cache.SIZES[5], cache.SIZES[6]], ids=str)
    def test_cache_write(self, sizes: cache.Sizes, is_plain: bool) -> None:
        if is_plain:
            cache.test_matches_the_composition(sizes, BF16, False, None, ("", ""), False, CPU)
        else:
            fp8 = torch.float8_e4m3fn
            cache.test_matches_the_composition(sizes, BF16, True, fp8, ("tensor", "heads"), True, CPU)

    @pytest.mark.parametrize("shape", [(3, 128), (20, 18), (0, 16), (3, 0)])
    def test_activation(self, shape: tuple[int, ...]) -> None:
        layers.test_silu(shape, BF16, CPU)

    def test_values_that_are_no_numbers(self) -> None:
        """Rounding by arithmetic on bits would make a zero of a NaN, and a NaN of an infinity."""
        inf, nan = torch.inf, torch.nan
        x = torch.tensor([[nan, 1.0, inf, -nan, 2.0, 3.0, -inf, 4.0]], dtype=BF16)
        out = paged.silu_and_mul(x)
        assert torch.equal(out.isnan(), torch.tensor([[True, False, False, True]]))
        assert out[0, 2] == -inf
        assert paged.rms_norm(x, torch.ones(8, dtype=BF16)).isnan().all()
        parts, combined = torch.tensor([[nan, inf, -inf, 1.00390625]]), torch.empty(1, 4, dtype=BF16)
        combine = import_module("paged.kernels.cpu.moe.fused_moe").combine_parts
        combine(parts, torch.arange(1), torch.ones(1, 1), combined)
        assert_within(combined, parts.bfloat16(), 0.0, is_exact=True)


def _prompts(
    seed: int, dtype: torch.dtype, cache_dtype: torch.dtype | None = None, v_cache_dtype: torch.dtype | None = None
) -> Problem:
    """Few queries beside many, whose every size and limit is drawn."""
    draw = random.Random(seed)
    lengths = [(queries, queries + draw.choice((0, draw.randrange(200)))) for queries in (1, draw.randrange(90), 12)]
    lengths.append((draw.randrange(20, 70), draw.randrange(300)))  # may have queries before the first key
    kv_heads = draw.choice((1, 2))
    head_dim = draw.choice((32, 64, 96, 256, 40) if dtype == BF16 else (32, 24, 64, 33))
    scales = ""
    if cache_dtype is not None:
        head_dim = draw.choice((32, 64, 96, 256))
    if cache_dtype in CODES[4:] and v_cache_dtype is None:
        scales = draw.choice(("", "tensor", "head"))
    elif cache_dtype == NVFP4 and v_cache_dtype is None:
        scales = "table"
    return Problem(
        "", tuple(lengths), head_dim=head_dim, dtype=dtype,
        heads=(kv_heads * draw.choice((1, 2, 3, 5)), kv_heads), v_head_dim=draw.choice((head_dim, 32)),
        block_size=draw.choice((1, 5, 16, 24, 128)), causal=draw.choice((True, False)),
        window_size=draw.choice(((-1, -1), (draw.randrange(150), -1), (draw.randrange(40), draw.randrange(40)))),
        chunk_size=draw.choice((0, 0, draw.randrange(1, 200))), softmax_scale=draw.choice((None, 0.0, 0.3)),
        sinks=draw.choice((False, True)), alibi=draw.choice((False, True)), softcap=draw.choice((0.0, 2.0, 50.0)),
        layout=draw.choice(("separate", "head_major")), cache_dtype=cache_dtype, v_cache_dtype=v_cache_dtype,
        scales=scales,
    )  # fmt: skip


class TestPrompts:
    pytestmark = by_three_threads

    @pytest.mark.parametrize("seed", range(10))
    @pytest.mark.parametrize("kind", ["float32", "tiles", "vectors"])
    def test_match_the_definition(self, kind: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        module = import_module("paged.kernels.cpu.attention.paged_attention")
        if kind == "tiles" and not module.has_tiles():
            pytest.skip("no AMX")
        monkeypatch.setattr(module, "has_tiles", lambda: kind == "tiles")
        check(_prompts(seed, torch.float32 if kind == "float32" else BF16), CPU, return_lse=False)

    @pytest.mark.thorough
    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize("cache_dtype", CODES, ids=str)
    def test_codes_match_the_definition(self, cache_dtype: torch.dtype, seed: int) -> None:
        with mock.patch.object(definition, "paged_attention", wraps=definition.paged_attention) as in_pytorch:
            check(_prompts(seed, BF16 if seed % 2 else torch.float32, cache_dtype), CPU)
        assert not in_pytorch.called

    @pytest.mark.thorough
    @pytest.mark.parametrize(
        ("k_dtype", "v_dtype", "dtype"),
        [(torch.int8, torch.bits4x2, BF16), (None, NVFP4, BF16), (torch.float8_e5m2, None, torch.float32)],
        ids=str,
    )
    def test_keys_and_values_of_two_formats(
        self, k_dtype: torch.dtype | None, v_dtype: torch.dtype | None, dtype: torch.dtype
    ) -> None:
        with mock.patch.object(definition, "paged_attention", wraps=definition.paged_attention) as in_pytorch:
            check(_prompts(4, dtype, k_dtype or dtype, v_dtype or dtype), CPU)
        assert not in_pytorch.called

    @pytest.mark.thorough
    @pytest.mark.parametrize("num_queries", [1, 40])
    @TYPES
    def test_every_scale_of_a_table(self, dtype: torch.dtype, num_queries: int) -> None:
        """Also those that no encoder writes: below 0, 0 and NaN."""
        problem = Problem("", ((num_queries, 90),), dtype=dtype, head_dim=64, cache_dtype=NVFP4, scales="table")
        arguments = {**vars(make(problem, CPU)), "softcap": 3.0}
        for scale in (-0.3, 0.0, torch.nan):
            arguments["k_table_scale"] = torch.tensor(scale)
            want, _ = definition.paged_attention(**arguments)
            out = paged.paged_attention(**arguments, max_seqlen_q=num_queries)
            # Weights are rounded to the dtype, and sums of 90 values cancel to a tenth of their size.
            precision = 2**-6 if dtype == BF16 else 1e-5
            assert_within(out, want.to(dtype), precision * want.nan_to_num().abs().max())

    @pytest.mark.thorough
    @pytest.mark.parametrize("num_queries", [1, 40])
    def test_every_number_of_nvfp4(self, num_queries: int) -> None:
        """A sum over one key is its value: all codes with all scales, NaN included."""
        codes = torch.arange(16, dtype=torch.uint8)
        row = (codes[0::2] | codes[1::2] << 4).repeat(32)  # 32 groups of all codes
        cache = row.expand(1, 1, 8, 256).contiguous().view(NVFP4)
        scales = torch.arange(256, dtype=torch.uint8).view(1, 1, 8, 32).view(torch.float8_e4m3fn)
        out = paged.paged_attention(
            torch.zeros(num_queries, 8, 512), torch.zeros(1, 1, 8, 512), cache, v_scale=scales,
            v_table_scale=torch.tensor(0.3), causal=False, max_seqlen_q=num_queries,
            block_table=torch.zeros(1, 1, dtype=torch.int32), seq_lens=torch.ones(1, dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, num_queries], dtype=torch.int32),
        )  # fmt: skip
        numbers = kv_kind(NVFP4).decode(cache, scales, torch.float64)[0, 0] * 0.3
        assert_within(out[-1], numbers.float(), 1e-6 * numbers.abs().float())

    @pytest.mark.thorough
    @pytest.mark.parametrize("num_queries", [1, 40])
    @pytest.mark.parametrize("cache_dtype", CODES[4:], ids=str)
    def test_every_code(self, cache_dtype: torch.dtype, num_queries: int) -> None:
        """A sum over one key is its value: all codes of 8-bit floats, NaN included."""
        codes = torch.arange(256, dtype=torch.uint8).view(1, 1, 1, 256).view(cache_dtype)
        out = paged.paged_attention(
            torch.zeros(num_queries, 1, 256), torch.zeros_like(codes), codes, causal=False, max_seqlen_q=num_queries,
            block_table=torch.zeros(1, 1, dtype=torch.int32), seq_lens=torch.ones(1, dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, num_queries], dtype=torch.int32),
        )  # fmt: skip
        numbers = codes.flatten().float()
        assert_within(out[-1, 0], numbers, 1e-6 * numbers.abs().nan_to_num(posinf=0.0))

    @pytest.mark.parametrize("window", [(-1, -1), (20, -1)])
    @TYPES
    def test_mask_at_every_offset(self, dtype: torch.dtype, window: tuple[int, int]) -> None:
        """Of a block's first query to the steps of 32 keys."""
        lengths = tuple((20, 20 + context) for context in range(32))
        check(Problem("", lengths, (1, 1), dtype=dtype, window_size=window), CPU, return_lse=False)

    @TYPES
    def test_read_what_they_see_alone(self, dtype: torch.dtype) -> None:
        """Keys that no query sees hold NaN, blocks before all windows are not in the table."""
        tensors = make(Problem("", ((60, 230), (90, 90)), dtype=dtype), CPU)
        for both in (tensors.k_cache, tensors.v_cache):
            both[tensors.block_table[0, 9].long(), :6] = torch.nan  # position 150 is the first that is seen
        tensors.block_table[0, :9] = 2**30
        out = paged.paged_attention(**vars(tensors), max_seqlen_q=90, window_size=(20, -1))
        assert out.isfinite().all()

    @pytest.mark.parametrize(
        "cache_dtype", [None, pytest.param(torch.float8_e5m2, marks=pytest.mark.thorough)], ids=str
    )
    @pytest.mark.parametrize("num_queries", [5, 40])
    @TYPES
    def test_keys_of_other_queries_do_not_matter(
        self, dtype: torch.dtype, num_queries: int, cache_dtype: torch.dtype | None
    ) -> None:
        """The first two of some queries see a key, the last one sees another, and both are no numbers."""
        problem = Problem("", ((num_queries, 90), (3, 9)), dtype=dtype, cache_dtype=cache_dtype)
        arguments = {**vars(make(problem, CPU)), "max_seqlen_q": num_queries, "window_size": (20, -1)}
        want = paged.paged_attention(**arguments).double()
        is_touched = torch.zeros(len(want), dtype=torch.bool)
        is_touched[[0, 1, num_queries - 1]] = True
        keys, values = arguments["k_cache"], arguments["v_cache"]
        positions = torch.tensor([90 - num_queries - 19, 89])
        places = arguments["block_table"][0, positions // 16].tolist(), (positions % 16).tolist()
        for block, offset in zip(*places, strict=True):
            values[block, offset, :, 0] = torch.inf
            values[block, offset, :, 1] = torch.nan
        out = paged.paged_attention(**arguments)
        assert_close(out[~is_touched], want[~is_touched])
        assert (out[is_touched, :, 0] == torch.inf).all()
        assert out[is_touched, :, 1].isnan().all()
        assert_close(out[is_touched, :, 2:], want[is_touched, :, 2:])
        for block, offset in zip(*places, strict=True):
            keys[block, offset] = torch.nan
        out = paged.paged_attention(**arguments)
        assert_close(out[~is_touched], want[~is_touched])
        assert out[is_touched].isnan().all()


@pytest.fixture(params=[False, True])
def in_blocks(request: pytest.FixtureRequest, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Has products taken in blocks of rows, by AMX or vectors, or by dot products; skips without either."""
    linear = import_module("paged.kernels.cpu.layers.linear")
    if request.param and not linear.tile_linear.multiplies(dtype):
        pytest.skip("neither tiles nor wide vectors")
    if not request.param:
        monkeypatch.setattr(linear.tile_linear.tiles, "has_tiles", lambda: False)
    monkeypatch.setattr(linear, "_MIN_ROWS_IN_BLOCKS", 0 if request.param else 1000)
    return bool(request.param)


@TYPES
class TestExperts:
    pytestmark = by_numba

    @pytest.mark.parametrize("num_tokens", [1, 3, 9, 14, 70])
    def test_match_the_definition(
        self, num_tokens: int, in_blocks: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of all numbers of entries an expert, with idle experts, those that are elsewhere, biases and strides."""
        linear, runs = import_module("paged.kernels.cpu.layers.linear"), Counter[str]()

        def counted(name: str, product: Callable[..., object]) -> Callable[..., object]:
            def multiply(*tensors: torch.Tensor, **options: bool) -> object:
                result = product(*tensors, **options)
                runs[name] += result is not None
                return result

            return multiply

        for name in ("grouped_linear", "linear_and_silu"):
            monkeypatch.setattr(linear, name, counted(name, getattr(linear, name)))
        sizes = {"hidden_size": 64, "intermediate_size": 32, "num_experts": 6, "top_k": 2}
        x, w1, w2, weights, ids = experts.make_inputs(CPU, num_tokens=num_tokens, dtype=dtype, **sizes)
        strided = torch.stack((x, x), 1)[:, 0], torch.cat((w1, w1), 1)[:, :64], w2
        elsewhere = torch.tensor([0, -1, 1, 2, -1, 3], dtype=torch.int32)
        biases = {"w1_bias": torch.randn(6, 64, dtype=dtype), "w2_bias": torch.randn(6, 64, dtype=dtype)}
        for options in ({}, {"expert_map": elsewhere}, biases, {"activation": "gelu_tanh"}, {"interleaved": True}):
            mapped = elsewhere[ids.long()] if "expert_map" in options else ids
            there = x, w1, w2, weights * (mapped >= 0), mapped.clamp(min=0)
            rounded = experts.rounded_moe(there, "numba", options)
            want = moe_definition.fused_moe(x, w1, w2, weights, ids, **options)
            assert_close(paged.fused_moe(*strided, weights, ids, **options), want, rounded=rounded)
        fused = 2 if in_blocks else 0  # without biases, by SiLU of halves
        assert runs["grouped_linear"] == 2 * 5 - fused
        assert runs["linear_and_silu"] == fused

    @pytest.mark.parametrize(
        ("num_rows", "num_outputs", "size"),
        [(1, 32, 32), (5, 64, 96), (16, 32, 64), (17, 96, 64), (33, 64, 32), (300, 64, 288), (200, 32, 4096)],
    )
    @pytest.mark.parametrize("in_blocks", [True], indirect=True)
    @pytest.mark.usefixtures("in_blocks")
    def test_blocks_of_all_numbers_of_rows(
        self, dtype: torch.dtype, num_rows: int, num_outputs: int, size: int
    ) -> None:
        """Halves of tiles, odd numbers of steps, several chunks of rows; strides, biases and gates."""
        tiles = import_module("paged.kernels.cpu.layers.tile_linear")
        x = torch.randn(num_rows, size + 7).to(dtype)[:, :size]
        weight = (torch.randn(num_outputs, size + 3) / size**0.5).to(dtype)[:, :size]
        bias, want = torch.randn(num_outputs).to(dtype), x.double() @ weight.double().T
        float32 = max(1e-5, 4e-7 * size**0.5)  # the error of a sum grows with the root of its number of terms
        for kind in (dtype, torch.float32):
            assert_close(tiles.linear(x, weight, dtype=kind), want, float32=float32)
            assert_close(tiles.linear(x, weight, bias=bias, dtype=kind), want + bias.double(), float32=float32)
        gate, up = want.chunk(2, 1)
        assert_close(tiles.linear(x, weight, is_gated=True), torch.nn.functional.silu(gate) * up, float32=float32)

    @pytest.mark.usefixtures("in_blocks")
    def test_groups_of_any_number_of_rows(self, dtype: torch.dtype) -> None:
        linear = import_module("paged.kernels.cpu.layers.linear")
        generator = random.Random(0)
        for _ in range(10):
            lengths = [generator.choice((0, 1, 2, 5, 16, 17, 40)) for _ in range(generator.randint(1, 6))]
            x, weight = torch.randn(9, 96).to(dtype), (torch.randn(len(lengths), 64, 96) / 10).to(dtype)
            ends = torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32)
            rows = torch.randint(9, (sum(lengths) + 3,))
            got, begin = linear.grouped_linear(x, weight, ends, rows), 0
            for group, end in enumerate(ends.tolist()):
                assert_close(got[begin:end], x[rows[begin:end]].double() @ weight[group].double().T)
                begin = end


class TestRepeatedCalls:
    """Calls that differ from an earlier one in their tensors' addresses alone skip the checks of all but ids."""

    pytestmark = by_three_threads

    def test_of_ids_out_of_range_write_nothing(self) -> None:
        q, k, v = (torch.randn(2, heads, 16) for heads in (4, 2, 2))
        caches, angles = (torch.zeros(2, 8, 2, 16), torch.zeros(2, 8, 2, 16)), torch.randn(8, 16)
        good = torch.tensor([3, 4])
        paged.qk_norm_rope_and_cache(q, k, v, *caches, good, good, angles)
        before = [tensor.clone() for tensor in (q, *caches)]
        for slots, positions in (([0, 16], [0, 1]), ([0, 1], [0, 8]), ([0, 1], [-1, 0])):
            with pytest.raises(paged.InvalidInputError, match=r"slot_mapping|positions"):
                paged.qk_norm_rope_and_cache(q, k, v, *caches, torch.tensor(slots), torch.tensor(positions), angles)
        assert all(map(torch.equal, (q, *caches), before))

    def test_over_another_block_table_are_checked(self) -> None:
        tensors = make(Problem("", ((1, 20), (1, 9))), CPU)
        plan = AttentionPlan(tensors.cu_seqlens_q, tensors.seq_lens, max_seqlen_q=1, max_seqlen_k=20)
        paged.paged_attention(**vars(tensors), max_seqlen_q=1, plan=plan)
        for block in (-1, len(tensors.k_cache), 2**30):
            table = tensors.block_table.clone()
            table[0, 0] = block
            with pytest.raises(paged.InvalidInputError, match="block_table"):
                paged.paged_attention(**{**vars(tensors), "block_table": table}, max_seqlen_q=1, plan=plan)


@pytest.mark.thorough  # numba compiles twice
@needs_numba
def test_compiled_code_is_kept_by_what_it_was_made_of(tmp_path: Path) -> None:
    """A change of a device function compiles kernels of other files anew; without one they are read.

    Code for another processor lies in files of its own.
    """
    kernels, copy = Path(paged.__file__).parent / "kernels", tmp_path / "paged" / "kernels"
    shutil.copytree(kernels, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy.parent / "__init__.py").touch()
    code = """
import importlib, pathlib, sys
def kept():
    for name in [name for name in sys.modules if name.startswith("paged")]:
        del sys.modules[name]
    importlib.import_module("paged.kernels.cpu.recurrent.causal_conv1d")._causal_conv1d.address
    return len(list(pathlib.Path().rglob("*.nbc")))
assert [kept(), kept()] == [1, 1]
with open("paged/kernels/cpu/vectors.py", "a") as file:
    file.write("# changed")
assert [kept(), kept()] == [2, 2]
"""
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, check=True)
    before = set(tmp_path.rglob("*.nb*"))
    elsewhere = environment | {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    code = code.partition("assert")[0] + "kept()"
    subprocess.run([sys.executable, "-c", code], env=elsewhere, cwd=tmp_path, check=True)
    after = set(tmp_path.rglob("*.nb*"))
    assert len(after) == len(before) + 2
    assert all(path.stat().st_mtime <= min(new.stat().st_mtime for new in after - before) for path in before)


@needs_numba
def test_only_within_what_has_asked_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, half = torch.randn(2, 8), torch.randn(2, 8).half()

    def has_numba_kernels(*tensors: torch.Tensor, **weights: list[torch.Tensor]) -> bool:
        return device_module.takes_numba(*tensors, **weights)

    monkeypatch.delenv("PAGED_BACKEND", raising=False)
    assert device_module.load_numba()
    assert not has_numba_kernels(rows)
    with device_module.using_numba(True):
        assert has_numba_kernels(rows)
        assert has_numba_kernels(rows.bfloat16(), weights=[rows])
        assert not any(
            (has_numba_kernels(rows.bfloat16(), rows), has_numba_kernels(rows, weights=[half]), has_numba_kernels(half))
        )
        with device_module.using_numba(False):
            assert not has_numba_kernels(rows)
        monkeypatch.setenv("PAGED_BACKEND", "torch")
        assert has_numba_kernels(rows)  # the environment is read where a forward begins
    with device_module.using_numba(True):
        assert not has_numba_kernels(rows)
    assert not device_module.load_numba()


@pytest.mark.thorough
def test_without_numba_every_operation_runs() -> None:
    code = """
import os, sys
sys.modules["numba"] = None
os.environ["TRITON_INTERPRET"] = "0"
import torch, paged
from paged.kernels.core.device import has_numba, load_numba
assert not has_numba() and not load_numba()
x = torch.randn(2, 16)
assert paged.rms_norm(x, torch.ones(16)).shape == x.shape
os.environ["PAGED_BACKEND"] = "numba"
try:
    paged.rms_norm(x, torch.ones(16))
except paged.UnsupportedError as error:
    assert "numba is not installed" in str(error)
else:
    raise SystemExit("ran without numba")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@needs_numba
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_launches_of_different_sizes_keep_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """libgomp ends those that a smaller team has no need of, and starts others for the next large one."""
    monkeypatch.setenv("PAGED_BACKEND", "numba")
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        threads = []
        for num_rows in (4096, 1024, 512, 4, 4096):
            paged.rms_norm(torch.ones(num_rows, 64), torch.ones(64))
            time.sleep(0.02)
            threads.append({path.name for path in Path("/proc/self/task").iterdir()})
        assert all(names == threads[0] for names in threads)
    finally:
        torch.set_num_threads(before)
