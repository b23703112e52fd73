"""Tokens of log probabilities: their texts, bytes and places are those of the answer's text."""

import pytest
from tokenizers_made import MADE, word_pieces

from hf_sparsekv.serving.request import Logprob
from hf_sparsekv.serving.text import Detokenizer
from hf_sparsekv_serve.http.logprobs import TokenTexts

KNOWN = ("byte_level", "sentencepiece_like")  # whose tokens' bytes are known


def told(tokenizer, ids, cut=()):
    """Lists of a completion, in pieces as a stream has them."""
    texts, begun, found = TokenTexts(tokenizer), 0, []
    for first, last in zip((0, *cut), (*cut, len(ids))):
        lists, begun = texts.in_lists([Logprob(one, -1.0, ((one, -1.0),)) for one in ids[first:last]], begun)
        found.append(lists)
    return {name: [one for lists in found for one in lists[name]] for name in found[0]}


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("text", [" the cat", " the 日本 cat", " 🙂é🙂", "\n x  the"])
def test_tokens_are_those_of_the_text(name, text):
    """Also a space that the tokenizer drops where it decodes a token alone, and characters of several tokens."""
    tokenizer = MADE[name]()
    ids = tokenizer("the" + text, add_special_tokens=False)["input_ids"]
    prompt, ids = ids[:1], ids[1:]
    stream = Detokenizer(tokenizer).stream(prompt)
    whole = "".join(map(stream.push, ids)) + stream.end()
    lists = told(tokenizer, ids, cut=(1, 2))
    assert lists == told(tokenizer, ids)
    objects = TokenTexts(tokenizer).in_objects([Logprob(one, -1.0) for one in ids])["content"]
    assert [one["token"] for one in objects] == lists["tokens"]
    assert bytes(byte for one in objects for byte in one["bytes"]).decode() == whole
    for token, at in zip(lists["tokens"], lists["text_offset"]):
        if "\N{REPLACEMENT CHARACTER}" not in token:
            assert whole[at : at + len(token)] == token
        else:
            assert not whole[at].isascii()  # the character that it is part of
    assert lists["text_offset"] == sorted(lists["text_offset"])


@pytest.mark.parametrize("name", KNOWN)
def test_special_tokens_take_no_place(name):
    """They are not in the text, and shown by their names."""
    tokenizer = MADE[name]()
    word = tokenizer("the the", add_special_tokens=False)["input_ids"][-1]
    lists = told(tokenizer, [word, tokenizer.eos_token_id, word, len(tokenizer) + 3])
    size = len(lists["tokens"][0])
    assert lists["text_offset"] == [0, size, size, 2 * size]
    assert lists["tokens"][1] == tokenizer.eos_token and lists["tokens"][3] == ""


def test_tokens_whose_bytes_are_not_known_are_decoded():
    tokenizer = word_pieces()
    ids = tokenizer("the cat", add_special_tokens=False)["input_ids"]
    assert told(tokenizer, ids)["tokens"] == [tokenizer.decode([one]) for one in ids]
    assert told(None, [5, 17])["tokens"] == ["5", "17"] and told(None, [5, 17])["text_offset"] == [0, 1]
