"""Adapters in one batch with the base model, against checkpoints into which each was merged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import paged.models.layers.decoder
from paged.batch import UnifiedBatchItem
from paged.errors import CheckpointError, InvalidInputError, PagedError, UnsupportedError
from paged.models.paged_lm import PagedCausalLM
from paged.models.registry import load_model
from tests.models.families import FAMILIES, assert_same_logits, save_checkpoint, tokens
from tests.models.lora.folders import Adapter

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTERS = {
    "all": Adapter(ALL, seed=1),
    "rslora": Adapter(("q_proj", "v_proj"), rank=9, alpha=5, rslora=True, seed=2),
    "large": Adapter(("k_proj", "up_proj", "down_proj"), rank=256, alpha=32, seed=3),
}
PROMPTS = {
    name: tokens(length, seed) for seed, (name, length) in enumerate({"all": 21, "rslora": 9, "large": 5}.items())
}
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
    return {None: load_model(llama_folder, **SIZES)} | {name: load_model(path, **SIZES) for name, path in paths.items()}


@pytest.fixture
def want(merged: dict[str | None, PagedCausalLM]) -> Callable[[str | None, list[int]], torch.Tensor]:
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


_fast = pytest.mark.usefixtures("_fast")
Want = Callable[[str | None, list[int]], torch.Tensor]


@pytest.mark.usefixtures("backend")
def test_three_adapters_and_base_in_one_batch(model: PagedCausalLM, want: Want) -> None:
    """A decode step, a chunk that goes on and new prompts, each row as of its own merged model."""
    for name in PROMPTS:
        model.set_lora_adapter_for_cache(name, name)
    model.unified_forward(
        [UnifiedBatchItem("all", PROMPTS["all"][:20]), UnifiedBatchItem("rslora", PROMPTS["rslora"][:4])]
    )
    rows = model.unified_forward(
        [
            UnifiedBatchItem("all", PROMPTS["all"][20:], pos_offset=20),
            UnifiedBatchItem("base", tokens(17, 5)),
            UnifiedBatchItem("rslora", PROMPTS["rslora"][4:], pos_offset=4),
            UnifiedBatchItem("large", PROMPTS["large"]),
        ]
    )
    assert_same_logits(rows[0], want("all", PROMPTS["all"]))
    assert_same_logits(rows[1], want(None, tokens(17, 5)))
    assert_same_logits(rows[2], want("rslora", PROMPTS["rslora"]))
    assert_same_logits(rows[3], want("large", PROMPTS["large"]))
    assert (want("all", PROMPTS["large"]) - want(None, PROMPTS["large"])).abs().max() > 0.1


@pytest.mark.usefixtures("backend")
def test_base_rows_keep_their_bits(model: PagedCausalLM, llama_folder: Path) -> None:
    """Beside adapters' rows, and in a batch of their own."""
    plain = load_model(llama_folder, **SIZES)
    prompts = [tokens(17, 5), PROMPTS["large"], tokens(3, 6)]
    model.set_lora_adapter_for_cache(1, "all")
    mixed, without = (
        one.unified_forward([UnifiedBatchItem(i, prompt) for i, prompt in enumerate(prompts)]) for one in (model, plain)
    )
    assert mixed[1] is not None
    assert not torch.equal(mixed[1], without[1])
    for row in (0, 2):
        assert torch.equal(mixed[row], without[row])
    assert torch.equal(model.prefill("alone", prompts[0]), plain.prefill("alone", prompts[0]))


@_fast
def test_no_kernel_runs_without_a_row_for_it(model: PagedCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    run = paged.models.layers.decoder.add_lora
    monkeypatch.setattr(paged.models.layers.decoder, "add_lora", lambda *args: (calls.append(1), run(*args))[1])
    model.prefill("base", tokens(5))
    assert calls == []
    model.set_lora_adapter_for_cache("a", "rslora")
    model.unified_forward([UnifiedBatchItem("a", tokens(5)), UnifiedBatchItem("b", tokens(5))])
    assert len(calls) == 2 * 4  # a pair of products a linear layer that any adapter changes


@_fast
def test_a_slot_holds_nothing_of_its_last_adapter(
    model: PagedCausalLM, folders: dict[str, Path], llama_folder: Path, want: Want
) -> None:
    """One of a larger rank and of more layers goes; the others stay as they were meanwhile."""
    model.set_lora_adapter_for_cache("a", "rslora")
    model.prefill("a", PROMPTS["rslora"][:8])
    model.adapters.unload("all")
    model.adapters.unload("large")
    stacks = [linear.adapters for linear in model.network.modules() if getattr(linear, "adapters", None)]
    model.adapters.load("again", folders["rslora"])
    model.set_lora_adapter_for_cache("b", "again")
    assert_same_logits(model.prefill("b", PROMPTS["large"]), want("rslora", PROMPTS["large"]))
    assert_same_logits(model.decode("a", PROMPTS["rslora"][8], 8), want("rslora", PROMPTS["rslora"]))
    assert stacks == [linear.adapters for linear in model.network.modules() if getattr(linear, "adapters", None)]


@_fast
def test_prefixes_are_not_shared_between_adapters(model: PagedCausalLM, want: Want) -> None:
    prompt = tokens(20)
    manager = model.kv_manager
    for name in ("all", "rslora", None):
        handle = manager.allocate(f"{name} first", token_ids=prompt, namespace=name)
        assert handle.num_cached_tokens == 0
        model.set_lora_adapter_for_cache(f"{name} first", name)
        assert_same_logits(model.prefill(f"{name} first", prompt), want(name, prompt))
    for name in ("all", "rslora", None):
        handle = manager.allocate(f"{name} second", token_ids=prompt, namespace=name)
        assert handle.num_cached_tokens == 16
        assert_same_logits(model.prefill(f"{name} second", prompt[16:]), want(name, prompt))


@_fast
@pytest.mark.parametrize("namespace", ["name", ("name", "tenant")])
def test_another_adapter_of_the_same_name_finds_no_old_prefix(
    namespace: str | tuple[str, str], model: PagedCausalLM, folders: dict[str, Path], want: Want
) -> None:
    prompt, manager = tokens(20), model.kv_manager
    model.adapters.unload("large")
    for source in ("all", "rslora"):
        model.adapters.load("name", folders[source])
        for cached in (0, 16):
            handle = manager.allocate("a", token_ids=prompt, namespace=namespace)
            assert handle.num_cached_tokens == cached
            model.set_lora_adapter_for_cache("a", "name")
            assert_same_logits(model.prefill("a", prompt[cached:]), want(source, prompt))
            model.release("a")
        model.adapters.unload("name")
    manager.check_integrity()


@_fast
def test_what_ran_under_the_name_before_is_not_found(
    model: PagedCausalLM, folders: dict[str, Path], want: Want
) -> None:
    """A tenant may have had an adapter's name as its namespace."""
    prompt = tokens(20)
    model.adapters.unload("large")
    model.kv_manager.allocate("a", token_ids=prompt, namespace="name")
    model.prefill("a", prompt)
    with pytest.raises(InvalidInputError, match="'name': the namespace of 1 sequences without it, first 'a'"):
        model.adapters.load("name", folders["all"])
    model.release("a")
    model.adapters.load("name", folders["all"])
    assert model.kv_manager.allocate("a", token_ids=prompt, namespace="name").num_cached_tokens == 0
    assert_same_logits(model.prefill("a", prompt), want("all", prompt))


@_fast
def test_fork_keeps_the_adapter(model: PagedCausalLM, want: Want) -> None:
    prompt = PROMPTS["all"]
    model.set_lora_adapter_for_cache("a", "all")
    model.prefill("a", prompt[:10])
    handle = model.kv_manager.get_handle("a")
    assert handle is not None
    model.kv_manager.fork(handle, "b")
    model.truncate_kv("a", 7)
    assert_same_logits(model.prefill("b", prompt[10:]), want("all", prompt))
    assert_same_logits(model.prefill("a", prompt[7:]), want("all", prompt))


@_fast
def test_a_sequence_keeps_the_adapter_it_began_with(model: PagedCausalLM) -> None:
    model.set_lora_adapter_for_cache("a", "all")
    model.prefill("a", tokens(5))
    model.prefill("base", tokens(5))
    for cache_id, name in (("a", "rslora"), ("a", None), ("base", "all")):
        with pytest.raises(InvalidInputError, match=f"adapter {name!r} for cache {cache_id!r}: its namespace"):
            model.set_lora_adapter_for_cache(cache_id, name)
    model.set_lora_adapter_for_cache("a", "all")
    model.set_lora_adapter_for_cache("base", None)
    with pytest.raises(InvalidInputError, match=r"'poetry': not loaded, loaded are \['all', 'rslora', 'large'\]"):
        model.set_lora_adapter_for_cache("new", "poetry")
    assert model.kv_manager.get_handle("new") is None


@_fast
def test_unload_in_use_is_refused(model: PagedCausalLM) -> None:
    model.set_lora_adapter_for_cache("a", "all")
    model.prefill("a", tokens(5))
    with pytest.raises(InvalidInputError, match="'all': 1 sequences hold it, first 'a'"):
        model.adapters.unload("all")
    model.adapters.unload("large")
    model.release("a")
    model.adapters.unload("all")
    assert model.adapters.names() == ("rslora",)
    with pytest.raises(InvalidInputError, match="'all': not loaded"):
        model.adapters.unload("all")


@_fast
def test_metrics(model: PagedCausalLM, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model.set_lora_adapter_for_cache("a", "all")
    model.prefill("a", tokens(5))
    model.decode("a", 1, 5)
    model.prefill("base", tokens(5))
    with monkeypatch.context() as patch:
        patch.setattr(model.network, "logits", lambda hidden: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            model.decode("a", 1, 6)
    metrics = model.lora_metrics_snapshot()
    json.dumps(metrics)
    sizes = {"q": 128 + 64, "k": 64 + 64, "v": 64 + 64, "o": 64 + 128, "gate": 64 + 96, "up": 64 + 96, "down": 96 + 64}
    assert metrics["adapters"]["all"] == {
        "slot": 0,
        "rank": 4,
        "bytes": 2 * 4 * sum(sizes.values()) * 4,
        "sequences": 1,
        "tokens": 6,
    }
    assert metrics["adapters"]["large"]["tokens"] == 0
    # Inputs once a part, outputs together; two layers, three slots of rank 256, 4 bytes.
    widths = (3 * 64 + 256) + (128 + 64) + (2 * 64 + 192) + (96 + 64)
    assert metrics["reserved_bytes"] == 2 * 3 * 256 * 4 * widths
    assert (metrics["max_loras"], metrics["max_lora_rank"], metrics["free_slots"]) == (3, 256, 0)
    model.adapters.unload("large")
    assert model.lora_metrics_snapshot()["free_slots"] == 1


@_fast
def test_attention_of_experts_can_be_adapted(tmp_path: Path) -> None:
    """Beside a mixture of experts, whose own adapters are refused."""
    base = tmp_path / "base"
    save_checkpoint(FAMILIES["qwen3_moe_with_dense_layer"], base)
    adapter = Adapter(("q_proj", "o_proj"), seed=4)
    folder = adapter.save(tmp_path / "adapter", base)
    model, merged = (load_model(path, **SIZES) for path in (base, adapter.merge(folder, base, tmp_path / "merged")))
    model.adapters.load("a", folder)
    model.set_lora_adapter_for_cache("a", "a")
    assert_same_logits(model.prefill("a", tokens(12)), merged.prefill("a", tokens(12)))
    experts = Adapter(("gate_proj",)).save(tmp_path / "experts", base)
    with pytest.raises(UnsupportedError, match=r"adapters of model\.layers\.1\.mlp\.experts\.0\.gate_proj"):
        model.adapters.load("experts", experts)


@_fast
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
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    if setting == "rank_pattern":
        for name in [name for name in tensors if "q_proj" in name]:
            tensors[name] = (tensors[name][:3] if "lora_A" in name else tensors[name][:, :3]).contiguous()
    elif setting == "layers_to_transform":
        tensors = {name: tensor for name, tensor in tensors.items() if "layers.1" in name}
    save_file(tensors, file)
    if setting == "rank_pattern":  # 9 / 3 is 8 / 4 times 1.5
        scaled = {name: 1.5 * tensor if "q_proj.lora_B" in name else tensor for name, tensor in tensors.items()}
        reference = tmp_path / "reference"
        reference.mkdir()
        save_file(scaled, reference / "adapter_model.safetensors")
        want = load_model(adapter.merge(reference, llama_folder, tmp_path / "merged"), **SIZES)
    else:
        want = load_model(adapter.merge(folder, llama_folder, tmp_path / "merged"), **SIZES)
    model = load_model(llama_folder, **SIZES)
    model.adapters.load("a", folder)
    model.set_lora_adapter_for_cache("a", "a")
    assert_same_logits(model.prefill("a", tokens(12)), want.prefill("a", tokens(12)))


Q_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def _config(**settings: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | settings))

    return change


def _tensors(edit: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        tensors = load_file(file)
        edit(tensors)
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, file)

    return change


def _without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _pickled(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def _truncated(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


@_fast
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (_without("adapter_config.json"), CheckpointError, r"adapter_config\.json: missing"),
        (_without("adapter_model.safetensors"), CheckpointError, r"adapter_model\.safetensors: missing"),
        (_pickled, CheckpointError, r"adapter_model\.bin is pickled"),
        (_truncated, CheckpointError, "unreadable or truncated"),
        (_config(r=5), CheckpointError, r"lora_A: shape \[4, 64\] in .*, expected \[5, 64\] for rank 5"),
        (_config(r="4"), CheckpointError, "r = '4', expected a positive integer"),
        (_config(lora_alpha=None), CheckpointError, "lora_alpha is missing"),
        (_config(peft_type="LOHA"), UnsupportedError, "peft_type 'LOHA'"),
        (_config(use_dora=True), UnsupportedError, "use_dora = True"),
        (_config(bias="all"), UnsupportedError, "bias 'all'"),
        (_config(lora_bias=True), UnsupportedError, "lora_bias = True"),
        (_config(modules_to_save=["lm_head"]), UnsupportedError, r"modules_to_save = \['lm_head'\]"),
        (_config(fan_in_fan_out=True), UnsupportedError, "fan_in_fan_out"),
        (_config(layer_replication=[[0, 2]]), UnsupportedError, "layer_replication"),
        (_config(some_new_setting=1), UnsupportedError, "some_new_setting = 1"),
        (_config(init_lora_weights="pissa"), UnsupportedError, "init_lora_weights 'pissa'"),
        (_config(target_modules=["q_proj", "lm_head"]), UnsupportedError, "target_modules 'lm_head'"),
        (_config(target_modules=["q_proj", "k_proj"]), CheckpointError, "k_proj: no tensors"),
        (_config(rank_pattern={".*q_proj": 4}), UnsupportedError, "rank_pattern"),
        (_tensors(lambda t: t.pop(Q_A)), CheckpointError, "q_proj: no lora_A in"),
        (_tensors(lambda t: t.update({Q_A: t[Q_A][:3]})), CheckpointError, r"lora_A: shape \[3, 64\]"),
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


@_fast
def test_names_slots_and_ranks(model: PagedCausalLM, folders: dict[str, Path], llama_folder: Path) -> None:
    for name, message in (("all", "'all': loaded already"), ("more", "all 3 slots are taken"), ("", "not empty")):
        with pytest.raises(InvalidInputError, match=message):
            model.adapters.load(name, folders["all"])
    small = load_model(llama_folder, max_lora_rank=8)
    with pytest.raises(InvalidInputError, match="rank 9, expected at most max_lora_rank 8"):
        small.adapters.load("rslora", folders["rslora"])
    small.adapters.load("all", folders["all"])
    for sizes in ({"max_loras": 0}, {"max_lora_rank": 0}):
        with pytest.raises(InvalidInputError, match=f"{next(iter(sizes))}: 0, expected an integer in 1"):
            load_model(llama_folder, **sizes)


@_fast
@pytest.mark.parametrize("rslora", [False, True])
def test_adapters_that_peft_saved(rslora: bool, llama_folder: Path, tmp_path: Path) -> None:
    """Against PEFT's own forward, and its merged model, in one batch with the base model."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    model = load_model(llama_folder, **SIZES)
    ids, expected = tokens(12), {}
    subsets = {
        "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
        "mlp": ("gate_proj", "up_proj", "down_proj"),
        "q": ("q_proj",),
    }
    for rank, (name, targets) in enumerate(subsets.items(), start=3):
        config = peft.LoraConfig(
            r=rank, lora_alpha=7, target_modules=list(targets), use_rslora=rslora, init_lora_weights=False
        )
        theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(llama_folder), config).eval()
        theirs.save_pretrained(tmp_path / name)
        with torch.no_grad():
            beside = theirs(torch.tensor([ids])).logits[0, -1]
            expected[name] = theirs.merge_and_unload()(torch.tensor([ids])).logits[0, -1]
        assert_same_logits(beside, expected[name])
        model.adapters.load(name, tmp_path / name)
        model.set_lora_adapter_for_cache(name, name)
    rows = model.unified_forward([UnifiedBatchItem(name, ids) for name in (*subsets, "base")])
    for row, name in zip(rows, subsets, strict=False):
        assert_same_logits(row, expected[name])
    assert torch.equal(
        rows[-1], load_model(llama_folder, **SIZES).unified_forward([UnifiedBatchItem(i, ids) for i in range(4)])[-1]
    )
