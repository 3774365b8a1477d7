"""A server of the bundled checkpoint in a thread, and the engine behind it."""

import asyncio
import contextlib
import logging
import shutil
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from paged import AsyncEngine, ChatTokenizer, Engine, EngineConfig, LlmExecutor, ModelExecutor, SamplingParams
from paged.serving.command_line.cli import RECALL
from paged.serving.formats.tool_formats import MarkedTokenizer
from paged.serving.http import protocol
from paged.serving.http.app import make_app
from paged.serving.http.config import ServeConfig
from paged.serving.http.protocol import Server, run
from paged.serving.http.service import Service
from paged.serving.vision.vision_model import VisionModel
from tests.deadline import HANG_S

TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


@dataclass
class Served:
    port: int
    engine: Engine
    service: Service
    server: Server
    app: Any
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(HANG_S)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=HANG_S)


@contextlib.contextmanager
def serving(
    folder: Path | ModelExecutor,
    engine_config: EngineConfig | None = None,
    tokenizer: ChatTokenizer | None = None,
    *,
    spans: Any = None,
    **options: Any,
) -> Iterator[Served]:
    """Serve a folder, or an executor with a tokenizer; at the end the engine holds nothing."""
    executor: Any = folder
    vision = None
    if tokenizer is None:
        tokenizer = ChatTokenizer.from_folder(executor)
        vision = VisionModel.from_folder(executor, tokenizer) if VisionModel.is_in(executor) else None
        executor = LlmExecutor.from_pretrained(executor, num_blocks=256, max_loras=2)
    engine = Engine(
        executor, engine_config, tokenizer=MarkedTokenizer(tokenizer), eos_token_ids=tokenizer.eos_token_ids
    )
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    config = ServeConfig(model_name="recall", **options)
    begun, found = threading.Event(), []

    async def serve() -> None:
        async with AsyncEngine(engine) as running:
            service = Service(
                running, tokenizer, config, getattr(executor, "default_sampling_params", SamplingParams()), vision
            )
            gate = make_app(service, spans)
            server, port = Server(gate, config), listener.getsockname()[1]
            found.append(Served(port, engine, service, server, gate.app, asyncio.get_running_loop()))
            begun.set()
            await server.serve(sockets=[listener])

    thread = threading.Thread(target=run, args=(serve(),))
    # To collect among the objects of all tests, as a server does at its start, takes 0.7 s. Without that it must not
    # freeze objects either: what earlier tests dropped would then stay.
    no_gc = SimpleNamespace(collect=lambda: 0, freeze=lambda: None, unfreeze=lambda: None)
    with mock.patch.object(protocol, "gc", no_gc):
        thread.start()
        assert begun.wait(HANG_S)
        try:
            yield found[0]
        finally:
            found[0].server.should_exit = True
            thread.join(HANG_S)
    assert not thread.is_alive()
    assert engine.num_unfinished == 0
    assert executor.kv_manager.stats().num_sequences == 0
    executor.kv_manager.check_integrity()


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled checkpoint with a chat template."""
    folder = tmp_path_factory.mktemp("served") / "recall"
    shutil.copytree(RECALL, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def served(chat_folder: Path) -> Iterator[Served]:
    with serving(chat_folder) as found:
        yield found


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines of the log."""
    lines: list[str] = []
    keep: Callable[..., None] = lambda record: lines.append(record.getMessage())  # noqa: E731
    handler = logging.Handler(logging.INFO)
    monkeypatch.setattr(handler, "emit", keep)
    logger = logging.getLogger("paged.serve")
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "level", logging.INFO)
    return lines
