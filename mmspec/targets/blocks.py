"""Blocks of tokens by hash: which blocks of a prompt a cache holds, and which one it drops first.

The key of a block is a hash of everything before it and of its own content, so that prompts that begin alike
have the same keys up to the block in which they differ (Kwon et al. 2023, PagedAttention, 2309.06180).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

__all__ = ["KEY_BYTES", "BlockTable", "chain", "digest"]

Key = bytes
KEY_BYTES = 16


def digest(*parts: bytes) -> Key:
    """Hash bytes. Parts are concatenated: callers make sure that different parts give different bytes."""
    found = hashlib.blake2b(digest_size=KEY_BYTES)
    for part in parts:
        found.update(part)
    return found.digest()


def chain(root: Key, contents: Iterable[bytes]) -> list[Key]:
    """Return the keys of consecutive blocks: the hash of the key before, `root` at first, and the content."""
    keys = []
    for content in contents:
        root = digest(root, content)
        keys.append(root)
    return keys


class BlockTable:
    """Table of cached blocks: key -> slot, with a limit; the least recently used block is dropped first.

    A block is used whenever one that continues it is, so that no block is dropped before those after it:
    every cached block can be found from the start of its prompt.

    Args:
        limit: largest number of blocks.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._slots: OrderedDict[Key, int] = OrderedDict()  # least recently used first
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: Key) -> bool:
        return key in self._slots

    def find(self, keys: Sequence[Key], fits: Callable[[int], bool] = lambda slot: True) -> list[int]:
        """Return the slots of the first blocks, up to one that is not cached or whose slot does not fit."""
        slots = []
        for key in keys:
            slot = self._slots.get(key)
            if slot is None or not fits(slot):
                break
            slots.append(slot)
        self._use(keys[: len(slots)])
        return slots

    def add(self, keys: Sequence[Key]) -> tuple[list[int], list[int]]:
        """Add the blocks of a prompt, as many of the first ones as the table can hold.

        Returns:
            The slot of each block, and the indices of those that were added. Their slots may have belonged to
            dropped blocks, never to blocks of the same prompt.
        """
        keys = keys[: self.limit]
        added = [index for index, key in enumerate(keys) if key not in self._slots]
        self._use([key for key in keys if key in self._slots])
        while len(self._slots) + len(added) > self.limit:  # those of this prompt are the last in the order
            self._free.append(self._slots.popitem(last=False)[1])
        for index in reversed(added):
            self._slots[keys[index]] = self._free.pop() if self._free else len(self._slots)
        self._use(keys)
        return [self._slots[key] for key in keys], added

    def _use(self, keys: Sequence[Key]) -> None:
        """Mark consecutive blocks as used, the first one last."""
        for key in reversed(keys):
            self._slots.move_to_end(key)
