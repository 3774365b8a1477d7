"""`examples/reference.py`, the engine on one page, gives the engine's tokens where both share and lose blocks."""

from pathlib import Path

import pytest
import torch

from examples.reference import Engine as ReferenceEngine
from paged import Engine, EngineConfig, LlmExecutor, SamplingParams
from tests.models.families import FAMILIES, save_checkpoint

RECALL = Path(__file__).parents[2] / "models" / "recall"
# Eight blocks of 16 tokens hold two whole requests of up to 80 tokens; all but the last begin with the same 37.
NUM_BLOCKS = 8
PROMPTS = [[*range(30, 67), *range(tail, tail + 3 * tail)] for tail in range(1, 5)] + [list(range(90, 111))]


@pytest.mark.parametrize("kind", ["bundled", "qwen3", pytest.param("qwen2", marks=pytest.mark.thorough)])
def test_tokens_are_those_of_the_engine(kind: str, tmp_path: Path, device: torch.device) -> None:
    folder = RECALL if kind == "bundled" else tmp_path
    if kind != "bundled":
        save_checkpoint(FAMILIES[kind], folder)
    reference = ReferenceEngine(folder, NUM_BLOCKS, token_budget=48)
    reference.model.split_size = 12
    requests = [reference.add(prompt, 32) for prompt in PROMPTS]
    reference.run()
    assert max(request.num_preemptions for request in requests) > 0
    assert max(request.num_cached for request in requests) >= 32

    executor = LlmExecutor.from_pretrained(folder, num_blocks=NUM_BLOCKS, device=device)
    engine = Engine(executor, EngineConfig(token_budget=48))
    outputs = engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=32), progress=False)
    assert [request.generated for request in requests] == [output.outputs[0].token_ids for output in outputs]
    assert reference.pool.num_holders == [0] * NUM_BLOCKS
