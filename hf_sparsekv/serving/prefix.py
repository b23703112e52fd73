"""Full blocks of prompts and answers that have ended, for prompts that begin alike.

A block is known by its tokens and all before it: its key is the hash of its parent's key and its own tokens, so a chain
of keys says how far two prompts agree (vLLM's automatic prefix caching, SGLang's tree). Blocks are never copied: the
index holds a reference to each (:class:`.Counted`), and so does every row that has it in its table.

What one engine keeps is of one model and one configuration. Labels are read by channels that were calibrated on a
prompt's first tokens (:attr:`.RowBatch.alike_tokens`). All blocks of a chain have the same channels, and so has a
prompt that continues the chain. So a chain's keys begin with the hash of these first tokens: prompts that differ in
them share no block, and each request chooses by the channels that it would have alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor

Channels = tuple[Tensor | None, ...]  # of each layer: of one row; see RowBatch.begin


def block_keys(
    tokens: Sequence[int], size: int, blocks: int, known: Sequence[bytes] = (), alike: int = 0
) -> list[bytes]:
    """Keys of blocks of ``size`` tokens, the first ``blocks`` without those that are ``known``.

    ``alike``: tokens at the beginning that all keys depend on. Fewer tokens than that have no keys.
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
    users: int = 0  # requests that have it, or one behind it: it stays
    withdrawn: bool = False  # no prompt finds it any more: it goes with its last user
    used: int = 0  # when it was last asked for


@dataclass
class Match:
    """Kept blocks that a request has, a chain from the first one on: of its prompt's beginning, then its own."""

    blocks: list[Block] = field(default_factory=list)

    @property
    def ids(self) -> np.ndarray:
        """int32 ``[n]``, ids of the blocks."""
        return np.array([block.id for block in self.blocks], dtype=np.int32)


class Counted(Protocol):
    """What counts blocks by who needs them."""

    def share(self, ids: np.ndarray) -> None:
        """One more reference to each, int32 ``[n]``."""
        ...

    def drop(self, ids: np.ndarray) -> None:
        """One reference less to each, int32 ``[n]``."""
        ...


class PrefixIndex:
    """Blocks by their keys; those that nobody has asked for for longest go first.

    Args:
        ids: of the engine's blocks.
        block_size: tokens of a block.
        alike: tokens that prompts begin with alike, or share nothing.
    """

    def __init__(self, ids: Counted, block_size: int, alike: int = 0) -> None:
        self._ids, self._size, self._alike = ids, block_size, alike
        self._blocks: dict[bytes, Block] = {}
        self._clock = self._pinned = self._withdrawn = 0
        # Counts what may make another answer of `known`, behind each change: other threads ask in the middle of one.
        self.changes = 0

    def __len__(self) -> int:
        return len(self._blocks) + self._withdrawn

    @property
    def pinned(self) -> int:
        """Blocks that requests have, which stay. All others can be let go of: behind these there is none of them."""
        return self._pinned

    def keys(self, tokens: Sequence[int], blocks: int, known: Sequence[bytes] = ()) -> list[bytes]:
        """Keys of the first ``blocks`` blocks after those that are ``known``."""
        return block_keys(tokens, self._size, blocks, known, self._alike)

    def known(self, keys: Sequence[bytes]) -> tuple[int, int]:
        """How long a beginning is kept, in blocks, and how many of these nobody uses yet."""
        found = unused = 0
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            found, unused = found + 1, unused + (not block.users)
        return found, unused

    def match(self, keys: Sequence[bytes]) -> Match:
        """The longest beginning that is kept. It stays until :meth:`release`."""
        self._clock += 1
        found = Match()
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            self._pin(block, found)
            block.used = self._clock
        self.changes += 1
        return found

    def _pin(self, block: Block, match: Match) -> None:
        self._pinned += not block.users
        block.users += 1
        match.blocks.append(block)

    def release(self, match: Match) -> None:
        """Who asked needs it no more."""
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
        """Keep blocks ``ids [n]`` of a row, whose keys these are; gives how many are new.

        These join ``match``, the row's own: as long as it has them, to let go of them would free nothing. Those that
        are kept already stay as they are, and are pinned, too, as long as this row has others behind them. Behind one
        that has other channels nothing is kept, nor behind one that was withdrawn.
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
        """Let go at least so many blocks, if nobody needs them; gives how many."""
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
        """Offer these blocks no more, nor any behind them: what they hold may be wrong.

        Those that requests have stay until these let go of them.
        """
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            block.withdrawn = True
        gone = []
        for block in list(self._blocks.values()):  # a parent is there before its children
            block.withdrawn |= block.parent is not None and block.parent.withdrawn
            if block.withdrawn:
                del self._blocks[block.key]
                self._withdrawn += bool(block.users)
                if not block.users:
                    gone.append(block.id)
        self.changes += 1
        self._ids.drop(np.array(gone, dtype=np.int32))
