"""A peer in a process and an environment of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from paged.bench.benchmark import Json
from paged.executors.thread_waits import without_our_choice

# Where `make vllm-engine` and `make llama-cpp` put environments, in a checkout.
PEERS = Path(__file__).resolve().parents[2] / ".peers"


class PeerProcess:
    """A program in a Python, which answers a line of JSON with another.

    arguments: of Python, its script or `-m` and its module first. variables: of its environment; by default those of
    this process without what is ours. about: its first line, such as its version.

    Raises:
        FileNotFoundError: the environment does not exist.
        RuntimeError: the process has ended.
    """

    def __init__(
        self, name: str, python: Path, *arguments: str, log: Path, variables: Mapping[str, str] | None = None
    ) -> None:
        if not python.exists():
            raise FileNotFoundError(f"{python}: no such file, `make {python.parents[1].name}` makes it")
        self._name, self._log = name, log
        if variables is None:
            variables = _variables_of_peers()
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [python, "-P", *arguments],
                env=variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                start_new_session=True,
            )
        weakref.finalize(self, _kill_group, self._process.pid)
        self.about: Json = self._answer()

    def ask(self, **job: Any) -> Any:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # its log says more
            print(json.dumps(job), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            log = self._log.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"{self._name} ended with {self._process.wait()}: {log}")
        return json.loads(line)


def _variables_of_peers() -> dict[str, str]:
    variables = without_our_choice(os.environ)
    variables.pop("PYTHONPATH", None)
    variables["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    return variables


def _kill_group(process: int) -> None:
    """Kill a process that has its own session, and its children."""
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
