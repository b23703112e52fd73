"""State that is declared once, and the smallest policy that keeps none."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from captured import imitated
from models import model, prompt

from hf_sparsekv import SparseCache
from hf_sparsekv.kv.row_views import RowViews
from hf_sparsekv.kv.state import Held, State
from hf_sparsekv.policies.base import Policy
from hf_sparsekv.policies.labelled import LabelledPolicy
from hf_sparsekv.policies.registry import Method
from hf_sparsekv.policies.selector import Selector
from hf_sparsekv_config.sparse import SparseConfig


class Inner(State):
    TENSORS: ClassVar = {"limits": Held(rows=1, trial=True), "constant": Held(rows=None, shared=True)}
    HOST: ClassVar = {"seen": 0}


class Base(State):
    TENSORS: ClassVar = {"ids": Held(trial=True, counted=True, file="chosen", when="chosen")}
    HOST: ClassVar = {"chosen": False}
    PARTS: ClassVar = ("inner",)


class Outer(Base):
    TENSORS: ClassVar = {
        "scratch": Held(captured=False, dropped=True),
        "replaced": Held(captured=False, shared=True, file="replaced"),
    }
    HOST: ClassVar = {"paged": False}
    PARTS: ClassVar = ("packs", "absent")
    OWN: ClassVar = ("paged", "packs")


def outer() -> Outer:
    state = Outer()
    state.ids, state.scratch, state.replaced = torch.arange(6).view(3, 2), torch.ones(3), torch.arange(3.0)
    state.inner, state.packs = Inner(), [Inner(), Inner()]
    for part in (state.inner, *state.packs):
        part.limits, part.constant = torch.arange(6).view(2, 3), torch.zeros(1)
    return state


def test_what_base_classes_declare_is_kept_too():
    state = Outer()
    assert set(state.TENSORS) == {"ids", "scratch", "replaced"} and state.PARTS == ("inner", "packs", "absent")
    assert (state.ids, state.inner, state.chosen, state.paged) == (None, None, False, False)
    assert set(Base.TENSORS) == {"ids"}, "a subclass adds nothing to its base"


def test_a_trial_is_undone():
    """Host values as they were, tensors by value; what a trial does not write is left alone."""
    state = outer()
    saved, where = state.snapshot(), state.addresses
    state.chosen, state.inner.seen, state.packs[1].seen = True, 3, 4
    state.ids.zero_()
    state.packs[1].limits.zero_()
    state.scratch.zero_()
    state.restore_host(saved)
    assert (state.chosen, state.inner.seen, state.packs[1].seen) == (False, 0, 0)
    assert not state.ids.any(), "the device is not touched yet"
    state.restore_device(saved)
    assert state.ids.flatten().tolist() == state.packs[1].limits.flatten().tolist() == list(range(6))
    assert not state.scratch.any()
    assert state.addresses == where


def test_the_first_rows_are_the_same_memory():
    state = outer()
    some = state.first_rows(2)
    assert (some.ids.shape, some.inner.limits.shape, some.packs[1].limits.shape) == ((2, 2), (2, 2), (2, 2))
    assert some.inner.constant is state.inner.constant
    some.ids += 10
    some.packs[1].limits.zero_()
    some.chosen = True
    assert state.ids.tolist() == [[10, 11], [12, 13], [4, 5]]
    assert state.packs[1].limits.tolist() == [[0, 0, 2], [0, 0, 5]]
    assert not state.chosen and state.ids.shape == (3, 2)


def test_addresses_are_those_that_graphs_know():
    state = outer()
    before = state.addresses
    assert len(before) == 1 + 3 * 2
    state.scratch = torch.ones(3)
    assert state.addresses == before
    seen = {before}
    for one, name in ((state, "ids"), (state.inner, "limits"), (state.packs[1], "constant")):
        setattr(one, name, getattr(one, name).clone())
        seen.add(state.addresses)
    assert len(seen) == 4
    state.packs = None
    assert len(state.addresses) == 3


@pytest.mark.parametrize("index", [[2, 0, 1], [1, 1]])
def test_rows(index):
    """In place if there are as many, because a graph knows the address; what copies share is replaced instead."""
    state, index = outer(), torch.tensor(index)
    shared, where, constant = state.replaced, state.addresses, state.inner.constant
    state.map_rows(index)
    assert state.ids.tolist() == [[2 * i, 2 * i + 1] for i in index.tolist()]
    assert state.packs[0].limits.tolist() == [index.tolist(), [i + 3 for i in index.tolist()]]
    assert state.replaced.tolist() == index.tolist() and shared.tolist() == [0, 1, 2]
    assert state.inner.constant is constant
    assert (state.addresses == where) == (len(index) == 3)


def one_row(first: int) -> Outer:
    state = outer()
    state.map_rows(torch.tensor([0]))
    for tensor in (state.ids, state.scratch, state.replaced, state.inner.limits, state.packs[0].limits):
        tensor.copy_(torch.arange(first, first + tensor.numel()).view(tensor.shape))
    return state


def test_a_row_that_comes_is_copied_from_all_that_is_declared():
    """But not from what is a cache's own, or what neither has; rows of several dtypes and dimensions."""
    state, views = outer(), RowViews()
    packs = [part.limits.clone() for part in state.packs]

    def come(row: int, other: State, source: int | None = None) -> None:
        found = []
        state.add_rows(other, found)
        views.copy(found, row, source)

    come(1, one_row(70))
    assert state.ids.tolist() == [[0, 1], [70, 71], [4, 5]]
    assert state.inner.limits.tolist() == [[0, 70, 2], [3, 71, 5]]
    assert state.scratch.tolist() == [1, 70, 1] and state.replaced.tolist() == [0, 70, 2]
    assert all(torch.equal(part.limits, was) for part, was in zip(state.packs, packs))
    come(0, state, 1)
    assert state.ids.tolist() == [[70, 71], [70, 71], [4, 5]] and state.inner.limits[:, 0].tolist() == [70, 71]
    old = state.ids
    state.ids, state.scratch = torch.zeros(3, 2, dtype=torch.int64), None  # other memory, and less
    new = one_row(90)
    new.scratch = None
    come(1, new)
    assert state.ids.tolist() == [[0, 0], [90, 91], [0, 0]] and old.tolist() == [[70, 71], [70, 71], [4, 5]]
    assert state.inner.limits[:, 1].tolist() == [90, 91] and state.replaced.tolist() == [70, 90, 2]
    state.inner = new.inner = None
    come(2, new)
    assert state.ids[2].tolist() == [90, 91]
    views.copy([], 0)


@pytest.mark.parametrize("name", ["ids", "scratch", "inner"])
@pytest.mark.parametrize("side", ["batch", "row"])
def test_a_row_that_would_lose_a_tensor_does_not_join(name, side):
    state, other = outer(), one_row(0)
    setattr(other if side == "batch" else state, name, None)
    with pytest.raises(ValueError, match=rf"Outer, '{name}' is not alike \(that of the {side} has it\).*rows_join"):
        state.add_rows(other, [])


def test_a_row_of_another_size_does_not_join():
    state, other = outer(), one_row(0)
    other.ids = torch.zeros(1, 1)  # which a copy would spread
    with pytest.raises(ValueError, match=r"'ids' is not alike \(they are \[3, 2\] and \[1, 1\]\)"):
        state.add_rows(other, [])


def test_a_tensor_that_a_trial_makes_goes_with_it():
    state = outer()
    limits, state.packs[0].limits = state.packs[0].limits, None
    saved = state.snapshot()
    assert not state.made_since(saved)
    state.packs[0].limits = limits
    assert state.made_since(saved) == ["limits"]
    state.restore_host(saved)
    state.restore_device(saved)
    assert state.packs[0].limits is None and state.packs[1].limits is not None


def test_a_copy_shares_what_is_never_written():
    state = outer()
    state.chosen = state.paged = True
    new = state.copy()
    assert new.replaced is state.replaced and new.inner.constant is state.inner.constant
    assert new.ids is not state.ids and torch.equal(new.ids, state.ids)
    assert new.inner is not state.inner and new.inner.limits is not state.inner.limits
    assert (new.chosen, new.paged, new.packs) == (True, False, None), "a copy has no device pages yet"


def test_reset_and_bytes():
    state = outer()
    assert state.nbytes == state.ids.nbytes
    state.chosen, state.inner.seen = True, 2
    state.reset()
    assert (state.chosen, state.inner.seen, state.scratch) == (False, 0, None)
    assert state.ids is not None


def test_what_is_not_declared_is_named():
    """Neither copies nor files would follow it; lists and host values are somebody else's business."""
    state = outer()
    assert state.undeclared() == []
    state.more, state.packs[1].hidden, state.numbers = torch.zeros(1), torch.zeros(1), [1]
    assert state.undeclared() == ["more", "hidden"]


def test_files_hold_what_means_something():
    state, cpu = outer(), torch.device("cpu")
    assert set(state.to_file(10)) == {"replaced"} < state.file_names() == {"replaced", "chosen"}
    state.chosen = True
    found = state.to_file(10)
    assert set(found) == {"replaced", "chosen"}
    other = outer()
    other.ids, other.replaced = torch.zeros(3, 2, dtype=torch.long), None
    where = other.addresses
    other.from_file(found, cpu, 10)
    assert other.chosen and torch.equal(other.ids, state.ids) and torch.equal(other.replaced, state.replaced)
    assert other.addresses == where
    other = outer()
    other.ids = torch.zeros(3, 4, dtype=torch.long)  # another budget
    other.from_file(found, cpu, 10)
    assert not other.chosen and not other.ids.any()


# ---------------------------------------------------------------------- the smallest policy


class First(Selector):
    """The first full block, the sinks and the recent window."""

    granularity = "block"

    def select(self, q, store, spec):
        return torch.zeros(store.batch, store.heads, 1, dtype=torch.int32, device=q.device)


class FirstCache(SparseCache):
    def __init__(self, policy: type[Policy] = First) -> None:
        self.policy = policy
        super().__init__(SparseConfig(block_size=16, window=16, max_draft=4, dense_layers=1))

    def _method(self, config: SparseConfig) -> Method:
        return Method("first", SparseConfig, self.policy)


def test_a_policy_of_one_method():
    """It is captured, watched and counted, and its rows follow beams."""
    found, (fast, runner) = [], imitated()
    for net in (model("llama"), fast):
        cache = FirstCache()
        cache.watch_blocks()
        out = net.generate(**prompt(2, 90, (0, 5)), past_key_values=cache, do_sample=False, max_new_tokens=30)
        share, stats = cache.chosen_blocks().share, cache.stats()
        assert share[1].tolist() == [1.0] + [0.0] * (share.shape[1] - 1)
        assert (share[0] == 1).all()
        assert stats.sparse_calls == stats.dense_calls == 29
        found.append((out, stats.attended_tokens))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]
    assert (runner.captures, runner.replays) == (1, 29)


class Largest(First):
    """Keeps the largest key component of each full block, which the sealing kernel knows nothing of."""

    def start(self, store, q_heads):
        super().start(store, q_heads)
        store.pool.add_field("largest", (store.heads,), torch.float32)

    def index(self, kv, start, rows):
        return {"largest": kv[..., : kv.shape[-1] // 2].amax((-2, -1))}


def test_an_index_that_nobody_would_ask_for_is_refused():
    with pytest.raises(TypeError, match=r"Mine.index\(\) would never be asked: LabelledPolicy.sealing\(\)"):

        class Mine(LabelledPolicy):
            def index(self, kv, start, rows):
                return {}

    class Both(LabelledPolicy):
        def index(self, kv, start, rows):
            return {}

        def sealing(self, store):
            return None


def test_a_policy_that_cannot_say_where_it_keeps_what_it_knows_of_blocks():
    """Its steps run eagerly, and the reason is said: rows of several lengths, whose blocks are full at other steps."""
    net, runner = imitated()
    inputs, go = prompt(2, 90, (0, 5)), {"do_sample": False, "max_new_tokens": 40}
    cache = FirstCache(Largest)
    with pytest.warns(UserWarning, match=r"decode steps run eagerly: Largest keeps something .* no sealing\(\)"):
        found = net.generate(**inputs, past_key_values=cache, **go)
    assert runner.captures == 0
    assert torch.equal(found, net.generate(**inputs, past_key_values=FirstCache(), **go)) and runner.replays == 39
    assert cache.joined_rows().sealed == (6, 6)
    store = cache.sparse_layers[-1].store
    blocks = store.table.long()
    keys = store.pool.kv[blocks][..., : store.split]
    assert torch.equal(store.pool.fields["largest"][blocks], keys.amax((-2, -1)))
