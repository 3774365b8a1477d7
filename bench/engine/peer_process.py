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

# Folder of environments in a checkout, made by `make vllm-engine` and `make llama-cpp`.
PEERS = Path(__file__).resolve().parents[2] / ".peers"


class PeerProcess:
    """A program that runs in a Python and answers each line of JSON with another.

    arguments: arguments of Python, first the script or `-m` and a module. variables: environment variables; by default
    this process's without our choices. about: the program's first line, such as its version.

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
        with suppress(BrokenPipeError):  # the process's log says more
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
    """Kill a process that has its own session, and the process's children."""
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
