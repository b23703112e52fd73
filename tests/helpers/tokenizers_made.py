"""Tiny tokenizers of the kinds that models have, made without files."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% endif %}"
)
TOOL_CHAT = """{{ tools | tojson if tools }}{% if not messages %}<tool_call>{"arguments": 1}</tool_call>{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{{ m.content }}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
WORDS = ("the", " the", " of", "ing", " cat", "é", "日", "本", "don", "'t", "  ", "\n\n")


def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2's, Llama 3's and Qwen's: all bytes, some merged; special tokens, and one added that is not."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    vocab, merges = {letter: i for i, letter in enumerate(sorted(letters))}, []
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for word in WORDS:
        spelled = spell.pre_tokenize_str(word)[0][0]
        for end in range(2, len(spelled) + 1):
            if spelled[:end] not in vocab:
                merges.append((spelled[: end - 1], spelled[end - 1]))
                vocab[spelled[:end]] = len(vocab)
    made = Tokenizer(models.BPE(vocab, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|end|>", "<|user|>", "<|assistant|>"])
    made.add_tokens([AddedToken("<tool>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", chat_template=CHAT)


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """As Llama 2's: a mark for spaces, bytes where no piece is, and the first space dropped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁the", "▁cat", "cat", "s", "é", "日本", "a", "▁▁"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", bos_token="<s>", unk_token="<unk>")


def word_pieces() -> PreTrainedTokenizerFast:
    """As BERT's: pieces that go on with a word are marked, spaces are made by decoding."""
    pieces = ["[UNK]", "[SEP]", "the", "cat", "##s", "##ing", "do", ".", "'"]
    made = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece(cleanup=False)
    made.add_special_tokens(["[SEP]"])
    return PreTrainedTokenizerFast(tokenizer_object=made, sep_token="[SEP]", unk_token="[UNK]")


def slow() -> ByT5Tokenizer:
    """Python alone: bytes."""
    return ByT5Tokenizer()


def whole_words() -> PreTrainedTokenizerFast:
    """Whole words alone, ``w2`` to ``w96``: the tokens of the tiny test models."""
    vocab = {"<pad>": 0, "<s>": 1, **{f"w{i}": i for i in range(2, 97)}}
    made = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", padding_side="left")


def words(ids) -> str:
    """The text of these tokens to :func:`whole_words`."""
    return " ".join(f"w{token}" for token in ids)


MADE = {"byte_level": byte_level, "sentencepiece_like": sentencepiece_like, "word_pieces": word_pieces, "slow": slow}
