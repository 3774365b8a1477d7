"""Find the names of a text model in the checkpoint of a model that wraps it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from paged.errors import CheckpointError
from paged.tools.printable import one_line

# Names of layers after the first. They are skipped, because the first layer shows the prefix and files hold up to
# 200,000 tensors.
_LATER_LAYER = re.compile(r"(?:^|\.)layers\.[1-9]\d*\.")
# Parts that a model may keep beside the body that the prefix names: the LM head and multi-token layers.
BESIDE_BODY = ("lm_head.", "mtp.")
_BESIDE = re.compile(r"((?:.*?\.)?)(?:lm_head|mtp)\.")
_EMBEDDING = "model.embed_tokens"
# Longest name of an embedding, in words: "model.embed_tokens.weight".
_MOST_WORDS = 3
# Limit of embeddings in a file. Published models have up to three: for a thinker, a talker and its code predictor.
_MOST_EMBEDDINGS = 16


class TextPrefix(NamedTuple):
    """Place of the text model in a checkpoint.

    stored: how names of the text model begin in the checkpoint, such as "model.language_model.".
    ours: how the same names begin for the family: "model.", or "" if `stored` also holds the LM head.
    """

    stored: str = ""
    ours: str = ""

    def strip(self, name: str) -> str | None:
        """Return a stored name as a checkpoint of the text model alone writes it; None outside of the text model."""
        if name.startswith(self.stored):
            return self.ours + name.removeprefix(self.stored)
        beside = _BESIDE.match(name)
        if self.ours and beside is not None and self.stored.startswith(beside[1]):
            return name.removeprefix(beside[1])
        return None


def find_text_prefix(
    stored_names: Iterable[str], expected_names: Iterable[str], rename: Callable[[str], str]
) -> TextPrefix:
    """Return the prefix under which most of the expected names stand; an empty prefix if no name is an embedding.

    Args:
        expected_names: the family's names.
        rename: returns the family's name of a name in a checkpoint of the text model alone.

    Raises:
        CheckpointError: two prefixes hold equally many names, or there are more than 16 embeddings.
    """
    names = [name for name in stored_names if not _LATER_LAYER.search(name)]
    modules = {_module(name) for name in expected_names if not _LATER_LAYER.search(name)}
    modules.add("lm_head")  # also if the configuration ties the head
    counts: dict[TextPrefix, int] = {}
    prefixes = _with_embedding(names, rename)
    if len(prefixes) > _MOST_EMBEDDINGS:
        raise CheckpointError(f"text model: {len(prefixes)} embeddings, expected at most {_MOST_EMBEDDINGS}")
    for prefix in prefixes:
        matched = set()
        for name in names:
            text_name = prefix.strip(name)
            if text_name is not None:
                matched.add(_module(rename(text_name)))
        counts[prefix] = len(matched & modules)
    if not counts:
        return TextPrefix()
    num_matched = max(counts.values())
    # Without a head, "language_model." and "language_model.model." hold the same tensors: take the first.
    best = [prefix for prefix in counts if counts[prefix] == num_matched]
    best.sort(key=lambda prefix: len(prefix.stored))
    for prefix in best[1:]:
        if not prefix.stored.startswith(best[0].stored):
            places = f"{one_line(best[0].stored)!r} and {one_line(prefix.stored)!r}"
            raise CheckpointError(f"text model: {num_matched} of its tensors under both {places}, expected one place")
    return best[0]


def _with_embedding(names: Sequence[str], rename: Callable[[str], str]) -> list[TextPrefix]:
    """Return all prefixes under which an embedding stands."""
    prefixes: dict[TextPrefix, None] = {}
    for name in names:
        words = name.split(".")
        for count in range(1, min(len(words), _MOST_WORDS) + 1):
            inner = ".".join(words[-count:])
            outer = name.removesuffix(inner)
            for ours in ("", "model."):
                # Without a prefix, the name must be the text model's own.
                if (outer or not ours) and _module(rename(ours + inner)) == _EMBEDDING:
                    prefixes[TextPrefix(outer, ours)] = None
    return list(prefixes)


def _module(name: str) -> str:
    """Return the name of the module that a tensor belongs to, however it is packed."""
    return name.rpartition(".")[0]
