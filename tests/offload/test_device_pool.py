"""The device pool beside a model of it in plain Python, over many random steps."""

from __future__ import annotations

import copy
import functools
import os
import random

import pytest
import torch

from hf_sparsekv.offload.device_pool import DevicePool, free_bytes
from hf_sparsekv.ops.storage.residency import FREE

SIZE, WIDTH = 2, 4  # of a block
LAYERS = ((40, 2), (25, 1), (60, 3))  # physical blocks and KV heads
BATCH, BLOCKS, CHOSEN = 2, 12, 6
OLDEST, SLACK, EXTRA = 254, 4, 3


class Model:
    """The block in each page, in dicts and lists, one block after the other."""

    def __init__(self, pages: int, window: int) -> None:
        self.window = window
        self.total = dict.fromkeys(("needed", "found", "fetched", "unserved"), 0)
        self.holds: list[tuple | None] = [None] * pages
        self.reset()

    def reset(self) -> None:
        self.where: dict[tuple, int] = {}  # (layer, physical block, head) -> page
        self.holds = [None] * len(self.holds)
        self.last = [None] * len(self.holds)  # step that chose it
        self.hand, self.now = 0, 1
        self.total = dict.fromkeys(self.total, 0)

    def forget(self, layer: int, physical_ids: list[int]) -> None:
        for block in [b for b in self.where if b[0] == layer and b[1] in physical_ids]:
            page = self.where.pop(block)
            self.holds[page] = self.last[page] = None

    def age(self, page: int) -> int:
        return OLDEST + 1 if self.holds[page] is None else min(self.now - self.last[page], OLDEST)

    def may_go(self, page: int, keep: int) -> bool:
        return self.holds[page] is None or self.last[page] < self.now - keep

    def fetch(self, blocks: list[tuple | None], keep: int) -> list[int]:
        """Places of the blocks ``(layer, physical_id, head)``."""
        wanted = [b for b in blocks if b is not None]
        missing = []
        for block in wanted:
            if block in self.where:
                self.last[self.where[block]] = self.now
                self.total["found"] += 1
            elif block not in missing:
                missing.append(block)
        self.total["needed"] += len(wanted)
        order = [(self.hand + i) % len(self.holds) for i in range(len(self.holds))]
        pieces = [order[i : i + self.window] for i in range(0, len(order), self.window)]
        planned = min(len(pieces), -(-SLACK * len(missing) // self.window))
        for i, piece in enumerate(pieces[: planned + EXTRA]):
            if not missing:
                break
            share = -(-len(missing) // (planned - i)) if i < planned else len(missing)
            may_go = [page for page in piece if self.may_go(page, keep)]
            chosen = sorted(may_go, key=lambda page: -self.age(page))[:share]
            for page in piece:
                if page in chosen:
                    if self.holds[page] is not None:
                        del self.where[self.holds[page]]
                    block = missing.pop(0)
                    self.holds[page], self.last[page], self.where[block] = block, self.now, page
                    self.total["fetched"] += 1
            self.hand = piece[-1] + 1
        self.hand %= len(self.holds)
        self.total["unserved"] += sum(b not in self.where for b in wanted)
        return [-1 if b is None else self.where.get(b, -(b[1] + 2)) for b in blocks]


class World:
    """A pool, its model, and layers whose rows get, share and lose blocks."""

    def __init__(self, device: str, pages: int, window: int, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.device = device
        self.pool, self.model = DevicePool(pages, SIZE, WIDTH, torch.float32, device), Model(pages, window)
        self.pool.window = window
        pin = device == "cuda"
        self.kv = [torch.zeros(s, h, SIZE, WIDTH, pin_memory=pin) for s, h in LAYERS]
        self.capacity = [s // 2 for s, _ in LAYERS]
        for layer, (_, heads) in enumerate(LAYERS):
            assert self.pool.add_layer(self.table(self.capacity[layer], heads)) == layer
        self.block_tables = [[[-1] * BLOCKS for _ in range(BATCH)] for _ in LAYERS]
        self.written = 0
        self.chosen: dict[tuple, list[int]] = {}
        for layer in range(len(LAYERS)):
            for row in range(BATCH):
                self.replace(layer, row, range(BLOCKS // 2))

    def table(self, capacity: int, heads: int) -> torch.Tensor:
        return torch.full((capacity, heads), -1, dtype=torch.int32, device=self.device)

    def replace(self, layer: int, row: int, blocks: range) -> None:
        """New blocks in physical blocks that nobody names; the layer's page table grows if it must."""
        for block in blocks:
            named = {physical_id for other in self.block_tables[layer] for physical_id in other}
            free = [physical_id for physical_id in range(self.capacity[layer]) if physical_id not in named]
            if not free:
                self.grow(layer)
                free = [self.capacity[layer] - 1]
            physical_id = self.random.choice(free)
            self.pool.forget(layer, torch.tensor([physical_id]))
            self.model.forget(layer, [physical_id])
            self.block_tables[layer][row][block] = physical_id
            for head in range(LAYERS[layer][1]):
                self.written += 1
                self.kv[layer][physical_id, head] = self.written * 8 + torch.arange(8.0).view(SIZE, WIDTH)

    def grow(self, layer: int) -> None:
        old = self.pool.page_table(layer)
        self.capacity[layer] = min(LAYERS[layer][0], self.capacity[layer] + 3)
        new = self.table(self.capacity[layer], LAYERS[layer][1])
        new[: len(old)] = old
        old.fill_(10**6)  # nobody may look there any more
        self.pool.moved(layer, new)

    def choose(self, layer: int, row: int, head: int) -> list[int]:
        """Mostly the blocks of the last time."""
        there = [b for b, physical_id in enumerate(self.block_tables[layer][row]) if physical_id >= 0]
        n = self.random.choice((0, CHOSEN, CHOSEN, CHOSEN, CHOSEN - 2))
        old = [b for b in self.chosen.get((layer, row, head), []) if b in there and self.random.random() < 0.85]
        new = [b for b in there if b not in old]
        chosen = sorted((old + self.random.sample(new, len(new)))[:n])
        self.chosen[layer, row, head] = chosen
        return chosen

    def change(self) -> None:
        """Events between steps, now and then."""
        layer, row, event = self.random.randrange(len(LAYERS)), self.random.randrange(BATCH), self.random.random()
        if event < 0.1:  # a block is sealed, or all others are
            self.replace(layer, row, range(self.random.randrange(BLOCKS), BLOCKS)[:2])
        elif event < 0.13:  # the rows share all blocks from now on
            self.block_tables[layer][1 - row] = list(self.block_tables[layer][row])
        elif event < 0.133:
            self.pool.drop_all()
            self.model.reset()

    def call(self, layer: int, keep: int, paused: bool = False) -> None:
        heads = LAYERS[layer][1]
        ids = [[self.choose(layer, row, head) for head in range(heads)] for row in range(BATCH)]
        ids = [[i + [-1] * (CHOSEN - len(i)) for i in per_row] for per_row in ids]
        blocks = [
            None if b < 0 or self.block_tables[layer][row][b] < 0 else (layer, self.block_tables[layer][row][b], head)
            for row in range(BATCH)
            for head in range(heads)
            for b in ids[row][head]
        ]
        in_use = [f for f in range(len(self.model.holds)) if not self.model.may_go(f, keep)]
        owners = self.pool.state.owner.tolist()
        arguments = (
            layer,
            torch.tensor(ids, dtype=torch.int32, device=self.device),
            torch.tensor(self.block_tables[layer], dtype=torch.int32, device=self.device),
            self.kv[layer],
            keep,
            torch.full((BATCH, heads, CHOSEN), 12345, dtype=torch.int32, device=self.device),
        )
        if paused:
            with self.pool.paused():
                page_ids = self.pool.fetch(*arguments)
                self.pool.advance()
            expected = [-1 if b is None else self.model.where.get(b, -(b[1] + 2)) for b in blocks]
        else:
            page_ids = self.pool.fetch(*arguments)
            expected = self.model.fetch(blocks, keep)
        assert page_ids is arguments[-1]
        assert page_ids.flatten().tolist() == expected
        after = self.pool.state.owner.tolist()
        assert all(owners[f] == after[f] for f in in_use), "a frame in use was given away"
        self.read(page_ids, blocks)

    def read(self, page_ids: torch.Tensor, blocks: list[tuple | None]) -> None:
        """Every place holds its block's content."""
        pairs = [(p, b) for p, b in zip(page_ids.flatten().tolist(), blocks) if b is not None]
        for page_id, (_, physical_id, _) in pairs:
            assert page_id >= 0 or -(page_id + 2) == physical_id
        pairs = [(p, b) for p, b in pairs if p >= 0]
        if pairs:
            got = self.pool.pages[torch.tensor([p for p, _ in pairs], device=self.device)].cpu()
            assert torch.equal(
                got, torch.stack([self.kv[layer][physical_id, head] for _, (layer, physical_id, head) in pairs])
            )

    def check(self) -> None:
        """One owner a page, tables and owners agree, and all is as in the model."""
        state, model = self.pool.state, self.model
        owner, stamp = state.owner.tolist(), state.stamp.tolist()
        entries = {}
        for layer, (_, heads) in enumerate(LAYERS):
            for i, page in enumerate(self.pool.page_table(layer).flatten().tolist()):
                assert page >= -1
                if page >= 0:
                    assert page not in entries, "a frame has two owners"
                    entries[page] = (layer, i // heads, i % heads)
                    assert owner[page] == [layer, i]
        assert all(owner[f] == [-1, -1] and stamp[f] == FREE for f in range(len(owner)) if f not in entries)
        assert entries == {page: block for block, page in model.where.items()}
        assert [None if s == FREE else s for s in stamp] == model.last
        assert (int(state.hand), int(state.now)) == (model.hand, model.now)

    def run(self, steps: int) -> None:
        for step in range(steps):
            keep = step // 280 % 2
            self.change()
            for layer in range(len(LAYERS)):
                if self.random.random() < 0.5:
                    self.call(layer, keep, paused=self.random.random() < 0.02)
            self.check()
            self.pool.advance()
            self.model.now += 1
            if step % 50 == 0:
                assert self.pool.counters() == self.model.total
        assert self.pool.counters() == self.model.total


@pytest.mark.parametrize(
    "pages, window, steps",
    [(45, 16, 300), pytest.param(45, 16, 1000, marks=pytest.mark.slow), (1, 16, 300), (20, 64, 300), (400, 64, 300)],
)
def test_many_steps(pages, window, steps):
    World("cpu", pages, window, seed=pages).run(steps)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the interpreter is off where there is a GPU")
@pytest.mark.parametrize("pages, window", [(70, 32), (30, 64)])
def test_kernels(monkeypatch, pages, window):
    from hf_sparsekv.ops.storage.block_copy import triton as copying
    from hf_sparsekv.ops.storage.block_copy.config import Config
    from hf_sparsekv.ops.storage.residency import triton as residing

    def block_copy(kv, pages, copies, n_copies):
        copying.block_copy(kv, pages, copies, n_copies, config=Config(2, 4))

    residency = functools.partial(residing.residency, config=residing.Config(look=64, tile=32))
    monkeypatch.setattr("hf_sparsekv.offload.device_pool.residency", residency)
    monkeypatch.setattr("hf_sparsekv.offload.device_pool.block_copy", block_copy)
    World("cpu", pages, window).run(20)


@pytest.mark.gpu
@pytest.mark.parametrize("pages, window, steps", [(45, 32, 3000), (20, 32, 600), (400, 4096, 600)])
def test_on_the_device(pages, window, steps):
    World("cuda", pages, window).run(steps)


def test_sizes():
    page = 2 * 4 * 4 + 12
    assert len(DevicePool.sized(10 * page, 2, 4, torch.float32, "cpu").pages) == 10
    assert len(DevicePool.sized(10 * page, 2, 4, torch.float32, "cpu", most=3).pages) == 3
    assert len(DevicePool.sized(1e-6, 2, 4, torch.float32, "cpu").pages) > 0
    pool = DevicePool(5, 2, 4, torch.float32, "cpu")
    assert pool.nbytes == 5 * page
    assert free_bytes(pool.device) > 0
    for wrong in (page - 1, 1.5, 0.0):
        with pytest.raises(ValueError, match=r"no room|between 0 and 1"):
            DevicePool.sized(wrong, 2, 4, torch.float32, "cpu")
    with pytest.raises(ValueError, match="at least one"):
        DevicePool(0, 2, 4, torch.float32, "cpu")


def test_copies_share_it():
    pool = DevicePool(5, 2, 4, torch.float32, "cpu")
    assert copy.deepcopy([pool])[0] is pool


def test_blocks_of_other_heads():
    world = World("cpu", 30, 16)
    ids = torch.arange(6, dtype=torch.int32).expand(BATCH, 2, 6)
    block_table = torch.tensor(world.block_tables[0], dtype=torch.int32)
    with pytest.raises(ValueError, match="KV heads"):
        world.pool.fetch(1, ids, block_table, world.kv[0], 0)
