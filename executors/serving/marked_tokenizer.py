"""A tokenizer for the engine that writes the special tokens around calls of tools and reasoning."""

from __future__ import annotations

from paged.executors.text.chat_tokenizer import ChatTokenizer

_MARKERS = ("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<tool_call>", "</tool_call>", "<think>", "</think>")


class MarkedTokenizer:
    """Decodes as `ChatTokenizer`, which leaves special tokens out, but keeps those that `AnswerReader` looks for."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._markers = {tokenizer.tokenizer.token_to_id(marker): marker for marker in _MARKERS}

    def decode(self, token_ids: list[int], /) -> str:
        """Return the text of token ids."""
        parts, begin = [], 0
        for index, token in enumerate(token_ids):
            if token in self._markers:
                parts += [self._tokenizer.decode(token_ids[begin:index]), self._markers[token]]
                begin = index + 1
        return "".join((*parts, self._tokenizer.decode(token_ids[begin:])))
