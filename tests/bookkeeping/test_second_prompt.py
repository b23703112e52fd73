"""``generate()`` over a cache that holds tokens reads what is new in its input, or says what to do instead.

The same with all releases of transformers. (From 5.18 on the model gets no mask of ones, by which it could tell.)
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import transformers as tf
from caches import ALL, FULL, TIGHT, two_level
from captured import imitated
from models import build, model, plain_text, prompt, reference
from tokenizers_made import whole_words, words

import hf_sparsekv
from hf_sparsekv import PrefixCache, TokenConfig, sparse
from hf_sparsekv.cache_name import generate_over, over

pytestmark = pytest.mark.quick

GO = {"do_sample": False, "max_new_tokens": 4}
HELD = 93  # after 90 tokens and an answer of four, whose last one was never fed
NEW = prompt(1, 27, seed=5)["input_ids"]
NONE_NEW = (
    r"the input has {} tokens, but no new tokens: this cache holds {} tokens, and generate\(\) takes that many first "
    r"tokens of its input for those\. For another prompt, .* call cache\.reset\(\) or make a new cache; to go on"
)
AGAIN = "this cache holds 93 tokens, and transformers' loop for prompt lookup and assistants would read the whole"
CHUNKS_GO_ON = tuple(map(int, tf.__version__.split(".")[:2])) >= (5, 21)


def used(name="llama", make=two_level, net=None, **changes):
    """A cache that holds 93 tokens, and their text: 94 tokens."""
    net = net or model(name)
    cache = make(model_config=net.config, **(changes or FULL))
    return cache, net.generate(**prompt(1, 90), **generate_over(cache), **GO)


def refuses(cache, message, call, *args, **kwargs):
    """At once, and the cache is as it was. Returns what was said."""
    held, steps = cache.get_seq_length(), cache.stats()
    with pytest.raises(ValueError, match=message) as error:
        call(*args, **generate_over(cache), **{**GO, **kwargs})
    assert (cache.get_seq_length(), cache.stats()) == (held, steps)
    return str(error.value)


def goes_on(cache, text, name="llama", net=None):
    """The next turn over the cache gives the reference's text."""
    ids = torch.cat((text, NEW), 1)
    found = (net or model(name)).generate(ids, **generate_over(cache), **GO)
    assert torch.equal(found, plain_text(name, {"input_ids": ids}, **GO))


def no_longer(text):
    """Inputs no longer than what is cached: of one length a single token would be left of it, of others none."""
    return [text[:, :length] for length in (1, 46, 47, 50, 92, 93)]


def given_as(form, net, ids):
    """The input in one of its forms."""
    given = {"input_ids": ids} if "ids" in form else {"inputs_embeds": net.get_input_embeddings()(ids)}
    return given | ({"attention_mask": torch.ones_like(ids)} if "mask" in form else {})


FORMS = [("llama", form) for form in ("ids", "ids, mask", "embeds", "embeds, mask")]


@pytest.mark.parametrize(("name", "form"), [*FORMS, ("gemma3", "ids"), ("deepseek-v3", "ids"), ("qwen3-next", "ids")])
def test_inputs_without_new_tokens(name, form):
    """Another prompt or the beginning of the same. One token more is the next turn."""
    net, (cache, text) = model(name), used(name)
    for ids in (*no_longer(text), prompt(1, 50, seed=3)["input_ids"], prompt(1, 93, seed=3)["input_ids"]):
        said = refuses(cache, NONE_NEW.format(ids.shape[1], 93), net.generate, **given_as(form, net, ids))
        assert "begin-of-sequence" not in said and "make" not in said.split("For another")[0]
    found = net.generate(**given_as(form, net, text), **generate_over(cache), **GO)
    assert torch.equal(found[:, -4:], plain_text(name, {"input_ids": text}, **GO)[:, -4:])
    goes_on(cache, torch.cat((text, found[:, -4:]), 1), name)
    cache.reset()
    second = prompt(1, 50, seed=3)
    assert torch.equal(net.generate(**second, **generate_over(cache), **GO), plain_text(name, second, **GO))


MAKES = (
    *("host", "device-block", "host-default", "need", "progressive", "predictive-host", "predictive-second"),
    "streaming",
)


@pytest.mark.parametrize("make", MAKES)
def test_every_cache(make):
    """It goes on as one that was never asked."""
    cache, text = used(make=ALL[make], **TIGHT)
    other = copy.deepcopy(cache)
    for length in (47, 50, 93):
        refuses(cache, NONE_NEW.format(length, 93), model("llama").generate, text[:, :length])
    ids = torch.cat((text, NEW), 1)
    found, expected = (model("llama").generate(ids, **generate_over(one), **GO) for one in (cache, other))
    assert torch.equal(found, expected)
    assert copy.deepcopy(cache)._is_user_defined and not ALL[make]()._is_user_defined


def its_own_loop(net, input_ids, **given):
    """A loop of the caller's that begins as transformers' own do."""
    kwargs = {name: value for name, value in given.items() if name in ("attention_mask", *over(net, None))}
    config = given["generation_config"]
    logits = net._prefill(input_ids, config, {**kwargs, "use_cache": True}).logits
    return torch.cat((input_ids, logits[:, -1:].argmax(-1)), 1)


WAYS = {
    "drawn": {"do_sample": True},
    "beams": {"num_beams": 2},
    "rows": {"num_return_sequences": 2, "do_sample": True},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "assistant": {"assistant_model": "llama"},
    "chunks": {"prefill_chunk_size": 16},
    "outputs": {"return_dict_in_generate": True, "output_scores": True},
    "ours": {"custom_generate": hf_sparsekv.generate},
    "loop": {"custom_generate": its_own_loop},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_ask(way):
    more = {key: reference(value) if value == "llama" else value for key, value in WAYS[way].items()}
    cache, text = used()
    for length in (47, 50, 93):
        refuses(cache, NONE_NEW.format(length, 93), model("llama").generate, text[:, :length], **more)
    goes_on(cache, text)


def test_new_tokens_alone():
    """With the mask of all, they are read; with that of fewer, the model would not know which."""
    cache, text = used()
    ask, seven = model("llama").generate, NEW[:, :7]
    for columns, message in (
        (6, "attention_mask has 6 columns, as for a text of 6 tokens, but this cache holds 93 tokens already"),
        (60, "attention_mask has 60 columns, as for a text of 60 tokens, but this cache holds 93 tokens already"),
        (95, "attention_mask has 95 columns, but 93 cached and 7 new tokens make 100: pass the mask of all"),
    ):
        refuses(cache, message, ask, seven, attention_mask=torch.ones(1, columns, dtype=torch.long))
    embeds = model("llama").get_input_embeddings()(torch.cat((text, NEW), 1))
    message = "attention_mask has 100 columns, but 93 cached and 28 new tokens make 121"
    refuses(cache, message, ask, inputs_embeds=embeds, attention_mask=torch.ones(1, 100, dtype=torch.long))
    found = ask(seven, attention_mask=torch.ones(1, 100, dtype=torch.long), **generate_over(cache), **GO)
    expected = plain_text("llama", {"input_ids": torch.cat((text[:, :93], seven), 1)}, **GO)
    assert torch.equal(found[:, 7:], expected[:, 100:])


def next_turns(text):
    """The whole text, and only what is new of it with the mask of all."""
    whole = torch.cat((text, NEW), 1)
    return {"input_ids": whole}, {"input_ids": whole[:, 93:], "attention_mask": torch.ones_like(whole)}


@pytest.mark.parametrize("way", ["lookup", "assistant"])
def test_drafts_begin_with_an_empty_cache(way):
    more = {key: reference(value) if value == "llama" else value for key, value in WAYS[way].items()}
    cache, text = used()
    for inputs in next_turns(text):
        refuses(cache, AGAIN, model("llama").generate, **inputs, **more)
    goes_on(cache, text)
    cache.reset()
    found = model("llama").generate(**prompt(1, 90), **generate_over(cache), **GO, **more)
    assert torch.equal(found, text)


@pytest.mark.parametrize("size", [8, 200])
def test_chunks(size):
    """Of what is new, from transformers 5.21 on; before, they would begin with the input's first token."""
    for which in range(2):
        cache, text = used()
        inputs, more = next_turns(text)[which], {"prefill_chunk_size": size}
        if CHUNKS_GO_ON:
            found = model("llama").generate(**inputs, **generate_over(cache), **GO, **more)
            expected = plain_text("llama", {"input_ids": torch.cat((text, NEW), 1)}, **GO)
            assert torch.equal(found[:, -4:], expected[:, -4:])
        else:
            message = "this cache holds 93 tokens, and chunks begin .* up to transformers 5.20: call cache.reset"
            refuses(cache, message, model("llama").generate, **inputs, **more)
            goes_on(cache, text)


@pytest.mark.parametrize("more", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
def test_padded_batches(more):
    """A mask with padding reaches the model in all releases."""
    net, first = model("llama"), prompt(2, 90, (0, 9))
    cache = two_level(**FULL)
    text = net.generate(**first, **generate_over(cache), **GO)
    for second in (prompt(2, 50), prompt(2, 50, (0, 20)), prompt(2, 93, (9, 0)), {"input_ids": text[:, :93]}):
        refuses(cache, NONE_NEW.format(second["input_ids"].shape[1], 93), net.generate, **second, **more)
    mask = torch.cat((first["attention_mask"], torch.ones(2, 31, dtype=torch.long)), 1)
    whole = {"input_ids": torch.cat((text, NEW.expand(2, -1)), 1), "attention_mask": mask}
    assert torch.equal(net.generate(**whole, **generate_over(cache), **GO), plain_text("llama", whole, **GO))


def test_a_captured_step_is_not_given_the_rest():
    """47 tokens over 93 leave one, which looks like a decode step; replays look at no mask's length."""
    net, runner = imitated()
    cache, text = used(net=net)
    replays = runner.replays
    assert replays
    for inputs in (prompt(1, 47), {"input_ids": text[:, :47]}):
        refuses(cache, NONE_NEW.format(47, 93), net.generate, **inputs)
    assert runner.replays == replays
    goes_on(cache, text, net=net)


def test_a_pipeline():
    net = build("llama", "sparsekv")
    pipe = tf.pipeline("text-generation", model=net, tokenizer=whole_words())
    cache, text = used(net=net)
    for ids in (text[0, :50], text[0, :93], prompt(1, 50, seed=3)["input_ids"][0]):
        refuses(cache, NONE_NEW.format(len(ids), 93), pipe, words(ids.tolist()))
    goes_on(cache, text, net=net)


@pytest.mark.parametrize("exact", [False, True], ids=["sparse", "exact"])
def test_inside_sparse(exact):
    """A cache of the caller's: it decodes sparsely again, and the model is as it was."""
    net = build("llama", "sdpa")
    with sparse(net, TokenConfig(), exact=exact), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nothing is sparse in so short a text
        cache, text = used(make=ALL["device"], net=net)
        refuses(cache, NONE_NEW.format(50, 93), net.generate, text[:, :50])
        assert not cache.row_table.exactness.everything
        goes_on(cache, text, net=net)


def test_the_same_prompt_after_an_interrupt():
    """The cache holds all of it and more."""

    class Stop(tf.StoppingCriteria):
        def __call__(self, ids, scores, **kwargs):
            if ids.shape[1] == 95:
                raise KeyboardInterrupt
            return torch.zeros(len(ids), dtype=torch.bool)

    cache, inputs = two_level(), prompt(2, 90, (0, 9))
    with pytest.raises(KeyboardInterrupt):
        model("llama").generate(**inputs, **generate_over(cache), max_new_tokens=20, stopping_criteria=[Stop()])
    assert "or the same one after an error" in refuses(
        cache, NONE_NEW.format(90, 94), model("llama").generate, **inputs
    )
    cache.reset()
    found = model("llama").generate(**inputs, **generate_over(cache), **GO)
    assert torch.equal(found, plain_text("llama", inputs, **GO))


def test_after_crop():
    cache, text = used()
    cache.crop(-43)
    for length in (1, 25, 26, 50):
        refuses(cache, NONE_NEW.format(length, 50), model("llama").generate, text[:, :length])
    cut = text[:, :51]
    found = model("llama").generate(cut, **generate_over(cache), **GO)
    assert torch.equal(found, plain_text("llama", {"input_ids": cut}, **GO))


def test_after_a_prefix():
    """A question of no tokens, and a prompt that does not begin with the prefix."""
    net, document = model("llama"), prompt(1, 93)["input_ids"]
    prefix = PrefixCache()
    with torch.no_grad():
        net(document, **over(net, prefix))
    cache = prefix.start(two_level(**FULL))
    for ids in (document, prompt(1, 50, seed=3)["input_ids"]):
        refuses(cache, NONE_NEW.format(ids.shape[1], 93), net.generate, ids)
    goes_on(cache, document)


def test_a_longer_prompt_continues_the_old_text():
    """As docs/saving.md says, and as with transformers' own caches: it looks like a conversation's next turn."""
    cache, text = used()
    other = prompt(1, 120, seed=3)["input_ids"]
    continued = {"input_ids": torch.cat((text[:, :93], other[:, 93:]), 1)}
    found = model("llama").generate(other, **generate_over(cache), **GO)
    assert torch.equal(found[:, 120:], plain_text("llama", continued, **GO)[:, 120:])
