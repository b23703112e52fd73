"""Multi-head latent attention: attention to latents is attention to what they expand to, and only expand_kv changes."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import transformers as tf
from caches import FULL, SMALL, TIGHT, progressive, two_level
from captured import Imitation, check_imitated, through_modes
from models import COMMON, EXPERTS, MLA, MLA_SIZES, build, model, prompt, reference
from torch import nn
from transformers import DynamicCache

from hf_sparsekv import OffloadedSparseCache, TokenConfig, absorb_mla, optimize, restore_mla, unoptimize
from hf_sparsekv.attention import mla
from hf_sparsekv.attention.exact import exact_attention
from hf_sparsekv.attention.mla import Absorbed, is_mla
from hf_sparsekv.layers.sparse_layer import SparseLayer
from hf_sparsekv.policies import crossover
from hf_sparsekv.policies.label_index import default_channels
from hf_sparsekv.predictor.channels import LabelChannels
from hf_sparsekv.tuning.channels import calibrate
from hf_sparsekv.types import AttentionParams

GO = {"do_sample": False, "max_new_tokens": 30}
PLAIN = [name for name in MLA if name != "kimi-linear"]  # which needs its configuration


def attention_modules(net: nn.Module) -> list[nn.Module]:
    return [module for module in net.modules() if is_mla(module)]


def attributes(net: nn.Module) -> dict:
    return {name: dict(module.__dict__) for name, module in net.named_modules()}


# ---------------------------------------------------------------------- expand_kv


def test_models_are_known():
    assert all(attention_modules(model(name)) for name in MLA)
    assert not attention_modules(model("llama"))
    assert absorb_mla(build("llama", "sparsekv")) == []


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3", "glm4-moe-lite"])
def test_a_cache_replaces_expand_kv_and_it_can_be_put_back(name):
    net = build(name, "sparsekv")
    before = attributes(net)
    inputs = prompt(2, 60, (0, 9))
    expected = reference(name).generate(**inputs, **GO)
    assert torch.equal(net.generate(**inputs, **GO, past_key_values=two_level(**FULL)), expected)
    after = attributes(net)
    changed = {key for key in before if before[key] != after[key]}
    assert changed == {key for key, module in net.named_modules() if is_mla(module)}
    assert all(after[key].keys() - before[key].keys() == {"expand_kv", mla._OWN} for key in changed)
    # A stock cache, and none, on the changed model; then a second cache of ours.
    assert torch.equal(net.generate(**inputs, **GO), expected)
    stock = DynamicCache(config=net.config)
    assert torch.equal(net.generate(**inputs, **GO, past_key_values=stock), expected)
    assert torch.equal(net(**inputs).logits, build(name, "sparsekv")(**inputs).logits)
    caches = two_level(**FULL), two_level(False, **FULL)
    for cache in caches:
        assert torch.equal(net.generate(**inputs, **GO, past_key_values=cache), expected)
        assert cache.stats().materialised == 0
    restore_mla(net)
    assert attributes(net) == before
    assert torch.equal(net.generate(**inputs, **GO), expected)
    restore_mla(net)


@pytest.mark.parametrize(("name", "every"), [("llama", False), *((name, True) for name in PLAIN)])
def test_only_layers_that_may_be_mla_look_for_the_calling_module(name, every, monkeypatch):
    looked = []
    monkeypatch.setattr(mla, "is_mla", lambda module: (looked.append(module), is_mla(module))[1])
    net, inputs = build(name, "sparsekv"), prompt(1, 60)
    cache = two_level(**FULL)
    for turn in range(2):
        for _ in range(2):  # a prompt, or a step over it
            ids = inputs["input_ids"] if not cache.get_seq_length() else inputs["input_ids"][:, :1]
            looked.clear()
            with torch.no_grad():
                net(ids, past_key_values=cache)
            known = turn or cache.get_seq_length() > 60  # before the first attention the model may be any
            assert len(looked) == (len(cache.layers) if every else int(not known))
        assert all(layer.latent == every for layer in cache.sparse_layers)
        cache.reset()


def test_optimize_absorbs_and_unoptimize_restores():
    net = build("deepseek-v3", "sparsekv")
    before = attributes(net)
    optimize(net)
    assert all(mla.absorbs(module) for module in attention_modules(net))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no GPU to capture on
        net.generate(**prompt(1, 40), **GO, past_key_values=two_level(**FULL))
    unoptimize(net)
    assert attributes(net) == before


def test_an_expand_kv_of_the_users_own_is_kept():
    net = build("glm4-moe-lite", "sparsekv")
    calls = []
    module = attention_modules(net)[0]

    def own(latent, rotary):
        calls.append(latent.shape)
        return type(module).expand_kv(module, latent, rotary)

    module.expand_kv = own
    assert len(absorb_mla(net)) == len(attention_modules(net))
    assert absorb_mla(net) == [], "a second call changes nothing"
    net.generate(**prompt(1, 40), **GO, past_key_values=two_level(**FULL))
    assert not calls
    net.generate(**prompt(1, 40), **GO)
    assert len(calls) == GO["max_new_tokens"]
    restore_mla(net)
    assert module.__dict__["expand_kv"] is own


def test_copies_of_a_changed_model_go_their_own_ways():
    net = build("glm4-moe-lite", "sparsekv")
    absorb_mla(net)
    copied = copy.deepcopy(net)
    with torch.no_grad():
        for module in attention_modules(copied):
            module.kv_b_proj.weight.mul_(1.5)
    plain = build("glm4-moe-lite", "sdpa")
    plain.load_state_dict(copied.state_dict())
    inputs = prompt(1, 50)
    found = copied.generate(**inputs, **GO, past_key_values=two_level(**FULL))
    assert torch.equal(found, plain.generate(**inputs, **GO))
    assert torch.equal(
        net.generate(**inputs, **GO, past_key_values=two_level(**FULL)),
        reference("glm4-moe-lite").generate(**inputs, **GO),
    )


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_another_attention_function_gets_expanded_keys(attn):
    """Right, dense, and it says so; the same cache goes on with ours."""
    net = build("deepseek-v3", "sparsekv")
    absorb_mla(net)
    net.set_attn_implementation(attn)
    inputs, cache = prompt(2, 60), two_level(**FULL)
    expected = reference("deepseek-v3").generate(**inputs, **GO)
    with pytest.warns(UserWarning, match="dense and slow"):
        found = net.generate(**inputs, **GO, past_key_values=cache)
    assert torch.equal(found, expected)
    assert cache.stats().materialised > 0
    net.set_attn_implementation("sparsekv")
    common = {"input_ids": found, "attention_mask": torch.ones_like(found), **GO}
    again = net.generate(**common, past_key_values=cache)
    assert torch.equal(again, reference("deepseek-v3").generate(**common))


# ---------------------------------------------------------------------- what is stored, what is chosen


@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
def test_latents_are_stored_once(offload):
    """One row of r + dr numbers a token and layer, whatever the number of heads."""
    cache = two_level(offload, **FULL)
    net = model("glm4-moe-lite")
    with torch.no_grad():
        net(**prompt(2, 300), past_key_values=cache)
    config = net.config
    for layer in cache.sparse_layers:
        store = layer.store
        width = config.kv_lora_rank + config.qk_rope_head_dim
        assert store.latent
        assert store.pool.kv.shape[1:] == (1, SMALL["block_size"], width)
        assert (store.key_dim, store.value_dim) == (width, config.kv_lora_rank)
        assert store.pool.fields["bounds"].shape[1:] == (1, 2, width)
    stock = DynamicCache(config=config)
    with torch.no_grad():
        reference("glm4-moe-lite")(**prompt(2, 300), past_key_values=stock)
    for mine, theirs in zip(cache.layers, stock.layers):
        # Of the second layer: what another kernel's rounding makes of the first one's result.
        torch.testing.assert_close(mine.keys, theirs.keys, atol=3e-5, rtol=1e-5)
        torch.testing.assert_close(mine.values, theirs.values, atol=3e-5, rtol=1e-5)
    stats = cache.stats()
    assert stats.cached_tokens == 300


def test_default_label_channels():
    dims = {576: 128, 256: 128, 128: 64, 96: 64, 64: 64, 24: 24, 6: 6, 7: 6}
    assert {dim: default_channels(dim) for dim in dims} == dims


@pytest.mark.parametrize("reduce", ["max", "mean"])
def test_selection_is_that_of_the_expanded_keys(reduce):
    """Chosen are the best tokens by the keys that the model would expand, of latents that 4 bits hold exactly."""
    net, budget = build("deepseek-v3", "sparsekv"), 48
    module = attention_modules(net)[0]
    width = module.kv_lora_rank + module.qk_rope_head_dim
    config = TokenConfig(
        **{**SMALL, "sinks": 0}, level="token", tail=None, label_channels=width, token_budget=budget,
        token_reduce=reduce,
    )  # fmt: skip
    cache = OffloadedSparseCache(config, offload=None)
    ranking, norms = torch.arange(width).int().expand(1, 1, -1), torch.tensor([[0.0], [1.0]]).expand(1, 1, 2, width)
    cache.shared.channels = LabelChannels(ranking, {}, "", 1, norms)
    absorbed = Absorbed(module)
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    batch, heads, n = 2, net.config.num_attention_heads, 260
    latent = torch.randint(16, (batch, 1, n, width), generator=generator) / 2 - 3.75
    latent[..., 0], latent[..., 1] = -3.75, 3.75  # of each token the least and the largest label
    latent, rotary = latent.split((module.kv_lora_rank, module.qk_rope_head_dim), -1)
    query = normal(batch, heads, n, module.qk_nope_head_dim + module.qk_rope_head_dim)
    layer = SparseLayer.at(cache, 0)
    cache.layers.append(layer)
    layer.fill(absorbed.queries(query), latent, rotary)
    store, q = layer.store, query[:, :, -1:]
    stored = store.full_blocks * store.block_size
    key, value = absorbed.expand(latent, rotary)
    scores = (q @ key[:, :, :stored].transpose(-1, -2))[:, :, 0]  # [batch, H, stored]
    shared = scores.amax(1) if reduce == "max" else scores.mean(1)
    seen = torch.zeros(batch, n, dtype=torch.bool).scatter(1, shared.topk(budget).indices, True)
    seen[:, stored:] = True
    expected = exact_attention(q, key, value, AttentionParams(0.3), mask=seen[:, None, None])
    found = layer.policy.attend(absorbed.queries(q)[:, :, 0], store, layer.policy.plan(store), AttentionParams(0.3))
    torch.testing.assert_close(absorbed.outputs(found[:, :, None]), expected, atol=1e-4, rtol=1e-4)


def test_the_crossover_of_other_layers_does_not_count(monkeypatch):
    """Measurements for keys and values of many heads say nothing about latents."""
    asked = []

    def dense_tokens(dense_below, method, *rest):
        asked.append(method)
        return 1 << 30

    monkeypatch.setattr("hf_sparsekv.policies.crossover.dense_tokens", dense_tokens)
    for name in ("llama", "youtu"):
        model(name).generate(**prompt(1, 200), **GO, past_key_values=two_level(**{**TIGHT, "dense_below": "auto"}))
    assert set(asked) == {"two_level:lag", "two_level:lag:mla"}
    latents, heads = (crossover.lookup("NVIDIA H200", f"two_level:lag{suffix}") for suffix in (":mla", ""))
    assert None not in (latents, heads) and latents != heads


def test_channels_from_a_file(tmp_path):
    net = build("glm4-moe-lite", "sparsekv")
    channels = calibrate(net, [prompt(1, 300, seed=seed)["input_ids"] for seed in range(2)])
    config = net.config
    width = config.kv_lora_rank + config.qk_rope_head_dim
    assert channels.ranking.shape == (config.num_hidden_layers, 1, width)
    path = tmp_path / "channels.safetensors"
    channels.save(path)
    cache = two_level(**TIGHT, channel_file=path)
    net.generate(**prompt(1, 200), **GO, past_key_values=cache)
    assert cache.stats().sparse_calls > 0
    for layer in cache.sparse_layers:
        assert torch.equal(layer.policy.labels.channels[0], channels.ranking[layer.index][:, : layer.policy.labels.r])


@pytest.mark.parametrize("valid", [None, torch.arange(500) % 7 > 0])
def test_calibration_sees_some_tokens_of_a_long_prompt(valid):
    absorbed = Absorbed(attention_modules(model("deepseek-v3"))[0])
    query, latent = torch.randn(2, 4, 500, 20), torch.arange(500.0).view(1, 1, 500, 1).expand(2, 1, 500, 16)
    valid = None if valid is None else valid.expand(2, -1)
    q, k, ok = absorbed.observed(query, latent, torch.zeros(2, 1, 500, 8), valid, 100)
    at = k[0, 0, :, 0].long()
    assert len(at) == 100
    assert at[0] == 0
    assert torch.equal(at[-mla.RECENT :], torch.arange(500 - mla.RECENT, 500))
    assert (at.diff() > 0).all()
    torch.testing.assert_close(q, absorbed.queries(query)[:, :, at])
    assert (ok is None) == (valid is None)
    assert ok is None or torch.equal(ok, valid[:, at])
    everything = absorbed.observed(query, latent, torch.zeros(2, 1, 500, 8), valid, 500)
    assert everything[0].shape[2] == 500


# ---------------------------------------------------------------------- projections that are not plain


class Int8Linear(nn.Module):
    """A quantised projection, as such libraries make them: no weight that could be viewed."""

    def __init__(self, linear: nn.Linear, shift: float = 0.0) -> None:
        super().__init__()
        self.shift = shift
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype)) + self.shift


def quantised(name: str, attn: str, shift: float = 0.0) -> nn.Module:
    net = build(name, attn)
    for module in attention_modules(net):
        module.kv_b_proj = Int8Linear(module.kv_b_proj, shift)
    return net


@pytest.mark.parametrize(("name", "captured"), [("deepseek-v3", False), ("glm4-moe-lite", True)])
def test_quantised_projection(name, captured):
    ours, plain = quantised(name, "sparsekv"), quantised(name, "sdpa")
    before = attributes(ours)
    if captured:
        runner = Imitation(ours)
        runner.install()
    inputs = prompt(2, 90, (0, 30))
    expected = plain.generate(**inputs, **GO)
    assert torch.equal(ours.generate(**inputs, **GO, past_key_values=two_level(**FULL)), expected)
    with torch.no_grad():  # as an adapter would
        for net in (ours, plain):
            for module in attention_modules(net):
                module.kv_b_proj.scale.mul_(1.3)
    again = ours.generate(**inputs, **GO, past_key_values=two_level(**FULL))
    assert torch.equal(again, plain.generate(**inputs, **GO))
    assert not torch.equal(again, expected)
    if captured:
        assert runner.replays > 50
        runner.remove()
    else:
        restore_mla(ours)
    assert attributes(ours) == before


def test_projections_that_cannot_be_absorbed():
    net = quantised("glm4-moe-lite", "sparsekv", shift=0.5)
    with pytest.raises(ValueError, match="adds something to its input"):
        net(**prompt(1, 20), past_key_values=two_level())
    net = build("glm4-moe-lite", "sparsekv")
    for module in attention_modules(net):
        module.kv_b_proj.bias = nn.Parameter(torch.zeros(len(module.kv_b_proj.weight)))
    with pytest.raises(ValueError, match="has a bias"):
        net(**prompt(1, 20), past_key_values=two_level())


# ---------------------------------------------------------------------- captured steps, models that are refused


@pytest.mark.pairwise(once=("name",))
@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("make", [two_level, progressive])
@pytest.mark.parametrize("name", PLAIN)
def test_replays_of_each_model(name, make, offload):
    """Experts that loop on the host run by ours instead, and the model is left as it was."""
    changes = {"experts_implementation": "eager"} if name != "longcat-flash" else {}
    held = build(name, "sparsekv", **changes).get_experts_implementation()
    caches = make(offload, **TIGHT), make(offload, **TIGHT)
    fast, runner = check_imitated(caches, prompt(2, 90, (0, 30)), GO["max_new_tokens"], name, **changes)
    assert runner.replays == GO["max_new_tokens"] - 1
    mixture = any(hasattr(module, "is_transposed") for module in fast.modules())
    assert (fast.get_experts_implementation() != held) == mixture
    runner.remove()
    assert fast.get_experts_implementation() == held


SOME = {"device-lag": True, "host-token": False, "host-block": True, "host-smallpool": False, "progressive-host": True}


@pytest.mark.few(cache=("device-lag", "host-smallpool", "progressive-host"))
@pytest.mark.parametrize(("cache", "padded"), [*SOME.items(), ("progressive-host", False)])
def test_replays_through_modes(cache, padded):
    through_modes(cache, "glm4-moe-lite", padded)


DSA = [(tf.DeepseekV32ForCausalLM, tf.DeepseekV32Config), (tf.GlmMoeDsaForCausalLM, tf.GlmMoeDsaConfig)]


@pytest.mark.parametrize(("model_class", "config_class"), DSA, ids=["v32", "glm"])
def test_models_with_an_indexer_are_refused(model_class, config_class):
    """By the configuration, or as soon as the model runs."""
    indexer = {"index_topk": 16, "index_n_heads": 2, "index_head_dim": 16}
    config = config_class(**{**COMMON, **MLA_SIZES, **EXPERTS, **indexer}, attn_implementation="sparsekv")
    with pytest.raises(ValueError, match="selects tokens by itself"):
        two_level(model_config=config)
    with pytest.raises(ValueError, match="selects tokens by itself"):
        model_class(config).eval()(**prompt(1, 20), past_key_values=two_level())
