"""The state machines of the cache for as many steps as asked for.

python -m tests.cache.stress.soak --steps 1000000
"""

import argparse
import itertools
import os

import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from tqdm import tqdm

from tests.cache.stress.test_state_machine import MACHINES

# Hypothesis keeps all examples of a run in memory, so there are many short runs; each takes another seed.
RUN = settings(
    max_examples=50, stateful_step_count=100, deadline=None, derandomize=False, suppress_health_check=list(HealthCheck)
)


def main() -> None:
    """Run until the steps are done or one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    steps = parser.parse_args().steps
    os.environ["PAGED_BACKEND"] = "torch"
    torch.set_num_threads(1)
    done = 0
    with tqdm(total=steps, unit="step") as progress:
        for machine in itertools.cycle(MACHINES):
            run_state_machine_as_test(machine, settings=RUN)
            now = sum(machine.seen["steps"] for machine in MACHINES)
            progress.update(now - done)
            done = now
            if done >= steps:
                break
    for machine in MACHINES:
        print(machine.__name__, dict(machine.seen))


if __name__ == "__main__":
    main()
