"""LayerStore against a model that keeps plain tensors, under random histories of stores that share pools."""

from __future__ import annotations

import copy
import gc
from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from caches import full_block_kv
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from inside import free_of, references_of
from lazy_copy_streams import imitate
from torch.utils._python_dispatch import TorchDispatchMode

from hf_sparsekv import OffloadConfig, SparseConfig
from hf_sparsekv.kv.block_ids import BlockIds, bucket
from hf_sparsekv.kv.pool import BlockPool
from hf_sparsekv.kv.read_back import materialise, reindex
from hf_sparsekv.kv.ring import ring_tokens
from hf_sparsekv.kv.row_table import RowTable
from hf_sparsekv.kv.store import LayerStore
from hf_sparsekv.offload.copy_streams import CopyStreams
from hf_sparsekv.offload.host_limit import HostBudget
from hf_sparsekv.ops.selection.token_score.reference import unpack_digits
from hf_sparsekv.ops.storage.seal import Index
from hf_sparsekv.ops.storage.seal.reference import key_bounds
from hf_sparsekv.types import AttentionParams

HEADS, KEY, VALUE, SIZE = 2, 4, 6, 16


class Probe:
    """An indexer whose field says which block it was made of. ``fused``: blocks are sealed by the operator."""

    def __init__(self, sinks: int, fused: bool = False) -> None:
        self.sinks, self.fused = sinks, fused

    def index(self, kv, start, rows):
        token = torch.arange(start, start + kv.shape[0] * SIZE).view(-1, 1, SIZE)
        return {"bounds": key_bounds(kv[..., :KEY], (token >= self.sinks).expand(-1, kv.shape[1], -1))}

    def sealing(self, store):
        return Index(KEY, store.pool.fields["bounds"]) if self.fused else None


class Plain:
    """The whole of a store, as it must be."""

    def __init__(self, batch: int) -> None:
        self.k, self.v = torch.zeros(batch, HEADS, 0, KEY), torch.zeros(batch, HEADS, 0, VALUE)
        self.valid = torch.zeros(batch, 0, dtype=torch.bool)

    def add(self, k, v, valid) -> None:
        self.k, self.v = torch.cat((self.k, k), 2), torch.cat((self.v, v), 2)
        ok = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool) if valid is None else valid
        self.valid = torch.cat((self.valid, ok), 1)

    def keep(self, length: int) -> None:
        self.k, self.v, self.valid = self.k[:, :, :length], self.v[:, :, :length], self.valid[:, :length]

    def rows(self, index) -> None:
        self.k, self.v, self.valid = self.k[index], self.v[index], self.valid[index]

    def copy(self) -> Plain:
        new = Plain(1)
        new.k, new.v, new.valid = self.k, self.v, self.valid
        return new


def make_store(config, budget, batch, expected=1, **more) -> LayerStore:
    like = torch.zeros(batch, HEADS, expected, KEY), torch.zeros(batch, HEADS, expected, VALUE)
    store = LayerStore(*like, config, budget, RowTable(config), **more)
    store.pool.add_field("bounds", (HEADS, 2, KEY), store.dtype)
    return store


def check(store: LayerStore, plain: Plain, config: SparseConfig) -> None:
    rows = store.held
    assert store.length == plain.k.shape[2]
    assert rows.lengths == tuple(plain.valid.sum(1).tolist()), "padding is no token"
    if store.length:
        key, value = materialise(store)
        seen = plain.valid[:, None, :, None]
        assert torch.equal(key.where(seen, 0), plain.k.where(seen, 0))
        assert torch.equal(value.where(seen, 0), plain.v.where(seen, 0))
        assert key.isfinite().all() and value.isfinite().all()
        assert torch.equal(store.held.valid_columns(store.device), plain.valid)
    kv = full_block_kv(store)
    for row, (length, sealed) in enumerate(zip(rows.lengths, rows.sealed)):
        # Nothing is sealed too early; a crop leaves a full window outside the blocks, or everything.
        assert 0 <= length - sealed * SIZE <= store.ring.tokens
        assert sealed == 0 or length - sealed * SIZE >= config.window
        ids = store.table_of_rows.blocks.host[row]
        assert (ids[:sealed] >= 0).all()
        tokens = plain.valid[row].nonzero().flatten()[: min(config.sinks, sealed * SIZE)]
        front = store.recent_kv[row, :, : len(tokens)]
        assert torch.equal(front, torch.cat((plain.k[row, :, tokens], plain.v[row, :, tokens]), -1))
        if sealed:
            bounds = store.pool.fields["bounds"][torch.from_numpy(ids[:sealed]).long()]
            expected = Probe(config.sinks).index(kv[:sealed, row : row + 1], 0, slice(row, row + 1))["bounds"]
            torch.testing.assert_close(bounds, expected[:, 0])
    assert torch.equal(store.block_table, torch.from_numpy(store.table_of_rows.blocks.host))


def check_ids(stores: list[LayerStore]) -> None:
    """Every id that a table names is counted, and no other."""
    ids = stores[0].table_of_rows.ids
    ids.share(ids.take(0))  # tables that are gone give theirs back
    named = np.concatenate([store.table_of_rows.blocks.host.flatten() for store in stores])
    references = references_of(ids)
    counts = np.bincount(named[named >= 0], minlength=len(references))
    assert (references == counts).all()
    assert sorted(free_of(ids)) == [i for i in range(ids.used) if counts[i] == 0]


def check_attention(store: LayerStore, plain: Plain) -> None:
    """Dense attention over the store: blocks and ring together hold every valid token once."""
    query = torch.randn(store.batch, 2 * HEADS, KEY)
    found = store.attend(query, None, "all", AttentionParams(0.5))
    key, value = plain.k.repeat_interleave(2, 1), plain.v.repeat_interleave(2, 1)
    logits = (query[:, :, None] @ key.transpose(-1, -2) * 0.5).masked_fill(~plain.valid[:, None, None], -torch.inf)
    torch.testing.assert_close(found, (logits.softmax(-1).nan_to_num(0.0) @ value)[:, :, 0], atol=1e-5, rtol=1e-5)


class Stores(RuleBasedStateMachine):
    """Several stores, some of them copies that share a pool."""

    @initialize(
        sinks=st.sampled_from([0, 4, 21]),
        window=st.sampled_from([1, 16, 27]),
        draft=st.sampled_from([0, 4]),
        offload=st.booleans(),
        batch=st.integers(1, 3),
        expected=st.sampled_from([None, 90]),
        seed=st.integers(0, 1 << 16),
    )
    def start(self, sinks, window, draft, offload, batch, expected, seed):
        torch.manual_seed(seed)
        self.config = SparseConfig(block_size=SIZE, sinks=sinks, window=window, max_draft=draft, max_length=expected)
        self.budget = HostBudget(OffloadConfig(max_host_bytes=1 << 24)) if offload else None
        self.pairs = [(make_store(self.config, self.budget, batch), Plain(batch))]
        self.touched = 0

    def pick(self, data):
        self.touched = data.draw(st.integers(0, len(self.pairs) - 1), label="store")
        return self.pairs[self.touched]

    def tokens(self, data, store, n):
        k, v = torch.randn(store.batch, HEADS, n, KEY), torch.randn(store.batch, HEADS, n, VALUE)
        kind = data.draw(st.sampled_from(["all", "left", "holes"]), label="padding")
        if kind == "all":
            return k, v, None
        if kind == "holes":
            return k, v, torch.rand(store.batch, n) < 0.5
        pads = torch.tensor(data.draw(st.lists(st.integers(0, n), min_size=store.batch, max_size=store.batch)))
        return k, v, torch.arange(n) >= pads[:, None]

    @rule(data=st.data(), n=st.integers(1, 150), fused=st.booleans())
    def extend(self, data, n, fused):
        store, plain = self.pick(data)
        new = self.tokens(data, store, n)
        store.extend(*new, Probe(self.config.sinks, fused))
        plain.add(*new)
        self.sealed_in_time(store)

    def sealed_in_time(self, store):
        most = self.config.window + self.config.max_draft + SIZE
        assert all(length - sealed * SIZE < most for length, sealed in zip(store.held.lengths, store.held.sealed))

    @rule(data=st.data(), n=st.integers(1, 40), fused=st.booleans())
    def steps(self, data, n, fused):
        store, plain = self.pick(data)
        k, v, valid = self.tokens(data, store, n)
        for i in range(n):
            at = slice(i, i + 1)
            new = k[:, :, at], v[:, :, at], None if valid is None else valid[:, at]
            store.append(*new)
            plain.add(*new)
            store.seal_due(Probe(self.config.sinks, fused))
        self.sealed_in_time(store)

    @rule(data=st.data(), share=st.floats(0, 1))
    def crop(self, data, share):
        store, plain = self.pick(data)
        length = int(share * store.length)
        if length:
            store.crop_to(store.table_of_rows.cropped(store.held, length))
            store.table_of_rows.trim([store.held])
            plain.keep(length)

    @rule(data=st.data())
    def map_rows(self, data):
        store, plain = self.pick(data)
        rows = st.lists(st.integers(0, store.batch - 1), min_size=1, max_size=4)
        index = torch.tensor(data.draw(rows, label="rows"))
        map_rows(store, index)
        plain.rows(index)

    @precondition(lambda self: len(self.pairs) < 4)
    @rule(data=st.data())
    def copy(self, data):
        store, plain = self.pick(data)
        self.pairs.append((store.copy(copy.deepcopy(store.table_of_rows)), plain.copy()))

    @precondition(lambda self: len(self.pairs) > 1)
    @rule(data=st.data())
    def drop(self, data):
        self.pick(data)
        self.pairs.pop(self.touched)
        self.touched = 0
        gc.collect(0)

    @rule(data=st.data())
    def reset(self, data):
        store, plain = self.pick(data)
        store.reset()
        store.table_of_rows.clear()
        plain.keep(0)

    @rule(data=st.data(), fused=st.booleans())
    def reindex(self, data, fused):
        store, _ = self.pick(data)
        if store.full_blocks:
            store.table_of_rows.blocks.unshare()  # what others hold is not indexed again
            for ids, sealed in zip(store.block_table.long(), store.held.sealed):
                store.pool.fields["bounds"][ids[:sealed]] = torch.nan
            reindex(store, Probe(self.config.sinks, fused))

    @invariant()
    def all_is_well(self):
        for store, plain in self.pairs:
            check(store, plain, self.config)
        check_ids([store for store, _ in self.pairs])
        check_attention(*self.pairs[self.touched])


Stores.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestStores = Stores.TestCase


# ---------------------------------------------------------------------- by hand


def fill(store: LayerStore, n: int) -> None:
    new = torch.randn(store.batch, HEADS, n, KEY), torch.randn(store.batch, HEADS, n, VALUE)
    store.extend(*new, None, Probe(store.sinks))


def map_rows(store: LayerStore, index: torch.Tensor) -> None:
    table, order = store.table_of_rows, index.tolist()
    rows = store.held.mapped(order)
    store.map_rows(index, rows)
    table.map_rows(order, rows)


CONFIG = SparseConfig(block_size=SIZE, sinks=4, window=16, max_draft=4)


@pytest.mark.parametrize("window", [1, 16, 44, 64])
@pytest.mark.parametrize("draft", [0, 4, 16])
def test_ring_has_room_for_a_block_that_fills_up(window, draft):
    config = SparseConfig(block_size=SIZE, window=window, max_draft=draft)
    assert ring_tokens(config) % SIZE == 0
    assert ring_tokens(config) >= window + draft + SIZE


def test_buckets():
    sizes = [bucket(n) for n in range(1, 5000)]
    assert all(size >= n for n, size in enumerate(sizes, 1))
    assert sizes == sorted(sizes)
    assert all(size <= max(16, 1.25 * n + 1) for n, size in enumerate(sizes, 1))
    copied = sum(a for a, b in zip(sorted(set(sizes)), sorted(set(sizes))[1:]) if b)
    assert copied < 6 * 5000, "growing item by item must copy each item a few times only"


@pytest.mark.parametrize("fused", [False, True])
def test_a_block_that_a_step_seals_can_be_read_at_once(monkeypatch, fused):
    """A pass over drafts seals and attends several times: what it seals does not go by a copy stream."""
    imitate(monkeypatch)
    budget = HostBudget(OffloadConfig(max_host_bytes=1 << 24))
    store, plain = make_store(CONFIG, budget, 2, copy_streams=CopyStreams()), Plain(2)
    new = torch.randn(2, HEADS, 100, KEY), torch.randn(2, HEADS, 100, VALUE)
    store.extend(*new, None, Probe(CONFIG.sinks, fused))
    plain.add(*new, None)
    assert store.writer.saved is not None, "of prompts blocks do"
    store.writer.wait()
    before = store.full_blocks
    for _ in range(40):
        new = torch.randn(2, HEADS, 1, KEY), torch.randn(2, HEADS, 1, VALUE)
        store.append(*new)
        plain.add(*new, None)
        store.seal_due(Probe(CONFIG.sinks, fused))
        check_attention(store, plain)
    assert store.full_blocks > before + 1


def test_layers_may_take_different_numbers_of_columns():
    """The first one's answer about the rows is not the next one's, although both began with the same rows."""
    first = make_store(CONFIG, None, 2)
    like = torch.zeros(2, HEADS, 1, KEY), torch.zeros(2, HEADS, 1, VALUE)
    second = LayerStore(*like, CONFIG, None, first.table_of_rows)
    second.pool.add_field("bounds", (HEADS, 2, KEY), second.dtype)
    assert first.held is second.held
    for store, columns in ((first, 100), (second, 70)):
        new, plain = (torch.randn(2, HEADS, columns, KEY), torch.randn(2, HEADS, columns, VALUE)), Plain(2)
        store.extend(*new, None, Probe(CONFIG.sinks))
        plain.add(*new, None)
        check(store, plain, CONFIG)


def test_labels_are_of_the_channels_of_their_row():
    """Rows of different lengths are sealed one by one, and indexed again so, each with channels of its own."""
    store = make_store(CONFIG, None, 3)
    store.pool.add_field("codes", (HEADS, SIZE, 1), torch.uint8)
    store.pool.add_field("qparams", (HEADS, SIZE, 2), torch.float16)
    norms = torch.tensor([[0.0], [1.0]]).repeat(3, HEADS, 1, 2)
    k, v = torch.randn(3, HEADS, 120, KEY), torch.randn(3, HEADS, 120, VALUE)
    valid = torch.arange(120) >= torch.tensor([[0], [30], [7]])

    def labels(*first: int) -> SimpleNamespace:
        channels = torch.tensor(first, dtype=torch.int32)[:, None, None] + torch.arange(2, dtype=torch.int32)
        channels = channels.expand(3, HEADS, 2).contiguous()
        return SimpleNamespace(sealing=lambda store: Index(KEY, channels=channels, norms=norms, **store.pool.fields))

    def check_labels(*first: int) -> None:
        for row, channel in enumerate(first):
            ids = torch.from_numpy(store.table_of_rows.blocks.host[row, : store.held.sealed[row]]).long()
            digits, params = unpack_digits(store.pool.fields["codes"][ids]), store.pool.fields["qparams"][ids].float()
            found = (digits * params[..., :1] + params[..., 1:]).transpose(0, 1).flatten(1, 2)
            expected = k[row][:, valid[row]][:, : found.shape[1], channel : channel + 2]
            torch.testing.assert_close(found, expected, rtol=0, atol=0.02)

    store.extend(k, v, valid, labels(0, 1, 2))
    assert len(set(store.held.sealed)) > 1
    check_labels(0, 1, 2)
    reindex(store, labels(2, 0, 1))
    check_labels(2, 0, 1)


def test_blocks_of_a_prompt_go_to_the_host_in_one_piece(monkeypatch):
    """They follow each other in the pool, rows beside each other: one large copy, not one for each."""
    imitate(monkeypatch)
    wrote, write = [], BlockPool.write

    def note(self, ids, kv, first=None):
        wrote.append((first, len(kv)))
        write(self, ids, kv, first)

    monkeypatch.setattr(BlockPool, "write", note)
    store = make_store(CONFIG, HostBudget(OffloadConfig(max_host_bytes=1 << 24)), 2, copy_streams=CopyStreams())
    fill(store, 100)
    store.writer.wait()
    assert wrote == [(0, 2 * store.full_blocks)]
    host, n = store.table_of_rows.blocks.host, store.full_blocks
    assert host[:, :n].T.flatten().tolist() == list(range(2 * n))


def test_churn_does_not_grow_the_pool():
    """Beams that die leave their physical blocks to be found again."""
    store = make_store(CONFIG, None, 4)
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        fill(store, 4)
        map_rows(store, torch.randint(0, 4, (4,), generator=generator))
        if store.length > 160:
            store.crop_to(store.table_of_rows.cropped(store.held, 40))
            store.table_of_rows.trim([store.held])
    named = store.batch * store.block_table.shape[1]
    assert store.pool.capacity <= 2 * bucket(named)


def test_trimmed_blocks_are_free():
    """All of them: one that stays named would never be given out again."""
    table = RowTable(CONFIG)
    table.start(2, 100)
    table.blocks.reserve([0, 1], [0, 0], [5, 3])
    table.blocks.trim(np.array([2, 3]))
    assert (table.blocks.host >= 0).sum(1).tolist() == [2, 3]
    assert table.ids.take(3).max() < 8  # none beyond the eight that there were


def test_a_pool_that_may_not_grow_is_unchanged():
    token = HEADS * SIZE * (KEY + VALUE) * 4
    budget = HostBudget(OffloadConfig(max_host_bytes=40 * token))
    ids = BlockIds()
    pool = BlockPool(
        heads=HEADS,
        block_size=SIZE,
        token_dim=KEY + VALUE,
        split=KEY,
        dtype=torch.float32,
        device=torch.device("cpu"),
        host=budget,
        capacity=16,
        ids=ids,
    )
    ids.take(16)
    pool.fit()
    before = (pool.capacity, budget.used, pool.kv.data_ptr())

    class User:
        def wait_for_copies(self):
            """Nothing is on its way."""

    user = User()
    pool.register(user)
    ids.take(20)
    with pytest.raises(MemoryError, match="max_host_bytes"):
        pool.fit()
    assert (pool.capacity, budget.used, pool.kv.data_ptr()) == before


def test_a_short_prompt_on_a_cpu_takes_little():
    """A pool has one block for a prompt that fills none, and grows with what comes."""
    store = make_store(SparseConfig(block_size=SIZE), None, 1)
    fill(store, 5)
    assert store.pool.capacity == 1
    fill(store, 20 * SIZE)
    assert store.full_blocks <= store.pool.capacity < 1.25 * store.full_blocks + 1


class Numbers(TorchDispatchMode):
    """Counts tensors that torch makes of a Python number, to copy it."""

    made = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.made += function is torch.ops.aten.lift_fresh.default and args[0].ndim == 0
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_ids_come_into_the_table_without_a_number_that_is_copied(rows):
    """On a GPU the host would wait for that, in each step in which a row's block becomes full."""
    table = RowTable(CONFIG)
    table.start(4, 100)
    held = table.blocks.on[torch.device("cpu")]
    with Numbers() as numbers:
        table.blocks.reserve(range(rows), [0] * rows, [1] * rows)
    assert torch.equal(held, torch.from_numpy(table.blocks.host)) and (held[:rows, 0] >= 0).all()
    assert numbers.made == 0
