"""Steps through vLLM's own layers, caches and metadata against float64."""

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from paged.kernels.attention import definition as attention_definition
from paged.kernels.cache import definition as cache_definition
from paged.kernels.core.dtypes import kv_kind
from tests.kernels.attention.problem import with_rounded_weights
from tests.kernels.cache.rounding import rounded
from tests.tolerance import assert_close

pytest.importorskip("vllm", reason="needs vLLM's Python files: make vllm")

from vllm.config import cache as cache_config
from vllm.v1.kv_cache_layout import KVCacheLayout

from paged.interop.vllm_engine.backend import CACHES_WITH_SCALES
from paged.interop.vllm_plugin import INT4_CACHES, register
from tests.vllm.runner import BLOCK_SIZE, HEAD_DIM, HEADS, NUM_BLOCKS, Batch, Runner

pytestmark = pytest.mark.thorough
SHORT = ((1, 37), (5, 18))  # a decode step and verify rows
LENGTHS = (*SHORT, (6, 6), (1, 1), (33, 40))  # and prompts, and a chunk that goes on in the tile of prompts
SINKS = torch.tensor([0.3, -1.0, 2.0, 0.0])
SLOPES = [0.5**i for i in range(1, HEADS[0] + 1)]


@pytest.fixture(autouse=True)
def _registered() -> None:
    register()


@dataclass(frozen=True)
class Case:
    """What one run differs in: the cache, the layers (arguments of vLLM and of the reference), the step's causality."""

    name: str
    layout: str = "LBNHC"
    kv_cache_dtype: str = "auto"
    dtype: torch.dtype = torch.float32
    scale: tuple[float, ...] = ()
    head_dim: int = HEAD_DIM
    given: tuple[dict[str, Any], ...] = ({}, {})
    expected: tuple[dict[str, Any], ...] = ({}, {})
    causal: bool | tuple[int, ...] = True
    lengths: tuple[tuple[int, int], ...] = SHORT


_ONE_LAYER: dict[str, Any] = {"given": ({},), "expected": ({},)}
_FP8: dict[str, Any] = {"kv_cache_dtype": "fp8", "scale": (0.5,)}
_HALF: dict[str, Any] = {"dtype": torch.float16, "expected": ({},)}
_WINDOW = ({}, {"per_layer_sliding_window": 9})
CASES = (
    *(Case(f"layout {layout.name}", layout=layout.name) for layout in KVCacheLayout),
    Case("float16", dtype=torch.float16, lengths=LENGTHS, **_ONE_LAYER),
    Case("float16 by name, without its scale", **_HALF, kv_cache_dtype="float16", scale=(0.5,), given=({},)),
    Case("heads of 192 and 128", head_dim=192, **_HALF, given=({"head_size_v": 128},), layout="LBHNC"),
    Case("heads of 512 and 512", head_dim=512, **_HALF, given=({"head_size_v": 512},), layout="BLHNC"),
    Case("fp8 of heads of 24 and 40", head_dim=24, **_FP8, given=({"head_size_v": 40},), expected=({},)),
    Case("fp8", **_FP8, **_ONE_LAYER),
    Case("fp8 of each head", kv_cache_dtype="fp8_e4m3", scale=(0.5, 2.0), layout="LBHNC", **_ONE_LAYER),
    Case("window in every other layer", given=_WINDOW, expected=({}, {"window_size": (8, -1)}), layout="BLHNC"),
    Case(
        "sinks with softcap, ALiBi",
        given=({"sinks": SINKS, "logits_soft_cap": 3.0}, {"alibi_slopes": SLOPES}),
        expected=({"sinks": SINKS, "softcap": 3.0}, {"alibi_slopes": torch.tensor(SLOPES)}),
    ),
    Case("not causal, a window of two sides", given=_WINDOW, expected=({}, {"window_size": (8, 8)}), causal=False),
    Case("causal by sequence", causal=(1, 0, 0, 1, 0), lengths=LENGTHS, **_ONE_LAYER),
)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_steps_match_reference(case: Case, device: torch.device) -> None:
    """First what stands before the batch's queries is written by a step of its own, then the mixed batch runs.

    A cache holds what vLLM expects where it expects it: keys, then values, of each head and position.
    """
    options = {name: getattr(case, name) for name in ("dtype", "layout", "kv_cache_dtype", "head_dim")}
    runner = Runner(device, layers=case.given, **options)
    scales = {name: i * torch.tensor(case.scale) for i, name in enumerate(("k_scale", "v_scale"), 1) if case.scale}
    for layer, (name, scale) in itertools.product(runner.layers, scales.items()):
        setattr(layer, f"_{name}", scale.squeeze(0).to(device))
    is_fp8 = case.kv_cache_dtype.startswith("fp8")
    used = scales if is_fp8 else {}
    stored = torch.float8_e4m3fn if is_fp8 else case.dtype
    sizes = [(layer.head_size, layer.head_size_v) for layer in runner.layers]
    shape = NUM_BLOCKS, BLOCK_SIZE, HEADS[1]
    caches = [[torch.full((*shape, size), torch.nan).to(stored) for size in both] for both in sizes]

    batch = replace(Batch.on(device, *case.lengths), padding_rows=3)
    before = tuple((seq_len - q_len, seq_len - q_len) for q_len, seq_len in case.lengths)
    flags = torch.tensor(case.causal, device=device) if isinstance(case.causal, tuple) else case.causal
    for step, causal in ((Batch(before, batch.block_table), True), (batch, flags)):
        tensors = runner.tensors(step.num_tokens + step.padding_rows)
        outs = runner.forward(step, runner.metadata(step, causal=causal), tensors)
        for index, (out, rows) in enumerate(zip(outs, tensors, strict=True)):
            given = step.of_group(runner.group_of(index))
            slots = given.slots()[: step.num_tokens].cpu()
            q, key, value = (x.cpu().unflatten(1, (n, -1)) for x, n in zip(rows, (*HEADS, HEADS[1]), strict=True))
            new = key[: step.num_tokens], value[: step.num_tokens]
            wide = cache_definition.reshape_and_cache(*new, *caches[index], slots, **used)
            caches[index] = [rounded(numbers, stored) for numbers in wide]
            written = runner.layers[index].kv_cache.view(stored).transpose(1, 2).split(sizes[index], dim=-1)
            for cache, want in zip(written, caches[index], strict=True):
                assert_close(cache.flatten(0, 1).cpu()[slots], want.flatten(0, 1)[slots].double())
            arguments = {"q": q, "k_cache": caches[index][0], "v_cache": caches[index][1], **used}
            arguments |= {name: tensor.cpu() for name, tensor in given.arguments().items()}
            arguments |= {"causal": causal if isinstance(causal, bool) else causal.bool().cpu(), **case.expected[index]}
            less_exact = None if case.dtype == torch.float32 else with_rounded_weights(arguments)
            assert_close(out, attention_definition.paged_attention(**arguments)[0], rounded=less_exact)
            assert not out[step.num_tokens :].any()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("layout", ["LBNHC", "BLHNC"])
@pytest.mark.parametrize("name", ["int8_per_token_head", "fp8_per_token_head", INT4_CACHES])
def test_caches_with_scales_match_reference(name: str, layout: str, device: torch.device) -> None:
    """Behind each row lie its scales. The cache's bytes, read by the format alone, are the numbers of attention."""
    if name == INT4_CACHES and not hasattr(cache_config, "register_kv_cache_dtype"):
        pytest.skip("vLLM takes formats of others from 0.33 on")
    kind = kv_kind(CACHES_WITH_SCALES[name])
    sizes = 40, 24
    runner = Runner(device, layout=layout, kv_cache_dtype=name, head_dim=40, layers=({"head_size_v": 24},))
    batch = replace(Batch.on(device, *LENGTHS), padding_rows=3)
    before = tuple((seq_len - q_len, seq_len - q_len) for q_len, seq_len in LENGTHS)
    written: list[torch.Tensor] = []
    for step in (Batch(before, batch.block_table), batch):
        (rows,) = runner.tensors(step.num_tokens + step.padding_rows)
        (out,) = runner.forward(step, runner.metadata(step), [rows])
        slots = step.slots()[: step.num_tokens].cpu()
        q, key, value = (x.cpu().unflatten(1, (n, -1)) for x, n in zip(rows, (*HEADS, HEADS[1]), strict=True))
        content = runner.layers[0].kv_cache.view(torch.uint8).transpose(1, 2).cpu()
        # Bytes of keys, of their scales, of values, of their scales: [num_blocks, block_size, num_kv_heads, bytes]
        parts = content.split(
            [n for size in sizes for n in (kind.num_elements(size), kind.num_scales(size) * kind.scale_dtype.itemsize)],
            dim=-1,
        )
        written = []
        for codes, scales, new in zip(parts[::2], parts[1::2], (key, value), strict=True):
            scale = scales.contiguous().view(kind.scale_dtype)
            if not kind.group_size:
                scale = scale.squeeze(-1)
            numbers = kind.decode(codes.contiguous().view(kind.dtype), scale, torch.float32)
            expected = kind.decode(*kind.encode(new[: step.num_tokens], None), torch.float32)
            torch.testing.assert_close(numbers.flatten(0, 1)[slots], expected)
            written.append(numbers)
    arguments = {arg: tensor.cpu() for arg, tensor in batch.arguments().items()}
    expected_out = attention_definition.paged_attention(q, *written, **arguments)[0]
    assert_close(out, expected_out)
