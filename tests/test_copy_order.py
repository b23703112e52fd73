"""Blocks that are still being copied when their cache changes: no write is lost, late, or in somebody else's block.

Each way gives up blocks, or changes the block table, while copies are in flight; then other tokens take the memory.
Without a GPU copies happen when somebody waits for them, and the rest at the very end; on a GPU they begin late.
"""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable

import pytest
import torch
from caches import FULL, TIGHT, two_level
from lazy_copy_streams import finish, imitate, slow
from models import build, model, prompt
from torch import Tensor

from hf_sparsekv import OffloadConfig
from hf_sparsekv.kv import pool, store
from hf_sparsekv.kv.block_ids import BlockIds
from hf_sparsekv.offload.copy_streams import CopyStream

LATE = 10_000_000  # cycles, some 5 ms
TIMES = int(os.environ.get("HF_SPARSEKV_REPEAT", "1"))
TOKENS = {"level": "auto", "lag": False}

KINDS = {
    "blocks-a-step-ahead": lambda: two_level(**FULL),
    "blocks-few": lambda: two_level(**TIGHT),
    "tokens": lambda: two_level(**TOKENS, **FULL),
    "tokens-few": lambda: two_level(**TOKENS, token_budget=32),
    "tokens-codes": lambda: two_level(OffloadConfig(kv_dtype="int8"), **TOKENS, **FULL),
}
JOIN = [kind for kind in KINDS if kind.startswith("tokens")]


class Place:
    """Where the tests run, and how copies are delayed there."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.net = model("llama") if device == "cpu" else build("llama", "sparsekv").cuda()

    def inputs(self, rows: int, length: int, seed: int) -> dict[str, Tensor]:
        """A prompt whose rows hold different numbers of tokens."""
        pads = tuple(7 * row for row in range(rows)) if rows > 1 else None
        return {name: value.to(self.device) for name, value in prompt(rows, length, pads, seed=seed).items()}

    @torch.no_grad()
    def read(self, cache, given: dict[str, Tensor]) -> Tensor:
        """Read a prompt."""
        return self.net(**given, past_key_values=cache).logits[:, -1:]

    @torch.no_grad()
    def steps(self, cache, given: dict[str, Tensor], n: int = 5) -> Tensor:
        """Logits of decode steps after ``given``, of tokens that are the same each time."""
        rows, mask, found = len(given["input_ids"]), given.get("attention_mask"), []
        for token in prompt(rows, n, seed=77)["input_ids"].to(self.device).split(1, 1):
            if mask is not None:
                mask = torch.cat((mask, torch.ones_like(token)), 1)
            found.append(self.net(token, attention_mask=mask, past_key_values=cache).logits.clone())
        return torch.cat(found, 1)

    def settle(self) -> None:
        """Do what is left of all copies."""
        if self.device == "cpu":
            finish()
        else:
            torch.cuda.synchronize()


def _watch(patch: pytest.MonkeyPatch) -> None:
    """Fail where a block is handed out again while a copy to it is pending, or a copy goes to no block."""
    pending: list[tuple] = []
    keep, take, write = store.LayerStore._store_blocks, BlockIds.take, pool.BlockPool.write

    def _store_blocks(self, blocks, rows, start, copy_stream):
        keep(self, blocks, rows, start, copy_stream)
        if copy_stream is not None:
            ids = self.table_of_rows.host[rows, start : start + len(blocks)].flatten()
            pending.append((self.pool.ids, set(ids.tolist()), self._saved))

    def given(self, n):
        ids = take(self, n)
        for whose, names, event in pending:
            assert whose is not self or event.query() or not names & set(ids.tolist()), "a block that is being written"
        return ids

    def written(self, physical_ids, kv, first=None):
        assert physical_ids is None or int(physical_ids.min()) >= 0, "a copy to no block"
        return write(self, physical_ids, kv, first)

    patch.setattr(store.LayerStore, "_store_blocks", _store_blocks)
    patch.setattr(BlockIds, "take", given)
    patch.setattr(pool.BlockPool, "write", written)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request, monkeypatch) -> Place:
    if request.param == "cpu":
        imitate(monkeypatch)
        _watch(monkeypatch)
    else:
        make = CopyStream.__init__

        def init(self, *args):
            make(self, *args)
            slow(self, LATE)

        monkeypatch.setattr(CopyStream, "__init__", init)
    return Place(request.param)


def check(place: Place, kind: str, found: Tensor, given: dict[str, Tensor]) -> None:
    """``found``: steps after ``given`` over a cache with a past; a new cache of this kind says the same."""
    place.settle()
    fresh = KINDS[kind]()
    place.read(fresh, given)
    place.settle()
    torch.testing.assert_close(found, place.steps(fresh, given), atol=1e-3, rtol=1e-3)


# ---------------------------------------------------------------------- one cache


def _reset(place: Place, cache) -> None:
    cache.reset()


def _reset_after_pieces(place: Place, cache) -> None:
    """The table has grown, and another stream reads blocks back for the next layer."""
    mask = place.inputs(2, 120, 1)["attention_mask"]
    with torch.no_grad():
        for piece in prompt(2, 140, seed=5)["input_ids"].to(place.device).split(70, 1):
            mask = torch.cat((mask, torch.ones_like(piece)), 1)
            place.net(piece, attention_mask=mask, past_key_values=cache)
    cache.reset()


def _reset_after_a_step(place: Place, cache) -> None:
    place.steps(cache, place.inputs(2, 120, 1), 1)
    cache.reset()


def _reset_half_way(place: Place, cache) -> None:
    """A layer fails while blocks of the layers before it are in flight."""

    def fail(*args):
        raise InterruptedError("half-way")

    cache.reset()
    hook = place.net.model.layers[1].register_forward_pre_hook(fail)
    try:
        with pytest.raises(InterruptedError):
            place.read(cache, place.inputs(2, 120, 2))
    finally:
        hook.remove()
    cache.reset()


def _crop(place: Place, cache) -> None:
    cache.crop(40)
    cache.reset()


def _beams(place: Place, cache) -> None:
    cache.reorder_cache(torch.tensor([1, 1], device=place.device))
    cache.reset()


WAYS: dict[str, Callable] = {
    "reset": _reset,
    "reset-after-pieces": _reset_after_pieces,
    "reset-after-a-step": _reset_after_a_step,
    "reset-half-way": _reset_half_way,
    "crop": _crop,
    "beams": _beams,
}


@pytest.mark.pairwise(once=("kind", "rows"))
@pytest.mark.parametrize("rows", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_the_same_cache_again(place, way, kind, rows):
    """Another prompt in the same memory, of as many rows or another number."""
    for turn in range(TIMES):
        cache, given = KINDS[kind](), place.inputs(rows, 130, 3 + turn)
        place.read(cache, place.inputs(2, 120, 1))
        WAYS[way](place, cache)
        place.read(cache, given)
        check(place, kind, place.steps(cache, given), given)


@pytest.mark.pairwise(once=("kind",))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["deleted", "reset"])
def test_blocks_of_a_copy(place, way, kind):
    """A cache and its copy share block pools: what one gives up the other takes."""
    for turn in range(TIMES):
        first, more = place.inputs(1, 100, 1 + turn), prompt(1, 80, seed=8)["input_ids"].to(place.device)
        cache = KINDS[kind]()
        place.read(cache, first)
        other = copy.deepcopy(cache)
        with torch.no_grad():
            place.net(more, past_key_values=cache)  # into blocks of its own, which are on their way
        if way == "reset":
            cache.reset()
        else:
            del cache
            gc.collect()
        own = prompt(1, 80, seed=9)["input_ids"].to(place.device)
        with torch.no_grad():
            place.net(own, past_key_values=other)
        whole = {"input_ids": torch.cat((first["input_ids"], own), 1)}
        found = place.steps(other, whole)
        place.settle()
        fresh = KINDS[kind]()
        with torch.no_grad():
            for piece in (first["input_ids"], own):
                place.net(piece, past_key_values=fresh)
                place.settle()
        torch.testing.assert_close(found, place.steps(fresh, whole), atol=1e-3, rtol=1e-3)


# ---------------------------------------------------------------------- rows that come and go


@pytest.mark.pairwise(once=("kind",))
@pytest.mark.parametrize("kind", JOIN)
@pytest.mark.parametrize("way", ["dropped", "left", "forked"])
def test_blocks_of_another_prompt(place, way, kind):
    """A prompt that ends while its blocks are on their way; the next one takes them, by a copy stream of its own."""
    for turn in range(TIMES):
        cache = KINDS[kind]()
        rows = cache.rows(3, 200)
        stays = rows.join(rows.prefill(place.net, place.inputs(1, 120, 1)["input_ids"]))
        first = rows.prefill(place.net, place.inputs(1, 120, 2 + turn)["input_ids"])
        if way == "dropped":
            rows.drop(first)
        else:
            row = rows.join(first)
            if way == "forked":
                rows.leave(rows.fork(row))
            rows.leave(row)
        del first
        ids = place.inputs(1, 130, 3 + turn)["input_ids"]
        row = rows.join(rows.prefill(place.net, ids))
        found, alone = [], {}
        for token in prompt(1, 5, seed=77)["input_ids"][0].tolist():
            given = torch.full((3,), token, dtype=torch.long, device=place.device)
            logits = rows.step(place.net, given)
            found.append(logits[[stays, row]].clone())
        place.settle()
        for number, length, seed in ((0, 120, 1), (1, 130, 3 + turn)):
            fresh, given = KINDS[kind](), {"input_ids": place.inputs(1, length, seed)["input_ids"]}
            place.read(fresh, given)
            place.settle()
            alone[number] = place.steps(fresh, given)[0]
        mine = torch.stack(found, 1)
        for number, want in alone.items():
            torch.testing.assert_close(mine[number], want, atol=5e-3, rtol=5e-3)
