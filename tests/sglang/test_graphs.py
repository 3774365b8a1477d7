"""CUDA graphs of our backend on the emulated device, replayed for batches of other lengths, as SGLang does."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from paged.errors import UnsupportedError
from paged.interop.sglang_drafts import PagedDraftBackends
from paged.interop.sglang_plugin import register
from tests.emulated_device.emulator.device import EmulatedCuda
from tests.sglang.test_backend import (
    HEADS,
    SPARSE_LATENT,
    Batch,
    expected_of,
    latent_tensors,
    make_indexer,
    make_latent_layer,
    make_layer,
    make_runner,
    make_sparse_layer,
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


def test_replays_choose_among_the_new_lengths(sglang_settings: Any) -> None:
    """The indexer runs in the graph of drafts: replays choose and attend as a step without a graph does."""
    register()
    sglang_settings.override("test", speculative_num_draft_tokens=2)
    torch.manual_seed(0)
    with EmulatedCuda(num_sms=2) as cuda:
        runner, indexer = make_runner(64, "sparse latents", device="cuda"), make_indexer().cuda()
        runner.model.indexer = indexer
        ours, batch = ATTENTION_BACKENDS["paged"](runner), Batch(runner)
        layer = make_sparse_layer(1)

        def run(backend: Any, step: ForwardBatch, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x, q_lora, positions, q, rows = inputs
            with forward_context(ForwardContext(attn_backend=backend)):
                chosen = indexer(x, q_lora, positions, forward_batch=step, layer_id=1)
                return chosen, backend.forward(q, rows, rows[..., :SPARSE_LATENT], layer, step, topk_indices=chosen)

        def inputs_of(lengths: list[tuple[int, int]]) -> list[torch.Tensor]:
            positions = torch.cat([torch.arange(length - count, length) for count, length in lengths])
            num_tokens = len(positions)
            x, q_lora = torch.randint(-1, 2, (num_tokens, 96)).bfloat16().split_with_sizes([64, 32], 1)
            q = torch.randn(num_tokens, HEADS * layer.qk_head_dim)
            tensors = x, q_lora, positions, q, torch.randn(num_tokens, 1, layer.qk_head_dim)
            return [tensor.cuda() for tensor in tensors]

        prompts = [(length, length) for length in (90, 40)]
        step = batch.step(ForwardMode.EXTEND, prompts)
        ours.init_forward_metadata(step)
        run(ours, step, *inputs_of(prompts))

        ours.init_cuda_graph_state(4, 8)
        drafts = [[(2, 22), (2, 9)], [(2, 71), (2, 12)], [(2, 92), (2, 42)]]
        static, inputs = batch.step(ForwardMode.TARGET_VERIFY, drafts[0]), inputs_of(drafts[0])
        ours.init_forward_metadata_out_graph(static, in_capture=True)
        run(ours, static, *inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chosen, out = run(ours, static, *inputs)

        plain = ATTENTION_BACKENDS["paged"](runner)
        for lengths in drafts[1:]:
            step, values = batch.step(ForwardMode.TARGET_VERIFY, lengths), inputs_of(lengths)
            for buffer, tensor in zip((*inputs, static.out_cache_loc), (*values, step.out_cache_loc), strict=True):
                buffer.copy_(tensor)
            ours.init_forward_metadata_out_graph(step)
            graph.replay()
            plain.init_forward_metadata(step)
            expected_keys, expected = run(plain, step, *values)
            assert torch.equal(chosen, expected_keys)
            assert_close(out.cpu(), expected.cpu().double())
        assert cuda.report.hazards == []


@pytest.mark.parametrize("kind", ["plain", "latents"])
def test_replays_of_a_chain_of_drafts(kind: str, sglang_settings: Any) -> None:
    """One graph holds the decodes of a chain, each with a backend. Its batch has the lengths without drafts."""
    register()
    sglang_settings.override("test", speculative_algorithm="EAGLE")
    make_tensors: Callable[..., Any] = latent_tensors if kind == "latents" else tensors
    layer = make_latent_layer(1) if kind == "latents" else make_layer(1)
    with EmulatedCuda(num_sms=2) as cuda:
        runner = make_runner(16, kind, device="cuda")
        runner.is_draft_worker = True
        chain = PagedDraftBackends(ATTENTION_BACKENDS["paged"], runner, num_steps=3)
        batch = Batch(runner)
        prompts = batch.step(ForwardMode.EXTEND, [(length, length) for length in HELD[-1]])
        chain.attn_backends[0].init_forward_metadata(prompts)
        chain.attn_backends[0].forward(*[tensor.cuda() for tensor in make_tensors(prompts, 0)], layer, prompts)

        def decodes(held: list[int]) -> list[ForwardBatch]:
            """The decodes of a chain; only their slots differ."""
            steps = []
            for num_drafted in (1, 2):
                step = batch.step(ForwardMode.DECODE, [(1, length + num_drafted) for length in held])
                step.seq_lens = step.seq_lens - num_drafted
                steps.append(step)
            return steps

        chain.init_cuda_graph_state(4, 8)
        static = decodes(HELD[0])
        inputs = [[tensor.cuda() for tensor in make_tensors(step, 1)] for step in static]

        def run() -> list[torch.Tensor]:
            outputs = []
            for backend, step, arguments in zip(chain.attn_backends, static, inputs, strict=True):
                outputs.append(backend.forward(*arguments, layer, step))
            return outputs

        chain.init_forward_metadata_out_graph(static[0], in_capture=True)
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = run()
        for held in HELD[1:]:
            steps = decodes(held)
            queries = []
            for i, step in enumerate(steps):
                values = make_tensors(step, 2 + i)
                queries.append(values[0])
                for buffer, value in zip(
                    (*inputs[i], static[i].out_cache_loc), (*values, step.out_cache_loc), strict=True
                ):
                    buffer.copy_(value)
            chain.init_forward_metadata_out_graph(steps[0])
            graph.replay()
            for i, out in enumerate(outputs):
                lengths = [(1, length + 1 + i) for length in held]
                expected = expected_of(batch, layer, queries[i], lengths)
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
