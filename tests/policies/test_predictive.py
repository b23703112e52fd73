"""Predictive decode steps against an independent oracle over plain keys and queries: the same logits, step by step."""

from __future__ import annotations

import copy
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from caches import predictive
from captured import Imitation
from models import build, model, prompt, reference
from oracle import TOLERANCE, Oracle, Race
from torch import Tensor

from hf_sparsekv import OffloadConfig, PredictiveConfig
from hf_sparsekv.policies.ahead.query_ring import EPSILON, SLOTS, WINDOW
from hf_sparsekv.policies.device_tokens import DeviceTokens

TIGHT = {"token_budget": 32, "predictor": "assembled"}


class PredictiveOracle(Oracle):
    """Each decode step attends to the tokens that the step before has found best for the query it expected."""

    def __init__(self, config: PredictiveConfig) -> None:
        known = SimpleNamespace(**{**asdict(config), "level": "token", "num_blocks": None})
        super().__init__(known, lag=False)
        self.since: dict[int, list[int]] = {}  # layer: first token of each row whose query is still known
        self.selected = 0

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        before = self.layers[layer].full_blocks if layer in self.layers else []
        out = super().attend(layer, query, key, value, scale)
        state, config, length = self.layers[layer], self.config, key.shape[2]
        since = self.since.setdefault(layer, [0] * query.shape[0])
        # A step looks ahead if there is something to choose from before it seals a block, a prompt behind it.
        held = max(before if query.shape[2] == 1 else state.full_blocks, default=0) * config.block_size
        begun = held + config.window + config.max_draft >= config.start_length
        # A second device gets to choose whatever there is.
        few = 0 if config.cache_rank not in (None, "stream", "host") else config.token_budget
        state.last_query = None
        if state.channels is not None and held > few and begun:
            real = [self.real(row, length)[since[row] :] for row in range(len(since))]
            rows = [[self.predict(head[real[row]]) for head in state.queries[row]] for row in range(len(since))]
            state.last_query = torch.stack([torch.stack(heads) for heads in rows])
        return out

    def predict(self, queries: Tensor) -> Tensor:
        """The next of ``queries [columns, D]``."""
        if len(queries) == 1:
            return queries[-1]
        if not len(queries):
            return torch.zeros(queries.shape[1])
        n = min(WINDOW, len(queries) - 1)
        past, now = queries[-n - 1 : -1].flip(0).double(), queries[-1].double()
        gram, right = past @ past.T, past @ now
        gram += EPSILON * gram.diagonal().mean() * torch.eye(n)
        found = [
            torch.linalg.solve(gram[:k, :k], right[:k]).softmax(0) @ queries[-k:].flip(0).double()
            for k in range(1, n + 1)
        ]
        return torch.stack(found).mean(0).float()

    def decode_columns(self, state, layer, row, head, group, query, key) -> list[int]:
        config = self.config
        real = self.real(row, key.shape[2])
        if layer < config.dense_layers or state.last_query is None:
            return real
        sinks, near, free = self.parts(state, row, real)
        asking, kept = state.last_query[row, head * group : (head + 1) * group], key[row, head, free]
        channels = state.channels[row][head]
        each = asking[:, channels] @ self.labels(kept[:, channels], *state.norms[row][head]).T
        score = each.amax(0) if config.token_reduce == "max" else each.mean(0)
        best = dict(zip(free, score.tolist()))
        chosen = sorted(free, key=lambda c: (-best[c], c))[: config.token_budget]
        self.selected += 1
        return sorted({*sinks, *near, *chosen})

    def crop(self, length: int) -> None:
        """Queries that those of removed columns have overwritten are gone."""
        for layer, state in self.layers.items():
            ends = [len(self.real(row, state.queries.shape[2])) for row in range(len(self.since[layer]))]
            left = [len(self.real(row, length)) for row in range(len(ends))]
            self.since[layer] = [min(max(c, end - SLOTS), n) for c, end, n in zip(self.since[layer], ends, left)]
        super().crop(length)

    def map_rows(self, index: Tensor) -> None:
        super().map_rows(index)
        self.since = {layer: [since[i] for i in index.tolist()] for layer, since in self.since.items()}


class PredictiveRace(Race):
    def __init__(self, name: str = "llama", offload=False, captured: bool = False, **config) -> None:
        ours = predictive(offload, **{**TIGHT, **config})
        super().__init__(ours, PredictiveOracle(ours.config), name, captured)

    def agree(self) -> None:
        """As many tokens were attended to."""
        assert self.ours.stats().attended_tokens == self.oracle.attended
        assert self.oracle.selected


CASES = {
    "usual": (False, {}),
    "offloaded": (True, {}),
    "offloaded, not copied": (OffloadConfig(device_pool=0), {}),
    "whole keys": (False, {"label_channels": 16, "token_reduce": "mean"}),
    "mean": (False, {"token_reduce": "mean", "label_channels": 2}),
    "late": (True, {"start_length": 130}),
    "odd budget": (True, {"token_budget": 37}),
    "wide": (True, {"block_size": 32, "window": 5, "max_draft": 0, "sinks": 9}),
    "dense first": (False, {"dense_layers": 1, "sinks": 0}),
    "second device": (False, {"cache_rank": "cpu"}),
    "second device, late": (False, {"cache_rank": "cpu", "strict": True, "start_length": 130}),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("pads", [None, (5, 61)], ids=["unpadded", "padded"])
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "replayed"])
@pytest.mark.parametrize("case", CASES)
def test_logits_follow_the_oracle(case, captured, pads):
    """Over the sealing of two blocks: what is sealed is selectable in the next step."""
    offload, config = CASES[case]
    race = PredictiveRace("llama", offload, captured, **config)
    assert race.read(130, pads) < TOLERANCE
    steps = 36 if case == "wide" else 21
    assert race.run(steps) < TOLERANCE
    race.agree()
    assert not captured or race.runner.replays == steps


@pytest.mark.few(name=("llama-mqa", "qwen3"))
@pytest.mark.quick
@pytest.mark.parametrize("name", ["llama-mha", "llama-mqa", "qwen3"])
def test_other_head_groups(name):
    race = PredictiveRace(name, True, token_budget=20)
    race.read(120, (0, 9), seed=3)
    assert race.run(20) < TOLERANCE
    race.agree()


def test_calibration_ends_in_the_middle_of_an_answer():
    race = PredictiveRace(captured=True, calibration_tokens=70)
    race.feed(prompt(1, 60)["input_ids"])
    assert race.run(50) < TOLERANCE
    race.agree()


@pytest.mark.few
@pytest.mark.parametrize(
    ("place", "captured"), [("host", False), ("host", True), ("stream", True), ("cpu", False)], ids=str
)
def test_second_turn_crop_and_rows(place, captured):
    race = PredictiveRace("llama", place == "host", captured, cache_rank=place)
    # Some seeds come to near ties, which wide vectors of some processors turn.
    assert race.turns((3, 1, 20, 60), seed=3) < TOLERANCE  # drafts, and blocks that are reopened
    assert race.ours.stats().attended_tokens == race.oracle.attended


def test_selection_is_sparse_and_starts_when_it_shall():
    """Otherwise the tests above would pass for dense attention too."""
    ids = prompt(1, 200)["input_ids"]
    cache, late = predictive(False, **TIGHT), predictive(False, **TIGHT, start_length=201)
    with torch.no_grad():
        dense = reference("llama")(ids).logits[:, -1]
        found = []
        for one in (cache, late):
            model("llama")(ids[:, :199], past_key_values=one)
            found.append(model("llama")(ids[:, 199:], past_key_values=one).logits[:, -1])
    assert (found[0] - dense).abs().max() > 100 * TOLERANCE
    torch.testing.assert_close(found[1], dense, atol=TOLERANCE, rtol=0)
    assert cache.stats().sparse_calls == 2 and cache.stats().attended_share < 0.5
    assert late.stats().dense_calls == 2 and late.stats().crossover_calls == 0


# ---------------------------------------------------------------------- the next step


def decode(cache, steps: int = 20, length: int = 150, net=None, seed: int = 5) -> Tensor:
    net = net or model("llama")
    ids = prompt(2, length + steps, seed=seed)["input_ids"]
    with torch.no_grad():
        net(ids[:, :length], past_key_values=cache)
        rows = [net(token, past_key_values=cache).logits.clone() for token in ids[:, length:].split(1, dim=1)]
    return torch.cat(rows, dim=1)


def test_a_step_reads_no_selection_that_is_being_made():
    """What a step chooses is not there until its own attention is over."""
    cache = predictive(True, **TIGHT)
    ids = prompt(2, 152, seed=5)["input_ids"]
    with torch.no_grad():
        model("llama")(ids[:, :150], past_key_values=cache)
        for token in ids[:, 150:].split(1, dim=1):
            seen: list[bool] = []
            for layer in cache.sparse_layers:
                policy, attend = layer.policy, layer.policy.attend
                before = (
                    policy.ids.clone(),
                    policy.tokens.slots.clone(),
                    policy.tokens.kv.view(torch.int32).clone(),
                )  # bits: what is empty may be NaN

                def watch(*args, attend=attend, policy=policy, before=before, seen=seen):
                    out = attend(*args)
                    after = (policy.ids, policy.tokens.slots, policy.tokens.kv.view(torch.int32))
                    seen.append(all(torch.equal(a, b) for a, b in zip(before, after)))
                    return out

                policy.attend = watch
            model("llama")(token, past_key_values=cache)
            assert seen == [True, True]
            for layer in cache.sparse_layers:
                del layer.policy.attend


@pytest.mark.parametrize("rank", ["host", "cpu"])
def test_a_reset_counts_anew(rank):
    cache = predictive(False, **TIGHT, cache_rank=rank)
    decode(cache)
    assert cache.stats().needed > 0
    cache.reset()
    assert (cache.stats().needed, cache.stats().hit_rate) == (0, None)


def test_only_newly_chosen_tokens_travel():
    cache, bare = predictive(True, **TIGHT), predictive(OffloadConfig(device_pool=0), **TIGHT)
    torch.testing.assert_close(decode(cache), decode(bare), atol=1e-4, rtol=1e-4)
    stats = cache.stats()
    token = cache.sparse_layers[0].store.token_bytes
    chosen = 21 * 2 * 2 * 2 * 32  # of 20 steps and the prompt, in two layers, rows and heads
    found = [layer.policy.measured()[0] for layer in cache.sparse_layers]
    assert sum(p.needed for p in found) == chosen
    assert 0 < sum(p.copied for p in found) < 0.9 * chosen
    assert sum(p.bytes for p in found) == sum(p.copied for p in found) * token
    assert stats.hit_rate == pytest.approx(1 - sum(p.copied for p in found) / chosen)
    assert sum(int(layer.store.counters.total_from_host) for layer in cache.sparse_layers) == 0
    assert bare.stats().hit_rate is None


def test_a_device_pool_too_small_for_the_copies_is_told():
    with pytest.warns(UserWarning, match="copies of the chosen tokens take .*, 9000 are allowed"):
        decode(cache := predictive(OffloadConfig(device_pool=9000), **TIGHT))
    assert all(layer.policy.tokens is None for layer in cache.sparse_layers)
    torch.testing.assert_close(decode(predictive(True, **TIGHT)), decode(predictive(False, **TIGHT)))


def test_full_device_memory_is_told(monkeypatch):
    expected = decode(predictive(True, **TIGHT))
    made = iter((DeviceTokens.__init__, None, None, None, None))

    def full(self, *args):
        if (make := next(made)) is None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        make(self, *args)

    monkeypatch.setattr(DeviceTokens, "__init__", full)
    cache = predictive(True, **TIGHT)
    with pytest.warns(UserWarning, match="no device memory for copies of chosen tokens .CUDA out of memory") as told:
        assert torch.equal(decode(cache), expected)
    assert len(told) == 1
    assert [layer.policy.tokens is None for layer in cache.sparse_layers] == [False, True]


def test_a_capture_copies_nothing():
    """Its trial runs leave the copied tokens as they are."""
    net = build("llama", "sparsekv")
    runner = Imitation(net)
    runner.install()
    cache = predictive(True, **TIGHT)
    ids = prompt(2, 151, seed=5)["input_ids"]
    record, kept = runner.recorder.record, []

    def state():
        copies = [layer.policy.tokens for layer in cache.sparse_layers]
        return [t.view(torch.int32).clone() for held in copies for t in (*held.of_rows(), held.counters)]

    def watch(*args):
        kept.append(state())
        found = record(*args)
        kept.append(state())
        return found

    runner.recorder.record = watch
    with torch.no_grad():
        net(ids[:, :150], past_key_values=cache)
        net(ids[:, 150:], past_key_values=cache)
    before, after = kept
    for a, b in zip(before, after):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert any(not torch.equal(a, b) for a, b in zip(before, state()))


def test_copies_and_two_caches_go_their_own_ways():
    cache, other = predictive(True, **TIGHT), predictive(False, **TIGHT)
    decode(cache, steps=5)
    copied = copy.deepcopy(cache)
    ids = prompt(2, 20, seed=8)["input_ids"]
    first, second = [], []
    with torch.no_grad():
        model("llama")(prompt(1, 90)["input_ids"], past_key_values=other)
        for token in ids.split(1, dim=1):
            first.append(model("llama")(token, past_key_values=cache).logits)
            model("llama")(token[:1], past_key_values=other)
        second += [model("llama")(t, past_key_values=copied).logits for t in ids.split(1, dim=1)]
    torch.testing.assert_close(torch.cat(first), torch.cat(second))
    assert other.get_seq_length() == 110


@pytest.mark.parametrize("name", ["llama", "deepseek-v3"])
def test_something_else_attends_in_between(name):
    """Without their queries the columns' ring is empty; the next step attends to everything and goes on."""
    net = build(name, "sparsekv")
    cache = predictive(False, **TIGHT)
    ids = prompt(2, 140)["input_ids"]
    with torch.no_grad():
        net(ids[:, :120], past_key_values=cache)
        net.set_attn_implementation("sdpa")
        with pytest.warns(UserWarning, match="reads the keys"):
            net(ids[:, 120:130], past_key_values=cache)
        net.set_attn_implementation("sparsekv")
        queries = cache.sparse_layers[0].policy.queries
        assert queries.count.tolist() == [0, 0]
        for token in ids[:, 130:].split(1, dim=1):
            net(token, past_key_values=cache)
    assert queries.count.tolist() == [10, 10]
    assert (cache.stats().dense_calls, cache.stats().sparse_calls) == (2, 18)
