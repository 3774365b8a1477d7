"""The routes."""

from __future__ import annotations

import base64
import hashlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

import paged
from paged.cache.manager import PagedKvCacheManager
from paged.errors import PagedError, StaleHandleError
from paged.executors.serving import schemas
from paged.executors.serving.chat import as_template, chat
from paged.executors.serving.completions import complete, embed
from paged.executors.serving.errors import ApiError, as_api_error, reply
from paged.executors.serving.gate import LOG, Gate
from paged.executors.serving.messages import answer_messages
from paged.executors.serving.responses import respond_to_input
from paged.executors.serving.service import Service, service_of

_MOST_CELLS = 4096  # blocks that the page draws one by one


def make_app(service: Service) -> Gate:
    """Return the ASGI app of a service."""
    app = FastAPI(title="paged", version=paged.__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    for error in (PagedError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(error, _answer_error)
    app.state.service = service
    for path, answer in _TEXT_ROUTES.items():
        app.post(path)(answer)
    _add_model_routes(app, service)
    _add_state_routes(app, service)
    return Gate(app, service.config, service.metrics.end)


async def _answer_error(request: Request, error: Exception) -> Response:
    found = as_api_error(error)
    request.state.record.end = found.message
    if found.status == 500:
        LOG.error("request %s failed", request.state.record.id, exc_info=error)
    return found.response()


async def tokenize(body: schemas.TokenizeBody, request: Request) -> Response:
    """Answer with the token ids of a text or a conversation."""
    service = service_of(request)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "prompt: expected it or messages", "prompt")
    if body.prompt is not None:
        if body.add_special_tokens is False:
            raise ApiError(400, "add_special_tokens: a prompt has them", "add_special_tokens")
        tokens = await service.in_thread(service.tokenizer.encode, body.prompt)
    else:
        variables = {"add_generation_prompt": body.add_generation_prompt is not False}
        messages = list(map(as_template, body.messages or ()))
        tokens, _ = await service.encode_chat(messages, variables | (body.chat_template_kwargs or {}))
    texts = [service.tokenizer.tokenizer.id_to_token(one) for one in tokens] if body.return_token_strs else None
    found = {"tokens": tokens, "count": len(tokens), "max_model_len": service.longest, "token_strs": texts}
    return reply(found)


async def detokenize(body: schemas.DetokenizeBody, request: Request) -> Response:
    """Answer with the text of token ids."""
    service = service_of(request)
    return reply({"prompt": await service.in_thread(service.tokenizer.decode, body.tokens)})


_TEXT_ROUTES: dict[str, Callable[..., Awaitable[Response]]] = {
    "/v1/completions": complete,
    "/v1/chat/completions": chat,
    "/v1/embeddings": embed,
    "/v1/responses": respond_to_input,
    "/v1/messages": answer_messages,
    "/tokenize": tokenize,
    "/detokenize": detokenize,
}


def _add_model_routes(app: FastAPI, service: Service) -> None:
    config = service.config

    def describe(name: str, parent: str | None) -> dict[str, Any]:
        card = {"id": name, "object": "model", "created": service.created, "owned_by": "paged", "parent": parent}
        return card | {"root": parent or name, "max_model_len": service.longest}

    @app.get("/v1/models")
    async def models() -> Response:
        adapters = [describe(name, config.model_name) for name in await service.adapters()]
        return reply({"object": "list", "data": [describe(config.model_name, None), *adapters]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        adapter = await service.adapter(name)
        return reply(describe(name, None if adapter is None else config.model_name))

    @app.post("/v1/load_lora_adapter")
    async def load_adapter(body: schemas.AdapterBody) -> Response:
        if config.allow_adapters is None or body.lora_path is None:
            raise ApiError(403, "lora_path: this server loads no adapters, see --allow-adapters", "lora_path")
        folder = config.allow_adapters.resolve()
        try:
            path = (folder / body.lora_path).resolve(strict=True)
        except (OSError, ValueError, RuntimeError):
            path = None
        if path is None or folder not in path.parents or body.lora_name == config.model_name:
            raise ApiError(404, "lora_path: no such folder below that of --allow-adapters", "lora_path")
        await service.engine.load_lora(body.lora_name, path)
        return reply({"id": body.lora_name})

    @app.post("/v1/unload_lora_adapter")
    async def unload_adapter(body: schemas.AdapterBody) -> Response:
        if config.allow_adapters is None:
            raise ApiError(403, "this server unloads no adapters, see --allow-adapters")
        await service.engine.unload_lora(body.lora_name)
        return reply({"id": body.lora_name})


def _add_state_routes(app: FastAPI, service: Service) -> None:
    manager = service.engine.engine.executor.kv_manager

    @app.get("/health")
    async def health() -> Response:
        await service.engine.status()  # behind the step that runs; raises where the engine has stopped
        return reply({"status": "ok"})

    @app.get("/version")
    async def version() -> Response:
        return reply({"version": paged.__version__})

    @app.get("/metrics")
    async def prometheus() -> Response:
        page = await service.engine.prometheus_text() + await service.metrics.text()
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/paged/blocks")
    async def blocks() -> Response:
        """Counts of the cache and the queue, and a letter for each block."""
        status, counts = await service.engine.status(), service.engine.engine.metrics
        found: dict[str, Any] = {**vars(status), "generated_tokens": counts.generated_tokens, "time": time.time()}
        if manager is not None:
            found |= {"cache": vars(manager.stats()), "blocks": _letters(manager)}
            found["block_size"] = manager.config.block_size
        return reply(found)

    page = Path(__file__).with_name("page.html").read_text()
    policy = "default-src 'none'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    for tag in ("script", "style"):
        content = page.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
        policy += f"; {tag}-src 'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return Response(page, headers={"content-security-policy": policy}, media_type="text/html")


def _letters(manager: PagedKvCacheManager) -> str:
    """A letter for each of the first blocks: free, cached, own, shared."""
    held: Counter[int] = Counter()
    for handle in manager.handles():
        with suppress(StaleHandleError):  # ended meanwhile
            held.update(handle.blocks)
    cached = set(manager.cached_blocks())
    blocks = range(1, min(manager.config.num_blocks, _MOST_CELLS) + 1)
    return "".join("s" if held[one] > 1 else "o" if held[one] else "c" if one in cached else "f" for one in blocks)
