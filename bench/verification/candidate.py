"""Another function in an operation's place, called with the operation's arguments that it takes.

The function runs in a process of its own. This process, the judge, compares its results, and every bit of its
arguments.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from paged.bench.cards.card import Card, Masks, needed
from paged.bench.cards.cards import card_of
from paged.bench.check import WrongResultError
from paged.bench.problems.arguments import HOW, Arguments, Tensors, dtype_of, map_tensors
from paged.bench.verification.judged_process import JudgedProcess
from paged.errors import CheckpointError, InvalidInputError, PagedError
from paged.kernels.core.checks import FLOAT_DTYPES
from paged.tools.recorded_calls.encoder import is_in_blocks, reached_blocks, tensors_in
from paged.tools.recorder import read_call, write_call

# Largest size of arguments, in bytes, that are sent completely. Caches in larger arguments are sent without the blocks
# that the call does not reach.
_MAX_SENT = 256 << 20
# Bytes of an element -> integer dtype of this size. Results are compared as integers, because this compares every bit.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUM_CALLS = 2


class NotTakenError(PagedError):
    """A check does not apply: the candidate lacks an argument, or the machine has too little memory."""


class Outcome(NamedTuple):
    """The results of a call, and its arguments by name as the call left them.

    shared: for each result in the memory of arguments, the names of these arguments. is_reused: whether a result lies
    in the memory of the last call's.
    """

    returned: Any
    arguments: Arguments
    shared: list[list[str]]
    is_reused: bool


class Candidate:
    """A function beside an operation's definition; `arguments` are the arguments of the last call by name.

    Args:
        path: "module:function"; the module is also looked for in the current folder.
        seconds: limit of each call.

    Attributes:
        num_calls: calls as the operation so far.
        again: results of a second call with the last arguments; the operation returns the first call's.

    Raises:
        InvalidInputError: the function does not exist, it lacks an argument that every call has, or no operation has
            the name.
    """

    def __init__(self, operation: str, path: str, seconds: float = 120.0) -> None:
        self.card = card_of(operation)
        self.path = path
        self.arguments: Arguments = {}
        self.again: Tensors = {}
        self.num_calls = 0
        # The folder is removed after the process ended, because a process may still write there after it answered. A
        # child in a session of its own may write even then.
        self._folder = tempfile.TemporaryDirectory(prefix="paged-candidate-", ignore_cleanup_errors=True)
        self._process = JudgedProcess(path, seconds)
        try:
            self._names, self._takes_all = self._process.start()
            self._check_names()
        except BaseException:
            self.close()
            raise
        parameters = self.card.signature.parameters.values()
        # What `inspect.signature` says of the function in the operation's place.
        self.__signature__ = inspect.Signature(
            [parameter for parameter in parameters if self._is_taken(parameter.name)]
        )

    def _is_taken(self, name: str) -> bool:
        return self._takes_all or name in self._names

    def _check_names(self) -> None:
        parameters = self.card.signature.parameters
        for name, argument in parameters.items():
            is_needed = argument.default is argument.empty and name not in HOW
            if is_needed and not self._is_taken(name):
                raise InvalidInputError(
                    f"--candidate {self.path}: takes no {name} by name, expected arguments of {self.card.name}"
                    f"({', '.join(parameters)})"
                )

    def close(self) -> None:
        """End the function's process, and remove the folder of its files."""
        self._process.close()
        self._folder.cleanup()

    def taken(self, arguments: Arguments) -> Arguments:
        """Return the arguments that the function takes.

        Raises:
            NotTakenError: the call needs an argument that the function does not take.
        """
        taken = {}
        for name, value in arguments.items():
            if self._is_taken(name):
                taken[name] = value
            elif name in needed(self.card, arguments):
                raise NotTakenError(f"{self.path} takes no {name}")
        return taken

    def __call__(self, *positional: Any, **named: Any) -> Any:
        """Call the function as the operation, twice with the same arguments.

        Raises:
            NotTakenError: the call needs an argument that the function does not take.
            WrongResultError: a call raises or does not return; it changes an argument that the operation only reads, or
                returns memory that others use; the result has another shape than `out`, or a narrower dtype than the
                arguments.
        """
        self.num_calls += 1
        self.arguments, self.again = self.card.by_name(*positional, **named), {}
        taken = self.taken(self.arguments)
        tensors = tensors_in("", taken)
        block_ids = None
        if sum(tensor.nbytes for tensor in tensors.values()) > _MAX_SENT:
            block_ids = reached_blocks(taken)
        first, second = self._outcomes(taken, _device_of(tensors), block_ids)
        # The second call writes to copies, because the caller examines its own arguments for the first call.
        copies = _with_clones(self.arguments, self.card)
        self.again = self.card.results(copies, self._finished(second, copies))
        writes = self.card.written(self.arguments)
        for outcome in (first, second):
            _check_memory(outcome, writes)
            _check_unchanged(tensors, tensors_in("", outcome.arguments), writes, block_ids)
        return self._finished(first, self.arguments)

    def _outcomes(self, taken: Arguments, device: torch.device, block_ids: torch.Tensor | None) -> list[Outcome]:
        """Call the function in its process. block_ids: blocks of caches to send, None for all."""
        request: dict[str, Any] = {"device": str(device), "blocks": None}
        if block_ids is not None:
            request["blocks"] = block_ids.tolist()
        folder = Path(self._folder.name)
        sent, result = folder / "arguments", folder / "result"
        request["arguments"], request["result"] = str(sent), str(result)
        sent.unlink(missing_ok=True)  # the process may still map the last call's file, so it is not written over
        write_call(sent, self.card.name, taken, block_ids)
        outcomes = []
        for _ in range(_NUM_CALLS):
            result.unlink(missing_ok=True)
            answer = self._process.ask(request)
            if answer["error"] is not None:
                raise WrongResultError(str(answer["error"]))
            try:
                call = read_call(result, torch.device("cpu"))
            except CheckpointError as error:
                raise WrongResultError(f"the result cannot be read: {error.__cause__}") from error
            _check_layouts(tensors_in("", taken), tensors_in("", call.written))
            outcomes.append(Outcome(call.returned, call.written, answer["shared"], answer["is_reused"]))
        return outcomes

    def _finished(self, outcome: Outcome, arguments: Arguments) -> Any:
        """Copy what the call wrote into the arguments, and return what the operation would return."""
        tensors, after = tensors_in("", arguments), tensors_in("", outcome.arguments)
        for name, mask in self.card.written(arguments).items():
            if name in after:
                _write(tensors[name], after[name], mask)
        device = _device_of(tensors)
        returned = map_tensors(lambda tensor: tensor.to(device), outcome.returned)
        first = returned
        if isinstance(returned, tuple | list) and returned:
            first = returned[0]
        _check_dtype(first, dtype_of(arguments))
        for tensor in tensors_in("", returned).values():
            _check_dtype(tensor, tensor.dtype)
        out = arguments.get("out")
        if out is None or self.card.name == "add_lora":
            return returned
        _copy(first, out)
        if first is returned:
            return (out,)
        return (out, *returned[1:])

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace the operation of this name in `paged` by the function."""
        with mock.patch(f"paged.{self.card.name}", self):
            yield


def is_of(operation: str, check_name: str) -> bool:
    """Return whether a check of this name belongs to the operation."""
    suffix = check_name.removeprefix(operation)
    return suffix != check_name and (not suffix or suffix[0] in ".:")


def _device_of(tensors: Tensors) -> torch.device:
    """Return the device of a call: the GPU if some tensors are there."""
    for tensor in tensors.values():
        if not tensor.is_cpu:
            return tensor.device
    return torch.device("cpu")


def _with_clones(arguments: Arguments, card: Card) -> Arguments:
    """Return the arguments with copies of the ones that the operation writes."""
    written = {name.partition(".")[0].partition("[")[0] for name in card.written(arguments)}
    copies = {}
    for name, value in arguments.items():
        copies[name] = value
        if name in written:
            copies[name] = map_tensors(torch.clone, value)
    return copies


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_BITS[tensor.element_size()])


def _check_layouts(before: Tensors, after: Tensors) -> None:
    """Refuse arguments whose names, shapes or dtypes have changed."""
    if after.keys() != before.keys():
        raise WrongResultError(f"left arguments {', '.join(after)}, expected {', '.join(before)}")
    for name, tensor in after.items():
        if (tensor.shape, tensor.dtype) != (before[name].shape, before[name].dtype):
            raise WrongResultError(f"made {name} {tensor.dtype} of shape {list(tensor.shape)}")


def _check_memory(outcome: Outcome, writes: Masks) -> None:
    """Refuse a result in the memory of a read-only argument or of an earlier result."""
    for names in outcome.shared:
        if not writes.keys() & set(names):
            raise WrongResultError(f"returned memory of {', '.join(names)}, which the operation only reads")
    if outcome.is_reused:
        raise WrongResultError("returned the memory of its last result, which its caller may still hold")


def _check_unchanged(before: Tensors, after: Tensors, writes: Masks, block_ids: torch.Tensor | None) -> None:
    """Refuse a changed bit where nothing may be written. block_ids: blocks of caches that were sent."""
    for name, tensor in before.items():
        mask = writes.get(name)
        if name in writes and mask is None:
            continue
        changed = _bits(tensor.cpu()) != _bits(after[name])
        if mask is not None:
            changed[mask.cpu()] = False
        if block_ids is not None and is_in_blocks(name.partition("[")[0], tensor):
            is_sent = torch.zeros(len(tensor), dtype=torch.bool)
            is_sent[block_ids] = True
            changed[~is_sent] = False
        if changed.any():
            place = ", ".join(map(str, changed.nonzero()[0].tolist()))
            raise WrongResultError(f"changed {name}[{place}], which the operation only reads")


def _write(tensor: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None) -> None:
    """Copy what a call wrote as bits, because a mask cannot index every dtype."""
    bits, new_bits = _bits(tensor), _bits(values).to(tensor.device)
    if mask is None:
        bits.copy_(new_bits)
    else:
        mask = mask.to(tensor.device)
        bits[mask] = new_bits[mask]


def _check_dtype(result: Any, expected: torch.dtype) -> None:
    """Refuse floats that no operation returns, or narrower ones than expected, even if their values are right."""
    if not isinstance(result, torch.Tensor) or not result.is_floating_point():
        return
    if result.dtype not in FLOAT_DTYPES:
        raise WrongResultError(f"dtype {result.dtype}, expected one of {', '.join(map(str, FLOAT_DTYPES))}")
    if torch.finfo(result.dtype).eps > torch.finfo(expected).eps:
        raise WrongResultError(f"dtype {result.dtype}, expected {expected}")


def _copy(result: Any, out: torch.Tensor) -> None:
    """Write a result to `out`, because the function may not take `out`."""
    shape: Any = type(result).__name__
    if isinstance(result, torch.Tensor):
        shape = list(result.shape)
    if shape != list(out.shape):
        raise WrongResultError(f"shape {shape}, expected {list(out.shape)}")
    out.copy_(result)
