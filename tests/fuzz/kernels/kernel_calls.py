"""Small problems of every card, whose arguments are made odd one by one, and problems of any odd sizes."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from paged.bench.cards.card import Card
from paged.bench.cards.cards import CARDS
from paged.bench.cards.draw import Draw
from paged.bench.problems.arguments import Arguments, Tensors

DEVICE = torch.device("cpu")
_KINDS: dict[str, Callable[[Any], Any]] = {"int": int, "float": float, "bool": bool}
# Plans belong to the tensors that they were made of, and only a GPU takes a ticket.
_LEFT_OUT = ("plan", "prefix_plan", "ticket")


class Call(NamedTuple):
    """A small sound problem. Fields of dataclasses and items of lists are arguments of their own."""

    card: Card

    def packed(self) -> Arguments:
        """Return the operation's arguments."""
        drawn = self.card.draw(Draw(DEVICE, torch.float32), **{name: each[-1] for name, each in self.card.odd.items()})
        return {name: value for name, value in drawn.items() if name not in _LEFT_OUT}

    def arguments(self) -> Arguments:
        """Return the arguments, flat."""
        flat = {}
        for name, value in self.packed().items():
            flat.update(_fields(name, value) or {name: value})
        return flat

    def numbers(self) -> dict[str, Callable[[Any], Any]]:
        """Return numbers and flags by name, with what makes a plain one of them."""
        annotations = {name: each.annotation for name, each in self.card.signature.parameters.items()}
        for value in self.packed().values():
            if dataclasses.is_dataclass(value):
                annotations |= {field.name: field.type for field in dataclasses.fields(value) if field.init}
        kinds = {name: _KINDS.get(str(each).partition(" ")[0]) for name, each in annotations.items()}
        return {name: kind for name, kind in kinds.items() if kind is not None}

    def pack(self, flat: Arguments) -> Arguments:
        """Return the operation's arguments with the flat ones in their places."""
        packed, left = self.packed(), dict(flat)
        for name, value in packed.items():
            fields = _fields(name, value)
            if not fields:
                continue
            changed = {field: left.pop(field) for field in fields}
            if isinstance(value, list):
                packed[name] = list(changed.values())
            else:
                packed[name] = dataclasses.replace(value, **changed)
        return {name: left.pop(name, value) for name, value in packed.items()} | left

    def run(self, **flat: Any) -> Tensors:
        """Return what the operation returns and writes."""
        return self.card.call(self.pack(flat))

    def expected(self, **flat: Any) -> Tensors:
        return self.card.want(self.pack(flat))


def _fields(name: str, value: Any) -> Arguments:
    """Return the fields of a dataclass, or the items of a list, by name; nothing of other values."""
    if isinstance(value, list):
        return {f"{name}[{index}]": item for index, item in enumerate(value)}
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    return {}


def odd_problem(card: Card, seed: int, dtype: torch.dtype) -> Arguments:
    """Return a problem of random odd sizes, with tensors as awkward as callers may pass them."""
    random.seed(seed)
    torch.manual_seed(seed)
    sizes = {name: random.choice(values) for name, values in card.odd.items()}
    drawn = card.draw(Draw(DEVICE, dtype, is_odd=True), **sizes)
    return {name: value for name, value in drawn.items() if name not in _LEFT_OUT}


CALLS = {name: Call(card) for name, card in CARDS.items()}
