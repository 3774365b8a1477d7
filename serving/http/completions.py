"""/v1/completions and /v1/embeddings."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from paged.executors.requests.output import RequestOutput
from paged.serving.http.answers import Event, Form, finite
from paged.serving.http.errors import ApiError, dumps, reply
from paged.serving.http.schemas import CompletionBody, EmbeddingsBody
from paged.serving.http.service import Piece, service_of
from paged.serving.text.token_texts import TokenReader, TokenRow


async def complete(body: CompletionBody, request: Request) -> Response:
    """Answer every prompt with n choices. Choices of a prompt have consecutive indices."""
    service, n = service_of(request), body.n or 1
    if body.best_of not in (None, n):
        raise ApiError(400, f"best_of: {body.best_of}, expected n", "best_of")
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens: 0, expected at least 1 without echo", "max_tokens")
    prompts = _several("prompt", body.prompt)
    echoed = body.logprobs if body.echo else None
    max_tokens = 16 if body.max_tokens is None else max(1, body.max_tokens)
    params = service.params(body, max_tokens, logprobs=body.logprobs, prompt_logprobs=echoed)
    service.check_new_tokens(len(prompts), params)  # check before encoding
    options = await service.options(body, request)
    ids = [await service.encoded(prompt) for prompt in prompts]
    params = service.check_prompts(ids, params)
    num_echoed = n * sum(map(len, ids))
    limit = service.config.max_new_tokens
    if body.echo and num_echoed > limit:
        raise ApiError(400, f"echo: {num_echoed} tokens of prompts in all, expected at most {limit}", "echo")
    return await _Completion(request, body, prompts).answer(ids, params, options)


def _several(name: str, prompts: str | list[Any]) -> list[str] | list[list[int]]:
    """Return a list of texts or of token id lists; a request may have a single one without a list around it."""
    if isinstance(prompts, str):
        return [prompts]
    kinds = set(map(type, prompts))
    if len(kinds) > 1:
        raise ApiError(400, f"{name}: expected a text, token ids, or a list of either", name)
    if kinds in ({str}, {list}):
        return prompts
    return [prompts]


class _Columns(NamedTuple):
    """Log probabilities in OpenAI's form: parallel lists with an item for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[msgspec.Raw | None]
    text_offset: list[int]

    def joined(self, other: _Columns) -> _Columns:
        return _Columns(
            self.tokens + other.tokens,
            self.token_logprobs + other.token_logprobs,
            self.top_logprobs + other.top_logprobs,
            self.text_offset + other.text_offset,
        )


class _Completion(Form):
    """Form of /v1/completions. prompts: the prompts in the client's form.

    Prompts that are only scored (`max_tokens: 0`) run up to the engine's first new token, which is left out.
    """

    prefix, kind = "cmpl", "text_completion"

    def __init__(self, request: Request, body: CompletionBody, prompts: Sequence[str | list[int]]) -> None:
        super().__init__(request, body)
        self._prompts, self._n = prompts, body.n or 1
        self._is_echoed, self._num_top = bool(body.echo), body.logprobs or 0
        self._is_scored = body.max_tokens == 0
        self._readers: dict[int, TokenReader] = {}
        self._echoes: dict[int, tuple[str, _Columns]] = {}

    def events(self, piece: Piece) -> Iterator[Event]:
        yield self.body(choices=[self._choice(piece)])

    def whole(self, pieces: Sequence[Piece]) -> Event:
        return self.body(choices=list(map(self._choice, pieces)), usage=self.usage())

    def usage(self) -> Event:
        usage = super().usage()
        if self._is_scored:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage

    def _choice(self, piece: Piece) -> Event:
        choice, output, part = piece
        text, columns = "", _Columns([], [], [], [])
        if choice not in self._readers:
            if self._is_echoed:
                text, columns = self._echo(choice // self._n, output)
            self._readers[choice] = self.service.token_reader(len(text))
        reason, logprobs = part.finish_reason, None
        if self._is_scored:
            reason = "length"
        else:
            text += part.text
        if part.growth.logprobs is not None:
            if not self._is_scored:
                columns = columns.joined(self._columns(self._readers[choice].read(part)))
            logprobs = columns._asdict()
            if not self._num_top:
                logprobs["top_logprobs"] = None
        return {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _echo(self, index: int, output: RequestOutput) -> tuple[str, _Columns]:
        """Return a prompt's text and the log probabilities of its tokens, which are equal for all its choices."""
        if index not in self._echoes:
            prompt, rows = self._prompts[index], output.prompt_logprobs
            if isinstance(prompt, str):
                text = prompt
            else:
                text = self.service.tokenizer.decode(prompt)
            columns = _Columns([], [], [], [])
            if rows is not None:
                read = self.service.token_reader().read_tokens(list(output.prompt), rows, is_last=True)
                columns = self._columns(read)
                offsets = columns.text_offset
                if isinstance(prompt, str):
                    offsets = self.service.token_texts.offsets(prompt, output.prompt) or offsets
                offsets = [min(offset, len(text)) for offset in offsets]
                columns = columns._replace(text_offset=offsets)
            self._echoes[index] = text, columns
        return self._echoes[index]

    def _columns(self, rows: Iterable[TokenRow]) -> _Columns:
        texts, columns = self.service.token_texts, _Columns([], [], [], [])
        for row in rows:
            columns.tokens.append(texts.text(row.token, is_first=row.is_first))
            columns.text_offset.append(row.offset)
            if row.logprobs is None:  # the first token of a prompt
                columns.token_logprobs.append(None)
                columns.top_logprobs.append(None)
                continue
            columns.token_logprobs.append(finite(row.logprobs[row.token]))
            best: dict[str, float] = {}
            for token, value in row.logprobs.items():  # the row's own token comes first
                text = texts.text(token, is_first=row.is_first)
                if text in best:  # two tokens with the same text, for example parts of characters
                    text = f"token_id:{token}"
                best[text] = finite(value)
            columns.top_logprobs.append(msgspec.Raw(dumps(best)))
        return columns


async def embed(body: EmbeddingsBody, request: Request) -> Response:
    """Answer each text with its last token's hidden state, normalised to length 1."""
    service = service_of(request)
    if await service.adapter(body.model) is not None:
        raise ApiError(400, "model: embeddings take no adapter", "model")
    texts = _several("input", body.input)
    service.check_choices(len(texts), 1)
    prompts = [await service.encoded(text) for text in texts]
    if not all(prompts):
        raise ApiError(400, "input: expected at least 1 token each", "input")
    count = request.state.log.prompt_tokens = sum(map(len, prompts))
    rows = (await service.engine.embed(prompts)).cpu().numpy()

    def answer() -> Response:
        data = []
        for index, row in enumerate(rows):
            if body.encoding_format == "base64":
                embedding = base64.b64encode(row.tobytes()).decode()
            else:
                embedding = row.tolist()
            data.append({"object": "embedding", "index": index, "embedding": embedding})
        usage = {"prompt_tokens": count, "total_tokens": count}
        model = body.model or service.config.model_name
        return reply({"object": "list", "data": data, "model": model, "usage": usage})

    return await service.in_thread(answer, rows.nbytes)
