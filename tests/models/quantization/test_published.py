"""Quantised checkpoints as the Hub has them: inspected, loaded, and compared with transformers on unpacked weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paged.errors import UnsupportedError
from paged.models.parallel.share import Share
from paged.serving.command_line.checkpoint_summary import summarize
from tests.models.edits import WEIGHTS, Tensors, edit_config, edit_tensors
from tests.models.families import PACKABLE, Families, logits_of, save_checkpoint
from tests.models.parallel.parts import load_part
from tests.models.published_settings.quantized import BASES, PUBLISHED
from tests.models.quantization.checkpoints import PROMPT, Folders, assert_as_unpacked, load, packed_weights, write
from tests.models.quantization.packers import FORMATS, rounded
from tests.tolerance import assert_rounded_alike


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    families, folder = Families({**PACKABLE.data, **BASES}), tmp_path_factory.mktemp("bases")
    names = {one.base for one in PUBLISHED.values()}
    for name in names:
        save_checkpoint(families[name], folder / name)
    return {name: folder / name for name in names}


def _theirs(plain: Path, paths: set[str], how: str) -> torch.Tensor:
    """transformers' last logits, with what the projections at `paths` multiply rounded."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")
    for path, module in model.named_modules():
        if how and isinstance(module, torch.nn.Linear) and path in paths:
            module.register_forward_pre_hook(lambda _, args: (rounded(args[0], how), *args[1:]))
    return logits_of(model.eval(), PROMPT)[-1]


@pytest.mark.parametrize("source", PUBLISHED)
def test_published(source: str, bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = PUBLISHED[source]
    monkeypatch.setitem(FORMATS, source, one)
    folders = write(source, bases[one.base], tmp_path)
    if one.beside:
        edit_config(folders.packed, "quantization_config")
        (folders.packed / "hf_quant_config.json").write_text(json.dumps({one.beside: one.config}))
    ranks: Any = [Share(0, size) for size in (2, 4)]
    summary = summarize(folders.packed, spreads=ranks)
    assert summary["supported"], summary["reason"]
    model = load(folders.packed)
    assert summary["weight_bytes"] == model.parameter_bytes()
    for share, promised in zip(ranks, summary["ranks"], strict=True):
        reason = None
        try:
            load_part(folders.packed, share)
        except UnsupportedError as error:
            reason = str(error)
        assert promised["reason"] == reason
    got, plain = model.prefill("a", PROMPT), _theirs(folders.plain, set(), "")
    # Parts of one product have one path here, and their own there.
    paths = {f"model.{path.rpartition('.')[0]}.{end}" for path in packed_weights(model) for end in _PROJECTIONS}
    want = _theirs(folders.plain, paths, one.rounds)
    has_experts = one.base in ("experts", "minimax_m2", "deepseek_v3")  # whose input transformers does not show
    assert_rounded_alike(got, want, plain, part=1.0 if has_experts else 0.5)


# kv_b_proj is read as a matrix, so its input is not rounded.
_PROJECTIONS = [f"{name}_proj" for name in ("q", "q_a", "q_b", "k", "v", "o", "gate", "up", "down")]
_PROJECTIONS.append("kv_a_proj_with_mqa")


@pytest.mark.parametrize("folders", ["float-quantized rows", "modelopt FP8", "awq"], indirect=True)
def test_what_is_stored_plain_is_plain(folders: Folders) -> None:
    """Whatever the configuration packs: the head of ModelOpt's files, or all but a class of modules."""
    changed = load_file(folders.plain / WEIGHTS)
    plain = {name: one for name, one in changed.items() if "self_attn.o_proj" in name or "down_proj" in name}
    assert len(plain) == 2

    def edit(tensors: Tensors) -> None:
        for name in plain:
            for stored in [one for one in tensors if one.startswith(name.removesuffix("weight"))]:
                del tensors[stored]
        tensors.update(plain)

    edit_tensors(folders.packed, edit)
    assert summarize(folders.packed)["weight_bytes"] == assert_as_unpacked(folders).parameter_bytes()
