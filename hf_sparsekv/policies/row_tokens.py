"""Copies of chosen tokens for a batch whose rows come and go: one memory, shared out to the rows as they need it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kv.store import LayerStore
from ..offload.lanes import Lanes, Move, moved
from ..ops.storage.device_tokens import EMPTY, TokenSlots, young_tokens
from ..tensors import no_inference_mode, sent
from .base import Policy
from .device_tokens import REUSED, DeviceTokens, empty_slots, slot_bytes
from .labelled import LabelledPolicy

SPILL = 32  # of so many tokens that were chosen a working set leaves one out


def _kind(store: LayerStore) -> tuple[torch.device, int, int, torch.dtype]:
    return store.device, store.heads, store.width, store.dtype


class RowTokens:
    """The :class:`DeviceTokens` of all layers, and how many slots each row has of them.

    A row's room is the same for every layer and KV head. A row's copies stay when its room changes, and move with its
    lane. Where they no longer fit, the tokens chosen longest ago go.

    Attributes:
        lanes: where each row's slots are.
        layers: what each layer holds.
    """

    @no_inference_mode
    def __init__(self, stores: Sequence[LayerStore], slots: int) -> None:
        """``slots`` of each KV head, all rows together; no row has any yet."""
        batch, size = stores[0].batch, stores[0].block_size
        columns = stores[0].block_table.shape[1] * size
        self.lanes, self.layers = Lanes(batch, slots, size), []
        total = self.lanes.slots
        self._parts: list[TokenSlots] = []  # of all layers of a kind, in one piece
        made: dict[LayerStore, TokenSlots] = {}
        for kind in dict.fromkeys(map(_kind, stores)):
            mine = [store for store in stores if _kind(store) == kind]
            part = empty_slots(mine[0], total, self.lanes.on(mine[0].device), columns, (len(mine),))
            self._parts.append(part)
            for store, *held in zip(mine, *part[:-1]):
                made[store] = TokenSlots._make((*held, part.lanes))
        for store in stores:
            assert store.pages is not None
            self.layers.append(DeviceTokens(store, 0, store.pages.pools.enabled(store.device), made[store]))

    @classmethod
    def open(cls, policies: Sequence[LabelledPolicy], stores: Sequence[LayerStore]) -> RowTokens | None:
        """Room for the copies of these layers, as much as their cache allows; each policy gets its layer's.

        None, and the policies none, where no device memory is to be had: steps read what they choose in host memory.
        """
        for policy in policies:
            policy.tokens = None  # before new memory is asked for
        first = stores[0]
        assert first.pages is not None
        pools = first.pages.pools
        there = first.block_table.shape[1] * first.block_size
        chosen = max(policy.wanted_copies(there) for policy in policies)
        slots = pools.tokens(chosen, there, max(map(slot_bytes, stores)), first.device, first.batch, least=1)
        if slots < first.block_size:
            return None
        try:
            made = cls(stores, slots)
        except torch.OutOfMemoryError as error:
            pools.refuse(error)
            return None
        for policy, held in zip(policies, made.layers):
            policy.tokens = held
        return made

    # ------------------------------------------------------------------ the room of rows

    @property
    def even(self) -> int:
        """The slots of a row if all have as many."""
        size = self.lanes.block_size
        return max(size, self.lanes.slots // len(self.lanes.held) // size * size)

    @torch.no_grad()
    def give(self, row: int, room: int) -> None:
        """Row ``row`` has ``room`` slots of each layer and KV head from here on, a multiple of the block size.

        Raises:
            ValueError: there are not so many free. Nothing has changed.
        """
        begin, had = self.lanes.held[row]
        try:
            if 0 < room < had:
                for part in self._parts:
                    _keep_young(part, row, begin, room, had)
            moves = self.lanes.give(row, room)
            first, kept = self.lanes.held[row][0], min(room, had)
            for part in self._parts:
                moved((part.kv, part.columns, part.stamps), moves, 2)
                self._clear(part, first + kept, first + room)
                if room < had:
                    part.slots[:, row].masked_fill_(part.slots[:, row] >= room, -1)
        except ValueError:
            raise
        except BaseException:  # an interrupt, no memory to move with: who holds what is unknown
            for held in self.layers:
                held.forget()
            raise

    @staticmethod
    def _clear(part: TokenSlots, first: int, end: int) -> None:
        """These slots hold nothing."""
        if first < end:
            part.columns[:, :, first:end] = -1
            part.stamps[:, :, first:end] = EMPTY

    @torch.no_grad()
    def forget(self, row: int) -> None:
        """Nothing of this row is held."""
        first, room = self.lanes.held[row]
        for part in self._parts:
            part.slots[:, row] = -1  # first: if an interrupt comes after it, nothing is found in slots of others
            self._clear(part, first, first + room)

    @torch.no_grad()
    def begin(self, row: int, room: int, source: int | None = None) -> None:
        """A row has come, which has no slots yet: it gets ``room``, and holds what row ``source`` does, or nothing."""
        self.forget(row)
        self.give(row, room)
        if source is None:
            return
        (at, had), (to, room) = self.lanes.held[source], self.lanes.held[row]
        copied = Move(at, to, min(had, room))
        for part in self._parts:
            moved((part.kv, part.columns, part.stamps), [copied], 2)
            slots = part.slots[:, source]
            part.slots[:, row] = slots.masked_fill(slots >= copied.kept, -1)
            part.now[:, row] = part.now[:, source]

    @torch.no_grad()
    def move(self, row: int, source: int) -> None:
        """Row ``row``, which has no slots, becomes what row ``source`` is, which has none from here on."""
        for part in self._parts:
            part.slots[:, row] = part.slots[:, source]
            part.now[:, row] = part.now[:, source]
            part.slots[:, source] = -1
        self.lanes.move(row, source)

    def end(self, row: int) -> None:
        """A row has left: its slots are free. The next owner of the slots clears them."""
        self.lanes.give(row, 0)

    # ------------------------------------------------------------------ working sets

    @torch.no_grad()
    def working_sets(self, steps: int, expected: Sequence[int]) -> Tensor:
        """int32 ``[batch]``: of each row, the room that the tokens need which its last ``steps`` steps have chosen.

        Where a layer's KV head has filled its room, more were chosen than it could hold: ``expected`` of each row then
        says how many. Layers and heads differ, and a row's room is often too small for some of them only.

        Launches a few kernels and waits for nothing.
        """
        young = [young_tokens(part.stamps, part.now, part.lanes, steps) for part in self._parts]
        device = young[0].device
        held = torch.cat([found.transpose(0, 1).flatten(1).to(device) for found in young], dim=1)
        room = self.lanes.on(device)[:, 1:]
        wanted = sent(expected, held.dtype, device)[:, None].expand_as(held)
        return needed_room(torch.where(held >= room - room // SPILL, torch.maximum(held, wanted), held))


def _keep_young(part: TokenSlots, row: int, first: int, room: int, had: int) -> None:
    """Row ``row``, whose lane begins at slot ``first``, will have ``room`` of its ``had`` slots, the first ones.

    The youngest of those after them change places with the oldest of them, until none after is younger. Without this,
    young tokens there would be dropped, and the next steps would read them over the link again.
    """
    n = min(room, had - room)
    there, after = (part.stamps[:, :, first + at : first + end] for at, end in ((0, room), (room, had)))
    old, to = there.sort(dim=-1)
    young, source = after.sort(dim=-1, descending=True)
    to, moves = to[..., :n], young[..., :n] > old[..., :n]
    source = torch.where(moves, source[..., :n] + room, to)  # [layers, H, n]: a slot that stays takes its own place
    columns, stamps = (t[:, :, first : first + had] for t in (part.columns, part.stamps))
    gone, come = columns.gather(2, to), columns.gather(2, source)
    stamps.scatter_(2, to, stamps.gather(2, source))
    columns.scatter_(2, to, come)
    none = part.slots.shape[-1]  # stands for the column of slots that hold nothing
    gone, come = (torch.where(t < 0, none, t).long() for t in (gone, come))
    places = to.int()
    for layer, kv in enumerate(part.kv):  # one at a time: what is made meanwhile takes memory
        lane, wide = kv[:, first : first + had], (-1, -1, kv.shape[-1])
        one, two = to[layer, ..., None].expand(wide), source[layer, ..., None].expand(wide)
        lane.scatter_(1, one, lane.gather(1, two))
        slots = torch.nn.functional.pad(part.slots[layer, row], (0, 1))
        slots.scatter_(1, gone[layer], -1).scatter_(1, come[layer], places[layer])
        part.slots[layer, row] = slots[:, :none]


def needed_room(held: Tensor) -> Tensor:
    """The least room that is the same for all layers and KV heads and holds nearly all of what they want to hold.

    A row has as many slots in every layer and head, but not all choose from as many tokens. The mean would leave those
    that do from many too little, just where steps read over the link; the most would be one head's. So: all but one in
    ``SPILL`` tokens, summed over layers and heads, have a slot.

    Args:
        held: int ``[rows, n]``: tokens that each layer and head wants to hold.

    Returns:
        int32 ``[rows]``.
    """
    most = held.long().sort(dim=-1, descending=True).values
    sums, count = most.cumsum(-1), torch.arange(1, held.shape[1] + 1, device=held.device)
    spill = sums[:, -1:] // SPILL
    # With room r the first i spill sums[i] - i * r. At r = most[i - 1] none after them spills.
    last = (sums - count * most <= spill).sum(-1, keepdim=True) - 1
    over = sums.gather(-1, last) - spill
    return -((-over) // (last + 1)).squeeze(-1).int()


def expected_working_set(policy: Policy, tokens: int) -> int:
    """Slots that a row of ``tokens`` tokens is likely to need, before any step of it. No more than it has tokens.

    ``REUSED`` selections; 0 where nothing is chosen of so few tokens, or no copies are kept.
    """
    return min(tokens, round(REUSED * policy.wanted_copies(tokens))) if isinstance(policy, LabelledPolicy) else 0
