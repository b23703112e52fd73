"""Text as tokens come, against decoding everything at once; stop strings, against searching the whole text."""

from __future__ import annotations

import functools
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers_made import MADE, byte_level, sentencepiece_like
from transformers import AutoTokenizer

from hf_sparsekv.serving.text import PENDING, REPLACEMENT, Detokenizer, StopStrings
from hf_sparsekv.small_model import small_model_path

TEXTS = ["Grüße an die 日本語 🎉👩‍👩‍👧 don't , stop .", "   the cat\n\n\n of  the", "", "a\ufffdb", "नमस्ते  العربية"]


@functools.cache
def tokenizer(name: str):
    return AutoTokenizer.from_pretrained(small_model_path()) if name == "small" else MADE[name]()


@functools.cache
def detokenizer(name: str) -> Detokenizer:
    return Detokenizer(tokenizer(name))


KINDS = [*MADE, pytest.param("small", marks=pytest.mark.small_model)]


def at_once(name: str, ids: list[int], prompt: list[int] = ()) -> str:
    """Tokens after the prompt's text."""
    options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    whole = tokenizer(name).decode([*prompt, *ids], **options)
    return whole.removeprefix(tokenizer(name).decode(list(prompt), **options)) if prompt else whole


def pieces(name: str, ids: list[int], prompt: list[int] = (), stop: tuple[str, ...] = ()) -> list[str]:
    stream, shown = detokenizer(name).stream(prompt, stop), []
    for token in ids:
        shown.append(stream.push(token))
        if stream.stopped:
            break
    return [*shown, stream.end()]


@st.composite
def tokens(draw, name: str) -> list[int]:
    """Text, and any tokens at all: bytes that are no UTF-8, special tokens, ids that only the model knows."""
    text = draw(st.one_of(st.sampled_from(TEXTS), st.text(max_size=20)))
    one = st.integers(0, len(tokenizer(name)) + (5 if name == "byte_level" else -1))
    any_ids = st.lists(one, max_size=12)
    return draw(any_ids) + tokenizer(name)(text, add_special_tokens=False)["input_ids"] + draw(any_ids)


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_are_the_text_decoded_at_once(name, data):
    ids = data.draw(tokens(name))
    shown, whole = pieces(name, ids), at_once(name, ids)
    together = "".join(shown)
    if name == "sentencepiece_like" and REPLACEMENT in whole:
        # Decoded at once, bytes that are no character take valid ones beside them with them: here those may stay.
        # One replacement stands for up to three bytes of a character that does not end.
        bytes_as = re.sub(f"{REPLACEMENT}+", lambda run: f"[\\s\\S]{{1,{3 * len(run[0])}}}", re.escape(whole))
        assert re.fullmatch(bytes_as, together)
        return
    assert together == whole
    if REPLACEMENT not in whole:
        assert not any(REPLACEMENT in part for part in shown), "half a character was shown"


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_behind_a_prompt_its_last_tokens_are_context(name, data):
    words = st.lists(st.sampled_from([" the", "cat", " cats", "日本", "\n"]), min_size=1, max_size=20).map("".join)
    prompt, answer = (tokenizer(name)(data.draw(words), add_special_tokens=False)["input_ids"] for _ in range(2))
    assert "".join(pieces(name, answer, prompt)) == at_once(name, answer, prompt)


def test_a_first_word_keeps_its_space_behind_a_prompt_only():
    made = tokenizer("sentencepiece_like")
    the, cat, end = made.convert_tokens_to_ids(["▁the", "▁cat", "</s>"])
    assert pieces("sentencepiece_like", [the, end, cat])[:3] == ["the", "", " cat"]
    assert pieces("sentencepiece_like", [the, cat], prompt=[1, cat, end])[:2] == [" the", " cat"]


def test_a_character_is_shown_with_its_last_byte():
    made = tokenizer("byte_level")
    ids = made("a🎉b")["input_ids"]
    assert len(ids) == 6
    assert pieces("byte_level", ids) == ["a", "", "", "", "🎉", "b", ""]
    assert pieces("byte_level", ids[:4]) == ["a", "", "", "", REPLACEMENT], "the end shows what is there"


def test_bytes_that_take_a_shown_character_with_them_lose_nothing_else():
    """Decoded at once, the valid three bytes would become replacement characters because of the fourth."""
    made = tokenizer("sentencepiece_like")
    ids = made.convert_tokens_to_ids(["▁the", "<0xE2>", "<0x82>", "<0xAC>", "<0xFF>", "▁cat", "▁the"])
    assert made.decode(ids) == "the" + 4 * REPLACEMENT + " cat the"
    assert "".join(pieces("sentencepiece_like", ids)) == f"the€{REPLACEMENT} cat the"


@pytest.mark.parametrize("made", [byte_level, sentencepiece_like])
@pytest.mark.parametrize("what", ["text", "no character", "replacement characters", "special", "unknown"])
def test_a_token_costs_the_same_however_long_the_answer_is(made, what):
    """Counted in ids that are decoded; also where no character ever comes."""
    tokenizer = made()
    stream = Detokenizer(tokenizer).stream()
    decode, most = stream._decode, 0

    def counting(ids):
        nonlocal most
        most = max(most, len(ids))
        return decode(ids)

    stream._decode = counting
    a, byte = tokenizer.convert_tokens_to_ids(["a", "<0xFF>" if made is sentencepiece_like else "ÿ"])
    given = {
        "text": [a],
        "no character": [byte],
        "replacement characters": tokenizer("\ufffd", add_special_tokens=False)["input_ids"]
        if made is byte_level
        else tokenizer.convert_tokens_to_ids(["<0xEF>", "<0xBF>", "<0xBD>"]),
        "special": [tokenizer.eos_token_id],
        "unknown": [len(tokenizer) + 3],
    }[what]
    shown = "".join(stream.push(token) for _ in range(300) for token in given) + stream.end()
    expected = {"text": "a", "special": "", "unknown": ""}.get(what, REPLACEMENT)
    if made is sentencepiece_like and what == "replacement characters":
        assert set(shown) == {REPLACEMENT}, "which bytes belong together is not known"
    else:
        assert shown == 300 * expected
    assert most <= 2 * PENDING + 2


def test_a_tokenizer_without_files_decodes_quickly():
    """Without calling transformers for each token: that alone is ten times as slow."""
    stream, begun = detokenizer("byte_level").stream(), time.perf_counter()
    for _ in range(1000):
        stream.push(65)
    assert time.perf_counter() - begun < 1.0


def first_stop(text: str, stops: tuple[str, ...]) -> str:
    """The definition: the shortest beginning that ends with a stop string, without the longest such one."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


@settings(max_examples=500, deadline=None)
@given(
    text=st.text("ab\n", max_size=30),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple),
    data=st.data(),
)
def test_stop_strings_are_found_wherever_pieces_end(text, stops, data):
    found, shown, rest = StopStrings(stops), "", text
    while rest and found.found is None:
        count = data.draw(st.integers(1, len(rest)))
        shown, rest = shown + found.push(rest[:count]), rest[count:]
        assert first_stop(text, stops).startswith(shown), "something was shown that belongs to a stop string"
        if found.found is None:  # no more is held back than must be
            held = max((n for s in stops for n in range(len(s)) if (shown + found.held).endswith(s[:n])), default=0)
            assert len(found.held) == held
    assert shown + found.held == first_stop(text, stops)
    assert (found.found is None) == (not any(stop in text for stop in stops))


NAMES = {1: "<a>", 2: "<b>", 3: "ab", 4: "<"}  # of special tokens


def first_stop_with(events: list[str | int], stops: tuple[str, ...]) -> tuple[str, bool]:
    """The definition, where numbers are special tokens: each stop string sees those written out that it contains."""
    text = ""
    views = {stop: [] for stop in stops}  # characters, and whether they are in the text
    for event in events:
        text += event if isinstance(event, str) else ""
        cut = -1
        for stop, view in views.items():
            if isinstance(event, str) or NAMES[event] in stop:
                for character in event if isinstance(event, str) else NAMES[event]:
                    view.append((character, isinstance(event, str)))
                    if "".join(one for one, _ in view).endswith(stop):
                        cut = max(cut, sum(shown for _, shown in view[-len(stop) :]))
                        break
        if cut >= 0:
            return text[: len(text) - cut], True
    return text, False


@settings(max_examples=500, deadline=None)
@given(
    events=st.lists(st.sampled_from([*"ab<>", *NAMES]), max_size=20),
    stops=st.lists(
        st.lists(st.sampled_from([*"ab<>", *NAMES.values()]), min_size=1, max_size=4).map("".join),
        min_size=1,
        max_size=3,
    ).map(tuple),
)
def test_stop_strings_see_the_special_tokens_that_they_name(events, stops):
    found, shown = StopStrings(stops, NAMES), ""
    for event in events:
        shown += found.push(event) if isinstance(event, str) else found.push_special(event)
        if found.found is not None:
            break
    assert (shown + found.held, found.found is not None) == first_stop_with(events, stops)


@pytest.mark.parametrize(
    ("text", "stops", "shown", "stopped"),
    [
        ("the<|user|>cat", ["<|user|>"], "the", True),
        ("the<|user|>cat", ["<|assistant|>"], "thecat", False),
        ("<|user|>cat", ["<|user|>"], "", True),
        ("the<|user|> cat", ["<|user|> c"], "the", True),  # inside of a longer one
        ("the\n\n<|user|>cat", ["\n\n<|user|>"], "the", True),
        ("the <|user|>cat", [" <|user|>"], "the", True),
        ("the<|user|>cat", [" <|user|>"], "thecat", False),
        ("the<|user|><|assistant|>cat", ["<|user|><|assistant|>"], "the", True),
        ("the<|user|>the<|assistant|>cat", ["<|user|><|assistant|>"], "thethecat", False),
        ("the<|assistant|>cat<|user|>", ["never", "<|user|>", "<|assistant|>", "cat"], "the", True),
        ("the<|user|>cat", ["thecat"], "", True),  # tokens that it does not name are no text
        ("the<|user|>cat", ["user"], "thecat", False),  # a part of a token's name is no token
        ("the|>cat", ["|>"], "the", True),
        ("the<tool>cat", ["<tool>"], "the", True),  # an added token that is text
        ("the<|end|>cat", ["<|end|>"], "the", True),
        ("é<|user|>日本", ["é<|user|>日"], "", True),
        ("the<|user|", ["<|user|>"], "the<|user|", False),  # held back, and given at the end
    ],
)
def test_a_special_token_named_by_a_stop_string(text, stops, shown, stopped):
    made = tokenizer("byte_level")
    ids = made(text, add_special_tokens=False)["input_ids"]
    stream, found = detokenizer("byte_level").stream(stop=stops), []
    for token in ids:
        found.append(stream.push(token))
        if stream.stopped:
            break
    assert ("".join([*found, stream.end()]), stream.stopped) == (shown, stopped)


@pytest.mark.parametrize("name", KINDS)
def test_each_special_token_is_found_by_its_name(name):
    made = detokenizer(name)
    assert made.names.keys() == made.hidden
    for token, text in made.names.items():
        stream = made.stream(stop=[text])
        assert stream.push(token) == "" and stream.stopped


def test_stop_strings_of_a_stream():
    made = tokenizer("byte_level")
    ids = made("the cat\n\nUser: the<|end|>")["input_ids"]
    stream = detokenizer("byte_level").stream(stop=("\n\nUser:", "never"))
    shown = []
    for token in ids:
        shown.append(stream.push(token))
        if stream.stopped:
            break
    assert "".join(shown) == "the cat" and stream.stopped and stream.end() == ""
    with pytest.raises(RuntimeError, match="stop string has ended"):
        stream.push(ids[0])


def test_what_may_become_a_stop_string_is_held_back_until_the_end():
    made = tokenizer("byte_level")
    stream = detokenizer("byte_level").stream(stop=("cats",))
    assert [stream.push(token) for token in made("a cat")["input_ids"]][-1] == " "
    assert stream.end() == "cat" and stream.end() == ""
    half = detokenizer("byte_level").stream(stop=(REPLACEMENT,))
    assert half.push(made("é")["input_ids"][0]) == "é" and half.push(made("ü")["input_ids"][0]) == ""
    assert half.end() == "" and half.stopped, "a stop string that appears with the end counts, too"


def test_a_long_stop_string_takes_no_longer():
    """A client chooses it: time must go with the text alone."""
    found, begun = StopStrings(["a" * 20_000 + "b"]), time.perf_counter()
    for _ in range(200):
        found.push("a" * 200)
    assert time.perf_counter() - begun < 2.0 and len(found.held) == 20_000
