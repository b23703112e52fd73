"""The registry of methods: what it refuses, and that everything which offers methods finds a new one by itself."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import ClassVar

import pytest
import torch
from caches import CACHES, SMALL, TIGHT, generic
from command_line import TEXT, error, run
from inside import forget_method, own_methods
from models import build, model, prompt
from saved_files import feed, rewrite, same, saved, state, steps

import hf_sparsekv_config
from benchmarks.baselines import VARIANTS
from hf_sparsekv import (
    AsyncPredictiveCache,
    OffloadConfig,
    OffloadedSparseCache,
    PredictiveConfig,
    ProgressiveCache,
    ProgressiveConfig,
    SparseCache,
    SparseConfig,
    StreamingConfig,
    TokenConfig,
    TwoLevelConfig,
)
from hf_sparsekv.kv import pool, store
from hf_sparsekv.kv.block_ids import bucket
from hf_sparsekv.kv.state import Held
from hf_sparsekv.persistence.configuration import free_fields
from hf_sparsekv.policies.base import Policy
from hf_sparsekv.policies.registry import called, method_of, methods, names, register
from hf_sparsekv.policies.selector import Selector
from hf_sparsekv.tuning.plan import model_shape, plan_memory
from hf_sparsekv_cli import options
from hf_sparsekv_eval.cache_specs import known, parse_cache


@pytest.fixture
def empty_after(monkeypatch):
    """Methods that a test registers are gone after it."""
    own_methods(monkeypatch)


@dataclass(frozen=True, kw_only=True)
class EveryNthConfig(SparseConfig):
    """Attends to every so manieth token."""

    FREE = ("stride",)

    stride: int = 4
    kept: int = 7


@pytest.fixture
def every_nth(empty_after):
    """A method that nothing in the package knows, with state of its own."""

    @register("every_nth", EveryNthConfig, about="a test", knob=("stride", 1, 1), variants={"every_2nd": {"stride": 2}})
    class EveryNthPolicy(Selector):
        TENSORS: ClassVar = {"state": Held(file="mine")}

        def start(self, store, q_heads) -> None:
            super().start(store, q_heads)
            self.state = torch.full((store.batch, 3), float(self.config.kept))

        def select(self, q, store, spec):
            tokens = torch.arange(store.table.shape[1] * store.block_size, dtype=torch.int32)
            wanted = (tokens % self.config.stride == 0) & (tokens >= store.sinks) & (tokens < store.rows[:, 1:])
            return torch.where(wanted, tokens, -1)[:, None].expand(-1, store.heads, -1)

    return EveryNthPolicy


# ---------------------------------------------------------------------- registering


def test_who_is_there():
    assert set(methods()) == {"token", "progressive", "predictive", "streaming"}
    assert set(names()) == {*methods(), "two_level", "block_only", "token_only"}
    assert {"oracle", "random"} <= set(known()) - set(names())
    assert {name: method.config for name, method in called().items()} == hf_sparsekv_config.CACHES
    for method in methods().values():
        assert method_of(method.config()) is method
        assert method.about.endswith(")"), "the source"


def test_the_earlier_name_of_the_default_is_an_alias():
    assert TwoLevelConfig is TokenConfig
    assert called()["two_level"] is called()["token"] is method_of(TwoLevelConfig())
    kinds = (options.CacheKind.two_level, options.CacheKind.token)
    assert len({options.PlanOptions(token_budget=64).config(kind) for kind in kinds}) == 1
    assert len({parse_cache(f"{name}:token_budget=64").make().config for name in ("two_level", "token")}) == 1


@pytest.mark.parametrize(
    ("name", "config", "named", "message"),
    [
        ("two_level", EveryNthConfig, {}, "there is a method 'two_level' already: choose another name"),
        ("token_only", EveryNthConfig, {}, "there is a method 'token_only' already"),
        ("other", EveryNthConfig, {"variants": {"oracle": {}}}, "there is a method 'oracle' already"),
        ("other", TokenConfig, {}, "TokenConfig is the configuration of 'token' already: give each"),
        ("other", dict, {}, "config must be a subclass of SparseConfig, got <class 'dict'>"),
        ("other", EveryNthConfig, {}, "EveryNthConfig has no field 'token_budget'"),
        ("other", EveryNthConfig, {"knob": ("stride", 1, 1), "variants": {"x": {"y": 1}}}, "has no field 'y'"),
    ],
)
def test_what_cannot_be_registered(name, config, named, message, empty_after):
    with pytest.raises(ValueError, match=re.escape(message)):
        register(name, config, about="a test", **named)(Policy)
    assert set(methods()) == {"token", "progressive", "predictive", "streaming"}


def cell():
    """Define a method, as a cell of a notebook does each time that it runs."""

    @dataclass(frozen=True, kw_only=True)
    class MineConfig(TokenConfig):
        pass

    @register("mine", MineConfig, about="a test")
    class Mine(Policy):
        pass

    return MineConfig, Mine


def test_a_class_that_is_defined_again_takes_its_place(empty_after):
    cell()
    config, policy = cell()
    assert methods()["mine"].config is config and methods()["mine"].policy is policy
    with pytest.raises(ValueError, match="has no field 'nothing'"):
        register("mine", config, about="a test", knob=("nothing", 1, 2))(policy)
    assert methods()["mine"].policy is policy
    with pytest.raises(ValueError, match="there is a method 'mine' already"):
        register("mine", config, about="a test")(Policy)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (TokenConfig, r"got the class TokenConfig: give TokenConfig\(\)"),
        (SparseConfig(), r"got SparseConfig: decorate its policy with register\(\)"),
    ],
)
def test_what_to_do_without_a_method_is_said(config, says):
    with pytest.raises(TypeError, match=says):
        SparseCache(config)


@pytest.mark.parametrize("config", [SparseConfig(), None, "fast", {"token_budget": 3}], ids=lambda c: type(c).__name__)
def test_configurations_of_no_method(config):
    offered = "TokenConfig, PredictiveConfig, ProgressiveConfig, StreamingConfig"
    with pytest.raises(TypeError, match="config must be the configuration of a method") as told:
        SparseCache(config)
    assert all(name in str(told.value) for name in offered.split(", "))


def test_a_subclass_of_a_configuration_is_of_the_same_method():
    class Mine(TokenConfig):
        pass

    cache = OffloadedSparseCache(Mine(level="block"))
    assert method_of(Mine()) is methods()["token"]
    assert cache.config.level == "block"


@pytest.mark.parametrize(
    ("kind", "config", "offload"),
    [
        (OffloadedSparseCache, TokenConfig(**TIGHT), OffloadConfig()),
        (ProgressiveCache, ProgressiveConfig(mass=0.6), None),
        (AsyncPredictiveCache, PredictiveConfig(token_budget=32, predictor="assembled"), None),
    ],
)
def test_named_caches_are_the_same_with_a_default(kind, config, offload):
    named, plain = kind(config), SparseCache(config, offload)
    assert named.offload_config == plain.offload_config == offload
    assert [type(c.shared) for c in (named, plain)] == [method_of(config).shared] * 2
    assert type(named.shared.of_layer(5)) is type(plain.shared.of_layer(5))
    assert type(kind().config) is type(config)
    with pytest.raises(TypeError, match=f"config must be a {type(config).__name__}, got StreamingConfig"):
        kind(StreamingConfig())


# ---------------------------------------------------------------------- a new one is found


def test_a_cache_of_a_new_method(every_nth):
    dense, other = ({"stride": 1}, {"stride": 5})
    ours, inputs, go = model("llama"), prompt(2, 100, (0, 20)), {"do_sample": False, "max_new_tokens": 20}
    expected = build("llama", "sdpa").generate(**inputs, **go)
    caches = [SparseCache(EveryNthConfig(**_small(), **how)) for how in (dense, other)]
    texts = [ours.generate(**inputs, past_key_values=cache, **go) for cache in caches]
    assert torch.equal(texts[0], expected)
    assert caches[0].stats().attended_share == 1 > caches[1].stats().attended_share
    assert caches[0].stats().sparse_calls > 0


def test_specs_and_variants(every_nth):
    assert parse_cache("every_nth:stride=3").make().config.stride == 3
    assert parse_cache("every_2nd").make().config.stride == 2
    with pytest.raises(ValueError, match="did you mean 'every_nth'"):
        parse_cache("every_nht")


def test_plan_of_a_new_method(every_nth, monkeypatch):
    for module in (pool, store):  # what is planned is a GPU's memory, whose pools begin with 16 blocks
        monkeypatch.setattr(module, "room", lambda blocks, device: bucket(blocks))
    grown = build("llama", "sparsekv", num_hidden_layers=3)
    for offload in (None, OffloadConfig()):
        for config in (EveryNthConfig(dense_layers=1), StreamingConfig(dense_layers=1, window=64)):
            cache = SparseCache(config, offload)
            with torch.no_grad():
                grown(**prompt(2, 300), past_key_values=cache, use_cache=True, logits_to_keep=1)
            shape = model_shape(grown.config, torch.float32)
            plan = plan_memory(shape, config, offload, context=300, batch=2)
            assert {"device": plan.cache_device, "host": plan.cache_host} == cache.memory_bytes()
            assert plan.bounds == plan.labels == plan.device_pages == plan.working_set == 0


def test_files_of_a_new_method(every_nth, tmp_path):
    cache = generic(methods()["every_nth"])(kept=3)
    feed(cache, *prompt(2, 130, (0, 30)).values())
    steps(cache, 5)
    copied = saved(cache, tmp_path)
    assert type(copied) is SparseCache and copied.config == cache.config
    assert torch.equal(copied.sparse_layers[0].policy.state, torch.full((2, 3), 3.0))
    assert torch.equal(steps(cache, 20), steps(copied, 20))
    same(state(cache), state(copied))
    path = tmp_path / "context.safetensors"
    other = EveryNthConfig(**_small(), stride=2, kept=3)
    assert SparseCache.load(path, config=other).config.stride == 2
    with pytest.raises(ValueError, match=r"saved with kept=3.*; got 4.*change only stride, dense_below, max_length,"):
        SparseCache.load(path, config=EveryNthConfig(**_small(), kept=4))
    with pytest.raises(TypeError, match=r"config must be a EveryNthConfig, as .* has it, got StreamingConfig"):
        SparseCache.load(path, config=StreamingConfig())
    with pytest.raises(ValueError, match=r"holds a SparseCache, which ProgressiveCache.load\(\) cannot make"):
        ProgressiveCache.load(path)
    forget_method("every_nth")
    with pytest.raises(ValueError, match="an unknown method 'every_nth': import what registers it first"):
        SparseCache.load(path)


def test_state_that_no_file_would_hold(every_nth, tmp_path, monkeypatch):
    monkeypatch.setattr(every_nth, "TENSORS", Policy.TENSORS)
    cache = generic(methods()["every_nth"])()
    feed(cache, *prompt(1, 90).values())
    with pytest.raises(ValueError, match="EveryNthPolicy cannot be saved: it keeps state, which its TENSORS do not"):
        cache.save(tmp_path / "x")
    oracle = parse_cache("oracle").make()
    feed(oracle, *prompt(1, 90).values())
    with pytest.raises(ValueError, match="caches of OracleConfig cannot be saved yet"):
        oracle.save(tmp_path / "x")


def test_everything_offers_streaming(tiny):
    from demo.caches import METHODS

    assert {"streaming", "streaming-host"} <= set(CACHES)
    assert VARIANTS["streaming"].config is METHODS["streaming"].config is StreamingConfig
    given = ("--cache", "streaming", "--window", 32, "--block-size", 16, "--dense-layers", 0)
    result = run("generate", tiny, "--prompt", TEXT, "--max-new-tokens", 8, *given)
    assert any(line.startswith("streaming") for line in result.stderr.splitlines())
    shares = re.search(r"attended to (\d+\.\d)%", " ".join(result.stderr.split()))
    assert 0 < float(shares[1]) < 10
    whole = ("--cache", "streaming", "--compare", "dense")  # of 1,300 tokens it has 1,024 and 4: other text
    assert "both gave" not in run("generate", tiny, "--prompt", TEXT, "--max-new-tokens", 8, *whole, *given[2:]).stderr
    big = (*whole, "--window", 1400)
    assert "both gave the same 8" in run("generate", tiny, "--prompt", TEXT, "--max-new-tokens", 8, *big).stderr
    out = run("plan", tiny, "--context", 3000, *given).stdout
    assert re.search(r"token labels +- +-", out) and re.search(r"block bounds +- +-", out)
    assert "--token-budget has no meaning with --cache streaming" in error(
        "generate", tiny, "--prompt", "a", "--cache", "streaming", "--token-budget", 1024, status=2
    )
    assert "64; streaming: 1024" in " ".join(run("plan", "--help", env={"COLUMNS": "300"}).stdout.split())


def test_files_whose_class_and_method_disagree(tmp_path):
    cache = CACHES["host"](**TIGHT)
    feed(cache, *prompt(1, 130).values())
    cache.save(tmp_path / "new")

    bad = rewrite(tmp_path / "new", tmp_path / "bad", state=lambda held: held.update(method="streaming"))
    with pytest.raises(ValueError, match="is damaged"):
        SparseCache.load(bad)


def test_what_may_change_when_a_cache_is_loaded():
    assert set(free_fields(StreamingConfig)) == {"dense_below", "max_length", "prefill", "prefill_below"}
    for method in methods(references=True).values():
        assert set(free_fields(method.config)) <= {f.name for f in fields(method.config)}


def _small() -> dict:
    return {name: value for name, value in SMALL.items() if name != "calibration_tokens"}


# ---------------------------------------------------------------------- presets

PRESETS = [(name, preset) for name, method in methods().items() for preset in method.config.PRESETS]


@pytest.mark.parametrize(("name", "preset"), PRESETS)
def test_presets_decode(name, preset):
    """As a configuration, as a spec and on the command line: the same settings, changed where one is given."""
    small = {option: value for option, value in SMALL.items() if option in methods()[name].config.__dataclass_fields__}
    config = methods()[name].config.preset(preset, **small)
    for option, value in methods()[name].config.PRESETS[preset].items():
        assert getattr(config, option) == small.get(option, value)
    spec = parse_cache({"cache": name, "preset": preset, **small})
    assert spec.make().config == config
    given = options.PlanOptions(preset=preset, block_size=32).config(options.CacheKind[name])
    assert given == type(config).preset(preset, block_size=32)
    inputs = prompt(1, 150)
    cache = SparseCache(config)
    model("llama").generate(**inputs, do_sample=False, max_new_tokens=8, past_key_values=cache)
    assert cache.stats().decode_steps == 7


def test_presets_refused():
    with pytest.raises(ValueError, match="has no preset 'quick'; it has 'fast', 'accurate', 'paper'"):
        TokenConfig.preset("quick")
    with pytest.raises(ValueError, match="StreamingConfig has no preset 'fast'; it has none"):
        parse_cache("streaming:preset=fast")
    with pytest.raises(ValueError, match="token_budget must be a positive integer"):
        PredictiveConfig.preset("fast", token_budget=0)
    assert "has no preset" in error("generate", "small", "--prompt", "a", "--preset", "quick", status=2)
