"""/v1/completions and /v1/embeddings."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from paged.executors.serving.answers import Head, finite, respond, usage
from paged.executors.serving.errors import ApiError, reply
from paged.executors.serving.schemas import CompletionBody, EmbeddingsBody
from paged.executors.serving.service import Piece, Service


async def complete(service: Service, body: CompletionBody, request: Request) -> Response:
    """Answer every prompt with n choices; those of a prompt have consecutive indices."""
    if body.best_of not in (None, body.n or 1):
        raise ApiError(400, f"best_of: {body.best_of}, expected n", "best_of")
    if body.echo and body.logprobs is not None:
        raise ApiError(400, "logprobs: not with echo, the log probabilities of a prompt are not computed", "logprobs")
    adapter = await service.adapter(body.model)
    is_one = isinstance(body.prompt, str) or not body.prompt or isinstance(body.prompt[0], int)
    given: list[Any] = [body.prompt] if is_one else [*body.prompt]
    service.check_choices(len(given), body.n or 1)  # before they are encoded
    prompts = [await service.in_thread(service.tokenizer.encode, one) if isinstance(one, str) else one for one in given]
    params = service.params(body, body.max_tokens or 16, logprobs=body.logprobs)
    params = service.check_prompts(prompts, params)
    echoes = [one if isinstance(one, str) else service.tokenizer.decode(one) for one in given] if body.echo else []
    options = await service.options(body, adapter)
    head = Head(service, request, body, "cmpl", "text_completion")
    return await respond(head, _events(head, service, body, prompts, echoes, params, options), _whole)


async def _events(
    head: Head, service: Service, body: CompletionBody, prompts: Any, echoes: Sequence[str], params: Any, options: Any
) -> AsyncGenerator[dict[str, Any], None]:
    offsets: dict[int, int] = {}
    async with aclosing(service.pieces(head.request, prompts, params, **options)) as pieces:
        async for piece in pieces:
            text = piece.text
            if echoes and piece.choice not in offsets:
                text = echoes[piece.choice // params.n] + text
            begin = offsets.setdefault(piece.choice, 0)
            logprobs = None if body.logprobs is None else _logprobs(service, piece, begin)
            offsets[piece.choice] += len(text)
            choice = {"index": piece.choice, "text": text, "logprobs": logprobs, "finish_reason": piece.finish_reason}
            yield head.body(choices=[choice])
    yield head.body(choices=[], usage=usage(head.record))


def _whole(events: list[dict[str, Any]]) -> dict[str, Any]:
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for part in event["choices"]:
            whole = choices.setdefault(part["index"], part)
            if whole is not part:
                whole["text"] += part["text"]
                whole["finish_reason"] = part["finish_reason"]
                for name, values in (part["logprobs"] or {}).items():
                    whole["logprobs"][name] += values
    return events[-1] | {"choices": [choices[index] for index in sorted(choices)]}


def _logprobs(service: Service, piece: Piece, offset: int) -> dict[str, Any]:
    found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token, row in zip(piece.token_ids, piece.logprobs or (), strict=True):
        text = service.token_text(token)
        found["tokens"].append(text)
        found["token_logprobs"].append(finite(row[token]))
        found["top_logprobs"].append({service.token_text(one): finite(value) for one, value in row.items()})
        found["text_offset"].append(offset)
        offset += len(text)
    return found


async def embed(service: Service, body: EmbeddingsBody, request: Request) -> Response:
    """Answer each text with the hidden state of its last token, of length 1."""
    if await service.adapter(body.model) is not None:
        raise ApiError(400, "model: embeddings take no adapter", "model")
    given: list[Any] = [body.input] if isinstance(body.input, str) or isinstance(body.input[0], int) else [*body.input]
    service.check_choices(len(given), 1)
    prompts = [await service.in_thread(service.tokenizer.encode, one) if isinstance(one, str) else one for one in given]
    if any(not 0 < len(prompt) <= service.longest for prompt in prompts):
        raise ApiError(400, f"input: expected 1 to {service.longest} tokens each", "input", "context_length_exceeded")
    count = request.state.record.prompt_tokens = sum(map(len, prompts))
    rows = (await service.engine.embed(prompts)).cpu()
    is_text = body.encoding_format == "base64"
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": base64.b64encode(row.numpy().tobytes()).decode() if is_text else row.tolist(),
        }
        for index, row in enumerate(rows)
    ]
    usage = {"prompt_tokens": count, "total_tokens": count}
    return reply({"object": "list", "data": data, "model": body.model or service.config.model_name, "usage": usage})
