"""Work for a bounded process: honest, slow, and all ways not to return."""

import json
import os
import time
from collections.abc import Callable

from paged.bounded_process import limit_memory


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
        elif kind == "raise":
            raise ValueError(word)
        words.append(word)
        return " ".join(words).encode()

    return answer
