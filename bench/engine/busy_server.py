"""A server beside a busy process of another user: the time between the tokens of its streams."""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median, quantiles
from time import monotonic, perf_counter

import torch

import paged
from paged.bench.benchmark import Json, Setting
from paged.bench.engine.models import MODELS, save_random
from paged.bench.limits import at_most, times_us
from paged.bench.neighbours import cores_left, neighbours
from paged.bench.watchdog import WATCHDOG
from paged.executors.thread_waits import without_our_choice

MODEL = "Llama-100M"
_STREAMS, _PROMPT_TOKENS, _NEW_TOKENS = 16, 32, 128
_TURNS = 5
_MOST_OVER_QUIET = 2.0
_MOST_TURN_S = 120.0
_NUM_PROBES, _PROBE_S = 2, 1.0
_EVENT, _LAST_EVENT = b"\ndata: {", b"\ndata: [DONE]"


def server(name: str, setting: Setting) -> Json:
    """Time the tokens of streams that begin together, in turns without and with a busy process.

    detail: milliseconds between tokens of both, medians and the 99th percentiles. quiet_cores: as in `busy_peers`, of
    two threads.
    """
    quiet: list[float] = []
    busy: list[float] = []
    with tempfile.TemporaryDirectory() as folder, _serving(Path(folder)) as port:
        _gaps(port)  # warms up
        quiet_cores = cores_left(_NUM_PROBES, _PROBE_S)
        for _ in range(min(_TURNS, setting.repeats)):
            quiet += _gaps(port)
            with neighbours(1, most_seconds=_MOST_TURN_S):
                busy += _gaps(port)
    quiet_p99, busy_p99 = _p99(quiet), _p99(busy)
    detail = {
        "quiet_cores": quiet_cores,
        "quiet_ms": 1e3 * median(quiet),
        "quiet_p99_ms": 1e3 * quiet_p99,
        "busy_ms": 1e3 * median(busy),
        "busy_p99_ms": 1e3 * busy_p99,
    }
    text = f"{_MOST_OVER_QUIET} x the quiet 99th percentile between tokens"
    goals = [at_most(text, busy_p99 / quiet_p99, _MOST_OVER_QUIET)]
    return {"name": name, **times_us(busy), "goals": goals, "detail": detail}


def _p99(seconds: list[float]) -> float:
    return quantiles(seconds, n=100, method="inclusive")[98]


@contextmanager
def _serving(folder: Path) -> Iterator[int]:
    """Serve random weights by `paged serve` in a process and a session of its own; yield its port."""
    config = MODELS[MODEL]
    save_random(config, torch.bfloat16, str(folder))
    _save_tokenizer(folder, config["vocab_size"])
    variables = without_our_choice(os.environ)
    variables["PYTHONPATH"] = str(Path(paged.__file__).parents[1])
    num_tokens = 2 * _STREAMS * (_PROMPT_TOKENS + _NEW_TOKENS)
    command = [sys.executable, "-P", "-m", "paged", "serve", str(folder), "--port", "0"]
    command += ["--block-size", "16", "--num-blocks", str(num_tokens // 16)]
    log_path = folder / "server.log"
    with log_path.open("w") as log:
        process = subprocess.Popen(
            command, env=variables, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        )
    try:
        WATCHDOG.progress()
        assert process.stdout is not None
        line = process.stdout.readline()
        address = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        if address is None:
            raise RuntimeError(f"paged serve ended with {process.wait()}: {log_path.read_text()[-2000:]}")
        yield int(address[1])
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _save_tokenizer(folder: Path, vocab_size: int) -> None:
    """Save a tokenizer whose tokens are words, so that each has a text."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {f"w{token}": token for token in range(vocab_size)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))


class _Stream:
    """A request's stream of events over its own connection, read without waiting."""

    def __init__(self, port: int, body: Json) -> None:
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=_MOST_TURN_S)
        self.socket.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        self.times: list[float] = []
        self._received = b""
        self._num_events = 0

    def read(self) -> bool:
        """Note the time of new events; return whether the stream has ended."""
        data = self.socket.recv(1 << 16)
        now = perf_counter()
        self._received += data
        num_events = self._received.count(_EVENT)
        self.times += [now] * (num_events - self._num_events)
        self._num_events = num_events
        if not data:
            raise RuntimeError(f"the server closed a stream: {self._received[:500]!r}")
        return _LAST_EVENT in self._received


def _gaps(port: int) -> list[float]:
    """Run all streams at once; return the seconds between the events of each."""
    WATCHDOG.progress()
    end = monotonic() + _MOST_TURN_S
    streams = []
    with selectors.DefaultSelector() as selector:
        for index in range(_STREAMS):
            prompt = list(range(index, index + _PROMPT_TOKENS))
            body = {"prompt": prompt, "max_tokens": _NEW_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
            stream = _Stream(port, body)
            streams.append(stream)
            selector.register(stream.socket, selectors.EVENT_READ, stream)
        while selector.get_map():
            if monotonic() > end:
                raise TimeoutError(f"{len(selector.get_map())} streams did not end within {_MOST_TURN_S} s")
            for key, _ in selector.select(timeout=1.0):
                if key.data.read():
                    selector.unregister(key.data.socket)
                    key.data.socket.close()
    gaps = []
    for stream in streams:
        for earlier, later in zip(stream.times, stream.times[1:], strict=False):
            gaps.append(later - earlier)
    return gaps
