"""`paged serve`: a checkpoint behind the HTTP interfaces of OpenAI and Anthropic."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from paged.errors import UnsupportedError
from paged.executors.command_line.generate import add_checkpoint_arguments, add_engine_arguments, make_engine
from paged.executors.serving.config import ServeConfig
from paged.models.loading.checkpoint_folder import checkpoint_folder
from paged.printable import one_line

if TYPE_CHECKING:
    from paged.executors.text.chat_tokenizer import ChatTokenizer
    from paged.executors.vision.vision_model import VisionModel

DESCRIPTION = (
    "Serves a checkpoint by HTTP: /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, a page at /, "
    "metrics. Without --host only this machine can reach it. SIGTERM lets requests end, a second one does not."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the address, the server's options and limits, and the engine's arguments."""
    add_checkpoint_arguments(parser)
    server = parser.add_argument_group("server")
    for flag, options in ServeConfig.arguments().items():
        server.add_argument(flag, **options)
    add_engine_arguments(parser)
    parser.set_defaults(token_budget=2048, chunk_size=None, seed=None, warmup=True)


def run(args: argparse.Namespace) -> int:
    """Load, say where, and serve until a signal.

    Raises:
        UnsupportedError: a package of the extra `serve` is not installed.
    """
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(f"paged serve needs {error.name}: pip install 'paged[serve]'") from error
    from paged.executors.command_line.info import backend_of
    from paged.executors.requests.sampling_params import SamplingParams, sampling_defaults
    from paged.executors.serving.run import serve
    from paged.executors.serving.tool_formats import MarkedTokenizer
    from paged.executors.text.chat_tokenizer import ChatTokenizer
    from paged.models.loading.hf_config import HfConfig

    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    logging.getLogger("paged").setLevel(logging.INFO)
    folder = checkpoint_folder(args.model)
    print(f"paged: loading {one_line(str(folder))}", file=sys.stderr, flush=True)
    tokenizer = ChatTokenizer.from_folder(folder)
    vision = vision_of(folder, tokenizer, args)  # before the executor, whose cache takes what memory is left
    engine = make_engine(folder, args, MarkedTokenizer(tokenizer), max_waiting=args.max_waiting)
    info = engine.executor.info()
    config = ServeConfig(**{one.name: getattr(args, one.name) for one in fields(ServeConfig)})
    key = config.api_key or os.environ.get("PAGED_API_KEY") or None
    config = replace(config, api_key=key, model_name=config.model_name or info.model_id)
    defaults = SamplingParams(**sampling_defaults(HfConfig.read(folder, "generation_config.json", may_lack=True)))
    asyncio.run(serve(engine, tokenizer, config, defaults, backend_of(info.device)[0], vision))
    return 0


def vision_of(folder: Path, tokenizer: ChatTokenizer, args: argparse.Namespace) -> VisionModel | None:
    """Return what encodes images; None, with a line on stderr, if its packages are missing: texts need none of them."""
    from paged.executors.vision.vision_model import VisionModel

    if args.max_images == 0 or not VisionModel.is_in(folder):
        return None
    try:
        return VisionModel.from_folder(folder, tokenizer, dtype=args.dtype, device=args.device)
    except UnsupportedError as error:
        print(f"paged: serves text alone: {error}", file=sys.stderr, flush=True)
        return None
