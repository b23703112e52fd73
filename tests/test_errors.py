"""One test for each message: what cannot work says so, and what can still work warns once and is right."""

from __future__ import annotations

import pickle
import warnings

import pytest
import torch
import transformers as tf
from caches import FULL, TIGHT, progressive, two_level
from models import VOCAB, build, model, prompt, reference
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_sparsekv import OffloadConfig, OffloadedSparseCache, SparseCache, SparseConfig, TwoLevelConfig
from hf_sparsekv.cli import loading
from hf_sparsekv.cli.output import CommandError
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
    with pytest.raises(ValueError, match=EMPTY):
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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 0}, "block_size must be a positive integer, got 0"),
        ({"block_size": -16}, "block_size must be a positive integer"),
        ({"block_size": 16.0}, "block_size must be a positive integer, got 16.0"),
        ({"block_size": True}, "block_size must be a positive integer, got True"),
        ({"block_size": 48}, "block_size must be a power of two, got 48"),
        ({"block_size": 8}, r"block_size must lie in \[16, 128\], got 8"),
        ({"block_size": 256}, r"block_size must lie in \[16, 128\], got 256"),
        ({"sinks": -1}, "sinks must be an integer >= 0, got -1"),
        ({"window": 0}, "window must be at least 1"),
        ({"window": -3}, "window must be an integer >= 0, got -3"),
        ({"dense_layers": -1}, "dense_layers must be an integer >= 0"),
        ({"max_draft": 1.5}, "max_draft must be an integer >= 0, got 1.5"),
        ({"max_length": 0}, "max_length must be a positive integer, got 0"),
        ({"token_budget": 0}, "token_budget must be a positive integer, got 0"),
        ({"token_budget": -1}, "token_budget must be a positive integer"),
        ({"token_budget": "64"}, "token_budget must be a positive integer, got '64'"),
        ({"num_blocks": 0}, "num_blocks must be a positive integer, got 0"),
        (
            {"block_size": 16, "num_blocks": 4, "token_budget": 65},
            "num_blocks=4 blocks of 16 tokens hold 64 tokens, fewer than token_budget=65: raise num_blocks to at leas",
        ),
        ({"level": "blocks"}, "level must be one of 'two_level', 'block', 'token', got 'blocks'"),
        ({"level": "block", "token_budget": 63}, "token_budget=63 is less than one block of 64 tokens"),
        ({"label_channels": 0}, "label_channels must be a positive integer"),
        ({"bound_tokens": 12}, "bound_tokens must be a power of two"),
        ({"bound_tokens": 128}, "bound_tokens=128 exceeds block_size=64"),
        ({"label_channels": 7}, "label_channels must be even, got 7"),
        ({"label_bits": 8}, "label_bits must be 4 or 16, got 8"),
        ({"channel_importance": "sum"}, "channel_importance must be one of 'max', 'mean', got 'sum'"),
        ({"calibration_tokens": 0}, "calibration_tokens must be a positive integer"),
        ({"block_reduce": "median"}, "block_reduce must be one of 'mean', 'max', got 'median'"),
        ({"token_reduce": "sum"}, "token_reduce must be one of 'mean', 'max', got 'sum'"),
        ({"lag": 3}, "lag must be True, False or None, got 3"),
        ({"lag": 1}, "lag must be True, False or None, got 1"),
        ({"label_bits": 4.0}, "label_bits must be 4 or 16, got 4.0"),
        ({"channel_file": 3}, "channel_file must be a path or None, got 3"),
    ],
)
def test_config_values(settings, message):
    with pytest.raises(ValueError, match=message):
        TwoLevelConfig(**settings)


def test_offload_config_values():
    with pytest.raises(ValueError, match="max_host_bytes must be a positive integer, got 0"):
        OffloadConfig(max_host_bytes=0)
    with pytest.raises(ValueError, match="pin_memory must be True, False or None, got 'yes'"):
        OffloadConfig(pin_memory="yes")
    with pytest.raises(ValueError, match="keep_dense must be True or False, got 1"):
        OffloadConfig(keep_dense=1)


def test_config_types():
    with pytest.raises(TypeError, match="config must be a TwoLevelConfig, got OffloadConfig"):
        OffloadedSparseCache(OffloadConfig())
    with pytest.raises(TypeError, match="config must be a TwoLevelConfig, got SparseConfig"):
        OffloadedSparseCache(SparseConfig())
    with pytest.raises(TypeError, match="offload must be an OffloadConfig or None, got bool"):
        OffloadedSparseCache(TwoLevelConfig(), offload=True)


def test_a_model_is_no_configuration(filled, tmp_path):
    message = r"must be the model's configuration \(model.config\), got LlamaForCausalLM"
    with pytest.raises(TypeError, match=message):
        OffloadedSparseCache(model_config=model("llama"))
    filled.save(tmp_path / "cache")
    with pytest.raises(TypeError, match=message):
        SparseCache.load(tmp_path / "cache", model_config=model("llama"))


def test_pickling_says_what_to_do_instead(filled):
    with pytest.raises(TypeError, match=r"cache.save\(path\)"):
        pickle.dumps(filled)
    assert works(filled.reset() or filled)


def test_more_label_channels_than_the_head_has():
    with pytest.raises(ValueError, match="label_channels=32 exceeds the model's head dimension 16"):
        feed("llama", two_level(label_channels=32), IDS)


# ---------------------------------------------------------------------- channel files


def test_channel_file_missing(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.safetensors does not exist: make it with `hf-sparsekv calibrate`"):
        two_level(channel_file=tmp_path / "nowhere.safetensors")


def test_channel_file_of_another_kind(tmp_path):
    text, tensors = tmp_path / "a.txt", tmp_path / "b.safetensors"
    text.write_text("something else")
    save_file({"ranking": torch.zeros(2)}, tensors)
    for path in (text, tensors):
        with pytest.raises(ValueError, match="is not a channel file"):
            two_level(channel_file=path)


def test_channel_file_of_another_model(tmp_path):
    path = tmp_path / "channels.safetensors"
    calibrate(build("llama", "sparsekv"), [IDS]).save(path)
    message = "made for another model .*num_key_value_heads is 2 in the file, 1 in the model"
    with pytest.raises(ValueError, match=message):
        feed("llama-mqa", two_level(channel_file=path), IDS)
    with pytest.raises(ValueError, match="model_type is llama in the file, qwen2 in the model"):
        two_level(channel_file=path, model_config=model("qwen2").config)


def test_channel_file_without_the_layer(tmp_path):
    path = tmp_path / "channels.safetensors"
    made = calibrate(build("llama", "sparsekv"), [IDS])
    made.ranking[1] = -1
    made.save(path)
    with pytest.raises(ValueError, match="has no channels for layer 1"):
        feed("llama", two_level(channel_file=path), IDS)


def test_channel_file_of_a_shard(tmp_path):
    path = tmp_path / "channels.safetensors"
    made = calibrate(build("llama", "sparsekv"), [IDS])
    LabelChannels(made.ranking[:, :1], made.model, "", "max", 1).save(path)
    with pytest.raises(ValueError, match="with tensor parallelism leave channel_file out"):
        feed("llama", two_level(channel_file=path), IDS)


# ---------------------------------------------------------------------- models


def tiny_bart(attn):
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = tf.BartConfig(vocab_size=VOCAB, **sizes, **heads, attn_implementation=attn)
    return tf.BartForConditionalGeneration(config).eval()


def test_encoder_decoder():
    with pytest.raises(ValueError, match="sparse caches serve decoder-only models"):
        tiny_bart("sparsekv").generate(IDS[:, :10], past_key_values=two_level(), max_new_tokens=3)
    with pytest.raises(ValueError, match="sparse caches serve decoder-only models"):
        two_level(model_config=tf.BartConfig())


def test_encoder_decoder_without_our_cache():
    torch.manual_seed(0)
    ours = tiny_bart("sparsekv")
    torch.manual_seed(0)
    theirs = tiny_bart("sdpa")
    inputs = prompt(2, 12, (0, 5))
    texts = [m.generate(**inputs, max_new_tokens=8, do_sample=False) for m in (ours, theirs)]
    assert torch.equal(*texts)


def test_position_bias():
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    t5 = tf.T5ForConditionalGeneration(tf.T5Config(vocab_size=VOCAB, **sizes, attn_implementation="sparsekv")).eval()
    with pytest.raises(ValueError, match="do not support attention with a position bias: use a DynamicCache"):
        t5.generate(IDS[:, :10], past_key_values=two_level(), max_new_tokens=3)


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


# ---------------------------------------------------------------------- one cache, different tensors


def test_batch_size_changes(filled):
    message = r"the batch size changed from 1 to 2 in mid-cache: use a new cache, or batch_repeat_interleave\(\)"
    with pytest.raises(ValueError, match=message):
        feed("llama", filled, IDS[:, :1].repeat(2, 1))


def test_dtype_changes(filled):
    low = build("llama", "sparsekv").bfloat16()
    with pytest.raises(ValueError, match=r"keys of dtype torch\.float32, got torch\.bfloat16: keep one dtype"):
        low(IDS[:, :1], past_key_values=filled)


def test_device_changes(filled):
    keys = torch.empty(1, 2, 1, 16, device="meta")
    with pytest.raises(ValueError, match="keys of device cpu, got meta: keep one device"):
        filled.update(keys, keys, 0)


def test_heads_change(filled):
    message = r"layer 0 caches 2 KV heads of 16 \+ 16 channels, got 4 of 16 \+ 16: .* filled by another model"
    with pytest.raises(ValueError, match=message):
        feed("llama-mha", filled, IDS[:, :1])


def test_more_layers(filled):
    deep = build("llama", "sparsekv", num_hidden_layers=3)
    with pytest.raises(ValueError, match="made for a model of 2 layers, got layer 2: it belongs to another model"):
        deep(IDS[:, :1], past_key_values=filled)


@pytest.mark.parametrize("layers", [1, 3])
def test_configuration_of_another_number_of_layers(layers):
    """Told by the prompt, not by the step behind it."""
    cache = two_level(model_config=build("llama", "sdpa", num_hidden_layers=layers).config)
    message = rf"for a model of {layers} layers \(model_config\), the one that runs has 2: make a new cache, with"
    with pytest.raises(ValueError, match=message):
        feed("llama", cache, IDS)
    assert cache.memory_bytes() == {"device": 0, "host": 0}


def test_refusals_leave_the_cache_usable(filled):
    """What is refused before anything is stored changes nothing."""
    with pytest.raises(ValueError, match="batch size"):
        feed("llama", filled, IDS[:, :1].repeat(2, 1))
    with pytest.raises(ValueError, match="attention_mask has 5 columns"):
        feed("llama", filled, IDS[:, :1], attention_mask=torch.ones(1, 5))
    found = feed("llama", filled, IDS[:, :1])
    with torch.no_grad():
        expected = reference("llama")(torch.cat((IDS, IDS[:, :1]), 1)).logits[:, -1:]
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


def test_models_without_attention_interface(tmp_path, monkeypatch):
    config = AutoConfig.for_model("falcon", hidden_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda path: None)
    with pytest.raises(CommandError, match="transformers runs falcon models with attention of their own only"):
        loading.load(str(tmp_path), None, torch.device("cpu"))
