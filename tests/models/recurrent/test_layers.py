"""Gated delta nets in models: any cut of a prompt, and their sizes."""

import json
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from paged.cache.slot_memory import StateTensors
from paged.errors import UnsupportedError
from paged.models.cache_sizes import cache_config
from paged.models.layers.recurrent import GatedDeltaNet
from paged.models.paged_lm import PagedCausalLM
from paged.models.parallel.share import Share, cut
from paged.models.registry import load_model, read_model_config
from paged.step.metadata import NUM_STATE_ARRAYS, AttentionMetadata
from tests.models.edits import edit_config
from tests.models.families import FAMILIES, assert_same_logits, forward, save_checkpoint, tokens
from tests.models.published_settings.settings import published
from tests.tolerance import assert_within

LENGTHS = [*range(1, 131)]


@pytest.fixture(autouse=True)
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recurrent layers have no other implementation; free slots hold NaN."""
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    monkeypatch.setenv("PAGED_CHECK", "1")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "every"),
    [
        *(("falcon_h1", 13), ("granite_moe_hybrid", 13), ("lfm2", 13), ("lfm3", 13)),
        *(("bailing_hybrid", 13), ("kimi_k3", 13), ("kimi_linear", 7), ("mamba2", 13)),
        *(("nemotron_h", 7), ("olmo_hybrid", 13), ("qwen3_5", 2), ("qwen3_next", 13), ("rwkv7", 7)),
    ],
)
def test_all_lengths_whole_and_in_random_cuts(name: str, every: int, tmp_path: Path) -> None:
    config = FAMILIES[name]
    config.max_position_embeddings = 256
    save_checkpoint(config, tmp_path)
    model = load_model(tmp_path, block_size=4, num_blocks=128, max_seq_len=256, enable_prefix_cache=False)
    ids, rng = tokens(LENGTHS[-1]), random.Random(1)
    expected = model.forward_verify("whole", ids)
    model.kv_manager.free(model.kv_manager.get_handle("whole"))
    for length in LENGTHS[::every]:
        assert_same_logits(model.prefill("a", ids[:length]), expected[length - 1])
        at = 0
        while at < length:
            count = min(rng.choice([1, 2, 5, 8, 9, 30, 64]), length - at)
            (logits,) = forward(model, {"b": ids[at : at + count]})
            at += count
            assert_same_logits(logits, expected[at - 1])
        for one in "ab":
            model.kv_manager.free(model.kv_manager.get_handle(one))
    model.kv_manager.check_integrity()


def test_states_of_16_and_8_bits(tmp_path: Path) -> None:
    """Half and about a quarter of the memory; logits differ by a state's rounding, after prompts and full rings."""
    save_checkpoint(FAMILIES["kimi_linear"], tmp_path)
    edit_config(tmp_path, topk_group=4, num_experts_per_token=8)  # all experts, so that no rounding chooses another
    ids = tokens(60)
    logits, sizes = [], []
    # Share of the largest logit. Half a step of int8 is 2^-8 of a row's largest number, of bfloat16 2^-9 of a number.
    budgets = {"float32": 0.0, "bfloat16": 0.01, "int8": 0.04}
    for dtype in budgets:
        model = load_model(tmp_path, block_size=8, num_blocks=64, state_dtype=dtype)
        rows = [model.prefill("a", ids[:40]), *(model.decode("a", ids[at], at) for at in range(40, 60))]
        logits.append(torch.stack(rows).double())
        sizes.append(model.kv_manager.config.recurrent.state_bytes)
    assert sizes[0] == 2 * sizes[1] > 0
    assert sizes[1] > 1.5 * sizes[2] > 0
    for rounded, budget in zip(logits[1:], list(budgets.values())[1:], strict=True):
        assert not torch.equal(rounded, logits[0])
        assert_within(rounded, logits[0], budget * logits[0].abs().amax(-1, keepdim=True))


@pytest.mark.parametrize(
    ("family", "state_dtype"),
    [
        ("qwen3_5", "int8"),
        *(
            pytest.param(family, state_dtype, marks=pytest.mark.thorough)
            for family in ("falcon_h1", "kimi_linear", "rwkv7")
            for state_dtype in ("bfloat16", "int8")
        ),
    ],
)
def test_states_in_codes_move_exactly(family: str, state_dtype: str, tmp_path: Path) -> None:
    """The same steps give the same bits through swaps and beside another sequence. Behind a hit and a fork, the state
    is rounded after other tokens, because a slot that others read is not written."""
    save_checkpoint(FAMILIES[family], tmp_path)
    ids, rng = tokens(60), random.Random(2)
    ends = [0, 16, 24, 25, 26, 29, 30, 38, *range(39, 61)]
    options: dict[str, Any] = {"block_size": 8, "num_blocks": 64, "num_swap_blocks": 32, "state_dtype": state_dtype}
    model = load_model(tmp_path, enable_prefix_cache=False, **options)
    manager = model.kv_manager
    expected = [last_logits(model, "first", ids[begin:end]) for begin, end in pairwise(ends)]
    for (begin, end), row in zip(pairwise(ends), expected, strict=True):
        handle = manager.get_handle("swapped")
        if handle is not None and rng.random() < 0.5:
            manager.swap_out(handle)
            last_logits(model, "another", [begin])
            manager.swap_in(handle)
        assert torch.equal(last_logits(model, "swapped", ids[begin:end]), row), begin
    model = load_model(tmp_path, **options)
    manager = model.kv_manager
    manager.allocate("published", token_ids=ids[:16])
    last_logits(model, "published", ids[:16])
    hit = manager.allocate("hit", token_ids=ids)
    assert hit.num_tokens == 16
    names = ["hit"]
    for (begin, end), row in zip(pairwise(ends[1:]), expected[1:], strict=True):
        if begin == 50:
            manager.fork(hit, "fork")
            names.append("fork")
        for name in names:
            assert_within(last_logits(model, name, ids[begin:end]), row, 0.04 * row.abs().max())
    manager.check_integrity()


def last_logits(model: PagedCausalLM, name: str, ids: list[int]) -> torch.Tensor:
    """The logits after the next tokens of a sequence, which run alone."""
    (logits,) = forward(model, {name: ids})
    assert logits is not None
    return logits


def test_sizes_of_a_published_model(tmp_path: Path) -> None:
    """Qwen3.5-35B-A3B: the states of a sequence, the rows of its convolutions, and K and V of a token, in 16 bits."""
    architecture, model_type, values = published("Qwen/Qwen3.5-35B-A3B")
    text = {"architectures": [architecture], "text_config": {"model_type": model_type, **values}}
    (tmp_path / "config.json").write_text(json.dumps({**text, "model_type": "qwen3_5_moe"}))
    cache = cache_config(read_model_config(tmp_path)[1], block_size=16, num_blocks=8)
    states = cache.recurrent
    assert states is not None
    assert (states.state_bytes, states.conv_bytes(torch.bfloat16)) == (62_914_560, 1_474_560)
    assert cache.token_bytes(torch.bfloat16) == 20_480
    assert states.layers == tuple(layer for layer in range(40) if layer % 4 != 3)
    held = StateTensors(replace(states, num_slots=2), torch.bfloat16, torch.device("meta"))
    assert held.bytes_per_slot == states.slot_bytes(torch.bfloat16)


def test_padding_is_finite_before_routing(tmp_path: Path) -> None:
    """Rows of no sequence: the layers write 0, whatever their slot holds."""
    save_checkpoint(FAMILIES["qwen3_5_moe"], tmp_path)
    model = load_model(tmp_path, block_size=4, num_blocks=32, max_seq_len=64)
    layer = next(one.linear_attn for one in model.network.layers if one.linear_attn is not None)
    assert isinstance(layer, GatedDeltaNet)
    for tensor in (layer.state.conv, layer.state.state, layer.state.ring_u):
        assert tensor is not None
        tensor.fill_(torch.nan)
    none, one = torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    slots = torch.full((1, 5), -1)
    host = (torch.zeros(5, dtype=torch.int64), slots, one, *[one] * NUM_STATE_ARRAYS, none, none.view(1, 1, 2))
    metadata = AttentionMetadata.over(host, max_seqlen_q=5, max_seqlen_k=64, max_append=8)
    with torch.no_grad():
        assert not layer(torch.randn(5, model.network.config.hidden_size), metadata).any()


def test_ranks_that_do_not_divide_heads(tmp_path: Path) -> None:
    save_checkpoint(FAMILIES["qwen3_5"], tmp_path)
    _, config = read_model_config(tmp_path)
    with pytest.raises(UnsupportedError, match="tensor_parallel_size 4: key heads of recurrent layers 2, supported"):
        Share(0, 4).config(config)


def test_ranks_share_an_adapter(tmp_path: Path) -> None:
    """Each cuts its heads' features out of B's rows, or of A's columns."""
    save_checkpoint(FAMILIES["qwen3_5"], tmp_path)
    _, config = read_model_config(tmp_path)
    whole = {"in_proj_qkv": [128, 96], "in_proj_z": [64, 96], "in_proj_b": [4, 96], "out_proj": [96, 64]}
    for name, (rows, columns) in whole.items():
        dim, key = int(name == "out_proj"), f"model.layers.0.linear_attn.{name}"
        shape = [rows // (2 - dim), columns // (1 + dim)]
        parts = [Share(rank, 2).adapted(config, {key: shape})[key] for rank in range(2)]
        full = torch.arange([rows, columns][dim])
        cuts = [cut(full, sections, 0) for _, sections in parts]
        assert [len(each) for each in cuts] == [shape[dim]] * 2
        assert torch.cat(cuts).sort().values.equal(full)
        if name == "in_proj_qkv":  # q, k and v: the second rank has the second half of each
            assert cuts[1].tolist() == [*range(16, 32), *range(48, 64), *range(96, 128)]
