"""Options and limits of the server. Each is an argument of `paged serve` with the same name."""

from __future__ import annotations

from argparse import ArgumentTypeError
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from paged.serving.formats.reasoning_formats import REASONING_FORMATS
from paged.serving.formats.tool_formats import TOOL_FORMATS
from paged.serving.vision.images import ImageRules


def _option(default: Any, text: str, **arguments: Any) -> Any:
    return field(default=default, metadata={"help": text, **arguments})


def _http_url(text: str) -> str:
    """Return a URL; an exporter would find out in a thread, for every batch of spans, that it is none."""
    url = urlsplit(text)
    if url.scheme not in ("http", "https") or not url.netloc:
        raise ArgumentTypeError(f"{text!r}, expected a URL such as http://localhost:4318/v1/traces")
    return text


@dataclass(frozen=True)
class ServeConfig:
    """Options and limits of the server. Times are in seconds."""

    host: str = _option("127.0.0.1", "address to listen on", metavar="ADDRESS")
    port: int = _option(8000, "0 for a free one", metavar="N")
    allowed_hosts: str = _option(
        "",
        "comma-separated names (NAME or NAME:PORT) of this server besides localhost and the address; Host and Origin "
        "of requests must be among them if the server listens on the loopback or this is given; * allows any name",
        metavar="NAMES",
    )
    model_name: str = _option("", "name in the API; default: the checkpoint's name", metavar="NAME")
    api_key: str | None = _option(None, "key that all routes but /health require; default: $PAGED_API_KEY")
    max_body_bytes: int = _option(
        4 << 20,
        "maximum size of a request's body, beyond it 413; an image in the body takes 4/3 of its bytes",
        metavar="N",
    )
    max_prompt_tokens: int | None = _option(None, "maximum tokens of a prompt; default: the model's limit", metavar="N")
    max_new_tokens: int = _option(1 << 16, "maximum of prompts x n x max_tokens of a request", metavar="N")
    max_choices: int = _option(256, "maximum of prompts x n of a request", metavar="N")
    max_waiting: int = _option(
        1024,
        "maximum completions in the queue, and prompts that wait for embeddings; beyond it requests get 429",
        metavar="N",
    )
    max_connections: int = _option(
        512, "maximum open connections; beyond it the one that is idle the longest is closed", metavar="N"
    )
    request_seconds: float = _option(600.0, "maximum time of a request from its arrival", metavar="S")
    idle_seconds: float = _option(30.0, "maximum wait for the body, and for the client to read the answer", metavar="S")
    header_seconds: float = _option(
        10.0, "maximum time from the start of a connection or request to the end of the headers", metavar="S"
    )
    keep_alive_seconds: float = _option(
        30.0, "time after which a connection without a new request is closed", metavar="S"
    )
    drain_seconds: float = _option(30.0, "time for requests to end after SIGTERM", metavar="S")
    compile_seconds: float = _option(
        10.0, "maximum time to compile a response_format, without waiting for others", metavar="S"
    )
    mask_seconds: float = _option(
        0.05,
        "maximum mean CPU time of a grammar per token; beyond it the answer ends with an error",
        metavar="S",
    )
    allow_adapters: Path | None = _option(  # noqa: RUF009
        None, "let clients load adapters from below this folder", metavar="FOLDER", type=Path
    )
    max_images: int = _option(8, "maximum images of a request; 0 loads no vision tower", metavar="N")
    max_image_pixels: int = _option(32 << 20, "maximum pixels of an image", metavar="N")
    max_image_bytes: int = _option(
        256 << 20, "maximum decoded bytes of a request's images, 4 per pixel; beyond it 400", metavar="N"
    )
    max_server_image_bytes: int = _option(
        512 << 20, "maximum decoded bytes of the images of all requests; further requests wait", metavar="N"
    )
    allow_http_images: bool = _option(
        False,
        "fetch http: and https: URLs of images; clients can then make this machine call any address",
        action="store_true",
    )
    image_folder: Path | None = _option(  # noqa: RUF009
        None, "let clients name images below this folder by file: URLs", metavar="FOLDER", type=Path
    )
    tool_parser: str = _option(
        "auto",
        "format of tool calls; auto: from the chat template and the tokenizer",
        choices=["auto", "none", *TOOL_FORMATS],
    )
    reasoning_parser: str = _option(
        "auto",
        "format of reasoning; auto: from the chat template and the tokenizer",
        choices=["auto", "none", *REASONING_FORMATS],
    )
    kv_events: str | None = _option(
        None, "publish KV events over ZeroMQ at this address, such as tcp://127.0.0.1:5557", metavar="ADDRESS"
    )
    kv_events_replay: str | None = _option(None, "address of the replay socket of KV events", metavar="ADDRESS")
    kv_events_topic: str = _option("", "topic of the KV events, as the router subscribes to it", metavar="TEXT")
    otlp_traces_endpoint: str | None = _option(
        None,
        "send OpenTelemetry spans of requests to this URL, such as http://localhost:4318/v1/traces; needs paged[otel]",
        metavar="URL",
        type=_http_url,
    )
    log_format: str = _option("text", "format of the log: a line for each request, on stderr", choices=["text", "json"])

    @property
    def image_rules(self) -> ImageRules:
        """Allowed sources and limits of images."""
        return ImageRules(
            max_images=self.max_images,
            max_pixels=self.max_image_pixels,
            max_decoded_bytes=min(self.max_image_bytes, self.max_server_image_bytes),
            allow_http=self.allow_http_images,
            folder=self.image_folder,
        )

    @classmethod
    def arguments(cls) -> dict[str, dict[str, Any]]:
        """Return keyword arguments for `add_argument` by flag."""
        arguments = {}
        for option in fields(cls):
            keywords = {"default": option.default, **option.metadata}
            if not keywords.keys() & {"type", "choices", "action"}:
                kind = str(option.type).partition(" ")[0]
                keywords["type"] = {"float": float, "int": int}.get(kind, str)
            if option.default not in (None, "", False):
                keywords["help"] += "; %(default)s"
            arguments[f"--{option.name.replace('_', '-')}"] = keywords
        return arguments
