"""Tokens chosen for the query that the layer before expects: the query, the choice, and what follows the cache."""

from __future__ import annotations

import copy
import warnings
from types import SimpleNamespace

import pytest
import torch
from caches import FULL, predictive
from captured import Imitation, same_counts
from inside import hooks_of
from models import MODELS, NEEDS_CONFIG, build, model, plain_text, prompt
from oracle import NAME, TOLERANCE, Oracle, Race
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hf_sparsekv import (
    AsyncPredictiveCache,
    OffloadConfig,
    PredictiveConfig,
    QueryTap,
    SparseCache,
    optimize,
    predict_ahead,
    unoptimize,
)
from hf_sparsekv.attention.decoder import stack_of
from hf_sparsekv.attention.points import Points
from hf_sparsekv.cache_name import over
from hf_sparsekv.fusion import layers as fused_layers
from hf_sparsekv.fusion.fuse import fuse
from hf_sparsekv.layers.replay import Replay
from hf_sparsekv.layers.sparse_layer import SparseLayer
from hf_sparsekv.policies.ahead.foresight import Foresight
from hf_sparsekv.policies.ahead.layer_ahead import LayerAheadPolicy

TIGHT = {"token_budget": 32}
TAPPED = [name for name in MODELS if name != "longcat-flash"]  # two attention modules in a layer
FUSED = ("llama", "qwen3", "phi3", "gemma3", "deepseek-v3", "youtu")


def deep(name: str, attn: str = "sparsekv", **changes):
    """A model of at least three layers."""
    known = MODELS[name][2]
    more = {} if "layer_types" in known or "num_layers" in known else {"num_hidden_layers": 3}
    return build(name, attn, **{**more, **changes})


# ---------------------------------------------------------------------- the query


class Recorder:
    """The inputs of each decoder layer in the last forward pass, and the query that its attention got."""

    def __init__(self, net, monkeypatch) -> None:
        self.given: dict[int, tuple[Tensor, dict]] = {}
        self.streams: dict[int, Tensor] = {}
        self.queries: dict[int, Tensor] = {}
        attend = SparseLayer.attend

        def watch(layer, step, query, *rest, **more):
            q = query if step.absorbed is None else step.absorbed.queries(query)
            self.queries[layer.index] = q[:, :, -1].detach().clone()
            return attend(layer, step, query, *rest, **more)

        monkeypatch.setattr(SparseLayer, "attend", watch)
        for at, layer in enumerate(stack_of(net).layers):
            layer.register_forward_pre_hook(self._entered(at), with_kwargs=True)

    def _entered(self, at: int):
        def entered(module, args, kwargs):
            self.given[at] = args[0].detach().clone(), kwargs

        return entered


@pytest.mark.quick
@pytest.mark.filterwarnings("ignore:no layer of this", "ignore:AsyncPredictiveCache chooses")
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("name", TAPPED)
def test_the_query_of_a_layers_own_input_is_the_one_that_its_attention_gets(name, fused, monkeypatch):
    """Every architecture, over padded rows with positions of their own."""
    if fused and name not in FUSED:
        pytest.skip("fuse() does not know this architecture")
    net = deep(name)
    if fused:
        monkeypatch.setattr(fused_layers, "accelerated", lambda t: True)
        assert fuse(net) is not None
    seen = Recorder(net, monkeypatch)
    cache = predictive(model_config=net.config if name in NEEDS_CONFIG else None, **TIGHT)
    inputs = prompt(2, 70, (0, 9))
    mask = inputs["attention_mask"]
    points = Points(net)
    with torch.no_grad():
        net(**inputs, position_ids=(mask.cumsum(1) - 1).clamp_min(0), past_key_values=cache)
        for token in prompt(2, 2, seed=3)["input_ids"].split(1, dim=1):
            mask = torch.cat((mask, torch.ones_like(token)), 1)
            net(token, attention_mask=mask, position_ids=mask.sum(1, keepdim=True) - 1, past_key_values=cache)
    asked = 0
    for at, (stream, given) in seen.given.items():
        point = next((p for p in points.found.values() if p.layer is stack_of(net).layers[at]), None)
        if point is None or point.index not in seen.queries:
            continue
        asked += 1
        found = point.query(stream, {k: v for k, v in given.items() if k != "hidden_states"})
        torch.testing.assert_close(found, seen.queries[point.index], rtol=1e-4, atol=1e-4)
    full = sum(isinstance(layer, SparseLayer) for layer in cache.layers[1:])
    assert asked == full and (asked or name in ("mistral-window",))


@pytest.mark.filterwarnings("ignore:no layer of this")
@pytest.mark.parametrize("name", TAPPED)
def test_models_whose_residual_stream_is_found(name):
    net = deep(name)
    with predict_ahead(net) as tap:
        tap.hooks.points.check()
        found = tap.layers
    assert all(where == "in" for index, where in found.items() if index), found
    assert found.get(0, "there is no layer before it") == "there is no layer before it"


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3", "deepseek-v3"])
def test_only_queries_are_projected(name, monkeypatch):
    """Keys and values are the other half of what a layer reads for its attention."""
    net, products = deep(name), []
    linear = torch.nn.functional.linear
    monkeypatch.setattr(
        torch.nn.functional, "linear", lambda x, w, b=None: (products.append(w.shape[0]), linear(x, w, b))[1]
    )
    points = Points(net)
    point = points.found[max(points.found)]
    point.query(*points.made_up(point))
    rows = 4 * (20 if name == "deepseek-v3" else 16)
    assert products == ([24, rows] if name == "deepseek-v3" else [rows])


def test_norms_after_the_attention():
    """As OLMo 2 has them: the query is that of the layer's input, without a norm."""

    class After(torch.nn.Module):
        def __init__(self, own) -> None:
            super().__init__()
            self.self_attn, self.mlp, self.post_attention_layernorm = own.self_attn, own.mlp, own.input_layernorm

        def forward(self, hidden_states, attention_mask=None, **kwargs):
            out = self.self_attn(hidden_states, attention_mask=attention_mask, **kwargs)[0]
            hidden_states = hidden_states + self.post_attention_layernorm(out)
            return hidden_states + self.mlp(hidden_states)

    net = deep("llama")
    for at, layer in enumerate(net.model.layers):
        net.model.layers[at] = After(layer)
    with predict_ahead(net) as tap:
        tap.hooks.points.check()
        assert tap.layers == {0: "there is no layer before it", 1: "in", 2: "in"}
        cache = predictive(**TIGHT, predictor="layer")
        decode(cache, net, steps=3)
        assert [layer.policy.foresight.source for layer in cache.sparse_layers] == [None, "in", "in"]
        assert cache.stats().foreseen_calls == 2 * 3


# ---------------------------------------------------------------------- the choice


class LayerOracle(Oracle):
    """Each layer but the first chooses among all tokens in full blocks for the query expected of it."""

    def __init__(self, config: PredictiveConfig) -> None:
        known = {name: getattr(config, name) for name in config.__dataclass_fields__}
        super().__init__(SimpleNamespace(**{**known, "level": "token", "num_blocks": None}), lag=False)
        self.expected: dict[int, Tensor] = {}
        self.inputs: dict[int, Tensor] = {}  # of the layer before
        self.added: dict[int, Tensor] = {}  # by the layer before, for the last token
        self.selected = 0

    def decode_columns(self, state, layer, row, head, group, query, key) -> list[int]:
        if not self.selects(layer):
            return self.real(row, key.shape[2])
        self.selected += state.channels is not None
        return super().decode_columns(state, layer, row, head, group, self.expected.get(layer, query), key)

    def selects(self, layer: int) -> bool:
        """As far as the budget and the length have a say; channels aside."""
        config, held = self.config, max(self.layers[layer].full_blocks, default=0) * self.config.block_size
        late = held + config.window + config.max_draft < config.start_length
        return not (layer < config.dense_layers or held <= config.token_budget or late)

    def crop(self, length: int) -> None:
        super().crop(length)
        self.added.clear()

    def map_rows(self, index: Tensor) -> None:
        super().map_rows(index)
        self.added = {at: added[index] for at, added in self.added.items()}

    def follow(self, net, place: str) -> None:
        """Work out each query from the stream of the layer before."""
        for at, (before, layer) in enumerate(zip(net.model.layers, net.model.layers[1:]), 1):
            before.register_forward_pre_hook(self._given(at, layer, place), with_kwargs=True)
            layer.register_forward_pre_hook(self._ended(at))

    def _given(self, at: int, layer, place: str):
        def given(module, args, kwargs):
            self.turn = kwargs["position_embeddings"]
            self.inputs[at] = args[0][:, -1:]
            if place == "in":
                self.expected[at] = self.query(layer, args[0])
            elif place == "in_delta" and args[0].shape[1] == 1:
                self.expected[at] = self.query(layer, args[0] + self.added.get(at, 0))

        return given

    def _ended(self, at: int):
        def ended(module, args):
            added = args[0][:, -1:] - self.inputs[at]
            if args[0].shape[1] > 1:
                self.added[at] = added * self.valid[:, -1, None, None]
            elif self.selects(at) and self.layers[at].channels is not None:
                self.added[at] = added
            else:
                self.added.pop(at, None)

        return ended

    def query(self, layer, stream: Tensor) -> Tensor:
        attention = layer.self_attn
        q = attention.q_proj(layer.input_layernorm(stream)).unflatten(-1, (-1, attention.head_dim))
        q = attention.q_norm(q) if hasattr(attention, "q_norm") else q
        return apply_rotary_pos_emb(q.transpose(1, 2), q.transpose(1, 2), *self.turn)[0]


class LayerRace(Race):
    def __init__(self, name="llama", offload=False, captured=False, **config) -> None:
        place = config.get("predictor", "layer").partition(":")[2] or "in"
        ours = predictive(offload, **{**TIGHT, **config})
        super().__init__(ours, LayerOracle(ours.config), name, captured)
        if not captured:
            self.model = build(name, "sparsekv")
            self.tap = predict_ahead(self.model)
        self.plain = build(name, NAME)
        self.oracle.follow(self.plain, place)

    def agree(self) -> None:
        """As many tokens were attended to, and all of them were chosen beforehand that can be."""
        stats = self.ours.stats()
        assert stats.attended_tokens == self.oracle.attended and self.oracle.selected
        layers = self.ours.sparse_layers
        sparse = [layer for layer in layers if layer.index >= self.ours.config.dense_layers]
        foreseen = sum(layer.store.counters.sparse for layer in sparse if layer.index > 0)
        assert stats.foreseen_calls == foreseen > 0


CASES = {
    "usual": ("llama", False, {}),
    "query norms": ("qwen3", True, {}),
    "what the layer before has added": ("llama", True, {"predictor": "layer:in_delta"}),
    "offloaded": ("llama", True, {}),
    "offloaded, not copied": ("llama", OffloadConfig(device_pool=0), {}),
    "mean": ("llama", True, {"token_reduce": "mean"}),
    "late": ("llama", True, {"start_length": 130}),
    "odd budget": ("llama-mha", True, {"token_budget": 37}),
    "wide": ("llama-mqa", True, {"block_size": 32, "window": 5, "max_draft": 0, "sinks": 9}),
    "dense first": ("llama", False, {"dense_layers": 1, "sinks": 0}),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("pads", [None, (5, 61)], ids=["unpadded", "padded"])
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "replayed"])
@pytest.mark.parametrize("case", CASES)
def test_logits_follow_the_oracle(case, captured, pads):
    """Over the sealing of two blocks: what is sealed is selectable in the next step."""
    name, offload, config = CASES[case]
    race = LayerRace(name, offload, captured, **config)
    assert race.read(130, pads) < TOLERANCE
    steps = 36 if case == "wide" else 21
    assert race.run(steps) < TOLERANCE
    race.agree()
    assert not captured or race.runner.replays == steps


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "replayed"])
def test_calibration_ends_in_the_middle_of_an_answer(captured):
    """The step that ends it chooses by its own query, as nobody knew that it would."""
    race = LayerRace(captured=captured, calibration_tokens=70)
    race.feed(prompt(1, 60)["input_ids"])
    race.run(9)
    race.oracle.expected.clear()
    handles = [m for m in race.plain.modules() if hooks_of(m)]
    held = [(m, dict(hooks_of(m))) for m in handles]
    for m in handles:
        hooks_of(m).clear()
    assert race.run(1, seed=1) < TOLERANCE
    for m, hooks in held:
        hooks_of(m).update(hooks)
    assert race.run(30, seed=2) < TOLERANCE
    assert race.oracle.selected


@pytest.mark.few
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "replayed"])
@pytest.mark.parametrize("offload", [True, False], ids=["host", "stream"])
def test_second_turn_crop_and_rows(offload, captured):
    race = LayerRace("llama", offload, captured)
    assert race.turns((3, 1, 20, 60)) < TOLERANCE  # drafts, and blocks that are reopened
    race.agree()


# ---------------------------------------------------------------------- what follows the cache


def decode(cache, net=None, steps: int = 20, length: int = 150, seed: int = 5) -> Tensor:
    net = net or model("llama")
    ids = prompt(2, length + steps, seed=seed)["input_ids"]
    with torch.no_grad():
        net(ids[:, :length], **over(net, cache))
        rows = [net(token, **over(net, cache)).logits.clone() for token in ids[:, length:].split(1, dim=1)]
    return torch.cat(rows, dim=1)


def go_on(cache, net=None, steps: int = 12) -> Tensor:
    net = net or model("llama")
    with torch.no_grad():
        tokens = prompt(2, steps, seed=9)["input_ids"].split(1, dim=1)
        return torch.cat([net(t, **over(net, cache)).logits.clone() for t in tokens], 1)


def forget(cache) -> None:
    """What the layers before have added is unknown."""
    for layer in cache.sparse_layers:
        if layer.policy.foresight is not None:
            layer.policy.foresight.added_at = None


def added(cache, layer: int = 1) -> Tensor | None:
    """What the layer before is taken to add in the next step; None for nothing."""
    policy = cache.sparse_layers[layer].policy
    return policy.foresight.added.clone() if policy.foresight.added_at == cache.get_seq_length() else None


@pytest.mark.parametrize("offload", [True, False], ids=["host", "stream"])
def test_copies_and_files_go_on_alike(offload, tmp_path):
    """Nothing that was chosen has to come with them; what the layer before has added comes with copies alone."""
    cache = predictive(offload, **TIGHT, predictor="layer:in_delta")
    decode(cache)
    copied, unknown = copy.deepcopy(cache), copy.deepcopy(cache)
    forget(unknown)
    cache.save(tmp_path / "cache")
    loaded = SparseCache.load(tmp_path / "cache")
    assert loaded.config == cache.config and type(loaded) is AsyncPredictiveCache
    expected = go_on(cache), go_on(unknown)
    assert not torch.equal(*expected)
    for other, like in zip((copied, loaded), expected):
        torch.testing.assert_close(go_on(other), like, rtol=1e-4, atol=1e-4)
        assert other.sparse_layers[1].store.counters.foreseen >= 12


@pytest.mark.few
@pytest.mark.parametrize("then", ["layer:in_delta", "layer", "assembled"])
@pytest.mark.parametrize("first", [None, "layer", "assembled"])
def test_a_file_may_go_on_with_another_predictor(first, then, tmp_path):
    """What the new one needs to know of earlier steps begins anew."""
    ids = prompt(2, 150, seed=5)["input_ids"]
    cache, expected = predictive(True, **TIGHT, predictor=first), predictive(True, **TIGHT, predictor=then)
    with torch.no_grad():
        for each in (cache, expected):
            model("llama")(ids, past_key_values=each)
    cache.save(tmp_path / "cache")
    again = SparseCache.load(tmp_path / "cache")
    assert again.config == cache.config
    other = SparseCache.load(tmp_path / "cache", predictive(**TIGHT, predictor=then).config)
    found = go_on(other)
    if then != "assembled":
        forget(expected)
        torch.testing.assert_close(found, go_on(expected), rtol=1e-4, atol=1e-4)
    else:  # nothing was chosen for the first step, unless the prompt's queries were known
        assert other.stats().sparse_calls == (24 if first == "assembled" else 22)
        known = 17 if first == "assembled" else 12
        assert other.sparse_layers[0].policy.queries.count.tolist() == [known] * 2
    other.save(tmp_path / "other")
    assert SparseCache.load(tmp_path / "other").config.predictor == then


def test_beams_answer_as_captured_ones_do():
    inputs, found = prompt(2, 120, (0, 30)), []
    fast = build("llama", "sparsekv")
    runner = Imitation(fast)
    runner.install()
    caches = predictive(True, **TIGHT), predictive(True, **TIGHT)
    for net, cache in zip((model("llama"), fast), caches):
        found.append(net.generate(**inputs, past_key_values=cache, num_beams=3, do_sample=False, max_new_tokens=24))
    assert torch.equal(*found)
    assert runner.replays > 16
    same_counts(*caches)


@pytest.mark.filterwarnings("ignore:no layer of this", "ignore:AsyncPredictiveCache chooses")
@pytest.mark.pairwise(once=("name",))
@pytest.mark.parametrize("offload", [True, False], ids=["host", "stream"])
@pytest.mark.parametrize("name", TAPPED)
def test_a_budget_of_everything_gives_plain_attentions_text(name, offload):
    net, inputs, go = model(name), prompt(3, 90, (0, 5, 61)), {"do_sample": False, "max_new_tokens": 28}
    cache = predictive(offload, net.config if name in NEEDS_CONFIG else None, **FULL)
    assert torch.equal(net.generate(**inputs, past_key_values=cache, **go), plain_text(name, inputs, **go))


@pytest.mark.few(name=("gemma3", "deepseek-v3", "qwen3-next"))
@pytest.mark.parametrize("name", ["gemma3", "phi3", "deepseek-v3", "glm4-moe-lite", "qwen3-next", "gpt-oss"])
def test_captured_steps_of_other_architectures(name):
    """Chosen beforehand in both, for the same queries."""
    fast, slow = deep(name), deep(name)
    runner = Imitation(fast)
    runner.install()
    ids, caches = prompt(2, 150)["input_ids"], []
    with predict_ahead(slow), torch.no_grad():
        for net in (slow, fast):
            cache = predictive(True, net.config if name in NEEDS_CONFIG else None, **TIGHT)
            net(ids, past_key_values=cache)
            caches.append((cache, go_on(cache, net, steps=24)))
    torch.testing.assert_close(caches[1][1], caches[0][1], rtol=1e-4, atol=1e-4)
    stats = [cache.stats() for cache, _ in caches]
    assert stats[0].foreseen_calls == stats[1].foreseen_calls > 0
    assert runner.replays == 24


# ---------------------------------------------------------------------- what the layer before has added


@pytest.mark.few
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "replayed"])
@pytest.mark.parametrize("name", ["llama", "deepseek-v3"])
def test_what_the_layer_before_has_added(name, captured, monkeypatch):
    """By its own input and output, of prompts in pieces and of steps, at one address."""
    net = deep(name)
    if captured:
        Imitation(net).install()
    else:
        predict_ahead(net)
    seen, cache = Recorder(net, monkeypatch), predictive(True, **TIGHT, predictor="layer:in_delta")
    ids = prompt(2, 170, seed=5)["input_ids"]
    place = None
    for piece in (*ids[:, :140].split(70, dim=1), *ids[:, 140:165].split(1, dim=1), ids[:, 165:]):
        with torch.no_grad():
            net(piece, past_key_values=cache)
        for at in (1, 2):
            expected = seen.given[at][0][:, -1:] - seen.given[at - 1][0][:, -1:]
            torch.testing.assert_close(added(cache, at), expected, rtol=1e-4, atol=1e-5)
        place = place or cache.sparse_layers[1].policy.foresight.added.data_ptr()
        assert cache.sparse_layers[1].policy.foresight.added.data_ptr() == place
        assert cache.sparse_layers[0].policy.foresight.added is None, "there is no layer before it"


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "replayed"])
def test_nothing_is_added_where_the_last_token_is_another(captured, monkeypatch, tmp_path):
    net = build("llama", "sparsekv")
    tap = predict_ahead(net)
    if captured:
        Imitation(net).install()
    read = []
    does = Foresight.expected

    def expected(self, stream, store):
        found = does(self, stream, store)
        read.append(bool((found != stream).any()))
        return found

    monkeypatch.setattr(Foresight, "expected", expected)

    def next_steps(cache) -> list[bool]:
        found = []
        for _ in range(2):
            go_on(cache, net, steps=1)
            found.append(read[-1])  # a capture tries its step first
        return found

    cache = predictive(True, **TIGHT, predictor="layer:in_delta")
    decode(cache, net, steps=3)
    assert next_steps(cache) == [True, True]
    cache.save(tmp_path / "cache")
    assert next_steps(SparseCache.load(tmp_path / "cache")) == [False, True]
    cache.crop(cache.get_seq_length())  # as generate() does with drafts that were all taken: nothing is removed
    assert next_steps(cache) == [True, True]
    cache.crop(-2)
    assert added(cache) is None
    assert next_steps(cache) == [False, True]
    tap.remove()
    if not captured:  # steps that nobody has seen
        with pytest.warns(UserWarning, match="in place"):
            go_on(cache, net, steps=1)
        tap.install()
        assert next_steps(cache) == [False, True]
    cache.reset()
    assert added(cache) is None
    decode(cache, net, steps=1)
    assert next_steps(cache) == [True, True]
    cache.crop(-3)
    ids = prompt(2, 3)["input_ids"]
    with torch.no_grad():
        net(ids, past_key_values=cache)  # several tokens, such as drafts, leave what was added for the last one
    assert next_steps(cache) == [True, True]


def test_rows_that_end_with_padding_add_nothing():
    net, cache = build("llama", "sparsekv"), predictive(**TIGHT, predictor="layer:in_delta")
    inputs = prompt(2, 90)
    inputs["attention_mask"][1, -4:] = 0
    with predict_ahead(net), torch.no_grad():
        net(**inputs, past_key_values=cache)
    assert added(cache)[0].any() and not added(cache)[1].any()


def test_a_trial_run_leaves_what_was_added_as_it_was(monkeypatch):
    net = build("llama", "sparsekv")
    runner = Imitation(net)
    runner.install()
    cache, seen = predictive(True, **TIGHT, predictor="layer:in_delta"), []
    capture, record = runner.capturer.capture, runner.recorder.record

    def watched(forward, cache, wanted):
        before = added(cache)
        step = capture(forward, cache, wanted)
        seen.append((before, added(cache)))
        return step

    def recorded(*args):
        found = record(*args)
        seen.append(cache.sparse_layers[1].policy.foresight.added.clone())
        return found

    monkeypatch.setattr(runner.capturer, "capture", watched)
    monkeypatch.setattr(runner.recorder, "record", recorded)
    decode(cache, net, steps=2)
    changed, (before, after) = seen[:2]
    assert torch.equal(before, after) and before.any()
    assert not torch.equal(changed, before), "the trial did write it"


@pytest.mark.parametrize("name", FUSED)
def test_fused_layers_add_the_same(name, monkeypatch):
    plain, fused, found = deep(name), deep(name), []
    monkeypatch.setattr(fused_layers, "accelerated", lambda t: True)
    assert fuse(fused) is not None
    for net in (plain, fused):
        cache = predictive(
            model_config=net.config if name in NEEDS_CONFIG else None, **TIGHT, predictor="layer:in_delta"
        )
        with predict_ahead(net):
            decode(cache, net, steps=4)
            at = max(i for i, layer in enumerate(cache.sparse_layers) if layer.policy.foresight.source == "in_delta")
        found.append(added(cache, at))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


# ---------------------------------------------------------------------- beside the layer before


def test_a_captured_step_chooses_while_the_layer_before_computes(monkeypatch):
    """The attention waits for that alone, and what is read beside it lives as long."""
    net, order = build("llama", "sparsekv"), []
    runner = Imitation(net)
    runner.install()
    cache = predictive(True, **TIGHT, predictor="layer:in_delta")
    for at, layer in enumerate(net.model.layers):  # before it is captured: later ones would have it captured anew
        layer.mlp.register_forward_pre_hook(lambda *_, at=at: order.append(f"mlp {at}"))
    decode(cache, net, steps=1)
    ahead = Replay.ahead

    def waiting(self, work):
        order.append("ahead")
        done = ahead(self, work)
        return lambda: (order.append("wait"), done())

    monkeypatch.setattr(Replay, "ahead", waiting)
    for kind, name in ((LayerAheadPolicy, "foresee"), (LayerAheadPolicy, "attend"), (Foresight, "note_added")):
        does = getattr(kind, name)
        monkeypatch.setattr(
            kind, name, lambda self, *a, does=does, n=name, **k: (order.append(n), does(self, *a, **k))[1]
        )
    order.clear()
    go_on(cache, net, steps=1)
    # what layer 0 has added is noted in the fork after the attention that follows
    assert order == ["ahead", "foresee", "attend", "mlp 0", "wait", "attend", "note_added", "mlp 1"]
    assert all(layer.captured is None for layer in cache.sparse_layers)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "replayed"])
def test_a_choice_that_fails_leaves_a_cache_to_reset(captured, monkeypatch):
    """Or, in an eager step, one that goes on: before the first layer has attended nothing is cached."""
    net = build("llama", "sparsekv")
    if captured:
        Imitation(net).install()
    else:
        predict_ahead(net)
    cache = predictive(True, **TIGHT, predictor="layer:in_delta")
    decode(cache, net, steps=3)
    unhurt = copy.deepcopy(cache)

    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(LayerAheadPolicy, "foresee", full)
        with pytest.raises(torch.OutOfMemoryError):
            go_on(cache, net, steps=1)
    if not captured:
        torch.testing.assert_close(go_on(cache, net, steps=3), go_on(unhurt, net, steps=3), rtol=1e-4, atol=1e-4)
    cache.reset()
    again, new = decode(cache, net), predictive(True, **TIGHT, predictor="layer:in_delta")
    torch.testing.assert_close(again, decode(new, net), rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------------- without hooks, and after them


def test_a_choice_made_ahead_is_for_one_attention(monkeypatch):
    """A layer that shares the keys attends for a query of its own."""
    plain = LayerAheadPolicy.attend

    def twice(self, *args):
        plain(self, *args)
        return plain(self, *args)

    monkeypatch.setattr(LayerAheadPolicy, "attend", twice)
    net, cache = build("llama", "sparsekv"), predictive(True, **TIGHT)
    with predict_ahead(net):
        decode(cache, net)
    assert cache.stats().foreseen_calls == 20  # of 40: the first layer has none before it


def test_untapped_models_choose_by_their_own_query_and_say_so():
    net = build("llama", "sparsekv")
    cache = predictive(True, **TIGHT)
    with pytest.warns(UserWarning, match="in place: right, but not hidden.*optimize.model., or predict_ahead") as told:
        found = decode(cache, net)
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with predict_ahead(net):
            tapped = predictive(True, **TIGHT)
            assert not torch.equal(decode(tapped, net), found)
    stats = cache.stats()
    assert (stats.foreseen_calls, stats.sparse_calls) == (0, 40)
    assert tapped.stats().foreseen_calls == 20  # the first layer has none before it


def test_hooks_go_without_a_trace():
    net = build("llama", "sparsekv")
    before = {name: dict(module.__dict__) for name, module in net.named_modules()}
    first, second = predict_ahead(net), predict_ahead(net)
    optimize(net)
    first.remove()
    first.remove()
    cache = predictive(**TIGHT)
    with pytest.warns(UserWarning, match="run eagerly"):
        decode(cache, net, steps=2)
    assert cache.stats().foreseen_calls == 2
    unoptimize(net)
    assert second.layers == {0: "there is no layer before it", 1: "in"}
    second.remove()
    assert {name: dict(module.__dict__) for name, module in net.named_modules()} == before
    with pytest.warns(UserWarning, match="in place"):
        go_on(cache, net, steps=1)
    assert repr(second) == "QueryTap(not installed)" and second.layers == {}


def test_a_copied_model_has_hooks_that_do_nothing():
    net = build("llama", "sparsekv")
    with predict_ahead(net):
        copied = copy.deepcopy(net)
    cache = predictive(**TIGHT)
    with pytest.warns(UserWarning, match="in place"):
        decode(cache, copied, steps=3)
    assert cache.stats().foreseen_calls == 0


def test_other_caches_are_left_alone():
    net = build("llama", "sparsekv")
    ids = prompt(2, 40)["input_ids"]
    with torch.no_grad():
        expected = net(ids).logits
        with predict_ahead(net) as tap:
            assert torch.equal(net(ids).logits, expected)
            out = net.generate(ids, max_new_tokens=5, do_sample=False)
            assert not tap.hooks._met and not tap.hooks._checked
    assert torch.equal(net.generate(ids, max_new_tokens=5, do_sample=False), out)


def test_models_without_known_layers_are_refused():
    with pytest.raises(ValueError, match="no decoder layers that it knows in LongcatFlashForCausalLM"):
        predict_ahead(build("longcat-flash", "sparsekv"))
    net = build("longcat-flash", "sparsekv")
    with QueryTap(net), pytest.warns(UserWarning, match="by that layer's own query, in place"):
        decode(predictive(**TIGHT), net, steps=2)


def test_random_numbers_are_the_users():
    net = build("llama", "sparsekv")
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    with predict_ahead(net) as tap:
        tap.hooks.points.check()
    assert torch.equal(torch.rand(3), expected)


def test_what_a_configuration_stands_for():
    assert PredictiveConfig().prediction == "layer"
    assert PredictiveConfig(cache_rank="host").prediction == "layer"
    assert PredictiveConfig(cache_rank="cuda:1").prediction == "assembled"
    assert not PredictiveConfig(predictor="assembled").by_layer
    assert AsyncPredictiveCache(PredictiveConfig(predictor="assembled")).foresight is None
