"""The prefix cache: full blocks of prompts and answers, for prompts with the same prefix.

A block's key is the hash of its parent's key and its own tokens. So a chain of keys tells how far two prompts agree, as
in vLLM's automatic prefix caching and SGLang's radix tree. Blocks are never copied. The index holds a reference to each
(:class:`.Counted`), and so does every row with the block in its table.

An index belongs to one engine, so to one model and one configuration. Labels depend on channels that are calibrated on
a prompt's first tokens (:attr:`.RowBatch.alike_tokens`). All blocks of a chain have the same channels, and so has a
prompt that continues the chain. So a chain's keys begin with the hash of these first tokens. Prompts that differ in
them share no block, and each request uses the channels that it would have alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ..policies.label_index import RowChannels

Channels = tuple[RowChannels | None, ...]  # label channels of one row in each layer; see RowBatch.begin


def block_keys(
    tokens: Sequence[int], size: int, blocks: int, known: Sequence[bytes] = (), alike: int = 0
) -> list[bytes]:
    """Keys of the first ``blocks`` blocks of ``size`` tokens, except the leading ones in ``known``.

    ``alike``: number of first tokens on which all keys depend. Shorter prompts have no keys.
    """
    flat, found = np.asarray(tokens, dtype=np.int64), []
    if len(flat) < alike:
        return found
    key = known[-1] if known else (_digest(flat[:alike].tobytes()) if alike else b"")
    for i in range(len(known), blocks):
        key = _digest(key + flat[i * size : (i + 1) * size].tobytes())
        found.append(key)
    return found


def _digest(of: bytes) -> bytes:
    return hashlib.blake2b(of, digest_size=16).digest()


@dataclass(eq=False)
class Block:
    """One full block."""

    key: bytes
    id: int
    parent: Block | None
    channels: Channels
    children: int = 0
    users: int = 0  # requests that use it, or a later block of its chain; they pin it
    held: Any = None  # snapshot of windows and states after it, if it was made
    withdrawn: bool = False  # not in the index any more; freed after its last user
    used: int = 0  # time of the last lookup


@dataclass
class Match:
    """Kept blocks that a request pins, a chain from the first one on: those of its prefix, then its own."""

    blocks: list[Block] = field(default_factory=list)
    held: tuple[Any, ...] = ()  # the snapshot after those of its prefix, if it has one

    @property
    def ids(self) -> np.ndarray:
        """int32 ``[n]``, ids of the blocks."""
        return np.array([block.id for block in self.blocks], dtype=np.int32)


class Counted(Protocol):
    """Counts references to blocks."""

    def share(self, ids: np.ndarray) -> None:
        """Add a reference to each block in ``ids``, int32 ``[n]``."""
        ...

    def drop(self, ids: np.ndarray) -> None:
        """Remove a reference from each block in ``ids``, int32 ``[n]``."""
        ...


class PrefixIndex:
    """Blocks by their keys, evicted in least recently used order.

    Args:
        ids: reference counts of the engine's blocks.
        block_size: tokens of a block.
        alike: number of first tokens that must be the same for prompts to share blocks.
        snapshots: most snapshots of windows and states that are kept. Prefixes end with one of them then. None: the
            model needs none.
    """

    def __init__(self, ids: Counted, block_size: int, alike: int = 0, snapshots: int | None = None) -> None:
        self._ids, self._size, self._alike, self._most = ids, block_size, alike, snapshots
        self._blocks: dict[bytes, Block] = {}
        self._clock = self._pinned = self._withdrawn = 0
        # Counts changes that may change `known`. Incremented after each change, because other threads read meanwhile.
        self.changes = 0

    def __len__(self) -> int:
        return len(self._blocks) + self._withdrawn

    @property
    def pinned(self) -> int:
        """Blocks that requests use, which stay. All others can be evicted: no used block comes after an unused one."""
        return self._pinned

    def keys(self, tokens: Sequence[int], blocks: int, known: Sequence[bytes] = ()) -> list[bytes]:
        """Keys of the first ``blocks`` blocks after those that are ``known``."""
        return block_keys(tokens, self._size, blocks, known, self._alike)

    def _usable(self, keys: Sequence[bytes]) -> list[Block]:
        """The longest kept prefix that a prompt can begin with."""
        found = [*self._chain(keys)]
        while self._most is not None and found and found[-1].held is None:
            found.pop()
        return found

    def hold(self, keys: Sequence[bytes], snapshot: Any) -> None:
        """Keep what a prompt's windows and states were after the last of these blocks, if that is kept.

        The snapshot that was used longest ago goes, if there are too many.
        """
        assert self._most is not None
        found = [*self._chain(keys)]
        if not keys or len(found) < len(keys):
            return
        found[-1].held = snapshot
        with_one = [block for block in self._blocks.values() if block.held is not None]
        for block in sorted(with_one, key=lambda block: block.used)[: max(0, len(with_one) - self._most)]:
            block.held = None
        self.changes += 1

    def _chain(self, keys: Sequence[bytes]) -> Iterator[Block]:
        """The longest kept prefix."""
        for key in keys:
            if (block := self._blocks.get(key)) is None:
                return
            yield block

    def known(self, keys: Sequence[bytes]) -> tuple[int, int]:
        """Length of the longest kept prefix in blocks, and how many of these no request uses yet."""
        found = unused = 0
        for block in self._usable(keys):
            found, unused = found + 1, unused + (not block.users)
        return found, unused

    def match(self, keys: Sequence[bytes]) -> Match:
        """Pin the longest kept prefix, until :meth:`release`."""
        self._clock += 1
        found = Match()
        for block in self._usable(keys):
            self._pin(block, found)
            block.used = self._clock
        if found.blocks and self._most is not None:
            found.held = (found.blocks[-1].held,)
        self.changes += 1
        return found

    def _pin(self, block: Block, match: Match) -> None:
        self._pinned += not block.users
        block.users += 1
        match.blocks.append(block)

    def release(self, match: Match) -> None:
        """Unpin the blocks of a request."""
        gone, changed = [], bool(match.blocks)
        for block in match.blocks:
            block.users -= 1
            self._pinned -= not block.users
            if block.withdrawn and not block.users:
                gone.append(block.id)
        match.blocks = []
        self._withdrawn -= len(gone)
        self.changes += changed
        self._ids.drop(np.array(gone, dtype=np.int32))

    def keep(self, keys: Sequence[bytes], ids: np.ndarray, channels: Channels, match: Match) -> int:
        """Keep blocks ``ids [n]`` of a row, with these keys. Returns how many are new.

        New blocks join ``match``, the row's own: while the row uses them, evicting them would free nothing. Blocks that
        are kept already do not change. They are pinned, too, while this row has later ones in its chain. No block is
        kept after one with other channels, or after one that was withdrawn.
        """
        if match.blocks and match.blocks[-1].withdrawn:
            return 0
        self._clock += 1
        parent, new, others = None, [], []
        for place, (key, id) in enumerate(zip(keys, ids.tolist())):
            block = self._blocks.get(key)
            if block is None:
                block = self._blocks[key] = Block(key, id, parent, channels)
                if parent is not None:
                    parent.children += 1
                new.append(id)
                for one in (*others, block):
                    self._pin(one, match)
                others = []
            elif block.channels is not channels:
                break
            elif place >= len(match.blocks):
                others.append(block)
            block.used = self._clock
            parent = block
        self.changes += 1
        self._ids.share(np.array(new, dtype=np.int32))
        return len(new)

    def evict(self, blocks: int) -> int:
        """Evict at least so many blocks, if as many are unused. Returns how many."""
        gone: list[int] = []
        while len(gone) < blocks:
            leaves = [block for block in self._blocks.values() if not (block.children or block.users)]
            if not leaves:
                break
            leaves.sort(key=lambda block: block.used)
            for leaf in leaves[: blocks - len(gone)]:
                self._forget(leaf, gone)
                while (parent := leaf.parent) is not None and len(gone) < blocks:
                    if parent.children or parent.users or parent.used > leaf.used:
                        break
                    self._forget(parent, gone)
                    leaf = parent
        self.changes += 1
        self._ids.drop(np.array(gone, dtype=np.int32))
        return len(gone)

    def _forget(self, block: Block, gone: list[int]) -> None:
        del self._blocks[block.key]
        if block.parent is not None:
            block.parent.children -= 1
        gone.append(block.id)

    def withdraw(self, keys: Sequence[bytes]) -> None:
        """Remove these blocks and all later ones of their chains from the index: their content may be wrong.

        Blocks in use are freed when the last request releases them.
        """
        for block in self._chain(keys):
            block.withdrawn = True
        gone = []
        for block in list(self._blocks.values()):  # parents come before their children
            block.withdrawn |= block.parent is not None and block.parent.withdrawn
            if block.withdrawn:
                del self._blocks[block.key]
                self._withdrawn += bool(block.users)
                if not block.users:
                    gone.append(block.id)
        self.changes += 1
        self._ids.drop(np.array(gone, dtype=np.int32))
