"""Executors run many forwards: on a CPU they take the PyTorch backend unless a test asks for both backends."""

from importlib.util import find_spec

import pytest
import torch

from tests.models.checkpoints import llama_checkpoint as llama_checkpoint
from tests.models.checkpoints import llama_folder as llama_folder

# Without the extras `serve` and `vision` their modules cannot be imported.
collect_ignore = [] if find_spec("uvicorn") else ["serving", "text/test_replay.py", "vision/test_commands.py"]
collect_ignore += (
    [] if find_spec("PIL") else [f"vision/test_{name}.py" for name in ("commands", "images", "vision_model")]
)


@pytest.fixture(autouse=True)
def _fast_on_cpu(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    if device.type == "cpu":
        monkeypatch.setenv("PAGED_BACKEND", "torch")
