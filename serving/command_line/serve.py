"""`paged serve`: serve a checkpoint over the HTTP interfaces of OpenAI and Anthropic."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import socket
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from paged.errors import InvalidInputError, UnsupportedError
from paged.models.loading.checkpoint_folder import checkpoint_folder
from paged.serving.command_line.engine_arguments import add_checkpoint_arguments, add_engine_arguments, make_engine
from paged.serving.http.config import ServeConfig
from paged.tools.printable import one_line

if TYPE_CHECKING:
    from paged.cache.manager import PagedKvCacheManager
    from paged.serving.http.spans import RequestSpans
    from paged.serving.text.chat_tokenizer import ChatTokenizer
    from paged.serving.vision.vision_model import VisionModel

DESCRIPTION = (
    "Serve a checkpoint over HTTP: /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, a page at /, "
    "metrics. Without --host, only this machine can reach it. SIGTERM lets requests end, a second SIGTERM ends them."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the address, the server's options and limits, and the engine's arguments."""
    add_checkpoint_arguments(parser)
    server = parser.add_argument_group("server")
    for flag, options in ServeConfig.arguments().items():
        server.add_argument(flag, **options)
    add_engine_arguments(parser, 'load; requests name it as "model"; may be repeated')
    parser.set_defaults(token_budget=2048, chunk_size=None, seed=None, warmup=True)


def run(args: argparse.Namespace) -> int:
    """Load the model, print the address, and serve until a signal ends the process.

    Raises:
        InvalidInputError: the server cannot listen on the address.
        UnsupportedError: a package of the extra `serve` is not installed.
    """
    try:
        from paged.serving.formats.tool_formats import MarkedTokenizer, Tongue
        from paged.serving.http import protocol
        from paged.serving.http.app import make_app
        from paged.serving.http.service import Service, event_publisher
    except ImportError as error:
        raise UnsupportedError(f"paged serve needs {error.name}: pip install 'paged[serve]'") from error
    from paged.executors.engine.async_engine import AsyncEngine
    from paged.executors.requests.sampling_params import SamplingParams, sampling_defaults
    from paged.models.loading.hf_config import HfConfig
    from paged.serving.command_line.info import backend_of
    from paged.serving.text.chat_tokenizer import ChatTokenizer

    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    logging.getLogger("paged").setLevel(logging.INFO)
    folder = checkpoint_folder(args.model)
    print(f"paged: loading {one_line(str(folder))}", file=sys.stderr, flush=True)
    tokenizer = ChatTokenizer.from_folder(folder)
    vision = vision_of(folder, tokenizer, args)  # before the executor, whose cache takes the remaining memory
    tongue = Tongue.of(tokenizer, args.tool_parser, args.reasoning_parser)
    engine = make_engine(folder, args, MarkedTokenizer(tokenizer, tongue), max_waiting=args.max_waiting)
    info, manager = engine.executor.info(), engine.executor.kv_manager
    options = {option.name: getattr(args, option.name) for option in fields(ServeConfig)}
    config = ServeConfig(**options)
    key = config.api_key or os.environ.get("PAGED_API_KEY") or None
    config = replace(config, api_key=key, model_name=config.model_name or info.model_id)
    defaults = SamplingParams(**sampling_defaults(HfConfig.read(folder, "generation_config.json", may_lack=True)))
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        listener = socket.create_server((config.host, config.port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise InvalidInputError(f"--host {config.host} --port {config.port}: {error}") from error
    host, port = listener.getsockname()[:2]
    where = f"http://{host}:{port}"
    if ":" in host:
        where = f"http://[{host}]:{port}"
    if host in ("127.0.0.1", "::1"):
        where += " (this machine only, see --host)"

    spans = None
    if config.otlp_traces_endpoint is not None:
        spans = spans_to(config.otlp_traces_endpoint, config.model_name)

    async def serve() -> None:
        async with AsyncEngine(engine) as running:
            service = Service(running, tokenizer, config, defaults, vision)
            app = make_app(service, spans)
            free = 0
            if manager is not None:
                free = manager.stats().free_blocks * manager.config.block_size
            print(
                f"paged: {where}, {one_line(config.model_name)} in {info.dtype} on {info.device}, "
                f"{free:,} tokens of cache free, backend {backend_of(info.device)[0]}",
                flush=True,
            )
            weight_bytes = engine.executor.capabilities().memory_requirements.weight_bytes
            print(memory_line(weight_bytes, manager, service.longest), file=sys.stderr, flush=True)
            await protocol.Server(app, config).serve(sockets=[listener])

    with contextlib.ExitStack() as stack:
        stack.enter_context(listener)
        if config.kv_events is not None and manager is not None:
            stack.callback(event_publisher(manager, config.kv_events, config).close)
        if spans is not None:
            stack.callback(spans.close)
        protocol.run(serve())
        if manager is not None:
            manager.close_tiers()
    sys.stdout.flush()
    os._exit(0)  # skip Python's own exit: it joins threads, which may never end, and frees modules for 2 s


def spans_to(endpoint: str, model_name: str) -> RequestSpans:
    """Return spans of requests that go to a collector.

    Raises:
        UnsupportedError: OpenTelemetry is not installed.
    """
    try:
        from paged.serving.http.spans import RequestSpans

        return RequestSpans.to_endpoint(endpoint, model_name)
    except ImportError as error:
        raise UnsupportedError(f"--otlp-traces-endpoint needs {error.name}: pip install 'paged[otel]'") from error


def memory_line(weight_bytes: int, manager: PagedKvCacheManager | None, longest: int) -> str:
    """Return a line with the bytes of weights and cache and the tokens of the longest request."""
    line = f"paged: memory: weights {weight_bytes:,} bytes"
    if manager is not None:
        num_blocks, block_size = manager.config.num_blocks + 1, manager.config.block_size  # + 1 for the padding block
        block_bytes = manager.config.block_bytes(manager.tensors.storage.dtype)
        line += f", cache {num_blocks:,} blocks (one for padding) of {block_size} tokens x {block_bytes:,} bytes"
        line += f" = {num_blocks * block_bytes:,} bytes"
    return f"{line}, longest request {longest:,} tokens"


def vision_of(folder: Path, tokenizer: ChatTokenizer, args: argparse.Namespace) -> VisionModel | None:
    """Return the vision model, or None and print a line if its packages are missing, because texts work without it."""
    from paged.serving.vision.vision_model import VisionModel

    if args.max_images == 0 or not VisionModel.is_in(folder):
        return None
    try:
        return VisionModel.from_folder(folder, tokenizer, dtype=args.dtype, device=args.device)
    except UnsupportedError as error:
        print(f"paged: serves text alone: {error}", file=sys.stderr, flush=True)
        return None
