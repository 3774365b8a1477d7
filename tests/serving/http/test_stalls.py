"""How long hostile bodies stop the event loop, and that each of them is answered as the client's fault, by name."""

import asyncio
import http.client
import json
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from itertools import chain
from typing import Any, get_type_hints

import pytest

from paged import ChatTokenizer
from paged.serving.http import app
from tests.deadline import HANG_S
from tests.serving.http.test_limits import JSON, ask
from tests.serving.http.test_openai import PROMPT, check_idle
from tests.serving.served import Served

SIZE = (4 << 20) - 4096
MESSAGE = {"role": "user", "content": "a"}
# A right body of each route, without what is optional.
RIGHT: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT},
    "/v1/chat/completions": {"messages": [MESSAGE]},
    "/v1/embeddings": {"input": PROMPT},
    "/v1/responses": {"input": PROMPT},
    "/v1/messages": {"messages": [MESSAGE], "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": [MESSAGE]},
    "/tokenize": {"prompt": PROMPT},
    "/detokenize": {"tokens": [1]},
}
ITEMS = [b"0", b'""', b'"",0', b"[]", b"{}", b"[[]]", b'{"a":[]}', b"1.5", b"null", b"9" * 390, b"9" * 4000, b"123456"]
ITEMS += [json.dumps(MESSAGE).encode(), b'{"type":"text","text":""}', b'{"type":"function","function":{"name":"a"}}']


def repeated(item: bytes) -> bytes:
    return b",".join([item] * (SIZE // (len(item) + 1)))


def hostile_value(rng: random.Random) -> bytes:
    """JSON of 4 MB."""
    form, item = rng.choice("list lists object keys text deep deep_list digits".split()), rng.choice(ITEMS)
    if form == "list":
        return b"[" + repeated(item) + b"]"
    if form == "lists":
        return b"[[" + repeated(item) + b"]]"
    if form == "object":
        return b'{"a":[' + repeated(item) + b"]}"
    if form == "keys":
        return b"{" + b",".join(b'"%d":%s' % (index, item) for index in range(SIZE // (len(item) + 10))) + b"}"
    if form == "text":
        letter = rng.choice(["a", "a ", "\u65e5", "[", ",", '\\"', "\\\\", "\\u65e5", "<|end|>", "9"]).encode()
        return b'"' + letter * (SIZE // len(letter)) + b'"'
    if form == "deep":
        return b"[" * (SIZE // 2) + b"]" * (SIZE // 2)
    if form == "deep_list":
        return b"[" * 900 + repeated(item) + b"]" * 900
    return b"9" * SIZE


def hostile_bodies(count: int, seed: int) -> Iterator[tuple[str, str, bytes]]:
    """A route, the argument that is wrong, and the body; of every route, and of arguments that it does not know."""
    rng = random.Random(seed)
    for index in range(count):
        path = list(RIGHT)[index % len(RIGHT)]
        kind = get_type_hints(app._ROUTES["POST"][path])["body"]
        name = rng.choice([*kind.__struct_fields__, "unknown"])
        rest = {key: value for key, value in RIGHT[path].items() if key != name}
        value = hostile_value(rng)
        begin = json.dumps(rest)[:-1] + (", " if rest else "") + f'"{name}":'
        yield path, name, begin.encode() + value + b"}"


async def longest_gap(work: Callable[[], Awaitable[Any]]) -> float:
    """Seconds that the loop did not run while `work` did, of the time that this process had a CPU."""
    worst, is_done = 0.0, False

    async def tick() -> None:
        nonlocal worst
        while not is_done:
            wall, cpu = time.perf_counter(), time.process_time()
            await asyncio.sleep(0.001)
            worst = max(worst, min(time.perf_counter() - wall, time.process_time() - cpu))

    ticking = asyncio.ensure_future(tick())
    try:
        await work()
    finally:
        is_done = True
        await ticking
    return worst


def measured(served: Served, path: str, body: bytes) -> tuple[float, int, bytes]:
    """The longest gap, the status and the answer, which is not read as JSON: that would stop the loop, too."""

    def send() -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
        connection.request("POST", path, body, JSON)
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        return answer.status, data

    async def work() -> None:
        nonlocal answer
        answer = await asyncio.to_thread(send)

    answer = 0, b""
    gap = served.call(longest_gap(work))
    return gap, *answer


CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
CALL = {"function": {"name": "a", "arguments": "{}"}}
ARGUMENTS = {"function": {"name": "a", "arguments": "[" + "[]," * 10_000 + "[]]"}}
TOOLS = [{"type": "function", "function": {"name": f"f{index}", "parameters": {}}} for index in range(9000)]
# As much as a body may hold, and what a body holds within texts.
LARGE: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [{"role": "user", "x": 1, "y": 2}] * 30_000}),
    (CHAT, {"messages": [MESSAGE | {"x": [0] * 100_000, "y": [[]] * 30_000}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 32_000}]}),
    (CHAT, {"messages": [MESSAGE, {"role": "assistant", "tool_calls": [CALL] * 10_000}]}),
    (CHAT, {"messages": [MESSAGE, {"role": "assistant", "tool_calls": [ARGUMENTS] * 100}]}),
    (CHAT, {"messages": [MESSAGE], "tools": TOOLS}),
    (CHAT, {"messages": [MESSAGE], "tools": TOOLS, "tool_choice": "required"}),
    (CHAT, {"messages": [MESSAGE], "chat_template_kwargs": {"x": [0] * 100_000}}),
    (CHAT, {"messages": [MESSAGE], "n": 50, "logprobs": True, "top_logprobs": 20, "max_tokens": 100}),
    (
        "/v1/messages",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 32_000}], "max_tokens": 4},
    ),
    ("/v1/responses", {"input": "a", "instructions": "a" * SIZE}),
    (COMPLETION, {"prompt": "a ", "`$" * (SIZE // 2): 1}),
    (COMPLETION, {"prompt": "a ", "response_format": {"type": "`$" * (SIZE // 2)}}),
    (COMPLETION, {"prompt": [0] * 1_000_000}),
    (COMPLETION, {"prompt": [""] * 1_000_000}),
    (COMPLETION, {"prompt": ["a b"] * 256, "max_tokens": 1}),
    (COMPLETION, {"prompt": "a ", "allowed_token_ids": [5] * 262_144}),
    (COMPLETION, {"prompt": "a ", "logit_bias": dict.fromkeys(map(str, range(300_000)), 1)}),
    (COMPLETION, {"prompt": "a ", "metadata": dict.fromkeys(map(str, range(300_000)), 1)}),
    (COMPLETION, {"prompt": "a ", "structured_outputs": {"json": "[" + "[]," * 1_000_000 + "[]]"}}),
    (COMPLETION, {"prompt": "a ", "structured_outputs": {"json": {"enum": [0] * 1_000_000}}}),
    (COMPLETION, {"prompt": "a ", "structured_outputs": {"choice": ["a"] * 800_000}}),
    (COMPLETION, {"prompt": "otter: " * 500, "n": 64, "echo": True, "logprobs": 20, "max_tokens": 2}),
    (COMPLETION, {"prompt": "otter: " * 500, "n": 64, "echo": True, "logprobs": 20, "max_tokens": 2, "stream": True}),
    ("/tokenize", {"prompt": "a " * 65_000, "return_token_strs": True}),
    ("/detokenize", {"tokens": [5] * 65_000}),
]
# A part of a conversation is blamed as a part of it.
BLAMED = {"system": "messages", "instructions": "input"}


@pytest.mark.thorough  # ten seconds
@pytest.mark.usefixtures("frozen_objects")
def test_hostile_bodies_do_not_stop_the_loop(served: Served) -> None:
    """No gap is longer than what Python takes to read 4 MB of zeros twice, 100 to 180 ms; each error has a name."""
    plain = b"[" + repeated(b"0") + b"]"
    begun = time.process_time()
    json.loads(plain)
    unit = time.process_time() - begun
    large = [(path, "", json.dumps(body).encode()) for path, body in LARGE]
    for path, right in RIGHT.items():  # what is made on first use
        measured(served, path, json.dumps(right).encode())
    gaps = []
    for path, name, body in chain(large, hostile_bodies(70, 7)):
        gap, status, data = measured(served, path, body)
        gaps.append((gap, path, name, body[:80], status))
        assert status in (200, 400, 404), data
        if status == 400 and name:
            param = json.loads(data)["error"]["param"]  # None: too deep to look for a name
            assert param is None or param.split(".")[0] in (name, BLAMED.get(name)), (data, body[:100])
    gaps.sort(reverse=True)
    print(f"\nlongest gaps of the loop in ms; json.loads of 4 MB takes {1e3 * unit:.0f}")
    for gap, *what in gaps[:10]:
        print(f"{1e3 * gap:6.0f}", *what)
    check_idle(served)
    assert gaps[0][0] < 2 * unit


def test_short_texts_do_not_wait_for_long_ones(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, can_go_on, statuses = ChatTokenizer.encode, threading.Event(), list[int]()

    def wait_and_encode(self: ChatTokenizer, text: str, **options: Any) -> list[int]:
        if len(text) > 20_000:
            assert can_go_on.wait(HANG_S)
        return encode(self, text, **options)

    def send_long() -> None:
        statuses.append(ask(served, "/tokenize", {"prompt": "otter: " * 4000})[0])

    monkeypatch.setattr(ChatTokenizer, "encode", wait_and_encode)
    senders = [threading.Thread(target=send_long) for _ in range(4)]  # more than any pool has threads
    for sender in senders:
        sender.start()
    try:
        assert ask(served, COMPLETION, {"prompt": PROMPT, "max_tokens": 2})[0] == 200
        assert ask(served, CHAT, {"messages": [MESSAGE], "max_tokens": 2})[0] == 200
        assert not statuses
    finally:
        can_go_on.set()
        for sender in senders:
            sender.join(HANG_S)
    assert statuses == [200] * 4
