"""``hf-sparsekv eval all``: the whole table for one model, resumable, with a report."""

from __future__ import annotations

import datetime
from pathlib import Path

from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hf_sparsekv.cli.output import CommandError, messages, note, results
from hf_sparsekv.results import append_rows, commit, device_name, versions
from hf_sparsekv.whole_file import replace_text
from hf_sparsekv_cli import checks
from hf_sparsekv_cli.evaluate import AllOptions, TableOptions
from hf_sparsekv_cli.values import parse_lengths, parse_names, parse_tokens

from .. import report, ruler, ruler_probe, whole_table
from ..extra import needs
from ..records import Results
from .evaluate_run import Loaded, caches_of, say_vacuous, text_ids

_QUICK_FAMILIES = ("niah_single_2", "niah_multikey_1", "vt")
_QUICK_ROOM = 32


def everything(*, model: str, table: TableOptions, options: AllOptions) -> None:
    """The whole table: RULER, needles, tasks, held-out text, long output, LongBench if asked; report.html and .md."""
    chosen, longbench = table.chosen, table.longbench
    sizes, answer = parse_lengths(chosen["lengths"]), parse_tokens(chosen["answer_tokens"])
    wanted = parse_names(table.only, whole_table.PARTS, "part")
    checks.longbench_part(table.only, wanted, longbench)
    if longbench is not None:
        needs("LongBench", "datasets")
    caches = caches_of(options.cache) if options.cache else whole_table.default_caches()
    caches = [*caches_of(["full"]), *(spec for spec in caches if not spec.full)]
    short = Path(model.rstrip("/")).name
    out = options.out or Path("eval-results") / f"all-{short}"

    every = (*ruler.FAMILIES, *ruler_probe.FAMILIES)
    parse_names(table.families, every, "family")  # which of both: decided with the model
    loaded = Loaded(model, options)
    if loaded.probe:
        if table.only is not None and not set(wanted) - {"tasks", "longbench"}:
            raise CommandError("a probe model knows no words: it has no part but ruler, needle, text and output")
        note("a probe model knows no words: tasks and LongBench are left out")
    plan = _plan(loaded, table, options.batch, sizes, answer)
    loaded.check(sizes, answer if "output" in wanted else 0)
    words = text_ids(loaded.tokenizer, table.text_file)
    text = table.text_file and str(table.text_file)
    made = whole_table.parts(loaded.model, loaded.tokenizer, words, text, plan, caches, wanted)

    about = {
        "model": f"{model} ({options.dtype.value})",
        "caches": ", ".join(spec.name for spec in caches),
        "prompts": f"{', '.join(f'{n:,}' for n in sizes)} tokens; {plan.samples} of each family and task, seed "
        f"{plan.seed}; {'chat template' if plan.chat else 'plain text'}",
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


def _plan(loaded: Loaded, table: TableOptions, batch: int, sizes: list[int], answer: int) -> whole_table.Plan:
    """The plan of a loaded model's table: prompts of ``sizes`` tokens, long answers of ``answer``."""
    known = ruler_probe.FAMILIES if loaded.probe else ruler.FAMILIES
    families, chosen = table.families, table.chosen
    if families is None and table.quick and not loaded.probe:
        families = ",".join(_QUICK_FAMILIES)
    return whole_table.Plan(
        lengths=tuple(sizes),
        samples=chosen["samples"],
        families=tuple(parse_names(families, known, "family")),
        depths=chosen["depths"],
        passages=chosen["passages"],
        held=chosen["tokens"],
        answers=chosen["answers"],
        answer=answer,
        window=chosen["window"],
        seed=table.seed,
        steps=loaded.steps(table.question_steps),
        chat=loaded.chat(table.chat),
        batch=batch,
        longbench=table.longbench,
        longbench_length=max(sizes),
        room=_QUICK_ROOM if table.quick else None,
    )


def _section(part, held, caches, lengths):
    """The report's section for a part, with the caches and lengths of this run."""
    names = {spec.name for spec in caches}
    figures = [f for f in held.figures(part.measures) if f.cache in names and f.length in (0, *lengths)]
    return report.Section(part.name, part.title, part.measures, part.notes, figures)


def _write(out: Path, short: str, about: dict[str, str], sections: list) -> tuple[str, str]:
    """Write the report of the parts that are done."""
    title = f"Sparse caches on {short}"
    about = {**about, "date": datetime.date.today().isoformat()}
    pages = report.as_html(title, about, sections), report.as_markdown(title, about, sections)
    for name, page in zip(("report.html", "report.md"), pages):
        replace_text(out / name, page)
    return pages
