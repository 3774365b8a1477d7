"""The attention backend's metadata in vLLM's hands, and what it refuses."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from paged import UnsupportedError

pytest.importorskip("vllm", reason="needs vLLM's Python files: make vllm")

import vllm.envs
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from paged.interop.vllm_engine import backend as vllm_backend
from paged.interop.vllm_engine import metadata as vllm_metadata
from paged.interop.vllm_engine.backend import PagedImpl
from paged.interop.vllm_plugin import register
from tests.operations import stand_in
from tests.vllm.runner import BLOCK_SIZE, HEAD_DIM, HEADS, Batch, Runner

pytestmark = pytest.mark.thorough
LENGTHS = ((1, 37), (5, 18), (6, 6))


@pytest.fixture(autouse=True)
def _registered() -> None:
    register()


def test_a_run_without_metadata_gives_zeros_and_writes_nothing(device: torch.device) -> None:
    runner = Runner(device)
    batch = Batch.on(device, (3, 3))
    tensors = runner.tensors(3)
    assert not any(out.any() for out in runner.forward(batch, None, tensors))
    assert all((layer.kv_cache.view(torch.uint8) == 0xFF).all() for layer in runner.layers)
    assert all(out.any() for out in runner.forward(batch, runner.metadata(batch), tensors))


def test_layers_of_a_group_share_metadata_and_plan(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_BACKEND", "triton")
    runner = Runner(device)
    batch = Batch.on(device, (1, 1), (6, 6))
    metadata = runner.metadata(batch)
    first, second = metadata.values()
    assert first is second
    runner.forward(batch, metadata, runner.tensors(batch.num_tokens))
    assert [len(plan.runs) for plan, _ in first.plans.values()] == [1]
    builder = runner.attn_groups[0][0].get_metadata_builder()
    moved = builder.update_block_table(first, first.block_table + 1, first.slot_mapping)
    assert moved.plans is first.plans
    assert torch.equal(moved.block_table, first.block_table + 1)


@pytest.mark.parametrize("by", ["a capture", "an update"])
def test_changed_lengths_are_planned_anew(by: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan made for 5 keys reads 5; what a captured graph launches, and what follows an update, reads them all."""
    runner = Runner(device, layers=({},))
    filled = Batch.on(device, (200, 200))
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    runner.forward(filled, runner.metadata(filled), runner.tensors(200))
    monkeypatch.setenv("PAGED_BACKEND", "triton")
    batch, tensors = replace(filled, lengths=((1, 200),)), runner.tensors(1)
    (metadata,) = runner.metadata(batch).values()
    by_layer = {"layers.0.attn": metadata}
    whole = runner.forward(batch, by_layer, tensors)[0].clone()

    metadata.plans.clear()
    metadata.seq_lens.fill_(5)
    short = runner.forward(batch, by_layer, tensors)[0].clone()
    metadata.seq_lens.fill_(200)
    if by == "a capture":
        monkeypatch.setattr(vllm_metadata, "is_capturing", lambda tensor: True)
    else:
        runner.attn_groups[0][0].update_draft_decode_metadata(by_layer)
    assert not torch.equal(short, whole)
    assert torch.equal(runner.forward(batch, by_layer, tensors)[0], whole)


def test_capture_has_short_sequences_and_every_batch_in_its_graph(device: torch.device) -> None:
    runner = Runner(device)
    assert runner.cudagraph_support.min_cg_support.name == "ALWAYS"
    batch = Batch.on(device, *LENGTHS)
    (metadata, _) = runner.metadata(batch, for_capture=True).values()
    assert metadata.seq_lens.tolist() == [1] * len(LENGTHS)
    assert metadata.max_seq_len == max(seq_len for _, seq_len in LENGTHS)


def test_batches_that_cannot_be_honoured_are_refused(device: torch.device) -> None:
    runner = Runner(device)
    batch = Batch.on(device, *LENGTHS)
    with pytest.raises(UnsupportedError, match="mm_req_doc_ranges"):
        runner.metadata(batch, mm_req_doc_ranges={0: [(0, 2)]})
    runner.metadata(batch)


@pytest.mark.parametrize("mode", [False, True])
def test_batch_invariant_mode(mode: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is deterministic."""
    monkeypatch.setattr(vllm.envs, "VLLM_BATCH_INVARIANT", mode, raising=False)
    given: dict[str, Any] = {}
    monkeypatch.setattr(vllm_backend, "paged_attention", stand_in(lambda *tensors, **options: given.update(options)))
    runner = Runner(device, layers=({},))
    batch = Batch.on(device, *LENGTHS)
    runner.forward(batch, runner.metadata(batch), runner.tensors(batch.num_tokens))
    assert given["deterministic"] is mode


def test_layers_that_cannot_be_honoured_are_refused() -> None:
    assert PagedImpl(4, 32, 0.2, 2).num_kv_heads == 2
    for name, value in (
        ("attn_type", "encoder_only"), ("kv_cache_dtype", "int4_per_token_head"), ("kv_cache_dtype", "fp8_e5m2"),
        ("use_alibi_sqrt", True),
    ):  # fmt: skip
        with pytest.raises(UnsupportedError, match=name):
            PagedImpl(4, 32, 0.2, 2, **{name: value})


@pytest.mark.parametrize("name", ["output_scale", "output_block_scale", "kv_cache"])
def test_calls_that_cannot_be_honoured_are_refused(name: str, device: torch.device) -> None:
    """A scale of the output, and a cache that packs more than keys and values."""
    runner = Runner(device)
    metadata = runner.metadata(Batch.on(device, (1, 1)))["layers.0.attn"]
    q, key, value = (x.unflatten(1, (-1, HEAD_DIM)) for x in runner.tensors(1)[0])
    width, options = (2 * HEAD_DIM + 8, {}) if name == "kv_cache" else (2 * HEAD_DIM, {name: torch.ones(1)})
    layer, cache = runner.layers[0], torch.zeros(4, HEADS[1], BLOCK_SIZE, width, device=device)
    out = torch.full_like(q, torch.nan)
    with pytest.raises(UnsupportedError, match=name):
        layer.impl.forward(layer, q, key, value, cache, metadata, out, **options)
    assert out.isnan().all()
    layer.impl.forward(layer, q, key, value, torch.zeros_like(layer.kv_cache), metadata, out)
    assert not out.isnan().any()


def test_is_the_class_behind_custom() -> None:
    assert {type(layer.impl) for layer in Runner(torch.device("cpu")).layers} == {PagedImpl}
    assert AttentionBackendEnum.CUSTOM.get_class().get_impl_cls() is PagedImpl
