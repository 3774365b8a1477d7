"""The process in which a candidate runs: it calls the function with arguments from files and writes result files.

The judge's process starts it by `COMMAND` and compares the contents of the files. Nothing in this process is a verdict.
"""

from __future__ import annotations

import importlib
import inspect
import json
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from paged.tools.recorded_calls.encoder import tensors_in
from paged.tools.recorder import RecordedCall, read_call, write_call

COMMAND = "import sys; sys.path[:] = sys.argv[3:]; from paged.bench.verification.candidate_process import main; main()"
"""Arguments: the descriptor of a socket, MODULE:FUNCTION, and the folders with modules."""


def load_function(path: str) -> Callable[..., Any]:
    """Return the function "module:function"; the module is also looked for in the current folder."""
    module_name, _, attribute = path.partition(":")
    if "" not in sys.path:
        sys.path.append("")
    function: Callable[..., Any] = getattr(importlib.import_module(module_name), attribute)
    return function


def main() -> None:
    """Answer requests, each a line of JSON, until the judge closes the connection."""
    with socket.socket(fileno=int(sys.argv[1])) as connection, connection.makefile("rw") as stream:
        for answer in _answers(stream, sys.argv[2]):
            stream.write(json.dumps(answer) + "\n")
            stream.flush()


def _answers(requests: Any, path: str) -> Iterator[dict[str, Any]]:
    """Yield the arguments that the function takes, then an answer to each request."""
    try:
        function = load_function(path)
        yield {"number": 0, **_taken(function)}
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        yield {"number": 0, "error": str(error)}
        return
    except BaseException as error:  # a module that ends the process gives no answer
        yield {"number": 0, "error": f"{type(error).__name__}: {error}"}
        return
    previous: list[torch.Tensor] = []
    for line in requests:
        request = json.loads(line)
        call = read_call(request["arguments"], torch.device(request["device"]))
        try:
            returned = function(**call.arguments)
            results = [tensor for tensor in tensors_in("", returned).values() if tensor.numel()]
            is_reused = _is_reused(results, previous, call)
            answer: dict[str, Any] = {"error": None, "shared": _shared(results, call), "is_reused": is_reused}
            previous = results
            blocks = request["blocks"]
            if blocks is not None:
                blocks = torch.tensor(blocks, dtype=torch.int64)
            write_call(Path(request["result"]), call.operation, {}, blocks, returned, call.arguments)
        except BaseException as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(place.filename).name}:{place.lineno}"
            answer = {"error": f"{type(error).__name__}: {error} ({where})"}
        yield {"number": request["number"], **answer}


def _taken(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the names of the arguments that a function takes, and whether it takes all."""
    names = []
    takes_all = False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            takes_all = True
        elif parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
            names.append(parameter.name)
    return {"names": names, "takes_all": takes_all}


def _shared(results: list[torch.Tensor], call: RecordedCall) -> list[list[str]]:
    """Return, for each result that lies in the memory of arguments, the names of these arguments."""
    shared = []
    for result in results:
        names = []
        for name, argument in tensors_in("", call.arguments).items():
            if _storage(argument) == _storage(result):
                names.append(name)
        if names:
            shared.append(names)
    return shared


def _is_reused(results: list[torch.Tensor], previous: list[torch.Tensor], call: RecordedCall) -> bool:
    """Return whether a result lies in the memory of a previous result. A result in an argument, such as out, may."""
    argument_storages = {_storage(tensor) for tensor in tensors_in("", call.arguments).values()}
    previous_storages = {_storage(tensor) for tensor in previous} - argument_storages
    return any(_storage(tensor) in previous_storages for tensor in results)


def _storage(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory."""
    return tensor.untyped_storage().data_ptr()
