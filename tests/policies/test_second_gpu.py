"""Conversations whose tokens a second device chooses: the same as with everything on one, however slow it is."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from functools import cache as remembered

import pytest
import torch
from caches import FULL, predictive
from captured import Imitation
from inside import keep_busy
from models import build, prompt
from test_predictive import TIGHT
from torch import Tensor

from hf_sparsekv import optimize
from hf_sparsekv.cuda_graph.optimize import runner_of
from hf_sparsekv.policies.ahead.second_device.policy import ReplicaPolicy
from hf_sparsekv.policies.ahead.second_device.replica import PeerDevice

GPU = torch.cuda.device_count()
CYCLES = 4_000_000  # of a second device that is slow: about 2 ms
PLACES = [
    "cpu",  # the same script without a GPU, its captured steps imitated
    pytest.param("cuda:0", marks=pytest.mark.gpu),  # another stream of the same GPU
    pytest.param("cuda:1", marks=[pytest.mark.gpu, pytest.mark.skipif(GPU < 2, reason="needs two GPUs")]),
]
there = pytest.mark.parametrize("there", PLACES)
CONVERSATIONS = [  # nothing is late on the CPU
    *(("cpu", how) for how in ("eager", "captured")),
    *(
        pytest.param(place.values[0], how, marks=place.marks)
        for place in PLACES[1:]
        for how in ("captured", "slow", "captured-slow")
    ),
]
captured = pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])


def net_for(there: str, captured: bool) -> torch.nn.Module:
    net = build("llama", "sparsekv")
    if there == "cpu":
        if captured:
            Imitation(net).install()
        return net
    net = net.cuda()
    return optimize(net, fused=False) if captured else net


def replays(net: torch.nn.Module) -> int:
    runner = runner_of(net)
    return 0 if runner is None else runner.replays


@pytest.fixture
def slow(monkeypatch):
    """Makes everything late that is done on the second device, in captured steps as well."""

    def install(cycles: int = CYCLES) -> None:
        def later(work):
            @contextmanager
            def late(self, *args):
                with work(self, *args):
                    if self.stream is not None:
                        keep_busy(cycles)
                    yield

            return late

        monkeypatch.setattr(PeerDevice, "entered", later(PeerDevice.entered))
        monkeypatch.setattr(PeerDevice, "forked", later(PeerDevice.forked))

    return install


class Conversation:
    """One cache and what it was told; ``said`` are the tokens of all answers."""

    def __init__(self, net: torch.nn.Module, cache) -> None:
        self.net, self.cache, self.said = net, cache, []
        self.device = next(net.parameters()).device
        self.begin()

    def begin(self) -> None:
        self.mask = torch.ones(0, 0, dtype=torch.long, device=self.device)

    @torch.no_grad()
    def feed(self, ids: Tensor, mask: Tensor | None = None) -> None:
        ids = ids.to(self.device)
        mask = torch.ones_like(ids) if mask is None else mask.to(self.device)
        self.mask = torch.cat((self.mask, mask), dim=1) if self.mask.numel() else mask
        logits = self.net(ids, attention_mask=self.mask, past_key_values=self.cache, logits_to_keep=1).logits
        self.next = logits[:, -1:].argmax(-1).clone()

    def answer(self, steps: int) -> None:
        for _ in range(steps):
            self.said.append(self.next.cpu())
            self.feed(self.next)

    def crop(self, remove: int) -> None:
        self.mask = self.mask[:, :-remove]
        self.cache.crop(-remove)

    def rows(self, *index: int) -> None:
        index = torch.tensor(index, device=self.device)
        self.mask, self.next = self.mask[index], self.next[index]
        self.cache.reorder_cache(index)

    @property
    def tokens(self) -> list[list]:
        return [token.flatten().tolist() for token in self.said]


def everything(net: torch.nn.Module, cache, rounds: int = 2) -> list[list]:
    """All that a conversation can do to a cache."""
    talk = Conversation(net, cache)
    for _ in range(rounds):
        talk.feed(*prompt(2, 150, (0, 30)).values())
        talk.answer(20)
        for remove in (3, 30):  # drafts, and blocks that are reopened
            talk.crop(remove)
            talk.answer(5)
        talk.feed(prompt(2, 40, seed=1)["input_ids"])  # a second turn
        talk.answer(5)
        talk.rows(1, 0)
        talk.answer(5)
        talk.rows(0, 1, 1)
        talk.answer(18)
        cache.reset()
        talk.begin()
    return talk.tokens


@remembered
def on_one_device(there: str, captured: bool) -> tuple[torch.nn.Module, list[list], int]:
    """A model, what it says with everything on its own device, and in how many replayed steps."""
    net = net_for(there, captured)
    return net, everything(net, predictive(False, **TIGHT)), replays(net)


@pytest.mark.few(how=("captured",))
@pytest.mark.parametrize(("there", "how"), CONVERSATIONS)
def test_a_conversation_is_the_same(there, how, slow):
    if "slow" in how:
        slow()
    captured = "captured" in how
    net, expected, count = on_one_device(there.replace("cuda:1", "cuda:0"), captured)
    before = replays(net)
    cache = predictive(False, **TIGHT, cache_rank=there, strict=True)
    assert everything(net, cache) == expected
    assert replays(net) - before == count >= 100 * captured


@there
def test_generate_with_beams_and_copies(there, slow):
    """Rows are reordered after each token; copies made in the middle of an answer go on alike."""
    net, inputs = net_for(there, captured=True), prompt(2, 150, (0, 30))
    inputs = {name: t.to(next(net.parameters()).device) for name, t in inputs.items()}
    answers = []
    for settings in ({}, {"cache_rank": there, "strict": True}):
        cache = predictive(False, **TIGHT, **settings)
        go = {"do_sample": False, "min_new_tokens": 30, "max_new_tokens": 30, "num_beams": 3}
        answers.append([net.generate(**inputs, **go, past_key_values=cache).tolist()])
        for other in (cache, copy.deepcopy(cache)):
            talk = Conversation(net, other)
            talk.mask = torch.ones(6, other.get_seq_length(), dtype=torch.long, device=talk.device)
            talk.mask[:, : inputs["input_ids"].shape[1]] = inputs["attention_mask"].repeat_interleave(3, 0)
            talk.feed(torch.full((6, 1), 5))
            talk.answer(20)
            answers[-1].append(talk.tokens)
        slow()
    assert answers[0] == answers[1]
    assert answers[1][1] == answers[1][2]


@there
def test_a_budget_for_everything_gives_the_dense_answer(there):
    net, inputs = net_for(there, captured=True), prompt(2, 150, (0, 40))
    device = next(net.parameters()).device
    inputs = {name: t.to(device) for name, t in inputs.items()}
    go = {"do_sample": False, "min_new_tokens": 40, "max_new_tokens": 40}
    expected = build("llama", "sdpa").to(device).generate(**inputs, **go)
    cache = predictive(False, **FULL, cache_rank=there)
    assert torch.equal(net.generate(**inputs, **go, past_key_values=cache), expected)
    assert replays(net) == 39
    assert cache.stats().dense_calls == 0, "all of it was brought here, rather than read there in each step"
    store = cache.sparse_layers[0].store
    assert (store.replica.length, store.replica.full_blocks) == (cache.get_seq_length(), store.full_blocks)
    assert store.pool.kv.numel() == 0 and store.replica.full_blocks > 0, (
        "keys and values of blocks are on one device alone"
    )


@there
def test_two_caches_in_turn(there, slow):
    net, prompts = net_for(there, captured=True), [prompt(2, 150, seed=seed)["input_ids"] for seed in (3, 4)]
    answers = []
    for settings in ({}, {"cache_rank": there, "strict": True}):
        talks = [Conversation(net, predictive(False, **TIGHT, **settings)) for _ in prompts]
        for talk, ids in zip(talks, prompts):
            talk.feed(ids)
        before = replays(net)
        for _ in range(20):
            for talk in talks:
                talk.answer(1)
        assert replays(net) - before == 40
        answers.append([talk.tokens for talk in talks])
        slow()
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][1]


@there
@captured
def test_after_an_error_there_a_reset_helps(there, captured, monkeypatch):
    (net, expected, _), failing = on_one_device(there.replace("cuda:1", "cuda:0"), captured), []
    choose = ReplicaPolicy.choose

    def fail(self, store):
        if failing and not store.capturing:
            raise OSError("the other device is gone")
        choose(self, store)

    monkeypatch.setattr(ReplicaPolicy, "choose", fail)
    cache = predictive(False, **TIGHT, cache_rank=there, strict=True)
    talk = Conversation(net, cache)
    talk.feed(prompt(2, 150)["input_ids"])
    talk.answer(3)
    failing.append(True)
    with pytest.raises(OSError, match="the other device is gone"):
        talk.answer(20)
        talk.feed(prompt(2, 40, seed=1)["input_ids"])  # replays launch nothing anew, a second turn does
    failing.clear()
    with pytest.raises(RuntimeError, match=r"reset\(\)"):
        talk.answer(1)
    cache.reset()
    assert everything(net, cache, rounds=1) == expected[: len(expected) // 2]


@there
def test_copying_is_switched_off_behind_the_steps_under_way(there):
    """A capture that comes while a captured step still runs takes none of that step's tokens away."""
    peer = PeerDevice(torch.device(there))
    home = torch.device("cpu" if there == "cpu" else "cuda:0")
    with peer.entered(home):
        pass
    peer.join(home)
    if home.type == "cuda":
        keep_busy(20 * CYCLES)
    seen = peer.enabled.to(home, copy=True, non_blocking=True)  # as the step under way sees it
    with peer.paused():
        if home.type == "cuda":
            torch.cuda.synchronize(home)
            torch.cuda.synchronize(peer.device)
        assert peer.enabled.item() == 0
    with peer.on_stream():
        assert peer.enabled.item() == 1
    assert seen.item() == 1


@pytest.mark.parametrize("there", PLACES[1:])
def test_a_selection_that_is_late_is_used_later_and_counted(there, slow):
    net = net_for(there, captured=False)
    cache = predictive(False, **TIGHT, cache_rank=there)
    talk = Conversation(net, cache)
    talk.feed(prompt(2, 150)["input_ids"])
    slow(20 * CYCLES)
    for _ in range(20):
        before = [layer.store.full_blocks for layer in cache.sparse_layers]
        talk.answer(1)
        for layer, full_blocks in zip(cache.sparse_layers, before):
            assert layer.policy.known == full_blocks, "what left the ring could have been chosen"
    stats = cache.stats()
    assert stats.dense_calls == 0 and 10 < stats.late <= 40


@pytest.mark.parametrize("there", PLACES[1:])
def test_a_step_that_cannot_be_captured_there_runs_eagerly(there, monkeypatch):
    """Last: what a failed capture leaves behind would show in the tests after it."""
    _, expected, _ = on_one_device("cuda:0", False)
    choose = ReplicaPolicy.choose

    def fail(self, store):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("no graph can hold this")
        choose(self, store)

    monkeypatch.setattr(ReplicaPolicy, "choose", fail)
    net = net_for(there, captured=True)
    with pytest.warns(UserWarning, match="no graph can hold this"):
        found = everything(net, predictive(False, **TIGHT, cache_rank=there, strict=True))
    assert found == expected
