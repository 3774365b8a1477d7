"""Options and limits of the server; each is an argument of `paged serve` of the same name."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from paged.serving.formats.tool_formats import REASONING_FORMATS, TOOL_FORMATS
from paged.serving.vision.images import ImageRules


def _option(default: Any, text: str, **arguments: Any) -> Any:
    return field(default=default, metadata={"help": text, **arguments})


@dataclass(frozen=True)
class ServeConfig:
    """Options and limits of the server. Times are in seconds."""

    host: str = _option("127.0.0.1", "address to listen on", metavar="ADDRESS")
    port: int = _option(8000, "0 for a free one", metavar="N")
    allowed_hosts: str = _option(
        "",
        "names of this server besides localhost and the address, with commas, as NAME or NAME:PORT; Host and Origin of "
        "requests must be among them if it listens on the loopback or this is given; * for any",
        metavar="NAMES",
    )
    model_name: str = _option("", "name in the API; default: that of the checkpoint", metavar="NAME")
    api_key: str | None = _option(None, "key that all routes but /health ask for; default: $PAGED_API_KEY")
    max_body_bytes: int = _option(
        4 << 20, "longest body of a request, else 413; an image in it takes 4/3 of its bytes", metavar="N"
    )
    max_prompt_tokens: int | None = _option(None, "longest prompt; default: as the model allows", metavar="N")
    max_new_tokens: int = _option(1 << 16, "most of prompts x n x max_tokens of a request", metavar="N")
    max_choices: int = _option(256, "most of prompts x n of a request", metavar="N")
    max_waiting: int = _option(
        1024,
        "completions in the queue, and prompts that wait for embeddings, beyond which requests get 429",
        metavar="N",
    )
    max_connections: int = _option(
        512, "open connections, beyond which the one that is idle the longest is closed", metavar="N"
    )
    request_seconds: float = _option(600.0, "longest time of a request from its arrival", metavar="S")
    idle_seconds: float = _option(
        30.0, "longest wait for the body, or until the client has read what was sent", metavar="S"
    )
    header_seconds: float = _option(
        10.0, "longest time from a connection, or the beginning of a request, to its whole headers", metavar="S"
    )
    keep_alive_seconds: float = _option(30.0, "time that a connection without a new request stays open", metavar="S")
    drain_seconds: float = _option(30.0, "time that requests have to end after SIGTERM", metavar="S")
    compile_seconds: float = _option(
        10.0, "longest time to compile a response_format, apart from waiting for others", metavar="S"
    )
    mask_seconds: float = _option(
        0.05,
        "CPU time of a grammar for each token, on average, beyond which the answer ends with an error",
        metavar="S",
    )
    allow_adapters: Path | None = _option(  # noqa: RUF009
        None, "let clients load adapters from below this folder", metavar="FOLDER", type=Path
    )
    max_images: int = _option(8, "most images of a request; 0 loads no vision tower", metavar="N")
    max_image_pixels: int = _option(32 << 20, "most pixels of an image", metavar="N")
    max_image_bytes: int = _option(
        256 << 20, "decoded bytes of all images of a request, 4 a pixel, else 400", metavar="N"
    )
    max_server_image_bytes: int = _option(
        512 << 20, "decoded bytes of the images of all requests; those beyond wait", metavar="N"
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
        "auto", "form of calls; auto: by the chat template and the tokenizer", choices=["auto", "none", *TOOL_FORMATS]
    )
    reasoning_parser: str = _option(
        "auto",
        "form of reasoning; auto: by the chat template and the tokenizer",
        choices=["auto", "none", *REASONING_FORMATS],
    )
    kv_events: str | None = _option(None, "publish KV events by ZeroMQ, as tcp://127.0.0.1:5557", metavar="ADDRESS")
    kv_events_replay: str | None = _option(None, "address of their replay socket", metavar="ADDRESS")
    kv_events_topic: str = _option("", "topic of the events, as a router asks for it", metavar="TEXT")
    log_format: str = _option("text", "a line for each request, on stderr", choices=["text", "json"])

    @property
    def image_rules(self) -> ImageRules:
        """Return where images may come from, and their limits."""
        return ImageRules(
            max_images=self.max_images,
            max_pixels=self.max_image_pixels,
            max_decoded_bytes=min(self.max_image_bytes, self.max_server_image_bytes),
            allow_http=self.allow_http_images,
            folder=self.image_folder,
        )

    @classmethod
    def arguments(cls) -> dict[str, dict[str, Any]]:
        """Return the arguments of `add_argument` by flag."""
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
