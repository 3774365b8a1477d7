"""CUDA graphs of our backend on the emulated device, replayed for batches of other lengths, as SGLang does."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from paged.errors import UnsupportedError
from paged.interop.sglang_plugin import register
from tests.emulated_device.emulator.device import EmulatedCuda
from tests.sglang.test_backend import (
    HEADS,
    Batch,
    expected_of,
    latent_tensors,
    make_latent_layer,
    make_layer,
    make_runner,
    tensors,
)
from tests.tolerance import assert_close

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("sglang_settings")]

PROMPTS = [(20, 20), (7, 7)]
# Lengths before the step's own tokens. The longer ones need more pages than those of the capture.
HELD = ([20, 7], [21, 8], [52, 30])


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY])
@pytest.mark.parametrize("kind", ["window pool", "latents"])
def test_replays_read_the_new_lengths_and_pages(kind: str, mode: ForwardMode, sglang_settings: Any) -> None:
    """A graph holds the addresses of one batch; the next batches are copied there before each replay."""
    register()
    sglang_settings.override("test", speculative_num_draft_tokens=2)
    count = 2 if mode.is_target_verify() else 1
    make_tensors: Callable[..., Any] = latent_tensors if kind == "latents" else tensors
    with EmulatedCuda(num_sms=2) as cuda:
        runner = make_runner(16, kind, device="cuda")
        ours, batch = ATTENTION_BACKENDS["paged"](runner), Batch(runner)
        if kind == "latents":
            layer, options = make_latent_layer(1), {}
        else:
            layer, options = make_layer(1, sliding_window_size=10), {"window_size": (10, 10)}

        def run(step: ForwardBatch, seed: int) -> torch.Tensor:
            inputs = [tensor.cuda() for tensor in make_tensors(step, seed)]
            return ours.forward(*inputs, layer, step)

        # All tokens that the steps see are in the pool before.
        prompts = batch.step(ForwardMode.EXTEND, [(length, length) for length in HELD[-1]])
        ours.init_forward_metadata(prompts)
        run(prompts, 0)

        ours.init_cuda_graph_state(4, 8)
        steps = []
        for held in HELD:
            steps.append(batch.step(mode, [(count, count + length) for length in held]))
        inputs = [tensor.cuda() for tensor in make_tensors(steps[0], 1)]
        static = steps[0]
        ours.init_forward_metadata_out_graph(static, in_capture=True)
        graph = torch.cuda.CUDAGraph()
        ours.forward(*inputs, layer, static)  # SGLang warms up
        with torch.cuda.graph(graph):
            out = ours.forward(*inputs, layer, static)

        for seed, (held, step) in enumerate(zip(HELD, steps, strict=True), start=2):
            q, k, v = make_tensors(step, seed)
            for buffer, tensor in zip(inputs, (q, k, v), strict=True):
                buffer.copy_(tensor)
            static.out_cache_loc.copy_(step.out_cache_loc)
            ours.init_forward_metadata_out_graph(step)
            graph.replay()
            lengths = [(count, count + length) for length in held]
            expected = expected_of(batch, layer, q, lengths, **options)
            assert_close(out.cpu().view(-1, HEADS, layer.v_head_dim), expected)
        assert cuda.report.hazards == []


def test_other_steps_are_refused() -> None:
    register()
    runner = make_runner(16)
    ours, batch = ATTENTION_BACKENDS["paged"](runner), Batch(runner)
    ours.init_cuda_graph_state(4, 64)
    with pytest.raises(UnsupportedError, match="forward_mode: EXTEND in a CUDA graph"):
        ours.init_forward_metadata_out_graph(batch.step(ForwardMode.EXTEND, PROMPTS))
    ragged = batch.step(ForwardMode.TARGET_VERIFY, PROMPTS)
    ragged.spec_info = SimpleNamespace(num_tokens_per_req=1, ragged_verify_layout=object())
    with pytest.raises(UnsupportedError, match="ragged_verify_layout"):
        ours.init_forward_metadata_out_graph(ragged)
    with pytest.raises(UnsupportedError, match="DLLM_EXTEND"):
        ours.init_forward_metadata(batch.step(ForwardMode.DLLM_EXTEND, PROMPTS))
