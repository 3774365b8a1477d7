"""The card of every public operation."""

from __future__ import annotations

from paged.bench.cards import (
    attention,
    cache,
    canaries,
    compressed,
    entries,
    layers,
    lora,
    moe,
    quantization,
    recurrent,
    sampling,
)
from paged.bench.cards.card import Card
from paged.errors import InvalidInputError

_FAMILIES = (attention, cache, canaries, compressed, entries, layers, lora, moe, quantization, recurrent, sampling)
CARDS: dict[str, Card] = {card.name: card for family in _FAMILIES for card in family.CARDS}


def card_of(operation: str) -> Card:
    """Return an operation's card.

    Raises:
        InvalidInputError: there is no such operation.
    """
    if operation not in CARDS:
        raise InvalidInputError(f"--op {operation}: no operation; there are {', '.join(CARDS)}")
    return CARDS[operation]
