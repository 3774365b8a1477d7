"""500 requests leave no memory behind; whatever Schemathesis sends is the client's fault, or answered, and changes no
other client's answer.

SOAK=1 sends 5,000 requests, and 2,000 calls in place of 150, which send every route right and wrong bodies as well.
"""

import gc
import http.client
import json
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from tests.deadline import HANG_S
from tests.serving.http.test_limits import ask
from tests.serving.http.test_openai import MESSAGES, PROMPT, check_idle
from tests.serving.http.test_stalls import LARGE, hostile_bodies
from tests.serving.served import Served

THREADS = 8
CALLS = 2000 if "SOAK" in os.environ else 150
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


GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
HONEST: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": PROMPT, **GREEDY}),
    ("/v1/completions", {"prompt": PROMPT, **GREEDY, "temperature": 1.2, "seed": 5}),
    ("/v1/chat/completions", {"messages": MESSAGES, **GREEDY}),
    ("/v1/completions", {"prompt": PROMPT, **GREEDY, "structured_outputs": {"regex": "([a-z]+ ?){1,3}"}}),
]


@contextmanager
def honest_clients(served: Served) -> Iterator[None]:
    """Clients that ask all the time, two at once: each answer is the one of an idle server."""

    def answer(path: str, body: dict[str, Any]) -> Any:
        status, _, answered = ask(served, path, body)
        assert status == 200, answered
        return answered["choices"]

    alone = [answer(*request) for request in HONEST]
    is_over = threading.Event()

    def keep_asking() -> int:
        num_rounds = 0
        while not is_over.is_set():
            assert [answer(*request) for request in HONEST] == alone
            num_rounds += 1
        return num_rounds

    with ThreadPoolExecutor(2) as pool:
        clients = [pool.submit(keep_asking) for _ in range(2)]
        try:
            yield
        finally:
            is_over.set()
        assert all(client.result() > 1 for client in clients)


@pytest.mark.thorough  # 6 s
def test_hostile_bodies_change_no_other_answer(served: Served) -> None:
    with honest_clients(served):
        for path, body in [*LARGE[::3], *((path, body) for path, _, body in hostile_bodies(14, 11))]:
            assert ask(served, path, body)[0] < 500
    check_idle(served)


@pytest.mark.thorough  # 15 s
def test_no_call_is_the_servers_fault(served: Served) -> None:
    schema = schemathesis.openapi.from_dict(served.app.openapi())
    operations: list[Any] = [one.ok() for one in schema.get_all_operations()]
    statuses: list[int] = []

    def call(case: Any) -> None:
        answer = case.call(base_url=served.url, timeout=HANG_S)
        statuses.append(answer.status_code)
        assert answer.status_code < 500 or answer.json()["error"]["code"] == "timeout", answer.text

    bodies = [one for one in operations if one.method == "post"]
    for operation in operations:
        count = CALLS // len(bodies) if operation in bodies else 5
        limits = settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        for mode in schemathesis.GenerationMode if operation in bodies else [schemathesis.GenerationMode.POSITIVE]:
            limits(given(case=operation.as_strategy(generation_mode=mode))(call))()
    assert len(statuses) >= CALLS
    assert len([status for status in statuses if status == 200]) > CALLS / 40
    check_idle(served)
