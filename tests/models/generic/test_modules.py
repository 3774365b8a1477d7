"""transformers' own modules over the paged cache: architectures without a family."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paged import Engine, EngineConfig, LlmExecutor, SamplingParams
from paged.errors import UnsupportedError
from paged.models.generic.experts import ModuleExperts
from paged.models.generic.layers import ModuleLinear, ModuleNorm
from paged.models.generic.network import ModuleNetwork
from paged.models.module_check import check_module
from paged.models.paged_lm import PagedCausalLM
from paged.models.parallel.ranks import Ranks
from paged.models.quantization.packed_weights import CpuExperts, CpuProducts
from paged.models.registry import load_model
from paged.serving.command_line.checkpoint_summary import summarize
from paged.step.batch import UnifiedBatchItem, VerifyLogits
from tests.backends import needs_numba
from tests.models.edits import Tensors, assert_refused, edit_config, edit_tensors
from tests.models.families import FAMILIES, Families, assert_logits_of, assert_same_logits, save_checkpoint, tokens
from tests.models.generic.every_decoder import save
from tests.models.stepping import begin, decode, make

ACCEPTED = Families(
    bloom="Bloom n_layer=2 n_head=4",
    bloom_of_3_heads="Bloom n_layer=2 n_head=3 hidden_size=48",
    codegen="CodeGen n_embd=64 n_head=4 n_layer=2 n_positions=128 rotary_dim=8",
    cohere="Cohere head_dim=16 use_qk_norm=True pad_token_id=0",
    falcon="Falcon max_position_embeddings=128",
    falcon_40b="Falcon max_position_embeddings=128 new_decoder_architecture=True num_kv_heads=2",
    falcon_without_groups="Falcon max_position_embeddings=128 multi_query=False parallel_attn=False bias=True",
    gpt2="GPT2 n_embd=64 n_head=4 n_layer=2 n_positions=128",
    gpt_neo="GPTNeo num_layers=2 num_heads=4 max_position_embeddings=128 attention_types=[[['global','local'],1]] "
    "window_size=8",
    gpt_neox="GPTNeoX attention_bias=True",
    gptj="GPTJ n_embd=64 n_head=4 n_layer=2 n_positions=128 rotary_dim=8",
    mpt="Mpt d_model=64 n_heads=4 n_layers=2 max_seq_len=128",
    mpt_of_3_heads="Mpt hidden_size=48 num_attention_heads=3 n_layers=2 max_seq_len=128 attn_config={'clip_qkv':0.5}",
    openai_gpt="OpenAIGPT n_embd=64 n_head=4 n_layer=2 n_positions=128",
    opt="OPT ffn_dim=96 word_embed_proj_dim=64",
    phimoe="Phimoe local_experts window head_dim=16",
)
# It reads on the host which experts have tokens.
NEVER_RECORDED = Families(
    dbrx="""Dbrx d_model=64 head_dim=16 n_heads=4 n_layers=2 max_seq_len=128
        attn_config={'kv_n_heads':2,'rope_theta':1e4,'clip_qkv':8}
        ffn_config={'ffn_hidden_size':32,'moe_num_experts':4,'moe_top_k':2}""",
)
ALL = Families(ACCEPTED.data | NEVER_RECORDED.data)
# The cause follows the name of the class.
REFUSED = {
    "BigBird is_decoder=True": "no layer calls attention through transformers' interface",
    "Doge keep_window_size=16": "layers.0.self_attn: a mask of its own",
    "Falcon alibi=True": "alibi: transformers rounds it to bfloat16",
    "JetMoe": "its forward reads tensors on the host",
}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def all_logits(model: PagedCausalLM, token_ids: list[int], counts: tuple[int, ...]) -> torch.Tensor:
    """Those of every token of a prompt, in steps of these numbers of tokens."""
    rows, start = [], 0
    for count in counts:
        chunk = token_ids[start : start + count]
        (logits,) = model.unified_forward(
            [UnifiedBatchItem("a", chunk, pos_offset=start, logits_policy=VerifyLogits())]
        )
        rows.append(logits)
        start += count
    return torch.cat(rows)


@pytest.mark.parametrize("name", ALL)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = save_checkpoint(ALL[name], tmp_path)
    if name == "mpt":
        edit_config(tmp_path, architectures=["MPTForCausalLM"])  # as published
    model = load_model(tmp_path, num_blocks=16, model_impl="transformers")
    assert type(model.network) is ModuleNetwork
    prompt = tokens(30)
    assert_logits_of(all_logits(model, prompt, (17, 12, 1)), theirs, prompt)


@pytest.mark.by_cpu
@pytest.mark.parametrize("backend", [pytest.param("numba", marks=needs_numba)], indirect=True)
@pytest.mark.parametrize(
    "name",
    [
        name if name in ("bloom", "falcon_40b", "gpt2", "phimoe") else pytest.param(name, marks=pytest.mark.thorough)
        for name in ACCEPTED
    ],
)
def test_decode_steps_are_recorded(name: str, tmp_path: Path, backend: str) -> None:
    save_checkpoint(ACCEPTED[name], tmp_path)
    recorded, eager = (make(tmp_path, graphs) for graphs in (None, False))
    for model in (recorded, eager):
        model.pack()
        model.graphs.capture()
        begin(model, (7, 3, 12, 1, 18))
    for number, names in enumerate([(4, 1, 0), (3,), *((4, 2, 0),) * 2]):
        assert_same_logits(decode(recorded, names, number), decode(eager, names, number))
    assert recorded.graphs.num_unrecorded == 0
    assert recorded.num_graph_replays == 4


# XGLM's own code cannot run in float64, as the test of logits does.
_WITH_XGLM = ALL.data | {"xglm": "XGLM d_model=64 ffn_dim=96 num_layers=2 attention_heads=4"}


@pytest.mark.parametrize("name", ["bloom", "gpt_neo", "opt", "xglm"])
def test_the_engine_gives_its_greedy_tokens(name: str, tmp_path: Path) -> None:
    """Prompts in chunks, mixed with decodes, some of whose blocks come from the prefix cache."""
    theirs = save_checkpoint(Families(_WITH_XGLM)[name], tmp_path)
    executor = LlmExecutor.from_pretrained(tmp_path, num_blocks=64, block_size=16)
    engine = Engine(executor, EngineConfig(token_budget=16), eos_token_ids=())
    prompts = [tokens(40), [*tokens(40)[:33], 5, 6], [9, 8, 7]]
    engine.generate(prompts, GREEDY, progress=False)
    outputs = engine.generate(prompts, GREEDY, progress=False)
    assert [output.num_cached_tokens for output in outputs] == [32, 32, 0]
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.no_grad():
            expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=6, min_new_tokens=6, do_sample=False)
        assert output.outputs[0].token_ids == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("form", [None, "int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_it_equals_a_family(name: str, form: str | None, tmp_path: Path) -> None:
    """Also with weights rounded at load, and in a CPU's order."""
    save_checkpoint(FAMILIES[name], tmp_path)
    options: dict[str, Any] = {"num_blocks": 16, "quantization": form}
    family = load_model(tmp_path, **options)
    module = load_model(tmp_path, model_impl="transformers", **options)
    for model in (family, module):
        model.prepare()
    assert not isinstance(family.network, ModuleNetwork)
    assert isinstance(module.network, ModuleNetwork)
    prompt = tokens(20)
    assert_same_logits(all_logits(module, prompt, (20,)), all_logits(family, prompt, (20,)))


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8_e4m3"])
def test_a_cache_of_8_bits_is_that_of_a_family(kv_cache_dtype: str, llama_folder: Path) -> None:
    options: dict[str, Any] = {"num_blocks": 16, "kv_cache_dtype": kv_cache_dtype}
    family = load_model(llama_folder, **options)
    module = load_model(llama_folder, model_impl="transformers", **options)
    prompt, counts = tokens(20), (12, 7, 1)
    assert_same_logits(all_logits(module, prompt, counts), all_logits(family, prompt, counts))


@pytest.mark.parametrize(
    ("name", "expected"), [("llama", (15, 5, 0)), ("mixtral", (9, 5, 2)), ("falcon", (9, 0, 0)), ("gpt2", (9, 0, 0))]
)
@pytest.mark.parametrize("form", [None, "int8"])
def test_layers_are_replaced(name: str, expected: tuple[int, int, int], form: str | None, tmp_path: Path) -> None:
    save_checkpoint(Families(FAMILIES.data | ALL.data)[name], tmp_path)
    model = load_model(tmp_path, num_blocks=16, model_impl="transformers", quantization=form)
    counts = Counter(type(part) for part in model.network.modules())
    assert (counts[ModuleLinear], counts[ModuleNorm], counts[ModuleExperts]) == expected
    num_rounded = num_experts = 0
    if form is not None:  # all but the head; two products of each layer's experts
        num_rounded, num_experts = expected[0] - 1, 2 * expected[2]
    assert (counts[CpuProducts], counts[CpuExperts]) == (num_rounded, num_experts)
    assert counts[nn.Linear] == 0


@pytest.mark.parametrize("words", REFUSED)
def test_refusals_begin_with_the_cause(words: str, tmp_path: Path) -> None:
    theirs = save_checkpoint(Families(model=words)["model"], tmp_path)
    with pytest.raises(UnsupportedError) as caught:
        load_model(tmp_path, num_blocks=16)
    name = type(theirs).__name__
    beginning = f"architectures ['{name}'] are unknown; transformers' {name} cannot "
    reason = str(caught.value).partition(beginning)[2].replace("model.", "")
    assert f": {REFUSED[words]}" in reason
    summary = summarize(tmp_path)
    assert (summary["supported"], summary["backend"]) == (False, None)


# Names of the text model's modules. The first two run whole, the second of which reads an attribute of its body; the
# third needs an image, and so its text module runs alone.
MULTIMODAL = {
    "PaddleOCRVLForConditionalGeneration": ("model.language_model", "lm_head"),
    "ChameleonForConditionalGeneration": ("model.embed_tokens", "model.layers", "model.norm", "lm_head"),
    "Blip2ForConditionalGeneration": ("language_model",),
}


@pytest.mark.parametrize("name", MULTIMODAL)
def test_a_multimodal_model_frees_what_text_does_not_need(name: str, tmp_path: Path) -> None:
    import transformers

    theirs = save(getattr(transformers, name), tmp_path)
    model = load_model(tmp_path, num_blocks=16)
    text = {parameter for part in MULTIMODAL[name] for parameter in theirs.get_submodule(part).parameters()}
    assert model.network.num_weights == sum(parameter.numel() for parameter in text)
    if len(MULTIMODAL[name]) == 1:
        theirs = theirs.get_submodule(MULTIMODAL[name][0])
    prompt = tokens(20)
    assert_logits_of(all_logits(model, prompt, (12, 8)), theirs, prompt)


def test_encoders_are_refused(tmp_path: Path) -> None:
    save_checkpoint(ACCEPTED["opt"], tmp_path)
    edit_config(tmp_path, is_encoder_decoder=True)
    with pytest.raises(UnsupportedError, match="is_encoder_decoder: an encoder reads the prompt"):
        load_model(tmp_path, num_blocks=16)


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_masks_in_a_checkpoint_are_skipped(prefix: str, tmp_path: Path) -> None:
    """Also if names lack the decoder's prefix, as those of published GPT-2; other unexpected tensors are refused."""
    theirs = save_checkpoint(ACCEPTED["gpt_neo"], tmp_path)

    def add_masks(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[prefix + name.removeprefix("transformer.")] = tensors.pop(name)
        tensors[f"{prefix}h.0.attn.attention.bias"] = torch.ones(1, 1, 128, 128, dtype=torch.bool)
        tensors[f"{prefix}h.0.attn.attention.masked_bias"] = torch.tensor(-1e9)

    edit_tensors(tmp_path, add_masks)
    prompt = tokens(20)
    assert_logits_of(all_logits(load_model(tmp_path, num_blocks=16), prompt, (20,)), theirs, prompt)
    edit_tensors(tmp_path, lambda tensors: tensors.update({f"{prefix}h.0.attn.attention.gate": torch.ones(64)}))
    assert_refused(tmp_path, rf"unexpected tensors \['{prefix}h.0.attn.attention.gate'\]")


def test_a_wrong_window_fails_the_check(tmp_path: Path) -> None:
    save_checkpoint(ACCEPTED["opt"], tmp_path)
    network = load_model(tmp_path, num_blocks=16).network
    assert isinstance(network, ModuleNetwork)
    network.module.set_submodule(network.config.decoder, network.decoder)
    check_module(network.config, network.module, torch.device("cpu"), Ranks())
    wrong = replace(network.config, attention=tuple(replace(kind, window=12) for kind in network.config.attention))
    with pytest.raises(UnsupportedError, match="whole prompts have other logits than without a cache, by"):
        check_module(wrong, network.module, torch.device("cpu"), Ranks())


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"draft": "mtp"}, "draft"),
        ({"model_impl": "native"}, "architectures ['OPTForCausalLM'] are unknown; unlike a Llama"),
    ],
)
def test_options_that_need_a_family(options: dict[str, Any], name: str, tmp_path: Path) -> None:
    save_checkpoint(ACCEPTED["opt"], tmp_path)
    with pytest.raises(UnsupportedError) as caught:
        load_model(tmp_path, num_blocks=16, **options)
    assert name in str(caught.value)


def test_new_weights_are_refused(tmp_path: Path) -> None:
    save_checkpoint(ACCEPTED["opt"], tmp_path)
    executor = LlmExecutor.from_pretrained(tmp_path, num_blocks=16)
    with pytest.raises(UnsupportedError, match="update_weights"):
        executor.update_weights(tmp_path)


def test_inspect_names_the_backend(llama_folder: Path, tmp_path: Path) -> None:
    theirs = save_checkpoint(ACCEPTED["opt"], tmp_path)
    summary = summarize(tmp_path)
    assert summary["supported"]
    assert summary["backend"] == "transformers' OPTForCausalLM: there is no family of this architecture"
    assert summary["parameters"] == sum(parameter.numel() for parameter in theirs.parameters())
    assert summarize(llama_folder)["backend"] == "native"


def test_code_of_a_checkpoint_runs_only_if_it_is_trusted(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder = tmp_path / "model"
    folder.mkdir()
    theirs = save_checkpoint(FAMILIES["llama"], folder)
    (folder / "modeling_own.py").write_text(
        "import pathlib\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        f"pathlib.Path({str(tmp_path / 'ran')!r}).touch()\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    auto_map = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    edit_config(folder, architectures=["OwnForCausalLM"], model_type="own", auto_map=auto_map)
    with pytest.raises(UnsupportedError, match="are unknown; "):
        load_model(folder, num_blocks=16)
    assert not (tmp_path / "ran").exists()
    model = load_model(folder, num_blocks=16, trust_remote_code=True)
    assert (tmp_path / "ran").exists()
    prompt = tokens(20)
    assert_logits_of(all_logits(model, prompt, (20,)), theirs, prompt)


def test_scales_of_the_cache_are_skipped_or_refused(tmp_path: Path) -> None:
    save_checkpoint(ACCEPTED["gpt2"], tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.update({"transformer.h.0.attn.kv_scale": torch.ones(1)}))
    load_model(tmp_path)
    assert_refused(tmp_path, "attn.kv_scale': scales of an 8-bit cache", UnsupportedError, kv_cache_dtype="fp8")
