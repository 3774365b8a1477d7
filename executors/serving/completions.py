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
from paged.executors.serving.service import Piece, Service, service_of


async def complete(body: CompletionBody, request: Request) -> Response:
    """Answer every prompt with n choices; those of a prompt have consecutive indices."""
    service = service_of(request)
    if body.best_of not in (None, body.n or 1):
        raise ApiError(400, f"best_of: {body.best_of}, expected n", "best_of")
    options, given = await service.options(body), _several(body.prompt)
    service.check_choices(len(given), body.n or 1)  # before they are encoded
    prompts = await service.encoded(given)
    echoed = body.logprobs if body.echo else None
    params = service.params(body, body.max_tokens or 16, logprobs=body.logprobs, prompt_logprobs=echoed)
    params = service.check_prompts(prompts, params)
    echoes = [one if isinstance(one, str) else service.tokenizer.decode(one) for one in given] if body.echo else []
    pieces = service.pieces(request, prompts, params, **options)
    head = Head(request, body, "cmpl", "text_completion")
    return await respond(head, _events(head, pieces, echoes, params.n))


def _several(given: Any) -> list[Any]:
    """Return texts, or lists of token ids, of which a request may have one without a list around it."""
    return [given] if isinstance(given, str) or not given or isinstance(given[0], int) else list(given)


async def _events(
    head: Head, pieces: AsyncGenerator[Piece, None], echoes: Sequence[str], n: int
) -> AsyncGenerator[dict[str, Any], None]:
    offsets: dict[int, int] = {}
    async with aclosing(pieces):
        async for choice, output, part in pieces:
            text, tokens = part.text, part.token_ids
            rows: Sequence[dict[int, float] | None] | None = part.logprobs
            if echoes and choice not in offsets:
                text = echoes[choice // n] + text
                if (prompt := output.prompt_logprobs) is not None:
                    tokens, rows = [*output.prompt, *tokens], [*prompt, *(rows or ())]
            begin = offsets.setdefault(choice, 0)
            logprobs = None if rows is None else _logprobs(head.service, tokens, rows, begin)
            offsets[choice] += len(text)
            fields = {"text": text, "logprobs": logprobs, "finish_reason": part.finish_reason}
            yield head.body(choices=[{"index": choice, **fields}])
    yield head.body(choices=[], usage=usage(head.record))


def _logprobs(
    service: Service, tokens: Sequence[int], rows: Sequence[dict[int, float] | None], offset: int
) -> dict[str, Any]:
    """A row that is None is that of a prompt's first token."""
    found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token, row in zip(tokens, rows, strict=True):
        text = service.token_text(token)
        top = None if row is None else {service.token_text(one): finite(value) for one, value in row.items()}
        for name, value in zip(found, (text, row and finite(row[token]), top, offset), strict=True):
            found[name].append(value)
        offset += len(text)
    return found


async def embed(body: EmbeddingsBody, request: Request) -> Response:
    """Answer each text with the hidden state of its last token, of length 1."""
    service = service_of(request)
    if await service.adapter(body.model) is not None:
        raise ApiError(400, "model: embeddings take no adapter", "model")
    given = _several(body.input)
    service.check_choices(len(given), 1)
    prompts = await service.encoded(given)
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
