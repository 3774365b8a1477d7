"""Other processes that share models with the tests' own, which is rank 0."""

import multiprocessing
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from paged.cache.tiers import files
from paged.cache.tiers.folder import CacheFolder
from paged.executors.llm_executor import LlmExecutor
from paged.models.parallel.ranks import ParallelConfig
from tests.deadline import HANG_S

# One server imports torch, which takes seconds, and the others are forked from it.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__])
OPTIONS: dict[str, Any] = {"block_size": 8, "num_blocks": 64, "num_swap_blocks": 16, "cuda_graphs": [4]}


class Followers:
    """As many processes as the largest world has beside rank 0. Each takes orders, and answers when it has served."""

    def __init__(self, count: int) -> None:
        self.processes, self._pipes = [], []
        for _ in range(count):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_follow, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)

    @contextmanager
    def load(self, folder: Path, size: int, *, expert_parallel: bool = False, **options: Any) -> Iterator[LlmExecutor]:
        """An executor over `size` processes, which is shut down in the end; then the others have ended well."""
        executor = self.order(folder, size, {"expert_parallel": expert_parallel, "timeout_s": HANG_S}, options)
        try:
            yield executor
        finally:
            executor.shutdown()
            answers = self.answers(size)
        assert answers == ["served"] * (size - 1)

    def order(self, folder: Path, size: int, config: dict[str, Any], options: dict[str, Any]) -> LlmExecutor:
        """Let the others load it and serve, and load it here; `config` is that of the parallel model."""
        with self.invite(folder, size, config, options):
            config = {"tensor_parallel_size": size} | config
            return LlmExecutor.from_pretrained(folder, parallel=parallel_config(config), **options)

    @contextmanager
    def invite(
        self, folder: Path, size: int, config: dict[str, Any], options: dict[str, Any], **way: int | str
    ) -> Iterator[None]:
        """Let the others load it and serve, `times` in turn, with a default group where `backend` names one; inside,
        this process has torchrun's environment, too."""
        config = {"tensor_parallel_size": size} | config
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
        world["PAGED_BACKEND"] = os.environ.get(
            "PAGED_BACKEND", "torch"
        )  # a step of Triton's interpreter takes seconds
        for rank, pipe in enumerate(self._pipes[: size - 1], start=1):
            pipe.send((world | {"RANK": str(rank)}, folder, config, options, way))
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (world | {"RANK": "0"}).items():
                patch.setenv(name, value)
            yield

    def answers(self, size: int) -> list[str]:
        """How each follower's `serve` ended: "served", or the error."""
        return [pipe.recv() for pipe in self._pipes[: size - 1]]

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.join()


def parallel_config(config: dict[str, Any]) -> ParallelConfig:
    """The configuration; `mesh` is the shape of one whose last dimension is named "tp"."""
    shape = config.get("mesh")
    mesh = shape and init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    return ParallelConfig(**config | {"mesh": mesh})


def gate_of(path: Path) -> Path:
    """The pipe that a follower waits at before it reads a block's file, if there is one."""
    return path.with_suffix(".gate")


def _wait_at_gates() -> None:
    """Let reads of this process hang where a test has put a gate."""
    load = CacheFolder.load

    def load_behind_gate(folder: CacheFolder, name: str) -> bytes | None:
        gate = gate_of(folder.path / name)
        if gate.exists():
            gate.read_bytes()  # until its writer closes it
        return load(folder, name)

    CacheFolder.load = load_behind_gate  # type: ignore[method-assign]
    files.HANG_S = HANG_S


def _follow(orders: Connection) -> None:
    torch.set_num_threads(1)
    _wait_at_gates()
    while True:
        environment, folder, config, options, way = orders.recv()
        os.environ.update(environment)
        try:
            if "backend" in way:
                dist.init_process_group(way["backend"])
            for _ in range(way.get("times", 1)):
                executor = LlmExecutor.from_pretrained(folder, parallel=parallel_config(config), **options)
                if executor.model.ranks.rank == 0:  # of a part of the mesh
                    executor.shutdown()
                else:
                    executor.serve()
            orders.send("served")
        except Exception as error:
            orders.send(f"{type(error).__name__}: {error}")
        if dist.is_initialized():
            dist.destroy_process_group()
