"""Progressive decode steps against an independent walk over plain keys: the same logits, step by step."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from types import SimpleNamespace

import pytest
import torch
from caches import progressive
from captured import Imitation
from models import build, model, prompt
from oracle import TOLERANCE, Oracle, Race

from hf_sparsekv import OffloadConfig, ProgressiveCache, ProgressiveConfig, TokenConfig


class WalkOracle(Oracle):
    """Which tokens each step must attend to, by the definitions, over the keys of a stock cache."""

    def __init__(self, config: ProgressiveConfig) -> None:
        more = {"level": "token", "label_channels": config.label_channels or 16}  # all of them
        more |= {"threshold": config.threshold, "max_tokens": config.max_tokens}
        super().__init__(SimpleNamespace(**{**asdict(config), **more}), lag=False)
        self.shares: list[float] = []
        self.used: list[int] = []  # tokens beside the near ones

    def attend(self, layer, query, key, value, scale):
        self.scale = scale
        return super().attend(layer, query, key, value, scale)

    def decode_columns(self, state, layer, row, head, group, query, key) -> list[int]:
        config, size = self.config, self.config.block_size
        real = self.real(row, key.shape[2])
        blocks = max(state.full_blocks, default=0)
        few = blocks * size <= config.min_tokens
        if layer < config.dense_layers or few or state.channels is None:
            return real
        sinks, recent, free = self.parts(state, row, real)
        mine = query[row, head * group : (head + 1) * group, 0].double()
        keys = key[row, head].double()
        mass = (mine @ keys.T * self.scale).exp()  # [group, length]
        first = sorted({*sinks, *recent})
        channels, norms = state.channels[row][head], state.norms[row][head]
        taken = self.by_labels(mine[:, channels], key[row, head][:, channels], norms, mass, first, recent, free)
        self.used.append(len(taken))
        columns = sorted({*first, *taken})
        self.shares.append(float((mass[:, columns].sum(1) / mass[:, real].sum(1)).min()))
        return columns

    def by_labels(self, mine, keys, norms, mass, first, recent, free) -> list[int]:
        config = self.config
        said = (mine @ keys[recent].double().T * self.scale).exp()
        over = (mass[:, recent] / said).mean(1, keepdim=True)
        labels = self.labels(keys[free], *norms).double()
        held = (mine @ labels.T * self.scale).exp() * over  # [group, free tokens]
        whole = mass[:, first].sum(1) + held.sum(1)
        share = held.sum(0) / whole.sum() if config.group_reduce == "sum" else (held / whole[:, None]).amax(0)
        bins = (-8 * share.log2()).floor().clamp(0, 254).tolist()
        order = sorted(range(len(free)), key=lambda i: (bins[i], i))
        middles = [2 ** (-(b + 0.5) / 8) for b in bins]
        left, count = sum(middles), 0
        for b in sorted(set(bins)):
            if left <= 1 - config.threshold + 1e-12:
                break
            count += bins.count(b)
            left -= bins.count(b) * 2 ** (-(b + 0.5) / 8)
        count = max(count, config.min_tokens)
        count = count if config.max_tokens is None else min(count, config.max_tokens)
        return [free[i] for i in order[:count]]


class WalkRace(Race):
    def __init__(self, name: str = "llama", offload=False, captured: bool = False, **config) -> None:
        ours = progressive(offload, **config)
        super().__init__(ours, WalkOracle(ours.config), name, captured)

    def agree(self) -> None:
        """The same number of tokens, but for shares on the border of two bins: the oracle has float64."""
        stats, rel = self.ours.stats(), 1e-3
        assert stats.attended_tokens == pytest.approx(self.oracle.attended, rel=rel, abs=0)
        if stats.walks:
            assert sum(w.tokens_used for w in stats.walks) == pytest.approx(sum(self.oracle.used), rel=rel, abs=0)
            assert sum(w.walks for w in stats.walks) == len(self.oracle.used)


CASES = {
    "usual": (False, {}),
    "offloaded": (True, {}),
    "small pool": (OffloadConfig(device_pool=20_000), {}),
    "high": (False, {"mass": 0.97}),
    "no floor": (True, {"min_tokens": 0, "mass": 0.3}),
    "sum": (False, {"group_reduce": "sum"}),
    "whole labels": (True, {"label_channels": 16, "mass": 0.8}),
    "few channels": (False, {"label_channels": 6}),
    "capped": (True, {"most": 29, "mass": 0.9}),
    "at least": (True, {"min_tokens": 50, "mass": 0.3}),
    "wide": (True, {"block_size": 32, "window": 5, "max_draft": 0, "sinks": 9}),
    "dense first": (False, {"dense_layers": 1, "sinks": 0}),
}


UNPADDED = ("usual", "capped")


@pytest.mark.few
@pytest.mark.parametrize(("case", "pads"), [*((case, (5, 61)) for case in CASES), *((case, None) for case in UNPADDED)])
def test_logits_follow_the_oracle(case, pads):
    offload, config = CASES[case]
    race = WalkRace("llama", offload, **config)
    assert race.read(130, pads) < TOLERANCE
    assert race.run(36 if case == "wide" else 21) < TOLERANCE  # two blocks are sealed
    race.agree()


@pytest.mark.few(name=("llama-mqa", "qwen3"))
@pytest.mark.parametrize("name", ["llama-mha", "llama-mqa", "qwen3"])
def test_other_head_groups(name):
    race = WalkRace(name, True, mass=0.5)
    race.read(120, (0, 9), seed=3)
    assert race.run(20) < TOLERANCE
    race.agree()


def test_the_walk_stops_early():
    """Otherwise the tests above would pass for dense attention too."""
    race = WalkRace(mass=0.5)
    ids = prompt(1, 200)["input_ids"]
    race.feed(ids[:, :199])
    race.feed(ids[:, 199:])
    dense = model("llama", "sdpa")(ids).logits[:, -1]
    race.mask, race.stock = race.mask[:, :-1], None
    race.ours.crop(-1)
    with torch.no_grad():
        sparse = model("llama")(ids[:, 199:], past_key_values=race.ours).logits[:, -1]
    assert (sparse - dense).abs().max() > 100 * TOLERANCE
    assert race.ours.stats().attended_share < 0.8


@pytest.mark.parametrize("offload", [True, False])
def test_second_turn_crop_and_rows(offload):
    race = WalkRace("llama", offload)
    assert race.turns((3, 20, 60)) < TOLERANCE
    assert race.ours.stats().attended_tokens == race.oracle.attended


# ---------------------------------------------------------------------- numbers


def decode(cache, steps: int = 20, length: int = 150, net=None):
    net = net or model("llama")
    ids = prompt(2, length + steps, seed=5)["input_ids"]
    rows = []
    with torch.no_grad():
        net(ids[:, :length], past_key_values=cache)
        for token in ids[:, length:].split(1, dim=1):
            rows.append(net(token, past_key_values=cache).logits.clone())
    return torch.cat(rows, dim=1)


def test_statistics():
    cache = progressive(False, dense_layers=1)
    decode(cache)
    stats = cache.stats()
    (walk,) = stats.walks
    assert walk.layer == 1
    assert walk.walks == sum(walk.histogram) == 20 * 2 * 2
    assert walk.tokens_used > 0
    assert 0.55 < walk.least_mass <= walk.mass <= 1
    assert stats.estimated_mass == walk.mass
    assert stats.tokens_per_walk == walk.tokens_used / walk.walks
    assert "tokens chosen for an estimated mass of" in str(stats)
    assert stats.covered_mass is None
    cache.reset()
    assert cache.stats().walks[0].walks == 0
    assert cache.stats().estimated_mass is None


def test_a_cap_that_decides_is_told():
    cache = progressive(False, most=9, mass=0.99)
    decode(cache)
    stats = cache.stats()
    assert all(8 * w.walks <= w.tokens_used <= 9 * w.walks for w in stats.walks)
    assert any(w.capped for w in stats.walks)
    assert "ended by token_budget" in str(stats)
    free = progressive(False)
    decode(free)
    assert not any(w.capped for w in free.stats().walks)


@pytest.mark.few
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("reduce", ["all", "sum"])
def test_audits_tell_the_true_mass(offload, captured, reduce):
    """Against the shares that the oracle works out from plain keys."""
    ids = prompt(2, 170, seed=5)["input_ids"]
    race = WalkRace("llama", False, mass=0.7)
    race.feed(ids[:, :150])
    for token in ids[:, 150:].split(1, dim=1):
        race.feed(token)
    net = model("llama")
    if captured:
        net = build("llama", "sparsekv")
        runner = Imitation(net)
        runner.install()
    cache = progressive(offload, mass=0.7, audit_every=1, group_reduce=reduce)
    decode(cache, net=net)
    walks = cache.stats().walks
    assert not captured or runner.replays == 20
    assert sum(w.audits for w in walks) == len(race.oracle.shares) == 20 * 2 * 2 * 2
    if reduce == "all":
        assert cache.stats().covered_mass == pytest.approx(sum(race.oracle.shares) / 160, abs=1e-4)
        assert min(w.least_audited_mass for w in walks) == pytest.approx(min(race.oracle.shares), abs=1e-4)
    for walk in walks:
        assert walk.audited_estimate == pytest.approx(walk.mass, abs=1e-6)  # all walks were audited
        assert 0 < walk.least_audited_mass <= walk.audited_mass <= 1
    assert "covered mass" in str(cache.stats())


def test_audits_of_some_steps_change_nothing():
    plain, audited = progressive(True), progressive(True, audit_every=7)
    assert torch.equal(decode(plain), decode(audited))
    walks = audited.stats().walks
    assert [w.audits for w in walks] == [3 * 4, 3 * 4]  # steps 0, 7 and 14
    assert plain.stats().attended_tokens == audited.stats().attended_tokens
    assert plain.stats().host_to_device_bytes == audited.stats().host_to_device_bytes


def test_tokens_are_found_on_the_device():
    """Tokens that the last steps have used are there, and less is read in host memory."""
    cache = progressive(True)
    decode(cache, steps=60)
    few = progressive(OffloadConfig(device_pool=0))
    decode(few, steps=60)
    read = sum(int(layer.store.counters.total_from_host) for layer in cache.sparse_layers)
    assert read < 0.4 * sum(int(layer.store.counters.total_from_host) for layer in few.sparse_layers)
    assert cache.stats().hit_rate > 0.5


@pytest.mark.gpu
@pytest.mark.parametrize("offload", [False, True])
def test_captured_audits_on_a_gpu(offload):
    from hf_sparsekv import optimize

    ids = prompt(2, 170, seed=5)["input_ids"]
    expected = progressive(offload, mass=0.7, audit_every=1)
    decode(expected)
    net = optimize(build("llama", "sparsekv").cuda(), fused=False)
    cache = progressive(offload, mass=0.7, audit_every=1)
    with torch.no_grad():
        net(ids[:, :150].cuda(), past_key_values=cache)
        for token in ids[:, 150:].cuda().split(1, dim=1):
            net(token, past_key_values=cache)
    ours, theirs = cache.stats(), expected.stats()
    assert ours.covered_mass == pytest.approx(theirs.covered_mass, abs=1e-3)
    assert ours.estimated_mass == pytest.approx(theirs.estimated_mass, abs=1e-3)
    assert ours.attended_tokens == pytest.approx(theirs.attended_tokens, rel=0.01)


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "wrong, says",
    [
        ({"mass": 0}, r"mass must be a number in \(0, 1\], got 0"),
        ({"mass": 1.5}, "mass must be a number in"),
        ({"mass": True}, "mass must be a number in"),
        ({"group_reduce": "mean"}, "group_reduce must be 'all' or 'sum'"),
        ({"min_tokens": -1}, r"min_tokens must be an integer in \[0, 2147483647\]"),
        ({"token_budget": 0}, r"token_budget must be an integer in \[1, 2147483647\]"),
        ({"token_budget": 100}, "token_budget=100 is less than min_tokens=256"),
        ({"token_budget": 1 << 31}, r"token_budget must be an integer in \[1, 2147483647\]"),
        ({"audit_every": -1}, "audit_every must be a positive integer"),
    ],
)
def test_configurations_are_checked(wrong, says):
    with pytest.raises(ValueError, match=says):
        ProgressiveConfig(**wrong)


@dataclass(frozen=True, kw_only=True)
class Mine(ProgressiveConfig):
    """A configuration made from one of ours."""

    extra: int = 0


def test_configurations_made_from_ours():
    assert Mine(extra=2, mass=0.5).extra == 2
    with pytest.raises(TypeError, match="Mine got an unexpected keyword argument 'never_was'"):
        Mine(never_was=1)
    with pytest.raises(TypeError, match="ProgressiveConfig got an unexpected keyword argument 'extra'"):
        ProgressiveConfig(extra=1)


def test_the_cache_takes_its_own_configuration():
    with pytest.raises(TypeError, match="config must be a ProgressiveConfig, got TokenConfig"):
        ProgressiveCache(TokenConfig())
    with pytest.raises(TypeError, match="offload must be an OffloadConfig or None"):
        ProgressiveCache(offload=True)
    assert ProgressiveCache().config == ProgressiveConfig()
