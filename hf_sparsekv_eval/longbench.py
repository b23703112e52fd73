"""LongBench (Bai et al. 2023, arXiv 2308.14508): its 16 English and code tasks, prompts and metrics.

Prompts and answer lengths are the official repository's (``data/longbench.json`` names its commit and licence); the
metrics follow its ``metrics.py``. The five Chinese tasks are left out: they need a Chinese word splitter.
"""

from __future__ import annotations

import difflib
import json
import re
import string
from collections import Counter
from functools import lru_cache, partial
from importlib import resources
from pathlib import Path

from .extra import needs
from .samples import Sample

# The official THUDM/LongBench is a loading script, which datasets >= 4 refuses; this is its data as parquet.
DATASET = "Xnhyacinth/LongBench"
FIRST_LINE = ("trec", "triviaqa", "samsum")  # examples go on after the answer: the official score cuts them off


@lru_cache(maxsize=1)
def tasks() -> dict[str, dict]:
    """Task to ``{"metric", "max_new_tokens", "chat", "prompt"}``."""
    return json.loads((resources.files(__package__) / "data" / "longbench.json").read_text(encoding="utf-8"))["tasks"]


def load_rows(task: str, source: str = DATASET) -> list[dict]:
    """Rows of a task, with ``context``, ``input``, ``answers`` and ``all_classes``.

    Args:
        source: a dataset on the hub with a configuration a task, or a directory with ``TASK.jsonl``.

    Raises:
        ValueError: no such task, or what is there has another schema.
    """
    needs("LongBench", "datasets")
    from datasets import load_dataset

    if task not in tasks():
        raise ValueError(f"LongBench has no task {task!r} here; there are {', '.join(tasks())}")
    if Path(source).is_dir():
        file = Path(source) / f"{task}.jsonl"
        if not file.is_file():
            raise ValueError(f"there is no {file}: a local LongBench is a directory with TASK.jsonl")
        data = load_dataset("json", data_files=str(file), split="train")
    else:
        data = load_dataset(source, task, split="test")
    rows = []
    for row in data:
        row = dict(row)
        row.setdefault("input", row.get("question"))  # the parquet copy's name for it
        missing = [name for name in ("context", "input", "answers") if row.get(name) is None]
        if missing:
            raise ValueError(f"{source}, {task}: a row has no {', '.join(missing)}: this is not LongBench's schema")
        rows.append(row)
    return rows


def make_sample(tokenizer, task: str, row: dict, index: int, max_length: int, chat: bool = True) -> Sample:
    """The prompt of a row; as in the official code, one that is too long loses its middle.

    Args:
        max_length: tokens of prompt and answer.
        chat: apply the tokenizer's chat template where the official code does (not to few-shot and code tasks).
    """
    about = tasks()[task]
    room = about["max_new_tokens"]
    text = about["prompt"].format(context=row["context"], input=row["input"])
    wrap = chat and about["chat"] and tokenizer.chat_template is not None
    template = len(_templated(tokenizer, "")) if wrap else 0
    most = max_length - room - template
    if most < 16:
        raise ValueError(f"{max_length} tokens leave no room for a prompt of {task}, whose answer takes {room}")
    ids = tokenizer(text, add_special_tokens=not wrap, verbose=False)["input_ids"]
    if len(ids) > most:
        half = most // 2
        cut = [*ids[:half], *ids[-half:]]
        text = tokenizer.decode(cut, skip_special_tokens=True)
        ids = cut
    if wrap:
        ids = _templated(tokenizer, text)
    score = partial(score_answer, task, classes=tuple(row.get("all_classes") or ()))
    return Sample(task, 0, index, tuple(ids), tuple(row["answers"]), room, score)


def _templated(tokenizer, text: str) -> list[int]:
    turn = [{"role": "user", "content": text}]
    whole = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    return tokenizer(whole, add_special_tokens=False, verbose=False)["input_ids"]


# ---------------------------------------------------------------------- metrics


def score_answer(task: str, output: str, references: tuple[str, ...], classes: tuple[str, ...] = ()) -> float:
    """The task's metric, 0 to 1, against the best of the references."""
    if task in FIRST_LINE:
        output = output.lstrip("\n").split("\n")[0]
    metric = METRICS[tasks()[task]["metric"]]
    return max(metric(output, reference, classes) for reference in references)


def _plain(text: str) -> list[str]:
    """Words in lower case without punctuation and articles."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def f1(output: str, reference: str, classes=()) -> float:
    """F1 over words."""
    mine, right = _plain(output), _plain(reference)
    same = sum((Counter(mine) & Counter(right)).values())
    return 2 * same / (len(mine) + len(right)) if same else 0.0


def rouge(output: str, reference: str, classes=()) -> float:
    """ROUGE-L F1 of the ``rouge`` package, which the official code uses."""
    needs("a summary task of LongBench", "rouge")
    from rouge import Rouge

    if not output.strip(" .\n\t") or not reference.strip(" .\n\t"):
        return 0.0
    return float(Rouge().get_scores([output], [reference])[0]["rouge-l"]["f"])


def class_named(output: str, reference: str, classes=()) -> float:
    """The right class is named; shared with other named ones, unless their names are part of the right one's."""
    named = [c for c in classes if c in output and not (c in reference and c != reference)]
    return 1 / len(named) if reference in named else 0.0


def count(output: str, reference: str, classes=()) -> float:
    """Share of the numbers in the answer that are right."""
    numbers = re.findall(r"\d+", output)
    return sum(n == reference for n in numbers) / len(numbers) if numbers else 0.0


def paragraph(output: str, reference: str, classes=()) -> float:
    """The same for the number of a paragraph."""
    return count(output, re.findall(r"Paragraph (\d+)", reference)[0])


def code(output: str, reference: str, classes=()) -> float:
    """Similarity of the first line that is no comment, in whole percents as ``fuzzywuzzy`` gives it."""
    lines = output.lstrip("\n").split("\n")
    first = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(100 * difflib.SequenceMatcher(None, first, reference).ratio()) / 100


METRICS = {"f1": f1, "rouge": rouge, "classes": class_named, "count": count, "paragraph": paragraph, "code": code}
