"""``hf-sparsekv eval all``: the whole table for one model, resumable, with a report."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hf_sparsekv.cli.options import Model, takes
from hf_sparsekv.cli.output import CommandError, messages, note, one_line_errors, results
from hf_sparsekv.results import append_rows, commit, device_name, versions
from hf_sparsekv.whole_file import replace_text
from hf_sparsekv_cli import checks
from hf_sparsekv_cli.values import parse_lengths, parse_names, parse_tokens

from .evaluate_run import (
    Chat,
    Loaded,
    QuestionSteps,
    RunOptions,
    Seed,
    TextFile,
    caches_of,
    say_vacuous,
    text_ids,
)

# Option: (its default, with --quick).
_DEFAULTS = {
    "lengths": ("4k", "2k"),
    "samples": (10, 1),
    "depths": (5, 3),
    "passages": (4, 1),
    "tokens": (64, 32),
    "answers": (1, 1),
    "answer_tokens": ("4k", "96"),
    "window": (256, 32),
}
_QUICK_FAMILIES = ("niah_single_2", "niah_multikey_1", "vt")
_QUICK_ROOM = 32


def _option(name: str, help: str, **kwargs) -> typer.models.OptionInfo:
    usual, quick = _DEFAULTS[name]
    return typer.Option(help=help, show_default=f"{usual}; --quick: {quick}", **kwargs)


@dataclass(frozen=True)
class AllOptions(RunOptions):
    """As every task's, but the default caches are those of every method."""

    cache: Annotated[
        list[str],
        typer.Option(
            help="As in the other commands, may be repeated; full attention is always among them. Default: the default "
            "configuration of each method.",
            show_default=False,
        ),
    ] = ()


@one_line_errors
@takes(AllOptions)
def everything(
    model: Model,
    lengths: Annotated[str | None, _option("lengths", "Tokens of prompts, as 4k,16k,32k.")] = None,
    samples: Annotated[
        int | None, _option("samples", "Prompts of each family and task, for each length.", min=1)
    ] = None,
    families: Annotated[
        str | None, typer.Option(help="Of RULER, comma-separated; default: all (--quick: three).", show_default=False)
    ] = None,
    depths: Annotated[int | None, _option("depths", "Of the needle, from the first to the last token.", min=2)] = None,
    passages: Annotated[int | None, _option("passages", "Of held-out text, for each length.", min=1)] = None,
    tokens: Annotated[int | None, _option("tokens", "Held-out tokens of a passage.", min=1)] = None,
    answers: Annotated[int | None, _option("answers", "Long answers for each length.", min=1)] = None,
    answer_tokens: Annotated[str | None, _option("answer_tokens", "Of a long answer.")] = None,
    window: Annotated[int | None, _option("window", "Tokens of each part of a long answer.", min=1)] = None,
    only: Annotated[
        str | None,
        typer.Option(help="Comma-separated: ruler, needle, tasks, text, output, longbench.", show_default="all"),
    ] = None,
    longbench: Annotated[
        str | None,
        typer.Option(
            help="LongBench, too: its dataset on the hub, or a directory with TASK.jsonl. Longer prompts than the "
            "longest of --lengths lose their middle.",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few and short samples: minutes on a CPU.")] = False,
    question_steps: QuestionSteps = None,
    chat: Chat = None,
    text_file: TextFile = None,
    seed: Seed = 0,
    *,
    options: AllOptions,
) -> None:
    """The whole table: RULER, needles, tasks, held-out text, long output, LongBench if asked; report.html and .md."""
    from .. import ruler, ruler_probe, whole_table
    from ..extra import needs
    from ..records import Results

    given = {
        "lengths": lengths,
        "samples": samples,
        "depths": depths,
        "passages": passages,
        "tokens": tokens,
        "answers": answers,
        "answer_tokens": answer_tokens,
        "window": window,
    }
    chosen = {name: pair[quick] if given[name] is None else given[name] for name, pair in _DEFAULTS.items()}
    sizes, answer = parse_lengths(chosen["lengths"]), parse_tokens(str(chosen["answer_tokens"]))
    wanted = parse_names(only, whole_table.PARTS, "part")
    checks.longbench_part(only, wanted, longbench)
    if longbench is not None:
        needs("LongBench", "datasets")
    caches = caches_of(options.cache) if options.cache else whole_table.default_caches()
    caches = [*caches_of(["full"]), *(spec for spec in caches if not spec.full)]
    short = Path(model.rstrip("/")).name
    out = options.out or Path("eval-results") / f"all-{short}"

    parse_names(families, (*ruler.FAMILIES, *ruler_probe.FAMILIES), "family")  # which of both: decided with the model
    loaded = Loaded(model, options)
    probe = loaded.probe
    known = ruler_probe.FAMILIES if probe else ruler.FAMILIES
    if families is None and quick and not probe:
        families = ",".join(_QUICK_FAMILIES)
    plan = whole_table.Plan(
        lengths=tuple(sizes),
        samples=chosen["samples"],
        families=tuple(parse_names(families, known, "family")),
        depths=chosen["depths"],
        passages=chosen["passages"],
        held=chosen["tokens"],
        answers=chosen["answers"],
        answer=answer,
        window=chosen["window"],
        seed=seed,
        steps=loaded.steps(question_steps),
        chat=loaded.chat(chat),
        batch=options.batch,
        longbench=longbench,
        longbench_length=max(sizes),
        room=_QUICK_ROOM if quick else None,
    )
    if probe:
        if only is not None and not set(wanted) - {"tasks", "longbench"}:
            raise CommandError("a probe model knows no words: it has no part but ruler, needle, text and output")
        note("a probe model knows no words: tasks and LongBench are left out")
    loaded.check(sizes, answer if "output" in wanted else 0)
    words = text_ids(loaded.tokenizer, text_file)
    text = text_file and str(text_file)
    made = whole_table.parts(loaded.model, loaded.tokenizer, words, text, plan, caches, wanted)

    about = {
        "model": f"{model} ({options.dtype.value})",
        "caches": ", ".join(spec.name for spec in caches),
        "prompts": f"{', '.join(f'{n:,}' for n in sizes)} tokens; {plan.samples} of each family and task, seed {seed}; "
        + ("chat template" if plan.chat else "plain text"),
        "questions": f"prefilled, and with the last {plan.steps} tokens of the prompt as decode steps",
        "machine": f"{device_name()}; {versions()}; commit {commit()}",
    }
    sections = []
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    total = sum(part.pairs * part.cost for part in made) * len(caches)
    with messages.progress("all", total, *columns, TimeRemainingColumn()) as advance:
        for number, part in enumerate(made, 1):
            advance(0, f"{part.name} ({number} of {len(made)})")
            settings = {"task": f"all {part.name}", "model": model, "dtype": options.dtype.value, **part.settings}
            with Results(out / part.name, settings) as held:
                part.run(held, lambda n, part=part: advance(n * part.cost))
                held.write(part.measures, f"{part.title}, {short}")
                if options.rows is not None:
                    append_rows(options.rows, held.rows(part.measures, short))
                sections.append(_section(part, held, caches, sizes))
            _write(out, short, about, sections)
    _, markdown = _write(out, short, about, sections)
    # A terminal has room for the summary; the first section follows it.
    results.print(markdown.split(f"\n## {sections[0].title}\n", 1)[0].rstrip(), markup=False)
    say_vacuous(caches, (figure for section in sections for figure in section.figures))
    note(f"written to {out}: report.html, report.md; a directory a part with results.md, results.csv, samples.jsonl")


def _section(part, held, caches, lengths):
    """The report's section for a part, with the caches and lengths of this run."""
    from ..report import Section

    names = {spec.name for spec in caches}
    figures = [f for f in held.figures(part.measures) if f.cache in names and f.length in (0, *lengths)]
    return Section(part.name, part.title, part.measures, part.notes, figures)


def _write(out: Path, short: str, about: dict[str, str], sections: list) -> tuple[str, str]:
    """Write the report of the parts that are done."""
    from .. import report

    title = f"Sparse caches on {short}"
    about = {**about, "date": datetime.date.today().isoformat()}
    pages = report.as_html(title, about, sections), report.as_markdown(title, about, sections)
    for name, page in zip(("report.html", "report.md"), pages):
        replace_text(out / name, page)
    return pages
