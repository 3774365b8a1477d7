"""What the first published block of each namespace follows."""

from __future__ import annotations

from collections.abc import Hashable, KeysView, Sequence
from dataclasses import dataclass

from paged.cache.blocks.undo_log import UndoLog
from paged.cache.prefix.chain import Hash


@dataclass(eq=False, slots=True)
class Root:
    """num_blocks: published blocks that follow it; without one it is dropped."""

    namespace: Hashable
    hash: Hash
    serial: int
    num_blocks: int = 0


class Roots:
    """The roots by namespace and by serial number, and the root of each published block that follows one."""

    def __init__(self, undo: UndoLog) -> None:
        self._undo = undo
        self._by_namespace: dict[Hashable, Root] = {}
        self._by_serial: dict[int, Root] = {}
        self._of_block: dict[int, Root] = {}

    @property
    def namespaces(self) -> KeysView[Hashable]:
        """Those that have a root; a view that changes with the roots."""
        return self._by_namespace.keys()

    def get(self, namespace: Hashable) -> Root | None:
        """The root of a namespace, or None."""
        return self._by_namespace.get(namespace)

    def has(self, serial: int) -> bool:
        """Whether a root has this serial number."""
        return serial in self._by_serial

    def add(self, root: Root) -> None:
        """Keep a root that blocks are about to follow; `drop_unused` drops it if none does."""
        self._undo.add((self._reset, root, root.num_blocks))
        self._set(root)

    def drop_unused(self, root: Root) -> None:
        """Drop a root that no block follows."""
        if not root.num_blocks:
            self._drop(root)

    def forget(self, namespace: Hashable) -> None:
        """Drop a namespace's root, though published blocks follow it."""
        root = self._by_namespace.get(namespace)
        if root is not None:
            blocks = [block for block, one in self._of_block.items() if one is root]
            self._undo.add((self._restore, root, blocks))
            for block in blocks:
                del self._of_block[block]
            self._drop(root)

    def follow(self, block: int, parent: int) -> None:
        """Note that `block` is published behind the publication `parent`, which may be a root."""
        root = self._by_serial.get(parent)
        if root is not None:
            self._undo.add((self._of_block.pop, block, None))
            self._undo.add((self._reset, root, root.num_blocks))
            self._of_block[block] = root
            root.num_blocks += 1

    def withdraw(self, blocks: Sequence[int]) -> None:
        """Note that `blocks` are no longer published."""
        of_block = self._of_block
        if of_block.keys().isdisjoint(blocks):
            return
        for block in filter(of_block.__contains__, blocks):
            root = of_block[block]
            self._undo.add((of_block.__setitem__, block, root))
            self._undo.add((self._reset, root, root.num_blocks))
            del of_block[block]
            self._reset(root, root.num_blocks - 1)

    def _reset(self, root: Root, num_blocks: int) -> None:
        root.num_blocks = num_blocks
        if num_blocks:
            self._set(root)
        else:
            self._drop(root)

    def _restore(self, root: Root, blocks: Sequence[int]) -> None:
        """Undo `forget`."""
        self._set(root)
        self._of_block.update(dict.fromkeys(blocks, root))

    def _set(self, root: Root) -> None:
        self._by_namespace[root.namespace] = self._by_serial[root.serial] = root

    def _drop(self, root: Root) -> None:
        self._by_namespace.pop(root.namespace, None)
        self._by_serial.pop(root.serial, None)
