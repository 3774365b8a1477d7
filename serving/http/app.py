"""Routes of the server."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

import paged
from paged.cache.manager import PagedKvCacheManager
from paged.errors import CheckpointError, PagedError
from paged.executors.engine.async_engine import EngineStoppedError
from paged.executors.engine.config import QueueFullError
from paged.seq_id import SeqId
from paged.serving.http import schemas
from paged.serving.http.bodies import Body, read_body
from paged.serving.http.chat import chat, read_again, template_variables
from paged.serving.http.completions import complete, embed
from paged.serving.http.errors import ApiError, as_api_error, reply
from paged.serving.http.gate import LOG, Gate, RequestLog
from paged.serving.http.messages import answer_messages, count_tokens
from paged.serving.http.responses import respond_to_input
from paged.serving.http.service import Service, service_of

if TYPE_CHECKING:
    from paged.serving.http.spans import RequestSpans  # which needs the extra `otel`

_MOST_CELLS = 4096  # number of blocks that the page draws one by one
_LEAST_SECONDS = 1.0  # minimum time to read a body, so that a late request gets its error message


def make_app(service: Service, spans: RequestSpans | None = None) -> Gate:
    """Return the ASGI app of a service. spans: where spans of requests go; None for none."""
    app = FastAPI(title="paged", version=paged.__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    for error in (PagedError, HTTPException, Exception):
        app.add_exception_handler(error, _answer_error)
    app.state.service = service
    bodies = {answer: get_type_hints(answer)["body"] for answer in _ROUTES["POST"].values()}
    schemas_of, components = msgspec.json.schema_components(bodies.values(), ref_template="#/components/schemas/{name}")
    for path, answer in _ROUTES["GET"].items():
        app.add_api_route(path, answer, include_in_schema=path != "/")
    for (path, answer), schema in zip(_ROUTES["POST"].items(), schemas_of, strict=True):
        content = {"application/json": {"schema": schema}}
        listed = {"requestBody": {"required": True, "content": content}}
        app.add_api_route(path, _endpoint(answer, bodies[answer]), methods=["POST"], openapi_extra=listed)
    app.openapi().setdefault("components", {}).setdefault("schemas", {}).update(components)

    def end(scope: Scope, log: RequestLog) -> None:
        route = log.path if log.path in _ROUTES["POST"] else "none"
        service.metrics.end(log, route)
        if spans is not None:
            spans.end(scope, log)

    return Gate(app, service.config, end)


def _endpoint(answer: Callable[..., Awaitable[Response]], kind: type[Body]) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that reads the body and answers within the time limit from the request's arrival."""

    async def endpoint(request: Request) -> Response:
        service = service_of(request)
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(400, "content-type: expected application/json")
        try:
            async with asyncio.timeout(max(service.seconds_left(request), _LEAST_SECONDS)):
                data = await request.body()
                body = await service.in_thread(lambda: read_body(kind, data), len(data))
                request.state.names = body.names
                return await answer(body, request)
        except TimeoutError:
            raise service.timeout_error() from None

    endpoint.__name__ = answer.__name__
    return endpoint


async def _answer_error(request: Request, error: Exception) -> Response:
    api_error = as_api_error(error, getattr(request.state, "names", None))
    request.state.log.end = api_error.message
    if api_error.status == 500:
        LOG.error("request %s failed", request.state.log.id, exc_info=error)
    return api_error.response()


async def tokenize(body: schemas.TokenizeBody, request: Request) -> Response:
    """Answer with the token ids of a text or a conversation."""
    service = service_of(request)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "prompt: expected it or messages", "prompt")
    longest = service.longest_text
    if body.prompt is not None:
        if body.add_special_tokens is False:
            raise ApiError(400, "add_special_tokens: a prompt has them", "add_special_tokens")
        for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
            if getattr(body, name) is not None:
                raise ApiError(400, f"{name}: only with messages", name)
        tokens = await service.encoded(body.prompt, longest=longest)
    else:
        request.state.names = schemas.ConversationBody.names
        variables = template_variables(body)
        messages, size = (await read_again(request)).messages, len(await request.body())
        tokens, _ = await service.encode_chat(messages, variables, size, longest=longest)

    def answer() -> Response:
        texts = None
        if body.return_token_strs:
            texts = [service.tokenizer.tokenizer.id_to_token(token) for token in tokens]
        counts = {"count": len(tokens), "max_model_len": service.longest}
        return reply({"tokens": tokens, **counts, "token_strs": texts})

    return await service.in_thread(answer, len(tokens))


async def detokenize(body: schemas.DetokenizeBody, request: Request) -> Response:
    service = service_of(request)
    tokens = await service.encoded(body.tokens, longest=service.longest_text)
    return reply({"prompt": await service.in_thread(lambda: service.tokenizer.decode(tokens), len(tokens))})


async def models(request: Request) -> Response:
    service = service_of(request)
    adapters = [_card(service, name) for name in await service.adapters.names()]
    return reply({"object": "list", "data": [_card(service, None), *adapters]})


async def model(name: str, request: Request) -> Response:
    return reply(_card(service_of(request), await service_of(request).adapter(name)))


def _card(service: Service, adapter: str | None) -> dict[str, Any]:
    name = service.config.model_name
    card = {"id": adapter or name, "object": "model", "created": service.created, "owned_by": "paged"}
    return card | {"parent": adapter and name, "root": name, "max_model_len": service.longest}


async def load_adapter(body: schemas.AdapterBody, request: Request) -> Response:
    config, path = service_of(request).config, None
    if config.allow_adapters is None or body.lora_path is None:
        raise ApiError(403, "lora_path: this server loads no adapters, see --allow-adapters", "lora_path")
    folder = config.allow_adapters.resolve()
    with suppress(OSError, ValueError, RuntimeError):
        path = (folder / body.lora_path).resolve(strict=True)
    if path is None or folder not in path.parents or body.lora_name == config.model_name:
        raise ApiError(404, "lora_path: no such folder below --allow-adapters", "lora_path")
    try:
        await service_of(request).adapters.load(body.lora_name, path, in_place=body.load_inplace)
    except CheckpointError as error:
        raise ApiError(400, f"lora_path: {error}", "lora_path") from error
    return reply({"id": body.lora_name})


async def unload_adapter(body: schemas.AdapterBody, request: Request) -> Response:
    if service_of(request).config.allow_adapters is None:
        raise ApiError(403, "this server unloads no adapters, see --allow-adapters")
    await service_of(request).adapters.unload(body.lora_name)
    return reply({"id": body.lora_name})


async def health(request: Request) -> Response:
    """Answer at once whether the server is alive, without waiting for a step."""
    if not service_of(request).engine.is_accepting:
        raise EngineStoppedError("the engine was shut down")
    return reply({"status": "ok"})


async def ready(request: Request) -> Response:
    """Answer, after the current step, whether the queue accepts requests."""
    service = service_of(request)
    status = await service.engine.status()
    if status.waiting >= service.config.max_waiting:
        raise QueueFullError(f"{status.waiting} completions wait, see --max-waiting")
    return reply({"status": "ok", "waiting": status.waiting})


async def version() -> Response:
    return reply({"version": paged.__version__})


async def metrics(request: Request) -> Response:
    service = service_of(request)
    page = await service.engine.prometheus_text() + await service.metrics.text()
    return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")


async def blocks(request: Request) -> Response:
    """Answer with the counts of cache and queue, a letter for each block, and the blocks' holders."""
    engine = service_of(request).engine
    state = {**vars(await engine.status()), "generated_tokens": engine.engine.metrics.generated_tokens}
    manager = engine.engine.executor.kv_manager
    if manager is not None:
        letters, sequences = _blocks(manager, engine.engine.sequence_names())
        state |= {"cache": vars(manager.stats()), "blocks": letters, "block_size": manager.config.block_size}
        state["sequences"] = sequences
    return reply({**state, "time": time.time()})


def _blocks(manager: PagedKvCacheManager, names: Mapping[SeqId, str]) -> tuple[str, list[dict[str, Any]]]:
    """Return a letter (free, cached, own, shared) for each of the first blocks, and the sequences that hold them."""
    held: Counter[int] = Counter()
    sequences = []
    for handle in manager.handles():
        ids = sorted({block for block in handle.blocks if 0 < block <= _MOST_CELLS})
        held.update(ids)
        name = names.get(handle.cache_id, str(handle.cache_id))
        sequences.append({"request_id": name, "num_tokens": handle.num_tokens, "blocks": ids})
    cached = set(manager.cached_blocks())
    blocks = range(1, min(manager.config.num_blocks, _MOST_CELLS) + 1)
    letters = []
    for block in blocks:
        if held[block] > 1:
            letters.append("s")
        elif held[block] == 1:
            letters.append("o")
        elif block in cached:
            letters.append("c")
        else:
            letters.append("f")
    return "".join(letters), sequences


async def page() -> Response:
    text = Path(__file__).with_name("page.html").read_text()
    policy = "default-src 'none'; connect-src 'self'; img-src data:"
    policy += "; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    for tag in ("script", "style"):
        content = text.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
        policy += f"; {tag}-src 'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
    return Response(text, headers={"content-security-policy": policy}, media_type="text/html")


_ROUTES: dict[str, dict[str, Callable[..., Awaitable[Response]]]] = {
    "GET": {
        "/": page,
        "/health": health,
        "/metrics": metrics,
        "/ready": ready,
        "/v1/models": models,
        "/v1/models/{name:path}": model,
        "/v1/paged/blocks": blocks,
        "/version": version,
    },
    "POST": {
        "/detokenize": detokenize,
        "/tokenize": tokenize,
        "/v1/chat/completions": chat,
        "/v1/completions": complete,
        "/v1/embeddings": embed,
        "/v1/load_lora_adapter": load_adapter,
        "/v1/messages": answer_messages,
        "/v1/messages/count_tokens": count_tokens,
        "/v1/responses": respond_to_input,
        "/v1/unload_lora_adapter": unload_adapter,
    },
}
