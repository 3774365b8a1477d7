"""Checkpoints that `paged quantize` writes load here and in transformers, with the logits of what they stand for."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paged.errors import CheckpointError, InvalidInputError, PagedError, UnsupportedError
from paged.kernels.cpu.products import this_cpu
from paged.kernels.cpu.quantization.packed_product import CpuProduct
from paged.models import quantized_writer
from paged.models.paged_lm import PagedCausalLM
from paged.models.quantization.packed_weights import CpuProducts, PackedWeights
from paged.models.quantized_writer import quantize_checkpoint, round_weight
from paged.serving.command_line import cli
from paged.serving.command_line.checkpoint_summary import summarize
from tests.models.edits import WEIGHTS
from tests.models.families import FAMILIES, PACKABLE, assert_same_logits, save_checkpoint
from tests.models.quantization.checkpoints import PROMPT, Folders, assert_as_unpacked, load, packed_weights

# The names that other tests have for them.
FORMATS = {"int4": "pack-quantized", "int8": "int-quantized rows", "fp8": "float-quantized rows"}


@pytest.fixture(scope="module")
def packable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    save_checkpoint(PACKABLE["llama"], folder)
    return folder


def _products(model: PagedCausalLM) -> dict[str, tuple[CpuProduct, ...]]:
    """By the paths of their modules."""
    modules = model.network.named_modules()
    return {path: module.products for path, module in modules if isinstance(module, CpuProducts)}


def assert_alike(model: PagedCausalLM, plain: PagedCausalLM) -> None:
    """The logits of random models of such sizes move by a quarter, with experts by half."""
    got, want = (one.prefill("compared", PROMPT) for one in (model, plain))
    assert 0.75 < torch.cosine_similarity(got, want, 0) < 1 - 1e-6


@pytest.mark.parametrize("form", FORMATS)
def test_rounds_to_the_nearest_code(form: str) -> None:
    weight = torch.randn(48, 256).bfloat16()
    weight[3] = 0
    tensors = round_weight(weight, form, 64)
    assert tensors["weight_scale"].dtype == weight.dtype
    scale = tensors["weight_scale"].double().repeat_interleave(64 if form == "int4" else 256, 1)
    if form == "int4":
        words = tensors["weight_packed"].view(torch.uint8)
        codes = torch.stack([words & 15, words >> 4], -1).flatten(1).double() - 8
    else:
        codes = tensors["weight"].double()
    off = (codes * scale - weight.double()).abs()
    assert (off[3] == 0).all()
    if form == "fp8":
        assert (off <= weight.double().abs() / 16 + scale * 2**-9).all()
    else:  # but for what lies beyond the largest code
        assert (off <= scale / 2 * (1 + 1e-9))[codes.abs() < (7 if form == "int4" else 127)].all()
        assert off.mean() < scale.mean() / 3.5


@pytest.mark.parametrize("form", FORMATS)
def test_a_written_checkpoint_gives_transformers_logits(form: str, packable: Path, tmp_path: Path) -> None:
    """Ours are those of the weights that transformers reads, with activations rounded as the configuration says."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    out, unpacked = tmp_path / "out", tmp_path / "unpacked"
    sizes = quantize_checkpoint(packable, out, form, group_size=64)
    with torch.compiler.set_stance("force_eager"):
        theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        theirs.hf_quantizer.compressor.decompress_model(theirs)
    state = theirs.state_dict()
    unpacked.mkdir()
    shutil.copy(packable / "config.json", unpacked)
    save_file({name: state[name].float().contiguous() for name in load_file(packable / WEIGHTS)}, unpacked / WEIGHTS)
    model = assert_as_unpacked(Folders(FORMATS[form], out, unpacked))
    assert len(packed_weights(model)) == 4 * model.config.num_layers
    assert_alike(model, load(packable))
    summary = summarize(out)
    assert summary["supported"]
    assert summary["parameters"] == summarize(packable)["parameters"]
    files = [load_file(file) for file in sorted(out.glob("*.safetensors"))]
    assert sizes["after"] == sum(tensor.nbytes for file in files for tensor in file.values()) < sizes["before"]
    layers = [{name.split(".")[2] for name in file if ".layers." in name} for file in files]
    assert all(len(names) <= 1 for names in layers)


def test_experts_one_by_one_and_routers(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    save_checkpoint(PACKABLE["experts"], base)
    quantize_checkpoint(base, tmp_path / "out", "int4", group_size=32)
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert "lm_head" in ignored
    assert any(name.endswith("mlp.gate") for name in ignored)
    assert_alike(load(tmp_path / "out"), load(base))


@pytest.mark.parametrize("form", ["int4", "int8"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_head_is_written_in_int8(form: str, tied: bool, tmp_path: Path) -> None:
    """transformers gives the logits of the same head, but for its plain activations in int8."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    (base := tmp_path / "base").mkdir()
    config = PACKABLE["llama"]
    config.tie_word_embeddings = tied
    save_checkpoint(config, base)
    assert ("lm_head.weight" in load_file(base / WEIGHTS)) is not tied
    quantize_checkpoint(base, tmp_path / "out", form, group_size=64, head=True)
    model = load(tmp_path / "out", dtype="float32")
    assert isinstance(model.network.lm_head.packed, PackedWeights)
    with torch.compiler.set_stance("force_eager"):
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
        with torch.no_grad():
            want = theirs(torch.tensor([PROMPT])).logits[0, -1]
    assert torch.cosine_similarity(model.prefill("a", PROMPT), want, 0) > (0.9999 if form == "int4" else 0.995)
    assert theirs.lm_head.quantization_scheme.weights.num_bits == 8
    assert_alike(model, load(base))


def test_nothing_is_left_of_a_failed_call(packable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"

    def failing(*_: object, **__: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(quantized_writer, "save_file", failing)
        with pytest.raises(OSError, match="disk full"):
            quantize_checkpoint(packable, out, "int8")
    for form, size, error, message in (
        ("int3", 128, InvalidInputError, "format: 'int3'"),
        ("int4", 48, InvalidInputError, "group_size: 48, expected a multiple of 32"),
        ("int4", 224, CheckpointError, "expected a multiple of the group size 224"),
    ):
        with pytest.raises(error, match=message):
            quantize_checkpoint(packable, out, form, group_size=size)
    assert list(tmp_path.iterdir()) == []
    quantize_checkpoint(packable, out, "int8")
    for source, target, message in ((packable, out, "exists"), (out, tmp_path / "again", "expected plain weights")):
        with pytest.raises(PagedError, match=message):
            quantize_checkpoint(source, target, "int8")


def test_groups_fit_the_columns(tmp_path: Path) -> None:
    """By default the largest of 128, 64 and 32 columns that rows are whole numbers of, as in loading."""
    save_checkpoint(FAMILIES["llama"], tmp_path / "base")  # rows of 64, 96 and 128
    quantize_checkpoint(tmp_path / "base", tmp_path / "out", "int4")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["weights"]["group_size"] == 32


@pytest.mark.parametrize("name", ["llama", "experts"])
@pytest.mark.parametrize("form", ["int4", "int8"])
def test_rounding_while_loading(form: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As written checkpoints, in less than 0.4 of the memory; on what a CPU does not multiply so it is refused."""
    base = tmp_path / "base"
    base.mkdir()
    save_checkpoint(PACKABLE[name], base)
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    plain, model = load(base), load(base, quantization=form)
    assert_alike(model, plain)
    assert model.num_parameters() == plain.num_parameters()
    quantize_checkpoint(base, tmp_path / "out", form)
    written = load(tmp_path / "out")
    written.pack()
    model.pack()
    stored, rounded = (_products(one) for one in (written, model))
    assert stored.keys() == rounded.keys()
    for path, products in stored.items():
        for mine, theirs in zip(products, rounded[path], strict=True):
            rows = torch.randn(3, mine.columns)
            assert torch.equal(mine(rows), theirs(rows)), path  # one product of the same codes
    assert_same_logits(written.prefill("written", PROMPT), model.prefill("written", PROMPT))
    head_bytes = 2 * plain.network.embed_tokens.nbytes
    if this_cpu().multiplies_int8:
        assert model.parameter_bytes() - head_bytes < 0.4 * (plain.parameter_bytes() - head_bytes)
    monkeypatch.setenv("PAGED_BACKEND", "triton")
    with pytest.raises(UnsupportedError, match="expected plain weights on a CPU"):
        load(base, quantization=form)
    with pytest.raises(InvalidInputError, match="quantization: 'int3'"):
        load(base, quantization="int3")


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """On the bundled checkpoint."""
    text = tmp_path / "text"
    text.write_text("otter: brass lantern; wren: kite; otter: brass lantern. " * 20)
    out = tmp_path / "out"
    arguments = [str(cli.RECALL), "--format", "int8", "--out", str(out), "--perplexity", str(text), "--json"]
    assert cli.main(["quantize", *arguments]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bytes"] < report["bytes_before"]
    assert 0.8 < report["perplexity"] / report["perplexity_before"] < 1.25
    assert cli.main(["inspect", str(out)]) == 0
    assert cli.main(["generate", str(out), "--prompt", "otter: kite; otter:"]) == 0
