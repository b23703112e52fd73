"""Tokens by need for a query that is expected: against an oracle, and beside the same by a layer's own query."""

from __future__ import annotations

import pytest
import torch
from caches import FULL, TAIL, by_need, predictive
from captured import imitated, same_counts
from models import build, prompt
from oracle import NAME, TOLERANCE, Race
from test_layer_ahead import LayerOracle
from test_progressive import WalkOracle
from torch import Tensor

from hf_sparsekv import OffloadConfig, PredictiveConfig, SparseCache, predict_ahead
from hf_sparsekv.policies import by_need as by_need_module
from hf_sparsekv_config import labels

NEED = {"mass": 0.9, "token_budget": None}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Lists of few tokens are not all equally long."""
    monkeypatch.setattr(labels, "MIN_TOKENS", 8)


class _ByNeed:
    """Options of an oracle in place of a fixed number of tokens: until the share of each query head is covered."""

    def take_options(self, config: PredictiveConfig) -> None:
        for name in ("threshold", "min_tokens", "max_tokens", "group_reduce"):
            setattr(self.config, name, getattr(config, name))
        self.config.token_budget = config.min_tokens  # up to so many, all are attended to
        self.used: list[int] = []

    def attend(self, layer, query, key, value, scale):
        self.scale = scale
        return super().attend(layer, query, key, value, scale)

    def needed(self, state, row, head, asking: Tensor, key: Tensor, without: int | None) -> list[int]:
        """For ``asking [group, D]``, which was there when the key of column ``without`` was not."""
        real = self.real(row, key.shape[2])
        sinks, recent, free = self.parts(state, row, real)
        known = [c for c in recent if c != without]
        mine, channels = asking.double(), state.channels[row][head]
        mass = (mine @ key[row, head].double().T * self.scale).exp()
        kept, norms = key[row, head][:, channels], state.norms[row][head]
        first = sorted({*sinks, *known})
        taken = WalkOracle.by_labels(self, mine[:, channels], kept, norms, mass, first, known, free)
        self.used.append(len(taken))
        return taken

    def attended_to(self, state, row, real, taken) -> list[int]:
        sinks, recent, _ = self.parts(state, row, real)
        return sorted({*sinks, *recent, *taken})


class LayerNeedOracle(_ByNeed, LayerOracle):
    def __init__(self, config: PredictiveConfig) -> None:
        super().__init__(config)
        self.take_options(config)

    def decode_columns(self, state, layer, row, head, group, query, key) -> list[int]:
        if not self.selects(layer) or state.channels is None:
            return self.real(row, key.shape[2])
        self.selected += 1
        expected = self.expected.get(layer)
        asking = (query if expected is None else expected)[row, head * group : (head + 1) * group, 0]
        newest = key.shape[2] - 1  # the layer before begins before this one stores it
        taken = self.needed(state, row, head, asking, key, None if expected is None else newest)
        return self.attended_to(state, row, self.real(row, key.shape[2]), taken)


class NeedRace(Race):
    def __init__(self, name: str = "llama", offload=False, captured: bool = False, **config) -> None:
        ours = predictive(offload, **config)
        super().__init__(ours, LayerNeedOracle(ours.config), name, captured)
        if not captured:
            self.model = build(name, "sparsekv")
            predict_ahead(self.model)
        self.plain = build(name, NAME)
        self.oracle.follow(self.plain, ours.config.prediction.partition(":")[2] or "in")

    def agree(self) -> None:
        """The same number of tokens, but for one or two on the border of two bins: the oracle has float64."""
        stats = self.ours.stats()
        assert stats.attended_tokens == pytest.approx(self.oracle.attended, rel=1e-3, abs=2)
        used, walks = (sum(getattr(w, name) for w in stats.walks) for name in ("tokens_used", "walks"))
        assert walks == len(self.oracle.used)
        assert used == pytest.approx(sum(self.oracle.used), rel=1e-3, abs=2)
        assert len(set(self.oracle.used)) > 5


CASES = {
    "usual": ("llama", False, NEED),
    "offloaded": ("llama", True, NEED),
    "offloaded, not copied": ("llama", OffloadConfig(device_pool=0), NEED),
    "a small pool": ("llama", OffloadConfig(device_pool=20_000), NEED),
    "what the layer before has added": ("qwen3", True, {**NEED, "predictor": "layer:in_delta"}),
    "few channels": ("llama-mqa", False, {**NEED, "mass": 0.7, "label_channels": 4}),
    "capped": ("llama-mha", True, {**NEED, "mass": 0.95, "token_budget": 37}),
    "late": ("llama", False, {**NEED, "start_length": 130}),
    "dense first": ("llama", True, {**NEED, "dense_layers": 1, "sinks": 0}),
    "wide": ("llama", False, {**NEED, "block_size": 32, "window": 5, "max_draft": 0, "sinks": 9}),
}


@pytest.mark.pairwise(once=("case",))
@pytest.mark.parametrize("pads", [None, (5, 61)], ids=["unpadded", "padded"])
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "replayed"])
@pytest.mark.parametrize("case", CASES)
def test_logits_follow_the_oracle(case, captured, pads):
    """Over the sealing of two blocks: what is sealed is selectable in the next step."""
    name, offload, config = CASES[case]
    race = NeedRace(name, offload, captured, **config)
    assert race.read(150, pads) < TOLERANCE
    assert race.run(21) < TOLERANCE
    race.agree()


@pytest.mark.few
@pytest.mark.parametrize("offload", [False, True], ids=["stream", "host"])
def test_second_turn_crop_and_rows(offload):
    race = NeedRace("llama", offload, **NEED)
    assert race.turns((3, 1, 20, 60)) < TOLERANCE  # blocks that are reopened


@torch.no_grad()
def logits(cache, net, steps: int = 20, pads=(0, 9)) -> Tensor:
    inputs = prompt(2, 150, pads)
    net(**inputs, past_key_values=cache)
    mask, found = inputs["attention_mask"], []
    for i, token in enumerate(prompt(2, steps, seed=1)["input_ids"].split(1, dim=1)):
        new = torch.tensor([[1], [0 if i == 5 else 1]])  # one step of a single row
        mask = torch.cat((mask, new), 1)
        found.append(net(token, attention_mask=mask, past_key_values=cache).logits[:, -1].clone())
    return torch.stack(found, 1)


@pytest.mark.few
@pytest.mark.parametrize("offload", [False, True], ids=["stream", "host"])
def test_a_replayed_step_chooses_as_an_eager_one(offload):
    """The same masses: what a captured step has not stored yet does not count, nor is a token of a row without one."""
    eager, (net, runner) = build("llama", "sparsekv"), imitated()
    caches = [predictive(offload, **NEED, **TAIL) for _ in range(2)]
    with predict_ahead(eager):
        expected = logits(caches[0], eager)
    torch.testing.assert_close(logits(caches[1], net), expected, rtol=1e-4, atol=1e-4)
    same_counts(*caches)
    assert runner.replays >= 19


@pytest.mark.few
@pytest.mark.parametrize("pads", [None, (0, 30)])
@pytest.mark.parametrize("offload", [False, True], ids=["stream", "host"])
def test_its_own_query_needs_what_the_default_method_chooses(offload, pads):
    net = build("llama", "sparsekv")  # no layer before expects anything
    mine, theirs = predictive(offload, **NEED, **TAIL), by_need(offload, **NEED, **TAIL)()
    assert torch.equal(logits(mine, net, pads=pads), logits(theirs, net, pads=pads))
    assert mine.stats().attended_tokens == theirs.stats().attended_tokens
    assert mine.stats().walks == theirs.stats().walks
    assert mine.stats().estimated_mass >= 0.9


@pytest.mark.few
@pytest.mark.parametrize("offload", [False, True], ids=["stream", "host"])
def test_what_is_after_the_last_token_says_nothing(offload, monkeypatch, tmp_path):
    """Kernels may leave it as it was: in attention, marks of blocks, copies on the device and files."""
    net, select, found = build("llama", "sparsekv"), by_need_module.mass_select, []

    def scribbled(*args, **named):
        chosen = select(*args, **named)
        after = torch.arange(chosen.ids.shape[-1]) >= chosen.count[..., None]
        chosen.ids.masked_fill_(after, 5)
        return chosen

    for scribbles in (False, True):
        if scribbles:
            monkeypatch.setattr(by_need_module, "mass_select", scribbled)
        with predict_ahead(net), torch.no_grad():
            cache = predictive(offload, **NEED, **TAIL)
            cache.watch_blocks()
            out = logits(cache, net)
            cache.save(tmp_path / str(scribbles))
            loaded = SparseCache.load(tmp_path / str(scribbles), offload=cache.offload_config)
            out = out, net(torch.tensor([[5], [6]]), past_key_values=loaded).logits
        stats = cache.stats()
        found.append((*out, cache.chosen_blocks().share, stats.attended_tokens, stats.needed, stats.found))
    for one, other in zip(*found):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


def test_everything_is_needed_of_the_whole_mass():
    net = build("llama", "sparsekv")
    with predict_ahead(net):
        ways = ({"mass": 1.0}, {"mass": None, "token_budget": FULL["token_budget"]})
        found = [logits(predictive(True, **{**NEED, **way}), net) for way in ways]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------------- files


@pytest.mark.few
@pytest.mark.parametrize("saves", ["by need", "fixed"])
def test_a_choice_of_one_kind_may_go_on_as_the_other(saves, tmp_path):
    net, fixed = build("llama", "sparsekv"), {**NEED, "mass": None, "token_budget": 32}
    mine, theirs = (NEED, fixed) if saves == "by need" else (fixed, NEED)
    token = torch.tensor([[5], [6]])
    with predict_ahead(net), torch.no_grad():
        cache = predictive(False, **mine)
        logits(cache, net)
        cache.save(tmp_path / "cache")
        loaded = SparseCache.load(tmp_path / "cache", config=predictive(False, **theirs).config)
        for _ in range(2):
            assert torch.isfinite(net(token, past_key_values=loaded).logits).all()
    assert loaded.stats().sparse_calls == 4


def test_the_papers_preset_has_a_fixed_number():
    assert PredictiveConfig.preset("paper").threshold is None


# ---------------------------------------------------------------------- configuration


def test_what_a_configuration_says():
    assert (PredictiveConfig().budget, PredictiveConfig().threshold) == (0, 0.9)
    fixed = PredictiveConfig(token_budget=512)
    assert (fixed.budget, fixed.threshold) == (512, None)
    capped = PredictiveConfig(mass=0.9, token_budget=7)
    assert (capped.threshold, capped.min_tokens, capped.max_tokens) == (0.9, 7, 7)


@pytest.mark.parametrize("mass", [0, 1.01, -0.5, True, "most"])
def test_a_mass_is_a_share(mass):
    with pytest.raises(ValueError, match=r"mass must be a number in \(0, 1\] or None"):
        PredictiveConfig(mass=mass)


def test_a_second_device_chooses_a_fixed_number():
    with pytest.raises(ValueError, match=r"mass=0.5 is for .* or a second device: give a token_budget instead"):
        PredictiveConfig(mass=0.5, cache_rank="cuda:1")
    there = PredictiveConfig(cache_rank="cuda:1")
    assert (there.budget, there.threshold) == (1024, None)
