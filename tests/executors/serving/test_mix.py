"""Hostile clients of every kind beside honest ones, against the server's own process.

SOAK=1 mixes 10,000 requests in place of 200, and compares the seconds of honest ones with those without the others.
"""

import asyncio
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paged import ChatTokenizer, Engine, LlmExecutor, SamplingParams
from paged.executors.command_line.cli import RECALL
from paged.models.recall.task import sample_prompts
from tests.deadline import HANG_S
from tests.executors.serving.conftest import TEMPLATE
from tests.executors.serving.test_stalls import LARGE, hostile_bodies
from tests.interop.test_structured import ambiguous

IS_SOAK = "SOAK" in os.environ
REQUESTS = 10_000 if IS_SOAK else 200
ROUNDS = 10 if IS_SOAK else 1
STREAMS = 4
HONEST_SHARE = 4  # honest requests to a hostile one
DRAIN_S = 1.0
# Words of the vocabulary that become pieces of calls and of grammars.
PIECES = {"zebra:": "[TOOL_CALLS]", "yak:": "a", "wren:": "b", "wombat:": "\u2003" * 40, "wolf:": "{", "weasel:": '"'}
GET = b"GET %s HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
COMPLETION, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled checkpoint with a chat template, and with words that hostile answers are made of."""
    copy = tmp_path_factory.mktemp("mixed") / "recall"
    shutil.copytree(RECALL, copy, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (copy / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    for word, piece in PIECES.items():
        vocabulary[piece] = vocabulary.pop(word)
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    return copy


@contextmanager
def server(folder: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server of its own process, and its port."""
    options = {"idle": 10, "compile": 1, "drain": DRAIN_S}
    command = [sys.executable, "-m", "paged", "serve", str(folder), "--port", "0", "--num-blocks", "4096"]
    command += ["--tool-parser", "mistral", *(f"--{name}-seconds={value}" for name, value in options.items())]
    with open(folder.parent / "log", "w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        port = re.match(r"paged: http://127.0.0.1:(\d+)", process.stdout.readline())
        assert port is not None
        yield process, int(port[1])
    finally:
        process.kill()
        process.communicate()


def as_bytes(path: str, body: Any, more: str = "connection: close\r\n") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{more}"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


async def exchange(port: int, request: bytes) -> tuple[int, bytes]:
    """Status and body of the answer to a request that closes its connection; status 0 if there is none."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        with suppress(ConnectionError):
            await writer.drain()
        answer = b""
        with suppress(ConnectionError):
            answer = await reader.read()
        head, _, data = answer.partition(b"\r\n\r\n")
        return int(head[9:12] or 0), data
    finally:
        writer.close()


# Honest requests, and what the engine answers to them.

Honest = tuple[str, bytes, Callable[[bytes], Any], Any]
"""A kind, a request, what reads its answer, and what that returns."""


def honest_requests(folder: Path, seed: int) -> list[Honest]:
    tokenizer = ChatTokenizer.from_folder(folder)
    executor = LlmExecutor.from_pretrained(folder, num_blocks=4096)
    engine = Engine(executor, tokenizer=tokenizer, eos_token_ids=tokenizer.eos_token_ids)
    prompts = [prompt.text for prompt in sample_prompts(seed, 60, 16, 120)]
    ids = [tokenizer.encode(prompt) for prompt in prompts]

    def texts(**params: Any) -> list[str]:
        outputs = engine.generate(ids, SamplingParams(**params), progress=False)
        return [output.outputs[0].text for output in outputs]

    long: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    sampled = {"temperature": 1.2, "seed": 5, "max_tokens": 12, "ignore_eos": True}
    few = {"temperature": 0, "max_tokens": 8}
    form = {"structured_outputs": {"regex": "([a-z]+ ?){1,3}"}}
    kinds = ["greedy", "sampled", "streamed", "chat", "grammar"]
    expected = [texts(**long), texts(**sampled), texts(**long), texts(**few), texts(**few)]
    requests: list[Honest] = []
    for index, prompt in enumerate(prompts):
        bodies = [
            (COMPLETION, {"prompt": prompt, **long}, completed),
            (COMPLETION, {"prompt": prompt, **sampled}, completed),
            (COMPLETION, {"prompt": prompt, **long, "stream": True}, streamed),
            (CHAT, {"messages": [{"role": "user", "content": prompt}], **few}, said),
            (COMPLETION, {"prompt": prompt, **few, **form}, completed),
        ]
        for kind, answers, (path, body, read) in zip(kinds, expected, bodies, strict=True):
            requests.append((kind, as_bytes(path, body), read, answers[index]))
    executor.shutdown()
    return requests


def completed(data: bytes) -> Any:
    return json.loads(data)["choices"][0]["text"]


def said(data: bytes) -> Any:
    return json.loads(data)["choices"][0]["message"]["content"]


def streamed(data: bytes) -> Any:
    lines = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: {")]
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines)


# Hostile ones: each kind sends, and returns the status of its answer, 0 without one.

Hostile = Callable[[int, random.Random], Awaitable[int]]


def plain(make: Callable[[random.Random], bytes]) -> Hostile:
    async def send(port: int, rng: random.Random) -> int:
        return (await exchange(port, make(rng)))[0]

    return send


def held(make: Callable[[random.Random], list[bytes]]) -> Hostile:
    """Sends parts, a tenth of a second apart, holds the connection for three seconds, and reads nothing."""

    async def send(port: int, rng: random.Random) -> int:
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=4096)
        with suppress(ConnectionError):
            for part in make(rng):
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0.1)
            await asyncio.sleep(3)
        writer.transport.abort()
        return 0

    return send


async def left(port: int, rng: random.Random) -> int:
    """Leaves amid a stream, or before anything has come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(as_bytes(COMPLETION, {"prompt": "kite", "max_tokens": 900, "ignore_eos": True, "stream": True}))
    line = b""
    if rng.random() < 0.7:
        line = await reader.readline()
    writer.transport.abort()
    return int(line[9:12] or 0)


def schema(rng: random.Random) -> dict[str, Any]:
    """Takes xgrammar longer than the server's limit."""
    return {"properties": {f"p{index}": {} for index in range(rng.randint(1200, 2000))}}


def call(rng: random.Random, words: dict[str, int]) -> dict[str, Any]:
    """Lets the model write pieces of calls at random."""
    pieces = [words[piece] for piece in rng.sample(list(PIECES.values()), 3)] + [words["[TOOL_CALLS]"]]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    body = {"messages": [{"role": "user", "content": "kite"}], "tools": tools, "allowed_token_ids": pieces}
    return body | {"temperature": 2, "max_tokens": 200, "ignore_eos": True, "stream": rng.random() < 0.5}


def hostile_kinds(folder: Path) -> dict[str, Hostile]:
    words = ChatTokenizer.from_folder(folder).tokenizer.get_vocab()
    bodies = [as_bytes(path, body) for path, _, body in hostile_bodies(42 if IS_SOAK else 14, 11)]
    large = [as_bytes(path, body) for path, body in LARGE]
    text = "kite " * 600_000
    long = [as_bytes(COMPLETION, {"prompt": text}), as_bytes(EMBEDDINGS, {"input": [text]})]
    long += [as_bytes("/tokenize", {"prompt": text}), as_bytes(CHAT, {"messages": [{"role": "user", "content": text}]})]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * (3 << 20)}}
    images = as_bytes(CHAT, {"messages": [{"role": "user", "content": [image]}]})
    get = GET.replace(b"close", b"keep-alive") % b"/version"
    unread = {"prompt": "kite", "max_tokens": 200, "ignore_eos": True, "stream": True, "logprobs": 20}
    grammar = {"prompt": "kite", "max_tokens": 200, "allowed_token_ids": [words["a"]], "temperature": 1}
    odd: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"self": 1}}),
        (COMPLETION, {"prompt": "kite", "logit_bias": {"1000000": 1}}),
        (COMPLETION, {"prompt": "kite", "allowed_token_ids": []}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "tool_choice": "required"}),
        (COMPLETION, {"prompt": [5] * 1500}),
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/"}),
    ]

    def refused(rng: random.Random) -> bytes:
        path, body = rng.choice(odd)
        return as_bytes(
            path, body, rng.choice(["", "host: evil\r\n", "origin: http://evil\r\n"]) + "connection: close\r\n"
        )

    def structured(rng: random.Random) -> bytes:
        return as_bytes(COMPLETION, grammar | {"structured_outputs": {"grammar": ambiguous(rng)}})

    def endless(rng: random.Random) -> bytes:
        return as_bytes(COMPLETION, {"prompt": "kite", "structured_outputs": {"json": schema(rng)}})

    def embeddings(rng: random.Random) -> bytes:
        return as_bytes(EMBEDDINGS, {"input": ["kite " * rng.randint(1, 500)] * rng.choice([1, 30, 300])})

    def idle(rng: random.Random) -> list[bytes]:
        return rng.choice([[get, *[b"\r\n"] * 10], [b""], [get[:30]], [b"\r\n"] * 10, [as_bytes(COMPLETION, "a")[:-1]]])

    return {
        "body": plain(lambda rng: rng.choice(bodies)),
        "large": plain(lambda rng: rng.choice(large)),
        "long text": plain(lambda rng: rng.choice(long)),
        "image": plain(lambda rng: images),
        "refused": plain(refused),
        "reader": plain(lambda rng: as_bytes(CHAT, call(rng, words))),
        "grammar": plain(structured),
        "compile": plain(endless),
        "embeddings": plain(embeddings),
        "idle": held(idle),
        "unread": held(lambda rng: [as_bytes(COMPLETION, unread, "")]),
        "left": left,
    }


class Clients:
    """Sends requests, and keeps seconds and statuses by kind."""

    def __init__(self, port: int, requests: list[Honest], kinds: dict[str, Hostile]) -> None:
        self._port, self._requests, self._kinds = port, requests, kinds
        self._rng = random.Random(3)
        self.honest_seconds: dict[bool, list[float]] = {False: [], True: []}  # by whether there are hostile ones
        self.hostile_seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        self.statuses: dict[str, Counter[int]] = {kind: Counter() for kind in kinds}

    async def run(self, count: int, *, is_mixed: bool) -> None:
        """Send honest requests by several streams, and with every fourth of them a hostile one."""
        numbers, tasks = iter(range(count)), list[asyncio.Task[None]]()

        async def stream() -> None:
            for number in numbers:
                if is_mixed and number % HONEST_SHARE == 0:
                    tasks.append(asyncio.create_task(self.attack(number // HONEST_SHARE)))
                await self._ask(self._rng.choice(self._requests), is_mixed)

        await asyncio.gather(*(stream() for _ in range(STREAMS)))
        await asyncio.gather(*tasks)

    async def attack(self, number: int) -> None:
        kind = list(self._kinds)[number % len(self._kinds)]
        begun = time.perf_counter()
        status = await self._kinds[kind](self._port, random.Random(self._rng.random()))
        self.hostile_seconds[kind].append(time.perf_counter() - begun)
        self.statuses[kind][status] += 1

    async def _ask(self, honest: Honest, is_mixed: bool) -> None:
        kind, request, read, expected = honest
        begun = time.perf_counter()
        status, data = await exchange(self._port, request)
        seconds = time.perf_counter() - begun
        self.honest_seconds[is_mixed].append(seconds)
        assert status == 200, (kind, seconds, data)
        assert read(data) == expected, kind

    def print(self) -> None:
        print("\nseconds p50, p99, most; statuses, 0 without an answer")
        for is_mixed, seconds in self.honest_seconds.items():
            if seconds:
                print(f"honest {'mixed' if is_mixed else 'alone'}", quantiles(seconds), len(seconds))
        for kind, seconds in self.hostile_seconds.items():
            print(f"{kind:12}", quantiles(seconds), dict(sorted(self.statuses[kind].items())))

    def p99(self, *, is_mixed: bool) -> float:
        return float(np.quantile(self.honest_seconds[is_mixed], 0.99))


def quantiles(seconds: list[float]) -> str:
    return "  ".join(f"{value:6.3f}" for value in np.quantile(seconds, [0.5, 0.99, 1.0]))


async def until_idle(port: int) -> None:
    """Wait until the engine holds nothing."""
    end, states = time.monotonic() + HANG_S, ["waiting", "prefilling", "decoding"]
    while any(map(json.loads((await exchange(port, GET % b"/v1/paged/blocks"))[1]).get, states)):
        assert time.monotonic() < end


@pytest.mark.thorough  # 15 s
def test_hostile_and_honest_requests_mixed(folder: Path) -> None:
    """Honest answers are the engine's own, nothing is the server's fault, and SIGTERM ends it amid all kinds."""
    requests, kinds = honest_requests(folder, 3), hostile_kinds(folder)
    with server(folder) as (process, port):
        clients = Clients(port, requests, kinds)

        async def run() -> None:
            count = REQUESTS * HONEST_SHARE // (HONEST_SHARE + 1) // ROUNDS
            await clients.run(len(requests) // 10, is_mixed=False)  # what is made on first use
            clients.honest_seconds[False].clear()
            for _ in range(ROUNDS):
                if IS_SOAK:
                    await clients.run(count // 4, is_mixed=False)
                await clients.run(count, is_mixed=True)
            await until_idle(port)
            statuses = set().union(*clients.statuses.values())
            tasks = [asyncio.create_task(clients.attack(number)) for number in range(4 * len(kinds))]
            await asyncio.sleep(0.5)
            process.send_signal(signal.SIGTERM)
            begun = time.monotonic()
            assert await asyncio.to_thread(process.wait, HANG_S) == 0
            drained = time.monotonic() - begun
            await asyncio.gather(*tasks, return_exceptions=True)
            clients.print()
            print(f"{drained:.2f} s from SIGTERM to the end, of {DRAIN_S} s to drain")
            assert max(statuses) < 500
            assert drained < DRAIN_S + 1 or not IS_SOAK

        asyncio.run(run())
    assert "Traceback" not in (folder.parent / "log").read_text()
    if IS_SOAK:
        assert clients.p99(is_mixed=True) < 1.5 * clients.p99(is_mixed=False)
