"""What every call of a cache must do, in terms of what can be seen before and after it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from tests.cache.model_check.view import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    NUM_SWAP_BLOCKS,
    Call,
    Sequence,
    View,
    hit,
    num_blocks_for,
    prefixes,
    tag,
)


@dataclass(frozen=True)
class Expectation:
    """What a call must do, unless it is refused for lack of blocks.

    Attributes:
        sequences: the sequences afterwards.
        num_taken: fresh blocks that the call needs, even if it gives them back.
        revived: cached blocks that a sequence takes up again.
        unpublished: published blocks that the call withdraws because it writes to them or was told to.
        num_host_taken: host blocks that the call needs.
        publisher: sequence whose full blocks with known ids the call publishes.
    """

    sequences: dict[str, Sequence]
    num_taken: int = 0
    revived: frozenset[int] = frozenset()
    unpublished: frozenset[int] = frozenset()
    num_host_taken: int = 0
    publisher: str | None = None


class SpecificationError(AssertionError):
    """The cache does not do what the specification says."""


def require(is_right: bool, message: str) -> None:
    """Raise SpecificationError unless a rule holds."""
    if not is_right:
        raise SpecificationError(message)


def expect_call(view: View, call: Call) -> Expectation:
    """Return what a call must do."""
    sequences = dict(view.sequences)
    if call.kind == "evict":
        return Expectation(sequences, unpublished=frozenset(view.cached[: call.count]))
    if call.kind == "clear":
        return Expectation(sequences, unpublished=view.published)
    if call.kind == "allocate":
        # The longest found prefix is shared, but the last token of a prompt is always computed.
        blocks = hit(view, (call.namespace, call.tokens))
        num_cached = min(len(blocks) * BLOCK_SIZE, max(len(call.tokens) - 1, 0))
        num_taken = max(num_blocks_for(max(call.count, len(call.tokens))) - len(blocks), 0)
        revived = frozenset(blocks) & frozenset(view.cached)
        tokens = call.tokens[:num_cached]
        sequences[call.name] = Sequence(
            call.namespace, tokens, num_cached, num_cached, (*blocks, *[None] * num_taken), None
        )
        return Expectation(sequences, num_taken, revived)
    if call.kind == "fork":
        source = view.sequences[call.source]
        blocks_kept = source.blocks[: num_blocks_for(len(source.tokens))]
        sequences[call.name] = replace(source, num_cached=0, blocks=blocks_kept)
        return Expectation(sequences)

    seq = view.sequences[call.name]
    if call.kind in ("step", "rollback"):
        return expect_step(view, call)
    if call.kind == "commit":
        sequences[call.name] = replace(seq, num_known=len(seq.tokens))
        return Expectation(sequences, publisher=call.name)
    if call.kind == "free":
        del sequences[call.name]
        return Expectation(sequences)
    if call.kind == "truncate":
        sequences[call.name] = replace(
            seq,
            tokens=seq.tokens[: call.count],
            num_known=min(seq.num_known, call.count),
            num_cached=min(seq.num_cached, call.count),
            blocks=seq.blocks[: num_blocks_for(call.count)],
        )
        return Expectation(sequences)
    if call.kind == "share":
        source, length = view.sequences[call.source], call.count * BLOCK_SIZE
        blocks_shared = source.blocks[: call.count] + seq.blocks[call.count :]
        sequences[call.name] = replace(
            seq,
            tokens=source.tokens[:length],
            num_known=min(source.num_known, length),
            num_cached=length,
            blocks=blocks_shared,
        )
        return Expectation(sequences)
    if call.kind == "swap_out":
        # Blocks of others stay on the device. Capacity behind the tokens is freed.
        blocks_kept = seq.blocks[: num_blocks_for(len(seq.tokens))]
        moved = [index for index, block in enumerate(blocks_kept) if view.references[block] == 1]
        on_device = tuple(0 if index in moved else block for index, block in enumerate(blocks_kept))
        sequences[call.name] = replace(seq, blocks=on_device, host=dict.fromkeys(moved, 0))
        return Expectation(sequences, num_host_taken=len(moved))
    assert call.kind == "swap_in"
    assert seq.host is not None
    fresh = tuple(None if index in seq.host else block for index, block in enumerate(seq.blocks))
    sequences[call.name] = replace(seq, blocks=fresh, host=None)
    return Expectation(sequences, len(seq.host), publisher=call.name)


def expect_step(view: View, call: Call) -> Expectation:
    """Return what a reservation must do that ends by `commit` or by `rollback`.

    Blocks that are written must belong to the sequence alone and must not be found: a shared one is replaced by a copy,
    a published one is withdrawn.
    """
    sequences = dict(view.sequences)
    seq = view.sequences[call.name]
    start, end = len(seq.tokens), len(seq.tokens) + len(call.tokens)
    blocks = list(seq.blocks)
    unpublished = set()
    for index in range(start // BLOCK_SIZE, min(num_blocks_for(end), len(blocks))):
        block = blocks[index]
        if view.references[block] > 1:
            blocks[index] = None
        elif block in view.published:
            unpublished.add(block)
    blocks += [None] * (num_blocks_for(end) - len(blocks))
    num_taken = blocks.count(None)
    if call.kind == "rollback":
        return Expectation(sequences, num_taken, unpublished=frozenset(unpublished))
    num_known = seq.num_known
    publisher = None
    if call.has_ids and num_known == start:
        num_known = end
        publisher = call.name
    sequences[call.name] = replace(seq, tokens=seq.tokens + call.tokens, num_known=num_known, blocks=tuple(blocks))
    return Expectation(sequences, num_taken, unpublished=frozenset(unpublished), publisher=publisher)


def must_refuse(view: View, expected: Expectation) -> bool:
    """Return whether too few blocks are free. A cached block that is revived can no longer be handed out."""
    num_free = len(view.plain) + len(view.cached)
    needed = expected.num_taken + len(expected.revived)
    return needed > num_free or expected.num_host_taken > view.num_host_free


def check_call(before: View, expected: Expectation, after: View, *, may_collide: bool = False) -> None:
    """Raise SpecificationError unless a call that was not refused has led from `before` to `after`.

    may_collide: whether chains share hashes. Then a published chain may hide another one.
    """
    check_view(after)
    # Fresh blocks are plain free blocks, then cached ones, least recently used first.
    evictable = [block for block in before.cached if block not in expected.revived]
    evicted = evictable[: max(expected.num_taken - len(before.plain), 0)]
    lost = expected.unpublished | frozenset(evicted)
    require(after.sequences.keys() == expected.sequences.keys(), "a sequence appeared or vanished")
    for name, seq in after.sequences.items():
        check_sequence(name, expected.sequences[name], seq, {*before.plain, *evicted})
    check_publications(before, expected, after, lost, may_collide=may_collide)
    # Published blocks that become free are cached, the end of a sequence before its beginning.
    in_use = [block for block in before.cached if block not in expected.revived and block not in lost]
    for name, seq in before.sequences.items():
        if after.sequences.get(name) != seq:
            in_use += [block for block in reversed(seq.blocks) if block and block not in after.references]
    cached = [block for block in in_use if block in after.published]
    require(list(after.cached) == cached, f"cached blocks {after.cached}, expected {cached}")


def check_sequence(name: str, expected: Sequence, seq: Sequence, fresh: set[int]) -> None:
    """Raise SpecificationError unless a sequence is as expected; `fresh` are the blocks that None may be."""
    for field in ("namespace", "tokens", "num_known", "num_cached"):
        value, expected_value = getattr(seq, field), getattr(expected, field)
        require(value == expected_value, f"{name}: {field} {value}, expected {expected_value}")
    require(len(seq.blocks) == len(expected.blocks), f"{name}: {seq.blocks}, expected {expected.blocks}")
    for block, expected_block in zip(seq.blocks, expected.blocks, strict=True):
        is_right = block == expected_block
        if expected_block is None:
            is_right = block in fresh
        require(is_right, f"{name}: blocks {seq.blocks}, expected {expected.blocks}, None one of {fresh}")
    require((seq.host is None) == (expected.host is None), f"{name}: host blocks {seq.host}")
    require(set(seq.host or ()) == set(expected.host or ()), f"{name}: host blocks {seq.host}")


def check_publications(
    before: View, expected: Expectation, after: View, lost: frozenset[int], *, may_collide: bool
) -> None:
    """Raise SpecificationError unless exactly the right chains are found.

    A found chain stays found until one of its blocks is lost. A call that publishes adds the full blocks of its
    sequence, and with them longer chains whose parent had been lost. It may withdraw blocks whose parent is lost.
    """
    survivors = {}
    for chain, block in before.found.items():
        if lost.isdisjoint(before.found[prefix] for prefix in prefixes(chain)):
            survivors[chain] = block
    missing = survivors.items() - after.found.items()
    require(not missing, f"not found any more: {missing}")
    added = after.found.keys() - survivors.keys()
    kept = before.published - lost
    if expected.publisher is None:
        require(not added, f"found without being published: {added}")
        require(after.published == kept, f"published {after.published}, expected {kept}")
        return
    seq = expected.sequences[expected.publisher]
    full_blocks = prefixes((seq.namespace, seq.tokens[: seq.num_known]))
    for chain in added:
        was_published = after.found[chain] in before.published
        require(chain in full_blocks or was_published, f"{chain} is found, but only {full_blocks} are published")
    require(kept & frozenset(survivors.values()) <= after.published, "a found block was withdrawn")
    added_blocks = after.published - before.published
    require(added_blocks <= frozenset(after.sequences[expected.publisher].blocks), f"published {added_blocks}")
    for chain in full_blocks:
        require(chain in after.found or may_collide, f"{chain} is not published")


def check_view(view: View) -> None:
    """Raise SpecificationError unless every block has one owner, and every block holds what its readers expect."""
    held: Counter[int] = Counter()
    host: list[int] = []
    for name, seq in view.sequences.items():
        on_device = [block for block in seq.blocks if block]
        require(len(set(on_device)) == len(on_device), f"{name} holds a block twice: {seq.blocks}")
        held.update(on_device)
        host += (seq.host or {}).values()
        num_tokens = len(seq.tokens)
        require(seq.num_cached <= num_tokens <= len(seq.blocks) * BLOCK_SIZE, f"{name}: too long for its blocks")
        for position in range(num_tokens):
            index, offset = divmod(position, BLOCK_SIZE)
            if seq.host is not None and index in seq.host:
                number = view.host_data[seq.host[index]][offset]
            else:
                number = view.data[seq.blocks[index]][offset]
            expected = tag((seq.namespace, seq.tokens[: position + 1]))
            require(number == expected, f"{name}: K/V of position {position} is {number}, expected {expected}")
    require(dict(held) == view.references, f"references {view.references}, but {dict(held)} are held")
    listed = sorted([*held, *view.cached, *view.plain])
    require(listed == list(range(1, NUM_BLOCKS + 1)), f"held {dict(held)}, cached {view.cached}, free {view.plain}")
    require(len(set(host)) == len(host) == NUM_SWAP_BLOCKS - view.num_host_free, f"host blocks in use: {host}")
    require(view.published.isdisjoint(view.plain) and view.published.issuperset(view.cached), "cached, not published")
    for chain, block in view.found.items():
        namespace, tokens = chain
        require(block in view.published, f"{chain} is found in block {block}, which is not published")
        expected_tags = [tag((namespace, tokens[:-1])), tag(chain)]
        require(view.data[block] == expected_tags, f"{chain} is found, but K/V of block {block} is {view.data[block]}")
