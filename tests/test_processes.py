"""Caches in forked children, in several threads, and at the end of the interpreter."""

from __future__ import annotations

import contextlib
import copy
import gc
import signal
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from caches import CACHES, FULL, TIGHT, two_level
from captured import Imitation
from host_memory import MB, budget_of, faked, fill, in_child, intact, make_pool, run_alone
from models import build, model, prompt
from torch.utils.data import DataLoader, Dataset

from hf_sparsekv import optimize, unoptimize
from hf_sparsekv.cuda_graph.optimize import runner_of
from hf_sparsekv.cuda_graph.runner import StepRunner
from hf_sparsekv.offload.host_limit import HostBudget

IDS = prompt(2, 200)["input_ids"]


def step(cache, at: int, n: int = 1, net=None):
    with torch.no_grad():
        return (net or model("llama"))(IDS[:, at : at + n], past_key_values=cache).logits.clone()


# ---------------------------------------------------------------------- forked children


@pytest.mark.parametrize("kind", ["host", "progressive-host", "predictive-host"])
def test_a_forked_child_goes_on(kind):
    """It uses, copies, empties and refills what it inherited, and its parent sees nothing of that."""
    cache = CACHES[kind](**TIGHT)
    step(cache, 0, 120)
    step(cache, 120)
    control = copy.deepcopy(cache)
    want = [step(control, at) for at in range(121, 130)]

    def right():
        for at, logits in zip(range(121, 130), want):
            assert torch.equal(step(cache, at), logits)

    def work():
        copied = copy.deepcopy(cache)
        right()
        assert torch.equal(step(copied, 121), want[0])
        step(cache, 130, 70)  # grows
        cache.reset()
        step(cache, 0, 60)

    in_child(work)
    right()


def test_a_forked_child_gives_pageable_memory_back():
    """To its own system and its own budget: another batch size in the child must not need the memory twice."""
    budget = budget_of(3 * MB // 2)
    blocks = make_pool(budget, capacity=256)
    fill(blocks, 200)
    held = [blocks]

    def work():
        used = budget.used
        assert intact(held[0]) and used == MB
        held.clear()
        gc.collect()
        assert budget.used == 0, f"{budget.used} of {used} bytes are still counted"
        other = make_pool(budget, capacity=256)
        fill(other, 200)
        assert intact(other)

    del blocks
    in_child(work)
    assert intact(held[0])


def test_a_forked_child_forgets_pinned_memory(monkeypatch):
    """It did not inherit it: nothing is unmapped there, but nothing counts any more either."""
    with faked(monkeypatch) as fake:
        budget = budget_of()
        held = [make_pool(budget)]

        def work():
            before = len(fake.log)
            held.clear()
            gc.collect()
            assert budget.used == 0 and fake.log[before:] == []

        in_child(work)
        assert budget.used > 0
        held.clear()


def test_a_child_that_was_forked_in_the_middle_of_taking_memory():
    """Another thread of the parent holds the budgets' lock, and that thread is not in the child."""
    from hf_sparsekv.offload import host_limit

    budget, ready, done = budget_of(), threading.Event(), threading.Event()

    def hold():
        with host_limit._lock:
            ready.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    assert ready.wait(10)
    try:
        in_child(lambda: (signal.alarm(10), budget.take(5)))
    finally:
        done.set()
        thread.join()


class Answers(Dataset):
    """Each item goes on from a cache that the parent has filled."""

    def __init__(self, cache) -> None:
        self.cache = cache

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> torch.Tensor:
        return step(copy.deepcopy(self.cache), 100 + i)


def test_workers_of_a_data_loader():
    cache = two_level(**TIGHT)
    step(cache, 0, 100)
    want = [Answers(cache)[i] for i in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forks and shared memory
        loader = DataLoader(Answers(cache), batch_size=None, num_workers=2, multiprocessing_context="fork")
        found = [answer.clone() for answer in loader]
    assert all(map(torch.equal, found, want))


# ---------------------------------------------------------------------- threads


def in_threads(*works) -> list:
    """Run all at once; what one raises is raised here."""
    found, start = [None] * len(works), threading.Barrier(len(works))

    def one(i):
        start.wait()
        try:
            found[i] = works[i]()
        except BaseException as error:
            found[i] = error

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_one_optimised_model_in_two_threads(name):
    """Each with a cache of its own: what each would have said alone."""
    net = build(name, "sparsekv")
    Imitation(net).install()
    prompts = [prompt(2, 90, seed=seed) for seed in range(2)]

    def answer(i):
        given = {"do_sample": False, "max_new_tokens": 25, "past_key_values": two_level(**TIGHT)}
        return net.generate(**prompts[i], **given)

    want = [answer(i) for i in range(2)]
    state = net.get_experts_implementation()
    found = in_threads(lambda: answer(0), lambda: answer(1))
    for one, other in zip(found, want):
        assert isinstance(one, torch.Tensor), one
        assert torch.equal(one, other)
    assert runner_of(net).replays > 60 and net.get_experts_implementation() == state


def test_one_cache_in_two_threads():
    """Is for one thread: whoever comes while a forward pass is under way is told that it is not complete."""
    cache, net = two_level(**FULL), build("llama", "sparsekv")
    step(cache, 0, 90, net)
    inside, go_on = threading.Event(), threading.Event()

    def wait(*args):
        inside.set()
        go_on.wait(30)

    def second():
        inside.wait(30)
        try:
            return step(cache, 90, net=model("llama"))
        finally:
            go_on.set()

    net.model.layers[1].register_forward_pre_hook(wait)
    first, other = in_threads(lambda: step(cache, 90, net=net), second)
    assert isinstance(other, RuntimeError) and "this cache is incomplete" in str(other)
    control = two_level(**FULL)
    step(control, 0, 90)
    assert torch.equal(first, step(control, 90))
    assert torch.equal(step(cache, 91), step(control, 91)), "the refusal changed nothing"


def test_optimize_in_two_threads(monkeypatch):
    """One runner: a second one would not know what the first has fused, and unoptimize() would leave it so."""
    net = build("llama", "sparsekv")

    def state():
        return {name: (type(module), dict(module.__dict__)) for name, module in net.named_modules()}

    before = state()
    install, meet = StepRunner.install, threading.Barrier(2)

    def together(self):
        with contextlib.suppress(threading.BrokenBarrierError):
            meet.wait(1)  # both have seen that there is no runner; nobody comes if they take turns
            if self.fusion is None:
                time.sleep(0.2)  # the other one goes first
        install(self)

    monkeypatch.setattr(StepRunner, "install", together)
    assert in_threads(lambda: optimize(net), lambda: optimize(net)) == [net, net]
    unoptimize(net)
    assert state() == before


# ---------------------------------------------------------------------- the end of the interpreter

END = """
    import copy, gc, os, sys, threading, weakref
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRITON_INTERPRET"] = "0"
    sys.path.insert(0, {tests!r})
    import torch
    torch.set_num_threads(1)
    import lazy_copy_streams, pytest
    from caches import TIGHT, two_level
    from models import build, prompt

    lazy_copy_streams.imitate(pytest.MonkeyPatch())
    net, cache = build("llama", "sparsekv"), two_level(**TIGHT)
    ids = prompt(2, 200)["input_ids"]

    class Holds:
        pass

    holds = Holds()
    holds.caches = [two_level(**TIGHT), copy.deepcopy(cache)]
    cycle = [two_level(**TIGHT)]
    cycle.append(cycle)
    with torch.no_grad():
        for one in (cache, holds.caches[0], cycle[0]):
            net(ids, past_key_values=one)
    weakref.finalize(holds, gc.collect)
    assert any(each.done < each.given for each in lazy_copy_streams.LazyCopyStream.made), "nothing is in flight"

    class Ends:
        def put(self, value):
            if value.ndim == 1:
                sys.exit(0)

        def end(self):
            pass

    more = {{"max_new_tokens": 5, "do_sample": False}}
    work = lambda: net.generate(ids, past_key_values=two_level(**TIGHT), **more)
    threading.Thread(target=work).start()
    net.generate(ids[:1], past_key_values=two_level(**TIGHT), streamer=Ends(), **more)
"""


@pytest.mark.slow
def test_the_interpreter_ends_with_copies_in_flight():
    """Code 0 and nothing said: of a global, a cycle, a finaliser's caches, and of two inside ``generate()``."""
    run_alone(END.format(tests=str(Path(__file__).with_name("helpers"))))


def test_garbage_that_is_collected_in_the_middle_of_taking_memory():
    """A cache that dies inside another one's growth gives its memory back there."""
    budget = budget_of(4 * MB)
    take = HostBudget.take
    cycle = [make_pool(budget, capacity=256)]
    cycle.append(cycle)
    used = budget.used

    def collecting(self, size):
        gc.collect()
        take(self, size)

    del cycle
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostBudget, "take", collecting)
        other = make_pool(budget, capacity=512)
    assert budget.used == other.kv.nbytes != used
