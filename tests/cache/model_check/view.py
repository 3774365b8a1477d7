"""What can be seen of a cache, and the calls that are made.

A chain is a namespace and the token ids from position 0 on. K/V at a position is a number, the tag of the chain that
ends there, so a stale or wrong block shows in the numbers that it holds.
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_SIZE = 2
NUM_BLOCKS = 3
NUM_SWAP_BLOCKS = 2

Chain = tuple[str | None, tuple[int, ...]]


@dataclass(frozen=True)
class Call:
    """One call. Fields that it does not use keep their defaults.

    Attributes:
        name: sequence that the call is about, or that it begins.
        source: sequence that `name` is forked from, or shares the blocks of.
        tokens: the prompt of `allocate`, or the tokens whose K/V a step writes.
        count: capacity of `allocate`, length after `truncate`, number of blocks of `evict` and `share`.
        has_ids: whether the step's `commit` gets the token ids.
    """

    kind: str
    name: str = ""
    source: str = ""
    namespace: str | None = None
    tokens: tuple[int, ...] = ()
    count: int = 0
    has_ids: bool = True


@dataclass(frozen=True)
class Sequence:
    """A live sequence.

    Attributes:
        tokens: the tokens with K/V.
        num_known: how many of them the cache knows the ids of.
        blocks: device blocks; 0 while a block is swapped out. In an expectation, None is any fresh block.
        host: host block by index in `blocks`; None unless swapped out.
    """

    namespace: str | None
    tokens: tuple[int, ...] = ()
    num_known: int = 0
    num_cached: int = 0
    blocks: tuple[int | None, ...] = ()
    host: dict[int, int] | None = None


@dataclass(frozen=True)
class View:
    """All that can be seen of a cache.

    Attributes:
        found: block of each chain of full blocks that a prompt may begin with.
        published: blocks of `found`, and blocks whose parent was evicted.
        cached: free published blocks, least recently used first. plain: all other free blocks.
        references: number of references of each block that is not free.
        data, host_data: tags in each block.
    """

    sequences: dict[str, Sequence]
    found: dict[Chain, int]
    published: frozenset[int]
    cached: tuple[int, ...]
    plain: tuple[int, ...]
    references: dict[int, int]
    num_host_free: int
    data: list[list[int]]
    host_data: list[list[int]]


def tag(chain: Chain) -> int:
    """Return the number that stands for K/V at the end of a chain; different for every chain."""
    namespace, tokens = chain
    number = 1 if namespace is None else 2
    for token in tokens:
        number = 3 * number + token + 1
    return number


def num_blocks_for(num_tokens: int) -> int:
    """Return the number of blocks that hold `num_tokens`."""
    return -(-num_tokens // BLOCK_SIZE)


def prefixes(chain: Chain) -> list[Chain]:
    """Return the chains of 1, 2, ... full blocks that a chain begins with."""
    namespace, tokens = chain
    ends = range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE)
    return [(namespace, tokens[:end]) for end in ends]


def hit(view: View, chain: Chain) -> list[int]:
    """Return the blocks of the longest found chain that a prompt begins with."""
    blocks = []
    for prefix in prefixes(chain):
        if prefix not in view.found:
            break
        blocks.append(view.found[prefix])
    return blocks
