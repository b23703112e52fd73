"""Uses of its cache by ``generate()`` inside ``sparse()``: dropped, passed over, handed on; and no false alarms."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
import transformers as tf
from captured import Imitation
from inside import attention_of
from models import COMMON, build, model, prompt
from transformers import DynamicCache, TextStreamer

from hf_sparsekv import SparseCache, TokenConfig, sparse
from hf_sparsekv.attention.interface import refuse_paged
from hf_sparsekv.cuda_graph.optimize import runner_of

SMALL = {"block_size": 16, "window": 16, "max_draft": 4, "dense_layers": 0, "calibration_tokens": 32}
TIGHT = {**SMALL, "token_budget": 32, "dense_below": None}
GO = {"max_new_tokens": 8, "do_sample": False}
SWITCH = 64


def phi3() -> tf.Phi3ForCausalLM:
    """Its rotary factors change at 64 tokens."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": SWITCH, **factors}
    more = {"sliding_window": None, "original_max_position_embeddings": SWITCH}
    return build("phi3", "sdpa", rope_parameters={**rope, "partial_rotary_factor": 1.0}, **more)


VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 16, "patch_size": 4}
IMAGE = 90


def blip2(kind=tf.Blip2ForConditionalGeneration, config=tf.Blip2Config):
    query = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    text = {k: v for k, v in COMMON.items() if k not in ("head_dim", "tie_word_embeddings")}
    torch.manual_seed(0)
    made = config(
        vision_config=VISION,
        qformer_config={**query, "encoder_hidden_size": 32, "vocab_size": 50},
        text_config={**text, "model_type": "llama"},
        num_query_tokens=4,
        image_token_index=IMAGE,
    )
    return kind(made).eval()


def instructblip():
    return blip2(tf.InstructBlipForConditionalGeneration, tf.InstructBlipConfig)


def omni():
    text = {k: v for k, v in COMMON.items() if k != "head_dim"}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    audio = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "output_dim": 64}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    thinker = {"text_config": {**text, "rope_parameters": rope}, "vision_config": vision}
    thinker |= {"audio_config": {**audio, "num_mel_bins": 16, "n_window": 10}}
    torch.manual_seed(0)
    config = tf.Qwen2_5OmniConfig(thinker_config=thinker, enable_audio_output=False)
    made = tf.Qwen2_5OmniForConditionalGeneration(config).eval()
    made.thinker.config.vision_start_token_id = 95  # the talker's configuration has it
    made.speaker_map = {"Chelsie": {}}
    made.talker = torch.nn.Module()
    made.talker.codec_pad_token = 0
    return made


def image_and_text(**more) -> dict:
    ids = prompt(1, 80)["input_ids"].clamp(max=IMAGE - 1)
    ids = torch.cat((torch.full((1, 4), IMAGE), ids), dim=1)
    torch.manual_seed(1)
    return {"pixel_values": torch.randn(1, 3, 16, 16), "input_ids": ids, **GO, "return_dict_in_generate": True, **more}


INNER = {
    "blip2": (blip2, lambda m: m.language_model, image_and_text),
    "instructblip": (
        instructblip,
        lambda m: m.language_model,
        lambda: image_and_text(qformer_input_ids=torch.ones(1, 3, dtype=torch.long)),
    ),
    "omni": (
        omni,
        lambda m: m.thinker,
        lambda: {
            "input_ids": prompt(1, 80)["input_ids"],
            "generation_mode": "text",
            **{f"thinker_{key}": value for key, value in {**GO, "return_dict_in_generate": True}.items()},
        },
    ),
}


def attentions(net) -> list[str]:
    return [attention_of(m) for m in net.modules() if isinstance(m, tf.PreTrainedModel)]


@pytest.mark.parametrize("name", INNER)
def test_generate_that_is_handed_on(name):
    """Where the model's ``generate()`` calls a part's, twice in a row."""
    made, part, inputs = INNER[name]
    net = made()
    before, expected = attentions(net), net.generate(**inputs()).sequences
    for _ in range(2):
        with sparse(net, **{**TIGHT, "token_budget": 4096}) as inside:
            assert inside is net
            out = net.generate(**inputs())
        assert isinstance(out.past_key_values, SparseCache) and out.past_key_values.stats().decode_steps
        assert torch.equal(out.sequences, expected)
        assert attentions(net) == before
        assert not {"generate", "prepare_inputs_for_generation"} & set(vars(part(net)))


@pytest.mark.few
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("optimised", [False, True])
def test_a_cache_that_the_model_drops_is_filled_again(rows, optimised):
    """Phi-3 reads all of its text again where its rotary factors change."""
    net, inputs = phi3(), prompt(rows, 50, (0, 7)[:rows])
    go = {**GO, "max_new_tokens": 40}
    expected = net.generate(**inputs, **go, use_cache=False)
    if optimised:
        net.set_attn_implementation("sparsekv")
        Imitation(net).install()
    with sparse(net, **{**TIGHT, "token_budget": 4096}, offload=True), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        out = net.generate(**inputs, **go, return_dict_in_generate=True)
        own = SparseCache(TokenConfig(**{**TIGHT, "token_budget": 4096}))
        again = net.generate(**inputs, **go, past_key_values=own)
    assert torch.equal(out.sequences, expected) and torch.equal(again, expected)
    for cache in (out.past_key_values, own):
        assert isinstance(cache, SparseCache) and cache.get_seq_length() == 89


def test_a_dropped_cache_of_a_prompt_that_is_not_there():
    net = build("llama", "sdpa")
    original = net.prepare_inputs_for_generation

    @functools.wraps(original)
    def drops(input_ids, past_key_values=None, **kwargs):
        held = past_key_values is not None and past_key_values.get_seq_length() >= 52
        return original(input_ids, past_key_values=None if held else past_key_values, **kwargs)

    net.prepare_inputs_for_generation = drops
    embeds = net.get_input_embeddings()(prompt(1, 50)["input_ids"])
    with sparse(net, **TIGHT), pytest.raises(RuntimeError, match="its prompt was given as inputs_embeds"):
        net.generate(inputs_embeds=embeds, **GO)
    assert net.prepare_inputs_for_generation is drops


# ---------------------------------------------------------------------- the net


def another_cache(net):
    original = type(net).forward

    def forward(*args, **kwargs):
        kwargs["past_key_values"] = forward.cache
        return original(net, *args, **kwargs)

    forward.cache = DynamicCache(config=net.config)
    net.forward = forward
    return {}


def no_cache(net):
    original = type(net).forward
    net.forward = lambda *args, **kwargs: original(net, *args, **{**kwargs, "past_key_values": None})
    return {"use_cache": True}


def dropped_later(net):
    original = type(net).forward

    def forward(*args, **kwargs):
        if (cache := kwargs.get("past_key_values")) is not None and cache.get_seq_length():
            kwargs["past_key_values"] = DynamicCache(config=net.config)
        return original(net, *args, **kwargs)

    net.forward = forward
    return {}


def four_dimensions(net):
    original = type(net).forward

    def forward(*args, **kwargs):
        cache, ids = kwargs.get("past_key_values"), kwargs["input_ids"]
        if cache is not None and (past := cache.get_seq_length()):
            kwargs["attention_mask"] = torch.ones(1, 1, ids.shape[1], past + ids.shape[1], dtype=torch.bool)
        return original(net, *args, **kwargs)

    net.forward = forward
    return {}


CAUSES = {
    "another cache": (another_cache, "left SparseCache empty"),
    "no cache": (no_cache, "left SparseCache empty"),
    "a cache that is given": (lambda net: {"past_key_values": DynamicCache(config=net.config)}, "given a DynamicCache"),
    "dropped later": (dropped_later, "the model decoded [0-9]+ tokens without the SparseCache"),
    "a 4-D mask": (four_dimensions, "came with a 4-D attention mask"),
    "another attention": (lambda net: net.set_attn_implementation("sdpa") or {}, "read the keys .*'sdpa' now"),
}


@pytest.mark.parametrize("name", CAUSES)
def test_why_nothing_was_sparse(name):
    cause, message = CAUSES[name]
    net = build("llama", "sdpa")
    with (
        sparse(net, **TIGHT),
        pytest.warns(UserWarning, match=f"no step of this generate\\(\\) was sparse: .*{message}"),
    ):
        net.generate(**prompt(1, 90), **GO, **cause(net))


class Silent(TextStreamer):
    def __init__(self) -> None:
        self.tokens = 0

    def put(self, value) -> None:
        self.tokens += value.numel()

    def end(self) -> None:
        pass


NORMAL = {
    "short": (10, {}),
    "dense, because short": (90, {"dense_below": 10_000}),
    "budget": (90, {"token_budget": 4096}),
    "defaults": (90, None),
    "one token": (90, {}, {"max_new_tokens": 1}),
    "stream": (90, {}, {"streamer": Silent()}),
    "beams": (90, {}, {"num_beams": 3}),
    "drawn": (90, {}, {"do_sample": True}),
    "lookup": (90, {}, {"prompt_lookup_num_tokens": 3}),
    "assisted": (90, {}, {"assistant_model": "llama"}),
    "early exit": (90, {}, {"assistant_early_exit": 1}),
    "chunks": (90, {}, {"prefill_chunk_size": 16}),
    "ends at once": (90, {}, {"eos_token_id": list(range(97))}),
    "offloaded": (90, {"offload": True}),
}


@pytest.mark.parametrize("name", NORMAL)
def test_no_false_alarm(name):
    tokens, settings, *go = NORMAL[name]
    go = {**GO, **(go[0] if go else {})}
    if "assistant_model" in go:
        go["assistant_model"] = model("llama", "sdpa")
    given = {} if settings is None else {**TIGHT, **settings}
    net = build("llama", "sdpa")
    with sparse(net, **given), warnings.catch_warnings():
        warnings.filterwarnings("error", message="no step of this")
        net.generate(**prompt(1, tokens), **go)


def test_sliding_layers_have_said_so():
    net = build("mistral-window", "sdpa")
    with sparse(net, **TIGHT), pytest.warns(UserWarning) as told:
        net.generate(**prompt(1, 90), **GO)
    assert ["nothing to make sparse" in str(one.message) for one in told] == [True]


def test_an_error_is_not_told_twice():
    net = build("llama", "sdpa")
    with sparse(net, **TIGHT), warnings.catch_warnings():
        warnings.filterwarnings("error", message="no step of this")
        with pytest.raises(ValueError, match="use_cache=False"):
            net.generate(**prompt(1, 90), use_cache=False)
    assert not {"generate", "prepare_inputs_for_generation", "generate_batch"} & set(vars(net))


# ---------------------------------------------------------------------- others


def test_a_mask_that_is_only_for_the_prompt():
    """PaliGemma's prompt attends in both directions; its steps are like everybody's."""
    text = {**COMMON, "model_type": "gemma"}
    vision = {**VISION, "projection_dim": 64}
    torch.manual_seed(0)
    config = tf.PaliGemmaConfig(vision_config=vision, text_config=text, projection_dim=64, image_token_index=IMAGE)
    net = tf.PaliGemmaForConditionalGeneration(config).eval()
    ids = torch.cat((torch.full((1, 16), IMAGE), prompt(1, 80)["input_ids"].clamp(max=IMAGE - 1)), dim=1)
    inputs = {"input_ids": ids, "pixel_values": torch.randn(1, 3, 16, 16), "token_type_ids": torch.zeros_like(ids)}
    expected = net.generate(**inputs, **GO)
    for budget in (4096, 32):
        with sparse(net, **{**TIGHT, "token_budget": budget}):
            out = net.generate(**inputs, **GO, return_dict_in_generate=True)
        stats = out.past_key_values.stats()
        assert stats.decode_steps == 7 and (stats.attended_tokens < stats.context_tokens) == (budget == 32)
        assert budget == 32 or torch.equal(out.sequences, expected)
    cache = out.past_key_values
    cache.reset()
    assert not cache.is_initialized, "the next pass is a first one"


def test_gradient_checkpointing():
    net = build("llama", "sdpa")
    net.gradient_checkpointing_enable()
    net.train()
    with sparse(net, **TIGHT):
        with pytest.raises(ValueError, match=r"call model\.eval\(\) or model\.gradient_checkpointing_disable\(\)"):
            net.generate(**prompt(1, 40), **GO)
        net.eval()
        net.generate(**prompt(1, 40), **GO)


def test_continuous_batching_is_refused():
    net = build("llama", "sdpa")
    with sparse(net, **TIGHT), pytest.raises(ValueError, match="call it outside of sparse"):
        net.generate_batch([[1, 2, 3]])
    with pytest.warns(UserWarning, match="no sparse cache can be"), pytest.raises(ValueError):
        refuse_paged()


@pytest.mark.parametrize(("kinds", "layers"), [("cfc", 1), ("cfc", 2), ("fcf", 1)])
def test_drafts_of_the_first_layers(kinds, layers):
    """Also where these hold states alone, or the configuration lists more layers than they are."""
    names = {"c": "conv", "f": "full_attention"}
    config = tf.Lfm2Config(
        **{**COMMON, "num_hidden_layers": 3, "block_ff_dim": 96}, layer_types=[names[kind] for kind in kinds]
    )
    torch.manual_seed(0)
    net, inputs = tf.Lfm2ForCausalLM(config).eval(), prompt(1, 90)
    expected = net.generate(**inputs, **GO)
    with sparse(net, **{**TIGHT, "token_budget": 4096}):
        assert torch.equal(net.generate(**inputs, **GO, assistant_early_exit=layers), expected)


def test_entering_is_no_change_of_an_optimised_model():
    net = build("llama", "sparsekv")
    runner = Imitation(net)
    runner.install()
    cache = SparseCache(TokenConfig(**TIGHT))
    text = net.generate(**prompt(1, 90), **GO, past_key_values=cache)
    captures = runner.captures
    with sparse(net, **TIGHT):
        net.generate(text, **GO, past_key_values=cache)
    assert runner_of(net) is runner
    assert runner.captures == captures
