"""SGLang's own layers, pools and batches on a CPU: our backend beside SGLang's, and what it refuses."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

sglang = pytest.importorskip("sglang")

from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS  # noqa: E402
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend  # noqa: E402
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode  # noqa: E402

from paged.errors import UnsupportedError  # noqa: E402
from paged.interop.sglang_interface import INTERFACE  # noqa: E402
from paged.interop.sglang_plugin import register  # noqa: E402
from paged.kernels.attention import definition  # noqa: E402
from tests.tolerance import assert_close  # noqa: E402

pytestmark = pytest.mark.thorough

HEADS, KV_HEADS, DIM, V_DIM = 4, 2, 32, 32
SLOTS, MAX_LEN = 512, 96
CPU = torch.device("cpu")


def make_runner(page_size: int, *, dtype: torch.dtype = torch.float32, has_window_pool: bool = False) -> Any:
    """The attributes of a ModelRunner that attention backends read, with SGLang's own pools."""
    sizes = {"page_size": page_size, "dtype": dtype, "head_num": KV_HEADS, "head_dim": DIM, "device": "cpu"}
    pool: Any
    if has_window_pool:
        pool = SWAKVPool(size=SLOTS, size_swa=SLOTS, swa_attention_layer_ids=[1], full_attention_layer_ids=[0], **sizes)
        shift = torch.arange(SLOTS + page_size + 1)
        pool.full_to_swa_index_mapping = (shift + 2 * page_size) % SLOTS  # other slots than those of the full layers
    else:
        pool = MHATokenToKVPool(size=SLOTS, layer_num=2, enable_memory_saver=False, **sizes)
    requests = ReqToTokenPool(size=4, max_context_len=MAX_LEN, device="cpu", enable_memory_saver=False)
    return SimpleNamespace(
        device="cpu",
        page_size=page_size,
        use_mla_backend=False,
        req_to_token_pool=requests,
        token_to_kv_pool=pool,
        server_args=SimpleNamespace(speculative_num_draft_tokens=3, speculative_eagle_topk=1),
        model_config=SimpleNamespace(is_encoder_decoder=False),
    )


def make_layer(index: int, **options: Any) -> RadixAttention:
    return RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, index, **options)


class Batch:
    """Sequences in shuffled pages, and steps over them: mode, query length and key length of each sequence."""

    def __init__(self, runner: Any, seed: int = 0) -> None:
        self.runner, self.random = runner, torch.Generator().manual_seed(seed)
        page = runner.page_size
        pages = torch.randperm(SLOTS // page - 1, generator=self.random) + 1  # 0 is SGLang's slots for padding
        pages = pages[: 4 * (MAX_LEN // page)].view(4, -1)
        slots = pages.unsqueeze(2) * page + torch.arange(page)
        runner.req_to_token_pool.req_to_token[:4] = slots.flatten(1)
        self.rows = torch.tensor([2, 0, 3])

    def step(self, mode: ForwardMode, lengths: list[tuple[int, int]]) -> ForwardBatch:
        """lengths: (query, keys with the query's own) of each sequence."""
        table, slots = self.runner.req_to_token_pool.req_to_token, []
        rows = self.rows[: len(lengths)]
        for row, (count, length) in zip(rows, lengths, strict=True):
            slots.append(table[row, length - count : length].long())
        held = [length - count if mode.is_target_verify() else length for count, length in lengths]
        counts = torch.tensor([count for count, _ in lengths])
        return ForwardBatch(
            forward_mode=mode,
            batch_size=len(lengths),
            input_ids=torch.zeros(int(counts.sum()), dtype=torch.int64),
            req_pool_indices=rows,
            seq_lens=torch.tensor(held),
            seq_lens_cpu=torch.tensor(held),
            out_cache_loc=torch.cat(slots),
            seq_lens_sum=sum(held),
            extend_seq_lens=counts,
            extend_prefix_lens=torch.tensor([length - count for count, length in lengths]),
            extend_seq_lens_cpu=counts.tolist(),
        )


def tensors(batch: ForwardBatch, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    num_tokens = len(batch.out_cache_loc)
    q = torch.randn(num_tokens, HEADS * DIM, generator=random)
    k, v = torch.randn(2, num_tokens, KV_HEADS, DIM, generator=random)
    return q, k, v


STEPS = [
    (ForwardMode.EXTEND, [(20, 20), (7, 7), (33, 33)]),
    (ForwardMode.DECODE, [(1, 21), (1, 8), (1, 34)]),
    (ForwardMode.EXTEND, [(5, 26), (16, 24), (1, 35)]),
    (ForwardMode.MIXED, [(9, 35), (1, 25), (1, 36)]),
]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kind", ["plain", "window", "window pool"])
def test_steps_equal_those_of_sglangs_own_backend(kind: str, page_size: int, backend: Any) -> None:
    register()
    options = [{}, {}] if kind == "plain" else [{}, {"sliding_window_size": 10}]
    # SGLang's backend does not translate slots of a pool for windows, so it gets one pool for all layers.
    runners = [make_runner(page_size, has_window_pool=kind == "window pool"), make_runner(page_size)]
    ours, theirs = ATTENTION_BACKENDS["paged"](runners[0]), TorchNativeAttnBackend(runners[1])
    batches = [Batch(runner) for runner in runners]
    layers = [make_layer(index, **option) for index, option in enumerate(options)]
    for seed, (mode, lengths) in enumerate(STEPS):
        step = [batch.step(mode, lengths) for batch in batches]
        ours.init_forward_metadata(step[0])
        theirs.init_forward_metadata(step[1])
        for layer in layers:
            q, k, v = tensors(step[0], seed * 2 + layer.layer_id)
            out = ours.forward(q, k, v, layer, step[0])
            expected = theirs.forward(q, k, v, layer, step[1])
            assert_close(out, expected.double())


def expected_of(
    runner: Any, layer: RadixAttention, q: torch.Tensor, lengths: list[tuple[int, int]], **options: Any
) -> torch.Tensor:
    """The float64 definition over one sequence's slots after the other, as blocks of one token."""
    pool = runner.token_to_kv_pool
    rows = runner.req_to_token_pool.req_to_token[torch.tensor([2, 0, 3])[: len(lengths)]]
    offsets = torch.tensor([0, *(count for count, _ in lengths)]).cumsum(0).int()
    out, _ = definition.paged_attention(
        q.view(-1, HEADS, DIM),
        pool.get_key_buffer(layer.layer_id).unsqueeze(1),
        pool.get_value_buffer(layer.layer_id).unsqueeze(1),
        block_table=rows,
        cu_seqlens_q=offsets,
        seq_lens=torch.tensor([length for _, length in lengths], dtype=torch.int32),
        softmax_scale=layer.scaling,
        **options,
    )
    return out


def test_chains_of_drafts_caps_and_sinks(backend: Any) -> None:
    """Drafts are verified behind the cached tokens, whose number SGLang gives without them."""
    register()
    runner = make_runner(16)
    ours, batch = ATTENTION_BACKENDS["paged"](runner), Batch(runner)
    layer = make_layer(0, logit_cap=5.0)
    sinks = torch.randn(HEADS)
    for mode, lengths in ((ForwardMode.EXTEND, [(20, 20), (7, 7)]), (ForwardMode.TARGET_VERIFY, [(3, 23), (3, 10)])):
        step = batch.step(mode, lengths)
        ours.init_forward_metadata(step)
        q, k, v = tensors(step, 1)
        out = ours.forward(q, k, v, layer, step, sinks=sinks)
        assert_close(out.view(-1, HEADS, DIM), expected_of(runner, layer, q, lengths, softcap=5.0, sinks=sinks))


def test_graph_buffers_hold_every_replays_batch(backend: Any) -> None:
    """What a graph reads is refilled in place: steps through its buffers equal those without a graph."""
    register()
    runner = make_runner(16, has_window_pool=True)
    ours, batch = ATTENTION_BACKENDS["paged"](runner), Batch(runner)
    layers = [make_layer(0), make_layer(1, sliding_window_size=10)]
    start = batch.step(ForwardMode.EXTEND, [(20, 20), (7, 7)])
    ours.init_forward_metadata(start)
    for layer in layers:
        ours.forward(*tensors(start, 0), layer, start)
    ours.init_cuda_graph_state(4, 8)
    for number in (1, 2):
        step = batch.step(ForwardMode.DECODE, [(1, 20 + number), (1, 7 + number)])
        ours.init_forward_metadata_out_graph(step, in_capture=number == 1)
        ours.step.plans.clear()  # a replay makes its own plan
        from_buffers = [ours.forward(*tensors(step, number), layer, step) for layer in layers]
        captured = ours.step
        ours.init_forward_metadata(step)
        for layer, out in zip(layers, from_buffers, strict=True):
            assert_close(out, ours.forward(*tensors(step, number), layer, step).double())
        ours.step = captured


def test_the_recorded_interface_is_there() -> None:
    assert INTERFACE.gone() == []


def test_refusals_by_name() -> None:
    register()
    make = ATTENTION_BACKENDS["paged"]
    make(make_runner(8))

    def refused(match: str, **changes: Any) -> None:
        runner = make_runner(changes.pop("page_size", 8))
        for name, value in changes.items():
            setattr(runner, name, value)
        with pytest.raises(UnsupportedError, match=match):
            make(runner)

    refused("page_size: 4", page_size=4)
    refused("latents", use_mla_backend=True)
    refused("MLATokenToKVPool", token_to_kv_pool=MLATokenToKVPool.__new__(MLATokenToKVPool))
    refused("speculative_eagle_topk: 2", server_args=SimpleNamespace(speculative_eagle_topk=2))
    refused("cross attention", model_config=SimpleNamespace(is_encoder_decoder=True))
    refused("torch.int8", token_to_kv_pool=make_runner(8, dtype=torch.int8).token_to_kv_pool)

    ours, batch = make(make_runner(8)), Batch(make_runner(8))
    step = batch.step(ForwardMode.EXTEND, [(3, 3)])
    ours.init_forward_metadata(step)
    for layer, options, match in (
        (make_layer(0, is_cross_attention=True), {}, "attn_type"),
        (make_layer(0, attn_type=AttentionType.DECODER_BIDIRECTIONAL), {}, "attn_type"),
        (make_layer(0, logit_cap=1.0, logit_capping_method="x"), {}, "logit_capping_method"),
        (make_layer(0), {"q_rope": torch.zeros(1)}, "q_rope"),
    ):
        with pytest.raises(UnsupportedError, match=match):
            ours.forward(*tensors(step, 0), layer, step, **options)
