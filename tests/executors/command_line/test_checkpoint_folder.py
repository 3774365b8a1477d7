"""Where checkpoints come from: folders and the Hub."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest

from paged.models.recall.task import RecallPrompt
from tests.executors.command_line.commands import Generate, texts


def test_folders_that_lack_files(generate: Generate, copy: Path) -> None:
    (copy / "tokenizer.json").unlink()
    (copy / "model.safetensors").rename(copy / "weights.bin")
    error = generate(str(copy), "--prompt", "x", code=1)["error"]
    assert "tokenizer.json, *.safetensors missing; there is config.json" in error
    assert "a file, expected a folder" in generate(str(copy / "config.json"), "--prompt", "x", code=1)["error"]
    assert "no such folder, and no OWNER/NAME" in generate("./nowhere", "--prompt", "x", code=1)["error"]


def test_models_of_the_hub(
    generate: Generate, copy: Path, prompt: RecallPrompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, list[str], list[str]]] = []

    def snapshot_download(repo_id: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append((repo_id, allow_patterns, ignore_patterns))
        return str(copy)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert texts(generate("owner/model-1.5", "--prompt", prompt.text)) == [prompt.answer]
    ((repo_id, wanted, unwanted),) = asked
    files = (
        "model.safetensors",
        "config.json",
        "chat_template.jinja",
        "tokenizer.model",
        "a.bin",
        "consolidated.safetensors",
    )
    filtered = huggingface_hub.utils.filter_repo_objects(files, allow_patterns=wanted, ignore_patterns=unwanted)
    assert (repo_id, tuple(filtered)) == ("owner/model-1.5", files[:4])

    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    error = generate("owner/model", "--prompt", "x", code=1)["error"]
    assert "UnsupportedError" in error
    assert "pip install" in error


def test_hub_offline(tmp_path: Path) -> None:
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": "", "PYTHONPATH": ":".join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-m", "paged", "generate", "owner/model", "--prompt", "x"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 1
    assert "CheckpointError: model 'owner/model': no such folder, not in the Hub's cache" in result.stderr
    assert "hf download owner/model" in result.stderr
    assert "Traceback" not in result.stderr
