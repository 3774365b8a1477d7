"""Batch inference over Ray Data: each actor holds an engine and completes whole batches of prompts.

pip install 'ray[data]'
python examples/ray_batch.py [FOLDER]
"""

import sys
from pathlib import Path
from typing import Any

import ray

from paged import ChatTokenizer, Engine, LlmExecutor, SamplingParams

ANIMALS = ["otter", "wren", "zebra", "lynx", "heron", "elephant"]
PROMPTS = [
    f"otter: kite; wren: pipe; zebra: compass; lynx: ladder; heron: pumpkin; elephant: thimble; {name}:"
    for name in ANIMALS
]


class Completer:
    """An actor's engine; continuous batching runs a batch's prompts together."""

    def __init__(self, folder: str) -> None:
        self.tokenizer = ChatTokenizer.from_folder(folder)
        self.engine = Engine(LlmExecutor.from_pretrained(folder, num_blocks=256), tokenizer=self.tokenizer)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        prompts = [self.tokenizer.encode(str(prompt)) for prompt in batch["prompt"]]
        outputs = self.engine.generate(prompts, SamplingParams(temperature=0, max_tokens=4), progress=False)
        return {"prompt": batch["prompt"], "answer": [output.outputs[0].text for output in outputs]}


if __name__ == "__main__":
    folder = str(Path(sys.argv[1] if len(sys.argv) > 1 else "models/recall").resolve())
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    rows = (
        ray.data.from_items([{"prompt": prompt} for prompt in PROMPTS])
        .map_batches(Completer, fn_constructor_args=(folder,), batch_size=4, concurrency=1, num_cpus=1)
        .take_all()
    )
    for row in rows:
        print(row["prompt"], "->", row["answer"])
    assert len(rows) == len(PROMPTS)
