"""DeepSeek-V4: cuts at every position of its pools, published formats and names, the multi-token head, refusals."""

import copy
import json
import math
import re
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paged import Engine, EngineConfig, HeadProposer, LlmExecutor, SamplingParams
from paged.errors import CheckpointError, InvalidInputError, UnsupportedError
from paged.kernels.attention import compressed_definition
from paged.kernels.cache import latent_cache
from paged.kernels.cache.latent_cache import RecordParts, record_parts, stored_rows
from paged.models.layers import compressed_attention, open_rows
from paged.models.layers.compressed_attention import CompressedAttention, Pool
from paged.models.layers.latent_attention import LatentAttention, UpProjection
from paged.models.layers.modules import Linear
from paged.models.layers.open_rows import RowPlaces
from paged.models.layers.shared_entries import LatentPool
from paged.models.paged_lm import PagedCausalLM
from paged.models.parallel.share import Share
from paged.models.quantization.packed_weights import PackedWeights
from paged.models.registry import load_model
from paged.serving.command_line.checkpoint_summary import summarize
from tests.executors.engine_cases import check_pool_empty, run
from tests.kernels.faulty import load_copy
from tests.models.drafts.test_draft_heads import drafts_after
from tests.models.edits import WEIGHTS, Tensors, assert_refused, edit_config, edit_tensors
from tests.models.families import FAMILIES, Case, Families, assert_same_logits, save_checkpoint, tokens
from tests.models.published_settings.settings import published
from tests.tolerance import assert_within

pytestmark = pytest.mark.usefixtures("bound_calls_are_alike")

BLOCK = 8
# Heads as published, whose rows fit records. All experts take part, because a changed choice is no rounding.
_LARGE_HEADS = """DeepseekV4 deepseek_v4_layers routed_experts num_experts_per_tok=8 num_hidden_layers=3
    num_key_value_heads=1 head_dim=512 q_lora_rank=24 qk_rope_head_dim=64 index_n_heads=16 index_head_dim=128
    index_topk=6 sliding_window=8 o_groups=2 o_lora_rank=16 hc_mult=3 hc_sinkhorn_iters=4 num_hash_layers=1"""
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_EXPERT = re.compile(r".*\.experts\.\d+\.w[123]\.weight")
_E4M3 = re.compile(r".*\.(?:attn|indexer|shared_experts)\.(?:wq_a|wq_b|wkv|wo_a|wo_b|w[123])\.weight")


def publish(folder: Path) -> Tensors:
    """Rename a checkpoint's tensors as published; transformers saves them under names of its own."""
    published: Tensors = {}
    for name, tensor in load_file(folder / WEIGHTS).items():
        name = name.removeprefix("model.").replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")
        published[re.sub(r"\.attn\.norm\.", ".attn.kv_norm.", name)] = tensor
    save_file(published, folder / WEIGHTS)
    return published


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("deepseek_v4")
    theirs = save_checkpoint(FAMILIES["deepseek_v4"], folder)
    publish(folder)
    return Case(theirs, load_model(folder, block_size=BLOCK, num_blocks=256, num_swap_blocks=64))


@pytest.mark.parametrize(
    "length", [27, *(pytest.param(cut, marks=pytest.mark.thorough) for cut in (24, 25, 26, 28, 31, 91))]
)
def test_cuts_at_every_position_of_a_pool(case: Case, length: int) -> None:
    """Chunks, forks, truncations and hits: a sequence goes on from each position with other tokens."""
    go_on_from(case, length)


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["triton"], indirect=True)
def test_steps_of_the_kernels_grow(case: Case, backend: str) -> None:
    ids = tokens(12)
    for part in (ids[:2], ids[2:5], ids[5:]):
        rows = case.ours.forward_verify("a", part)
    assert_same_logits(rows, case.expected(ids)[5:])
    case.ours.reset()


def go_on_from(case: Case, length: int, open_layers: Sequence[int] = (5, 6)) -> None:
    model, manager = case.ours, case.ours.kv_manager
    for layer in open_layers:  # an earlier run has left the same rows
        manager.open_rows(layer).fill_(torch.nan)
    ids = tokens(length // BLOCK * BLOCK + 16)
    others = ids[:length] + tokens(12, length)
    expected = case.expected(others)[length:]
    model.forward_verify("chunks", ids[:length])
    assert_same_logits(model.forward_verify("chunks", others[length:]), expected)
    model.forward_verify("cut", ids)
    fork = manager.fork(manager.get_handle("cut"), "fork")
    manager.truncate(fork, length)
    steps = [model.forward_verify("fork", part) for part in (others[length : length + 1], others[length + 1 :])]
    assert_same_logits(torch.cat(steps), expected)
    model.truncate_kv("cut", length)
    assert_same_logits(model.forward_verify("cut", others[length:]), expected)
    handle = manager.get_handle("cut")
    assert handle is not None
    manager.commit(handle, others)
    hit = manager.allocate("hit", token_ids=others)
    assert hit.num_cached_tokens >= length // BLOCK * BLOCK
    assert_same_logits(
        model.forward_verify("hit", others[hit.num_cached_tokens :]), expected[hit.num_cached_tokens - length :]
    )
    manager.check_integrity()
    model.reset()


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["torch"], indirect=True)
def test_cuts_see_an_entry_that_is_visible_early(
    backend: str, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(compressed_definition.__file__).read_text()
    faulty = source.replace("(positions + 1) // pool_size", "(positions + 2) // pool_size")
    assert faulty != source
    copy_of_module = load_copy("paged.kernels.attention.faulty_definition", tmp_path, faulty, monkeypatch)
    function = copy_of_module.paged_compressed_attention
    monkeypatch.setattr(compressed_definition, "paged_compressed_attention", function)
    try:
        with pytest.raises(AssertionError):
            go_on_from(case, 27)
    finally:
        case.ours.reset()


FAULTS: dict[str, Callable[[RowPlaces], RowPlaces]] = {
    "the pool before is not read at a block's border": lambda places: places._replace(
        is_border=torch.zeros_like(places.is_border)
    ),
    "rows of a shared slot are not copied": lambda places: places._replace(copies=torch.zeros_like(places.copies)),
    "the tail of the wrong pool": lambda places: places._replace(earlier_rows=places.earlier_rows - 1),
}


@pytest.mark.thorough
@pytest.mark.parametrize("fault", FAULTS)
def test_cuts_see_the_fault(fault: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows_of_step(rows: torch.Tensor, places: RowPlaces, *caches: Any) -> torch.Tensor:
        return open_rows.rows_of_step(rows, FAULTS[fault](places), *caches)

    monkeypatch.setattr(compressed_attention, "rows_of_step", rows_of_step)
    try:
        with pytest.raises(AssertionError):
            go_on_from(case, 27)
    finally:
        case.ours.reset()


@pytest.mark.parametrize(
    ("dtype", "entry", "growth"),
    [(torch.bfloat16, 2 * 512, 6230), (torch.float8_e4m3fn, 584, 3851), (torch.float4_e2m1fn_x2, 384, 2769)],
)
def test_bytes_of_long_sequences(dtype: torch.dtype, entry: int, growth: int, tmp_path: Path) -> None:
    """DeepSeek-V4-Flash by `paged inspect`: 21 layers with entries for 4 positions and index keys, 20 for 128."""
    architecture, _, values = published("deepseek-ai/DeepSeek-V4-Flash")
    named = {"architectures": [architecture], "model_type": "deepseek_v4", "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(values | named))
    summary = summarize(tmp_path, kv_cache_dtype=dtype)
    keys, size = 128 + 4, dtype.itemsize
    assert summary["block_size"] == 128
    # Blocks have as many numbers of the cache's dtype for each token.
    assert summary["growth_bytes"] == size * math.ceil((21 * (entry + keys) / 4 + 20 * entry / 128) / size) == growth
    # A block of windows is as large as one of entries. Nine tables of windows have up to three each.
    open_rows_bytes = 21 * (7 + 64) * 4 * 4 * (512 + 128) + 20 * (127 + 64) * 4 * 2 * 512
    assert summary["sequence_bytes"] == 9 * 3 * 128 * growth + open_rows_bytes
    # Rows lie in windows alone.
    assert summary["kv_bytes_per_token"] == growth
    # A GPU's free memory also holds slots of open rows.
    free_bytes = 80 * 10**9
    device_bytes = summary["weight_bytes"] + free_bytes
    num_slots = int(free_bytes * 0.9 * 0.25) // open_rows_bytes
    num_blocks = (int(free_bytes * 0.9) - (num_slots + 1) * open_rows_bytes) // (128 * growth)
    room = summarize(tmp_path, kv_cache_dtype=dtype, device_bytes=device_bytes)["kv_tokens"]
    assert room == (num_blocks - 9 * 3) * 128


def e4m3_error(numbers: torch.Tensor) -> torch.Tensor:
    """The largest error of codes of e4m3: 2^-4 of each number."""
    return 2**-4 * numbers.abs()


def nvfp4_error(numbers: torch.Tensor) -> torch.Tensor:
    """The largest error of records in NVFP4: half a step of a code, beside bfloat16 or, of latents, e4m3. Index keys
    are e4m3."""
    num_codes, error = {512: (448, 2**-9), 576: (512, 2**-4)}.get(numbers.shape[-1], (0, 2**-4))
    groups = numbers[..., :num_codes].abs().unflatten(-1, (-1, 16))
    scales = 17 / 96 * groups.amax(-1, keepdim=True)  # the largest magnitude / 6, rounded by up to 2^-4
    half_steps = torch.where(groups < 2 * scales, 0.25, torch.where(groups < 4 * scales, 0.5, 1.0))
    return torch.cat([(half_steps * scales).flatten(-2), error * numbers[..., num_codes:].abs()], -1)


def _off_by_a_code(model: PagedCausalLM, error: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let a model's caches of numbers be off by as much as codes may be, up or down by chance."""

    def perturb(cache: torch.Tensor, write: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        before = cache.clone()
        write(*args, **kwargs)
        signs = 2 * torch.randint(2, cache.shape) - 1
        cache.add_(torch.where(cache == before, 0.0, signs * error(cache)))

    for module in model.network.modules():
        if isinstance(module, Pool):
            vars(module)["write"] = partial(perturb, module.entry_cache, module.write)
        elif isinstance(module, LatentPool):
            vars(module)["write_entries"] = partial(perturb, module.entry_cache, module.write_entries)
            vars(module)["write_keys"] = partial(perturb, module.key_cache, module.write_keys)
        elif isinstance(module, (CompressedAttention, LatentAttention)):
            vars(module)["write"] = partial(perturb, module.kv_cache, module.write)


def scales_of_neighbours(parts: RecordParts) -> None:
    parts.scales.copy_(parts.scales.roll(1, -1))


def swapped_codes(parts: RecordParts) -> None:
    parts.codes.copy_(parts.codes << 4 | parts.codes >> 4)


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["torch"], indirect=True)
@pytest.mark.parametrize(
    ("kv_cache_dtype", "error", "fault"),
    [("fp8", e4m3_error, scales_of_neighbours), ("nvfp4", nvfp4_error, swapped_codes)],
)
def test_records(
    backend: str,
    kv_cache_dtype: str,
    error: Callable[[torch.Tensor], torch.Tensor],
    fault: Callable[[RecordParts], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_checkpoint(Families(model=_LARGE_HEADS)["model"], tmp_path)
    check_records(tmp_path, kv_cache_dtype, error, fault, monkeypatch)


def check_records(
    folder: Path,
    kv_cache_dtype: str,
    error: Callable[[torch.Tensor], torch.Tensor],
    fault: Callable[[RecordParts], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows, entries and index keys in codes: near those of float32, and the same behind a cut and after a hit."""
    plain = load_model(folder, block_size=BLOCK, num_blocks=64)
    model = load_model(folder, block_size=BLOCK, num_blocks=64, kv_cache_dtype=kv_cache_dtype)
    manager, ids = model.kv_manager, [*tokens(24), 3]
    exact = plain.forward_verify("a", ids)
    rounded = torch.cat([model.forward_verify("a", part) for part in (ids[:5], ids[5:])])

    # Twice the model's answer to the largest errors of codes.
    _off_by_a_code(plain, error)
    budget = 2 * (plain.forward_verify("b", ids) - exact).norm()
    assert_within((rounded - exact).norm(), torch.tensor(0.0), budget)

    # The scale of a neighbour is no rounding, nor is the code of one.
    def faulty_rows(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        rows = rows.clone()
        fault(record_parts(rows))
        return stored_rows(rows, dtype)

    with monkeypatch.context() as patch:
        for module in (compressed_definition, latent_cache):
            patch.setattr(module, "stored_rows", faulty_rows)
        assert (model.forward_verify("b", ids) - exact).norm() > budget
    assert not torch.equal(rounded, exact)
    model.truncate_kv("a", 19)
    assert_same_logits(model.forward_verify("a", ids[19:]), rounded[19:])
    handle = manager.get_handle("a")
    assert handle is not None
    manager.commit(handle, ids)
    assert manager.allocate("hit", token_ids=ids).num_cached_tokens == 24
    assert_same_logits(model.forward_verify("hit", ids[24:]), rounded[24:])


def _e4m3_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round to e4m3 with a power of two for each block of 128 x 128; codes, scales, and the numbers."""
    rows, columns = weight.shape
    codes, numbers = torch.empty(rows, columns, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    scales = torch.empty(-(-rows // 128), -(-columns // 128))
    for i in range(len(scales)):
        for j in range(scales.shape[1]):
            block = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            scales[i, j] = torch.exp2((weight[block].abs().max() / 448).log2().ceil())
            codes[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
            numbers[block] = codes[block].float() * scales[i, j]
    return codes, scales, numbers


def mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round to E2M1 with a power of two for 32 columns; bytes of two codes, scales, and the numbers."""
    groups = weight.unflatten(1, (-1, 32))  # [rows, groups, 32]
    scales = torch.exp2((groups.abs().amax(-1) / 6).log2().ceil())
    codes = (groups / scales[..., None]).abs().unsqueeze(-1).sub(_E2M1).abs().argmin(-1)
    numbers = (_E2M1[codes] * scales[..., None]).copysign(groups)
    codes = (codes + 8 * (groups < 0)).flatten(1).to(torch.uint8)
    return (codes[:, ::2] | codes[:, 1::2] << 4).view(torch.int8), scales, numbers.flatten(1)


@pytest.mark.thorough
@pytest.mark.parametrize("expert_dtype", ["fp4", "fp8"])
def test_published_formats(expert_dtype: str, tmp_path: Path) -> None:
    """e4m3 in blocks, with experts alike or in MXFP4: the numbers of every projection, and logits."""
    config = copy.deepcopy(FAMILIES["deepseek_v4"])
    config.moe_intermediate_size, config.hidden_size = 128, 256
    save_checkpoint(config, tmp_path)
    packed, numbers = dict(publish(tmp_path)), dict(load_file(tmp_path / WEIGHTS))
    for name, weight in load_file(tmp_path / WEIGHTS).items():
        if expert_dtype == "fp4" and _EXPERT.fullmatch(name):
            packed[name], scales, numbers[name] = mxfp4(weight)
        elif _EXPERT.fullmatch(name) or _E4M3.fullmatch(name):
            packed[name], scales, numbers[name] = _e4m3_blocks(weight)
        else:
            continue
        if expert_dtype == "fp4":
            scales = scales.to(torch.float8_e8m0fnu)
        packed[name.removesuffix("weight") + "scale"] = scales
    save_file(numbers, tmp_path / WEIGHTS)
    plain = load_model(tmp_path, block_size=BLOCK, num_blocks=64)
    save_file({name: tensor.contiguous() for name, tensor in packed.items()}, tmp_path / WEIGHTS)
    section = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    edit_config(tmp_path, expert_dtype=expert_dtype, quantization_config=section | {"activation_scheme": "dynamic"})
    model = load_model(tmp_path, block_size=BLOCK, num_blocks=64)
    linears, num_packed = dict(plain.network.named_modules()), 0
    for path, module in model.network.named_modules():
        if isinstance(module, Linear) and isinstance(module.packed, PackedWeights):
            assert torch.equal(module.packed.dequantized(torch.float32), linears[path].weight)
            num_packed += 1
        if isinstance(module, UpProjection):  # read as matrices, so plain, once
            assert torch.equal(module.weight, linears[path].weight)
            assert module.packed is None
    assert num_packed == 3 * 5 + 1  # four of attention, the shared experts' two make one; and the indexer's queries
    prompt = tokens(30)
    got, expected = model.forward_verify("a", prompt), plain.forward_verify("a", prompt)
    # Activations are rounded to 4 bits of mantissa in front of each product.
    assert (got - expected).norm() < 0.3 * expected.norm()


def save_multi_token_head(folder: Path) -> tuple[Any, Tensors]:
    """transformers' model of two layers, and the head's tensors beside those of its layer, which are of layer 1."""
    config = copy.deepcopy(FAMILIES["deepseek_v4"])
    config.layer_types, config.mlp_layer_types = (
        ["compressed_sparse_attention", "sliding_attention"],
        ["hash_moe", "moe"],
    )
    config.num_hidden_layers = 2
    theirs = save_checkpoint(config, folder)
    published = publish(folder)
    generator = torch.Generator().manual_seed(2)
    shapes = {"enorm": (64,), "hnorm": (64,), "e_proj": (64, 64), "h_proj": (64, 64), "norm": (64,)}
    own = {name: torch.randn(shape, generator=generator) / 4 for name, shape in shapes.items()}
    for name, tensor in published.items():
        if name.startswith("layers.1."):
            own_name = name.replace("layers.1.", "mtp.0.")
            published = published | {own_name: tensor}
    for part in ("fn", "base", "scale"):
        published[f"mtp.0.hc_head_{part}"] = published[f"hc_head_{part}"].flip(0)
    published |= {f"mtp.0.{name}.weight": tensor for name, tensor in own.items()}
    save_file({name: tensor.clone() for name, tensor in published.items()}, folder / WEIGHTS)
    return theirs, own


# Settings of the engine, and sizes of the cache: in chunks, preempted, and preempted with swap.
WAYS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"chunk_size": 16, "token_budget": 40}, {"num_blocks": 256, "num_state_slots": 9}),
    ({"admission_tokens": 0}, {"num_blocks": 8}),
    ({"admission_tokens": 0, "preemption": "swap"}, {"num_blocks": 8, "num_swap_blocks": 64}),
]


def prompts_with_hits() -> list[list[int]]:
    """Return three prompts, and three that begin alike."""
    beginning = tokens(24, seed=9)
    return [*(tokens(19, seed=seed) for seed in range(3)), *([*beginning, *tokens(9, seed=i)] for i in range(3))]


@pytest.mark.thorough
def test_drafts_leave_the_text(tmp_path: Path) -> None:
    """In chunks, behind hits at ends of blocks, and preempted with and without swap; some drafts are rejected."""
    save_multi_token_head(tmp_path)
    prompts, params = prompts_with_hits(), SamplingParams(temperature=0, max_tokens=12)
    plain = Engine(LlmExecutor.from_pretrained(tmp_path, num_blocks=256, block_size=BLOCK), eos_token_ids=())
    expected = [run(plain, [prompt], params)[0] for prompt in prompts]
    for settings, sizes in WAYS:
        executor = LlmExecutor.from_pretrained(tmp_path, draft="mtp", block_size=BLOCK, **sizes)
        engine = Engine(executor, EngineConfig(**settings), proposer=HeadProposer(executor, 3), eos_token_ids=())
        assert run(engine, prompts, params) == expected
        outputs = engine.generate(prompts[3:], params, progress=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected[3:]
        assert all(output.num_cached_tokens for output in outputs) or "chunk_size" not in settings
        assert engine.metrics.draft_tokens > engine.metrics.accepted_tokens
        assert bool(engine.metrics.preempted) == ("admission_tokens" in settings)
        check_pool_empty(executor)


def test_multi_token_head(tmp_path: Path) -> None:
    """Against transformers' layer: both projections add up in each stream, and position 0 has features of 0."""
    theirs, own = save_multi_token_head(tmp_path)
    config = theirs.config
    prompt, newest = tokens(30, seed=4), 9
    (row,) = drafts_after(tmp_path, "mtp", prompt, newest, 1).logits

    streams: list[torch.Tensor] = []
    hook = theirs.model.hc_head.register_forward_pre_hook(lambda _, inputs: streams.append(inputs[0]))
    with torch.no_grad():
        theirs.model(torch.tensor([prompt]))
        hook.remove()
        (features,) = streams  # [1, 30, N, 64]
        features = torch.cat([torch.zeros_like(features[:, :1]), features], 1)  # [1, 31, N, 64]
        ids = torch.tensor([[*prompt, newest]])

        def norm(x: torch.Tensor, name: str) -> torch.Tensor:
            module = copy.deepcopy(theirs.model.norm)
            module.weight.data = own[name]
            normed: torch.Tensor = module(x)
            return normed

        embedded = norm(theirs.model.embed_tokens(ids), "enorm") @ own["e_proj"].T
        inputs = norm(features, "hnorm") @ own["h_proj"].T + embedded[:, :, None]
        places = torch.arange(31)
        distances = places[:, None] - places
        is_hidden = (distances < 0) | (distances >= config.sliding_window)
        mask = torch.zeros(31, 31).masked_fill(is_hidden, -torch.inf)[None, None]
        rotations = {kind: theirs.model.rotary_emb(inputs, places[None], kind) for kind in ("main", "compress")}
        mixed = theirs.model.layers[1](
            inputs, position_embeddings=rotations, position_ids=places[None], attention_mask=mask, input_ids=ids
        )
        head = copy.deepcopy(theirs.model.hc_head)
        for part in ("fn", "base", "scale"):
            parameter = getattr(head, f"hc_{part}")
            parameter.data = parameter.flip(0)
        expected = theirs.lm_head(norm(head(mixed[:, -1:]), "norm"))[:, 0]
    assert_within(row, expected, 1e-3 * (1 + expected.abs()))


REFUSED: dict[str, tuple[dict[str, Any], str, type[Exception]]] = {
    "the scores": ({"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid'", UnsupportedError),
    "the limit": ({"swiglu_limit": 7.0}, "swiglu_limit = 7.0", UnsupportedError),
    "pictures": ({"vision_n_layers": 2}, "vision_n_layers = 2", UnsupportedError),
    "ratio 1": ({"layer_types": None, "compress_ratios": [1, 4, 128]}, "compress_ratios has 1", UnsupportedError),
    "groups": ({"o_groups": 3}, "num_attention_heads 4, expected a multiple of 3", CheckpointError),
    "the window": ({"sliding_window": 2}, "sliding_window 2, expected more than the 2 positions", UnsupportedError),
    "experts in NVFP4": (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "moe_quant_algo": "NVFP4"}},
        "moe_quant_algo = 'NVFP4' is not supported",
        UnsupportedError,
    ),
    "experts": ({"mlp_layer_types": ["moe", "moe"]}, "hash_moe or moe for each of 3 layers", CheckpointError),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save_checkpoint(FAMILIES["deepseek_v4"], folder)
    return folder


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str, saved: Path) -> None:
    values, message, error = REFUSED[name]
    text = (saved / "config.json").read_text()
    edit_config(saved, **values)
    try:
        assert_refused(saved, message, error)
    finally:
        (saved / "config.json").write_text(text)


def test_a_table_that_names_no_expert_is_refused(saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "copy")
    edit_tensors(folder, lambda tensors: tensors["model.layers.0.ffn.gate.tid2eid"].fill_(8))
    assert_refused(folder, "expert ids 8 to 8, expected 0 to 7")


def test_several_ranks_and_embeddings_and_blocks_within_a_pool_are_refused(case: Case, saved: Path) -> None:
    model = case.ours
    with pytest.raises(UnsupportedError, match="tensor_parallel_size 4: o_groups 2"):
        Share(0, 4).config(model.network.config)
    assert model.embeds_limits is None
    with pytest.raises(InvalidInputError, match="block_size: 6, expected a multiple of 4"):
        load_model(saved, block_size=6)
    with pytest.raises(InvalidInputError, match=r"torch\.float8_e4m3fn, expected torch\.float32 for"):
        load_model(saved, kv_cache_dtype="fp8_e4m3")
