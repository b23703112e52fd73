"""Predictive selection on a second device: what follows, what is late, and who waits for whom."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from caches import predictive
from inside import grow
from models import model, prompt
from oracle import TOLERANCE
from test_predictive import TIGHT, PredictiveRace, decode

from hf_sparsekv import PredictiveConfig, SparseCache, SparseConfig
from hf_sparsekv.kv.read_back import materialise, tokens
from hf_sparsekv.kv.store import LayerStore
from hf_sparsekv.layers.changes import drop_tokens
from hf_sparsekv.layers.replay import Replay
from hf_sparsekv.policies.ahead.second_device.packed import Packed
from hf_sparsekv.policies.ahead.second_device.replica import PeerDevice, PrimaryStore
from hf_sparsekv.policies.base import Policy
from hf_sparsekv.policies.shared import Shared


class Slow:
    """The end of work on a second device that takes some looks to come."""

    waits = 0

    def __init__(self, looks: float) -> None:
        self.looks = looks

    def query(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def wait(self, stream) -> None:
        Slow.waits += 1
        self.looks = 0


@pytest.fixture
def slow(monkeypatch):
    """Makes second devices slow: by how many looks, a list that is gone through again and again."""

    def install(*looks: float) -> None:
        rest = itertools.cycle(looks)
        monkeypatch.setattr(PeerDevice, "mark", lambda self: Slow(next(rest)))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: None)
        Slow.waits = 0

    return install


def test_a_late_selection_is_waited_for_if_asked(slow):
    expected = decode(predictive(False, **TIGHT), steps=40)
    slow(float("inf"))
    cache = predictive(False, **TIGHT, cache_rank="cpu", strict=True)
    assert torch.equal(decode(cache, steps=40), expected)
    assert cache.stats().late == 0 and Slow.waits == 80


def test_without_waiting_the_selection_before_is_used_and_counted(slow):
    """Not for ever: nothing new is asked for until what is late has come. A block that was sealed is waited for."""
    slow(2)
    cache = predictive(False, **TIGHT, cache_rank="cpu")
    expected = decode(predictive(False, **TIGHT), steps=40)
    found = decode(cache, steps=40)
    stats = cache.stats()
    assert stats.dense_calls == 0
    assert 20 < stats.late < 70
    assert not torch.equal(found, expected)
    assert f"{stats.late} of 80 selections late" in str(stats)
    assert stats.since(stats).late == 0
    cache.reset()
    assert cache.stats().late == 0


@pytest.mark.parametrize("looks", [(1,), (100,), (5, 0, 1)])
def test_every_token_is_near_or_could_have_been_chosen(slow, looks):
    """However late: what a step attends to was chosen among all the blocks that have left its ring."""
    slow(*looks)
    cache = predictive(False, **TIGHT, cache_rank="cpu")
    net, ids = model("llama"), prompt(2, 200, seed=5)["input_ids"]
    with torch.no_grad():
        net(ids[:, :150], past_key_values=cache)
        for token in ids[:, 150:].split(1, dim=1):
            before = [layer.store.full_blocks for layer in cache.sparse_layers]
            net(token, past_key_values=cache)
            for layer, full_blocks in zip(cache.sparse_layers, before):
                policy = layer.policy
                assert policy.known == full_blocks
                held = policy.packs[policy.at].held
                assert ((held >= 0).sum(-1) == 32).all() and held.max() < full_blocks * 16


def test_what_a_step_attends_to_is_not_being_written():
    cache = predictive(False, **TIGHT, cache_rank="cpu")
    ids, net = prompt(2, 170, seed=5)["input_ids"], model("llama")
    with torch.no_grad():
        net(ids[:, :150], past_key_values=cache)
        policies, kept = [layer.policy for layer in cache.sparse_layers], {}
        for policy in policies:

            def watch(*args, attend=policy.attend, policy=policy):
                out = attend(*args)
                kept[policy] = policy.packs[policy.at].kv, policy.packs[policy.at].kv.clone()
                return out

            policy.attend = watch
        for token in ids[:, 150:].split(1, dim=1):
            net(token, past_key_values=cache)
            for policy in policies:
                assert policy.pending is not None, "the step has made a selection"
                torch.testing.assert_close(*kept[policy], rtol=0, atol=0, equal_nan=True)
                assert not torch.equal(policy.packs[0].held, policy.packs[1].held)


def test_a_crop_behind_captured_steps():
    """A trial step is taken back on the other device as well, which has to reopen the same blocks."""
    race = PredictiveRace(captured=True, cache_rank="cpu", strict=True)
    race.feed(prompt(1, 150)["input_ids"])
    race.run(25)
    stores = [layer.store for layer in race.ours.sparse_layers]
    assert race.runner.replays == 25
    assert all((store.replica.length, store.replica.full_blocks) == (175, 9) for store in stores)
    race.crop(20)
    assert all((store.replica.length, store.replica.full_blocks) == (155, 8) for store in stores)
    assert race.run(40, seed=3) < TOLERANCE


# ---------------------------------------------------------------------- copies, files, numbers


def test_a_copy_goes_its_own_way():
    """The copy's second device follows it, too."""
    cache = predictive(False, **TIGHT, cache_rank="cpu")
    decode(cache, steps=5)
    replica = copy.deepcopy(cache)
    ids = prompt(2, 40, seed=8)["input_ids"]
    with torch.no_grad():
        found = [[model("llama")(t, past_key_values=c).logits for t in ids.split(1, dim=1)] for c in (cache, replica)]
    assert torch.equal(torch.cat(found[0]), torch.cat(found[1]))
    stores = [layer.store for c in (cache, replica) for layer in c.sparse_layers]
    assert all(isinstance(store, PrimaryStore) and store.replica.full_blocks == store.full_blocks for store in stores)
    assert len({id(store.replica) for store in stores}) == 4


def test_files_are_not_for_a_second_device(tmp_path):
    cache = predictive(False, **TIGHT)
    decode(cache, steps=5)
    cache.save(tmp_path / "cache")
    settings = {field.name: getattr(cache.config, field.name) for field in dataclasses.fields(cache.config)}
    config = PredictiveConfig(**{**settings, "cache_rank": "cpu"})
    with pytest.raises(ValueError, match="cannot be loaded for a second device yet"):
        SparseCache.load(tmp_path / "cache", config)


# ---------------------------------------------------------------------- changes of what is cached


def hide(cache, ends) -> None:
    """A mask of a later turn hides all columns of row ``i`` from ``ends[i]`` on."""
    columns = torch.arange(cache.get_seq_length())
    assert drop_tokens(
        cache, (columns < torch.tensor(ends)[:, None]) & cache.sparse_layers[0].store.held.valid_columns("cpu")
    )


def begin_again(cache) -> None:
    cache.reset()
    more(cache, prompt(2, 100, seed=4)["input_ids"])


@torch.no_grad()
def more(cache, ids) -> torch.Tensor:
    mask = cache.joined_rows().valid_columns("cpu") if cache.get_seq_length() else ids.new_ones(2, 0)
    return model("llama")(
        ids, attention_mask=torch.cat((mask.long(), torch.ones_like(ids)), 1), past_key_values=cache
    ).logits


CHANGES = {
    "nothing": lambda cache: None,
    "a crop within the ring": lambda cache: cache.crop(-3),
    "a crop that takes blocks back": lambda cache: cache.crop(-60),
    "a crop to nothing": lambda cache: [cache.crop(-cache.get_seq_length()), begin_again(cache)],
    "last tokens that are masked": lambda cache: hide(cache, (175, 173)),
    "whole blocks that are masked": lambda cache: hide(cache, (180, 120)),
    "rows in another order": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "rows that are chosen": lambda cache: cache.batch_select_indices(torch.tensor([1, 1])),
    "rows that are repeated": lambda cache: [
        cache.batch_select_indices(torch.tensor([1])),
        cache.batch_repeat_interleave(2),
    ],
    "another piece of a prompt": lambda cache: more(cache, prompt(2, 37, seed=6)["input_ids"]),
    "a reset": begin_again,
    "keys that something else reads": lambda cache: [layer.keys for layer in cache.sparse_layers],
}


@pytest.fixture(scope="module")
def both() -> list:
    """After a prompt and 30 steps: a cache on one device, and one with a second device. Tests change copies of them."""
    caches = [predictive(False, **TIGHT, **changes) for changes in ({}, {"cache_rank": "cpu", "strict": True})]
    for cache in caches:
        with torch.no_grad():
            model("llama")(**prompt(2, 150, (0, 21)), past_key_values=cache)
        for token in prompt(2, 30, seed=5)["input_ids"].split(1, dim=1):
            more(cache, token)
    return caches


@pytest.mark.parametrize("change", CHANGES)
def test_the_other_device_follows_each_change(change, both):
    """It holds the same tokens, and what comes next is what a cache on one device gives."""
    found = []
    for cache in map(copy.deepcopy, both):
        CHANGES[change](cache)
        if cache.config.cache_rank is not None:
            check_replicas(cache)
        found.append([more(cache, token) for token in prompt(2, 20, seed=6)["input_ids"].split(1, dim=1)])
    assert torch.equal(*map(torch.cat, found))
    check_replicas(cache)


def check_replicas(cache) -> None:
    """Each replica holds the rows of its store, their blocks, and the same recent tokens."""
    for layer in cache.sparse_layers:
        store, replica = layer.store, layer.store.replica
        assert replica.held.same(store.held)
        there = tokens(replica)
        for row, (length, mine) in enumerate(zip(store.held.lengths, tokens(store))):
            assert torch.equal(mine[:, :length], there[row, :, :length])


# ---------------------------------------------------------------------- order


class Line:
    """A stream of which only the order is known: what it comes behind."""

    def __init__(self, name: str) -> None:
        self.name, self.after_current_stream = name, set()

    def wait_stream(self, other: Line) -> None:
        self.after_current_stream |= {other.name} | other.after_current_stream

    def record_event(self):
        return None


@pytest.fixture
def lines(monkeypatch):
    """Streams of two devices that are one here; ``now`` names what runs on the current one."""
    home, there, side = Line("home"), Line("there"), Line("side")
    now = [home]

    @contextmanager
    def on(stream):
        now.append(stream)
        yield
        now.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: home)
    monkeypatch.setattr(torch.cuda, "stream", on)
    peer = PeerDevice(torch.device("cpu"))
    peer.stream, peer._side[peer.device] = there, side
    return peer, now, home, there, side


def test_trials_switch_copying_off_where_it_is_done(lines, monkeypatch):
    peer, now, *_ = lines
    seen = []
    peer.enabled = SimpleNamespace(
        zero_=lambda: seen.append(("off", now[-1].name)), fill_=lambda value: seen.append((value, now[-1].name))
    )
    with peer.paused():
        pass
    assert seen == [("off", "there"), (1, "there")]


def test_all_that_is_read_beside_the_computation_is_kept_for_it(lines):
    peer, _, _, there, side = lines
    kept = []
    given, other = (SimpleNamespace(record_stream=kept.append, device=torch.device(d)) for d in ("cpu", "meta"))
    with peer.entered(peer.device, given, None, other):
        pass
    assert kept == [side, there]


def test_a_captured_step_forks_by_layers_and_comes_back_whatever_happens(lines):
    """Each layer begins behind its own attention, with a launch that overlaps nothing."""
    peer, now, side, *_ = lines
    peer._others, seen = [Line("other")], []
    peer._gate = SimpleNamespace(zero_=lambda: seen.append((now[-1].name, set(now[-1].after_current_stream))))
    for layer in range(4):
        side.wait_stream(Line(f"attention {layer}"))
        with pytest.raises(ValueError, match="in the middle"), peer.forked(peer.device, layer):
            raise ValueError("in the middle")
    assert [name for name, _ in seen] == ["there", "other", "there", "other"]
    assert all(f"attention {layer}" in behind for layer, (_, behind) in enumerate(seen))
    assert "other" not in seen[2][1], "layers of different lanes do not wait for each other"
    assert "there" in seen[1][1], "but all wait for what was under way there before"
    assert "there" not in side.after_current_stream
    peer.rejoin(side)
    assert {"there", "other"} <= side.after_current_stream
    side.after_current_stream.clear()
    peer.rejoin(side)
    assert not side.after_current_stream, "it has come back"


def test_what_runs_beside_a_step_begins_behind_it_and_comes_back(lines):
    _, now, home, _, side = lines
    replay, ran = Replay(None, side, Shared(Policy, SparseConfig(), None)), []
    replay.late(lambda: ran.append(("late", now[-1].name)))
    replay.on_side_stream(lambda: ran.append(("at once", now[-1].name)))
    replay.behind(lambda: ran.append(("behind", now[-1].name)))
    assert ran == [("at once", "side")]
    assert "home" in side.after_current_stream and "side" not in home.after_current_stream
    replay.come_back()
    assert "side" in home.after_current_stream and len(ran) == 1, "a failed capture does not run what is left"
    replay.join()
    assert ran[1:] == [("behind", "side")]
    replay.run_late()
    assert ran[2:] == [("late", "side")]


def test_layers_wait_once_for_what_all_of_them_have_handed_over(lines):
    """On both streams: rows of chosen tokens are moved on the one beside the computation."""
    peer, _, home, *_ = lines
    peer.join(peer.device)
    assert home.after_current_stream == {"there", "side"}
    home.after_current_stream.clear()
    peer.join(peer.device)
    assert not home.after_current_stream
    for again in (peer.on_stream, lambda: peer.entered(peer.device), peer.paused):
        with again():
            pass
        peer.join(peer.device)
        assert "there" in home.after_current_stream
        home.after_current_stream.clear()


def test_what_a_trial_has_changed_is_put_back_before_the_replay(monkeypatch):
    """A graph's work on the other device waits for this one's, not for that of the other one's stream."""
    race = PredictiveRace(captured=True, cache_rank="cpu")
    race.feed(prompt(1, 130)["input_ids"])
    order, policy = [], race.ours.sparse_layers[0].policy
    monkeypatch.setattr(PeerDevice, "join", lambda self, home: order.append("join"))
    monkeypatch.setattr(PeerDevice, "on_stream", lambda self: order.append("there") or nullcontext())
    policy.restore_device(policy.snapshot())
    assert order == ["there", "there", "join"]


def test_memory_of_a_captured_step_is_there_before():
    """A graph has no pool of its own on the other device."""
    race = PredictiveRace(captured=True, cache_rank="cpu")
    race.feed(prompt(1, 130)["input_ids"])
    peer, record, made = race.ours.shared.peer, race.runner.recorder.record, []
    buffers = peer._buffers
    buffers.clear()

    def watch(run, device, saved):
        made.append(dict(buffers))
        return record(run, device, saved)

    race.runner.recorder.record, race.runner.recorder.warm_up = watch, lambda run, device: None
    race.run(2)
    assert race.runner.captures == len(made) == 1
    handed_over = {"q", "k", "v", "past", "now", "after"}  # which kernels read in place
    assert {name for name, *_ in buffers} - handed_over == {name for name, *_ in made[0]} - handed_over
    assert all(buffers[key] is held for key, held in made[0].items())


def test_a_captured_step_knows_where_the_other_device_keeps_its_blocks():
    cache = predictive(False, **TIGHT, cache_rank="cpu")
    decode(cache, steps=5)
    store = cache.sparse_layers[0].store
    before = store.addresses
    grow(store.replica.pool, 2 * store.replica.pool.capacity)
    assert store.addresses != before


def test_whoever_reads_the_other_devices_blocks_comes_behind_its_work(monkeypatch):
    """In a captured step that has been seen to before."""
    cache, order = predictive(False, **TIGHT, cache_rank="cpu", start_length=1000), []
    decode(cache, steps=5)
    store = cache.sparse_layers[0].store

    @contextmanager
    def entered(self, home, *used):
        order.append(f"enters with {len(used)}")
        yield
        order.append("leaves")

    monkeypatch.setattr(PeerDevice, "entered", entered)
    monkeypatch.setattr(PeerDevice, "join", lambda self, home: order.append("waits"))
    monkeypatch.setattr(LayerStore, "attend", lambda self, *args: order.append("reads"))
    monkeypatch.setattr(store.replica.pool, "read", lambda physical_ids, out: order.append("reads"))
    copied = ["enters with 1", "reads", "leaves", "waits"]  # kept for it: what is written there
    store.attend(None, None, "all", None)
    materialise(store)
    store.crop_to(store.table_of_rows.cropped(store.held, 20))
    assert order == ["waits", "reads", *copied, *copied, "enters with 0", "reads", "leaves"]
    order.clear()
    store.capturing = True
    store.attend(None, None, "all", None)
    assert order == ["reads"]


def test_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=r"cache_rank='cuda:1', but torch finds 1 CUDA device\(s\): choose another"):
        predictive(False, cache_rank="cuda:1")


def test_a_copy_comes_behind_what_is_being_chosen(monkeypatch):
    cache = predictive(False, **TIGHT, cache_rank="cpu")
    decode(cache, steps=5)
    order = []
    monkeypatch.setattr(PeerDevice, "join", lambda self, home: order.append("join"))
    copied = Packed.copy
    monkeypatch.setattr(Packed, "copy", lambda self: order.append("copy") or copied(self))
    copy.deepcopy(cache)
    assert order == ["join", "copy", "copy", "join"] * 2


def test_a_captured_step_keeps_what_the_other_device_still_reads():
    """A graph's memory of what is let go would go to later layers, while the other device has yet to read it."""
    race = PredictiveRace(captured=True, cache_rank="cpu")
    race.feed(prompt(1, 130)["input_ids"])
    kept, record = [], race.runner.recorder.record

    def watch(run, device, saved):
        found = record(run, device, saved)
        kept.extend(layer.store.kept for layer in race.ours.sparse_layers)
        return found

    race.runner.recorder.record = watch
    race.run(2)
    assert race.runner.captures == 1
    assert kept and all(k.shape[2] == v.shape[2] == 1 for k, v, _ in kept)


def test_a_step_that_cannot_be_captured_leaves_the_other_device_where_it_was():
    race = PredictiveRace(captured=True, cache_rank="cpu", strict=True)
    race.feed(prompt(1, 130)["input_ids"])
    record = race.runner.recorder.record

    def fail(run, device, saved):
        record(run, device, saved)
        raise RuntimeError("no graph can hold this")

    race.runner.recorder.record = fail
    with pytest.warns(UserWarning, match="no graph can hold this"):
        assert race.run(40) < TOLERANCE
    assert all(layer.store.replica.length == layer.store.length for layer in race.ours.sparse_layers)
