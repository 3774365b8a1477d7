"""Tests of the server share one of the bundled checkpoint; without an extra, tests that need it are left out."""

from importlib.util import find_spec

from tests.executors.conftest import _fast_on_cpu as _fast_on_cpu
from tests.models.checkpoints import llama_checkpoint as llama_checkpoint
from tests.models.checkpoints import llama_folder as llama_folder

HAS_SERVER = find_spec("uvicorn") is not None
HAS_IMAGES = find_spec("PIL") is not None
collect_ignore = []
if HAS_SERVER:
    from tests.serving.served import chat_folder as chat_folder
    from tests.serving.served import records as records
    from tests.serving.served import served as served
else:
    collect_ignore += ["http", "formats", "grammar", "text/test_replay.py", "vision/test_commands.py"]
if not HAS_IMAGES:
    collect_ignore += [f"vision/test_{name}.py" for name in ("commands", "image_memory", "images", "vision_model")]
