"""Draft heads: their logits against dense PyTorch, published names, and checkpoints that do not fit."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from examples.train_draft_head import run_head, target_states
from paged import CheckpointError, LlmExecutor, UnifiedBatch, UnifiedBatchItem, UnsupportedError
from paged.models.paged_lm import PagedCausalLM
from paged.serving.command_line.cli import RECALL
from tests.models.drafts.heads import CONFIG, save_head, save_published
from tests.models.edits import assert_refused, edit_config, edit_tensors
from tests.models.families import FAMILIES, save_checkpoint, tokens
from tests.tolerance import assert_within

KINDS = ["eagle3", "mtp"]


def load(target: Path, draft: str | Path, **options: Any) -> tuple[LlmExecutor, PagedCausalLM]:
    executor = LlmExecutor.from_pretrained(target, draft=draft, num_blocks=64, block_size=8, **options)
    assert isinstance(executor.model, PagedCausalLM)
    return executor, executor.model


class Drafted(NamedTuple):
    """Logits of drafts, each [1, V], and their confidences, if the head has any, each [1]."""

    logits: list[torch.Tensor]
    confidences: list[torch.Tensor | None]


def drafts_after(
    target: Path, draft: str | Path, prompt: list[int], newest: int, count: int, **options: Any
) -> Drafted:
    """The drafts after a prompt and the token after it, each the best."""
    executor, model = load(target, draft, **options)
    for start, end in ((0, 1), (1, 9), (9, len(prompt) - 3)):
        executor.unified_decode(UnifiedBatch([UnifiedBatchItem("a", prompt[start:end], pos_offset=start)]))
    for length in range(len(prompt) - 2, len(prompt) + 1):  # beside wrong tokens that are rolled back, as drafts are
        guesses = [prompt[length - 1], 3, 4]
        executor.unified_decode(UnifiedBatch([UnifiedBatchItem("a", guesses, pos_offset=length - 1)]))
        handle = model.kv_manager.get_handle("a")
        assert handle is not None
        executor.truncate_kv(handle, length)
    assert model.drafts is not None
    drafted = Drafted([], [])
    with torch.no_grad(), model.drafts.drafting([handle], [count]) as steps:
        for _ in range(count):
            logits = steps.logits([0], torch.tensor([newest]))
            drafted.logits.append(logits)
            drafted.confidences.append(steps.confidences())
            newest = int(logits.argmax())
    model.kv_manager.check_integrity()
    assert handle.num_tokens == len(prompt)
    return drafted


@pytest.mark.parametrize("kind", [KINDS[0], pytest.param(KINDS[1], marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    ("kv_cache_dtype", "rotation", "tolerance"),
    [
        ("auto", None, 1e-4),
        pytest.param("auto", "hadamard", 1e-4, marks=pytest.mark.thorough),
        pytest.param("int8", None, 0.4, marks=pytest.mark.thorough),  # rounding K and V moves these logits by 0.13
        pytest.param("int8,nvfp4", None, 3.0, marks=pytest.mark.thorough),  # by 0.8 and 1.3
    ],
)
def test_logits(kind: str, kv_cache_dtype: str, rotation: str | None, tolerance: float, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    save_head(kind, tmp_path)
    prompt, newest = torch.randint(2, 469, (30,), generator=torch.Generator().manual_seed(1)).tolist(), 17
    where = (tmp_path, "mtp") if kind == "mtp" else (RECALL, tmp_path)
    drafted = drafts_after(*where, prompt, newest, 4, kv_cache_dtype=kv_cache_dtype, kv_cache_rotation=rotation)
    assert drafted.confidences == [None] * 4
    weights = load_file(tmp_path / "model.safetensors")
    target = AutoModelForCausalLM.from_pretrained(RECALL, attn_implementation="eager")
    features, _ = target_states(target, torch.tensor([prompt]), kind, weights)
    embedding, ids = target.model.embed_tokens.weight, [*prompt[1:], newest]
    for row in drafted.logits:
        with torch.no_grad():
            hidden, following, _ = run_head(weights, CONFIG, embedding[torch.tensor([ids])], features)
            expected = hidden[:, -1] @ weights.get("lm_head.weight", embedding).T
        assert_within(row, expected, tolerance + 1e-4 * expected.abs())
        features = torch.cat([features, following[:, -1:]], 1)
        ids.append(int(row.argmax()))


@pytest.mark.thorough
def test_norms(tmp_path: Path) -> None:
    """Of all taps together, of each, and of what the head reads after its own draft."""
    from transformers import AutoModelForCausalLM

    save_head("eagle3", tmp_path)
    generator = torch.Generator().manual_seed(2)
    norms = {"input_norm.weight": 192, **{f"fc_norm.{index}.weight": 64 for index in range(3)}}
    weights = {name: 0.5 + torch.rand(size, generator=generator) for name, size in norms.items()}
    edit_tensors(tmp_path, lambda tensors: tensors.update(weights))
    section = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "norm_before_fc": True}
    edit_config(tmp_path, eagle_config=section, fc_norm=True, norm_output=True)
    prompt, newest = torch.randint(2, 469, (30,), generator=generator).tolist(), 17
    drafted = drafts_after(RECALL, tmp_path, prompt, newest, 3)
    weights = load_file(tmp_path / "model.safetensors")
    target = AutoModelForCausalLM.from_pretrained(RECALL, attn_implementation="eager")
    joined, _ = target_states(target, torch.tensor([prompt]), "eagle3", {"fc.weight": torch.eye(192)})
    eps = CONFIG["rms_norm_eps"]
    joined = functional.rms_norm(joined, (192,), weights["input_norm.weight"], eps)
    parts = []
    for index, part in enumerate(joined.split(64, -1)):
        parts.append(functional.rms_norm(part, (64,), weights[f"fc_norm.{index}.weight"], eps))
    features = torch.cat(parts, -1) @ weights["fc.weight"].T
    embedding, ids = target.model.embed_tokens.weight, [*prompt[1:], newest]
    for row in drafted.logits:
        with torch.no_grad():
            hidden, _, _ = run_head(weights, CONFIG, embedding[torch.tensor([ids])], features)
            expected = hidden[:, -1] @ weights["lm_head.weight"].T
        assert_within(row, expected, 1e-4 * (1 + expected.abs()))
        features = torch.cat([features, hidden[:, -1:]], 1)
        ids.append(int(row.argmax()))


@pytest.mark.parametrize(
    "family",
    [
        "glm4_moe",
        "qwen3_5",
        *(
            pytest.param(one, marks=pytest.mark.thorough)
            for one in ("deepseek_v3", "glm4_moe_lite", "hy_v3", "mimo", "qwen3_next")
        ),
    ],
)
def test_published_names(family: str, tmp_path: Path) -> None:
    """Against transformers' layer of the target."""
    model, own = save_published(family, tmp_path)
    names = [*own]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        module = deepcopy(model.model.norm)
        module.weight.data = own[name]
        normed: torch.Tensor = module(x)
        return normed

    prompt, newest = tokens(30, seed=4), 9
    (found,) = drafts_after(tmp_path, "mtp", prompt, newest, 1).logits
    with torch.no_grad():
        hidden = model.model(torch.tensor([prompt])).last_hidden_state
        embedding = own.get("embed_tokens", model.model.embed_tokens.weight)
        pair = norm(embedding[torch.tensor([[*prompt[1:], newest]])], names[0]), norm(hidden, names[1])
        joined = torch.cat(pair[::-1] if family == "mimo" else pair, -1) @ own[names[2]].T
        rotations = model.model.rotary_emb(joined, torch.arange(30)[None])
        # The last row sees all others, so it needs no mask.
        mixed = model.model.layers[1](joined, position_embeddings=rotations, attention_mask=None)
        expected = norm(mixed[:, -1], names[3]) @ own.get("shared_head.head", model.lm_head.weight).T
    assert_within(found, expected, 1e-3 * (1 + expected.abs()))


EDITS: dict[str, tuple[Callable[[Path], object], str, type[Exception]]] = {
    "vocabulary": (lambda folder: edit_config(folder, vocab_size=470), "vocab_size 470, expected 469", CheckpointError),
    "target": (lambda folder: edit_config(folder, target_hidden_size=32), "32, expected 64", CheckpointError),
    "two layers": (lambda folder: edit_config(folder, num_hidden_layers=2), "2, expected 1", CheckpointError),
    "taps": (
        lambda folder: edit_config(folder, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 3]}),
        r"layer_ids \[0, 3\], expected rising numbers of layers up to 2",
        CheckpointError,
    ),
    "default taps": (lambda folder: edit_config(folder, "eagle_config"), "expected rising", CheckpointError),
    "norm": (
        lambda folder: edit_config(folder, norm_before_fc=True),
        "input_norm.weight: missing",
        CheckpointError,
    ),
    "a model": (
        lambda folder: edit_config(folder, architectures=["LlamaForCausalLM"]),
        "known heads are LlamaForCausalLMEagle3",
        UnsupportedError,
    ),
    "missing": (
        lambda folder: edit_tensors(folder, lambda all_: all_.pop("midlayer.hidden_norm.weight")),
        "midlayer.hidden_norm.weight: missing",
        CheckpointError,
    ),
    "unexpected": (
        lambda folder: edit_tensors(folder, lambda all_: all_.update(other=torch.zeros(1))),
        "other: unexpected tensor",
        CheckpointError,
    ),
    "shape": (
        lambda folder: edit_tensors(folder, lambda all_: all_.update({"fc.weight": torch.zeros(64, 64)})),
        r"fc.weight: shape \[64, 64\].*expected \[64, 192\]",
        CheckpointError,
    ),
    "offsets": (
        lambda folder: edit_tensors(folder, lambda all_: all_["d2t"].fill_(1)),
        "d2t: .*different tokens below 469",
        CheckpointError,
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_wrong_heads_are_refused(edit: str, tmp_path: Path) -> None:
    change, message, error = EDITS[edit]
    save_head("eagle3", tmp_path)
    change(tmp_path)
    assert_refused(RECALL, message, error, draft=tmp_path)


def test_models_without_a_head_are_refused(tmp_path: Path) -> None:
    assert_refused(RECALL, "mtp.fc: .* has no multi-token head", draft="mtp")
    save_checkpoint(FAMILIES["llama"], tmp_path)
    assert_refused(tmp_path, "no multi-token head of llama is known", UnsupportedError, draft="mtp")
