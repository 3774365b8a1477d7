"""Structured answers: grammars compiled by llguidance or xgrammar to matchers for `token_mask`."""

from __future__ import annotations

import asyncio
import copy
import json
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
import torch

from paged.errors import InvalidInputError, PagedError, UnsupportedError
from paged.kernels.core.errors import as_float, shown
from paged.serving.grammar.fair_semaphore import FairSemaphore, QueueFullError
from paged.serving.grammar.grammar_process import MAX_MEGABYTES, REFUSED, move
from paged.tools.bounded_process import Branch, ProcessEndedError, ProcessLostError, Root
from paged.tools.printable import one_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Kind = Literal["json", "regex", "grammar", "choice", "structural_tag"]
_MAX_CHARACTERS, _MAX_VALUES, _MAX_DEPTH = 1 << 16, 2048, 64
# Numbers of grammars and of slow grammars that compile at once. A grammar that takes longer than _MOMENT_S starts again
# as a slow grammar, so that it does not delay others.
_MAX_COMPILING, _MAX_SLOW = 8, 4
_MOMENT_S = 0.25
_ROOT = Root("paged.serving.grammar.grammar_process", niceness=10)
_START_S = 120.0  # time to load torch and xgrammar on a busy machine
# A single token may take the time limit of this many tokens, because the first mask over a large vocabulary is slow.
_BURST_TOKENS = 20
# Seconds that a process may wait for a core: the limit of real time exceeds the limit of CPU time by this.
_SPARE_S = 2.0
_QUICK_S = 0.005


class GrammarLimitError(PagedError):
    """A grammar exceeds its limit of time or memory for a token, or too many grammars wait to be compiled."""


class GrammarCompiler:
    """Compiles grammars over one vocabulary and caches them.

    Grammars are compiled and advanced in separate processes, which the system ends at a limit of time or memory.

    Args:
        vocab_size: vocabulary size of the model, which may exceed the tokenizer's.
        end_token_ids: tokens that may follow a complete answer.
        max_cached: number of cached grammars; the least recently used is dropped first.
        token_seconds: limit for a completion's CPU time per token, on average over the last 20 tokens.
        max_waiting: maximum number of grammars that wait to be compiled. Beyond it, a grammar of the client with most
            waiting grammars is refused.

    Raises:
        InvalidInputError: `token_seconds` is not positive.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        end_token_ids: Sequence[int],
        *,
        max_cached: int = 64,
        token_seconds: float = 0.05,
        max_waiting: int = 1024,
    ) -> None:
        self._tokenizer, self._max_cached, self._max_waiting = tokenizer, max_cached, max_waiting
        self._setup = {"vocab_size": vocab_size, "end_token_ids": list(end_token_ids)}
        self._token_s = as_float("token_seconds", token_seconds, math.nextafter(0, 1))
        self._compiled: dict[tuple[str, str], _Compiled] = {}  # least recently used first
        self._shared: dict[tuple[str, str], _Shared] = {}  # grammars being compiled
        self._vocabulary: Branch | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def compile(self, kind: Kind, grammar: Any, *, seconds: float = 10.0, client: Hashable = None) -> Any:
        """Compile a grammar; return a fresh matcher, see `TokenMask`. Other coroutines run meanwhile.

        A matcher's methods raise GrammarLimitError once the grammar exceeds its time or memory, and ProcessLostError if
        the system cannot start its process or has ended it.

        Args:
            kind: "json" for a JSON schema, as a mapping or text; "regex" for a Python regular expression of the whole
                answer; "grammar" for EBNF in xgrammar's dialect; "choice" for a list of texts; "structural_tag" for
                xgrammar's structural tags.
            client: key of the client; clients are served in turn.

        Raises:
            InvalidInputError: the grammar is malformed or has an unsupported part; it exceeds 65,536 characters, 2,048
                JSON values or a depth of 64; or compiling takes longer than `seconds`, without waiting for others, or
                more than 512 MB.
            GrammarLimitError: too many grammars wait.
            ProcessLostError: the system cannot start a process, or has ended it.
            UnsupportedError: llguidance or xgrammar is not installed, or this system has no fork.
        """
        kind, text = _checked(kind, grammar)
        key = (kind, text)
        compiled = self._compiled.pop(key, None)
        # Nothing was asked, so a readable socket means that the process has ended.
        if compiled is None or compiled.process.is_ready():
            vocabulary = await self._started()
            compiled = await self._compiled_once(vocabulary, key, seconds, client)
        self._compiled[key] = compiled
        if len(self._compiled) > self._max_cached:
            del self._compiled[next(iter(self._compiled))]
        return _Matcher(compiled, self._token_s)

    async def _compiled_once(
        self, vocabulary: Branch, key: tuple[str, str], seconds: float, client: Hashable
    ) -> _Compiled:
        """Compile a grammar once for all callers that wait for it; cancel it when none waits.

        It takes the turn of the first client. If this turn is refused, other clients try again with their own turn.
        """
        while True:
            shared = self._shared.get(key)
            if shared is None:
                task = asyncio.create_task(self._compile_in_turn(vocabulary, *key, seconds, client))
                shared = self._shared[key] = _Shared(task, client)
            shared.num_waiting += 1
            try:
                return await asyncio.shield(shared.task)
            except GrammarLimitError:
                if shared.client == client:
                    raise
            finally:
                shared.num_waiting -= 1
                if shared.task.done() or not shared.num_waiting:
                    shared.task.cancel()
                    if self._shared.get(key) is shared:
                        del self._shared[key]

    async def _compile_in_turn(
        self, vocabulary: Branch, kind: str, text: str, seconds: float, client: Hashable
    ) -> _Compiled:
        try:
            async with self._turns.hold(client):
                compiled = await self._compile(vocabulary, kind, text, seconds, min(_MOMENT_S, seconds))
            if compiled is None and seconds > _MOMENT_S:
                async with self._slow_turns.hold(client):
                    compiled = await self._compile(vocabulary, kind, text, seconds, seconds)
        except QueueFullError:
            raise GrammarLimitError(f"{kind}: {self._max_waiting} others wait to be compiled") from None
        if compiled is None:
            raise InvalidInputError(f"{kind}: not compiled within {seconds} s and {MAX_MEGABYTES} MB")
        return compiled

    async def _compile(
        self, vocabulary: Branch, kind: str, text: str, seconds: float, cpu_s: float
    ) -> _Compiled | None:
        """Compile a grammar; return None if it exceeds time or memory."""
        process = vocabulary.branch()
        try:
            async with asyncio.timeout(seconds):
                answer = await _asked(process, {"kind": kind, "text": text}, seconds, cpu_s)
                if "error" in answer:
                    raise InvalidInputError(f"{kind}: {one_line(answer['error'], 500)}")
                mask = (await process.ask(move(0, ()), seconds=seconds, cpu_s=cpu_s)).message
        except ProcessLostError:
            process.close()
            raise
        except (ProcessEndedError, TimeoutError):
            process.close()
            return None
        except BaseException:
            process.close()  # close now, because a cancelled task's traceback may keep it alive
            raise
        return _Compiled(process, mask, frozenset(answer["stops"]))

    async def _started(self) -> Branch:
        """Return a process with the vocabulary."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._shared, self._starting = loop, {}, asyncio.Lock()
            self._turns = FairSemaphore(_MAX_COMPILING, self._max_waiting)
            self._slow_turns = FairSemaphore(_MAX_SLOW, self._max_waiting)
        async with self._starting:
            # Nothing was asked, so a readable socket means that the process has ended.
            if self._vocabulary is None or self._vocabulary.is_ready():
                process = await asyncio.to_thread(_ROOT.branch)
                text = await asyncio.to_thread(self._tokenizer.to_str)
                try:
                    answer = await _asked(process, {**self._setup, "tokenizer": text}, _START_S)
                except ProcessEndedError as error:
                    raise ProcessLostError(f"structured output: no process within {_START_S} s") from error
                if "missing" in answer:
                    raise UnsupportedError(f"structured output needs {answer['missing']}: pip install 'paged[serve]'")
                if "error" in answer:
                    raise UnsupportedError(f"structured output: {one_line(answer['error'], 500)}")
                self._vocabulary = process
            return self._vocabulary


@dataclass(eq=False)
class _Shared:
    """A grammar being compiled: its task, the client whose turn it uses, the number of waiting callers."""

    task: asyncio.Task[_Compiled]
    client: Hashable
    num_waiting: int = 0


class _Compiled(NamedTuple):
    """A compiled grammar: its process, which is only branched, the mask of its first token, its end tokens."""

    process: Branch
    mask: bytes
    stop_ids: frozenset[int]


class _Matcher:
    """`TokenMask` with its state in a separate process, from the first token on.

    A move is sent at once. The process answers with the next mask, which it computes while the engine does other work.
    """

    def __init__(self, compiled: _Compiled, token_s: float) -> None:
        self._compiled, self._token_s = compiled, token_s
        self._process: Branch | None = None
        self._tokens: list[int] = []  # accepted tokens
        self._num_back = 0  # number of tokens that the process must undo before the next move
        self._mask: bytes | None = compiled.mask  # None if unknown
        self._is_asked = self._is_stopped = False
        self._left_s = _BURST_TOKENS * token_s
        self._last_s = 0.0

    def fill_next_token_bitmask(self, bitmask: torch.Tensor, index: int = 0) -> bool:
        if self._mask is None:
            if not self._is_asked:
                self._ask()
            if not self._receive():
                raise PagedError("the grammar refuses a token that its mask allowed")
        assert self._mask is not None
        bitmask[index] = torch.from_numpy(np.frombuffer(self._mask, np.int32).copy())
        return True

    def accept_token(self, token_id: int) -> bool:
        if self._is_asked:
            self._receive()
        if self._is_stopped:
            return False
        is_known = self._mask is not None
        if self._mask is not None:
            word = self._mask[token_id // 8 : token_id // 8 + 1]
            if token_id < 0 or not word or not (word[0] >> token_id % 8) & 1:
                return False
        self._ask(token_id)
        if not is_known and not self._receive():
            return False
        self._is_stopped = token_id in self._compiled.stop_ids
        self._tokens.append(token_id)
        return True

    def rollback(self, num_tokens: int = 1) -> None:
        if not 0 <= num_tokens <= len(self._tokens):
            raise InvalidInputError(f"num_tokens: {num_tokens}, expected 0 to {len(self._tokens)}")
        if self._is_asked:
            self._receive()
        if num_tokens:
            del self._tokens[-num_tokens:]
            self._num_back += num_tokens
            self._mask, self._is_stopped = None, False

    def is_terminated(self) -> bool:
        return self._is_stopped

    def fork(self) -> _Matcher:
        if self._is_asked:
            self._receive()
        twin = copy.copy(self)
        twin._process, twin._tokens = None, self._tokens.copy()
        return twin

    def is_ready(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for the next mask or an error; return whether it arrived."""
        return not self._is_asked or self._process is None or self._process.is_ready(timeout)

    @property
    def is_quick(self) -> bool:
        """Whether masks usually arrive before they are needed."""
        return self._last_s < _QUICK_S

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.close()

    def _ask(self, *tokens: int) -> None:
        """Send a move without waiting for its mask."""
        self._left_s = min(self._left_s + self._token_s, _BURST_TOKENS * self._token_s)
        if self._left_s <= 0:
            raise self._error()
        if self._process is None:
            try:
                self._process = self._compiled.process.branch()
            except ProcessLostError:
                raise
            except ProcessEndedError:
                raise self._error() from None
            tokens, self._num_back = (*self._tokens, *tokens), 0
        self._process.send(move(self._num_back, tokens), cpu_s=self._left_s, seconds=self._left_s + _SPARE_S)
        self._mask, self._num_back, self._is_asked = None, 0, True

    def _receive(self) -> bool:
        """Receive the answer to the last move; return whether the grammar allows the move."""
        assert self._process is not None
        try:
            answer, self._last_s = self._process.receive()
        except ProcessLostError:
            raise
        except ProcessEndedError:
            self._left_s = 0.0
            raise self._error() from None
        self._is_asked = False
        self._left_s -= self._last_s
        if answer == REFUSED:
            return False
        self._mask = answer
        return True

    def _error(self) -> GrammarLimitError:
        return GrammarLimitError(
            f"the grammar takes more than {1000 * self._token_s:g} ms a token, or more than {MAX_MEGABYTES} MB"
        )


async def _asked(
    process: Branch, request: Mapping[str, Any], seconds: float, cpu_s: float | None = None
) -> dict[str, Any]:
    reply = await process.ask(json.dumps(request).encode(), seconds=seconds, cpu_s=cpu_s)
    answer: dict[str, Any] = json.loads(reply.message)
    return answer


def _checked(kind: Any, grammar: Any) -> tuple[Any, str]:
    """Return the kind and the grammar as a text, after checking size and depth."""
    if kind not in get_args(Kind):
        raise InvalidInputError(f"kind: {shown(kind)}, expected one of {', '.join(get_args(Kind))}")
    if kind == "choice":
        is_list = isinstance(grammar, list) and len(grammar) > 0
        if not is_list or not all(isinstance(text, str) and text for text in grammar):
            raise InvalidInputError(f"choice: {shown(grammar)}, expected texts")
    if kind in ("regex", "grammar") and not isinstance(grammar, str):
        raise InvalidInputError(f"{kind}: {shown(grammar)}, expected a text")
    size = 0.0
    try:
        text = grammar if isinstance(grammar, str) else json.dumps(grammar)
        if kind in ("json", "structural_tag") and len(text) <= _MAX_CHARACTERS:
            size = _size(json.loads(text))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"{kind}: {one_line(error, 200)}") from error
    if len(text) > _MAX_CHARACTERS or size > _MAX_VALUES:
        limits = f"{_MAX_CHARACTERS} characters, {_MAX_VALUES} values, {_MAX_DEPTH} levels"
        raise InvalidInputError(f"{kind}: too large, expected at most {limits}")
    return kind, text


def _size(value: Any, levels: int = _MAX_DEPTH) -> float:
    """Return the number of JSON values, or infinity if it is nested too deeply."""
    if levels == 0:
        return math.inf
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return 1
    return 1 + sum(_size(item, levels - 1) for item in value)
