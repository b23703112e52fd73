"""Ctrl-C at any point of a forward pass: the cache goes on with the right tokens, or says that it is incomplete.

The points are those where CPython raises for a pending signal, drawn at random with a fixed seed: thousands are passed
in a few steps. A replay counts as one instruction, as on a GPU.
"""

from __future__ import annotations

import copy
import gc
import random
import sys

import pytest
import torch
from caches import CACHES, TIGHT, two_level
from captured import ImitatedGraphs, Imitation
from inside import attention_of, hooks_of, later_hooks_of
from interrupts import HOME, MODELING, TRANSFORMERS, Points, count
from models import NEEDS_CONFIG, build, prompt

from hf_sparsekv import SparseConfig, optimize, unoptimize
from hf_sparsekv.cuda_graph.optimize import runner_of
from hf_sparsekv.fusion import layers as fused_layers
from hf_sparsekv.kv.row_table import RowTable

IDS = prompt(2, 160)["input_ids"]
START = 90  # where steps begin: channels are known soon, and a block is sealed within a few steps


class Whole(ImitatedGraphs):
    """No interrupt is raised inside a replay."""

    def record(self, run, device, saved):
        graph, output = super().record(run, device, saved)
        replay = graph.replay

        def untraced():
            tracer = sys.gettrace()
            sys.settrace(None)
            try:
                replay()
            finally:
                sys.settrace(tracer)

        graph.replay = untraced
        return graph, output


def state_of(net) -> tuple:
    """Parts of a model that must not have changed."""
    modules = {
        name: (sorted(module.__dict__), type(module), len(later_hooks_of(module)), len(hooks_of(module)))
        for name, module in net.named_modules()
    }
    return attention_of(net), net.get_experts_implementation(), modules


class Runs:
    """Runs of one model, whose caches are interrupted and then used."""

    def __init__(self, name: str, kind: str, captured: bool) -> None:
        self.net = build(name, "sparsekv")
        if captured:
            Imitation(self.net, Whole()).install()
        self.make = lambda: CACHES[kind](self.net.config if name in NEEDS_CONFIG else None, **TIGHT)
        self.control = self.make()
        self.prefill(self.control)
        self.start = copy.deepcopy(self.control)
        self.logits = [self.step(self.control, at) for at in range(START, START + 20)]
        self.state = state_of(self.net)
        self.went_on: set[bool] = set()

    def step(self, cache, at: int, n: int = 1):
        with torch.no_grad():
            return self.net(IDS[:, at : at + n], past_key_values=cache).logits.clone()

    def prefill(self, cache) -> None:
        """In two chunks."""
        self.step(cache, 0, 70)
        self.step(cache, 70, START - 70)

    def steps(self, cache, n: int) -> None:
        for at in range(START, START + n):
            self.step(cache, at)

    def right_or_refused(self, cache, steps: int = 3) -> bool:
        """Go on where the cache says it is; False if it says that it is incomplete."""
        length = cache.get_seq_length()
        assert length in (0, 70) or length >= START
        try:
            if length < START:
                self.step(cache, length, 70 - length) if length == 0 else None
                self.step(cache, 70, START - 70)
            for at in range(max(length, START), max(length, START) + steps):
                assert torch.equal(self.step(cache, at), self.logits[at - START]), f"silently wrong after {length}"
        except RuntimeError as error:
            assert "incomplete" in str(error)
            return False
        return True

    def interrupt(self, begin, work, points: list[int], code: tuple[str, ...], again: int = 0) -> None:
        for at in points:
            cache = begin()
            with pytest.raises(KeyboardInterrupt), Points(at, again=again, code=code) as reached:
                work(cache)
                raise KeyboardInterrupt  # not every run passes as many points
            where = reached.where
            assert state_of(self.net) == self.state, where
            try:
                self.went_on.add(self.right_or_refused(cache))
                cache.reset()
                self.prefill(cache)
                assert self.right_or_refused(cache)
            except BaseException as error:
                raise AssertionError(f"after an interrupt at point {at}, {where}") from error
            pools = (
                []
                if cache.device_pools is None
                else [pool for pool in cache.device_pools.pools.values() if pool is not None]
            )
            assert all(bool(pool.state.enabled) and not pool._paused for pool in pools), where


def some(total: int, n: int, seed: int = 0) -> list[int]:
    assert total > n, "nothing to interrupt: is the code elsewhere by now?"
    return sorted(random.Random(seed).sample(range(1, total + 1), n))


@pytest.mark.few(name=("llama", "gemma3"), kind=("host", "progressive-host"))
@pytest.mark.parametrize(
    ("name", "kind", "captured"),
    [
        ("llama", "host", False),
        ("llama", "predictive-second", True),
        ("gemma3", "progressive-host", True),
        ("qwen3-next", "host", False),
    ],
)
def test_anywhere(name, kind, captured):
    """In the package's code and in the model's: a linear-attention layer changes its states where no cache looks."""
    runs, code = Runs(name, kind, captured), (HOME, MODELING)
    total = count(lambda: runs.prefill(runs.make()), code)
    runs.interrupt(runs.make, runs.prefill, some(total, 5), code)
    total = count(lambda: runs.steps(copy.deepcopy(runs.start), 3), code)
    runs.interrupt(lambda: copy.deepcopy(runs.start), lambda cache: runs.steps(cache, 3), some(total, 13), code)
    assert runs.went_on == {True, False}, "some points lie between forward passes, some inside"


@pytest.mark.few(name=("llama",))
@pytest.mark.parametrize(
    ("name", "kind", "again"),
    [("llama", "host", 0), ("llama", "host", 2), ("gpt-oss", "host", 0), ("llama", "predictive-host", 0)],
)
def test_in_a_captured_step(name, kind, again):
    """Where a step is captured, replayed and taken back: here the device is ahead of the host.

    ``again``: the key is pressed a second time, so many points later. (With experts that is one time too many: nothing
    is left to put their implementation back.)
    """
    runs, code = Runs(name, kind, True), (f"{HOME}/cuda_graph/",)
    total = count(lambda: runs.steps(copy.deepcopy(runs.start), 2), code)
    points = some(total, 10, seed=again)
    runs.interrupt(lambda: copy.deepcopy(runs.start), lambda cache: runs.steps(cache, 2), points, code, again)


def test_behind_a_replay():
    """Where an interrupt is raised that came during the replay: the device has stored a token, the host has not."""
    left = [5]

    class Stops(ImitatedGraphs):
        def record(self, run, device, saved):
            graph, output = super().record(run, device, saved)
            replay = graph.replay

            def stop():
                replay()
                left[0] -= 1
                if not left[0]:
                    raise KeyboardInterrupt

            graph.replay = stop
            return graph, output

    net, cache = build("llama", "sparsekv"), two_level(**TIGHT)
    Imitation(net, Stops()).install()
    given = {"do_sample": False, "max_new_tokens": 20, "past_key_values": cache}
    with pytest.raises(KeyboardInterrupt):
        net.generate(IDS, **given)
    with pytest.raises(RuntimeError, match=r"incomplete after an error \(KeyboardInterrupt after a captured step\)"):
        net.generate(IDS, **given)
    cache.reset()
    control = build("llama", "sparsekv").generate(IDS, **{**given, "past_key_values": two_level(**TIGHT)})
    assert torch.equal(net.generate(IDS, **given), control)


CHANGES = {
    "crop": lambda cache: cache.crop(-40),
    "reorder_cache": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "batch_select_indices": lambda cache: cache.batch_select_indices(torch.tensor([1])),
    "batch_repeat_interleave": lambda cache: cache.batch_repeat_interleave(2),
    "reset": lambda cache: cache.reset(),
}


@pytest.mark.few
@pytest.mark.parametrize(
    ("name", "change"),  # a sliding layer past its window cannot be cropped
    [("llama", change) for change in CHANGES] + [("gemma3", change) for change in CHANGES if change != "crop"],
)
def test_changes_of_all_layers(name, change):
    """As it was, as it should be, or refused; never rows or lengths of both."""
    net, ids, work = build(name, "sparsekv"), IDS[:, :61], CHANGES[change]
    start = two_level(**TIGHT)

    def logits(cache):
        rows = cache.layers[0].batch_size if name == "llama" else cache.layers[1].batch_size
        with torch.no_grad():
            return net(ids[:1, 60:].expand(max(rows, 1), 1), past_key_values=cache).logits

    with torch.no_grad():
        net(ids[:, :60], past_key_values=start)
    changed = copy.deepcopy(start)
    total = count(lambda: work(changed), (HOME, *TRANSFORMERS))
    allowed = [logits(copy.deepcopy(start)), logits(changed)]
    refused = 0
    for at in some(total, 12):
        cache = copy.deepcopy(start)
        with pytest.raises(KeyboardInterrupt), Points(at, code=(HOME, *TRANSFORMERS)) as reached:
            work(cache)
            raise KeyboardInterrupt  # not every run passes as many points
        try:
            found = logits(cache)
        except RuntimeError as error:
            assert "incomplete" in str(error), reached.where
            refused += 1
        else:
            assert any(found.shape == one.shape and torch.equal(found, one) for one in allowed), reached.where
        cache.reset()
        assert cache.get_seq_length() == 0
        with torch.no_grad():
            net(ids[:, :60], past_key_values=cache)
            assert torch.equal(logits(cache), allowed[0]), reached.where
    assert refused


@pytest.mark.parametrize("name", ["llama", "deepseek-v3"])
def test_optimize_and_its_end(name, monkeypatch):
    """A model that was not optimised to the end is as it was; one whose end was interrupted is, after a second call."""
    monkeypatch.setattr(fused_layers, "accelerated", lambda t: True)
    net = build(name, "sparsekv")

    def storages():
        return {key: value.untyped_storage().nbytes() for key, value in net.state_dict().items()}

    before, memory = state_of(net), storages()
    total = count(lambda: optimize(net))
    assert any(isinstance(module.__dict__.get("_fused"), fused_layers.State) for module in net.modules())
    ends = count(lambda: unoptimize(net))
    assert state_of(net) == before and storages() == memory
    for at in some(total, 25):
        with pytest.raises(KeyboardInterrupt), Points(at) as reached:
            optimize(net)
            raise KeyboardInterrupt
        if runner_of(net) is None:  # else it was done
            assert state_of(net) == before and storages() == memory, reached.where
        unoptimize(net)
        assert state_of(net) == before and storages() == memory, reached.where
    for at in some(ends, 25):
        optimize(net)
        with pytest.raises(KeyboardInterrupt), Points(at) as reached:
            unoptimize(net)
            raise KeyboardInterrupt
        unoptimize(net)
        assert state_of(net) == before and storages() == memory, reached.where


ROWS = {
    "clear": lambda table: table.clear(),
    "leave": lambda table: table.leave(1),
    "copy_row": lambda table: (table.leave(1), table.copy_row(1, 0)),
    "move_row": lambda table: (table.leave(1), table.move_row(1, 0)),
    "trim": lambda table: table.trim([table.empty]),
    "map_rows": lambda table: table.map_rows([1, 1], table.rows.mapped([1, 1])),
    "more rows": lambda table: table.map_rows([1, 1, 0], table.rows.mapped([1, 1, 0])),
    "reserve": lambda table: table.blocks.reserve([0, 1], [2, 3], [6, 14]),
    "unshare": lambda table: table.blocks.unshare(),
    "copy": copy.deepcopy,
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # raised in a finaliser
@pytest.mark.parametrize("what", ROWS)
def test_a_copy_keeps_its_blocks(what):
    """Ids that were given back once too often would be those of a copy's blocks; and a device has the host's table."""
    device = torch.device("cpu")

    def begun():
        table = RowTable(SparseConfig(block_size=16, window=16))
        table.rows = table.follow(table.start(2, 200), 200, None)
        table.blocks.on[device]
        return table, copy.deepcopy(table)

    gc.collect()
    gc.freeze()  # what other tests have left; to look through it at each of some hundred points takes half a minute
    table, other = begun()
    total = count(lambda: ROWS[what](table))
    assert total > 3
    for at in range(1, total + 1):
        table, other = begun()
        with pytest.raises(KeyboardInterrupt), Points(at) as reached:
            ROWS[what](table)
            raise KeyboardInterrupt
        assert (table.blocks.on[device].numpy() == table.blocks.host).all(), reached.where
        table.clear()
        gc.collect()  # a copy that was broken off
        taken = set(other.ids.take(60).tolist())
        assert not taken & set(other.blocks.host[other.blocks.host >= 0].tolist()), reached.where
