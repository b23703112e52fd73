"""A long text with one fact in it and a question about that fact, for ``generate --demo``.

The text is Python's own reference (``pydoc_data.topics``), which every Python brings along. ``tools/needle_prompt.py``
prints it, too.
"""

from __future__ import annotations

from pydoc_data.topics import topics

ANSWER = "7391"
NEEDLE = f"The secret code of the lighthouse keeper is {ANSWER}."
QUESTION = "What is the secret code of the lighthouse keeper? Answer with the number."
TOKENS, DEPTH = 6000, 0.4


def build(tokenizer, tokens: int = TOKENS, depth: float = DEPTH) -> str:
    """About ``tokens`` tokens of text with the fact at ``depth`` (0 start, 1 end), then the question.

    Raises:
        ValueError: Python's reference is shorter.
    """
    text = "\n\n".join(topics[name] for name in sorted(topics))
    encoded = tokenizer(text, return_offsets_mapping=True, verbose=False)
    ends = [end for _, end in encoded["offset_mapping"]]
    if tokens >= len(ends):
        raise ValueError(f"the text has {len(ends):,} tokens, fewer than the {tokens:,} asked for")
    text = text[: ends[tokens]]
    at = text.rfind("\n\n", 0, max(1, int(len(text) * depth)))
    at = 0 if at < 0 else at + 2
    return f"{text[:at]}{NEEDLE}\n\n{text[at:]}\n\n{QUESTION}"
