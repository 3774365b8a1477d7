"""What hostile, slow and impatient clients do to the server, over plain sockets; the key, the queue and the drain."""

import base64
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq

from paged import EngineConfig, LlmExecutor
from paged.serving.command_line.cli import RECALL
from tests.deadline import HANG_S
from tests.processes import branches_of, is_alive, wait_until
from tests.serving.grammar.test_structured import PROCESS, slow_tag
from tests.serving.http.test_openai import PROMPT, check_idle
from tests.serving.served import Served, serving

JSON = {"content-type": "application/json"}


def ask(served: Served, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], Any]:
    """Status, headers and body of an answer; a body that is bytes goes as it is."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=HANG_S)
    data = body if isinstance(body, bytes | None) else json.dumps(body)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("GET" if body is None else "POST", path, data, JSON | named)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    is_json = answer.headers["content-type"] == "application/json"
    return answer.status, dict(answer.headers), json.loads(text) if is_json else text


def read_all(connection: socket.socket) -> bytes:
    """Everything until the other side closes."""
    parts = []
    try:
        while part := connection.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a", "temperature": NaN}',
        b"\xff\xfe{",
        b"",
        b'{"prompt": "a"',
        b"[1, 2]",
    ],
    ids=["deep", "surrogate", "digits", "nan", "bytes", "empty", "cut", "list"],
)
def test_hostile_bodies_are_the_clients_fault(body: bytes, served: Served) -> None:
    status, _, answer = ask(served, "/v1/completions", body)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"


def test_other_routes_and_content_types(served: Served) -> None:
    assert ask(served, "/v1/nothing")[0] == 404
    assert ask(served, "/v1/completions")[0] == 405
    assert ask(served, "/v1/completions", {"prompt": PROMPT}, content_type="text/plain")[0] == 400  # as forms of others
    assert ask(served, "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b"})[0] == 403
    assert ask(served, "/health")[0] == 200
    status, headers, card = ask(served, "/v1/models/recall")
    assert (status, card["id"], card["max_model_len"]) == (200, "recall", 1024)
    assert "access-control-allow-origin" not in headers
    tokens = ask(served, "/tokenize", {"prompt": PROMPT})[2]["tokens"]
    assert ask(served, "/detokenize", {"tokens": tokens})[2]["prompt"] == PROMPT
    assert ask(served, "/tokenize", {"messages": [{"role": "user", "content": PROMPT}]})[2]["tokens"] == tokens
    router = {"add_special_tokens": True, "return_token_strs": True}  # what AIBrix sends
    assert ask(served, "/tokenize", {"prompt": PROMPT, **router})[2]["token_strs"][:2] == ["otter:", "brass"]
    assert ask(served, "/tokenize", {"prompt": PROMPT, "add_special_tokens": False})[0] == 400
    assert "vllm:time_to_first_token_seconds_bucket" in ask(served, "/metrics")[2]


@pytest.mark.thorough  # waits for limits of time
def test_slow_and_half_requests_end(chat_folder: Path, records: list[str]) -> None:
    limits: dict[str, Any] = {"header_seconds": 0.3, "idle_seconds": 0.6, "max_connections": 4, "max_body_bytes": 1000}
    with serving(chat_folder, **limits) as served:
        for sent, expected in [
            (b"", b""),
            (b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n", b""),
            (b"GET / HTTP/1.1\r\nx: " + b"a" * 100_000, b""),
            (b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{", b"408"),
            (b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1001\r\n\r\n{", b"413"),
            (
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: " + b"9" * 5000 + b"\r\n\r\n{",
                b"400",
            ),
            (b"\x16\x03\x01garbage\r\n\r\n" * 1000, b"400"),
            (b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * 50 + b"GARBAGE\r\n\r\n", b"400"),
        ]:
            with served.connect() as connection:
                connection.sendall(sent)
                assert read_all(connection)[9:12] == expected, sent[:100]
        open_ones = [served.connect() for _ in range(5)]
        assert open_ones[-1].recv(1) == b""
        for one in open_ones:
            one.close()


@pytest.mark.thorough  # waits for limits of time
def test_clients_that_stop_reading_are_aborted(chat_folder: Path, records: list[str]) -> None:
    with serving(chat_folder, idle_seconds=0.5) as served, served.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        # Logprobs make more text than the buffers of both sides take.
        given = {"prompt": [PROMPT] * 64, "max_tokens": 900, "ignore_eos": True, "stream": True, "logprobs": 20}
        body = json.dumps(given).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        deadline = time.monotonic() + HANG_S
        while not any("end=slow" in line for line in records):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        check_idle(served)


def test_full_queue_asks_to_come_back(chat_folder: Path) -> None:
    with serving(chat_folder, EngineConfig(max_waiting=2)) as served:
        status, headers, body = ask(served, "/v1/completions", {"prompt": [PROMPT] * 8})
        assert (status, headers["retry-after"], body["error"]["type"]) == (429, "1", "rate_limit_error")
        check_idle(served)
        assert ask(served, "/v1/completions", {"prompt": PROMPT})[0] == 200


def test_limits_of_a_request(chat_folder: Path) -> None:
    limits = {"max_new_tokens": 100, "max_choices": 4, "max_prompt_tokens": 10, "request_seconds": 0.0}
    with serving(chat_folder, **limits) as served:
        for given, param in [
            ({"max_tokens": 101}, "max_tokens"),
            ({"max_tokens": 26, "n": 4}, "max_tokens"),
            ({"n": 5}, "n"),
            ({"prompt": [PROMPT] * 5}, "n"),
            ({"prompt": PROMPT * 2}, "prompt"),
        ]:
            status, _, body = ask(served, "/v1/completions", {"prompt": PROMPT, **given})
            assert (status, body["error"]["param"]) == (400, param)
        status, _, body = ask(served, "/v1/completions", {"prompt": PROMPT, "stream": True})
        assert (status, body["error"]["code"]) == (504, "timeout")


def test_health_waits_for_no_step(served: Served) -> None:
    """While a step runs, the server lives but is not ready; with a full queue it is not ready either."""
    blocked = threading.Event()
    served.service.engine._worker.submit(blocked.wait)
    with ThreadPoolExecutor() as pool:
        ready = pool.submit(ask, served, "/ready")
        assert ask(served, "/health")[0] == 200
        assert not ready.done()
        blocked.set()
        assert ready.result()[0] == 200
    served.service.config, config = replace(served.service.config, max_waiting=0), served.service.config
    assert ask(served, "/ready")[0] == 429
    served.service.config = config


def test_key_is_asked_for_on_every_route(chat_folder: Path) -> None:
    with serving(chat_folder, api_key="secret") as served:
        paths = [path for path in served.call(openapi(served))["paths"] if "{" not in path]
        for path in [*paths, "/", "/openapi.json", "/nothing"]:
            status = ask(served, path)[0]
            assert (status == 401) == (path != "/health"), path
        assert "Basic" in ask(served, "/")[1]["www-authenticate"]
        basic = base64.b64encode(b"anyone:secret").decode()
        for sent in ({"authorization": "Bearer secret"}, {"x_api_key": "secret"}, {"authorization": f"Basic {basic}"}):
            assert ask(served, "/version", **sent)[0] == 200
        for sent in ({"authorization": "Bearer secre"}, {"x_api_key": "\xe9"}, {"authorization": "Basic %%"}):
            assert ask(served, "/version", **sent)[0] == 401


async def openapi(served: Served) -> Any:
    return served.app.openapi()


def wait_until_refused(port: int) -> None:
    """Until nothing listens any more."""
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            return
        time.sleep(0.01)
    pytest.fail(f"port {port} accepts connections after SIGTERM")


@pytest.mark.thorough  # starts processes
@pytest.mark.parametrize("signals", [1, 2])
def test_drain(signals: int, tmp_path: Path) -> None:
    """SIGTERM lets a stream end, and refuses new ones; a second one does not. Both exit with 0.

    The process publishes its events under the topic that it is given.
    """
    events = zmq.Context.instance().socket(zmq.SUB)
    events.setsockopt(zmq.SUBSCRIBE, b"kv@")
    is_connected = events.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    events.connect(f"ipc://{tmp_path}/events")
    command = [sys.executable, "-m", "paged", "serve", "--port", "0", "--num-blocks", "256", "--log-format", "json"]
    command += ["--drain-seconds", "300"]  # a busy machine needs more than the default for 900 tokens
    command += ["--kv-events", f"ipc://{tmp_path}/events", "--kv-events-topic", "kv@10.0.0.7:8000@recall"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    line = process.stdout.readline()
    found = re.match(r"paged: http://127.0.0.1:(\d+) \(this machine only.*4,096 tokens of cache free, backend", line)
    assert found is not None, line
    assert is_connected.poll(1000 * HANG_S)
    connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=HANG_S)
    body = {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), JSON)
    answer = connection.getresponse()
    answer.readline()
    assert events.poll(1000 * HANG_S)
    process.send_signal(signal.SIGTERM)
    wait_until_refused(int(found[1]))
    if signals == 2:
        process.send_signal(signal.SIGTERM)
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            answer.read()
    else:
        assert answer.read().endswith(b"data: [DONE]\n\n")
    assert process.wait(HANG_S) == 0
    topic, number = events.recv_multipart()[:2]  # the first ones may come before it listens
    assert topic == b"kv@10.0.0.7:8000@recall"
    assert len(number) == 8
    events.disable_monitor()
    events.close(linger=0)
    lines = process.stderr.read().splitlines()
    assert lines[0].startswith("paged: loading "), "off a terminal too"
    memory = re.search(r"weights ([\d,]+) bytes, cache 257 blocks .* = ([\d,]+) bytes, longest request 1,024", lines[1])
    assert memory is not None, lines
    weights, cache = (int(count.replace(",", "")) for count in memory.groups())
    executor = LlmExecutor.from_pretrained(RECALL, num_blocks=256)
    assert weights == executor.capabilities().memory_requirements.weight_bytes
    assert cache == executor.model.kv_manager.tensors.storage.nbytes
    record = json.loads(lines[-1])
    assert record["end"] == ("length" if signals == 1 else "left")
    assert record["new_tokens"] == 900 or signals == 2


STUCK = """
import sys, time
from paged.serving.command_line import cli
from paged.executors.engine.engine import Engine
from paged.serving.text.chat_tokenizer import ChatTokenizer

def stuck(*args, **options):
    print("stuck", flush=True)
    time.sleep(1e6)

{method} = stuck
sys.exit(cli.main(["serve", "--port", "0", "--num-blocks", "256", "--no-warmup", "--drain-seconds", "0.5"]))
"""


@pytest.mark.thorough  # starts processes
@pytest.mark.parametrize(
    ("method", "path", "signals"), [("ChatTokenizer.encode", "/tokenize", 1), ("Engine.step", "/v1/completions", 2)]
)
def test_threads_that_never_end_do_not_hold_the_process(method: str, path: str, signals: int) -> None:
    command = [sys.executable, "-c", STUCK.format(method=method)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = re.match(r"paged: http://127.0.0.1:(\d+)", process.stdout.readline())
        assert port is not None
        connection = http.client.HTTPConnection("127.0.0.1", int(port[1]), timeout=HANG_S)
        connection.request("POST", path, json.dumps({"prompt": [5, 17, 3] if "Engine" in method else "kite"}), JSON)
        assert process.stdout.readline() == "stuck\n"
        for _ in range(signals):
            process.send_signal(signal.SIGTERM)
        assert process.wait(HANG_S) == 0
        connection.close()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.thorough  # starts processes
def test_sigterm_ends_beside_grammars_that_compile_for_ever() -> None:
    """The server ends after the time to drain, and so do the processes that compile."""
    command = [sys.executable, "-m", "paged", "serve", "--port", "0", "--num-blocks", "256", "--no-warmup"]
    command += ["--drain-seconds", "1", "--compile-seconds", "3600"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    found = re.match(r"paged: http://127.0.0.1:(\d+)", process.stdout.readline())
    assert found is not None
    connections = []
    for number in range(4):
        connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=HANG_S)
        body = {"prompt": PROMPT, "structured_outputs": {"structural_tag": slow_tag(1900 + number)}}
        connection.request("POST", "/v1/completions", json.dumps(body), JSON)
        connections.append(connection)
    wait_until(lambda: len(branches_of(PROCESS, process.pid)) == 2 + 4)  # the root, the vocabulary
    pids = branches_of(PROCESS, process.pid)
    process.send_signal(signal.SIGTERM)
    assert process.wait(HANG_S) == 0
    wait_until(lambda: not any(map(is_alive, pids)))


def test_models_without_images_refuse_them(served: Served) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    status, _, found = ask(served, "/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]})
    assert (status, found["error"]["param"]) == (400, "image_url")
    assert "takes no images" in found["error"]["message"]
