"""A peer in a process and an environment of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from paged.bench.benchmark import Json

# Where `make vllm-engine` and `make llama-cpp` put environments, in a checkout.
PEERS = Path(__file__).resolve().parents[2] / ".peers"


class PeerProcess:
    """A script in the Python of its environment, which answers a line of JSON with another.

    about: its first line, such as its version.

    Raises:
        FileNotFoundError: the environment does not exist.
        RuntimeError: the process has ended.
    """

    def __init__(self, name: str, python: Path, script: str, *arguments: str, log: Path) -> None:
        if not python.exists():
            raise FileNotFoundError(f"{python}: no such file, `make {python.parents[1].name}` makes it")
        self._name, self._log = name, log
        environment = dict(os.environ)
        environment.pop("PYTHONPATH", None)
        environment["OMP_NUM_THREADS"] = str(torch.get_num_threads())
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [python, "-P", script, *arguments],
                env=environment,
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


def _kill_group(process: int) -> None:
    """Kill a process that has its own session, and its children."""
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
