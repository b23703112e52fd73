"""Models that a sparse cache cannot serve, or only densely: each is told why, and what runs is right."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
import transformers as tf
from caches import FULL, TIGHT, progressive, two_level
from inside import attention_of, of_config
from models import VOCAB, build, model, prompt, reference
from transformers import DynamicCache

from hf_sparsekv import sparse
from hf_sparsekv.cache_name import generate_over, given_cache

IDS = prompt(1, 90)["input_ids"]
ANSWER = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
SIZES = {"vocab_size": VOCAB, "hidden_size": 64, "num_attention_heads": 4, "bos_token_id": 1, "eos_token_id": None}


def wide(net: torch.nn.Module) -> torch.nn.Module:
    """Weights as large as those of ``models.build``: greedy text is not one token over and over."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.3)
    return net.eval()


# ---------------------------------------------------------------------- encoder-decoders


def bart(attn):
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    return tf.BartForConditionalGeneration(tf.BartConfig(vocab_size=VOCAB, **sizes, **heads, attn_implementation=attn))


def t5(attn):
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
    return tf.T5ForConditionalGeneration(tf.T5Config(vocab_size=VOCAB, **sizes, attn_implementation=attn))


@pytest.mark.quick
@pytest.mark.parametrize("attn", ["sparsekv", "sdpa", "eager"])
@pytest.mark.parametrize("make", [bart, t5])
def test_encoder_decoders(make, attn):
    """Any attention function, and again: transformers would put both attentions' keys into one layer."""
    net, cache = make(attn).eval(), two_level()
    for _ in range(2):
        with pytest.raises(ValueError, match="sparse caches serve decoder-only models"):
            net.generate(IDS[:, :10], past_key_values=cache, max_new_tokens=3)
    with pytest.raises(ValueError, match="sparse caches serve decoder-only models"):
        net(input_ids=IDS[:, :10], decoder_input_ids=IDS[:, :4], past_key_values=cache)
    expected = reference("llama").generate(IDS, **ANSWER)
    assert torch.equal(model("llama").generate(IDS, past_key_values=cache, **ANSWER), expected)


def test_the_configuration_of_an_encoder_decoder():
    with pytest.raises(ValueError, match="sparse caches serve decoder-only models"):
        two_level(model_config=tf.BartConfig())


def test_encoder_decoders_without_our_caches():
    """The attention function alone runs them as sdpa does."""
    inputs = prompt(2, 12, (0, 5))
    nets = [wide(bart(attn)) for attn in ("sparsekv", "sdpa")]
    texts = [net.generate(**inputs, max_new_tokens=8, do_sample=False) for net in nets]
    assert torch.equal(*texts)


@pytest.mark.parametrize("attn", ["sparsekv", "sdpa"])
def test_the_decoder_of_an_encoder_decoder_alone(attn):
    """Its configuration says so, and it is served."""
    sizes = {
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "decoder_ffn_dim": 64,
        "decoder_attention_heads": 4,
    }
    config = tf.BartConfig(vocab_size=VOCAB, **sizes, eos_token_id=None, forced_eos_token_id=None)
    net = wide(tf.BartForCausalLM(config))
    net.set_attn_implementation(attn)
    expected = net.generate(IDS, past_key_values=DynamicCache(), **ANSWER)
    assert torch.equal(net.generate(IDS, past_key_values=two_level(**FULL), **ANSWER), expected)


# ---------------------------------------------------------------------- attention in both directions


def bert_generation(attn, **config):
    sizes = {**SIZES, "num_hidden_layers": 2, "intermediate_size": 64}
    return wide(tf.BertGenerationDecoder(tf.BertGenerationConfig(**sizes, **config, attn_implementation=attn)))


@pytest.mark.quick
@pytest.mark.parametrize("decoder", [False, True])
@pytest.mark.parametrize("pads", [None, (0, 7)])
@torch.no_grad()
def test_bert_sees_all_of_a_prompt_unless_it_is_a_decoder(decoder, pads):
    """As with transformers' own cache and sdpa: the prompt, a chunk behind it, a token behind that."""
    nets = [bert_generation(attn, is_decoder=decoder) for attn in ("sparsekv", "sdpa")]
    caches = [two_level(**FULL), DynamicCache()]
    inputs, more = prompt(2, 60, pads), prompt(2, 4, seed=3)
    fed = [(inputs["input_ids"], inputs["attention_mask"])]
    for part in (more["input_ids"][:, :3], more["input_ids"][:, 3:]):
        fed.append((part, torch.cat((fed[-1][1], torch.ones_like(part)), dim=1)))
    for ids, mask in fed:
        mask = {} if pads is None else {"attention_mask": mask}
        found, expected = (net(ids, past_key_values=cache, **mask).logits for net, cache in zip(nets, caches))
        real = inputs["attention_mask"].bool() if ids.shape[1] == 60 else torch.ones_like(ids, dtype=torch.bool)
        torch.testing.assert_close(found[real], expected[real], atol=2e-4, rtol=1e-4)


# ---------------------------------------------------------------------- layers of other kinds


def falcon_h1():
    mamba = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
    config = tf.FalconH1Config(**SIZES, **mamba, num_hidden_layers=2, num_key_value_heads=2, intermediate_size=64)
    return wide(of_config(tf.FalconH1ForCausalLM, config, "sparsekv"))


def recurrent_gemma():
    config = tf.RecurrentGemmaConfig(
        **SIZES, num_hidden_layers=3, intermediate_size=192, lru_width=64, attention_window_size=32
    )
    return wide(of_config(tf.RecurrentGemmaForCausalLM, config, "sparsekv"))


WHY = {
    falcon_h1: r"this falcon_h1 model that attend to their whole past hold a state of linear attention .*as well",
    recurrent_gemma: r"no layer of this recurrent_gemma model attends to its whole past \(sliding windows or linear",
}


@pytest.mark.few
@pytest.mark.quick
@pytest.mark.parametrize("make", WHY)
@pytest.mark.parametrize("kind", [two_level, progressive])
def test_nothing_to_make_sparse(make, kind):
    """Said with the reason; the text is right, in a second prompt after reset(), too."""
    net = make()
    expected = net.generate(IDS, past_key_values=DynamicCache(config=net.config), **ANSWER)
    try:  # without the configuration
        found = net.generate(IDS, past_key_values=kind(), **ANSWER)
    except ValueError as error:
        assert "has linear-attention layers: make the cache with" in str(error)
    else:  # RecurrentGemma of later releases than transformers 5.17 keeps its states itself
        assert make is recurrent_gemma and torch.equal(found, expected)
    with pytest.warns(UserWarning, match=WHY[make] + ".*has nothing to make sparse"):
        cache = kind(model_config=net.config)
    for seed in (0, 3):
        inputs = prompt(2, 70, seed=seed)
        expected = net.generate(**inputs, past_key_values=DynamicCache(config=net.config), **ANSWER)
        assert torch.equal(net.generate(**inputs, past_key_values=cache, **ANSWER), expected)
        cache.reset()


# ---------------------------------------------------------------------- PEFT


class PrefixTuned(tf.LlamaForCausalLM):
    """Does what PEFT's models with prefix tuning do (``PeftModelForCausalLM.prepare_inputs_for_generation``)."""

    def prepare_inputs_for_generation(self, *args, **kwargs):
        made = super().prepare_inputs_for_generation(*args, **kwargs)
        cache = given_cache(made)
        if not cache.get_seq_length():
            self.asked = -1 if isinstance(cache, DynamicCache) else cache.max_cache_len
            made |= generate_over(DynamicCache())
        return made


@pytest.mark.parametrize("known", [False, True])
def test_prefix_tuning(known):
    """Its prefix would take the place of the cache: told so, whether or not the layers are known."""
    net = build("llama", "sparsekv")
    net.__class__ = PrefixTuned
    net.generate(IDS, past_key_values=DynamicCache(), **ANSWER)
    cache = two_level(**TIGHT, model_config=net.config if known else None)
    with pytest.raises(
        ValueError, match=r"PEFT's prefix tuning keeps its prefix in a DynamicCache of its own.*use LoRA"
    ):
        net.generate(IDS, past_key_values=cache, **ANSWER)
    assert cache.get_max_length() == -1


def test_prefix_tuning_inside_sparse():
    """Nobody gave past_key_values, so the message does not say to leave them out."""
    net = build("llama", "sparsekv")
    net.__class__ = PrefixTuned
    with sparse(net), pytest.raises(ValueError, match=r"call generate\(\) outside of sparse\(\), or use LoRA"):
        net.generate(IDS, **ANSWER)


class PromptTuning:
    """PEFT's model with prompt tuning: it puts virtual tokens before the first input of ``net``."""

    active_peft_config = SimpleNamespace(num_virtual_tokens=8)

    def __init__(self, net):
        self.net, self.own = net, net.prepare_inputs_for_generation
        self.virtual = torch.randn(1, 8, 64, generator=torch.Generator().manual_seed(0))
        net.prepare_inputs_for_generation = self.prepare_inputs_for_generation

    def prepare_inputs_for_generation(self, ids, *args, **kwargs):
        made = self.own(ids, *args, **kwargs)
        cache, mask = given_cache(made), made.get("attention_mask")
        made["attention_mask"] = torch.cat((mask.new_ones(len(mask), 8), mask), dim=1)
        made["position_ids"] = None
        if not cache.get_seq_length():
            embeds = self.net.get_input_embeddings()(made["input_ids"])
            made |= {"input_ids": None, "inputs_embeds": torch.cat((self.virtual, embeds), dim=1)}
        else:
            made["input_ids"] = ids[:, -1:]
        return made


@pytest.mark.parametrize("more", [1, 5, 9, 30])  # fewer, and more, than the virtual tokens
def test_a_second_turn_with_prompt_tuning(more):
    """generate() would leave out as many new tokens as there are virtual ones."""
    net, cache = build("llama", "sparsekv"), two_level(**FULL)
    PromptTuning(net)
    text = net.generate(IDS, attention_mask=torch.ones_like(IDS), past_key_values=cache, **ANSWER)
    assert cache.get_seq_length() == 8 + text.shape[1] - 1
    ids = torch.cat((text, prompt(1, more, seed=3)["input_ids"]), dim=1)
    with pytest.raises(
        ValueError, match=r"105 tokens, 8 of them virtual tokens of PEFT.*make a new cache for each turn"
    ):
        net.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **ANSWER)


def test_the_length_of_an_empty_cache():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert two_level().get_max_length() == two_level().get_max_length(0) == -1


# ---------------------------------------------------------------------- continuous batching


@pytest.mark.quick
def test_generate_batch():
    """Every request fails with our message, or the call with transformers' own; the model is as it was."""
    net = build("llama", "sparsekv")
    how = tf.GenerationConfig(max_new_tokens=3, eos_token_id=2, pad_token_id=0, do_sample=False)
    try:
        failed = net.generate_batch([[3, 4, 5], [6, 7]], generation_config=how, progress_bar=False)
    except ValueError as error:
        assert "sparsekv is not supported for continuous batching" in str(error)  # not in transformers 5.17
    else:
        assert len(failed) == 2
        for request in failed.values():
            assert "in whose place no sparse cache can be: call model.set_attn_implementation('sdpa')" in request.error
    assert attention_of(net) == "sparsekv"
    assert net.generate(IDS, past_key_values=two_level(), **ANSWER).shape == (1, 98)


def test_paged_attention_by_name():
    """Refused, or in releases after transformers 5.17, which drop the prefix: served as without it."""
    net, cache = build("llama", "paged|sparsekv"), two_level(**FULL)
    if attention_of(net) == "sparsekv":
        expected = net.generate(IDS, **generate_over(DynamicCache()), **ANSWER)
        assert torch.equal(net.generate(IDS, **generate_over(cache), **ANSWER), expected)
        return
    with pytest.raises(ValueError, match="continuous batching"):
        net.generate(IDS, **generate_over(cache), **ANSWER)


# ---------------------------------------------------------------------- attention of their own kind


def tiny(config_class, **sizes):
    return config_class(**{**SIZES, "num_hidden_layers": 2, "num_key_value_heads": 2, "intermediate_size": 64, **sizes})


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda attn: tf.DiffLlamaForCausalLM(tiny(tf.DiffLlamaConfig, attn_implementation=attn)),
            "attends to other values than those that it has cached",
        ),
        (
            lambda attn: tf.BigBirdPegasusForCausalLM(
                tf.BigBirdPegasusConfig(
                    vocab_size=VOCAB,
                    d_model=32,
                    decoder_layers=2,
                    decoder_ffn_dim=32,
                    decoder_attention_heads=2,
                    is_decoder=True,
                    is_encoder_decoder=False,
                    attn_implementation=attn,
                )
            ),
            "compute their attention themselves",
        ),
        (
            lambda attn: tf.MllamaForCausalLM(
                tiny(tf.MllamaTextConfig, cross_attention_layers=[1], pad_token_id=0, attn_implementation=attn)
            ),
            "attend to an image",
        ),
    ],
    ids=["diffllama", "bigbird-pegasus", "mllama"],
)
def test_attention_of_another_kind(make, says):
    """With and without the model's configuration: refused before anything wrong comes out."""
    net = wide(make("sparsekv"))
    for config in (None, net.config):
        with pytest.raises(ValueError, match=says):
            net.generate(IDS, past_key_values=two_level(model_config=config), **ANSWER)
    with pytest.raises(ValueError, match=says), sparse(net):
        net.generate(IDS, **ANSWER)
    assert wide(make("eager")).generate(IDS, **ANSWER).shape[1] == 98
