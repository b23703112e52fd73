"""One test for each message: what cannot work says so, and what can still work warns once and is right."""

from __future__ import annotations

import copy
import io
import pickle
import re
import warnings
from operator import methodcaller

import numpy as np
import pytest
import torch
import transformers as tf
from caches import FULL, TIGHT, progressive, two_level
from models import VOCAB, build, model, prompt, reference
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_sparsekv import OffloadConfig, OffloadedSparseCache, SparseCache, SparseConfig, TokenConfig
from hf_sparsekv.attention.interface import sparsekv_attention
from hf_sparsekv.cli import loading
from hf_sparsekv.cli.output import CommandError
from hf_sparsekv.layers.kinds import ready_for_steps
from hf_sparsekv.predictor.channels import LabelChannels
from hf_sparsekv.tuning.channels import calibrate

IDS = prompt(1, 90)["input_ids"]


@pytest.fixture
def filled():
    """A cache that holds ``IDS`` of the Llama."""
    cache = two_level(**FULL)
    with torch.no_grad():
        model("llama")(IDS, past_key_values=cache)
    return cache


@torch.no_grad()
def feed(name, cache, ids, **kwargs):
    return model(name)(ids, past_key_values=cache, **kwargs).logits


def works(cache, name="llama"):
    """The cache gives the right text."""
    inputs = prompt(2, 60, (0, 9), seed=5)
    found = model(name).generate(**inputs, do_sample=False, max_new_tokens=12, past_key_values=cache)
    return torch.equal(found, reference(name).generate(**inputs, do_sample=False, max_new_tokens=12))


# ---------------------------------------------------------------------- what cannot be changed from outside

EDITS = {
    "mul_": lambda t: t.mul_(3),
    "*=": lambda t: t.__imul__(3),
    "a slice": lambda t: t.__setitem__((slice(None), 0), 0.0),
    "a slice's view": lambda t: t[:, 0].zero_(),
    "a transposed part": lambda t: t.transpose(2, 3).split(8, 2)[1].add_(1),
    "copy_": lambda t: t.copy_(torch.zeros_like(t)),
    "out=": lambda t: torch.mul(t, 3, out=t),
    "out= of two": lambda t: torch.max(t, dim=3, out=(t[..., 0], torch.zeros(t.shape[:3], dtype=torch.long))),
    "an operator": lambda t: torch.ops.aten.mul_.Scalar(t, 3),
    "a masked fill": lambda t: t.masked_fill_(t > 0, 0),
    "its data": lambda t: setattr(t, "data", torch.zeros_like(t)),
    "detached": lambda t: t.detach().mul_(3),
    "numpy": lambda t: t.numpy().__imul__(3),
    "an array": lambda t: np.asarray(t).__imul__(3),
    "an array without a copy": lambda t: np.array(t, copy=None).__imul__(3),
    "a function with inplace": lambda t: torch.nn.functional.relu(t, inplace=True),
    "dropout": lambda t: torch.nn.functional.dropout(t, inplace=True),
    "init": lambda t: torch.nn.init.constant_(t, 3),
    "a keyword": lambda t: torch.relu_(input=t),
    "a list": lambda t: torch._foreach_mul_(self=[t], scalar=3),
    "a nested list": lambda t: torch._foreach_add_([t[:1], t[1:]], [t[:1], t[1:]]),
    "dlpack": lambda t: torch.from_dlpack(t).mul_(3),
    "another storage": lambda t: t.set_(torch.zeros(3)),
    "resized": lambda t: t.resize_(1),
    "a function of Python": lambda t: t.apply_(lambda one: 3.0),
    "a function of two": lambda t: t.map_(torch.ones_like(t), lambda one, other: 3.0),
    "without gradients": torch.no_grad()(lambda t: t.mul_(3)),
    "inference mode": torch.inference_mode()(lambda t: t.mul_(3)),
    "inference mode, a view": torch.inference_mode()(lambda t: t[0].mul_(3)),
    "compiled": lambda t: torch.compile(lambda one: one.mul_(3), backend="eager")(t),
}


@pytest.mark.parametrize("edit", EDITS)
def test_cached_keys_and_values_are_read_only(filled, edit):
    """They are copies: an edit that takes effect in transformers' layers would be lost."""
    for layer in filled.layers:
        for held in (layer.keys, layer.values):
            with pytest.raises((RuntimeError, ValueError), match=r"keys and values of a sparse cache|read-only"):
                EDITS[edit](held)
            own = held.clone()
            EDITS[edit](own)
            assert type(own) is type(held * 2) is torch.Tensor and float(held.sum()) != 0


READS = {
    "saved": lambda t: torch.load(io.BytesIO(saved({"keys": t}))),
    "a view saved": lambda t: {"keys": torch.cat((torch.load(io.BytesIO(saved(t[:, :1]))), t[:, 1:]), 1)},
    "copied": lambda t: copy.deepcopy({"keys": t}),
    "sparse": lambda t: {"keys": t.to_sparse().to_dense()},
    "a gradient": lambda t: {"keys": torch.func.grad(lambda one: (one * t).sum())(torch.ones_like(t))},
    "with gradients": lambda t: {"keys": t.requires_grad_().detach().clone()},
    "a parameter": lambda t: {"keys": torch.nn.Parameter(t).detach().clone()},
    "shared": lambda t: {"keys": t.share_memory_().clone()},
    "compiled": lambda t: {"keys": torch.compile(lambda one: one * 2, backend="eager")(t) / 2},
    "mapped": lambda t: {"keys": torch.vmap(lambda one: one * 1)(t)},
    "a tuple": lambda t: {"keys": torch.cat(t.split(1, 2), 2)},
    "a list of numbers": lambda t: {"keys": torch.tensor(t.tolist())},
}


def saved(what) -> bytes:
    file = io.BytesIO()
    torch.save(what, file)
    return file.getvalue()


@pytest.mark.parametrize("read", READS)
def test_cached_keys_can_be_read_in_all_ways(filled, read):
    """As tensors of torch: a file of them needs no class of this package."""
    held = filled.layers[0].keys
    own = READS[read](held)["keys"]
    assert type(own) is torch.Tensor and torch.equal(own, held.clone())
    own.zero_()
    assert held.any()


def test_sizes_numbers_and_gradients_of_cached_keys(filled):
    """As of any tensor."""
    held = filled.layers[0].keys
    own = held.clone()
    assert type(held.shape) is type(held.size()) is torch.Size and held.shape.numel() == own.numel()
    assert f"{held[0, 0, 0, 0]:.3f}" == f"{own[0, 0, 0, 0]:.3f}"
    assert held.requires_grad_() is held
    (held * 2).sum().backward()
    assert torch.equal(held.grad, torch.full_like(own, 2))


def test_rings_are_read_only():
    cache = two_level(**FULL)
    with torch.no_grad():
        model("gemma3")(IDS, past_key_values=cache)
    ready_for_steps(cache)
    for layer in cache.layers:
        for edit in (lambda held=layer: held.keys.mul_(3), lambda held=layer: setattr(held, "values", IDS)):
            with pytest.raises((RuntimeError, AttributeError), match="forward hook on the attention module's k_proj"):
                edit()


@pytest.mark.parametrize("call", [methodcaller("offload", 0), methodcaller("prefetch", 1)])
def test_blocks_are_not_moved_by_hand(filled, call):
    for held in (filled, two_level(), filled.layers[0]):
        with pytest.raises(ValueError, match="a sparse cache moves its blocks by itself"):
            call(held)


@pytest.mark.parametrize("name", ["qwen3-next", "gemma3"])
def test_a_change_that_layers_of_transformers_refuse_changes_nothing(name):
    """Some of them do not know how, or do so for the first layers only: the cache is as it was, and works."""
    cache = two_level(model_config=model(name).config, **FULL)
    feed(name, cache, IDS)
    copied = copy.deepcopy(cache)
    last = [layer for layer in cache.layers if layer not in cache.sparse_layers][-1]

    def refuse(*args):
        raise RuntimeError("refused")

    for change in ("crop", "reorder_cache", "batch_repeat_interleave", "batch_select_indices"):
        setattr(last, change, refuse)
        with pytest.raises((RuntimeError, ValueError, AttributeError)):
            getattr(cache, change)(-1 if change == "crop" else 2 if "repeat" in change else torch.tensor([0]))
        delattr(last, change)
    cache.crop(0)
    assert torch.equal(feed(name, cache, IDS[:, :1]), feed(name, copied, IDS[:, :1]))


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("name", ["qwen3-next", "kimi-linear"])
def test_recurrent_states_cannot_be_cropped(name, recorded):
    """Tokens stay in them. Nothing has changed then; a crop of nothing is none."""
    cache = two_level(model_config=model(name).config, **FULL)
    if recorded:
        cache.activate_past_recording()
    feed(name, cache, IDS)
    copied = copy.deepcopy(cache)
    for tokens in (-1, -4, 86, -90, -200):
        with pytest.raises(ValueError, match="keeps a recurrent state, which cannot give back its last"):
            cache.crop(tokens)
    cache.crop(0)
    more = prompt(1, 5, seed=4)["input_ids"]
    assert torch.equal(feed(name, cache, more), feed(name, copied, more))


# ---------------------------------------------------------------------- empty input

EMPTY = r"the input has no tokens \(zero columns\): give the model at least one token a forward pass"


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral-window", "qwen3-next"])
@pytest.mark.parametrize("make", [two_level, progressive])
def test_an_empty_prompt(name, make):
    """Before the model does anything; the cache is as it was."""
    cache, none = make(model_config=model(name).config), torch.zeros(1, 0, dtype=torch.long)
    with pytest.raises(ValueError, match=EMPTY):
        model(name).generate(none, past_key_values=cache, max_new_tokens=2)
    for given in ({"input_ids": none}, {"inputs_embeds": torch.zeros(2, 0, 64)}):
        with pytest.raises(ValueError, match=EMPTY):
            model(name)(**given, past_key_values=cache)
    assert cache.get_seq_length() == 0
    with torch.no_grad():
        assert model(name)(IDS, past_key_values=cache).logits.isfinite().all()


def test_no_new_tokens(filled):
    """In mid-cache, by a model and by a caller's own loop; rows as well."""
    with pytest.raises(ValueError, match=r"no new tokens: this cache holds 90 tokens, .* call cache\.reset\(\)"):
        feed("llama", filled, IDS[:, :0])
    k = torch.zeros(1, 2, 0, 16)
    with pytest.raises(ValueError, match=EMPTY):
        filled.update(k, k, 0)
    k = torch.zeros(0, 2, 1, 16)
    with pytest.raises(ValueError, match="the input has no rows"):
        filled.update(k, k, 0)
    with pytest.raises(ValueError, match="the input has no rows"):
        feed("llama", two_level(), IDS[:0])
    assert filled.get_seq_length() == 90
    whole = model("llama")(torch.cat((IDS, IDS[:, :3]), 1)).logits[:, -3:]
    torch.testing.assert_close(feed("llama", filled, IDS[:, :3]), whole, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------- configuration


POSITIVE = ("window", "max_length", "token_budget", "num_blocks", "label_channels", "calibration_tokens", "tail_tokens")
AT_LEAST_0 = ("sinks", "dense_layers", "max_draft", "prefill_below")
CHOICES = {
    "block_size": "16, 32, 64 or 128",
    "level": "'auto', 'two_level', 'block' or 'token'",
    "token_reduce": "'mean' or 'max'",
    "lag": "True or False",
    "channel_file": "text, a path or None",
    "dense_below": "an integer >= 0, 'auto' or None",
}


def test_config_values_of_each_field():
    """Values of a wrong type or out of range, bool for int included."""
    wrong = [(name, value, "a positive integer") for name in POSITIVE for value in (0, -1, 16.0, True, "64")]
    wrong += [(name, value, "an integer >= 0") for name in AT_LEAST_0 for value in (-1, 1.5, True)]
    wrong += [(name, 3, choice) for name, choice in CHOICES.items() if name != "dense_below"]
    wrong += [("lag", 1, "True or False"), ("level", "blocks", "'auto', ")]
    wrong += [("dense_below", value, CHOICES["dense_below"]) for value in (-1, True, 1.5, "always")]
    for name, value, what in wrong:
        with pytest.raises(ValueError, match=re.escape(f"{name} must be {what}")) as error:
            TokenConfig(**{name: value})
        assert str(error.value).endswith(f"got {value!r}")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 48}, "block_size must be 16, 32, 64 or 128, got 48"),
        ({"block_size": 256}, "block_size must be 16, 32, 64 or 128, got 256"),
        ({"window": 0}, "window must be a positive integer, got 0"),
        ({"block_size": 16, "num_blocks": 4, "token_budget": 65}, "4 blocks of 16 tokens hold 64 tokens, fewer than t"),
        ({"level": "block", "token_budget": 63}, "token_budget=63 is less than one block of 64 tokens"),
        ({"label_channels": 7}, "label_channels must be even, got 7"),
    ],
)
def test_config_values_together(settings, message):
    with pytest.raises(ValueError, match=message):
        TokenConfig(**settings)


def test_offload_config_values():
    with pytest.raises(ValueError, match=r"max_host_bytes must be a positive integer \(bytes\) or None, got 0"):
        OffloadConfig(max_host_bytes=0)
    with pytest.raises(ValueError, match="pin_memory must be True, False or None, got 'yes'"):
        OffloadConfig(pin_memory="yes")
    with pytest.raises(ValueError, match="keep_dense must be True or False, got 1"):
        OffloadConfig(keep_dense=1)


def test_config_types(filled, tmp_path):
    for wrong in (OffloadConfig(), SparseConfig()):
        with pytest.raises(TypeError, match=f"config must be a TokenConfig, got {type(wrong).__name__}"):
            OffloadedSparseCache(wrong)
    with pytest.raises(TypeError, match=r"offload must be an OffloadConfig or None, got bool: OffloadConfig\(\)"):
        OffloadedSparseCache(TokenConfig(), offload=True)
    filled.save(tmp_path / "cache")
    for make in (OffloadedSparseCache, lambda **how: SparseCache.load(tmp_path / "cache", **how)):
        with pytest.raises(TypeError, match=r"the model's configuration \(model.config\), got LlamaForCausalLM"):
            make(model_config=model("llama"))


def test_pickling_says_what_to_do_instead(filled):
    with pytest.raises(TypeError, match=r"cache.save\(path\)"):
        pickle.dumps(filled)
    assert works(filled.reset() or filled)


def test_more_label_channels_than_the_head_has():
    with pytest.raises(ValueError, match="label_channels=32 exceeds the model's head dimension 16"):
        feed("llama", two_level(label_channels=32), IDS)


# ---------------------------------------------------------------------- channel files


def test_files_that_are_no_channel_files(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.safetensors does not exist: make it with `hf-sparsekv calibrate`"):
        two_level(channel_file=tmp_path / "nowhere.safetensors")
    text, tensors = tmp_path / "a.txt", tmp_path / "b.safetensors"
    text.write_text("something else")
    save_file({"ranking": torch.zeros(2)}, tensors)
    for path in (text, tensors):
        with pytest.raises(ValueError, match="is not a channel file"):
            two_level(channel_file=path)


def test_channel_files_that_do_not_fit(tmp_path):
    """Files of another model, without a layer's channels, of a shard."""
    path, made = tmp_path / "channels.safetensors", calibrate(build("llama", "sparsekv"), [IDS])
    made.save(path)
    with pytest.raises(
        ValueError, match=r"made for another model .*num_key_value_heads is 2 in the file, 1 in the mod"
    ):
        feed("llama-mqa", two_level(channel_file=path), IDS)
    with pytest.raises(ValueError, match="model_type is llama in the file, qwen2 in the model"):
        two_level(channel_file=path, model_config=model("qwen2").config)
    LabelChannels(made.ranking[:, :1], made.model, "", 1, made.norms[:, :1]).save(path)
    with pytest.raises(ValueError, match="with tensor parallelism leave channel_file out"):
        feed("llama", two_level(channel_file=path), IDS)
    made.ranking[1] = -1
    made.save(path)
    with pytest.raises(ValueError, match="has no channels for layer 1"):
        feed("llama", two_level(channel_file=path), IDS)


# ---------------------------------------------------------------------- models


def test_position_bias():
    cache, query = two_level(), torch.zeros(1, 4, 3, 16)
    keys = cache.update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16), 0)
    with pytest.raises(ValueError, match="do not support attention with a position bias: use a DynamicCache"):
        sparsekv_attention(model("llama"), query, *keys, None, position_bias=torch.zeros(1, 4, 3, 3))


def test_linear_attention_needs_the_config():
    with pytest.raises(ValueError, match=r"linear-attention layers: make the cache with .*model_config=model\.config"):
        feed("qwen3-next", two_level(), IDS)


def tiny_bloom(attn):
    torch.manual_seed(0)
    config = tf.BloomConfig(vocab_size=VOCAB, hidden_size=64, n_layer=2, n_head=4, attn_implementation=attn)
    bloom = tf.BloomForCausalLM(config).eval()
    for parameter in bloom.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.3)
    return bloom


def test_model_without_attention_interface():
    """Bloom computes its attention itself: refused under our name, right but dense under its own."""
    with pytest.raises(ValueError, match=r"'bloom' compute their attention themselves.*attn_implementation='eager'"):
        tiny_bloom("sparsekv").generate(IDS, max_new_tokens=3)
    bloom = tiny_bloom("eager")
    inputs = {**prompt(2, 90, (0, 9)), "do_sample": False, "max_new_tokens": 20, "eos_token_id": None}
    with pytest.warns(UserWarning, match="the result is right, but dense and slow"):
        found = bloom.generate(**inputs, past_key_values=two_level(**TIGHT))
    assert torch.equal(found, bloom.generate(**inputs))


# ---------------------------------------------------------------------- other attention implementations


@pytest.mark.few
@pytest.mark.quick
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_other_attention_is_right_and_warns_once(name, attn):
    net = build(name, attn)
    cache = two_level(**TIGHT)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch, pads in ((3, (0, 5, 61)), (1, None)):
            inputs = {**prompt(batch, 90, pads), "do_sample": False, "max_new_tokens": 30}
            assert torch.equal(net.generate(**inputs, past_key_values=cache), net.generate(**inputs))
            stats = cache.stats()
            assert stats.sparse_calls == stats.decode_steps == 0
            assert stats.materialised == 30 * net.config.num_hidden_layers
            assert "bypassed sparse attention" in str(stats)
            cache.reset()
    mine = [str(w.message) for w in caught if "sparsekv" in str(w.message)]
    assert len(mine) == 1 and "attn_implementation='sparsekv'" in mine[0]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_compiled_attention_is_refused_before_anything_is_stored(name):
    """In the first forward pass and in later ones; the cache is as it was."""
    net, cache = build(name, "sdpa"), two_level(**TIGHT)
    refused = pytest.raises(ValueError, match=r"cannot read a sparse cache: .*attn_implementation='sparsekv'")
    net.set_attn_implementation("flex_attention")
    with refused:
        net.generate(IDS, max_new_tokens=3, past_key_values=cache)
    assert cache.get_seq_length() == 0
    net.set_attn_implementation("sparsekv")
    whole = net.generate(IDS, max_new_tokens=3, do_sample=False, past_key_values=cache)
    net.set_attn_implementation("flex_attention")
    with refused:
        net(whole[:, -1:], past_key_values=cache)
    assert cache.get_seq_length() == whole.shape[1] - 1
    net.set_attn_implementation("sparsekv")
    net(whole[:, -1:], past_key_values=cache)
    assert cache.get_seq_length() == whole.shape[1]


# ---------------------------------------------------------------------- one cache, different tensors


def test_tensors_of_another_kind_are_refused_and_change_nothing(filled):
    """Before anything is stored: other rows, dtypes, devices, heads, layers, and a mask of other columns."""
    token, low = IDS[:, :1], build("llama", "sparsekv").bfloat16()
    deep, keys = build("llama", "sparsekv", num_hidden_layers=3), torch.empty(1, 2, 1, 16, device="meta")
    message = r"the batch size changed from 1 to 2 in mid-cache: use a new cache, or batch_repeat_interleave\(\)"
    with pytest.raises(ValueError, match=message):
        feed("llama", filled, token.repeat(2, 1))
    with pytest.raises(ValueError, match=r"keys of dtype torch\.float32, got torch\.bfloat16: keep one dtype"):
        low(token, past_key_values=filled)
    with pytest.raises(ValueError, match="keys of device cpu, got meta: keep one device"):
        filled.update(keys, keys, 0)
    message = r"layer 0 caches 2 KV heads of 16 \+ 16 channels, got 4 of 16 \+ 16: .* filled by another model"
    with pytest.raises(ValueError, match=message):
        feed("llama-mha", filled, token)
    with pytest.raises(ValueError, match="attention_mask has 5 columns"):
        feed("llama", filled, token, attention_mask=torch.ones(1, 5))
    with torch.no_grad():
        expected = reference("llama")(torch.cat((IDS, token), 1)).logits[:, -1:]
    torch.testing.assert_close(feed("llama", filled, token), expected, atol=2e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="made for a model of 2 layers, got layer 2: it belongs to another model"):
        deep(token, past_key_values=filled)


@pytest.mark.parametrize("layers", [1, 3])
def test_configuration_of_another_number_of_layers(layers):
    """Told by the prompt, not by the step behind it."""
    cache = two_level(model_config=build("llama", "sdpa", num_hidden_layers=layers).config)
    message = rf"for a model of {layers} layers \(model_config\), the one that runs has 2: make a new cache, with"
    with pytest.raises(ValueError, match=message):
        feed("llama", cache, IDS)
    assert cache.memory_bytes() == {"device": 0, "host": 0}


def test_models_without_attention_interface(tmp_path, monkeypatch):
    config = AutoConfig.for_model("falcon", hidden_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda path, **kwargs: None)
    with pytest.raises(CommandError, match="transformers runs falcon models with attention of their own only"):
        loading.load(str(tmp_path), None, torch.device("cpu"))
