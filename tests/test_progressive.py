"""Progressive decode steps against an independent walk over plain keys: the same logits, step by step."""

from __future__ import annotations

import math
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from caches import progressive
from captured import Imitation
from models import build, model, prompt
from oracle import TOLERANCE, Oracle, Race

from hf_sparsekv import OffloadConfig, ProgressiveCache, ProgressiveConfig, TwoLevelConfig
from hf_sparsekv.policies.progressive import SLOPES


class WalkOracle(Oracle):
    """PSA's Algorithm 1 over the keys of a stock cache, a block at a time."""

    def __init__(self, config: ProgressiveConfig) -> None:
        super().__init__(SimpleNamespace(**asdict(config), level="block"), lag=False)
        self.used: list[int] = []
        self.shares: list[float] = []

    def attend(self, layer, query, key, value, scale):
        self.scale = scale
        return super().attend(layer, query, key, value, scale)

    def decode_columns(self, state, layer, row, head, group, query, key) -> list[int]:
        config, size = self.config, self.config.block_size
        real = self.real(row, key.shape[2])
        if layer < config.dense_layers or not state.full_blocks:
            return real
        sinks = real[: config.sinks]
        near = [c for c in real if c >= state.full_blocks * size]
        free = [c for c in real if c < state.full_blocks * size and c not in sinks]
        mine = query[row, head * group : (head + 1) * group, 0]
        inside: dict[int, list[int]] = {}
        for c in free:
            inside.setdefault(c // size, []).append(c)
        bounds = {b: self._bound(mine, key[row, head], columns) for b, columns in inside.items()}
        order = sorted(inside, key=lambda b: (-bounds[b][0], b))
        mass = (mine.double() @ key[row, head].double().T * self.scale).exp()  # [group, length]
        first = list({*sinks, *near})
        acc, least, left = mass[:, first].sum(1), torch.full((group,), math.inf), len(free)
        summed_least, taken, ratios = math.inf, [], []
        expected = {b: len(columns) * bounds[b][1] for b, columns in inside.items()}
        for b in order if config.max_blocks is None else order[: config.max_blocks]:
            held = mass[:, inside[b]].sum(1)
            acc, left = acc + held, left - len(inside[b])
            least = torch.minimum(least, held / len(inside[b]))
            summed_least = min(summed_least, float(held.sum()) / len(inside[b]))
            taken.append(b)
            over, summed = least * left, summed_least * left
            if config.estimate != "as_min":
                over = sum((expected[j] for j in order[len(taken) :]), torch.zeros(group))
                summed = over.sum()
            if config.estimate == "scores":
                ratios += [torch.cat((held / expected[b], (held.sum() / expected[b].sum())[None]))]
                mean = torch.stack(ratios).mean(0)
                over, summed = over * mean[:-1], summed * mean[-1]
            share = acc / (acc + over)
            if config.group_reduce == "sum":
                share = acc.sum() / (acc.sum() + summed)
            if float(share.min()) > config.threshold and len(taken) >= config.min_blocks:
                break
        self.used.append(len(taken))
        columns = sorted({*first, *(c for b in taken for c in inside[b])})
        self.shares.append(float((mass[:, columns].sum(1) / mass[:, real].sum(1)).min()))
        return columns

    def _bound(self, queries, keys, columns) -> tuple[float, torch.Tensor]:
        """The block's score, and for each query head the mass that its tokens are taken to have."""
        part = self.config.bound_tokens or self.config.block_size
        parts = [[c for c in columns if c // part == p] for p in sorted({c // part for c in columns})]
        score = max(self.block_bound(queries, keys[one]) for one in parts)
        slope = SLOPES[self.config.metadata] if self.config.estimate == "scores" else 1.0
        each = torch.stack([self.block_bounds(queries, keys[one]) for one in parts]).amax(0)
        return score, (each.double() * self.scale * slope).exp()


class WalkRace(Race):
    def __init__(self, name: str = "llama", offload=False, **config) -> None:
        ours = progressive(offload, **config)
        super().__init__(ours, WalkOracle(ours.config), name)

    def agree(self) -> None:
        """The same blocks, and the same number of tokens."""
        stats = self.ours.stats()
        assert stats.attended_tokens == self.oracle.attended
        assert stats.blocks_chosen == sum(self.oracle.used)
        assert sum(w.walks for w in stats.walks) == len(self.oracle.used)


CASES = {
    "usual": (False, {}),
    "offloaded": (True, {}),
    "small pool": (OffloadConfig(device_pool=20_000), {}),
    "high": (False, {"threshold": 0.9}),
    "paper": (False, {"estimate": "as_min"}),
    "paper's sum": (True, {"estimate": "as_min", "group_reduce": "sum"}),
    "scores of parts": (True, {"bound_tokens": 4, "group_reduce": "sum"}),
    "scores of boxes": (False, {"metadata": "min_max", "threshold": 0.8}),
    "mean of keys": (True, {"metadata": "mean", "block_reduce": "mean"}),
    "box": (False, {"metadata": "min_max", "bound_tokens": 4}),
    "bound": (False, {"metadata": "min_max", "estimate": "bound"}),
    "bound of parts": (True, {"metadata": "min_max", "estimate": "bound", "bound_tokens": 4, "group_reduce": "sum"}),
    "sum": (False, {"group_reduce": "sum"}),
    "capped": (True, {"max_blocks": 2, "threshold": 0.9}),
    "at least": (True, {"min_blocks": 3, "threshold": 0.3}),
    "wide": (True, {"block_size": 32, "window": 5, "max_draft": 0, "sinks": 9}),
    "dense first": (False, {"dense_layers": 1, "sinks": 0}),
}


@pytest.mark.parametrize("pads", [None, (5, 61)], ids=["unpadded", "padded"])
@pytest.mark.parametrize("case", CASES)
def test_logits_follow_the_oracle(case, pads):
    offload, config = CASES[case]
    race = WalkRace("llama", offload, **config)
    start = prompt(2 if pads else 1, 130, pads)
    assert race.feed(start["input_ids"], start["attention_mask"]) < TOLERANCE
    assert race.run(30) < TOLERANCE
    race.agree()


@pytest.mark.quick
@pytest.mark.parametrize("name", ["llama-mha", "llama-mqa", "qwen3"])
def test_other_head_groups(name):
    race = WalkRace(name, True, threshold=0.5)
    start = prompt(2, 120, (0, 9), seed=3)
    race.feed(start["input_ids"], start["attention_mask"])
    assert race.run(20) < TOLERANCE
    race.agree()


def test_the_walk_stops_early():
    """Otherwise the tests above would pass for dense attention too."""
    race = WalkRace(threshold=0.5)
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
    first = prompt(3, 100, (0, 5, 35))
    race.feed(first["input_ids"], first["attention_mask"])
    assert race.run(10) < TOLERANCE
    second = prompt(3, 40, (17, 0, 39), seed=1)  # leaves holes in the middle of the rows
    assert race.feed(second["input_ids"], second["attention_mask"]) < TOLERANCE
    assert race.run(10, seed=2) < TOLERANCE
    for seed, remove in enumerate((3, 20, 60)):
        race.crop(remove)
        assert race.run(10, seed=seed) < TOLERANCE
    for index in ([2, 0, 0], [1, 2], [0, 1, 1, 0]):
        race.map_rows(torch.tensor(index))
        assert race.run(8, seed=4) < TOLERANCE
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
    assert walk.blocks_read >= walk.blocks_used == stats.blocks_chosen > 0
    assert 0.6 < walk.least_mass <= walk.mass <= 1
    assert stats.estimated_mass == walk.mass
    assert stats.blocks_per_walk == walk.blocks_used / walk.walks
    assert "blocks a walk for an estimated mass of" in str(stats)
    assert stats.covered_mass is None
    cache.reset()
    assert cache.stats().walks[0].walks == 0
    assert cache.stats().estimated_mass is None


def test_a_cap_that_decides_is_told():
    cache = progressive(False, max_blocks=1, threshold=0.99)
    decode(cache)
    stats = cache.stats()
    assert all(w.blocks_used <= w.walks for w in stats.walks)
    assert any(w.capped for w in stats.walks)
    assert "ended by max_blocks" in str(stats)
    free = progressive(False)
    decode(free)
    assert not any(w.capped for w in free.stats().walks)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("reduce", ["all", "sum"])
def test_audits_tell_the_true_mass(offload, captured, reduce):
    """Against the shares that the oracle works out from plain keys."""
    ids = prompt(2, 170, seed=5)["input_ids"]
    race = WalkRace("llama", False, threshold=0.7)
    race.feed(ids[:, :150])
    for token in ids[:, 150:].split(1, dim=1):
        race.feed(token)
    net = model("llama")
    if captured:
        net = build("llama", "sparsekv")
        runner = Imitation(net)
        runner.install()
    cache = progressive(offload, threshold=0.7, audit_every=1, group_reduce=reduce)
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


def test_the_guarantee_holds():
    """With Quest's bound on what is left, no walk covers less than the threshold."""
    cache = progressive(False, metadata="min_max", estimate="bound", bound_tokens=1, threshold=0.5, audit_every=1)
    decode(cache)
    stats = cache.stats()
    assert all(w.least_audited_mass > 0.5 for w in stats.walks)
    assert stats.attended_share < 0.99


@pytest.mark.parametrize("offload", [True, OffloadConfig(device_pool=0), OffloadConfig(device_pool=9_000)])
def test_pools_do_not_show(offload):
    torch.testing.assert_close(decode(progressive(offload)), decode(progressive(False)), rtol=1e-4, atol=1e-4)


def test_blocks_are_found_on_the_device():
    """What the last step has used is there, and little is read in host memory."""
    cache = progressive(True)
    decode(cache, steps=60)
    few = progressive(OffloadConfig(device_pool=0))
    decode(few, steps=60)
    read = sum(int(layer.store.counters.total_from_host) for layer in cache.sparse_layers)
    assert read < 0.3 * sum(int(layer.store.counters.total_from_host) for layer in few.sparse_layers)
    assert cache.stats().hit_rate > 0.5


def test_a_copy_goes_its_own_way():
    import copy

    cache = progressive(True)
    decode(cache, steps=5)
    copied = copy.deepcopy(cache)
    ids = prompt(2, 20, seed=8)["input_ids"]
    with torch.no_grad():
        first = [model("llama")(t, past_key_values=cache).logits for t in ids.split(1, dim=1)]
        second = [model("llama")(t, past_key_values=copied).logits for t in ids.split(1, dim=1)]
    torch.testing.assert_close(torch.cat(first), torch.cat(second))


@pytest.mark.gpu
@pytest.mark.parametrize("offload", [False, True])
def test_captured_audits_on_a_gpu(offload):
    from hf_sparsekv import optimize

    ids = prompt(2, 170, seed=5)["input_ids"]
    expected = progressive(offload, threshold=0.7, audit_every=1)
    decode(expected)
    net = optimize(build("llama", "sparsekv").cuda(), fused=False)
    cache = progressive(offload, threshold=0.7, audit_every=1)
    with torch.no_grad():
        net(ids[:, :150].cuda(), past_key_values=cache)
        for token in ids[:, 150:].cuda().split(1, dim=1):
            net(token, past_key_values=cache)
    ours, theirs = cache.stats(), expected.stats()
    assert ours.covered_mass == pytest.approx(theirs.covered_mass, abs=1e-3)
    assert ours.estimated_mass == pytest.approx(theirs.estimated_mass, abs=1e-3)
    assert ours.blocks_chosen == pytest.approx(theirs.blocks_chosen, rel=0.01)


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "wrong, says",
    [
        ({"threshold": 0}, r"threshold must lie in \(0, 1\], got 0"),
        ({"threshold": 1.5}, "threshold must lie in"),
        ({"threshold": True}, "threshold must lie in"),
        ({"metadata": "max"}, "metadata must be one of 'min_max', 'cuboid_mean', 'mean'"),
        ({"estimate": "bound"}, "estimate='bound' needs metadata='min_max'"),
        ({"estimate": "none"}, "estimate must be one of"),
        ({"group_reduce": "mean"}, "group_reduce must be one of 'all', 'sum'"),
        ({"execution": "host"}, "ProgressiveConfig no longer has execution: leave it out. The GPU ends each walk"),
        ({"min_blocks": 0}, "min_blocks must be a positive integer"),
        ({"micro_batch": 16}, "ProgressiveConfig no longer has micro_batch: leave it out"),
        ({"max_blocks": 0}, "max_blocks must be a positive integer"),
        ({"max_blocks": 1 << 31}, "max_blocks must be less than 2\\^31"),
        ({"audit_every": -1}, "audit_every must be a positive integer"),
        ({"bound_tokens": 128}, "bound_tokens=128 exceeds block_size=64"),
        ({"block_reduce": "sum"}, "block_reduce must be one of"),
    ],
)
def test_configurations_are_checked(wrong, says):
    with pytest.raises(ValueError, match=says):
        ProgressiveConfig(**wrong)


def test_the_cache_takes_its_own_configuration():
    with pytest.raises(TypeError, match="config must be a ProgressiveConfig, got TwoLevelConfig"):
        ProgressiveCache(TwoLevelConfig())
    with pytest.raises(TypeError, match="offload must be an OffloadConfig or None"):
        ProgressiveCache(offload=True)
    assert ProgressiveCache().config == ProgressiveConfig()
