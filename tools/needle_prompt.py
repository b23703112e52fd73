"""Print a long prompt: real text with one fact planted in it, and a question about that fact.

usage: python tools/needle_prompt.py [--tokenizer small] [--tokens 6000] [--depth 0.4]

The text is Python's own reference (``pydoc_data.topics``), which every Python brings along.
"""

from __future__ import annotations

import argparse
from pydoc_data.topics import topics

NEEDLE = "The secret code of the lighthouse keeper is 7391."
QUESTION = "What is the secret code of the lighthouse keeper? Answer with the number."


def build(tokenizer, tokens: int, depth: float) -> str:
    """About ``tokens`` tokens of text with the needle at ``depth`` (0 start, 1 end), then the question."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    encoded = tokenizer(text, return_offsets_mapping=True, verbose=False)
    ends = [end for _, end in encoded["offset_mapping"]]
    if tokens >= len(ends):
        raise SystemExit(f"--tokens must be less than {len(ends)}, the length of the text")
    text = text[: ends[tokens]]
    at = text.rfind("\n\n", 0, max(1, int(len(text) * depth)))
    at = 0 if at < 0 else at + 2
    return f"{text[:at]}{NEEDLE}\n\n{text[at:]}\n\n{QUESTION}"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokenizer", default="small", help="hub id, directory, or `small`")
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--depth", type=float, default=0.4)
    args = parser.parse_args()

    from transformers import AutoTokenizer

    from hf_sparsekv.cli.loading import resolve_model

    print(build(AutoTokenizer.from_pretrained(resolve_model(args.tokenizer)), args.tokens, args.depth))


if __name__ == "__main__":
    main()
