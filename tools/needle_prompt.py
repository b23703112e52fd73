"""Print a long prompt: real text with one fact planted in it, and a question about that fact.

usage: python tools/needle_prompt.py [--tokenizer small] [--tokens 6000] [--depth 0.4]

It is the text of ``hf-sparsekv generate --demo``, for other programs.
"""

from __future__ import annotations

import argparse


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokenizer", default="small", help="hub id, directory, or `small`")
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--depth", type=float, default=0.4)
    args = parser.parse_args()

    from transformers import AutoTokenizer

    from hf_sparsekv.cli.demo_text import build
    from hf_sparsekv.cli.loading import resolve_model

    try:
        print(build(AutoTokenizer.from_pretrained(resolve_model(args.tokenizer)), args.tokens, args.depth))
    except ValueError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
