"""Connections that hostile clients hold: idle ones, slow ones, and those whose answers nobody reads."""

import asyncio
import json
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from tests.serving.http.test_limits import ask, read_all
from tests.serving.http.test_openai import PROMPT, check_idle
from tests.serving.served import Served, serving

HANG_S = 60  # for a server that never closes a connection
GET = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"
POST = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@pytest.fixture(params=["uvloop", "asyncio"])
def loop_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "asyncio":
        monkeypatch.setattr(uvicorn.Config, "get_loop_factory", lambda config: asyncio.new_event_loop)


def unfinished_bytes(choices: random.Random) -> Iterator[bytes]:
    """Parts of a schedule that never completes the headers of a request after the last whole one, and no end."""
    for _ in range(choices.randrange(3)):
        yield GET * choices.randrange(1, 4)
    kind = choices.choice(["breaks", "line", "header", "nothing", "pipelined", "body", "trailer", "upgrade"])
    if kind == "pipelined":
        yield GET + GET[: choices.randrange(1, len(GET))]
    elif kind == "body":
        yield POST + b"content-length: 1000\r\n\r\n{"
    elif kind == "trailer":
        yield POST + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    elif kind == "upgrade":
        yield GET[:-2] + b"connection: upgrade\r\nupgrade: websocket\r\n\r\n"
    elif kind == "header":
        yield GET[:-2]
    filler = {"breaks": [b"\r\n", b"\r", b"\n"], "header": [b"x: y\r\n"], "trailer": [b"x: y\r\n"]}
    while True:
        if kind == "nothing":
            yield b""
        elif kind == "breaks" and choices.random() < 0.3:
            yield b"\r\n" * choices.randrange(1, 300)
        else:
            yield choices.choice(filler.get(kind, [b"a"]))


def is_closed_while_sent(served: Served, seed: int) -> bool:
    """Send a schedule until the server closes the connection; whether it does."""
    choices = random.Random(seed)
    reads, deadline = choices.random() < 0.7, time.monotonic() + HANG_S
    with served.connect() as connection:
        connection.settimeout(0.01)
        for part in unfinished_bytes(choices):
            try:
                connection.sendall(part)
                if (reads or not part) and connection.recv(1 << 16) == b"":
                    return True
            except TimeoutError:
                pass
            except OSError:  # closed, seen when it is written to
                return True
            time.sleep(choices.choice([0, 0.01, 0.05]))
            if time.monotonic() > deadline:
                return False
    raise AssertionError


def test_no_schedule_of_bytes_holds_a_connection(chat_folder: Path, loop_kind: None) -> None:
    limits: dict[str, Any] = {"header_seconds": 0.5, "keep_alive_seconds": 0.5, "idle_seconds": 0.5}
    with serving(chat_folder, **limits) as served:
        closed: dict[int, bool] = {}
        seeds = range(48)
        threads = [
            threading.Thread(target=lambda seed=seed: closed.update({seed: is_closed_while_sent(served, seed)}))
            for seed in seeds
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert closed == dict.fromkeys(seeds, True)
        assert not served.server.server_state.connections
        assert ask(served, "/version")[0] == 200


def test_idle_connections_give_way(chat_folder: Path, loop_kind: None) -> None:
    """As many idle connections as there may be, whatever bytes they sent, lock nobody out and end no request."""
    limits: dict[str, Any] = {"header_seconds": 600.0, "keep_alive_seconds": 600.0, "max_connections": 8}
    with serving(chat_folder, **limits) as served, served.connect() as streaming:
        body = json.dumps({"prompt": PROMPT, "max_tokens": 300, "ignore_eos": True, "stream": True}).encode()
        head = POST.replace(b"/tokenize", b"/v1/completions") + b"connection: close\r\n"
        streaming.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        assert streaming.recv(12) == b"HTTP/1.1 200"
        held = []
        for number in range(30):
            connection = served.connect()
            held.append(connection)
            if number % 3 == 0:
                connection.sendall(GET + b"\r\n")
                assert connection.recv(12) == b"HTTP/1.1 200"
            connection.sendall([b"\r\n", b"GET / HT", b""][number % 3])
            if number % 5 == 0:
                assert ask(served, "/version")[0] == 200
        assert len(served.server.server_state.connections) <= 8
        assert ask(served, "/version")[0] == 200
        assert read_all(streaming).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        for connection in held:
            connection.close()


def test_pipelines_are_bounded(served: Served) -> None:
    with served.connect() as connection:
        connection.sendall(GET * 5000)
        answer = read_all(connection)
    assert answer.count(b"HTTP/1.1 200") <= 101
    assert b"HTTP/1.1 400" in answer
    with served.connect() as connection:
        connection.sendall(GET * 40 + GET[:-2] + b"connection: close\r\n\r\n")
        assert read_all(connection).count(b"HTTP/1.1 200") == 41


@pytest.fixture
def impatient(chat_folder: Path, loop_kind: None) -> Iterator[Served]:
    """A server whose sockets send little ahead."""
    with serving(chat_folder, idle_seconds=0.5, keep_alive_seconds=600.0) as served:
        assert ask(served, "/version")[0] == 200  # it has begun to listen
        (listener,) = served.server.servers[0].sockets
        with socket.socket(fileno=os.dup(listener.fileno())) as same:
            same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        yield served


def request_bytes(path: str, body: Any, more: bytes = b"") -> bytes:
    data = json.dumps(body).encode()
    head = POST.replace(b"/tokenize", path.encode()) + more
    return head + b"content-length: %d\r\n\r\n" % len(data) + data


LONG = {"prompt": "kite " * 60_000}  # more than the buffers of both sides take
STREAM = {"prompt": [PROMPT] * 16, "max_tokens": 900, "ignore_eos": True, "stream": True, "logprobs": 20}


# Every two of them meet once.
@pytest.mark.parametrize(
    ("loop_kind", "path", "reading", "ending"),
    [
        ("uvloop", "/tokenize", "none", "keep-alive"),
        ("asyncio", "/tokenize", "drips", "close"),
        ("uvloop", "/tokenize", "half-closed", "close"),
        ("asyncio", "/v1/completions", "none", "close"),
        ("uvloop", "/v1/completions", "drips", "keep-alive"),
        ("asyncio", "/v1/completions", "half-closed", "keep-alive"),
    ],
    indirect=["loop_kind"],
)
def test_unread_answers_are_dropped(
    records: list[str], impatient: Served, path: str, reading: str, ending: str
) -> None:
    body = LONG if path == "/tokenize" else STREAM
    sent = request_bytes(path, body, f"connection: {ending}\r\n".encode())
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", impatient.port))
        connection.sendall(sent)
        assert connection.recv(1)
        if reading == "half-closed":
            connection.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + HANG_S
        while impatient.server.server_state.connections or "POST" not in "".join(records):
            assert time.monotonic() < deadline
            time.sleep(0.05)
            if reading == "drips":
                connection.settimeout(0.01)
                with suppress(OSError):
                    connection.recv(1)
    assert "end=slow" in "".join(records) or reading == "half-closed"
    check_idle(impatient)
    # uvicorn forgets a task in a later turn of its loop than the one that ends it.
    deadline = time.monotonic() + HANG_S
    while impatient.server.server_state.tasks:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("loop_kind", ["uvloop", pytest.param("asyncio", marks=pytest.mark.thorough)], indirect=True)
def test_slow_readers_get_whole_answers(impatient: Served) -> None:
    """A client that takes longer than the limit in all, but never stops, reads all of a stream."""
    body = {"prompt": [PROMPT] * 4, "max_tokens": 200, "ignore_eos": True, "stream": True, "logprobs": 5}
    with socket.socket() as connection:
        # With 4 KB, TCP itself stalls for longer than the limit: it holds back segments that fill less than half of the
        # window until its timer of 0.2 s, which doubles, ends.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        connection.connect(("127.0.0.1", impatient.port))
        connection.sendall(request_bytes("/v1/completions", body, b"connection: close\r\n"))
        parts = [connection.recv(1)]
        start = time.monotonic()
        while parts[-1]:
            time.sleep(0.02)
            parts.append(connection.recv(4096))
    assert time.monotonic() - start > 0.5, "the limit"
    assert b"".join(parts).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
