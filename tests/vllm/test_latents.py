"""Steps through vLLM's own layers over latents, dense and sparse, against float64."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from paged.kernels.attention import latent_definition
from paged.kernels.cache import definition as cache_definition
from paged.kernels.cache.latent_cache import dequantized
from tests.kernels.cache.rounding import rounded_latents
from tests.tolerance import assert_close

pytest.importorskip("vllm", reason="needs vLLM's Python files: make vllm")

from paged.interop.vllm_engine.latents import PACKED_CACHES
from paged.interop.vllm_plugin import register
from tests.vllm.latent_runner import NOPE, NUM_DRAFTS, TOP_K, LatentRunner
from tests.vllm.runner import BLOCK_SIZE, NUM_BLOCKS, Batch

pytestmark = pytest.mark.thorough
# Decodes and verify rows, then prompts: whole, a chunk whose context takes two chunks of vLLM's, and one token more
# than verify rows may have.
LENGTHS = ((1, 37), (5, 18), (1, 1), (6, 6), (19, 60), (6, 12))
CONTEXT_AT_ONCE = 32


@pytest.fixture(autouse=True)
def _registered() -> None:
    register()


class Sparse(LatentRunner):
    backend = "PAGED_MLA_SPARSE"


@dataclass(frozen=True)
class Case:
    """What one run differs in. lengths and causal: of the step. interpreted: whether the Triton kernels run it, too."""

    name: str
    runner: type[LatentRunner] = LatentRunner
    kv_cache_dtype: str = "auto"
    dtype: torch.dtype = torch.float32
    lengths: tuple[tuple[int, int], ...] = LENGTHS
    causal: bool = True
    rank: int = 256
    layers: tuple[dict[str, Any], ...] = ({},)
    interpreted: bool = False


_PACKED: dict[str, Any] = {"runner": Sparse, "kv_cache_dtype": "fp8_ds_mla", "rank": 512}
_DRAFTS = ({"non_causal_multi_token_decode": True},)
CASES = (
    Case("mixed", layers=({}, {}), interpreted=True),
    Case("bfloat16", dtype=torch.bfloat16, lengths=((1, 37), (5, 18))),
    Case("e4m3", kv_cache_dtype="fp8"),
    Case("drafts that see each other", lengths=((3, 37), (3, 18)), causal=False, layers=_DRAFTS, interpreted=True),
    Case("chosen, mixed", Sparse, layers=({}, {})),
    Case("chosen, short prompts", Sparse, lengths=((1, 37), (5, 18), (6, 6), (9, TOP_K)), interpreted=True),
    Case("chosen, e4m3 in bfloat16", Sparse, kv_cache_dtype="fp8", dtype=torch.bfloat16, lengths=((2, 40),)),
    Case("chosen, packed", lengths=((1, 37), (5, 40), (6, 30)), **_PACKED),
    Case("chosen, nvfp4", lengths=((1, 37), (5, 40), (6, 30)), **_PACKED | {"kv_cache_dtype": "nvfp4_ds_mla"}),
    Case("chosen, packed in bfloat16", dtype=torch.bfloat16, lengths=((1, 37),), interpreted=True, **_PACKED),
)


RUNS = [*((case, "torch") for case in CASES), *((case, "triton") for case in CASES if case.interpreted)]


@pytest.mark.parametrize(("case", "backend"), RUNS, ids=[f"{case.name}, {backend}" for case, backend in RUNS])
def test_steps_match_reference(case: Case, backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """First what stands before the batch's queries is written by a step of its own, then the mixed batch runs."""
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    options = {name: getattr(case, name) for name in ("dtype", "kv_cache_dtype", "rank", "layers")}
    runner = case.runner(device, **options)
    builder = runner.attn_groups[0][0].get_metadata_builder()
    builder.chunked_prefill_workspace_size = CONTEXT_AT_ONCE
    is_sparse, scale = case.runner is Sparse, None
    like = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, case.rank + runner.rope, dtype=case.dtype)
    if case.kv_cache_dtype == "fp8":
        like, scale = like.to(torch.float8_e4m3fn), torch.tensor(0.5)
    elif case.kv_cache_dtype in PACKED_CACHES:
        like = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, PACKED_CACHES[case.kv_cache_dtype], dtype=torch.uint8)
    caches = [torch.zeros(NUM_BLOCKS, BLOCK_SIZE, case.rank + runner.rope, dtype=torch.float64) for _ in runner.layers]

    batch = replace(Batch.on(device, *case.lengths), padding_rows=3)
    before = tuple((seq_len - q_len, seq_len - q_len) for q_len, seq_len in case.lengths)
    for step, causal in ((Batch(before, batch.block_table), True), (batch, case.causal)):
        if step is batch:
            monkeypatch.setenv("PAGED_BACKEND", backend)
        if is_sparse:
            choose(runner, step)
        tensors = runner.tensors(step.num_tokens + step.padding_rows)
        metadata = runner.metadata(step, causal=causal)
        outs = runner.forward(step, metadata, tensors)
        slots = step.slots()[: step.num_tokens].cpu()
        expands = expanded(step, is_sparse)
        for index, (out, rows) in enumerate(zip(outs, tensors, strict=True)):
            q, latent, rope = (x[: step.num_tokens].cpu() for x in rows)
            new = latent, rope.squeeze(1)
            numbers = cache_definition.concat_and_cache_mla(*new, like, slots, scale=scale)
            held = rounded_latents(numbers, like).flatten(0, 1)[slots]
            if like.dtype == torch.uint8:  # bfloat16 numbers lie half-way between codes; the codes have a test
                stored = runner.layers[index].kv_cache.flatten(0, 1).cpu()[slots]
                held = dequantized(stored, None, torch.float64)
            if scale is not None:
                held = held * scale.double()
            seen, cache = caches[index].clone(), caches[index]
            cache.flatten(0, 1)[slots] = held
            # vLLM expands the step's own latents of a prompt as they are, and others from the cache.
            seen.flatten(0, 1)[slots] = held.where(~expands[:, None], torch.cat(new, -1).double())
            arguments = {name: tensor.cpu() for name, tensor in step.arguments().items()}
            arguments |= {"softmax_scale": (NOPE + runner.rope) ** -0.5, "v_head_dim": case.rank, "causal": causal}
            if is_sparse:
                chosen = runner.chosen[: step.num_tokens].cpu()
                everything = torch.arange(64, dtype=torch.int32).expand(len(chosen), -1)
                chosen = torch.nn.functional.pad(chosen, (0, 64 - TOP_K), value=-1)
                arguments["indices"] = chosen.where(~expands[:, None], everything)
            want = attended(runner.up(index), q, seen, arguments)
            less_exact = None
            if case.dtype != torch.float32:
                less_exact = attended(runner.up(index), q, seen, arguments, case.dtype)
            assert_close(out[: step.num_tokens], want, rounded=less_exact)


def test_packed_rows_have_vllms_bytes(device: torch.device) -> None:
    """As vLLM describes "fp8_ds_mla": 512 e4m3 latents, 4 float32 scales of 128 latents, 64 bfloat16."""
    runner = Sparse(device, kv_cache_dtype="fp8_ds_mla", rank=512, layers=({},), dtype=torch.bfloat16)
    batch = Batch.on(device, (1, 20), (3, 3))
    choose(runner, batch)
    tensors = runner.tensors(4)
    runner.forward(batch, runner.metadata(batch), tensors)
    rows = runner.layers[0].kv_cache.flatten(0, 1)[batch.slots()].cpu()
    latents = rows[:, :512].view(torch.float8_e4m3fn).double().unflatten(1, (4, 128))
    scales = rows[:, 512:528].view(torch.float32).double()
    latent, rope = (x.cpu() for x in tensors[0][1:])
    groups = latent.double().unflatten(1, (4, 128))
    assert_close(scales.float(), groups.abs().amax(-1) / 448)
    assert bool(((latents * scales[..., None] - groups).abs() <= 16.01 * scales[..., None]).all())  # half a step at 448
    assert torch.equal(rows[:, 528:].view(torch.bfloat16), rope.squeeze(1))


def choose(runner: LatentRunner, step: Batch) -> None:
    """Distinct positions that each query may see, in any order, as many as it sees or TOP_K; the rest is -1."""
    rows = iter(runner.chosen.fill_(-1))
    for q_len, seq_len in step.lengths:
        for position in range(seq_len - q_len, seq_len):
            positions = torch.randperm(position + 1, dtype=torch.int32)[:TOP_K]
            next(rows)[: len(positions)] = positions


def expanded(step: Batch, is_sparse: bool) -> torch.Tensor:
    """bool [num_tokens], which queries vLLM expands latents for: the first long one's, and of all after it."""
    q_lens = [q_len for q_len, _ in step.lengths]
    num_decodes = next((i for i, q_len in enumerate(q_lens) if q_len > NUM_DRAFTS + 1), len(q_lens))
    expands = torch.arange(sum(q_lens)) >= sum(q_lens[:num_decodes])
    prompts = [seq_len for _, seq_len in step.lengths[num_decodes:]]
    if is_sparse and prompts and max(prompts) > TOP_K:  # then all choose
        return torch.zeros_like(expands)
    return expands


def attended(
    up: torch.Tensor,
    q: torch.Tensor,
    cache: torch.Tensor,
    arguments: dict[str, Any],
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """A layer's output, float64, from queries that absorb the expansion; dtype rounds as the layer does."""
    keys, values = up.split((NOPE, up.shape[2] - NOPE), -1)
    absorbed = torch.einsum("thn,lhn->thl", q[..., :NOPE].double(), keys).to(dtype).double()
    whole = torch.cat([absorbed, q[..., NOPE:].double()], -1)
    latents = latent_definition.paged_mla_attention(whole, cache.to(dtype).double(), **arguments)[0].to(dtype).double()
    return torch.einsum("thl,lhv->thv", latents, values)
