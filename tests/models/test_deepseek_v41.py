"""DeepSeek-V4.1: cuts at every position of its pools, shared n-grams, published settings and formats, refusals."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paged import Engine, EngineConfig, LlmExecutor, SamplingParams
from paged.errors import CheckpointError, PagedError, UnsupportedError
from paged.executors.speculation.head_proposer import HeadProposer
from paged.models.layers.engram import SharedIds
from paged.models.loading.hf_config import HfConfig
from paged.models.registry import load_model, model_config
from paged.serving.command_line.checkpoint_summary import summarize
from tests.executors.engine_cases import check_pool_empty, run
from tests.executors.speculation.noting import NotingProposer
from tests.models.deepseek_v41 import DRAFTER, SETTINGS, DeepseekV41
from tests.models.drafts.test_draft_heads import drafts_after
from tests.models.edits import WEIGHTS, assert_refused, edit_config, edit_tensors
from tests.models.families import Case, assert_same_logits, forward, logits_of, tokens
from tests.models.test_deepseek_v4 import (
    BLOCK,
    WAYS,
    check_records,
    e4m3_error,
    go_on_from,
    mxfp4,
    prompts_with_hits,
    scales_of_neighbours,
)
from tests.tolerance import assert_within

pytestmark = pytest.mark.usefixtures("bound_calls_are_alike")

# Sources of entries of two tokens have open pools.
OPEN_LAYERS = [SETTINGS["num_hidden_layers"] + 1 + layer for layer in (2, 4)]
# config.json of deepseek-ai/DeepSeek-V4.1-Flash, without its vision tower and inert keys.
PUBLISHED: dict[str, Any] = SETTINGS | {
    "vocab_size": 129_280,
    "hidden_size": 5120,
    "moe_intermediate_size": 2304,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1280,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "max_position_embeddings": 1_048_576,
    "rope_scaling": SETTINGS["rope_scaling"] | {"factor": 16, "original_max_position_embeddings": 65_536},
    "n_routed_experts": 384,
    "num_experts_per_tok": 6,
    "sliding_window": 128,
    "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3,
    "kv_source_layer_ids": [2, 8, 14, 20],
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "candidate_source_layer_id": 20,
    "candidate_topk_blocks": 2048,
    "candidate_block_size": 8,
    "engram_layer_ids": [1, 14],
    "engram_num_embeddings": [384_006_168, 384_016_682],
    "engram_vocab_size": 16_000_000,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
    "engram_compressed_vocab_size": 99_092,
    "num_nextn_predict_layers": 3,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128_799,
    "dspark_target_layer_ids": [37, 38, 39],
    "dspark_markov_rank": 256,
    "dspark_n_routed_experts": 128,
    "dspark_num_experts_per_tok": 3,
}
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}


# Two layers with a window alone, of which the second looks up n-grams.
ALONE: dict[str, Any] = {
    "num_hidden_layers": 2,
    "kv_source_layer_ids": [],
    "index_source_layer_ids": [],
    "candidate_source_layer_id": -1,
    "engram_layer_ids": [1],
    "engram_num_embeddings": [400],
}


def save(folder: Path, **settings: Any) -> DeepseekV41:
    theirs = DeepseekV41(SETTINGS | settings)
    theirs.save_pretrained(folder)
    return theirs


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("deepseek_v41")
    theirs = save(folder)
    return Case(theirs, load_model(folder, block_size=BLOCK, num_blocks=256, num_swap_blocks=64))


@pytest.mark.parametrize(
    "length", [27, *(pytest.param(cut, marks=pytest.mark.thorough) for cut in (24, 25, 26, 28, 31, 91))]
)
def test_cuts_at_every_position_of_a_pool(case: Case, length: int) -> None:
    """Chunks, forks, truncations and hits: a sequence goes on from each position with other tokens."""
    go_on_from(case, length, OPEN_LAYERS)


def test_sequences_of_one_batch_keep_their_own_tokens(case: Case) -> None:
    """Chunks of two sequences and decodes in one forward: n-grams do not reach into the neighbour."""
    first, second = tokens(21, 1), tokens(20, 2)
    case.ours.forward_verify("second", second[:17])
    for parts in ({"first": first[:2], "second": second[17:19]}, {"second": second[19:], "first": first[2:]}):
        rows = forward(case.ours, parts)
    assert_same_logits(rows[0], case.expected(second)[-1])
    assert_same_logits(rows[1], case.expected(first)[-1])
    case.ours.reset()


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["triton"], indirect=True)
def test_steps_of_the_kernels_grow(case: Case, backend: str) -> None:
    ids = tokens(30)
    for part in (ids[:2], ids[2:25], ids[25:]):
        rows = case.ours.forward_verify("a", part)
    assert_same_logits(rows, case.expected(ids)[25:])
    case.ours.reset()


FAULTS: dict[str, Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]] = {
    "the token before is forgotten": lambda ids: (
        ids[0],
        torch.full_like(ids[1], SETTINGS["engram_pad_token_id"]),
        *ids[2:],
    ),
    "the last of four tokens is another": lambda ids: (*ids[:3], ids[2]),
}


@pytest.mark.thorough
@pytest.mark.parametrize("fault", FAULTS)
def test_cuts_see_the_fault(fault: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    last = SharedIds.last
    monkeypatch.setattr(SharedIds, "last", lambda *arguments: FAULTS[fault](last(*arguments)))
    try:
        with pytest.raises(AssertionError):
            go_on_from(case, 27, OPEN_LAYERS)
    finally:
        case.ours.reset()


@pytest.mark.thorough
def test_preempted_requests_go_on(tmp_path: Path) -> None:
    """In chunks, behind hits at ends of blocks, and preempted with and without swap."""
    theirs = save(tmp_path)
    prompts, params = prompts_with_hits(), SamplingParams(temperature=0, max_tokens=12)
    expected = [theirs.generate(torch.tensor([prompt]), 12)[0, len(prompt) :].tolist() for prompt in prompts]
    for settings, sizes in WAYS:
        executor = LlmExecutor.from_pretrained(tmp_path, block_size=BLOCK, **sizes)
        engine = Engine(executor, EngineConfig(**settings), eos_token_ids=())
        assert run(engine, prompts, params) == expected
        assert bool(engine.metrics.preempted) == ("admission_tokens" in settings)
        check_pool_empty(executor)


@pytest.mark.parametrize(
    ("dtype", "entry"), [(torch.bfloat16, 2 * 512), (torch.float8_e4m3fn, 528), (torch.float4_e2m1fn_x2, 384)]
)
def test_bytes_of_long_sequences(dtype: torch.dtype, entry: int, tmp_path: Path) -> None:
    """DeepSeek-V4.1-Flash by `paged inspect`: three sources of entries of two tokens, one of entries of a token."""
    values = {"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", "torch_dtype": "bfloat16"}
    values |= {"text_config": PUBLISHED, "quantization_config": FP8, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(values))
    summary = summarize(tmp_path, kv_cache_dtype=dtype)
    keys, token_id = 128 + 4, 4
    assert summary["growth_bytes"] == 3 * (entry + keys) / 2 + entry + keys + token_id
    # Codes of the tables, and a scale for 32 of them.
    assert summary["host_bytes"] == (384_006_168 + 384_016_682) * (256 + 256 // 32)


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["torch"], indirect=True)
def test_records_of_528_bytes(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries of two tokens and of one, shared and chosen; all experts, because a changed choice is no rounding."""
    layers: dict[str, Any] = {
        "num_hidden_layers": 4,
        "compress_ratios": [2, 1, 1, 1],
        "kv_source_layer_ids": [0, 1],
        "index_source_layer_ids": [0, 1, 3],
        "candidate_source_layer_id": 1,
        "engram_layer_ids": [],
        "engram_num_embeddings": [],
    }
    heads = {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "index_topk": 6}
    save(tmp_path, **layers, **heads, num_experts_per_tok=8)
    check_records(tmp_path, "fp8", e4m3_error, scales_of_neighbours, monkeypatch)


def e4m3_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes of e4m3, a power of two for each 32 x 32 of them, and the numbers that they stand for."""
    rows, columns = (-(-size // 32) for size in weight.shape)
    padded = torch.zeros(32 * rows, 32 * columns)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    blocks = padded.view(rows, 32, columns, 32)
    scale = torch.exp2((blocks.abs().amax((1, 3)) / 448).log2().ceil())  # [rows, columns]
    codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    numbers = (codes.float() * scale[:, None, :, None]).view_as(padded)
    cut = slice(weight.shape[0]), slice(weight.shape[1])
    return codes.view_as(padded)[cut].contiguous(), scale, numbers[cut].contiguous()


_PACKED = re.compile(r".*\.(?:main_proj|wq_a|wkv|wq_b|wo_a|wo_b|w[123])\.weight")


@pytest.mark.thorough
def test_published_formats(tmp_path: Path) -> None:
    """e4m3 in blocks of 32 x 32, experts in MXFP4, tables in e4m3 with a scale for 32 numbers; also of the drafter."""
    experts = {
        "num_experts_per_tok": 8,
        "dspark_num_experts_per_tok": 4,
    }  # all, because a changed choice is no rounding
    settings = DRAFTER | {"head_dim": 96, "moe_intermediate_size": 96, **experts}
    save(tmp_path, **settings)
    packed, numbers = dict(load_file(tmp_path / WEIGHTS)), dict(load_file(tmp_path / WEIGHTS))
    for name, weight in load_file(tmp_path / WEIGHTS).items():
        scales = torch.empty(0)
        if ".experts." in name:
            packed[name], scales, numbers[name] = mxfp4(weight)
        elif name.endswith("engram.embed.weight"):
            groups = weight.unflatten(1, (-1, 32))
            scales = torch.exp2((groups.abs().amax(2) / 448).log2().ceil())
            packed[name] = (groups / scales[..., None]).to(torch.float8_e4m3fn).flatten(1)
            numbers[name] = (packed[name].float().view_as(groups) * scales[..., None]).flatten(1)
        elif _PACKED.fullmatch(name) and ".compressor." not in name:
            packed[name], scales, numbers[name] = e4m3_blocks(weight)
        else:
            continue
        packed[name.removesuffix("weight") + "scale"] = scales.to(torch.float8_e8m0fnu)
    # Tensors for pictures are not read.
    for name in ("layers.0.ffn.gate.bias_vl", "mtp.0.ffn.gate.bias_vl", "image_start", "vision.norm.weight"):
        packed[name] = torch.zeros(8)
    theirs = DeepseekV41(SETTINGS | settings, numbers)
    save_file({name: tensor.contiguous() for name, tensor in packed.items()}, tmp_path / WEIGHTS)
    edit_config(tmp_path, quantization_config=FP8)
    model = load_model(tmp_path, block_size=BLOCK, num_blocks=64)
    prompt = tokens(30)
    # Only activations in front of experts are rounded.
    got, expected = model.forward_verify("a", prompt), logits_of(theirs, prompt)
    assert (got - expected).norm() < 2**-4 * expected.norm()
    rows = torch.cat(drafts_after(tmp_path, "mtp", prompt, 9, 5).logits)
    expected, _ = theirs.drafts(prompt, [9, *rows.argmax(-1).tolist()[:-1]])
    assert (rows - expected).norm() < 2**-4 * expected.norm()


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.thorough)], indirect=True)
def test_drafts(backend: str, tmp_path: Path) -> None:
    """A whole block, behind wrong drafts that were rolled back; the window of eight positions begins in a block."""
    theirs = save(tmp_path, **DRAFTER)
    prompt = tokens(30, seed=4)
    drafted = drafts_after(tmp_path, "mtp", prompt, 9, 5)
    rows = torch.cat(drafted.logits)
    newest = [9, *rows.argmax(-1).tolist()[:-1]]
    logits, confidences = theirs.drafts(prompt, newest)
    assert_same_logits(rows, logits)
    assert confidences.max() - confidences.min() > 0.1
    for confidence, expected in zip(drafted.confidences, confidences, strict=True):
        assert confidence is not None
        assert_within(confidence, expected[None], 1e-4)


def save_echo(folder: Path) -> DeepseekV41:
    """Save a model that mostly continues a token with one that depends on it alone, and a drafter that knows which."""
    theirs = DeepseekV41(SETTINGS | DRAFTER)
    tensors = theirs.tensors
    for name in tensors:
        if re.search(r"\.(wo_b|w2|engram\.wkv)\.", name):
            tensors[name] *= 0.13
    following = torch.randperm(SETTINGS["vocab_size"], generator=torch.Generator().manual_seed(7))
    tensors["head.weight"][following] = tensors["embed.weight"]
    last = f"mtp.{SETTINGS['num_nextn_predict_layers'] - 1}.markov_head"
    tensors[f"{last}.head.weight"][following] = 4 * tensors[f"{last}.embed.weight"]
    theirs.save_pretrained(folder)
    return theirs


@pytest.mark.thorough
def test_drafts_leave_the_text(tmp_path: Path) -> None:
    """In chunks, behind hits, and preempted with and without swap; many drafts are accepted, some are rejected."""
    theirs = save_echo(tmp_path)
    prompts, params = prompts_with_hits(), SamplingParams(temperature=0, max_tokens=12)
    expected = [theirs.generate(torch.tensor([prompt]), 12)[0, len(prompt) :].tolist() for prompt in prompts]
    for settings, sizes in WAYS:
        executor = LlmExecutor.from_pretrained(tmp_path, draft="mtp", block_size=BLOCK, **sizes)
        engine = Engine(executor, EngineConfig(**settings), proposer=HeadProposer(executor, 8), eos_token_ids=())
        assert run(engine, prompts, params) == expected
        outputs = engine.generate(prompts[3:], params, progress=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected[3:]
        metrics = engine.metrics
        assert metrics.draft_tokens > metrics.accepted_tokens > metrics.draft_tokens / 4
        assert bool(metrics.preempted) == ("admission_tokens" in settings)
        check_pool_empty(executor)


@pytest.mark.thorough
def test_verified_as_far_as_confident(tmp_path: Path) -> None:
    """By the confidence head. A step runs the newest tokens and the verified drafts alone; the text is the same."""
    theirs = save_echo(tmp_path)
    prompts, params = prompts_with_hits()[2:4], SamplingParams(temperature=0, max_tokens=12)
    executor = LlmExecutor.from_pretrained(tmp_path, draft="mtp", block_size=BLOCK, num_blocks=128)
    engines = []
    texts = []
    for min_probability in (0.0, 0.2):
        proposer = NotingProposer(HeadProposer(executor, 5, min_probability=min_probability))
        engine = Engine(executor, proposer=proposer, eos_token_ids=())
        texts.append(run(engine, prompts, params))
        engines.append((engine.metrics, proposer.drafted))
    assert texts[0] == texts[1]
    (all_verified, _), (metrics, drafted) = engines
    assert 0 < metrics.draft_tokens < all_verified.draft_tokens
    assert metrics.draft_tokens == sum(map(len, drafted.values()))
    assert metrics.decode_tokens == len(drafted) + metrics.draft_tokens
    counts = set()
    for text, token_ids in drafted.items():
        newest = [text[-1]]
        while len(newest) <= 5:
            logits, confidences = theirs.drafts(text[:-1], newest)
            newest.append(int(logits[-1].argmax()))
        (prompt,) = (prompt for prompt in prompts if tuple(prompt) == text[: len(prompt)])
        num_left = 12 - (len(text) - len(prompt)) - 1
        count = min(int((confidences.cumprod(0) >= 0.2).sum()), num_left)
        assert token_ids == newest[1 : 1 + count]
        counts.add(count)
    assert len(counts) > 2
    # Without the head, the largest probabilities take its place.
    last = SETTINGS["num_nextn_predict_layers"] - 1
    edit_tensors(tmp_path, lambda tensors: tensors.pop(f"mtp.{last}.confidence_head.proj.weight"))
    assert drafts_after(tmp_path, "mtp", prompts[0], 9, 2).confidences == [None, None]


REFUSED: dict[str, tuple[dict[str, Any], str, type[PagedError]]] = {
    "ratio 4": (
        {"compress_ratios": [0, 0, 4, *[0] * 6]},
        "compress_ratios has 4, known are 0, 1 and 2",
        UnsupportedError,
    ),
    "few ratios": ({"compress_ratios": [0, 0]}, "2 compress_ratios for 9 layers", CheckpointError),
    "no source": (
        {"kv_source_layer_ids": [3, 4, 5]},
        r"expected a layer up to 2 with compress_ratios 2",
        CheckpointError,
    ),
    "another ratio": (
        {"kv_source_layer_ids": [2, 4]},
        r"expected a layer up to 5 with compress_ratios 1",
        CheckpointError,
    ),
    "no indexer": (
        {"index_source_layer_ids": [2, 5]},
        "layer 4 reads entries of layer 4 and a choice of",
        UnsupportedError,
    ),
    "candidates": ({"candidate_source_layer_id": 4}, "candidate_source_layer_id 4, expected a layer", UnsupportedError),
    "few rows": (
        {"engram_num_embeddings": [300, 560]},
        "engram_num_embeddings 300, expected at least 384",
        CheckpointError,
    ),
    "tables": ({"engram_num_embeddings": [400]}, "expected layers below 9 and a number for each", CheckpointError),
    "taps of the drafter": (
        DRAFTER | {"dspark_target_layer_ids": [0, 9]},
        r"dspark_target_layer_ids \[0, 9\], expected layers from 1 to 9",
        UnsupportedError,
    ),
    "entries of the drafter": (
        DRAFTER | {"compress_ratios": [*SETTINGS["compress_ratios"][:9], 0, 1]},
        "compress_ratios of the drafter's layers, expected 0",
        UnsupportedError,
    ),
    "blocks without an anchor": (
        DRAFTER | {"sample_from_anchor": False},
        "sample_from_anchor = False",
        UnsupportedError,
    ),
    "the limit": ({"swiglu_limit": 7.0}, "swiglu_limit = 7.0", UnsupportedError),
    "pictures": ({"vision_n_layers": 2}, "vision_n_layers = 2", UnsupportedError),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    values, message, error = REFUSED[name]
    text = SETTINGS | values
    with pytest.raises(error, match=message):
        model_config(HfConfig({"architectures": ["DeepseekV41ForCausalLM"], "text_config": text}, "config.json"))


def test_a_tokenizer_of_another_hash_and_drafts_are_refused(tmp_path: Path) -> None:
    save(tmp_path, **ALONE)
    assert_refused(tmp_path, "no multi-token head of deepseek_v41_text is known", UnsupportedError, draft="mtp")
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["another"] = 128
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert_refused(tmp_path, "tokens share 101 ids, expected 100, engram_compressed_vocab_size")
    (tmp_path / "tokenizer.json").unlink()
    assert_refused(tmp_path, "tokenizer.json")
