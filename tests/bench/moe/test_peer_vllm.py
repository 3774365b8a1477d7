"""vLLM's experts as a peer: the same result out of its kernels, in the interpreter."""

import importlib.util
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="vLLM's kernels need triton")

import paged
from paged.bench.check import agreement
from paged.bench.moe import peers as moe_peers
from paged.bench.moe.cases import MODELS
from paged.bench.moe.peers import vllm_call
from paged.bench.problems.experts import MoeCase
from paged.bench.problems.formats import Format

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM's Python files are not on the path"
)
TILE = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1, "num_warps": 4, "num_stages": 3}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the benchmark itself checks it on a GPU")
@pytest.mark.parametrize("num_tokens", [1, 6])
@pytest.mark.parametrize("layout", [None, Format("int8", 1, 128), Format("int4", 1, 128)], ids=str)
def test_result_is_ours(num_tokens: int, layout: Format | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token takes no alignment where weights are whole."""
    monkeypatch.setattr(moe_peers, "_table", lambda case, device: {} if case.format else {1: TILE})
    case = MoeCase(MODELS[0], num_tokens, "balanced", layout).small()
    case = replace(case, model=replace(case.model, num_experts=8, top_k=2, num_local_experts=8))
    layer, batch = (make(torch.device("cpu"), torch.float16) for make in (case.layer, case.batch))
    ours = paged.fused_moe(*layer.arguments(batch), **layer.options)
    agreement(vllm_call(case, layer, batch)(), ours, factor=1 if layout is None else 2).check()
