"""``hf-sparsekv eval all``: the whole table for one model, resumable, with a report."""

from __future__ import annotations

import datetime
from pathlib import Path

from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hf_sparsekv.cli.output import CommandError, messages, note, results
from hf_sparsekv.results import append_rows, commit, device_name, versions
from hf_sparsekv.whole_file import replace_text
from hf_sparsekv_cli import checks
from hf_sparsekv_cli.evaluate import DEFAULTS, AllOptions
from hf_sparsekv_cli.values import parse_lengths, parse_names, parse_tokens

from .evaluate_run import (
    Loaded,
    caches_of,
    say_vacuous,
    text_ids,
)

_QUICK_FAMILIES = ("niah_single_2", "niah_multikey_1", "vt")
_QUICK_ROOM = 32


def everything(
    *,
    model: str,
    lengths: str | None,
    samples: int | None,
    families: str | None,
    depths: int | None,
    passages: int | None,
    tokens: int | None,
    answers: int | None,
    answer_tokens: str | None,
    window: int | None,
    only: str | None,
    longbench: str | None,
    quick: bool,
    question_steps: int | None,
    chat: bool | None,
    text_file: Path | None,
    seed: int,
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
    chosen = {name: pair[quick] if given[name] is None else given[name] for name, pair in DEFAULTS.items()}
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
