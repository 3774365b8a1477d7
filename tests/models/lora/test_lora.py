"""Adapters in one batch with the base model, against checkpoints into which each was merged."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paged import LoraBatch, LoraWeights, add_lora
from paged.errors import CheckpointError, InvalidInputError, PagedError, UnsupportedError
from paged.models.layers.modules import Linear
from paged.models.layers.share_bound import share_bound
from paged.models.paged_lm import PagedCausalLM
from paged.models.registry import load_model
from tests.models.edits import Tensors, edit_config, edit_tensors
from tests.models.families import FAMILIES, VARIANTS, assert_same_logits, forward, logits_of, save_checkpoint, tokens
from tests.models.lora.folders import Adapter

ADAPTER = "adapter_model.safetensors"
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTERS = {
    "all": Adapter(ALL, seed=1),
    "rslora": Adapter(("q_proj", "v_proj"), rank=9, alpha=5, rslora=True, seed=2),
    "large": Adapter(("k_proj", "up_proj", "down_proj"), rank=256, alpha=32, seed=3),
}
# Of families whose layers are not Llama's.
TARGETS = {
    **dict.fromkeys(("gemma3", "gemma4_shared_kv", "llama4_dense_layer", "qwen2"), ALL),
    "gpt_oss": ALL[:4],
    "kimi_linear": ("q_proj", "o_proj"),
    "llama4": ALL,  # those of the MLP are of the shared expert
    "minimax_m3": ("q_proj", "k_proj", "o_proj", "gate_up_proj", "down_proj"),  # also of the indexer
    "nemotron": ("q_proj", "o_proj", "up_proj", "down_proj"),
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "qwen3_5": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "q_proj", "down_proj"),
    "qwen3_moe_with_dense_layer": ("q_proj", "o_proj"),
}
PROMPTS = {"all": tokens(21, 0), "rslora": tokens(9, 1), "large": tokens(5, 2)}
Want = Callable[[str | None, list[int]], torch.Tensor]
SIZES = {"block_size": 8, "num_blocks": 64, "max_lora_rank": 256, "max_loras": 3}


@pytest.fixture(scope="module")
def folders(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: adapter.save(root / name, llama_folder) for name, adapter in ADAPTERS.items()}


@pytest.fixture(scope="module")
def merged(
    llama_folder: Path, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str | None, PagedCausalLM]:
    """A model of its own for every adapter, and the base model."""
    root = tmp_path_factory.mktemp("merged")
    paths = {name: adapter.merge(folders[name], llama_folder, root / name) for name, adapter in ADAPTERS.items()}
    return {name: load_model(path, **SIZES) for name, path in [(None, llama_folder), *paths.items()]}


@pytest.fixture
def want(merged: dict[str | None, PagedCausalLM]) -> Want:
    """The merged model's logits after the last token."""

    def logits(name: str | None, ids: list[int]) -> torch.Tensor:
        merged[name].reset()
        return merged[name].prefill("a", ids).cpu()

    return logits


@pytest.fixture
def model(llama_folder: Path, folders: dict[str, Path]) -> PagedCausalLM:
    """With all adapters loaded."""
    model = load_model(llama_folder, **SIZES)
    for name, folder in folders.items():
        model.adapters.load(name, folder)
    return model


def run(model: PagedCausalLM, cache_id: str, adapter: str | None, ids: list[int]) -> torch.Tensor:
    """A sequence with the adapter."""
    model.set_lora_adapter_for_cache(cache_id, adapter)
    return model.prefill(cache_id, ids)


_BACKENDS = ["torch", pytest.param("triton", marks=pytest.mark.thorough)]
both_backends = pytest.mark.parametrize("backend", _BACKENDS, indirect=True)


@both_backends
def test_three_adapters_and_base_in_one_batch(model: PagedCausalLM, want: Want, backend: str) -> None:
    """A decode step, a chunk that goes on and new prompts, each row as of its own merged model."""
    for name in PROMPTS:
        model.set_lora_adapter_for_cache(name, name)
    forward(model, {"all": PROMPTS["all"][:20], "rslora": PROMPTS["rslora"][:4]})
    base = tokens(17, 5)
    chunks = {"all": PROMPTS["all"][20:], "base": base, "rslora": PROMPTS["rslora"][4:], "large": PROMPTS["large"]}
    for name, row in zip(chunks, forward(model, chunks), strict=True):
        assert_same_logits(row, want(None, base) if name == "base" else want(name, PROMPTS[name]))
    assert (want("all", PROMPTS["large"]) - want(None, PROMPTS["large"])).abs().max() > 0.1


def test_base_rows_keep_their_bits(model: PagedCausalLM, llama_folder: Path) -> None:
    """Beside adapters' rows, and in a batch of their own."""
    plain = load_model(llama_folder, **SIZES)
    prompts = [tokens(17, 5), PROMPTS["large"], tokens(3, 6)]
    model.set_lora_adapter_for_cache(1, "all")
    mixed, without = (forward(one, dict(enumerate(prompts))) for one in (model, plain))
    assert mixed[1] is not None
    assert not torch.equal(mixed[1], without[1])
    for row in (0, 2):
        assert torch.equal(mixed[row], without[row])
    assert torch.equal(model.prefill("alone", prompts[0]), plain.prefill("alone", prompts[0]))


def test_a_slot_holds_nothing_of_its_last_adapter(
    model: PagedCausalLM, folders: dict[str, Path], llama_folder: Path, want: Want
) -> None:
    """One of a larger rank and of more layers goes; the others stay as they were meanwhile."""
    run(model, "a", "rslora", PROMPTS["rslora"][:8])
    model.adapters.unload("all")
    model.adapters.unload("large")
    stacks = [linear.adapters for linear in model.network.modules() if getattr(linear, "adapters", None)]
    model.adapters.load("again", folders["rslora"])
    assert_same_logits(run(model, "b", "again", PROMPTS["large"]), want("rslora", PROMPTS["large"]))
    assert_same_logits(model.decode("a", PROMPTS["rslora"][8], 8), want("rslora", PROMPTS["rslora"]))
    assert stacks == [linear.adapters for linear in model.network.modules() if getattr(linear, "adapters", None)]


def test_prefixes_are_not_shared_between_adapters(model: PagedCausalLM, want: Want) -> None:
    prompt = tokens(20)
    manager = model.kv_manager
    for cached in (0, 16):
        for name in ("all", "rslora", None):
            sequence = f"{name} behind {cached}"
            assert manager.allocate(sequence, token_ids=prompt, namespace=name).num_cached_tokens == cached
            assert_same_logits(run(model, sequence, name, prompt[cached:]), want(name, prompt))


@pytest.mark.parametrize("namespace", ["name", ("name", "tenant")])
def test_another_adapter_of_the_same_name_finds_no_old_prefix(
    namespace: str | tuple[str, str], model: PagedCausalLM, folders: dict[str, Path], want: Want
) -> None:
    prompt, manager = tokens(20), model.kv_manager
    model.adapters.unload("large")
    for source in ("all", "rslora"):
        model.adapters.load("name", folders[source])
        for cached in (0, 16):
            assert manager.allocate("a", token_ids=prompt, namespace=namespace).num_cached_tokens == cached
            assert_same_logits(run(model, "a", "name", prompt[cached:]), want(source, prompt))
            model.release("a")
        model.adapters.unload("name")
    manager.check_integrity()


def test_what_ran_under_the_name_before_is_not_found(
    model: PagedCausalLM, folders: dict[str, Path], want: Want
) -> None:
    """A tenant may have had an adapter's name as its namespace."""
    prompt = tokens(20)
    model.adapters.unload("large")
    model.kv_manager.allocate("a", token_ids=prompt, namespace="name")
    model.prefill("a", prompt)
    with pytest.raises(InvalidInputError, match="'name': the namespace of 1 sequences without an adapter, first 'a'"):
        model.adapters.load("name", folders["all"])
    model.release("a")
    model.adapters.load("name", folders["all"])
    assert model.kv_manager.allocate("a", token_ids=prompt, namespace="name").num_cached_tokens == 0
    assert_same_logits(model.prefill("a", prompt), want("all", prompt))


def test_a_sequence_keeps_the_adapter_it_began_with(model: PagedCausalLM) -> None:
    run(model, "a", "all", tokens(5))
    model.prefill("base", tokens(5))
    for cache_id, name in (("a", "rslora"), ("a", None), ("base", "all")):
        with pytest.raises(InvalidInputError, match=f"adapter {name!r} for sequence {cache_id!r}: its namespace"):
            model.set_lora_adapter_for_cache(cache_id, name)
    model.set_lora_adapter_for_cache("a", "all")
    model.set_lora_adapter_for_cache("base", None)
    with pytest.raises(InvalidInputError, match=r"'poetry': not loaded, expected one of \['all', 'rslora', 'large'\]"):
        model.set_lora_adapter_for_cache("new", "poetry")
    assert model.kv_manager.get_handle("new") is None


def test_unload_in_use_is_refused(model: PagedCausalLM) -> None:
    run(model, "a", "all", tokens(5))
    with pytest.raises(InvalidInputError, match="'all': 1 sequences use it, first 'a'"):
        model.adapters.unload("all")
    model.adapters.unload("large")
    model.release("a")
    model.adapters.unload("all")
    assert model.adapters.names() == ("rslora",)
    with pytest.raises(InvalidInputError, match="'all': not loaded"):
        model.adapters.unload("all")


def test_metrics(model: PagedCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    run(model, "a", "all", tokens(5))
    model.decode("a", 1, 5)
    model.prefill("base", tokens(5))
    with monkeypatch.context() as patch:
        patch.setattr(model.network, "logits", lambda hidden: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            model.decode("a", 1, 6)
    metrics = model.lora_metrics_snapshot()
    json.dumps(metrics)
    sizes = {"q": 128 + 64, "k": 64 + 64, "v": 64 + 64, "o": 64 + 128, "gate": 64 + 96, "up": 64 + 96, "down": 96 + 64}
    counts = {"slot": 0, "rank": 4, "bytes": 2 * 4 * sum(sizes.values()) * 4, "sequences": 1, "tokens": 6}
    assert metrics["adapters"]["all"] == counts
    assert metrics["adapters"]["large"]["tokens"] == 0
    assert (metrics["max_loras"], metrics["max_lora_rank"], metrics["free_slots"]) == (3, 256, 0)
    model.adapters.unload("large")
    assert model.lora_metrics_snapshot()["free_slots"] == 1


@pytest.mark.parametrize("family", TARGETS)
def test_adapters_of_families(family: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    save_checkpoint((FAMILIES | VARIANTS)[family], base)
    adapter = Adapter(TARGETS[family])
    folder = adapter.save(tmp_path / "adapter", base)
    merged = load_model(adapter.merge(folder, base, tmp_path / "merged"))
    model = load_model(base)
    expected = [merged.prefill("a", tokens(20)).cpu(), model.prefill("base", tokens(20)).cpu()]
    model.release("base")
    assert float((expected[0] - expected[1]).abs().max()) > 0.1
    model.adapters.load("adapter", folder)
    model.set_lora_adapter_for_cache("a", "adapter")
    for row, want in zip(forward(model, {"a": tokens(20), "base": tokens(20)}), expected, strict=True):
        assert_same_logits(row, want)


@pytest.mark.parametrize(
    ("family", "targets", "change", "message"),
    [
        ("gpt_oss", ["q_proj"], {"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters = "),
        ("gpt_oss", ["q_proj"], "mlp.experts.down_proj", r"adapters of model\.layers\.0\.mlp\.experts\.down_proj"),
        ("qwen3_moe", ["gate_proj"], {}, r"adapters of model\.layers\.0\.mlp\.experts\.0\.gate_proj"),
        ("olmo_hybrid", ["q_proj"], {}, r"adapters of model\.layers\.0\.linear_attn\.q_proj"),
        ("qwen3_next", ["in_proj_qkvz"], {}, r"target_modules 'in_proj_qkvz'"),
    ],
)
def test_projections_that_take_none(
    family: str, targets: list[str], change: dict[str, Any] | str, message: str, tmp_path: Path
) -> None:
    """Neither by settings nor by tensors."""
    base = tmp_path / "base"
    save_checkpoint(FAMILIES[family], base)
    folder = Adapter(targets).save(tmp_path / "adapter", base, **({} if isinstance(change, str) else change))
    model = load_model(base)
    if isinstance(change, str):
        model.adapters.load("sound", folder)
        name = f"base_model.model.model.layers.0.{change}.lora_A.weight"
        edit_tensors(folder, lambda t: t.update({name: torch.ones(4, 96)}), ADAPTER)
    with pytest.raises(UnsupportedError, match=message):
        model.adapters.load("a", folder)


@pytest.mark.parametrize("setting", ["rank_pattern", "layers_to_transform", "target_modules"])
def test_settings_of_single_modules(setting: str, llama_folder: Path, tmp_path: Path) -> None:
    """Another rank and alpha for one projection; one layer of two; a pattern of names. What was left out is not asked
    for."""
    settings = {
        "rank_pattern": {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"self_attn.q_proj": 9}},
        "layers_to_transform": {"layers_to_transform": [1]},
        "target_modules": {"target_modules": r".*\.(q|v)_proj"},
    }[setting]
    adapter = Adapter(("q_proj", "v_proj"), rank=4, alpha=8)
    folder = adapter.save(tmp_path / "adapter", llama_folder, **settings)

    def change(tensors: Tensors, scale: float = 1.0) -> None:
        for name in list(tensors):
            if setting == "layers_to_transform" and "layers.1" not in name:
                del tensors[name]
            elif setting == "rank_pattern" and "q_proj" in name:
                tensors[name] = tensors[name][:3] if "lora_A" in name else tensors[name][:, :3] * scale

    reference = Path(shutil.copytree(folder, tmp_path / "reference"))
    edit_tensors(folder, change, ADAPTER)
    edit_tensors(reference, partial(change, scale=1.5), ADAPTER)  # 9 / 3 is 8 / 4 times 1.5
    want = load_model(adapter.merge(reference, llama_folder, tmp_path / "merged"), **SIZES)
    model = load_model(llama_folder, **SIZES)
    model.adapters.load("a", folder)
    assert_same_logits(run(model, "a", "a", tokens(12)), want.prefill("a", tokens(12)))


Q_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def _config(**settings: object) -> Callable[[Path], None]:
    return lambda folder: edit_config(folder, name="adapter_config.json", **settings)


def _tensors(change: Callable[[Tensors], object]) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, change, ADAPTER)


def _without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _pickled(folder: Path) -> None:
    (folder / ADAPTER).rename(folder / "adapter_model.bin")


def _truncated(folder: Path) -> None:
    (folder / ADAPTER).write_bytes((folder / ADAPTER).read_bytes()[:-8])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (_without("adapter_config.json"), CheckpointError, r"adapter_config\.json: missing"),
        (_without(ADAPTER), CheckpointError, r"adapter_model\.safetensors: missing"),
        (_pickled, CheckpointError, r"adapter_model\.bin is pickled"),
        (_truncated, CheckpointError, "unreadable or truncated"),
        (_config(r=5), CheckpointError, r"lora_A: shape \[4, 64\] in .*, expected \[5, 64\] for rank 5"),
        (_config(peft_type="LOHA"), UnsupportedError, "peft_type = 'LOHA'"),
        (_config(use_dora=True), UnsupportedError, "use_dora = True"),
        (_config(bias="all"), UnsupportedError, "bias = 'all'"),
        (_config(some_new_setting=1), UnsupportedError, "some_new_setting = 1"),
        (_config(init_lora_weights="pissa"), UnsupportedError, "init_lora_weights 'pissa'"),
        (_config(target_modules=["q_proj", "lm_head"]), UnsupportedError, "target_modules 'lm_head'"),
        (_config(target_modules=["q_proj", "k_proj"]), CheckpointError, "k_proj: no tensors"),
        (_tensors(lambda t: t.pop(Q_A)), CheckpointError, "q_proj: no lora_A in"),
        (_tensors(lambda t: t.update({Q_A: t[Q_A].int()})), CheckpointError, "dtype I32"),
        (_tensors(lambda t: t.update({Q_A.replace("rs.0", "rs.7"): t[Q_A]})), CheckpointError, "the model has no"),
        (_tensors(lambda t: t.update({Q_A.replace("A.weight", "E"): t[Q_A]})), CheckpointError, "unexpected tensor"),
        (_tensors(lambda t: t.update({Q_A.replace("q_proj", "gate"): t[Q_A]})), UnsupportedError, "self_attn.gate"),
        (_tensors(dict.clear), CheckpointError, "no tensors"),
    ],
)
def test_malformed_adapters_are_refused(
    change: Callable[[Path], None], error: type[PagedError], message: str, llama_folder: Path, tmp_path: Path
) -> None:
    """By name, and nothing is loaded; before the change it would have been."""
    model = load_model(llama_folder, **SIZES)
    folder = Adapter(("q_proj", "v_proj")).save(tmp_path / "adapter", llama_folder)
    model.adapters.load("sound", folder)
    change(folder)
    with pytest.raises(error, match=message):
        model.adapters.load("a", folder)
    assert model.adapters.names() == ("sound",)


def test_names_slots_and_ranks(model: PagedCausalLM, folders: dict[str, Path], llama_folder: Path) -> None:
    for name, message in (("all", "'all': already loaded"), ("more", "3 are loaded"), ("", "non-empty")):
        with pytest.raises(InvalidInputError, match=message):
            model.adapters.load(name, folders["all"])
    small = load_model(llama_folder, max_lora_rank=8)
    with pytest.raises(InvalidInputError, match="rank 9, expected at most max_lora_rank 8"):
        small.adapters.load("rslora", folders["rslora"])
    small.adapters.load("all", folders["all"])


@pytest.mark.parametrize("rslora", [False, True])
def test_adapters_that_peft_saved(rslora: bool, llama_folder: Path, tmp_path: Path) -> None:
    """Against PEFT's own forward, and its merged model, in one batch with the base model."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    model = load_model(llama_folder, **SIZES)
    ids, expected = tokens(12), {}
    subsets = {"attention": ALL[:4], "mlp": ALL[4:], "q": ("q_proj",)}
    for rank, (name, targets) in enumerate(subsets.items(), start=3):
        config = {"r": rank, "target_modules": list(targets), "use_rslora": rslora, "init_lora_weights": False}
        base = AutoModelForCausalLM.from_pretrained(llama_folder)
        theirs = peft.get_peft_model(base, peft.LoraConfig(lora_alpha=7, **config)).eval()
        theirs.save_pretrained(tmp_path / name)
        beside, expected[name] = logits_of(theirs, ids)[-1], logits_of(theirs.merge_and_unload(), ids)[-1]
        assert_same_logits(beside, expected[name])
        model.adapters.load(name, tmp_path / name)
        model.set_lora_adapter_for_cache(name, name)
    rows = forward(model, dict.fromkeys((*subsets, "base"), ids))
    for row, name in zip(rows, subsets, strict=False):
        assert_same_logits(row, expected[name])
    plain = load_model(llama_folder, **SIZES)
    assert torch.equal(rows[-1], forward(plain, dict.fromkeys(range(4), ids))[-1])


def test_layers_of_one_size_and_other_parts_are_bound_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 rows each, in one part, two and three: what launches an adapter depends on its parts."""
    monkeypatch.setenv("PAGED_BACKEND", "triton")
    parts: tuple[dict[str, int], ...] = ({"q": 32, "k": 16, "v": 16}, {"gate": 32, "up": 32}, {"o": 64})
    layers = nn.ModuleList(Linear(16, each) for each in parts)
    batch = LoraBatch.group(torch.tensor([1, -1, 0], dtype=torch.int32))
    x, out = torch.randn(3, 16), torch.randn(3, 64)
    share_bound(layers)
    for layer, sizes in zip(layers, parts, strict=True):
        count = len(sizes)
        ranks, scales = torch.full((2, count), 4, dtype=torch.int32), torch.rand(2, count)
        a, b = torch.randn(2, count, 4, 16), torch.randn(2, 4, 64)
        weights = LoraWeights(a, b, ranks, scales, tuple(sizes.values()))
        expected = add_lora(out.clone(), x, weights, batch)
        assert torch.equal(layer.add_lora(out.clone(), x, weights, batch=batch), expected)
