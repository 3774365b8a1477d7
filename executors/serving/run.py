"""Serves an engine until a signal."""

from __future__ import annotations

import contextlib
import socket

from paged.errors import InvalidInputError
from paged.executors.engine.async_engine import AsyncEngine
from paged.executors.engine.engine import Engine
from paged.executors.requests.sampling_params import SamplingParams
from paged.executors.serving.app import make_app
from paged.executors.serving.config import ServeConfig
from paged.executors.serving.protocol import Server
from paged.executors.serving.service import Service
from paged.executors.text.chat_tokenizer import ChatTokenizer
from paged.executors.vision.vision_model import VisionModel
from paged.printable import one_line


async def serve(
    engine: Engine,
    tokenizer: ChatTokenizer,
    config: ServeConfig,
    defaults: SamplingParams,
    backend: str,
    vision: VisionModel | None = None,
) -> None:
    """Say where and what is served, and serve it.

    Args:
        defaults: what the checkpoint says of sampling.
        backend: name of the backend, to be said.
        vision: what encodes images, None if the model takes none.

    Raises:
        InvalidInputError: an address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        listener = socket.create_server((config.host, config.port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise InvalidInputError(f"--host {config.host} --port {config.port}: {error}") from error
    info, manager = engine.executor.info(), engine.executor.kv_manager
    with contextlib.ExitStack() as stack:
        stack.enter_context(listener)
        if config.kv_events is not None and manager is not None:
            from paged.interop.kv_events import KvEventPublisher

            publisher = KvEventPublisher(
                manager, config.kv_events, replay_endpoint=config.kv_events_replay, topic=config.kv_events_topic
            )
            stack.callback(publisher.close)
        async with AsyncEngine(engine) as running:
            app = make_app(Service(running, tokenizer, config, defaults, vision))
            host, port = listener.getsockname()[:2]
            where = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            note = " (this machine only, see --host)" if host in ("127.0.0.1", "::1") else ""
            free = 0 if manager is None else manager.stats().free_blocks * manager.config.block_size
            print(
                f"paged: {where}{note}, {one_line(config.model_name)} in {info.dtype} on {info.device}, "
                f"{free:,} tokens of cache free, backend {backend}",
                flush=True,
            )
            await Server(app, config).serve(sockets=[listener])
