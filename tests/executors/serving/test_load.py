"""500 requests leave no memory behind, with SOAK=1 5,000."""

import gc
import http.client
import json
import os
import threading
from pathlib import Path

import pytest

from tests.executors.serving.conftest import Served
from tests.executors.serving.test_openai import PROMPT, check_idle

THREADS = 8
REQUESTS = 5000 if "SOAK" in os.environ else 500


def ask_many(served: Served, count: int) -> None:
    """Whole answers, streams, refused requests and clients that leave, from several threads."""

    def ask(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
        for index in range(count // THREADS):
            kind = (number + index) % 5
            body = {"prompt": PROMPT, "max_tokens": 2 + 400 * (kind == 3), "stream": kind in (1, 3), "ignore_eos": True}
            body |= {"temperature": -1} if kind == 2 else {"logprobs": 2} if kind == 4 else {}
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            statuses.add(answer.status)
            if kind == 3:  # leave amid the stream
                answer.readline()
                connection.close()
            else:
                answer.read()
        connection.close()

    statuses: set[int] = set()
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == {200, 400}


def measure() -> tuple[int, int]:
    """Objects, and bytes in memory."""
    gc.collect()
    return len(gc.get_objects()), int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.thorough  # 8 s
def test_memory_is_flat(served: Served) -> None:
    """What a request left behind would be one object or more for each, in every round; caches fill in one."""
    ask_many(served, max(REQUESTS // 2, 500))  # by then launches and records of every kind are kept
    check_idle(served)
    grown: list[tuple[int, int]] = []
    for _ in range(3):
        objects, size = measure()
        ask_many(served, REQUESTS)
        check_idle(served)
        later, larger = measure()
        grown.append((later - objects, larger - size))
        if later - objects < 500 and larger - size < 16 << 20:
            return
    pytest.fail(f"objects and bytes that {REQUESTS} requests left behind, in rounds: {grown}")
