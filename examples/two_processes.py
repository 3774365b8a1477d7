"""One model on two processes: tensor parallelism, driven by rank 0.

    torchrun --nproc-per-node 2 examples/two_processes.py [FOLDER]

Each process loads its part of the weights. On GPUs each takes the device of its local rank. Without torchrun, one
process gives the same answers.
"""

import os
import sys

from paged import Engine, LlmExecutor, ParallelConfig, SamplingParams

folder = sys.argv[1] if len(sys.argv) > 1 else "models/recall"
parallel = ParallelConfig(tensor_parallel_size=int(os.environ.get("WORLD_SIZE", "1")))
executor = LlmExecutor.from_pretrained(folder, parallel=parallel, num_blocks=256)
if int(os.environ.get("RANK", "0")) == 0:
    engine = Engine(executor, eos_token_ids=())
    for output in engine.generate(
        [[5, 17, 3], [9, 2, 2, 40]], SamplingParams(temperature=0, max_tokens=8), progress=False
    ):
        print(output.outputs[0].token_ids)
    executor.shutdown()
else:
    executor.serve()  # until rank 0 shuts down
