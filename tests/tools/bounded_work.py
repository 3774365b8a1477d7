"""Work for a bounded process: honest, slow, and all ways not to return."""

import ctypes
import json
import os
import resource
import signal
import time
from collections.abc import Callable

from paged.tools.bounded_process import limit_memory


def fail_forks(numbers: list[int]) -> None:
    """Let the next calls of `os.fork` raise these errors, one each."""
    fork = os.fork

    def failing() -> int:
        if numbers:
            raise OSError(numbers.pop(0), "no fork")
        return fork()

    os.fork = failing


def handler() -> Callable[[bytes], bytes]:
    """Return a function with a state: the words it has been told."""
    words: list[str] = []

    def answer(message: bytes) -> bytes:
        kind, word = json.loads(message)
        if kind == "spin":
            while True:
                pass
        elif kind == "spin in C":
            sum(range(1 << 62))
        elif kind == "sleep":
            time.sleep(3600)
        elif kind == "nap":
            time.sleep(0.2)
        elif kind == "allocate":
            limit_memory(64 << 20)
            try:
                words.append("a" * (1 << 30))
            except MemoryError:
                return b"no memory"
        elif kind == "crash":
            os.abort()
        elif kind == "overflow":
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            ctypes.string_at(0)
        elif kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "no memory":
            raise MemoryError
        elif kind == "no descriptors":
            num_open = len(os.listdir("/proc/self/fd")) - 1
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + int(word), hard))
            return b"ok"
        elif kind == "no copies":
            fail_forks(json.loads(word))
            return b"ok"
        elif kind == "raise":
            raise ValueError(word)
        words.append(word)
        return " ".join(words).encode()

    return answer
