"""Blocks on their way to the host and back: nobody reads what has not arrived, no buffer is filled too early.

Without a GPU copy streams are imitated: what is given to one happens only when somebody waits for it.
"""

from __future__ import annotations

import copy
import warnings
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from caches import FULL, TIGHT, two_level
from inside import grow, grow_of_pools, grows_by, sealed_pieces
from lazy_copy_streams import Late, LazyCopyStream, chunks_of, imitate, logits
from models import build, model, prompt, reference
from transformers import DynamicCache

from hf_sparsekv import SparseCache
from hf_sparsekv.kv import pool
from hf_sparsekv.offload import device_pool
from hf_sparsekv.offload.copy_streams import CopyStream, CopyStreams
from hf_sparsekv.policies.ahead.lag import LaggingBlockPolicy


@pytest.fixture
def lazy(monkeypatch):
    imitate(monkeypatch)
    sealed_pieces(monkeypatch, 3 * 2 * 2 * 16 * 32 * 4)  # three blocks: a prompt is several pieces
    return LazyCopyStream.made


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("llama", (150,)), ("llama", (33, 100, 17)), ("llama", (20,) * 5), ("gemma3", (150, 1, 60)), ("gemma3", (70, 40))],
)
def test_chunks_and_steps(lazy, name, sizes):
    ids = prompt(2, sum(sizes) + 40)["input_ids"]
    chunks = chunks_of(ids, *sizes)
    cache, net = two_level(**FULL), reference(name)
    found = logits(model(name), cache, chunks)
    torch.testing.assert_close(found, logits(net, DynamicCache(config=net.config), chunks), atol=2e-4, rtol=1e-4)
    assert any(copy_stream.given for copy_stream in lazy), "nothing went by a lane"
    assert cache.stats().host_to_device_bytes > 0 or len(sizes) == 1


@pytest.mark.parametrize("pads", [(0, 30), None])
def test_selections_do_not_depend_on_lanes(pads):
    """Sparse steps after a prompt in pieces: the same with and without copy streams, padded or not."""
    inputs = prompt(2, 150, pads)
    answers = []
    for lazily in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if lazily:
                imitate(patch)
            cache = two_level(**TIGHT)
            answers.append(
                model("llama").generate(
                    **inputs, past_key_values=cache, max_new_tokens=40, do_sample=False, prefill_chunk_size=64
                )
            )
            assert cache.stats().sparse_calls > 0
    assert torch.equal(*answers)


@pytest.mark.parametrize("attn", ["sparsekv", "eager"])
def test_buffers_are_given_back(lazy, attn):
    """After each prompt; also where another attention implementation reads the keys, and nothing is selected."""
    net, cache = build("llama", attn), two_level(**FULL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the bypass
        logits(net, cache, prompt(2, 200)["input_ids"].split([90, 110], dim=1))
    assert any(copy_stream.given for copy_stream in lazy)
    assert all(buffer is None for copy_stream in lazy for buffer in copy_stream.buffers)


def test_changes_between(lazy, tmp_path):
    """Crop, copies, rows and files right after a prompt whose blocks are still on their way."""
    ids = prompt(2, 200)["input_ids"]
    net = reference("llama")

    def filled():
        cache = two_level(**FULL)
        logits(model("llama"), cache, (ids[:, :150],))
        assert any(layer.store.writer.saved is not None for layer in cache.sparse_layers)
        return cache

    def expect(cache, kept, rows=slice(None)):
        cached = DynamicCache()
        logits(net, cached, (ids[rows, :kept],))
        rest = ids[rows, kept : kept + 40].split(1, dim=1)  # two blocks
        want = logits(net, cached, rest)
        torch.testing.assert_close(logits(model("llama"), cache, rest), want, atol=2e-4, rtol=1e-4)

    cache = filled()
    cache.crop(-110)
    expect(cache, 40)
    cache = filled()
    copied = copy.deepcopy(cache)
    expect(copied, 150)
    expect(cache, 150)
    cache = filled()
    cache.reorder_cache(torch.tensor([1, 1]))
    expect(cache, 150, [1, 1])
    cache = filled()
    cache.reset()
    logits(model("llama"), cache, (ids[:, :170],))
    expect(cache, 170)
    cache = filled()
    cache.save(tmp_path / "saved")
    expect(SparseCache.load(tmp_path / "saved", model_config=net.config), 150)


def test_recycled_slots_are_written_one_by_one(lazy):
    """Physical blocks that do not follow each other: a cropped copy's are used again."""
    ids = prompt(2, 330)["input_ids"]
    cache, stock = two_level(**FULL), DynamicCache()
    net = reference("llama")
    for keep in (16, 48, 32):
        logits(model("llama"), cache, (ids[:, cache.get_seq_length() :],))
        cache.crop(keep)
    part = (ids[:, 32:300], *ids[:, 300:].split(1, dim=1))
    logits(net, stock, (ids[:, :32],))
    torch.testing.assert_close(logits(model("llama"), cache, part), logits(net, stock, part), atol=2e-4, rtol=1e-4)


def test_an_error_on_the_way(lazy, monkeypatch):
    """A prompt that fails in its second layer leaves a cache that says so, and can be used again after reset()."""
    ids = prompt(2, 150)["input_ids"]
    cache = two_level(**FULL)
    logits(model("llama"), cache, (ids[:, :60],))
    original = pool.BlockPool.fit

    def full(self):
        if self is cache.sparse_layers[1].store.pool:
            raise MemoryError("host memory is full")
        original(self)

    monkeypatch.setattr(pool.BlockPool, "fit", full)
    with pytest.raises(MemoryError, match="host memory is full"):
        logits(model("llama"), cache, (ids[:, 60:],))
    monkeypatch.setattr(pool.BlockPool, "fit", original)
    with pytest.raises(RuntimeError, match="incomplete"):
        logits(model("llama"), cache, (ids[:, :1],))
    cache.reset()
    net, chunks = reference("llama"), chunks_of(ids, 130)
    want = logits(net, DynamicCache(), chunks)
    torch.testing.assert_close(logits(model("llama"), cache, chunks), want, atol=2e-4, rtol=1e-4)


def test_layers_change_frames_one_after_the_other(lazy, monkeypatch):
    """All layers share pages and page tables: one layer's pending copies end before another layer changes pages."""
    seen, on_copy_stream = [], []
    behind, mark, original = LazyCopyStream.after_current_stream, LazyCopyStream.mark, device_pool.residency

    @contextmanager
    def noted(self):
        with behind(self):
            on_copy_stream.append(self)
            try:
                yield
            finally:
                on_copy_stream.pop()

    def marked(self):
        event = mark(self)
        self.looked = event.at
        return event

    def residency(*args, **kwargs):
        if not on_copy_stream:
            seen.append(all(copy_stream.done >= getattr(copy_stream, "looked", 0) for copy_stream in lazy))
        return original(*args, **kwargs)

    monkeypatch.setattr(LazyCopyStream, "after_current_stream", noted)
    monkeypatch.setattr(LazyCopyStream, "mark", marked)
    monkeypatch.setattr(device_pool, "residency", residency)
    ids = prompt(2, 180)["input_ids"]
    cache = two_level(**TIGHT)
    logits(model("llama"), cache, (ids[:, :150], *ids[:, 150:154].split(1, dim=1), ids[:, 154:157], ids[:, 157:158]))
    assert len(seen) > 4
    assert all(seen)


def test_a_page_table_grows_after_what_others_change_in_it(lazy):
    """Another layer's fetch may evict a block of this one, by the address of the table as it was."""
    ids = prompt(2, 150)["input_ids"]
    cache = two_level(**TIGHT)
    logits(model("llama"), cache, (ids,))
    store = next(layer.store for layer in cache.sparse_layers if layer.store.pages.pool is not None)
    pages = store.pages
    late = Late(lazy[0])
    lazy[0].left.append(lambda: pages.table.fill_(-1))  # everything is evicted
    lazy[0].given += 1
    late.at = lazy[0].given
    pages.pool.busy_until(late)
    grow(store.pool, store.pool.capacity + 40)
    pages.enter(1)
    assert len(pages.table) == store.pool.capacity
    assert bool((pages.table == -1).all())


def test_memory_that_turns_out_not_to_be_pinnable(lazy, monkeypatch):
    """After some blocks have gone by a copy stream, when the pool grows."""
    ids = prompt(2, 300)["input_ids"]
    net, cache, stock = reference("llama"), two_level(**FULL), DynamicCache()
    pinned, own = [True], grow_of_pools()

    def fail(self, capacity):
        own(self, capacity)
        pinned[0] = False

    grows_by(monkeypatch, fail)
    monkeypatch.setattr(pool.BlockPool, "direct", property(lambda self: self.host is not None and pinned[0]))
    plan = LaggingBlockPolicy.plan
    monkeypatch.setattr(
        LaggingBlockPolicy,
        "plan",
        lambda self, store: replace(plan(self, store), ahead=store.full_blocks > 0),
    )
    parts = (ids[:, :100], ids[:, 100:190], *ids[:, 190:200].split(1, dim=1))
    found = logits(model("llama"), cache, parts)
    assert not pinned[0]
    torch.testing.assert_close(found, logits(net, stock, parts), atol=2e-4, rtol=1e-4)


def test_a_lane_is_waited_for_when_it_dies(monkeypatch):
    """Its cache may be gone, and the memory that it still uses given away."""
    waited = []
    here = SimpleNamespace(wait_stream=waited.append)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "a stream")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: here)
    for capturing in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda value=capturing: value)
        copy_stream = CopyStream(torch.device("cpu"), 2)
        del copy_stream
        assert waited == ([] if capturing else ["a stream"])


@pytest.mark.parametrize("way", ["copied", "reset", "reordered"])
def test_what_is_being_chosen_is_waited_for(lazy, monkeypatch, way):
    """The blocks of the first step are chosen beside the computation: whoever copies or changes them comes after."""
    cache, checked = two_level(**TIGHT), []
    with torch.no_grad():
        model("llama")(prompt(2, 300)["input_ids"], past_key_values=cache)
    assert cache.layers[-1].policy.chosen and lazy[0].done < lazy[0].given
    name = {"copied": "copy", "reset": "reset", "reordered": "map_rows"}[way]
    method = getattr(LaggingBlockPolicy, name)

    def arrived(self, *args):
        checked.append(all(copy_stream.done == copy_stream.given for copy_stream in lazy))
        return method(self, *args)

    monkeypatch.setattr(LaggingBlockPolicy, name, arrived)
    if way == "copied":
        copy.deepcopy(cache)
    elif way == "reset":
        cache.reset()
    else:
        cache.reorder_cache(torch.tensor([1, 0]))
    assert checked[-1]


@pytest.fixture
def said(monkeypatch) -> list[str]:
    """Calls of streams, in order, where one computes and the others copy."""
    said: list[str] = []

    def stream(name):
        def record_event():
            said.append(f"{name} ends {sum(' ends ' in one for one in said)}")
            return said[-1].removeprefix(f"{name} ends ")

        return SimpleNamespace(
            name=name,
            record_event=record_event,
            wait_stream=lambda other: said.append(f"{name} after {other.name}"),
            wait_event=lambda event: said.append(f"{name} waits for {event}"),
        )

    current = [stream("computing")]

    @contextmanager
    def inside(other):
        current.append(other)
        yield
        current.pop()

    made = iter("abc")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream(next(made)))
    monkeypatch.setattr(torch.cuda, "stream", inside)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)  # copy streams that are deleted
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    return said


def test_a_buffer_is_filled_after_its_last_copy(said):
    """Two buffers: the third piece waits for the first one's copy, and a larger one gets memory of its own."""
    copies = CopyStream(torch.device("cpu"), 2)
    for piece, tokens in enumerate((8, 8, 4, 9)):
        copies.take((tokens,), torch.float32)
        copies.run(lambda piece=piece: said.append(f"copy {piece}"))
    each = [["a after computing", f"copy {piece}", f"a ends {piece}"] for piece in range(4)]
    assert said == [*each[0], *each[1], "computing waits for 0", *each[2], *each[3]]


def test_blocks_read_ahead_are_waited_for(said):
    """By the layer that takes them, and by whoever changes these blocks before one has taken them."""
    streams, read, device = CopyStreams(), lambda out: said.append("read"), torch.device("cpu")
    used: list = []
    for layer in (1, 2, 3):
        streams.read_ahead(layer, (8,), torch.float32, device, read, used.append)
        assert streams.arrived(layer, device) is not None
    each = [["a after computing", "read", f"a ends {n}", f"computing waits for {n}"] for n in range(3)]
    assert said == [*each[0], *each[1], "computing waits for 0", *each[2]]
    assert used == ["0", "1", "2"]
    assert streams.arrived(3, device) is None
    streams.read_ahead(1, (8,), torch.float32, device, read, used.append)
    assert streams.arrived(2, device) is None
