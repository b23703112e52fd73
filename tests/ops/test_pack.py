"""The kernels that keep chosen tokens together against their definition."""

from __future__ import annotations

import pytest
import torch

from hf_sparsekv.ops.pack import pack as public
from hf_sparsekv.ops.pack.reference import pack as reference
from hf_sparsekv.ops.pack.triton import pack

# batch, heads, room, block size, blocks, width
CASES = {
    "usual": (2, 2, 64, 16, 20, 128),
    "no power of two": (1, 3, 48, 16, 9, 80),
    "one token": (2, 1, 1, 16, 4, 32),
    "everything fits": (1, 2, 160, 32, 5, 64),
    "latents": (2, 1, 40, 16, 8, 576),
}


def selection(place, batch, heads, room, n, chosen):
    """Ascending ids, ``chosen`` to ``room`` of them, and none in the last row and head of several."""
    ids = torch.full((batch, heads, room), -1, dtype=torch.int32)
    for row in range(batch):
        for head in range(heads):
            k = min(n, int(torch.randint(chosen, room + 1, (1,), generator=place.generator)))
            if batch * heads > 1 and (row, head) == (batch - 1, heads - 1):
                k = 0
            ids[row, head, :k] = torch.randperm(n, generator=place.generator)[:k].sort().values.int()
    return ids.to(place.device)


def begin(place, batch, heads, room, size, blocks, width):
    kv = place.randn(batch * blocks + 3, heads, size, width)
    slots = place.randperm(batch * blocks + 3)[: batch * blocks].view(batch, blocks)
    held = torch.full((batch, heads, room), -1, dtype=torch.int32, device=place.device)
    order = torch.arange(room, dtype=torch.int32, device=place.device).expand(batch, heads, -1).contiguous()
    packed, places = place.nan(batch, heads, room, width), place.nan(batch, heads, room, dtype=torch.int32)
    return kv, slots, [held, order, packed, places]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_several_selections_against_reference(place, case):
    batch, heads, room, size, blocks, width = case
    kv, slots, state = begin(place, batch, heads, room, size, blocks, width)
    counters = torch.zeros(2, dtype=torch.int64, device=place.device)
    want, want_counters = [t.cpu().clone() for t in state], counters.cpu().clone()
    for _ in range(4):
        ids = selection(place, batch, heads, room, blocks * size, room // 2)
        reference(ids.cpu(), kv.cpu(), slots.cpu(), *want, counters=want_counters)
        pack(ids, kv, slots, *state, counters=counters)
        for got, expected in zip(state, want):
            torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(counters.cpu(), want_counters)


def test_what_is_packed(place32):
    """By the words of the definition: each chosen token lies where its place says, and few have moved."""
    batch, heads, room, size, blocks, width = 2, 2, 32, 16, 8, 24
    kv, slots, state = begin(place32, batch, heads, room, size, blocks, width)
    held, order, packed, places = state
    counters = torch.zeros(2, dtype=torch.int64, device=place32.device)
    before: list[set[int]] = [set() for _ in range(batch * heads)]
    chosen = moved = 0
    for _ in range(5):
        ids = selection(place32, batch, heads, room, blocks * size, 10)
        public(ids, kv, slots, *state, counters=counters)
        assert torch.equal(held, ids)
        for row in range(batch):
            for head in range(heads):
                assert sorted(order[row, head].tolist()) == list(range(room))
                now = [c for c in ids[row, head].tolist() if c >= 0]
                assert (places[row, head, len(now) :] == -1).all()
                for column, place in zip(now, places[row, head].tolist()):
                    token = kv[int(slots[row, column // size]), head, column % size]
                    assert torch.equal(packed.flatten(0, 2)[place], token)
                i = row * heads + head
                chosen, moved = chosen + len(now), moved + len(set(now) - before[i])
                before[i] = set(now)
    assert counters.tolist() == [chosen, moved]


def test_disabled_it_changes_nothing(place32):
    kv, slots, state = begin(place32, 1, 2, 16, 16, 4, 32)
    first, second = (selection(place32, 1, 2, 16, 64, 8) for _ in range(2))
    counters = torch.zeros(2, dtype=torch.int64, device=place32.device)
    enabled = torch.ones(1, dtype=torch.int32, device=place32.device)
    public(first, kv, slots, *state, enabled=enabled, counters=counters)
    kept = [t.clone() for t in (*state, counters)]
    enabled.zero_()
    for how in (public, reference, pack):
        how(second, kv, slots, *state, enabled=enabled, counters=counters)
        for got, expected in zip((*state, counters), kept):
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
