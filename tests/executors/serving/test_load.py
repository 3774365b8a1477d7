"""500 requests leave no memory behind, with SOAK=1 5,000."""

import gc
import http.client
import json
import os
import sys
import threading

import pytest

from tests.deadline import HANG_S
from tests.executors.serving.conftest import Served
from tests.executors.serving.test_openai import PROMPT, check_idle

THREADS = 8
REQUESTS = 5000 if "SOAK" in os.environ else 500


def ask_many(served: Served, count: int) -> None:
    """Whole answers, streams, refused requests and clients that leave, from several threads."""

    def ask(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=HANG_S)
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


def num_allocated() -> int:
    """How many pieces of memory Python's objects hold."""
    gc.collect()
    return sys.getallocatedblocks()


@pytest.mark.thorough  # 8 s
def test_memory_is_flat(served: Served) -> None:
    """What a request left behind would be a piece of memory or more for each, in every round; caches fill in one."""
    ask_many(served, max(REQUESTS // 2, 500))  # by then launches and records of every kind are kept
    check_idle(served)
    grown: list[int] = []
    for _ in range(3):
        before = num_allocated()
        ask_many(served, REQUESTS)
        check_idle(served)
        grown.append(num_allocated() - before)
        if grown[-1] < REQUESTS / 2:
            return
    pytest.fail(f"pieces of memory that {REQUESTS} requests left behind, in rounds: {grown}")
