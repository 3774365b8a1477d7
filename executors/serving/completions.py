"""/v1/completions and /v1/embeddings."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from paged.executors.serving.answers import Event, Form, finite
from paged.executors.serving.errors import ApiError, reply
from paged.executors.serving.schemas import CompletionBody, EmbeddingsBody
from paged.executors.serving.service import Piece, service_of


async def complete(body: CompletionBody, request: Request) -> Response:
    """Answer every prompt with n choices; those of a prompt have consecutive indices."""
    service, n = service_of(request), body.n or 1
    if body.best_of not in (None, n):
        raise ApiError(400, f"best_of: {body.best_of}, expected n", "best_of")
    options, given = await service.options(body), _several(body.prompt)
    service.check_choices(len(given), n)  # before they are encoded
    prompts = await service.encoded(given)
    echoed = body.logprobs if body.echo else None
    params = service.params(body, body.max_tokens or 16, logprobs=body.logprobs, prompt_logprobs=echoed)
    params = service.check_prompts(prompts, params)
    echoes = [one if isinstance(one, str) else service.tokenizer.decode(one) for one in given] if body.echo else []
    return await _Completion(request, body, echoes, n).answer(prompts, params, options)


def _several(given: Any) -> list[Any]:
    """Return texts, or lists of token ids, of which a request may have one without a list around it."""
    return [given] if isinstance(given, str) or not given or isinstance(given[0], int) else list(given)


class _Completion(Form):
    prefix, kind = "cmpl", "text_completion"

    def __init__(self, request: Request, body: CompletionBody, echoes: Sequence[str], n: int) -> None:
        super().__init__(request, body)
        self._echoes, self._n, self._offsets = echoes, n, dict[int, int]()

    def events(self, piece: Piece) -> Iterator[Event]:
        yield self.body(choices=[self._choice(piece)])

    def whole(self, pieces: Sequence[Piece]) -> Event:
        return self.body(choices=list(map(self._choice, pieces)), usage=self.usage())

    def _choice(self, piece: Piece) -> Event:
        choice, output, part = piece
        text, logprobs = part.text, None
        rows: Sequence[dict[int, float] | None] | None = part.logprobs
        begin = self._offsets.get(choice, 0)
        tokens = [] if rows is None else part.token_ids
        if self._echoes and choice not in self._offsets:
            text = self._echoes[choice // self._n] + text
            if (prompt := output.prompt_logprobs) is not None:
                tokens, rows = [*output.prompt, *tokens], [*prompt, *(rows or ())]
        if rows is not None:
            logprobs = self._logprobs(tokens, rows, begin)
        self._offsets[choice] = begin + len(text)
        return {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": part.finish_reason}

    def _logprobs(self, tokens: Sequence[int], rows: Sequence[dict[int, float] | None], offset: int) -> Event:
        """A row that is None is that of a prompt's first token."""
        found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        text_of = self.service.token_text
        for token, row in zip(tokens, rows, strict=True):
            top = None if row is None else {text_of(one): finite(value) for one, value in row.items()}
            entries = text_of(token), row and finite(row[token]), top, offset
            for values, value in zip(found.values(), entries, strict=True):
                values.append(value)
            offset += len(entries[0])
        return found


async def embed(body: EmbeddingsBody, request: Request) -> Response:
    """Answer each text with the hidden state of its last token, of length 1."""
    service = service_of(request)
    if await service.adapter(body.model) is not None:
        raise ApiError(400, "model: embeddings take no adapter", "model")
    given = _several(body.input)
    service.check_choices(len(given), 1)
    longest = min(service.longest, service.config.max_prompt_tokens or service.longest)
    async with service.in_time(request):
        prompts = await service.encoded(given)
        if any(not 0 < len(prompt) <= longest for prompt in prompts):
            raise ApiError(400, f"input: expected 1 to {longest} tokens each", "input", "context_length_exceeded")
        count = request.state.record.prompt_tokens = sum(map(len, prompts))
        rows = (await service.engine.embed(prompts)).cpu().numpy()

    def answer() -> Response:
        is_text = body.encoding_format == "base64"
        values = [base64.b64encode(row.tobytes()).decode() if is_text else row.tolist() for row in rows]
        data = [{"object": "embedding", "index": index, "embedding": value} for index, value in enumerate(values)]
        usage = {"prompt_tokens": count, "total_tokens": count}
        model = body.model or service.config.model_name
        return reply({"object": "list", "data": data, "model": model, "usage": usage})

    return await service.in_thread(answer)
