"""What vLLM's start-up compiles of attention, on an emulated GPU: all that its steps launch, and before they come."""

import random
from typing import Any

import pytest
import torch
import triton

pytest.importorskip("vllm", reason="needs vLLM's Python files: make vllm")
if torch.cuda.is_available():
    pytest.skip("there is a GPU", allow_module_level=True)

from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry

from paged.interop.vllm_plugin import register
from tests.emulated_device.emulator.device import EmulatedCuda
from tests.vllm.latent_runner import LatentRunner
from tests.vllm.runner import Batch, Runner

pytestmark = pytest.mark.thorough
# What a runner is made with, and its only layer.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a head size of 128": ({"head_dim": 128}, {}),
    "fp8 in a window": ({"kv_cache_dtype": "fp8", "layout": "LBHNC"}, {"per_layer_sliding_window": 9}),
    "unequal heads with sinks": ({"head_dim": 192}, {"head_size_v": 128, "sinks": torch.zeros(4)}),
    "strides that 16 does not divide": ({"head_dim": 20, "layout": "BLHNC"}, {"alibi_slopes": [0.5, 0.2, 0.1, 0.05]}),
    "causal by sequence": ({"dtype": torch.float32}, {}),
}


def batches(device: torch.device) -> list[Batch]:
    """Decodes, verify rows and prompts, alone and mixed, of every size and at random."""
    random_ = random.Random(0)
    lengths = [((length, length),) for length in (1, 2, 5, 8, 9, 16, 17, 31, 32, 33, 40, 64, 65, 127, 300, 480)]
    lengths += [((1, 470),), ((1, 1),) * 30, ((5, 20),) * 15, ((1, 70), (64, 64), (3, 200))]
    for _ in range(12):
        count = random_.randrange(1, 9)
        seq_lens = [random_.randrange(1, 49) for _ in range(count)]
        lengths.append(tuple((random_.randrange(1, seq_len + 1), seq_len) for seq_len in seq_lens))
    return [Batch.on(device, *each) for each in lengths]


def started(
    device: torch.device,
    options: dict[str, Any],
    layer: dict[str, Any],
    *,
    by_flag: bool,
    kind: type[Runner] = Runner,
) -> Runner:
    """A runner after what vLLM does between its layers' making and the first request."""
    registry = JitWarmupRegistry(None)
    layer = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in layer.items()}
    with registry.activate():
        runner = kind(device, **{"dtype": torch.bfloat16, "layers": (layer,), **options})
    registry.vllm_config = runner.config
    runner.config.attention_config.use_non_causal = by_flag
    registry.warmup()
    return runner


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_compiled_while_serving(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", None)
    by_flag = case == "causal by sequence"
    with EmulatedCuda(num_sms=132, executes=False) as cuda:
        device = torch.device("cuda", 0)
        runner = started(device, *CASES[case], by_flag=by_flag)
        assert triton.knobs.runtime.jit_cache_hook is not None, "from here on PAGED_JIT applies"
        mark, used = cuda.report.mark(), {launch.kernel for launch in cuda.report.launches}
        for batch in batches(device):
            causal = torch.ones(len(batch.lengths), dtype=torch.int32, device=device) if by_flag else True
            for is_normed in (False, True):
                tensors = runner.tensors(batch.num_tokens)
                if is_normed:  # queries and keys
                    tensors = [(q.contiguous(), key.contiguous(), value) for q, key, value in tensors]
                runner.forward(batch, runner.metadata(batch, causal=causal), tensors)
        late = {(kernel.name, str(cuda.report.nearest(kernel))) for kernel in cuda.report.compiled_after(mark)}
        assert late == set()
        assert {launch.kernel for launch in cuda.report.launches[mark.launches :]} == used
        cuda.report.check()


class _Sparse(LatentRunner):
    backend = "PAGED_MLA_SPARSE"


# What a runner over latents is made with.
LATENTS: dict[str, tuple[type[LatentRunner], dict[str, Any]]] = {
    "dense": (LatentRunner, {"rank": 512}),
    "dense in fp8": (LatentRunner, {"rank": 256, "kv_cache_dtype": "fp8"}),
    "chosen keys": (_Sparse, {"rank": 512}),
    "rows of 656 bytes": (_Sparse, {"rank": 512, "kv_cache_dtype": "fp8_ds_mla"}),
}


@pytest.mark.parametrize("case", LATENTS)
def test_nothing_of_latents_is_compiled_while_serving(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes, verify rows and prompts without context, whose cached part vLLM's own operations gather."""
    register()
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", None)
    kind, options = LATENTS[case]
    with EmulatedCuda(num_sms=132, executes=False) as cuda:
        device = torch.device("cuda", 0)
        runner = started(device, options, {}, by_flag=False, kind=kind)
        mark = cuda.report.mark()
        lengths = [((length, length),) for length in (1, 2, 5, 9, 17, 33, 70, 120)]
        lengths += [((1, 470),), ((1, 1),) * 30, ((5, 20),) * 15, ((1, 70), (64, 64)), ((3, 40), (9, 9), (30, 30))]
        for batch in [Batch.on(device, *each) for each in lengths]:
            runner.forward(batch, runner.metadata(batch), runner.tensors(batch.num_tokens))
        late = {(kernel.name, str(cuda.report.nearest(kernel))) for kernel in cuda.report.compiled_after(mark)}
        assert late == set()
        assert len(cuda.report.launches) > mark.launches
        cuda.report.check()
