"""Write RULER's prompts for every peer: ``python -m benchmarks.peers.prompts --model DIR --lengths 16k --out FILE``.

It needs hf_sparsekv_eval, which makes the prompts.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from transformers import AutoTokenizer
from typer import BadParameter

from hf_sparsekv.cli.loading import resolve_model
from hf_sparsekv.cli.output import CommandError
from hf_sparsekv_cli.values import parse_names, parse_samples, parse_tokens
from hf_sparsekv_eval import ruler, ruler_data, ruler_paper
from hf_sparsekv_eval.ruler_data import RulerData
from hf_sparsekv_eval.samples import Sample

from .prompt_file import Prompt, write


def chat_suffix(tokenizer) -> str:
    """Text that the chat template puts after a user's turn."""
    mark = "0123456789"
    turn = [{"role": "user", "content": mark}]
    return tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True).rpartition(mark)[2]


def question_begins(tokenizer, ids: tuple[int, ...], suffix: str = "") -> int:
    """Index of the first token of the question: of the last line of the user's turn.

    RULER's questions are one line, after the text. A token that holds both belongs to the context.

    Args:
        suffix: text between the user's turn and the first words of the answer.

    Raises:
        ValueError: the prompt is a single line.
    """
    text = tokenizer.decode(ids)
    end = text.rindex(suffix) if suffix else len(text)
    begin = text.rfind("\n", 0, end) + 1
    if not begin:
        raise ValueError("the prompt is a single line: there is no context to compress before its question")
    size, at = len(text) - begin, len(ids)
    while at and len(tokenizer.decode(ids[at - 1 :])) <= size:
        at -= 1
    return at


def scoring(sample: Sample) -> str:
    """How the sample scores, by what it says to each reference alone. One may contain others.

    Raises:
        ValueError: it looks for something else than references in the output.
    """
    every, found = sample.references, []
    for reference in every:
        said = f"it is {reference.upper()}, yes"
        found.append((sample.score(said, every), sum(one.lower() in said.lower() for one in every) / len(every)))
    if sample.score("", every) == 0:
        if all(score == share for score, share in found):
            return "share"
        if all(score == 1 for score, _ in found):
            return "any"
    raise ValueError(f"{sample.task}: its score is not that of references in the output, so peers cannot compute it")


def of_sample(tokenizer, sample: Sample, suffix: str = "") -> Prompt:
    """A prompt of the file."""
    question = question_begins(tokenizer, sample.ids, suffix)
    how, stop = scoring(sample), tuple(sorted(sample.stop))
    where = (sample.task, sample.index, sample.length, sample.ids, question)
    return Prompt(*where, sample.references, how, sample.max_new_tokens, stop)


def make(
    tokenizer, tasks: list[str], length: int, chosen: range, seed: int, chat: bool, data: RulerData | None = None
) -> Iterator[Prompt]:
    """The ``chosen`` prompts of each task, offline or from RULER's own data."""
    suffix = chat_suffix(tokenizer) if chat else ""
    for task in tasks:
        for index in chosen:
            if data is None:
                sample = ruler.make_sample(tokenizer, task, length, index, seed, chat)
            else:
                sample = ruler_paper.make_sample(tokenizer, data, task, length, index, seed, chat)
            yield of_sample(tokenizer, sample, suffix)


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    add = parser.add_argument
    add("--model", required=True, help="whose tokenizer and chat template; a directory, a name, or `small`")
    add("--length", default="16k", help="tokens of each prompt, answer included")
    add("--data", type=Path, help="directory with RULER's own data (docs/evaluation.md): 13 tasks; default: 11 offline")
    add("--tasks", help="comma-separated; default: all")
    add("--samples", default="20", help="of each task; FIRST:LAST takes some of them")
    add("--seed", type=int, default=0)
    add("--no-chat", action="store_true", help="plain text although there is a chat template")
    add("--out", type=Path, required=True, help="JSON lines")
    args = parser.parse_args(argv)
    try:
        tasks = parse_names(args.tasks, (ruler_paper if args.data else ruler).FAMILIES, "task")
        data = ruler_data.read(args.data, tasks) if args.data else None
        tokenizer = AutoTokenizer.from_pretrained(resolve_model(args.model))
        chat = bool(tokenizer.chat_template) and not args.no_chat
        length, chosen = parse_tokens(args.length), parse_samples(args.samples)
        count = write(args.out, make(tokenizer, tasks, length, chosen, args.seed, chat, data))
    except (CommandError, BadParameter, OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    print(f"{count} prompts in {args.out}")


if __name__ == "__main__":
    main()
