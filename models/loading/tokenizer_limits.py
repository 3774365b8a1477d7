"""Limits for the growth of texts in a tokenizer, which builds them in this process.

A tokenizer.json is an untrusted program: forty replacements of `a` by `aa` make 10**12 characters of one.
"""

from __future__ import annotations

import base64
import math
import re
from typing import Any

# Limit for the factor by which a component lengthens a text. Known models reach 36, by a table of Unicode forms and a
# space before the text.
_MOST_GROWTH = 128
# Largest number of special tokens around a text; known models have up to 4.
_MOST_AROUND = 1000
# Limits in characters of a word and of an affix. WordPiece splits a word in quadratic time. An affix is added to every
# word.
_LONGEST_WORD, _LONGEST_AFFIX = 1000, 1000
_MAY_MATCH_NOTHING = re.compile(r"[*?|^$]|\{0|\{,|\\[bBAzZGKXyY]|^$")
_STEPS = ("normalizers", "pretokenizers", "decoders", "processors")


def excess(values: Any) -> str | None:
    """Return the reason why a tokenizer.json exceeds the limits, or None."""
    if not isinstance(values, dict):
        return None
    for part in ("normalizer", "pre_tokenizer", "decoder", "post_processor"):
        try:
            growth = _growth(values.get(part))
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            return f"{part} is malformed ({type(error).__name__}: {error})"
        if growth > _MOST_GROWTH:
            return f"{part} makes a text up to {growth:.3g} times as long, expected {_MOST_GROWTH} at most"
    model = values.get("model")
    if isinstance(model, dict):
        if isinstance(longest := model.get("max_input_chars_per_word"), int) and longest > _LONGEST_WORD:
            return f"model.max_input_chars_per_word = {longest}, expected {_LONGEST_WORD} at most"
        for name in ("continuing_subword_prefix", "end_of_word_suffix"):
            if isinstance(affix := model.get(name), str) and len(affix) > _LONGEST_AFFIX:
                return f"model.{name} has {len(affix)} characters, expected {_LONGEST_AFFIX} at most"
        return _gap(model.get("vocab"))
    return None


def _gap(vocab: Any) -> str | None:
    """Return the reason why a vocabulary's ids are too sparse, or None. Saving it loops up to the largest id."""
    if not isinstance(vocab, dict):
        return None
    token_ids = [token_id for token_id in vocab.values() if isinstance(token_id, int)]
    largest = max(token_ids, default=0)
    if largest <= 2 * len(vocab) + 65536:
        return None
    return f"token id {largest} among {len(vocab)} tokens"


def _growth(step: Any) -> float:
    """Return the largest factor by which a component lengthens a text; factors of a sequence multiply.

    A component is identified by its fields, because its type may be missing.
    """
    if not isinstance(step, dict):
        return 1.0
    growth = 1.0
    for name in _STEPS:
        growth *= math.prod(map(_growth, step.get(name) or ()))
    if step.get("content") is not None and isinstance(step.get("pattern"), dict):
        growth *= _replacement_growth(step["pattern"], len(step["content"]))
    if step.get("prepend") is not None:
        growth *= 1 + len(step["prepend"])
    if step.get("type") == "ByteLevel" or "trim_offsets" in step:  # one character for each byte
        growth *= 4
    if step.get("type") in ("BPEDecoder", "CTC") or "suffix" in step:  # an empty suffix matches between all characters
        growth *= 2
    if step.get("precompiled_charsmap") is not None:
        growth *= _longest_form(base64.b64decode(step["precompiled_charsmap"]))
    if step.get("single") is not None:
        growth *= _copies(step["single"], step.get("special_tokens") or {})
    return growth


def _replacement_growth(pattern: dict[str, str], content: int) -> float:
    if "Regex" not in pattern:
        return max(1.0, content / max(1, len(pattern["String"])))
    if _MAY_MATCH_NOTHING.search(pattern["Regex"]):
        return 1.0 + content  # it may match between all characters, and these are kept
    return max(1.0, content)


def _copies(single: Any, special_tokens: dict[str, Any]) -> float:
    """Return the number of times that a post-processing template repeats the text."""
    if isinstance(single, str):
        return single.count("$")
    names = [part["SpecialToken"]["id"] for part in single if "SpecialToken" in part]
    around = sum(len(special_tokens[name]["ids"]) for name in names)
    if around > _MOST_AROUND:
        return math.inf
    return max(1, len(single) - len(names))


def _longest_form(charsmap: bytes) -> float:
    """Return the longest entry of a table of normal forms: size of a trie, the trie, 0-terminated strings."""
    start = 4 + int.from_bytes(charsmap[:4], "little")
    lengths = [len(form.decode(errors="replace")) for form in charsmap[start:].split(b"\0")]
    return max(1, *lengths)
