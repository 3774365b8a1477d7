"""Conversion of conversations with calls, results and reasoning to the form of a model's chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

Message = dict[str, Any]
_AS_JSON = re.compile(r"arguments['\"\]]*\s*\|\s*tojson")
_THOUGHT_NAMES = ("reasoning_content", "reasoning", "thinking")


def call_arguments(text: str) -> dict[str, Any]:
    """Parse the arguments of a call; a text that is no JSON object is returned under Anthropic's key for it."""
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if isinstance(arguments, dict):
        return arguments
    return {"INVALID_JSON": text}


def replayed(
    messages: list[Message], *, template: str, has_channels: bool, call_id: str, has_text_arguments: bool
) -> list[Message]:
    """Convert messages to the form of a model's template.

    Args:
        messages: messages as dicts, which this call may change; arguments of calls are objects.
        template: text of the template.
        has_channels: whether an answer consists of messages in channels.
        call_id: form of call ids that the template requires, with {name} and {index}; "" for any.
        has_text_arguments: whether the template expects arguments as text, unless it writes JSON itself.
    """
    for message in messages:
        thought = ""
        for name in _THOUGHT_NAMES:
            if not thought and isinstance(message.get(name), str):
                thought = message[name]
        if thought:
            for name in _THOUGHT_NAMES:
                message.setdefault(name, thought)
        if has_channels and message.get("tool_calls") and message.get("content") and thought:
            # The template writes only one of the two texts.
            message["thinking"] = f"{message['thinking']}\n\n{message['content']}"
            message["content"] = ""
    if has_channels or "only supports single tool-calls" in template:
        messages = list(_one_call_a_message(messages))
    if "tool_responses" in template:
        messages = _with_responses(messages)
    if call_id:
        _rename_calls(messages, call_id)
    if has_text_arguments and _AS_JSON.search(template) is None:
        for function in _functions(messages):
            function["arguments"] = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
    return messages


def _functions(messages: list[Message]) -> Iterator[dict[str, Any]]:
    for message in messages:
        for call in message.get("tool_calls") or ():
            yield call["function"]


def _rename_calls(messages: list[Message], form: str) -> None:
    """Rename the ids of calls and results: Mistral's templates refuse other forms, Kimi's write the ids."""
    num_calls = 0
    names: dict[str, str] = {}  # new id by the client's id
    unanswered: list[str] = []
    for message in messages:
        for call in message.get("tool_calls") or ():
            identity = form.format(name=call["function"]["name"], index=num_calls)
            names[str(call.get("id"))] = identity
            call["id"] = identity
            unanswered.append(identity)
            num_calls += 1
        if message["role"] == "tool":
            identity = names.get(str(message.get("tool_call_id")), "")
            if not identity and unanswered:
                identity = unanswered[0]
            if identity in unanswered:
                unanswered.remove(identity)
            if identity:
                message["tool_call_id"] = identity


def _one_call_a_message(messages: list[Message]) -> Iterator[Message]:
    """Yield a message for each call before its result, because gpt-oss and Llama 3 allow one call per message."""
    results: dict[str, Message] = {}
    for message in messages:
        if message["role"] == "tool" and "tool_call_id" in message:
            results[str(message["tool_call_id"])] = message
    shown: set[int] = set()  # results already placed after their calls
    for message in messages:
        calls = message.get("tool_calls") or []
        if id(message) in shown:
            continue
        if len(calls) < 2:
            yield message
            continue
        for index, call in enumerate(calls):
            if index == 0:
                yield message | {"tool_calls": [call]}
            else:
                yield {"role": message["role"], "content": "", "tool_calls": [call]}
            result = results.get(str(call.get("id")))
            if result is not None:
                shown.add(id(result))
                yield result


def _with_responses(messages: list[Message]) -> list[Message]:
    """Move tool results into the message with the calls, where Gemma 4's templates expect them."""
    merged: list[Message] = []
    names: dict[str, str] = {}
    for message in messages:
        calls = message.get("tool_calls") or ()
        for call in calls:
            names[str(call.get("id"))] = call["function"]["name"]
        if message["role"] != "tool" or not merged or not merged[-1].get("tool_calls"):
            merged.append(message)
            continue
        name = names.get(str(message.get("tool_call_id")), message.get("name") or "unknown")
        merged[-1].setdefault("tool_responses", []).append({"name": name, "response": message["content"]})
    return merged
