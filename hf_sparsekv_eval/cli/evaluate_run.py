"""Parts that all commands of ``hf-sparsekv eval`` share: their options, a loaded model, and the results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from hf_sparsekv.cli import loading
from hf_sparsekv.cli.output import ALL, CommandError, messages, note, results
from hf_sparsekv.results import append_rows
from hf_sparsekv_cli.evaluate import RunOptions, TextOptions


def text_ids(tokenizer, path: Path | None):
    """Ids ``[n]`` of a file, of Python's language reference, or, for a probe model, of its filler."""
    from ..text import reference_ids

    if path is None:
        return reference_ids(tokenizer)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise CommandError(f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}") from error
    return tokenizer(text, add_special_tokens=False, return_tensors="pt", verbose=False)["input_ids"][0]


def documents_of(text: TextOptions) -> list[str] | None:
    """The texts of ``--documents``; ``None``: it is not given."""
    from ..documents import read

    return None if text.documents is None else read(text.documents, text.column)


def text_settings(text: TextOptions, texts: list[str] | None, samples: int) -> dict[str, Any]:
    """What the records depend on: one text, or these documents."""
    if texts is None:
        return {"samples": samples, "text": text.text_file and str(text.text_file)}
    return {"documents": str(text.documents), "column": text.column, "join": text.join, "texts": len(texts)}


def passages_of(tokenizer, texts: list[str], tokens: int, samples: int, join: bool):
    """The beginnings of ``samples`` documents, with a note if fewer are long enough."""
    from ..documents import passages

    found = passages(tokenizer, texts, tokens, samples, join)
    if (count := len(found.starts)) < samples:
        note(f"{count} passages of {tokens:,} tokens are in {len(texts)} documents: --samples {samples} is more")
    return found


def caches_of(specs: list[str]) -> list:
    """``--cache`` as evaluations take it; what is wrong about it is wrong usage."""
    from ..cache_specs import parse_caches

    try:
        return parse_caches(specs)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


class Loaded:
    """A model, its tokenizer, and what follows from them for options that were not given."""

    def __init__(self, model: str, options: RunOptions) -> None:
        where = loading.pick_device(options.device)
        with messages.status(f"loading {model}"):
            self.tokenizer, self.model = loading.load(model, loading.torch_dtype(options.dtype), where)
        if options.capture:
            if where.type != "cuda":
                raise CommandError("--capture needs a GPU")
            from hf_sparsekv.cuda_graph.optimize import optimize

            optimize(self.model)

    @property
    def probe(self) -> bool:
        """It speaks the probe models' language and no other."""
        from ..ruler_probe import speaks_probe

        return speaks_probe(self.tokenizer)

    def chat(self, wanted: bool | None) -> bool:
        """Whether prompts go into the chat template."""
        if wanted and self.tokenizer.chat_template is None:
            raise CommandError("this model has no chat template: use --no-chat")
        return self.tokenizer.chat_template is not None if wanted is None else wanted

    def steps(self, wanted: int | None) -> int:
        """How many tokens of a question are fed as decode steps."""
        return wanted or (3 if self.probe else 32)

    def check(self, lengths: list[int], room: int = 0) -> None:
        """Refuse prompts that the model was not made for; say so if they are only so with ``room`` tokens more.

        Raises:
            CommandError: a length is more than ``max_position_embeddings``.
        """
        most = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        for length in lengths:
            if most and length > most:
                raise CommandError(
                    f"--lengths: {length:,} tokens are more than the {most:,} that the model was made for: its answers "
                    "would be noise with any cache. Give shorter ones; if the model can be extended, write that into a "
                    "copy of its config.json (max_position_embeddings, rope_parameters)"
                )
            if most and length + room > most:
                note(f"{length + room:,} tokens are more than the {most:,} that the model was made for")


def say_vacuous(caches, figures) -> None:
    """Say which sparse caches attended to everything: what a task found with them says nothing about the method."""
    sparse = {spec.name for spec in caches if not spec.full}
    lengths: dict[str, set[int]] = {}
    for figure in figures:
        if figure.measure == "attended" and figure.cache in sparse and figure.value >= ALL:
            lengths.setdefault(figure.cache, set()).add(figure.length)
    for cache, found in lengths.items():
        where = " and ".join(f"{length:,}" for length in sorted(found) if length)
        note(
            f"{cache} attended to everything{f' at {where} tokens' if where else ''}: there it is full attention, and "
            "these figures say nothing about what it would lose. Give longer prompts (--lengths) or a smaller budget "
            "(as --cache token:token_budget=64)"
        )


class Run(Loaded):
    """A loaded model, its caches, and where results go, in a ``with`` statement: the directory is locked until then."""

    def __init__(self, task: str, model: str, options: RunOptions, **settings):
        from ..records import Results

        self.caches = caches_of(options.cache)  # before the model is loaded
        loading.pick_device(options.device)
        loading.check_name(model)
        short = Path(model.rstrip("/")).name
        self.out = options.out or Path("eval-results") / f"{task}-{short}"
        self.title, self.short, self.rows = f"{task}, {short}", short, options.rows
        self.results = Results(self.out, {"task": task, "model": model, "dtype": options.dtype.value, **settings})
        try:
            super().__init__(model, options)
        except BaseException:
            self.results.close()
            raise

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error) -> None:
        self.results.close()

    def needs_text(self, what: str) -> None:
        """Refuse a probe model, whose language has no words for a task."""
        if self.probe:
            raise CommandError(f"{what} are texts, and a probe model knows no words: use `eval ruler` or `eval needle`")

    @contextmanager
    def progress(self, total: int) -> Iterator:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with messages.progress(self.title, total * len(self.caches), *columns) as advance:
            yield advance

    def report(self, measures, paired=()) -> None:
        """Write and print the tables; ``paired``: measures whose difference from full attention is among them."""
        table = self.results.write(measures, self.title, paired)
        if self.rows is not None:  # first: printing ends the command if its reader has gone
            append_rows(self.rows, self.results.rows(measures, self.short))
        results.print(table, markup=False)
        say_vacuous(self.caches, self.results.figures(measures))
        note(f"written to {self.out}: results.md, results.csv, results.json, samples.jsonl")
