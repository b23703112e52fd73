"""Blocks that are still being copied when their cache changes: no write is lost, late, or in somebody else's block.

Each way gives up blocks, or changes the block table, while copies are in flight; then other tokens take the memory.
Without a GPU copies happen when somebody waits for them, and the rest at the very end; on a GPU they begin late.
"""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from caches import FULL, TIGHT, two_level
from lazy_copy_streams import finish, imitate, slow
from models import build, model, prompt
from torch import Tensor

from hf_sparsekv import Engine, OffloadConfig, Sampling, ServingConfig
from hf_sparsekv.kv import pool
from hf_sparsekv.kv.block_ids import BlockIds
from hf_sparsekv.kv.block_writer import BlockWriter
from hf_sparsekv.offload.copy_streams import CopyStream

HELPERS = Path(__file__).parents[1] / "helpers"
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


def ids_of(n: int, seed: int) -> list[int]:
    """A prompt of ``n`` tokens."""
    return prompt(1, n, seed=seed)["input_ids"][0].tolist()


def greedy(tokens: int) -> Sampling:
    """The likeliest tokens, so many."""
    return Sampling(max_tokens=tokens, temperature=0)


class Place:
    """Where the tests run, and how copies are delayed there."""

    def __init__(self, device: str) -> None:
        self.device, self.late = device, LATE
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

    def hurry(self) -> None:
        """Copy streams that are made from here on are not delayed."""
        self.late = 1

    def settle(self) -> None:
        """Do what is left of all copies."""
        if self.device == "cpu":
            finish()
        else:
            torch.cuda.synchronize()


def _watch(patch: pytest.MonkeyPatch) -> None:
    """Fail where a block is handed out again while a copy to it is pending, or a copy goes to no block."""
    pending: list[tuple] = []
    keep, take, write = BlockWriter.write, BlockIds.take, pool.BlockPool.write

    def kept(self, blocks, rows, start, block_table, copy_stream):
        keep(self, blocks, rows, start, block_table, copy_stream)
        if copy_stream is not None:
            ids = self.table_of_rows.blocks.host[rows, start : start + len(blocks)].flatten()
            pending.append((self.pool.ids, set(ids.tolist()), self.saved))

    def given(self, n):
        ids = take(self, n)
        for whose, names, event in pending:
            assert whose is not self or event.query() or not names & set(ids.tolist()), "a block that is being written"
        return ids

    def written(self, physical_ids, kv, first=None):
        assert physical_ids is None or int(physical_ids.min()) >= 0, "a copy to no block"
        return write(self, physical_ids, kv, first)

    patch.setattr(BlockWriter, "write", kept)
    patch.setattr(BlockIds, "take", given)
    patch.setattr(pool.BlockPool, "write", written)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request, monkeypatch) -> Place:
    here = Place(request.param)
    if request.param == "cpu":
        imitate(monkeypatch)
        _watch(monkeypatch)
    else:
        make = CopyStream.__init__

        def init(self, *args):
            make(self, *args)
            slow(self, here.late)

        monkeypatch.setattr(CopyStream, "__init__", init)
    return here


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


@pytest.mark.few(kind=("blocks-few", "tokens", "tokens-codes"))
@pytest.mark.pairwise(once=("kind",))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["deleted", "reset"])
def test_blocks_of_a_copy(place, way, kind):
    """A cache and its copy share block pools: what one gives up the other takes."""
    for turn in range(TIMES):
        place.late = LATE
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
        place.hurry()
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
        place.late = LATE
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
        place.hurry()
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
            calibrates = fresh.config.calibration_tokens  # rows calibrate on their first tokens alone
            for piece in given["input_ids"].tensor_split([calibrates], 1):
                place.read(fresh, {"input_ids": piece})
            place.settle()
            alone[number] = place.steps(fresh, given)[0]
        mine = torch.stack(found, 1)
        for number, want in alone.items():
            torch.testing.assert_close(mine[number], want, atol=5e-3, rtol=5e-3)


# ---------------------------------------------------------------------- engines, and the end


def wait_for(condition: Callable[[], bool]) -> None:
    """Until it holds, a minute at most."""
    until = time.monotonic() + 60
    while not condition() and time.monotonic() < until:
        time.sleep(1e-3)
    assert condition()


@pytest.mark.parametrize("ends", ["cancelled", "closed"])
def test_requests_that_end_early(place, ends):
    """Prompts that are cancelled half read, again and again, beside one that decodes; or an engine that is closed."""
    serving = ServingConfig(max_rows=3, max_length=300, chunk=64, prefill_ms=0.5)
    config = two_level(**TOKENS, **FULL).config
    steady, others = ids_of(90, 1), [ids_of(200, 10 + i) for i in range(4)]
    last = ids_of(150, 2)
    found = []
    for turn in range(TIMES):
        with Engine(place.net, None, config, OffloadConfig(), serving) as engine:
            first = engine.submit(steady, greedy(150))
            wait_for(lambda: engine.stats().generated_tokens > 0)
            for i, ids in enumerate(others):
                half = engine.submit([turn + 1, *ids[1:]], greedy(5))
                wait_for(lambda half=half: engine.stats().prefilling > 0 or half.done)
                time.sleep(0.003 * i)
                half.cancel()
            if ends == "closed":
                engine.submit(last, greedy(10))
                continue
            found.append([handle.result(100).token_ids for handle in (first, engine.submit(last, greedy(10)))])
    place.settle()
    if ends == "closed":
        return
    alone = []
    for ids, tokens in ((steady, 150), (last, 10)):
        given = torch.tensor([ids], device=place.device)
        cache = KINDS["tokens"]()
        out = place.net.generate(given, past_key_values=cache, max_new_tokens=tokens, do_sample=False)
        place.settle()
        alone.append(tuple(out[0, len(ids) :].tolist()))
    assert all([tuple(one) for one in each] == alone for each in found)


END = """
import os, sys
sys.path.insert(0, {tests!r})
import torch
from caches import two_level
from lazy_copy_streams import slow
from models import build, prompt
from hf_sparsekv.offload.copy_streams import CopyStream

make = CopyStream.__init__

def init(self, *args):
    make(self, *args)
    slow(self, 400_000_000)

CopyStream.__init__ = init
net, caches = build("llama", "sparsekv").cuda(), [two_level(token_budget=32) for _ in range(2)]
with torch.no_grad():
    for cache in caches:
        net(prompt(2, 300)["input_ids"].cuda(), past_key_values=cache)
pending = [layer.store.writer.saved for cache in caches for layer in cache.sparse_layers]
assert not all(event.query() for event in pending), "nothing is in flight"
{ends}
"""


@pytest.mark.gpu
@pytest.mark.parametrize("ends", ["", "del cache, caches[0]", "sys.exit(0)", "cycle = [caches]; cycle.append(cycle)"])
def test_the_process_ends_with_copies_in_flight(ends):
    """Code 0, and nothing said."""
    script = END.format(tests=str(HELPERS), ends=ends)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert (done.returncode, "CUDA error" in done.stderr) == (0, False), done.stderr
