"""Other processes that share models with the tests' own, which is rank 0; run as a program it is one of them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from paged.executors.llm_executor import LlmExecutor
from paged.models.parallel.config import ParallelConfig

ROOT = Path(__file__).resolve().parents[3]


class Followers:
    """As many processes as the largest world has beside rank 0; each takes one order a line, and answers with one."""

    def __init__(self, count: int) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PAGED_BACKEND": "torch"}
        command = [sys.executable, "-m", "tests.executors.parallel.followers"]
        self.processes = [
            subprocess.Popen(
                command, env=environment, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for _ in range(count)
        ]

    @contextmanager
    def load(self, folder: Path, size: int, *, expert_parallel: bool = False, **options: Any) -> Iterator[LlmExecutor]:
        """An executor over `size` processes, which is shut down in the end; then the others have ended well."""
        config = {"tensor_parallel_size": size, "expert_parallel": expert_parallel, "timeout_s": 20.0}
        executor = self.order(folder, size, config, options)
        try:
            yield executor
        finally:
            executor.shutdown()
            answers = self.answers(size)
        assert answers == ["served"] * (size - 1)

    def order(self, folder: Path, size: int, config: dict[str, Any], options: dict[str, Any]) -> LlmExecutor:
        """Let the others load it and serve, and load it here."""
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
        for rank, process in enumerate(self.processes[: size - 1], start=1):
            assert process.stdin is not None
            environment = world | {"RANK": str(rank)}
            order = {"environment": environment, "folder": str(folder), "config": config, "options": options}
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
        os.environ.update(world, RANK="0")
        return LlmExecutor.from_pretrained(folder, parallel=ParallelConfig(**config), **options)

    def answers(self, size: int) -> list[str]:
        """How each follower's `serve` ended: "served", or the error; "" where the process did."""
        found = []
        for process in self.processes[: size - 1]:
            assert process.stdout is not None
            found.append(process.stdout.readline().strip())
        return found

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()


def follow() -> None:
    """Obey the orders of standard input."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        order = json.loads(line)
        os.environ.update(order["environment"])
        try:
            parallel = ParallelConfig(**order["config"])
            LlmExecutor.from_pretrained(order["folder"], parallel=parallel, **order["options"]).serve()
            print("served", flush=True)
        except Exception as error:
            print(f"{type(error).__name__}: {error}".replace("\n", " "), flush=True)


if __name__ == "__main__":
    follow()
