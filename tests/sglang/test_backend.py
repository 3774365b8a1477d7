"""SGLang's own layers, pools and batches on a CPU: our backend beside SGLang's, and what it refuses."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

sglang = pytest.importorskip("sglang")

from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS  # noqa: E402
from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer  # noqa: E402
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend  # noqa: E402
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention  # noqa: E402
from sglang.srt.mem_cache.memory_pool import (  # noqa: E402
    DSATokenToKVPool,
    HybridLinearKVPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode  # noqa: E402
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context  # noqa: E402
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.context import (  # noqa: E402
    enable_breakable_cuda_graph,
)
from sglang.srt.model_executor.runner_utils.forward_batch import set_forward_batch  # noqa: E402
from sglang.srt.models.gemma3_mm import Gemma3ForConditionalGeneration  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402

from paged.errors import UnsupportedError  # noqa: E402
from paged.interop.sglang_interface import INTERFACE  # noqa: E402
from paged.interop.sglang_plugin import register  # noqa: E402
from paged.interop.sglang_sparse_latents import choose  # noqa: E402
from paged.kernels.attention import definition, latent_definition  # noqa: E402
from paged.kernels.cache.latent_cache import PACKED_BYTES, dequantized  # noqa: E402
from tests.tolerance import assert_close, assert_within  # noqa: E402

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("sglang_settings")]

HEADS, KV_HEADS, DIM, V_DIM = 4, 2, 32, 32
LATENT, ROPE = 32, 16
# Those of DeepSeek-V3.2, the only ones of fp8 rows with scales.
SPARSE_LATENT, SPARSE_ROPE = 512, 64
SLOTS, MAX_LEN = 640, 128
TEXT_MODEL = SimpleNamespace(is_encoder_decoder=False, is_multimodal=False, is_lm_only=False)


# Rows of sparse latents: the pool's dtype, and numbers or bytes of a row.
ROWS = {
    "sparse latents": (torch.float32, SPARSE_LATENT + SPARSE_ROPE),
    "sparse latents, e4m3": (torch.float8_e4m3fn, SPARSE_LATENT + SPARSE_ROPE),
    "sparse latents, e4m3 with scales": (torch.float8_e4m3fn, PACKED_BYTES),
}


def make_runner(page_size: int, kind: str = "plain", *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """The attributes of a ModelRunner that attention backends read, with SGLang's own pools."""
    sizes = {"page_size": page_size, "dtype": dtype, "head_num": KV_HEADS, "head_dim": DIM, "device": device}
    pool: Any
    latents = {"kv_lora_rank": LATENT, "qk_rope_head_dim": ROPE}
    # Layers 0 and 2 of a hybrid are recurrent, and have no place in the pool.
    hybrid = {"size": SLOTS, "full_attention_layer_ids": [1, 3], "mamba_pool": None, **sizes}
    if kind == "latents":
        dense = {"page_size": page_size, "dtype": dtype, "device": device, "layer_num": 2, **latents}
        pool = MLATokenToKVPool(SLOTS, enable_memory_saver=False, **dense)
    elif kind in ROWS:
        sizes = {"page_size": page_size, "device": device, "layer_num": 2, "enable_memory_saver": False}
        sizes |= {"kv_lora_rank": SPARSE_LATENT, "qk_rope_head_dim": SPARSE_ROPE, "index_head_dim": 128}
        pool = DSATokenToKVPool(SLOTS, dtype=ROWS[kind][0], kv_cache_dim=ROWS[kind][1], **sizes)
    elif kind == "hybrid":
        pool = HybridLinearKVPool(**hybrid)
    elif kind == "hybrid latents":
        pool = HybridLinearKVPool(use_mla=True, **hybrid, **latents)
    elif kind == "window pool":
        pool = SWAKVPool(size=SLOTS, size_swa=SLOTS, swa_attention_layer_ids=[1], full_attention_layer_ids=[0], **sizes)
        shift = torch.arange(SLOTS + page_size + 1, device=device)
        pool.full_to_swa_index_mapping = (shift + 2 * page_size) % SLOTS  # other slots than those of the full layers
    else:
        pool = MHATokenToKVPool(size=SLOTS, layer_num=2, enable_memory_saver=False, **sizes)
    requests = ReqToTokenPool(size=4, max_context_len=MAX_LEN, device=device, enable_memory_saver=False)
    return SimpleNamespace(
        device=device,
        page_size=page_size,
        use_mla_backend="latents" in kind,
        is_draft_worker=False,
        req_to_token_pool=requests,
        token_to_kv_pool=pool,
        prefill_attention_backend_str="paged",
        decode_attention_backend_str="paged",
        sliding_window_size=None,
        model=torch.nn.Module(),
        model_config=TEXT_MODEL,
    )


def make_layer(index: int, **options: Any) -> RadixAttention:
    return RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, index, **options)


def make_latent_layer(index: int, **options: Any) -> RadixAttention:
    return RadixAttention(HEADS, LATENT + ROPE, DIM**-0.5, 1, index, v_head_dim=LATENT, **options)


def make_sparse_layer(index: int) -> RadixAttention:
    size = SPARSE_LATENT + SPARSE_ROPE
    return RadixAttention(HEADS, size, size**-0.5, 1, index, v_head_dim=SPARSE_LATENT)


class Batch:
    """Sequences in shuffled pages, and steps over them: mode, query length and key length of each sequence."""

    def __init__(self, runner: Any, seed: int = 0) -> None:
        self.runner, self.random = runner, torch.Generator().manual_seed(seed)
        page = runner.page_size
        pages = torch.randperm(SLOTS // page - 1, generator=self.random) + 1  # 0 is SGLang's slots for padding
        pages = pages[: 4 * (MAX_LEN // page)].view(4, -1)
        slots = pages.unsqueeze(2) * page + torch.arange(page)
        self.slots = slots.flatten(1)
        runner.req_to_token_pool.req_to_token[:4] = self.slots.to(runner.device)
        self.rows = torch.tensor([2, 0, 3])

    def step(self, mode: ForwardMode, lengths: list[tuple[int, int]]) -> ForwardBatch:
        """lengths: (query, keys with the query's own) of each sequence."""
        device, slots = self.runner.device, []
        rows = self.rows[: len(lengths)]
        for row, (count, length) in zip(rows, lengths, strict=True):
            slots.append(self.slots[row, length - count : length].long())
        held = [length - count if mode.is_target_verify() else length for count, length in lengths]
        counts = torch.tensor([count for count, _ in lengths])
        return ForwardBatch(
            forward_mode=mode,
            batch_size=len(lengths),
            input_ids=torch.zeros(int(counts.sum()), dtype=torch.int64),
            req_pool_indices=rows.to(device),
            seq_lens=torch.tensor(held).to(device),
            seq_lens_cpu=torch.tensor(held),
            out_cache_loc=torch.cat(slots).to(device),
            seq_lens_sum=sum(held),
            extend_seq_lens=counts.to(device),
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


@pytest.mark.parametrize(("kind", "page_size"), [("plain", 1), ("hybrid", 8), ("window", 16), ("window pool", 16)])
def test_steps_equal_those_of_sglangs_own_backend(kind: str, page_size: int, backend: Any) -> None:
    register()
    options = [{}, {"sliding_window_size": 10}] if "window" in kind else [{}, {}]
    ids = [1, 3] if kind == "hybrid" else [0, 1]
    # SGLang's backend does not translate slots of a pool for windows, so it gets one pool for all layers.
    runners = [make_runner(page_size, kind), make_runner(page_size, kind.replace("window pool", "plain"))]
    ours, theirs = ATTENTION_BACKENDS["paged"](runners[0]), TorchNativeAttnBackend(runners[1])
    batches = [Batch(runner) for runner in runners]
    layers = [make_layer(index, **option) for index, option in zip(ids, options, strict=True)]
    for seed, (mode, lengths) in enumerate(STEPS):
        step = [batch.step(mode, lengths) for batch in batches]
        ours.init_forward_metadata(step[0])
        theirs.init_forward_metadata(step[1])
        for layer in layers:
            q, k, v = tensors(step[0], seed * 2 + layer.layer_id)
            out = ours.forward(q, k, v, layer, step[0])
            expected = theirs.forward(q, k, v, layer, step[1])
            assert_close(out, expected.double())


def latent_tensors(batch: ForwardBatch, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    num_tokens = len(batch.out_cache_loc)
    q = torch.randn(num_tokens, HEADS * (LATENT + ROPE), generator=random)
    rows = torch.randn(num_tokens, 1, LATENT + ROPE, generator=random)
    return q, rows, rows[..., :LATENT]


def expected_of(
    batch: Batch, layer: RadixAttention, q: torch.Tensor, lengths: list[tuple[int, int]], **options: Any
) -> torch.Tensor:
    """The float64 definition over one sequence's slots after the other, as blocks of one token, on the host."""
    pool = batch.runner.token_to_kv_pool
    keys = pool.get_key_buffer(layer.layer_id).cpu()  # [slots, heads, size]
    values = pool.get_value_buffer(layer.layer_id).cpu()
    if batch.runner.use_mla_backend:  # all heads share a row
        keys, values = keys.expand(-1, HEADS, -1), values.expand(-1, HEADS, -1)
    rows = batch.slots[batch.rows[: len(lengths)]].int()
    if hasattr(pool, "layers_mapping") and pool.layers_mapping[layer.layer_id][1]:
        rows = pool.full_to_swa_index_mapping.cpu()[rows.long()].int()
    offsets = torch.tensor([0, *(count for count, _ in lengths)]).cumsum(0).int()
    out, _ = definition.paged_attention(
        q.view(-1, HEADS, layer.qk_head_dim),
        keys.unsqueeze(1),
        values.unsqueeze(1),
        block_table=rows,
        cu_seqlens_q=offsets,
        seq_lens=torch.tensor([length for _, length in lengths], dtype=torch.int32),
        softmax_scale=layer.scaling,
        **options,
    )
    return out


SPARSE_STEPS = [
    (ForwardMode.EXTEND, [(70, 70), (7, 7)]),
    (ForwardMode.MIXED, [(5, 75), (1, 8)]),
    (ForwardMode.DECODE, [(1, 76), (1, 9)]),
    (ForwardMode.TARGET_VERIFY, [(3, 79), (3, 12)]),
]
DRAFTS_VERIFIED = (
    (ForwardMode.EXTEND, [(20, 20), (7, 7)]),
    (ForwardMode.TARGET_VERIFY, [(3, 23), (3, 10)]),
)


def test_chains_of_drafts_caps_and_sinks(backend: str, sglang_settings: Any) -> None:
    """Drafts are verified behind the cached tokens, whose number SGLang gives without them. This step has fewer drafts
    than the settings."""
    register()
    sglang_settings.override("test", speculative_num_draft_tokens=5)
    runner = make_runner(16)
    ours, batch = ATTENTION_BACKENDS["paged"](runner), Batch(runner)
    layer = make_layer(0, logit_cap=5.0)
    sinks = torch.randn(HEADS)
    for mode, lengths in DRAFTS_VERIFIED:
        step = batch.step(mode, lengths)
        step.spec_info = SimpleNamespace(num_tokens_per_req=3, ragged_verify_layout=None)
        ours.init_forward_metadata(step)
        ours.update_verify_buffers_to_fill_after_draft(step.spec_info, None)  # with SGLang's overlapped planning
        assert ours.max_context_len == MAX_LEN  # SGLang's EAGLE worker reads it for every chain
        q, k, v = tensors(step, 1)
        out = ours.forward(q, k, v, layer, step, sinks=sinks)
        assert_close(out.view(-1, HEADS, DIM), expected_of(batch, layer, q, lengths, softcap=5.0, sinks=sinks))


@pytest.mark.parametrize(("kind", "dtype"), [("hybrid latents", torch.float32), ("latents", torch.float8_e4m3fn)])
def test_latents(kind: str, dtype: torch.dtype, backend: str, sglang_settings: Any) -> None:
    """Chunks, decodes and drafts over latents. The pool casts to fp8 without the scale of the layer."""
    register()
    sglang_settings.override("test", speculative_num_draft_tokens=3)
    runner = make_runner(16, kind, dtype=dtype)
    ours, batch = ATTENTION_BACKENDS["paged"](runner), Batch(runner)
    layer, scale = make_latent_layer(1), 1.0
    if dtype != torch.float32:
        scale = 0.5
        layer.k_scale = torch.tensor(scale)
    for mode, lengths in (*STEPS[:2], DRAFTS_VERIFIED[1]):
        step = batch.step(mode, lengths)
        ours.init_forward_metadata(step)
        q, rows, latents = latent_tensors(step, len(lengths))
        out = ours.forward(q, rows, latents, layer, step)
        written = runner.token_to_kv_pool.get_key_buffer(1)[step.out_cache_loc]
        assert_close(written, rows.double() / scale)
        expected = expected_of(batch, layer, q, lengths, k_scale=torch.tensor(scale), v_scale=torch.tensor(scale))
        assert_close(out.view(-1, HEADS, LATENT), expected)


def chosen_positions(lengths: list[tuple[int, int]], top_k: int) -> torch.Tensor:
    """Draw distinct positions for each token, also some behind it, and -1 for none."""
    random = torch.Generator().manual_seed(len(lengths))
    rows = []
    for count, length in lengths:
        for _ in range(count):
            order = torch.randperm(length + 3, generator=random) - 1
            rows.append(torch.nn.functional.pad(order[:top_k], (0, max(0, top_k - length - 3)), value=-1))
    return torch.stack(rows).int()


@pytest.mark.parametrize("kind", ROWS)
def test_sparse_latents(kind: str, backend: str, sglang_settings: Any) -> None:
    """Chunks, decodes and drafts over chosen latents in each form of rows."""
    register()
    sglang_settings.override("test", speculative_num_draft_tokens=3)
    runner = make_runner(64, kind)
    ours, batch = ATTENTION_BACKENDS["paged"](runner), Batch(runner)
    layer = make_sparse_layer(1)
    for mode, lengths in SPARSE_STEPS:
        step = batch.step(mode, lengths)
        ours.init_forward_metadata(step)
        num_tokens = len(step.out_cache_loc)
        q = torch.randn(num_tokens, HEADS, layer.qk_head_dim)
        rows = torch.randn(num_tokens, 1, layer.qk_head_dim)
        chosen = chosen_positions(lengths, 12)
        latents = rows[..., :SPARSE_LATENT]
        out = ours.forward(q.flatten(1), rows, latents, layer, step, topk_indices=chosen)
        cache = runner.token_to_kv_pool.get_key_buffer(1)  # [slots, 1, size of a row]
        if "scales" in kind:
            cache = cache.view(torch.uint8)
        written = dequantized(cache[step.out_cache_loc], None)
        error = torch.zeros_like(rows)
        if "e4m3" in kind:  # half a unit in the last place, also of numbers below the normal ones
            error = 2**-4 * rows.abs() + 2**-10
        assert_within(written, rows.double(), error, is_exact=True)
        expected, _ = latent_definition.paged_mla_attention(
            q,
            cache,
            v_head_dim=SPARSE_LATENT,
            block_table=batch.slots[batch.rows[: len(lengths)]].int(),
            cu_seqlens_q=torch.tensor([0, *(count for count, _ in lengths)]).cumsum(0).int(),
            seq_lens=torch.tensor([length for _, length in lengths], dtype=torch.int32),
            softmax_scale=layer.scaling,
            indices=chosen,
        )
        assert_close(out.view(expected.shape), expected)


def make_indexer(top_k: int = 5) -> Indexer:
    """An indexer of SGLang in bfloat16. Its projections have small integers, so sums are the same in any order."""
    yarn = {"rope_type": "deepseek_yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    sizes = {"hidden_size": 64, "index_n_heads": 16, "index_head_dim": 128, "rope_head_dim": 64, "q_lora_rank": 32}
    options = {"max_position_embeddings": MAX_LEN, "rope_theta": 1e4, "scale_fmt": None, "rope_scaling": yarn}
    try:
        torch.set_default_dtype(torch.bfloat16)
        indexer = Indexer(index_topk=top_k, layer_id=1, **sizes, **options)
    finally:
        torch.set_default_dtype(torch.float32)
    for projection in (indexer.wq_b, indexer.wk, indexer.weights_proj):
        projection.weight.data.copy_(torch.randint(-2, 3, projection.weight.shape))
    return indexer


def test_indexers_in_graphs_of_prompts_and_with_one_projection(backend: str) -> None:
    """What they choose is that of a plain step, which test_whole compares with transformers."""
    register()
    runner, indexer = make_runner(64, "sparse latents"), make_indexer()
    runner.model.indexer = indexer
    ours, batch = ATTENTION_BACKENDS["paged"](runner), Batch(runner)
    lengths = [(70, 70), (7, 7)]
    step = batch.step(ForwardMode.EXTEND, lengths)
    step.extend_num_tokens = 77
    ours.init_forward_metadata(step)
    x = torch.randint(-1, 2, (80, 64)).bfloat16()  # three rows of padding
    q_lora = torch.randint(-1, 2, (80, 32)).bfloat16()
    positions = torch.cat([torch.arange(70), torch.arange(10)])

    def chosen(num_tokens: int) -> torch.Tensor | None:
        rows = x[:num_tokens], q_lora[:num_tokens], positions[:num_tokens]
        with forward_context(ForwardContext(attn_backend=ours)), set_forward_batch(step):
            result: torch.Tensor | None = indexer(*rows, forward_batch=step, layer_id=1)
        return result

    plain = chosen(77)
    assert plain is not None
    assert plain.shape == (77, 5)
    assert plain[4].tolist() == [0, 1, 2, 3, 4]
    keys = runner.token_to_kv_pool.get_index_k_with_scale_buffer(1).clone()
    with enable_breakable_cuda_graph():
        padded = chosen(80)
    assert padded is not None
    assert torch.equal(padded[:77], plain)
    assert (padded[77:] == -1).all()

    weights = torch.cat([indexer.wk.weight, indexer.weights_proj.weight])
    indexer.wk_weights_proj = lambda rows: (rows @ weights.T, None)
    indexer.use_dsa_indexer_fusion = True
    assert torch.equal(chosen(77), plain)
    assert torch.equal(runner.token_to_kv_pool.get_index_k_with_scale_buffer(1), keys)

    indexer.index_topk = 128  # a sequence has two pages at most
    assert chosen(77) is None
    with enable_breakable_cuda_graph():
        padded = chosen(80)
    assert padded is not None
    assert torch.equal(padded[:77], torch.arange(128).expand(77, -1))


def test_indexers_refuse_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    indexer, x = make_indexer(), torch.zeros(1, 64)
    step = SimpleNamespace(forward_mode=ForwardMode.EXTEND)
    with pytest.raises(UnsupportedError, match="x: quantised"):
        choose(indexer, (x, x), x, x, step, 0)
    with pytest.raises(UnsupportedError, match="return_indices"):
        choose(indexer, x, x, x, step, 0, return_indices=False)
    monkeypatch.setattr("paged.interop.sglang_sparse_latents.is_in_tc_piecewise_cuda_graph", lambda: True)
    with pytest.raises(UnsupportedError, match="tc_piecewise"):
        choose(indexer, x, x, x, step, 0)


def test_the_recorded_interface_is_there() -> None:
    assert INTERFACE.gone() == []


def test_refusals_by_name(sglang_settings: Any) -> None:
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
    refused("MLATokenToKVPool", token_to_kv_pool=MLATokenToKVPool.__new__(MLATokenToKVPool))
    with_pools = make_runner(64, "sparse latents").token_to_kv_pool
    with_pools.index_kpool = 4
    small_rows = make_runner(64, "sparse latents, e4m3 with scales").token_to_kv_pool
    small_rows.qk_rope_head_dim = 32
    with_sinks, with_first_tokens = torch.nn.Module(), make_indexer()
    with_sinks.learnable_sink_param = torch.nn.Parameter(torch.zeros(HEADS))
    with_first_tokens.num_init_tokens = 1
    sparse = {"use_mla_backend": True, "token_to_kv_pool": make_runner(64, "sparse latents").token_to_kv_pool}
    refused("index_kpool: 4", **sparse | {"token_to_kv_pool": with_pools})
    refused(r"qk_rope_head_dim: \(512, 32\)", **sparse | {"token_to_kv_pool": small_rows})
    refused("is_draft_worker: of None", is_draft_worker=True)
    sglang_settings.override("test", speculative_algorithm="EAGLE")
    refused(
        "is_draft_worker: drafts with a pool",
        is_draft_worker=True,
        token_to_kv_pool=make_runner(8, "window pool").token_to_kv_pool,
    )
    sharing = SimpleNamespace(**vars(TEXT_MODEL), hf_config=SimpleNamespace(index_share_for_mtp_iteration=True))
    refused("index_share_for_mtp_iteration", **sparse, is_draft_worker=True, model_config=sharing)
    sglang_settings.override("test", speculative_draft_window_size=8)
    refused("speculative_draft_window_size: 8", is_draft_worker=True)
    sglang_settings.override("test", speculative_algorithm=None, speculative_draft_window_size=None)
    refused("decode_attention_backend: 'dsa'", **sparse, decode_attention_backend_str="dsa")
    refused("learnable_sink_param", **sparse, model=with_sinks)
    refused("index_init_tokens", **sparse, model=with_first_tokens)
    sglang_settings.override("test", enable_return_indexer_topk=True)
    refused("enable_return_indexer_topk", **sparse)
    sglang_settings.override("test", enable_return_indexer_topk=False)
    refused("cross attention", model_config=SimpleNamespace(is_encoder_decoder=True))
    with_images = SimpleNamespace(is_encoder_decoder=False, is_multimodal=True, is_lm_only=False)
    gemma = Gemma3ForConditionalGeneration.__new__(Gemma3ForConditionalGeneration)
    refused("is_multimodal: Gemma3", model_config=with_images, model=gemma)
    refused("torch.int8", token_to_kv_pool=make_runner(8, dtype=torch.int8).token_to_kv_pool)
    with get_parallel().override(attn_dcp_size=2):
        refused("attn_dcp_size: 2")
    with get_parallel().override(tp_size=2, moe_tp_size=2, attn_cp_size=2):
        refused("attn_cp_size: 2")
    sglang_settings.override("test", speculative_eagle_topk=2)
    refused("speculative_eagle_topk: 2")
    sglang_settings.override("test", speculative_eagle_topk=1)

    ours, batch = make(make_runner(8)), Batch(make_runner(8))
    step = batch.step(ForwardMode.EXTEND, [(3, 3)])
    ours.init_forward_metadata(step)
    for layer, options, match in (
        (make_layer(0, is_cross_attention=True), {}, "attn_type"),
        (make_layer(0, attn_type=AttentionType.DECODER_BIDIRECTIONAL), {}, "attn_type"),
        (make_layer(0, logit_cap=1.0, logit_capping_method="x"), {}, "logit_capping_method"),
        (make_layer(0, use_irope=True), {}, "use_irope"),
        (make_layer(0), {"q_rope": torch.zeros(1)}, "q_rope"),
    ):
        with pytest.raises(UnsupportedError, match=match):
            ours.forward(*tensors(step, 0), layer, step, **options)
    runner = make_runner(8, "latents")
    ours, step = make(runner), Batch(runner).step(ForwardMode.EXTEND, [(3, 3)])
    for layer, match in ((make_latent_layer(0, logit_cap=5.0), "logit_cap"), (make_layer(0), "tp_k_head_num: 2")):
        with pytest.raises(UnsupportedError, match=match):
            ours.forward(*latent_tensors(step, 0), layer, step)
