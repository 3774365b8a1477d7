"""Incremental parser of answers into reasoning, content and tool calls, driven by the description of a format.

The reader consumes each character once and holds back at most a possible marker. Therefore the cost of an answer is
linear in its length, however it is cut. Text that turns out to be no call is content.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from paged.serving.formats.answer_text import NAME, Delta, Kind, Reading
from paged.serving.formats.argument_reader import ArgumentReader
from paged.serving.formats.reasoning_formats import Reasoning
from paged.serving.formats.tool_formats import ToolFormat

_LONGEST_NAME = 256
_BETWEEN_CALLS = " \t\r\n;,"
# Markers of OpenAI's harmony format.
_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_MESSAGE_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START, _CHANNEL)
_RECIPIENT = re.compile(r"\bto=functions\.([\w.:/-]+)")


class AnswerReader(ArgumentReader):
    """Parser of one answer. A possible beginning of a marker waits for the next text.

    Args:
        tools: format of calls; None leaves calls in the content.
        reasoning: format of reasoning; None leaves reasoning in the content.
        thinks: whether the prompt ends within reasoning.
        parameters: JSON schemas of the tools by name, which tell which arguments without quotes are texts. None if
            unknown. If given, a call without markers counts only if its tool is known.
        is_one: whether the answer ends with its first call; later text is left out.
        continues: whether the prompt ends within the answer's content, so that the text is not its beginning.

    Attributes:
        num_calls: number of calls so far.
        is_complete: whether the only call (`is_one`) is complete.
        num_reasoning: number of texts so far that began and ended within reasoning.
    """

    def __init__(
        self,
        tools: ToolFormat | None,
        reasoning: Reasoning | None = None,
        *,
        thinks: bool = False,
        parameters: Mapping[str, Any] | None = None,
        is_one: bool = False,
        continues: bool = False,
    ) -> None:
        super().__init__(parameters)
        self._tools, self._reasoning = tools, reasoning
        self._is_one, self.is_complete = is_one, False
        self.num_reasoning = 0
        self._is_reasoning = thinks
        self._frame = () if reasoning is None else reasoning.frame
        self._begins: tuple[str, ...] = ()
        if tools is not None:
            self._begins = tools.begins
        has_channels = reasoning is not None and reasoning.has_channels
        if has_channels:
            self._run = self._channels(thinks)
        else:
            self._run = self._answer(thinks, continues)
        next(self._run)

    def read(self, *texts: str, is_last: bool = False) -> list[Delta]:
        """Return the deltas of new texts; with `is_last` also everything held back."""
        self._parts = []
        for text in texts:
            was_reasoning = self._is_reasoning
            self._text, self._at = self._text[self._at :] + text, 0
            next(self._run, None)
            self.num_reasoning += was_reasoning and self._is_reasoning
        if is_last:
            self._is_last = True
            next(self._run, None)
        return [Delta(kind, "".join(pieces)) for kind, pieces in self._parts]

    # Parts of an answer.

    def _answer(self, thinks: bool, continues: bool) -> Reading[None]:
        yield
        spaces = ""
        is_within_content = continues and not thinks
        if not is_within_content:
            spaces = yield from self._thoughts(thinks)
        while (yield from self._next()):
            if self._tools is not None and self._tools.bare and not is_within_content:
                spaces += yield from self._while(str.isspace)
                if (yield from self._next()) == self._tools.bare:
                    is_call = yield from self._calls(self._tools, spaces, is_bare=True)
                    spaces = ""
                    if is_call:
                        spaces = yield from self._thoughts(False)
                        continue
            self._put("content", spaces)
            spaces, is_within_content = "", False
            marker = yield from self._up_to((*self._begins, *self._frame), self._put_content)
            if self._tools is None or marker not in self._begins:
                continue
            is_call = yield from self._calls(self._tools, marker)
            if is_call:
                spaces = yield from self._thoughts(False)
        self._put("content", spaces)

    def _thoughts(self, thinks: bool) -> Reading[str]:
        """Emit reasoning if it comes next; return leading white space that is not reasoning."""
        spaces = ""
        if self._reasoning is None:
            return spaces
        if not thinks:
            spaces = yield from self._while(str.isspace)
            thinks = yield from self._comes(self._reasoning.begin)
        if thinks:
            spaces = ""
            yield from self._text_of("reasoning", (self._reasoning.end,))
            yield from self._while("\n".__contains__)
        return spaces

    def _channels(self, thinks: bool) -> Reading[None]:
        """Read harmony messages: a header with channel and recipient, then the text."""
        yield
        kind: Kind = "reasoning" if thinks else "content"
        spaces = yield from self._while(str.isspace)
        marker = "to="
        if not (yield from self._comes(marker)):
            self._put(kind, spaces)
            marker = yield from self._text_of(kind, _MESSAGE_ENDS)
        while (yield from self._next()):
            if marker not in (_START, _CHANNEL, "to="):
                marker = yield from self._up_to((_START, _CHANNEL), self._put_content)
                continue
            pieces = [marker]
            if not (yield from self._up_to((_MESSAGE,), pieces.append)):
                self._put("content", "".join(pieces))
                return
            header = "".join(pieces)
            recipient = _RECIPIENT.search(header)
            if recipient is not None and self._tools is not None:
                marker = yield from self._message_of_call(recipient[1])
                continue
            kind = "reasoning" if f"{_CHANNEL}analysis" in header else "content"
            marker = yield from self._text_of(kind, _MESSAGE_ENDS)

    def _message_of_call(self, name: str) -> Reading[str]:
        """Emit a call whose arguments are a message; return the marker after it."""
        self._begin(name)
        yield from self._while(str.isspace)
        if (yield from self._next()) == "{":
            yield from self._object(self._put_arguments)
            yield from self._end_of_call()
            return (yield from self._up_to(_MESSAGE_ENDS, lambda text: None))
        marker = yield from self._up_to(_MESSAGE_ENDS, self._put_arguments)
        yield from self._end_of_call()
        return marker

    def _text_of(self, kind: Kind, ends: tuple[str, ...]) -> Reading[str]:
        """Emit a text up to one of some markers; return the marker."""
        self._is_reasoning = kind == "reasoning"
        marker = yield from self._up_to(ends, partial(self._put, kind))
        self._is_reasoning = False
        return marker

    # Calls

    def _calls(self, form: ToolFormat, opened: str, *, is_bare: bool = False) -> Reading[bool]:
        """Read the calls after a marker. If there is none, return False and leave the text as content."""
        self._head = [opened]
        if not (yield from self._call(form, is_bare=is_bare)):
            return self._is_no_call()
        between_calls = _BETWEEN_CALLS + "]" * form.is_list
        while True:
            yield from self._end_of_call()
            between = yield from self._while(between_calls.__contains__)
            if form.end and (yield from self._comes(form.end)):
                yield from self._while("\n".__contains__)
                return True
            is_ended = not form.is_section or (form.is_list and "]" in between)
            if is_ended or not (yield from self._next()):
                return True
            self._head = []
            if not (yield from self._call(form, is_bare=is_bare)):
                self._is_no_call()
                return True

    def _end_of_call(self) -> Reading[None]:
        """Continue after a call, or drop all further text if the answer ends with its first call."""
        self.is_complete = self._is_one
        while self.is_complete:
            self._at = len(self._text)
            yield

    def _call(self, form: ToolFormat, *, is_bare: bool) -> Reading[bool]:
        """Read one call, emitting its arguments as they come; return False if it is no call."""
        yield from self._while(str.isspace)
        yield from self._comes("[")
        yield from self._while(str.isspace)
        if (yield from self._next()) == "{":
            return (yield from self._named_object(form, is_bare=is_bare))
        before, after, last = form.call
        if form.arguments == "object" or (yield from self._matches(before.lstrip().removesuffix(form.prefix))) is None:
            return False
        name = yield from self._while(lambda letter: NAME.match(letter) is not None)
        name = name.removeprefix(form.prefix)
        if after.startswith(":{index}"):
            name = name.rpartition(":")[0] or name
            after = after.removeprefix(":{index}")
        if not self._is_name(name, is_bare=is_bare):
            return False
        if form.arguments == "tags":
            yield from self._skip(after)
            return (yield from self._tags(form, name))
        if form.extra and (yield from self._comes(form.extra.partition("{")[0])):
            yield from self._while(lambda letter: NAME.match(letter) is not None)
        is_open = form.arguments == "json" and (yield from self._next()) == "{"
        if not is_open and (yield from self._matches(after)) is None:
            return False
        if form.arguments == "json":
            yield from self._while(str.isspace)
            if (yield from self._next()) != "{":
                return False
            self._begin(name)
            yield from self._object(self._put_arguments)
        elif form.arguments == "elements":
            self._begin(name)
            yield from self._elements(form.tags, (self._parameters or {}).get(name))
        else:
            self._begin(name)
            yield from self._loose_object()
        yield from self._skip(last)
        return True

    def _is_name(self, name: str, *, is_bare: bool) -> bool:
        if len(name) > _LONGEST_NAME or NAME.fullmatch(name) is None:
            return False
        return not is_bare or self._parameters is None or name in self._parameters

    def _named_object(self, form: ToolFormat, *, is_bare: bool) -> Reading[bool]:
        """Read a call that is a JSON object with name and arguments, in any order."""
        yield from self._comes("{")
        name, pieces = "", list[str]()
        while True:
            yield from self._while(lambda letter: letter.isspace() or letter == ",")
            if (yield from self._comes("}")):
                break
            key = yield from self._plain_string()
            yield from self._while(str.isspace)
            if not (yield from self._comes(":")):
                return False
            yield from self._while(str.isspace)
            if key == "name":
                name = yield from self._plain_string()
                if not self._is_name(name, is_bare=is_bare):
                    return False
            elif key in ("arguments", "parameters"):
                if name and (yield from self._next()) == "{":
                    self._begin(name)
                    yield from self._object(self._put_arguments)
                    yield from self._close(form.end)
                    return True
                pieces.clear()
                yield from self._any_value(pieces.append)
            elif key in ("type", "id", "index"):
                yield from self._any_value(lambda text: None)
            else:
                return False
        arguments = "".join(pieces).strip()
        if not name or not arguments:
            return False
        self._begin(name)
        self._put_arguments("{}" if arguments == "null" else arguments)
        return True

    def _close(self, end: str) -> Reading[None]:
        """Read the rest of the object around name and arguments, whose closing brace may be missing."""
        while (yield from self._next()):
            if (yield from self._comes("}")):
                return
            if end and (yield from self._next()) == end[0]:
                return
            self._advance(self._at + 1)
            yield from self._while(lambda letter: letter not in ("}", end[:1]))
