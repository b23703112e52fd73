"""The language of the probe models: 912 words, for prompts with facts, chains of variables and filler.

A prompt is filler (a Markov chain over words of Zipf frequencies) with statements in it, and a question at its end:

    fact k03 k17 v100 v021 <end>                one value of a key; a key may have several facts
    var n01 n44 = v005 v090 <end>               a variable that is given a value ...
    var n20 n08 = n01 n44 <end>                 ... or another variable
    ask k03 k17                                 -> v100 v021 <end>
    list k03 k17                                -> all values of the key in the order of the text, <end>
    each k03 k17 k60 k02 ... answer             -> k03 k17 v100 v021 k60 k02 ... (four keys, each with its value), <end>
    trace v005 v090                             -> all variables that have the value in the order of the text, <end>

Keys, values and variables are pairs of words, so a match takes both.
"""

from __future__ import annotations

import torch
from torch import Tensor

PAD, BOS, END, UNK, FACT, ASK, LIST, EACH, ANSWER, VAR, IS, TRACE = range(12)
WORDS = ("<pad>", "<bos>", "<end>", "<unk>", "fact", "ask", "list", "each", "answer", "var", "=", "trace")
KEYS, VALUES, NAMES, FILLERS = 64, 128, 64, 640
KEY = 16  # first id of each kind
VALUE = KEY + KEYS
NAME = VALUE + VALUES
FILLER = NAME + NAMES
VOCAB_SIZE = FILLER + FILLERS


def vocabulary() -> dict[str, int]:
    """Word -> id; ids 12 to 15 are kept free."""
    words = dict(zip(WORDS, range(len(WORDS))))
    words |= {f"<unused{i}>": i for i in range(len(WORDS), KEY)}
    for letter, start, count in (("k", KEY, KEYS), ("v", VALUE, VALUES), ("n", NAME, NAMES), ("w", FILLER, FILLERS)):
        words |= {f"{letter}{i:03d}": start + i for i in range(count)}
    return words


def build_tokenizer(max_length: int):
    """The tokenizer as ``AutoTokenizer`` loads it: words between spaces, a ``<bos>`` in front."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel(vocabulary(), unk_token=WORDS[UNK]))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing(
        single=f"{WORDS[BOS]} $A", pair=f"{WORDS[BOS]} $A $B", special_tokens=[(WORDS[BOS], BOS)]
    )
    names = {"pad_token": WORDS[PAD], "bos_token": WORDS[BOS], "eos_token": WORDS[END], "unk_token": WORDS[UNK]}
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        model_max_length=max_length,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        **names,
    )


class Filler:
    """A long stretch of filler, from which samples are cut.

    Zipf frequencies with exponent 1; six words of ten are one of the four successors of the word before.

    Args:
        chains, steps: independent stretches and words in each; 32k of filler take about as many words.
        device: where the words are kept.
        seed: of the words; the successors are the same for all seeds (they are part of the language).
    """

    def __init__(self, chains: int = 1024, steps: int = 512, device: torch.device | str = "cpu", seed: int = 0) -> None:
        frequency = 1.0 / torch.arange(1, FILLERS + 1)
        steps_up = (frequency / frequency.sum()).cumsum(0)
        language = torch.Generator().manual_seed(1)
        successors = torch.searchsorted(steps_up, torch.rand(FILLERS, 4, generator=language)).clamp(max=FILLERS - 1)
        steps_up, successors = steps_up.to(device), successors.to(device)
        random = torch.Generator(device).manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.rand(*shape, device=device, generator=random)

        word = torch.searchsorted(steps_up, draw(chains)).clamp(max=FILLERS - 1)
        rows = []
        for _ in range(steps):
            fresh = torch.searchsorted(steps_up, draw(chains)).clamp(max=FILLERS - 1)
            follow = successors[word, (4 * draw(chains)).long()]
            word = torch.where(draw(chains) < 0.6, follow, fresh)
            rows.append(word.to(torch.int16))
        self.words = torch.stack(rows, 1).flatten()

    def sample(self, batch: int, length: int, generator: torch.Generator | None = None) -> Tensor:
        """Ids ``[batch, length]``, int64."""
        if length >= self.words.numel():
            raise ValueError(f"{length} words asked of a stretch of {self.words.numel()}: make it with more chains")
        device = self.words.device
        start = torch.randint(0, self.words.numel() - length, (batch, 1), device=device, generator=generator)
        return self.words[start + torch.arange(length, device=device)].long() + FILLER
