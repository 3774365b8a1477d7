"""Errors in OpenAI's form, which clients of other servers also understand."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from paged.errors import InvalidInputError, PagedError, SequenceTooLongError, UnsupportedError
from paged.executors.engine.async_engine import EngineStoppedError
from paged.executors.engine.config import QueueFullError
from paged.tools.bounded_process import ProcessLostError
from paged.tools.printable import one_line

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_ARGUMENT = re.compile(r"([a-z][a-z_.0-9]*)(?:\[\d+\])?: ")
_LONGEST = 1000  # limit for an error message in characters


class ApiError(PagedError):
    """Error answer with a status. param: the wrong argument."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers: dict[str, str] = {}
        if status == 429:
            self.headers["retry-after"] = "1"

    @property
    def body(self) -> dict[str, Any]:
        """Body in OpenAI's form, with a further "type" for Anthropic's clients."""
        default = "invalid_request_error" if self.status < 500 else "server_error"
        kind = _TYPES.get(self.status, default)
        message, param = one_line(self.message, _LONGEST), self.param and one_line(self.param, _LONGEST)
        return {"type": "error", "error": {"message": message, "type": kind, "param": param, "code": self.code}}

    def response(self) -> Response:
        return reply(self.body, self.status, self.headers)


def reply(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(dumps(body), status, headers, "application/json")


def dumps(value: Any) -> bytes:
    """Return JSON bytes. A lone surrogate, which a client may send, has no UTF-8; then the JSON is ASCII."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.dumps(value).encode()


def as_api_error(error: BaseException, names: Mapping[str, str] | None = None) -> ApiError:
    """Return the error for the client. Errors of unknown types are reported without details.

    Args:
        names: the client's argument by the engine's argument that is derived from it.
    """
    message, names = str(error), names or {}
    if isinstance(error, ApiError):
        api_error = error
    elif isinstance(error, HTTPException):
        api_error = ApiError(error.status_code, str(error.detail))
    elif isinstance(error, QueueFullError):
        api_error = ApiError(429, message)
    elif isinstance(error, EngineStoppedError | ProcessLostError):
        api_error = ApiError(503, message)
    elif isinstance(error, SequenceTooLongError):
        api_error = ApiError(400, message, code="context_length_exceeded")
    elif isinstance(error, InvalidInputError | UnsupportedError):
        api_error = ApiError(400, message)
    else:
        return ApiError(500, "the server failed; its log says more")
    begin = _ARGUMENT.match(api_error.message)
    if api_error.status == 400 and begin is not None:
        api_error.param = api_error.param or begin[1]
        api_error.message = names.get(begin[1], begin[1]) + api_error.message[begin.end(1) :]
    api_error.param = names.get(api_error.param or "", api_error.param)
    return api_error
